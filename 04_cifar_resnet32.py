"""A ResNet-32 with every weight from one vector: 466,906 weights, batch norm's gamma and beta too.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[outputs of T(.; G(z)) on shared images]

Section "CIFAR-10" of the paper, the ResNet-32 row of its table, and distillation. New against
LeNet: identity skips in G, one generator for all layers of a stage, and batch norm in the target
network: moments of its batch in training, and one pass over training images to give a generated
(or averaged) network its own. Columns (a) to (d) as in 03, whose --compare reads these runs too. An
hour and a half on one CPU core, and, with the paper's 10 networks of 512 images, not run here:

    python 04_cifar_resnet32.py --column c    # 81 % from a vote of ten
    python 04_cifar_resnet32.py --networks 10 --images 512 --steps 60000 --amp
    torchrun --nproc_per_node=2 04_cifar_resnet32.py --networks 5 --images 512 --steps 60000 --amp
"""

import argparse
import csv
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision import datasets
from tqdm import tqdm

from common import batch_norm, conv2d, each_network, knn_entropy, linear

NAME = "04_cifar_resnet32"
CLASSES = dict(cifar10=10, cifar100=100)
LOG_EVERY = 10
NUMBERS = [1, 2, 5, 10, 20, 50, 100, 1000, 10000]  # of networks, in the figure of distillation
# What the columns do not share: (a) and (b) train one network by SGD, (c) and (d) a hypernetwork.
SGD = dict(steps=15600, lr=0.05, networks=1, images=64, validate_every=1000)
HYPERNET = dict(steps=3900, lr=1e-4, lam=5e3, networks=4, images=64, validate_every=500)
COLUMNS = dict(a=SGD, b=SGD | dict(lr=0.02), c=HYPERNET, d=HYPERNET)
QUICK = dict(steps=20, images=16, validate_every=10, tested=10, averaged=20, calibration=200)


# ---- Arguments -----------------------------------------------------------------------------------


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but for those that depend on other flags: their help names them."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return float(text)


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog=f"{NAME}.py",
        description=__doc__.splitlines()[0],
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--column", choices=[*COLUMNS, "all"], default="d", help="of the paper's table")
    add("--dataset", choices=list(CLASSES), default="cifar10", help="images")
    add("--diversity", choices=["outputs", "ensemble", "none"], default="outputs", help="of d")
    add("--start", choices=["copies", "random"], default="copies", help="of the hypernetwork")
    add("--steps", type=count, help="training steps; 15600 (a, b) or 3900 (c, d)")
    add("--lr", type=positive, help="of SGD, 0.05 (a) or 0.02 (b), or of Adam, 1e-4 (c, d)")
    add("--weight-decay", type=float, default=5e-4, help="of SGD")
    add("--lam", type=positive, help="weight of accuracy; 5e3")
    add("--ramp", type=float, default=0.5, help="share of steps until diversity has full weight")
    add("--networks", type=count, help="samples of z in a step, on each GPU; 4")
    add("--images", type=count, help="images per network in a step; 64")
    add("--shared", type=count, help="images all networks see; a quarter of --images-per-forward")
    add("--images-per-forward", type=count, default=64, help="bounds memory; batch norm sees these")
    add("--amp", action="store_true", help="target networks in bfloat16")
    add("--crop", type=int, default=4, help="pixels that training images move at most")
    add("--seed", type=int, default=0, help="random seed")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--data", type=Path, default=Path("data"), help="folder of CIFAR; filled if it is empty")
    add("--fake-data", action="store_true", help="made-up images, to try the code without CIFAR")
    add("--out", type=Path, default=Path("runs") / NAME, help="a run has its folder in this one")
    add("--resume", action="store_true", help="go on with the run in its folder")
    add("--checkpoint", type=Path, help="evaluate this trained hypernetwork, without training")
    add("--validate-every", type=count, help="steps between two validations; 1000 or 500")
    add("--tested", type=count, default=20, help="networks to test, by tens and all together")
    add("--calibration", type=count, help="images for moments; all on CUDA, 5000 on the CPU")
    add("--averaged", type=count, default=10000, help="networks averaged into one")
    add("--sigma", type=positive, default=1.0, help="scale of z when networks are sampled")
    add("--quick", action="store_true", help="a preset of small costs: " + str(QUICK))
    args = parser.parse_args(argv)
    for preset in COLUMNS.get(args.column, {}), QUICK if args.quick else {}:
        parser.set_defaults(**preset)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu, or install CUDA")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"device: {args.device}")
    # Set by torchrun.
    args.rank, args.ranks = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1)))
    args.calibration = args.calibration or (5000 if args.device == "cpu" else 45000)
    if args.column == "d" and args.diversity == "none":
        parser.error("--diversity none is --column c")
    args.diversity = args.diversity if args.column == "d" else "none"
    if args.column in ("a", "b"):
        args.lam, args.start = 1.0, "copies"  # there is no diversity, and no hypernetwork
        if args.networks > 1:
            parser.error(f"--networks: column {args.column} trains one network")
    elif args.diversity != "none" and args.networks * args.ranks < 2:
        parser.error("--networks must be at least 2: diversity needs a nearest other network")
    if args.column != "all":
        args.images_per_forward = min(args.images_per_forward, args.images)
    if args.diversity == "none":
        args.shared = 0
    elif args.shared is None:
        args.shared = max(1, args.images_per_forward // 4)
    if args.shared > args.images_per_forward:
        parser.error("--shared cannot exceed --images-per-forward")
    if not 0 <= args.ramp <= 1:
        parser.error("--ramp must lie between 0 and 1")
    if args.crop < 0 or args.weight_decay < 0:
        parser.error("--crop and --weight-decay cannot be negative")
    if args.tested < 10:
        parser.error("--tested must be at least 10, the size of the paper's ensembles")
    if args.checkpoint and not args.checkpoint.is_file():
        parser.error(f"--checkpoint {args.checkpoint}: no such file")
    if args.checkpoint:
        args.folder = args.out / "evaluation"
    else:
        suffix = "" if args.diversity in ("outputs", "none") else f"_{args.diversity}"
        suffix += "_random" if args.start == "random" else ""
        args.folder = args.out / f"{args.dataset}_{args.column}{suffix}"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.out):
            pass
    except OSError as error:
        parser.error(f"--out {args.out}: cannot write there ({error.strerror})")
    return args


# ---- Data ----------------------------------------------------------------------------------------


def load_data(args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Normalised images (B, 3, 32, 32) and labels (B,) of the splits train, val and test, all on
    the training device: 45,000, 5,000 and 10,000 of CIFAR."""
    if args.fake_data:
        x, y = (part.split([2000, 500, 500]) for part in fake_data(3000, CLASSES[args.dataset]))
        splits = dict(zip(("train", "val", "test"), zip(x, y)))
    else:
        cifar = dict(cifar10=datasets.CIFAR10, cifar100=datasets.CIFAR100)[args.dataset]
        try:
            train, test = (cifar(args.data, train=t, download=True) for t in (True, False))
        except Exception as error:
            sys.exit(
                f"no {args.dataset} in {args.data} and no download ({type(error).__name__}): "
                f"unpack {cifar.filename} in {args.data}, or try the code with --fake-data"
            )
        (x, y), (x_test, y_test) = (
            (torch.from_numpy(split.data).float().div_(255), torch.tensor(split.targets))
            for split in (train, test)
        )
        mean, std = x.mean(dim=(0, 1, 2)), x.std(dim=(0, 1, 2))  # of each colour
        x, x_test = (part.sub_(mean).div_(std).permute(0, 3, 1, 2) for part in (x, x_test))
        splits = dict(train=(x[5000:], y[5000:]), val=(x[:5000], y[:5000]), test=(x_test, y_test))
    return {k: (x.to(args.device), y.to(args.device)) for k, (x, y) in splits.items()}


def fake_data(number: int, classes: int) -> tuple[Tensor, Tensor]:
    """A smooth random pattern for each class, shifted by up to two pixels, plus noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, 3, 6, 6, generator=generator)
    crops = all_crops(F.interpolate(patterns, 32, mode="bicubic", align_corners=False), 2)
    y, row, column = (torch.randint(k, (number,), generator=generator) for k in crops.shape[:3])
    return crops[y, row, column] + 0.5 * torch.randn(number, 3, 32, 32, generator=generator), y


def all_crops(x: Tensor, pixels: int) -> Tensor:
    """(B, 3, 32, 32) -> (B, s, s, 3, 32, 32): every image in all s = 2 * pixels + 1 positions per
    direction. A view of the padded images, channels last, so that to pick crops is to copy rows."""
    rows = x.movedim(1, -1).flatten(2)  # (B, 32, 32 * 3)
    rows = F.pad(rows, [3 * pixels, 3 * pixels, pixels, pixels])
    windows = rows.unfold(1, 32, 1).unfold(2, 96, 3)  # (B, s, s, 32, 96)
    return windows.unflatten(-1, (32, 3)).movedim(-1, -3)


def seeded(args: argparse.Namespace, step: int, rank: int) -> torch.Generator:
    """The random numbers of a step depend on seed, step and rank alone: --resume needs no state."""
    return torch.Generator(args.device).manual_seed((args.seed * 1_000_003 + step) * 1009 + rank)


def draw_batch(
    crops: Tensor, y: Tensor, args: argparse.Namespace, step: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random images (N, B, 3, 32, 32) and labels (N, B). The first `shared` are the same for all
    networks of all ranks, to compare their answers; the others differ, as in the paper."""
    same = seeded(args, step, rank=1008)  # a stream for all ranks
    choices = []
    for k in crops.shape[:3]:
        own = (args.networks, args.images)
        choice = torch.randint(k, own, device=y.device, generator=generator)
        shared = torch.randint(k, (args.shared,), device=y.device, generator=same)
        choice[:, : args.shared] = shared
        choices.append(choice)
    index, row, column = choices
    return crops[index, row, column], y[index]


# ---- Target network ------------------------------------------------------------------------------

STAGES = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]  # channels in, filters, stride of the first block
BLOCKS = 5  # in a stage, of two convolutions each: 1 + 3 * 5 * 2 + 1 = 32 layers, and 2 projections


def layer_sizes() -> list[list[int]]:
    """K + 2 of each convolution (gamma and beta are the last two columns), in the order in which
    the network uses them: the stem, then the three stages."""
    sizes = [[27 + 2]]
    for channels, filters, stride in STAGES:
        convolutions = [9 * channels] + [9 * filters] * (2 * BLOCKS - 1)
        projection = [channels] if stride > 1 else []
        sizes.append([k + 2 for k in projection + convolutions])
    return sizes


def target_network(
    x: Tensor, theta: list[Tensor], moments: Tensor | None = None, record: list | None = None
) -> Tensor:
    """ResNet-32, (N, B, 3, 32, 32) -> logits (N, B, classes). `theta` holds the convolutions with
    their batch norm (N, F, K + 2) and the last layer (N, classes, 65). Batch norm takes its moments
    from its batch, or from `moments` (N, 1232, 2): mean and variance. To `record` it appends the
    means of its inputs and of their squares."""
    layers = iter(theta)
    given = iter(() if moments is None else moments.split([t.shape[1] for t in theta[:-1]], dim=1))

    def conv_norm(x: Tensor, kernel_size: int = 3, stride: int = 1) -> Tensor:
        layer = next(layers)
        x = conv2d(x, layer[..., :-2], kernel_size, stride, kernel_size // 2, bias=False)
        mean, var = (None, None) if moments is None else next(given).unbind(dim=-1)
        if record is not None:
            var, mean = torch.var_mean(x, dim=(1, 3, 4), correction=0)
            record.append(torch.stack([mean, var + mean.square()], dim=-1))
        return batch_norm(x, layer[..., -2], layer[..., -1], mean, var)

    x = conv_norm(x).relu()
    for _, _, stride in STAGES:
        for block in range(BLOCKS):
            step = stride if block == 0 else 1
            shortcut = conv_norm(x, kernel_size=1, stride=step) if step > 1 else x
            y = conv_norm(x, stride=step).relu()
            x = (conv_norm(y) + shortcut).relu()
    return linear(x.mean(dim=(-2, -1)), next(layers))


def calibrated_network(x: Tensor, theta_and_moments: list[Tensor]) -> Tensor:
    """Inference mode."""
    *theta, moments = theta_and_moments
    return target_network(x, theta, moments)


def batch_means(x: Tensor, theta: list[Tensor]) -> Tensor:
    """(N, 1232, 2): means of the inputs of each batch norm, and of their squares."""
    record = []
    target_network(x, theta, record=record)
    return torch.cat(record, dim=1)


@torch.no_grad()
def recalibrate(theta: list[Tensor], x: Tensor, images: int = 500) -> Tensor:
    """Moments (N, 1232, 2) of N networks from one pass over images (B, 3, 32, 32). A portion of
    images passes on through the network normalised by its own moments, as in training."""
    n = len(theta[0])
    if n > 10:  # few at a time
        tens = zip(*(layer.split(10) for layer in theta))
        return torch.cat([recalibrate(list(ten), x, images) for ten in tens])
    sums = (
        len(p) * each_network(batch_means, p.expand(n, *p.shape), theta) for p in x.split(images)
    )
    mean, square = (sum(sums) / len(x)).unbind(dim=-1)
    return torch.stack([mean, (square - mean.square()).clamp_min(0)], dim=-1)


class OneNetwork(nn.Module):
    """The target network alone, for SGD: columns (a) and (b)."""

    def __init__(self, classes: int):
        super().__init__()
        theta = []
        for filters, sizes in zip([16, 16, 32, 64], layer_sizes()):
            for k in sizes:
                layer = torch.randn(1, filters, k) * (2 / (k - 2)) ** 0.5
                layer[..., -2], layer[..., -1] = 1, 0  # gamma and beta
                theta.append(layer)
        last = torch.cat([torch.randn(1, classes, 64) / 8, torch.zeros(1, classes, 1)], dim=-1)
        self.theta = nn.ParameterList([*theta, last])

    def noise(self, n: int, generator: torch.Generator | None = None) -> None:
        return None

    def forward(self, z: None) -> list[Tensor]:
        return list(self.theta)


# ---- Hypernetwork --------------------------------------------------------------------------------


class MLP(nn.Module):
    """Linear layers without biases, leaky ReLU between them, the identity added around the square
    one in the middle; the output is as large as the input."""

    def __init__(self, fan_in: int, width: int, fan_out: int):
        super().__init__()
        self.first = nn.Linear(fan_in, width, bias=False)
        self.middle = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, fan_out, bias=False)
        nn.init.normal_(self.first.weight, std=(2 / fan_in) ** 0.5)
        nn.init.normal_(self.middle.weight, std=width**-0.5)
        nn.init.normal_(self.last.weight, std=(2 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(x), 0.05)
        x = x + F.leaky_relu(self.middle(x), 0.05)
        return self.last(x)


class Hypernetwork(nn.Module):
    """G: noise z (N, 500) -> weights of N target networks, a list of (N, F, K + 2) convolutions
    with gamma and beta, and the last layer.

    A code stands for a filter index of a stage: its generator emits that filter in all convolutions
    of the stage and in the projection. start "random": 14,115,200 parameters. start "copies": 1,032
    more, the identities of the filters, as in 03.
    """

    noise_size = 500
    codes = [16, 16, 32, 64, 1]  # stem, three stages, last layer
    code_size = 8

    def __init__(self, classes: int = 10, start: str = "copies"):
        super().__init__()
        self.classes, self.sizes = classes, layer_sizes()
        self.extractor = MLP(self.noise_size, 1000, self.code_size * sum(self.codes))
        outputs = [sum(sizes) for sizes in self.sizes] + [65 * classes]
        self.generators = nn.ModuleList(MLP(self.code_size, 800, size) for size in outputs)
        if start == "copies":
            last = self.extractor.last
            last.bias = nn.Parameter(torch.randn(last.out_features))
            nn.init.normal_(last.weight, std=0.2 * (2 * last.in_features) ** -0.5)
        # The usual size of a weight with fan-in K; gamma near 1, beta near 0.
        for i, sizes in enumerate(self.sizes):
            scale = [torch.tensor([(2 / (k - 2)) ** 0.5] * (k - 2) + [0.1, 0.1]) for k in sizes]
            offset = [torch.tensor([0.0] * (k - 2) + [1.0, 0.0]) for k in sizes]
            self.register_buffer(f"scale{i}", torch.cat(scale), persistent=False)
            self.register_buffer(f"offset{i}", torch.cat(offset), persistent=False)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.extractor.first.weight.device
        return torch.randn(n, self.noise_size, device=device, generator=generator)

    def forward(self, z: Tensor) -> list[Tensor]:
        codes = self.extractor(z).unflatten(1, (-1, self.code_size)).split(self.codes, dim=1)
        theta = []
        for i, (generator, code) in enumerate(zip(self.generators, codes)):
            filters = generator(code)  # (N, F, weights of a filter in all layers of the stage)
            if i < len(self.sizes):
                filters = filters * getattr(self, f"scale{i}") + getattr(self, f"offset{i}")
                theta += filters.split(self.sizes[i], dim=-1)
        return [*theta, filters.unflatten(-1, (self.classes, 65))[:, 0] / 8]


# ---- Training ------------------------------------------------------------------------------------


def gather(outputs: Tensor) -> Tensor:
    """The outputs of the networks of all ranks, with gradient."""
    if not dist.is_initialized():
        return outputs
    return torch.cat(torch.distributed.nn.functional.all_gather(outputs.contiguous()))


def measure_diversity(kind: str, logits: Tensor, y: Tensor) -> Tensor:
    """How different are N networks? From their logits (N, B, classes) on the same images with
    labels y (B,). Both measures carry the factor 500 = dim z of the entropy."""
    dim = Hypernetwork.noise_size
    if kind == "outputs":
        return knn_entropy(gather(logits.softmax(dim=-1).flatten(1)), dim)
    if kind == "ensemble":  # the loss of the averaged prediction
        log_p = gather(logits.log_softmax(dim=-1))
        return -dim * F.nll_loss(log_p.logsumexp(dim=0) - math.log(len(log_p)), y)
    return logits.new_zeros(())


def training_step(
    model: nn.Module, z: Tensor, x: Tensor, y: Tensor, args: argparse.Namespace, ramp: float = 1.0
) -> tuple[Tensor, ...]:
    """Images (N, B, 3, 32, 32), labels (N, B): network n sees batch n, `images_per_forward` at a
    time. Runs backward too: gradients add up in the generated weights, portion by portion, and pass
    through the hypernetwork once. Diversity has its full weight when ramp is 1."""
    theta = model(z)
    leaves = [layer.detach().requires_grad_() for layer in theta]
    loss = loss_acc = acc = 0
    portions = zip(x.split(args.images_per_forward, dim=1), y.split(args.images_per_forward, dim=1))
    for portion, (images, labels) in enumerate(portions):
        with torch.autocast(x.device.type, torch.bfloat16) if args.amp else nullcontext():
            logits = each_network(target_network, images, leaves)  # (N, B, classes)
        logits = logits.to(x.dtype)  # after bfloat16
        part_acc = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        part = args.lam * part_acc / y.numel()
        if portion == 0:
            shared = slice(args.shared)
            diversity = measure_diversity(args.diversity, logits[:, shared], labels[0, shared])
            part = part - ramp * diversity
        part.backward()
        loss, loss_acc = loss + part.detach(), loss_acc + part_acc.detach() / y.numel()
        acc = acc + (logits.argmax(dim=-1) == labels).float().sum() / y.numel()
    torch.autograd.backward(theta, [leaf.grad for leaf in leaves])
    return loss, loss_acc, diversity.detach(), acc


def learning_rate(args: argparse.Namespace, step: int) -> float:
    warm_up = min(200, args.steps // 5 + 1)
    if args.column == "b":
        return args.lr * min(1.0, (step + 1) / warm_up)
    return args.lr * min((step + 1) / warm_up, (args.steps - step) / max(1, args.steps - warm_up))


def in_chain(steps: int, done: int) -> bool:
    """Is the network after `done` steps one of the ten of column (b)? They come from the second
    half of the chain, equally far apart, the last step among them."""
    gap = max(1, steps // 20)
    return (steps - done) % gap == 0 and (steps - done) // gap < 10


def train(args: argparse.Namespace, data: dict) -> tuple[nn.Module, list[Tensor], list, dict]:
    """Returns the model, the weights of the ten networks of column (b), the log, and the cost."""
    args.folder.mkdir(exist_ok=True)
    torch.manual_seed(args.seed)
    model = make_model(settings(args)).to(args.device)
    parallel = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    if args.column in "ab":
        sgd = dict(momentum=0.9, nesterov=True, weight_decay=args.weight_decay, fused=True)
        optimizer = torch.optim.SGD(model.parameters(), args.lr, **sgd)
    else:
        optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    file, first, log, seconds, chain = args.folder / "checkpoint.pt", 0, [], 0.0, []
    state = load_checkpoint(file, args) if file.exists() else None  # refuses another run's file
    if state and not args.resume:
        sys.exit(f"{file} is at step {state['step']}: --resume goes on, without it remove the file")
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, log, seconds = state["step"], state["log"], state["seconds"]
        chain = [[filters.to(args.device) for filters in theta] for theta in state["chain"]]
        print(f"resuming at step {first} of {args.steps}")
    if args.rank == 0:
        (args.folder / "config.json").write_text(json.dumps(vars(args), indent=1, default=str))

    x, y = data["train"]
    crops = all_crops(torch.cat([x, x.flip(-1)]), args.crop)  # mirror images are images too
    y = y.repeat(2)
    start = time.perf_counter() - seconds
    quiet = dict(disable=True) if args.rank > 0 else {}
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, mininterval=2, **quiet)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        generator = seeded(args, step, args.rank)
        z = model.noise(args.networks, generator)
        images, labels = draw_batch(crops, y, args, step, generator)
        # Learn first, spread later: networks that are spread while they know nothing stay useless.
        ramp = min(1.0, step / max(1, args.ramp * args.steps))
        optimizer.zero_grad()
        loss, loss_acc, diversity, acc = training_step(parallel, z, images, labels, args, ramp)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5 * args.lam)  # against rare spikes
        optimizer.step()

        done = step + 1
        validating = done % args.validate_every == 0 or done == args.steps
        if args.column == "b" and in_chain(args.steps, done):
            chain.append([filters.detach().clone() for filters in model(None)])
        if args.rank > 0:
            continue
        if done % LOG_EVERY == 0 or validating:
            row = dict(loss=loss, loss_acc=loss_acc, diversity=diversity, acc=acc)
            row = dict(step=done) | {name: value.item() for name, value in row.items()}
            if not math.isfinite(row["loss"] + norm.item()):
                good = f"; {file} is the last good checkpoint" if file.exists() else ""
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr{good}")
            log.append(row)
            bar.set_postfix({k: f"{row[k]:.4g}" for k in ("loss_acc", "acc", "diversity")})
        if validating:
            row = validate(model, data)
            log.append(dict(step=done) | row)
            numbers = (f"{name[4:]} {value:.4f}" for name, value in row.items())
            bar.write(f"step {done}: " + ", ".join(numbers))
            seconds = time.perf_counter() - start
            content = dict(settings=settings(args), step=done, log=log, seconds=seconds)
            content |= dict(model=model.state_dict(), optimizer=optimizer.state_dict())
            save(content | dict(chain=chain), file)
            write_log(log, args.folder / "log.csv")
    # In half precision, for half the size, and tested so; (b)'s networks are tested in full.
    halves = {name: tensor.half() for name, tensor in model.state_dict().items()}
    if args.rank == 0:
        save(dict(settings=settings(args), model=halves), args.folder / "model.pt")
    model.load_state_dict(halves)
    spent = dict(training_seconds=round(seconds, 1))
    spent["images_seen"] = args.steps * args.networks * args.images * args.ranks
    return model, [torch.cat(filters) for filters in zip(*chain)], log, spent


def make_model(settings: dict) -> nn.Module:
    classes = CLASSES[settings["dataset"]]
    if settings["column"] in "ab":
        return OneNetwork(classes)
    return Hypernetwork(classes, settings["start"])


def settings(args: argparse.Namespace) -> dict:
    names = "column dataset diversity start steps lr weight_decay lam ramp networks images shared"
    names += " crop seed fake_data images_per_forward amp ranks"
    return {name: getattr(args, name) for name in names.split()}


def save(content: dict, file: Path) -> None:
    """Written beside the file and then renamed: a run that dies never leaves half a file."""
    temporary = file.with_suffix(".tmp")
    torch.save(content, temporary)
    os.replace(temporary, file)


def load_checkpoint(file: Path, args: argparse.Namespace | None = None) -> dict:
    """With `args`, the checkpoint must have been made with the same settings."""
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
        theirs = state["settings"]
        make_model(theirs).load_state_dict(state["model"])
    except Exception as error:
        sys.exit(f"{file} is missing, damaged or not from this script ({type(error).__name__})")
    for name, value in settings(args).items() if args else ():
        if theirs.get(name) != value:
            flag = name.replace("_", "-")
            remedy = "use that or another --out, or remove the file"
            sys.exit(f"{file} has --{flag} {theirs.get(name)}, not {value}: {remedy}")
    return state


def load(file: str | Path, device: str = "cpu") -> tuple[nn.Module, dict]:
    """A trained model and the settings it was trained with."""
    state = load_checkpoint(Path(file))
    model = make_model(state["settings"])
    model.load_state_dict(state["model"])
    return model.to(device), state["settings"]


def write_log(log: list[dict], file: Path) -> None:
    names = list(dict.fromkeys(name for row in log for name in row))
    with open(file, "w", newline="") as handle:
        writer = csv.DictWriter(handle, names)
        writer.writeheader()
        writer.writerows(log)


# ---- Evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def predict(theta: list[Tensor], moments: Tensor, x: Tensor) -> Tensor:
    """Probabilities (N, B, classes) of N networks on the same images (B, 3, 32, 32), few at a time
    so that the activations stay small: on the CPU a network runs alone, elsewhere all together."""
    images = 250 if x.device.type == "cpu" else max(1, 10000 // len(theta[0]))
    logits = [
        each_network(calibrated_network, part.expand(len(moments), *part.shape), [*theta, moments])
        for part in x.split(images)
    ]
    return torch.cat(logits, dim=1).softmax(dim=-1)


def majority(votes: Tensor, classes: int) -> Tensor:
    """(N, B) -> (B,); ties go to the smallest class."""
    return torch.stack([(votes == c).sum(dim=0) for c in range(classes)]).argmax(dim=0)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    n = len(votes)
    same = sum((votes == vote).float().mean() for vote in votes)  # pairs with itself included
    return 1 - ((same - 1) / (n - 1)).item() if n > 1 else 0.0


def accuracy(predicted: Tensor, y: Tensor) -> Tensor:
    return (predicted == y).float().mean(dim=-1)


def calibration_error(probabilities: Tensor, y: Tensor) -> Tensor:
    """Distance of confidence and accuracy, in 15 bins of confidence, weighted by their images."""
    confidence, predicted = probabilities.max(dim=-1)
    bins = (confidence * 15).long().clamp(max=14)
    gap = confidence.new_zeros(15).index_add(0, bins, confidence - (predicted == y).float())
    return gap.abs().sum() / len(y)


def ensemble(probabilities: Tensor, y: Tensor) -> Tensor:
    """Of networks' probabilities (N, B, classes): accuracy of the majority, accuracy, negative log
    likelihood and calibration error of the mean probability (4,)."""
    mean = probabilities.mean(dim=0)
    votes = majority(probabilities.argmax(dim=-1), mean.shape[-1])
    loss = F.nll_loss(mean.clamp_min(1e-12).log(), y)
    error = calibration_error(mean, y)
    return torch.stack([accuracy(votes, y), accuracy(mean.argmax(dim=-1), y), loss, error])


def evaluate(theta: list[Tensor], moments: Tensor, x: Tensor, y: Tensor) -> dict:
    """Networks one by one, in ensembles of ten (no network in two of them), and all together."""
    probabilities = predict(theta, moments, x)
    votes = probabilities.argmax(dim=-1)
    result = dict(networks=len(votes), disagreement=disagreement(votes))
    for name, size in dict(single=1, ten=10, all=len(votes)).items():
        groups = probabilities.split(size)[: max(1, len(votes) // size)]
        numbers = torch.stack([ensemble(group, y) for group in groups])  # (groups, 4)
        names = ["majority", "mean_probability", "nll", "calibration_error"]
        result |= {f"{name}_{k}": v for k, v in zip(names, numbers.mean(dim=0).tolist())}
    result["single"] = result.pop("single_majority")
    del result["single_mean_probability"]
    sizes = [n for n in NUMBERS if n <= len(votes)]
    by_size = [accuracy(majority(votes[:n], probabilities.shape[-1]), y).item() for n in sizes]
    return result | dict(sizes=sizes, majority_by_size=by_size)


@torch.no_grad()
def validate(model: nn.Module, data: dict) -> dict:
    """Ten networks of a hypernetwork, from the same z every time, or the one of SGD; on 1,000
    images, with moments from 500 others, as more would cost too much on a CPU."""
    theta = model(model.noise(10, torch.Generator(data["val"][0].device).manual_seed(1)))
    moments = recalibrate(theta, data["train"][0][:500])
    tested = evaluate(theta, moments, *(part[:1000] for part in data["val"]))
    names = dict(mean="single", majority="all_majority", mean_probability="all_mean_probability")
    names |= dict(nll="single_nll", disagreement="disagreement")
    return {f"val_{name}": tested[key] for name, key in names.items()}


@torch.no_grad()
def averages(model: nn.Module, z: Tensor, numbers: list[int]):
    """Yields (n, the mean of the weights of the networks of the first n z) for increasing n, at
    most 20 networks in memory."""
    mean, first = None, 0
    for n in numbers:
        for part in z[first:n].split(20):
            first += len(part)
            total = [filters.sum(dim=0, keepdim=True) for filters in model(part)]
            if mean is None:
                mean = [torch.zeros_like(filters) for filters in total]
            for m, t in zip(mean, total):
                m += (t - len(part) * m) / first
        yield n, mean


def distil(model: nn.Module, z: Tensor, calibration: Tensor, x: Tensor, y: Tensor) -> dict:
    """One network from the averaged weights of n samples: its accuracy, for increasing n. Averaged
    weights need moments of their own."""
    numbers = [n for n in NUMBERS if n < len(z)] + [len(z)]
    tested = [
        ensemble(predict(theta, recalibrate(theta, calibration), x), y)
        for _, theta in averages(model, z, numbers)
    ]
    _, accs, losses, errors = torch.stack(tested).T.tolist()
    return dict(numbers=numbers, accuracy=accs, nll=losses, calibration_error=errors)


# ---- Figures -------------------------------------------------------------------------------------


def plot_training(log: list[dict], title: str) -> Figure:
    steps = [row for row in log if "loss" in row]
    shown = dict(loss_acc="cross-entropy (nats)")
    if any(row["diversity"] for row in steps):
        shown["diversity"] = "diversity term, what is rewarded"
    figure = Figure(figsize=(3.7 * len(shown) + 3.7, 3.6), layout="constrained")
    *axes, validation = figure.subplots(1, len(shown) + 1)
    for ax, (name, label) in zip(axes, shown.items()):
        ax.plot([row["step"] for row in steps], [row[name] for row in steps], linewidth=0.8)
        ax.set(xlabel="training step", ylabel=label)
    rows = [row for row in log if "val_mean" in row]
    labels = dict(mean="one network")
    if any(row["val_disagreement"] for row in rows):
        labels["majority"] = "majority of the networks"
    for name, label in labels.items():
        values = [100 * row[f"val_{name}"] for row in rows]
        validation.plot([row["step"] for row in rows], values, ".-", label=label)
    validation.set(xlabel="training step", ylabel="validation accuracy (%)")
    validation.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    for ax in figure.axes:
        ax.locator_params(axis="x", nbins=5)  # long numbers would touch
    figure.suptitle(title)
    return figure


def plot_distillation(run: dict) -> Figure:
    """Accuracy against the number of networks: averaged into one, or voting."""
    figure = Figure(figsize=(5.5, 4), layout="constrained")
    ax, tested, averaged = figure.subplots(), run["tested"], run["distilled"]
    ax.plot(averaged["numbers"], 100 * torch.tensor(averaged["accuracy"]), "o-", color="C0")
    ax.plot(tested["sizes"], 100 * torch.tensor(tested["majority_by_size"]), "s--", color="C1")
    ax.axhline(100 * tested["single"], color="black", linestyle=":")
    ax.legend(["ONE network, weights averaged", "majority vote of n", "a typical member"])
    ax.set(xscale="log", xlabel="networks n", ylabel="test accuracy (%)", title=run["title"])
    return figure


# ---- Main ----------------------------------------------------------------------------------------


def provenance(argv: list[str], args: argparse.Namespace) -> dict:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # no git here
        commit = "unknown"
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return dict(
        command=" ".join(["python", f"{NAME}.py", *argv]),
        commit=commit,
        hardware=torch.cuda.get_device_name() if args.device == "cuda" else hardware,
        torch=torch.__version__,
    )


def title(used: dict) -> str:
    words = dict(a="(a) SGD", b="(b) SGD chain", c="(c) no diversity", d="(d) ")[used["column"]]
    words += used["diversity"] if used["column"] == "d" else ""
    words += ", random start" if used["start"] == "random" else ""
    words += ", CIFAR-100" if used["dataset"] == "cifar100" else ""
    return words + (", MADE-UP DATA" if used["fake_data"] else "")


def peak_memory(device: str) -> int:
    """Bytes: of the accelerator's memory, or of this process's (on Linux)."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: list[str] | None = None) -> dict:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.column == "all":
        columns = [[*argv, "--device", args.device, "--column", column] for column in COLUMNS]
        folders = [str(parse_args(column).folder) for column in columns]  # a wrong flag stops here
        results = {name: main(column) for name, column in zip(COLUMNS, columns)}
        print("side by side: python 03_cifar_lenet.py --compare", *folders)
        return results
    if args.ranks > 1 and not dist.is_initialized():
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=1))  # the others wait for rank 0
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA
    torch.backends.cudnn.benchmark = True
    metrics = provenance(argv, args)
    if args.checkpoint:
        if args.rank > 0:
            return {}
        args.folder.mkdir(exist_ok=True)
        model, used = load(args.checkpoint, args.device)
        if isinstance(model, OneNetwork):
            sys.exit(f"{args.checkpoint} holds one network: there is no hypernetwork to sample")
        args.dataset, args.fake_data = used["dataset"], used["fake_data"]
        data, chain = load_data(args), []
    else:
        if args.rank > 0:
            dist.barrier()  # rank 0 downloads
        data, used = load_data(args), settings(args)
        if args.rank == 0 and args.ranks > 1:
            dist.barrier()
        model, chain, log, spent = train(args, data)
        if args.rank > 0:
            return {}
        metrics |= spent | dict(log=[row for row in log if "val_mean" in row])
        plot_training(log, title(used)).savefig(args.folder / "training.png", dpi=150)

    start = time.perf_counter()
    parameters = sum(p.numel() for p in model.parameters())
    metrics |= dict(title=title(used), seed=used["seed"], settings=used, parameters=parameters)
    metrics |= dict(data="made up" if used["fake_data"] else used["dataset"], sigma=args.sigma)
    metrics["calibration"] = args.calibration
    z = model.noise(max(args.tested, args.averaged), torch.Generator(args.device).manual_seed(2))
    z = z if z is None else args.sigma * z
    with torch.no_grad():
        theta = chain or model(z if z is None else z[: args.tested])
    calibration = data["train"][0][: args.calibration]
    moments = recalibrate(theta, calibration)
    metrics["validated"] = evaluate(theta, moments, *data["val"])  # for choices
    metrics["tested"] = tested = evaluate(theta, moments, *data["test"])
    print(f"{title(used)}: {tested['networks']} networks, mean {100 * tested['single']:.2f} %")
    if tested["networks"] >= 10:
        print(f"majority of ten {100 * tested['ten_majority']:.2f} %")
    if z is not None:
        metrics["distilled"] = distil(model, z[: args.averaged], calibration, *data["test"])
        print(f"averaged into one network {100 * metrics['distilled']['accuracy'][-1]:.2f} %")
        plot_distillation(metrics).savefig(args.folder / "distillation.png", dpi=150)
    analysis = time.perf_counter() - start
    metrics["peak_memory_gb"] = round(peak_memory(args.device) / 1e9, 2)
    metrics["seconds"] = round(metrics.get("training_seconds", 0) + analysis, 1)
    (args.folder / "metrics.json").write_text(json.dumps(metrics, indent=1))
    print(f"figures and metrics: {args.folder}")
    return metrics


if __name__ == "__main__":
    main()
