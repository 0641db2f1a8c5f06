"""A ResNet-32 with every weight from one vector: 466,906 weights, batch norm's gamma and beta too.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[answers of T(.; G(z)) to shared images]

Section "CIFAR-10" of the paper, the ResNet-32 row of its table, and distillation. New against
LeNet: identity skips in G, one generator for all layers of a stage, and batch norm in the target
network: moments of its batch in training, then one pass over training images to give a generated
(or averaged) network its own. Several GPUs share the networks of a step.

    python 04_cifar_resnet32.py --quick        # all columns in minutes: does it run?
    python 04_cifar_resnet32.py --columns c    # one column: two hours on one CPU core
    torchrun --nproc_per_node=2 04_cifar_resnet32.py --networks 10 --images 512 --steps 60000 --amp
"""

import argparse
import functools
import json
import math
import os
import platform
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision import datasets
from tqdm import tqdm

from common import batch_norm, conv2d, each_network, knn_entropy, linear

NAME = "04_cifar_resnet32"
CLASSES = dict(cifar10=10, cifar100=100)
# The documented runs, by column of the paper's table. (a) and (b) train `networks` by SGD, (c) and
# (d) the paper's hypernetwork by Adam. `shared` of the `images` of a step are the same for all its
# networks; diversity has its full weight after the share `ramp` of the steps.
SGD = dict(steps=23_400, lr=0.05, networks=1, images=64, shared=0, lam=1.0, ramp=0.0, start=None)
HYPERNET = dict(steps=3900, lr=1e-4, networks=4, images=64, shared=16, lam=5e3, ramp=0.5)
HYPERNET |= dict(start="copies", means=0, tested=20, averaged=10_000)
ALL = dict(
    diversity="none", crop=4, seed=0, amp=False, rows=15, tested=10, averaged=0, moments=5000
)
RECIPES = dict(
    a=ALL | SGD,
    b=ALL | SGD | dict(lr=0.005),  # one chain, ten networks
    c=ALL | HYPERNET,
    d=ALL | HYPERNET | dict(diversity="outputs"),
)
QUICK = dict(steps=20, images=16, rows=2, tested=10, averaged=20, moments=200)  # at most
TITLES = dict(a="(a) SGD", b="(b) SGD chain", c="(c) no diversity", d="(d) diversity")
# Accuracy of one network and of a vote of ten in the paper, by the name of our run.
PAPER = dict(cifar10_a={"1": 0.9357}, cifar10_b={"1": 0.9103, "10": 0.9496})
PAPER |= dict(cifar10_c={"1": 0.8820, "10": 0.8826}, cifar10_d={"1": 0.8361, "10": 0.9037})
COLOURS = dict(a="black", b="grey", c="C0", d="C1")
SIZES = [1, 2, 5, 10, 20, 100, 1000, 10000]  # of ensembles and averages
VALIDATION, TEST = 1, 2  # seeds of evaluation; those of training begin at a million
SAVE_SECONDS = 120  # of training that a killed run loses at most
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of torchrun


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{NAME}.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--columns", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="of the table")
    add("--dataset", choices=list(CLASSES), default="cifar10", help="cifar10 unless given")
    add("--steps", type=int, help="of training; the recipe's unless given, as all that follow")
    add("--lr", type=float, help="rate of SGD (a, b) or of Adam (c, d)")
    add("--lam", type=float, help="weight of accuracy against diversity")
    add("--networks", type=int, help="in a step, on all GPUs together: samples of z, or chains")
    add("--images", type=int, help="in a step, for each network")
    add("--seed", type=int, help="of all random numbers of training")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--amp", action="store_true", default=None, help="target networks in bfloat16")
    add("--device", choices=["cpu", "cuda"], default=device, help=f"here: {device}")
    add("--data", type=Path, default=Path("data"), help="folder of CIFAR; filled if it is empty")
    add("--fake-data", action="store_true", help="made-up images, to try the code without CIFAR")
    add("--out", type=Path, default=Path("runs") / NAME, help="a folder for each run goes in here")
    add("--quick", action="store_true", help=f"small costs, at most {QUICK}")
    args = parser.parse_args(argv)
    for name in ("steps", "lr", "lam", "networks", "images"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"argument --{name}: {value} is not a positive number")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device; use cpu, or install CUDA")
    args.runs = [settings(args, column) for column in args.columns]
    if any(c.diversity != "none" and c.networks < 2 for c in args.runs):
        parser.error("diversity needs at least 2 --networks in a step")
    return args


def settings(args: argparse.Namespace, column: str) -> argparse.Namespace:
    """A column's recipe with what the command overrides; its name says so."""
    flags = ("steps", "lr", "lam", "networks", "images", "seed", "amp")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    recipe = RECIPES[column]
    quick = {name: min(most, recipe[name]) for name, most in QUICK.items() if args.quick}
    words = [v if isinstance(v, str) else f"{name}{v:.12g}" for name, v in given.items()]
    words += ["quick"] * args.quick + ["fake"] * args.fake_data
    c = argparse.Namespace(script=NAME, column=column, **recipe | quick | given)
    c.dataset, c.fake_data = args.dataset, args.fake_data
    c.means = c.means if c.start else c.networks
    c.name = "_".join([args.dataset, column, *words])
    return c


# ---- Data ----------------------------------------------------------------------------------------
def load_data(args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Normalised images (B, 3, 32, 32), channels last, and labels (B,) of the splits train, val and
    test, all on the training device: 45,000, 5,000 and 10,000 of CIFAR."""
    if args.fake_data:  # a smooth random pattern for each class, moved by two pixels, and noise
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(CLASSES[args.dataset], 3, 6, 6, generator=generator)
        patterns = F.interpolate(patterns, 32, mode="bicubic", align_corners=False)
        y = torch.arange(len(patterns))
        (x,), (y,) = draw(F.pad(patterns, [2] * 4), y, (1, 3000), 0, generator)
        x = x.movedim(1, -1) + 0.5 * torch.randn(3000, 32, 32, 3, generator=generator)
        (x, x_test), (y, y_test) = x.split([2500, 500]), y.split([2500, 500])
    else:
        cifar = dict(cifar10=datasets.CIFAR10, cifar100=datasets.CIFAR100)[args.dataset]
        try:
            if RANK > 0:
                dist.barrier()  # until the first process has downloaded
            train, test = (cifar(args.data, train=t, download=True) for t in (True, False))
            if RANK == 0 and RANKS > 1:
                dist.barrier()
        except Exception as error:
            remedy = f"unpack {cifar.filename} in {args.data}, or try the code with --fake-data"
            sys.exit(f"no {args.dataset} and no download ({type(error).__name__}): {remedy}")
        x, x_test = (torch.from_numpy(split.data).float() for split in (train, test))
        y, y_test = (torch.tensor(split.targets) for split in (train, test))
    mean, std = x.mean(dim=(0, 1, 2)), x.std(dim=(0, 1, 2))  # of each colour
    x, x_test = (part.sub_(mean).div_(std).contiguous() for part in (x, x_test))
    x, x_test = x.permute(0, 3, 1, 2), x_test.permute(0, 3, 1, 2)
    n, most = len(x) // 10, 1000 if args.quick else None  # images of the smaller splits
    splits = dict(train=(x[n:], y[n:]), val=(x[:n][:most], y[:n][:most]))
    splits["test"] = (x_test[:most], y_test[:most])
    return {k: (x.to(args.device), y.to(args.device)) for k, (x, y) in splits.items()}


def draw(padded: Tensor, y: Tensor, shape: tuple, shared: int, generator) -> tuple[Tensor, Tensor]:
    """Random crops (N, B, 3, 32, 32) of padded images, and labels (N, B). The first `shared` are
    the same for all networks, to compare their answers; the rest differ, as in the paper."""
    crops = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # a view: all s * s crops of each image
    index, row, column = (
        torch.randint(n, shape, device=y.device, generator=generator)
        for n in (len(crops), *crops.shape[2:4])
    )
    for choice in (index, row, column):
        choice[1:, :shared] = choice[0, :shared]
    return crops[index, :, row, column], y[index]


# ---- Target network ------------------------------------------------------------------------------

BLOCKS = 5  # in a stage, of two convolutions each: 1 + 3 * 5 * 2 + 1 = 32 layers, and 2 projections
STAGES = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]  # channels in, filters, stride of the first block


def target_shapes(classes: int) -> list[list[tuple[int, int]]]:
    """(F, K + 2) of the convolutions, gamma and beta last, in the order of their use, a list for
    the stem and for each stage; then (classes, 65) of the last layer."""
    groups = [[(16, 27 + 2)]]
    for channels, filters, stride in STAGES:
        fans = [channels] * (stride > 1) + [9 * channels] + [9 * filters] * (2 * BLOCKS - 1)
        groups.append([(filters, k + 2) for k in fans])
    return [*groups, [(classes, 65)]]


def target_network(x: Tensor, theta: list[Tensor], record: list | None = None) -> Tensor:
    """ResNet-32, (N, B, 3, 32, 32) -> logits (N, B, classes). A convolution's layer (N, F, K + 2)
    ends with gamma - 1 and beta of its batch norm. Two more columns are its mean and variance;
    without them the batch's are used. To `record` go the means of its inputs and their squares."""
    layers = iter(theta)

    def conv_norm(x: Tensor, kernel_size: int = 3, stride: int = 1) -> Tensor:
        layer, k = next(layers), x.shape[2] * kernel_size**2
        x = conv2d(x, layer[..., :k], kernel_size, stride, kernel_size // 2, bias=False)
        if record is not None:
            means = x.mean(dim=(1, 3, 4)), x.square().mean(dim=(1, 3, 4))
            record.append(torch.stack(means, dim=-1))
        gamma, beta, *moments = layer[..., k:].unbind(dim=-1)
        return batch_norm(x, 1 + gamma, beta, *moments)

    x = conv_norm(x).relu()
    for _, _, stride in STAGES:
        for block in range(BLOCKS):
            step = stride if block == 0 else 1
            shortcut = conv_norm(x, kernel_size=1, stride=step) if step > 1 else x
            y = conv_norm(x, stride=step).relu()
            x = (conv_norm(y) + shortcut).relu()
    return linear(x.mean(dim=(-2, -1)), next(layers))


@torch.no_grad()
def recalibrate(theta: list[Tensor], x: Tensor) -> list[Tensor]:
    """theta with the moments of its batch norms, from one pass over images (B, 3, 32, 32). The 500
    of a portion pass on through the network normalised by their own moments, as in training."""

    def batch_means(x: Tensor, theta: list[Tensor]) -> Tensor:
        record = []
        target_network(x, theta, record)
        return torch.cat(record, dim=1)  # (N, 1232, 2)

    n = len(theta[0])
    sums = (len(p) * each_network(batch_means, p.expand(n, *p.shape), theta) for p in x.split(500))
    mean, square = (sum(sums) / len(x)).unbind(dim=-1)
    moments = torch.stack([mean, (square - mean.square()).clamp_min(0)], dim=-1)
    parts = moments.split([layer.shape[1] for layer in theta[:-1]], dim=1)
    return [torch.cat(pair, dim=-1) for pair in zip(theta[:-1], parts)] + theta[-1:]


# ---- Hypernetwork --------------------------------------------------------------------------------
class Skip(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def mlp(fan_in: int, width: int, fan_out: int) -> nn.Sequential:
    """Linear layers without biases, leaky ReLU between them, the identity added around the square
    one in the middle; output as large as the input."""
    sizes = (fan_in, width), (width, width), (width, fan_out)
    first, middle, last = (nn.Linear(*size, bias=False) for size in sizes)
    for layer, variance in (first, 2 / fan_in), (middle, 1 / width), (last, 0.5 / width):
        nn.init.normal_(layer.weight, std=variance**0.5)
    return nn.Sequential(first, nn.LeakyReLU(0.05), Skip(middle, nn.LeakyReLU(0.05)), last)


class Hypernetwork(nn.Module):
    """G: noise z (N, Z) -> weights of N target networks, a list of (N, F, K + 2).

        G(z) = W(E(z) + bias)                                             the paper's
        G(z) = mean + scale * (W(E(z) + bias) - W(bias))                  around a learned mean

    As in 03, but the layers of the target network, (F, K + 2), are in groups: a code stands for the
    filters of one number in all layers of its group, or for the whole group if that has one code.
    """

    noise_size, code_size = 500, 8

    def __init__(self, shapes, codes, means: int = 0, start: str = "copies", scale: float = 0.1):
        super().__init__()
        self.shapes, self.codes, self.scale = shapes, codes, scale
        self.means = nn.ParameterList(
            torch.randn(means, f, k) * (2 / k) ** 0.5 for g in shapes for f, k in g if means
        )
        if codes:
            width = self.code_size * sum(codes)
            self.extractor = mlp(self.noise_size, 1000, width)
            self.generators = nn.ModuleList(
                mlp(self.code_size, 800, sum(f * k for f, k in group) // n)
                for group, n in zip(shapes, codes)
            )
            self.bias = nn.Parameter(torch.zeros(1, width), start != "random")
            if start == "copies":
                nn.init.normal_(self.bias)
                self.extractor[-1].weight.data *= 0.2

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = next(self.parameters()).device
        if not self.codes:  # the numbers of its networks
            return torch.arange(len(self.means[0]), device=device)
        return torch.randn(n, self.noise_size, device=device, generator=generator)

    def generate(self, codes: Tensor) -> list[Tensor]:
        """W: codes (N, C) -> weights of N networks."""
        codes = codes.unflatten(1, (-1, self.code_size)).split(self.codes, dim=1)
        theta = []
        for generator, code, group in zip(self.generators, codes, self.shapes):
            sizes = [f * k // code.shape[1] for f, k in group]
            parts = generator(code).split(sizes, dim=-1)  # (N, codes, weights) of each layer
            # The factor, the usual size of a weight with fan-in K: as in 03.
            theta += [p.reshape(len(p), f, k) * (2 / k) ** 0.5 for p, (f, k) in zip(parts, group)]
        return theta

    def forward(self, z: Tensor) -> list[Tensor]:
        if not self.codes:
            return [mean.index_select(0, z) for mean in self.means]
        made = self.generate(self.extractor(z) + self.bias)
        if not self.means:
            return made
        middle = self.generate(self.bias)
        return [a + self.scale * (b - c) for a, b, c in zip(self.means, made, middle)]


def make_model(c: argparse.Namespace, device) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The model and its optimizers: means learn by SGD, as any network does, the rest by Adam."""
    shapes, codes = target_shapes(CLASSES[c.dataset]), [16, 16, 32, 64, 1] if c.start else None
    model = Hypernetwork(shapes, codes, c.means, c.start).to(device)
    rest = [p for name, p in model.named_parameters() if not name.startswith("means")]
    sgd = dict(momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    optimizers = [torch.optim.SGD(model.means, c.lr, **sgd)] if c.means else []
    optimizers += [torch.optim.Adam(rest, c.lr, fused=True)] if c.start else []
    return model, optimizers


# ---- Training ------------------------------------------------------------------------------------
def training_step(model, z: Tensor, x: Tensor, y: Tensor, c, ramp: float = 1.0) -> tuple:
    """Images (N, B, 3, 32, 32), labels (N, B): network n sees batch n."""
    theta = model(z)
    small = functools.partial(checkpoint, target_network, use_reentrant=False)  # memory for time
    with torch.autocast(x.device.type, torch.bfloat16, enabled=c.amp):
        logits = each_network(target_network if c.images <= 64 else small, x, theta)
    logits = logits.to(x.dtype)  # (N, B, classes)
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    entropy = logits.new_zeros(())
    if c.diversity == "outputs":
        outputs = logits[:, : c.shared].softmax(dim=-1).flatten(1)
        if dist.is_initialized():  # the answers of the networks on all GPUs, with gradient
            outputs = torch.cat(torch.distributed.nn.functional.all_gather(outputs))
        entropy = knn_entropy(outputs, Hypernetwork.noise_size)
    loss = c.lam * loss_acc - ramp * entropy
    acc = (logits.argmax(dim=-1) == y).float().mean()
    return loss, loss_acc, entropy, acc


def rate_factor(c: argparse.Namespace, step: int) -> float:
    """A step's share of the learning rate: a short rise, then a linear fall to 0."""
    warm_up = min(200, c.steps // 5 + 1)
    if c.column != "b":
        return min((step + 1) / warm_up, (c.steps - step) / max(1, c.steps - warm_up))
    # Paper: (b) has a constant rate. Here: only in the second half, where networks are taken; it
    # falls from 10 * lr in the first, or the chain would be far from converged, or noisy.
    return min(10 * (step + 1) / warm_up, max(1, 10 - 18 * step / c.steps))


def train(c: argparse.Namespace, data: dict, file: Path) -> None:
    """Train one column, or go on where a stopped run stood. What it leaves behind is the file."""
    x, y = data["train"]
    stream = (1 + c.seed % 4000) * 10**6  # torch's generator has 2**32 seeds
    torch.manual_seed(stream)
    model, optimizers = make_model(c, y.device)
    record = dict(settings=vars(c), step=0, seconds=0.0, log=[], chain=[])
    if file.exists():
        record = read(file, c)
        model.load_state_dict(record["model"])
        for optimizer, state in zip(optimizers, record["optimizers"]):
            optimizer.load_state_dict(state)
    parallel = nn.parallel.DistributedDataParallel(model) if RANKS > 1 else model

    padded, y = F.pad(torch.cat([x, x.flip(-1)]), [c.crop] * 4), y.repeat(2)  # mirrored too
    # (b) takes ten networks in all from the second half of its chains, the last ones among them.
    taken = range(c.steps, c.steps // 2, -math.ceil(c.steps / 2 / max(1, 10 // c.networks)))
    first, every = record["step"], math.ceil(c.steps / c.rows)
    begun, saved = time.perf_counter() - record["seconds"], time.perf_counter()
    quiet = dict(disable=True) if RANK > 0 else dict(mininterval=1)
    bar = tqdm(range(first, c.steps), c.name, initial=first, total=c.steps, **quiet)
    for step in bar:
        # A step's random numbers depend on seed and step alone: a run goes on as if never stopped.
        generator = torch.Generator(y.device).manual_seed(stream + 1 + step)
        z = model.noise(c.networks, generator)
        batch = z, *draw(padded, y, (c.networks, c.images), c.shared, generator)
        z, images, labels = (part.chunk(RANKS)[RANK] for part in batch)  # those of this process
        # Learn first, spread later: networks that are spread while they know nothing stay useless.
        ramp = min(1.0, step / max(1, c.ramp * c.steps))
        loss, loss_acc, diversity, acc = training_step(parallel, z, images, labels, c, ramp)
        model.zero_grad()
        # So each mean has the gradient of its own networks' mean loss; Adam minds no factor.
        (loss / c.lam * max(1, c.means)).backward()
        spread = optimizers[-1].param_groups[0]["params"] if c.start else []
        norm = nn.utils.clip_grad_norm_(spread, 5.0)  # against rare spikes
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * rate_factor(c, step)
            optimizer.step()

        done = step + 1
        if c.column == "b" and done in taken:
            record["chain"].append([mean.detach().cpu().clone() for mean in model.means])
        logging = done % every == 0 or done == c.steps
        if RANK == 0 and (logging or time.perf_counter() - saved > SAVE_SECONDS):
            row = dict(loss_acc=loss_acc, diversity=diversity, acc=acc, norm=norm)
            row = dict(step=done) | {name: value.item() for name, value in row.items()}
            if not all(map(math.isfinite, row.values())):
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr")
            if logging:
                row |= validate(model, data)
                record["log"].append(row)
                bar.set_postfix(val_one=f"{row['val_one']:.3f}", refresh=False)
            saved = time.perf_counter()
            record |= dict(step=done, seconds=saved - begun, model=model.state_dict())
            record["optimizers"] = [o.state_dict() for o in optimizers if done < c.steps]
            torch.save(record, file.with_suffix(".new"))  # a killed run never leaves half a file
            os.replace(file.with_suffix(".new"), file)


def read(file: Path, c: argparse.Namespace | None = None) -> dict:
    """A checkpoint or metrics.json of this script and, with `c`, of a run with these settings."""
    try:
        if file.suffix == ".json":
            record = json.loads(file.read_text())
        else:
            record = torch.load(file, map_location="cpu", weights_only=True)
        theirs, ours = dict(record["settings"]), vars(c) if c else dict(script=NAME)
    except Exception as error:
        sys.exit(f"{file} is missing, damaged or not of this script ({type(error).__name__})")
    if other := {k: theirs.get(k) for k, v in ours.items() if theirs.get(k) != v}:
        sys.exit(f"{file} is of other settings, {other}: remove {file.parent} to start afresh")
    return record


def load(file: str | Path, device: str = "cpu") -> nn.Module:
    """A trained model, ready to `sample`; of column (b) the networks taken from its chains."""
    record = read(Path(file))
    model, _ = make_model(argparse.Namespace(**record["settings"]), device)
    model.load_state_dict(record["model"])
    if record["chain"]:
        model.means = nn.ParameterList(torch.cat(layers) for layers in zip(*record["chain"]))
    return model.to(device)


# ---- Evaluation and figures ----------------------------------------------------------------------
@torch.no_grad()
def sample(model: nn.Module, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """The weights of n networks, or of as many as there are."""
    return model(model.noise(n, generator))


@torch.no_grad()
def predict(theta: list[Tensor], x: Tensor) -> Tensor:
    """Probabilities (N, B, classes) of N networks on the same images (B, 3, 32, 32), few at a time
    so that the activations stay small: on the CPU a network runs alone, elsewhere all together."""
    n = len(theta[0])
    portions = x.split(250 if x.device.type == "cpu" else max(1, 10_000 // n))
    logits = [each_network(target_network, x.expand(n, *x.shape), theta) for x in portions]
    return torch.cat(logits, dim=1).softmax(dim=-1)


def majority(votes: Tensor) -> Tensor:
    """(N, B) -> (B,); ties go to the smallest class."""
    return torch.stack([(votes == k).sum(dim=0) for k in range(votes.max() + 1)]).argmax(dim=0)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    n = len(votes)
    same = sum((votes == vote).float().mean() for vote in votes)  # pairs with itself included
    return 1 - ((same - 1) / (n - 1)).item() if n > 1 else 0.0


def ensemble(probabilities: Tensor, y: Tensor) -> Tensor:
    """Of N networks' (N, B, classes): accuracy of their vote; negative log-likelihood of their mean
    probability, and its calibration error, in 15 bins of confidence weighted by their images."""
    acc = (majority(probabilities.argmax(dim=-1)) == y).float().mean()
    mean = probabilities.mean(dim=0)
    confidence, predicted = mean.max(dim=-1)
    bins = (confidence * 15).long().clamp(max=14)
    gaps = confidence.new_zeros(15).index_add(0, bins, confidence - (predicted == y).float())
    return torch.stack([acc, F.nll_loss(mean.clamp_min(1e-12).log(), y), gaps.abs().sum() / len(y)])


def evaluate(probabilities: Tensor, y: Tensor) -> dict:
    """How often two of N networks disagree, and means over ensembles of 1, 2, 5, ... of them."""
    n = len(probabilities)
    result = dict(networks=n, disagreement=disagreement(probabilities.argmax(dim=-1)))
    result |= dict(vote={}, nll={}, calibration_error={})
    for size in (size for size in SIZES if size <= n):
        groups = probabilities.split(size)[: n // size]  # no network in two ensembles
        numbers = torch.stack([ensemble(group, y) for group in groups]).mean(dim=0)
        for name, number in zip(("vote", "nll", "calibration_error"), numbers.tolist()):
            result[name][str(size)] = number
    return result


def validate(model: nn.Module, data: dict) -> dict:
    """Ten networks of a hypernetwork, from the same z every time, or those of SGD."""
    x, y = (part[:1000] for part in data["val"])  # more would cost too much on a CPU
    theta = sample(model, 10, torch.Generator(x.device).manual_seed(VALIDATION))
    theta = recalibrate(theta, data["train"][0][:500])
    result = evaluate(predict(theta, x), y)
    votes = list(result["vote"].values())
    return dict(val_one=votes[0], val_vote=votes[-1], val_nll=result["nll"]["1"])


@torch.no_grad()
def analyse(model: nn.Module, c: argparse.Namespace, data: dict) -> dict:
    """Networks of the same z, tested one by one, voting, and averaged into one (distillation)."""
    x, y = data["test"]
    z = model.noise(max(c.tested, c.averaged), torch.Generator(y.device).manual_seed(TEST))
    images = data["train"][0][: c.moments]
    theta = recalibrate(model(z[: c.tested]), images)
    result = dict(test=evaluate(predict(theta, x), y), averaged={})
    result["val"] = evaluate(predict(theta, data["val"][0]), data["val"][1])  # for choices
    mean, first = None, 0
    for n in (n for n in SIZES if n <= c.averaged):
        for part in z[first:n].split(20):
            first += len(part)
            new = [filters.mean(dim=0, keepdim=True) for filters in model(part)]
            mean = [a + (b - a) * len(part) / first for a, b in zip(mean or new, new)]
        result["averaged"][str(n)] = ensemble(predict(recalibrate(mean, images), x), y)[0].item()
    return result


def title(c: dict) -> str:
    """The column and what the command overrode, of a run's settings."""
    dataset, column, *words = c["name"].split("_")
    return ", ".join([TITLES[column], *words, *["CIFAR-100"] * (dataset == "cifar100")])


def plot_accuracy(runs: list[dict]) -> Figure:
    """While training, and at the end: n networks voting, and n networks averaged into one."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run in runs:
        c, log, colour = run["settings"], run["log"], COLOURS[run["settings"]["column"]]
        millions = [row["step"] * c["networks"] * c["images"] / 1e6 for row in log]
        left.plot(millions, [100 * row["val_vote"] for row in log], color=colour, label=title(c))
        curves = {"o-": run["test"]["vote"], "s:": run["averaged"], "x": PAPER.get(c["name"], {})}
        for style, curve in curves.items():
            accs = [100 * acc for acc in curve.values()]
            right.plot([int(n) for n in curve], accs, style, color=colour, markersize=5)
    for style, label in ("o-", "vote of n"), ("s:", "ONE network: n averaged"), ("x", "paper's"):
        right.plot([], [], style, color="black", label=label)
    left.set(xlabel="training images (millions)", ylabel="validation accuracy (%)")
    left.set(title="vote of ten, or of the networks of SGD")
    right.set(xscale="log", xlabel="networks n", ylabel="test accuracy (%)", title="at the end")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def table(runs: list[dict]) -> str:
    head = ["", "paper", "one network", "vote of 10", "vote of 20", "disagree", "NLL: one, ten"]
    rows = [head, ["---"] * 7]
    for run in runs:
        c, test = run["settings"], run["test"]
        paper = [f"{100 * acc:.2f} %" for acc in PAPER.get(c["name"], {}).values()]
        accs = [test["vote"].get(n) for n in ("1", "10", "20")] + [test["disagreement"]]
        nlls = [f"{test['nll'][n]:.3f}" for n in ("1", "10") if n in test["nll"]]
        cells = [f"{100 * acc:.2f} %" if acc else "" for acc in accs]
        rows.append([title(c), ", ".join(paper), *cells, ", ".join(nlls)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---- Main ----------------------------------------------------------------------------------------
def provenance(argv: list[str], device: str) -> dict:
    start = "python" if RANKS == 1 else f"torchrun --nproc_per_node={RANKS}"
    command = " ".join([start, f"{NAME}.py", *argv])
    git = f'git -C "{Path(__file__).parent}" describe --always --dirty'
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    hardware = torch.cuda.get_device_name() if device == "cuda" else cpu
    return dict(
        command=command,
        commit=subprocess.getoutput(git),
        hardware=hardware,
        torch=torch.__version__,
    )


def main(argv: list[str] | None = None) -> list[dict]:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if any(c.networks % RANKS for c in args.runs):
        sys.exit(f"--networks: {RANKS} processes need a multiple of {RANKS} networks in a step")
    if RANKS > 1:  # started by torchrun
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(timeout=timedelta(days=1))  # others wait for rank 0's analyses
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA
    data = None
    for c in args.runs if "results" not in args.out.parts else []:  # nothing is trained there
        file = args.out / c.name / "metrics.json"
        if file.exists():
            read(file, c)  # refuses a finished run of other settings
            continue
        data = data or load_data(args)
        file.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = file.with_name("checkpoint.pt")
        train(c, data, checkpoint)
        if RANK == 0:
            record, begun = read(checkpoint), time.perf_counter()
            run = dict(settings=vars(c), log=record["log"]) | provenance(argv, args.device)
            run |= analyse(load(checkpoint, args.device), c, data)
            run["training_seconds"] = round(record["seconds"])
            run["analysis_seconds"] = round(time.perf_counter() - begun)
            file.with_suffix(".new").write_text(json.dumps(run, indent=1))
            os.replace(file.with_suffix(".new"), file)
    if RANKS > 1:
        dist.destroy_process_group()
    if RANK > 0:
        return []
    runs = [read(file) for file in sorted(args.out.glob("*/metrics.json"))]
    if not runs:
        sys.exit(f"no finished run in {args.out}")
    plot_accuracy(runs).savefig(args.out / "accuracy.png", dpi=150)
    print(table(runs), f"\nfigure: {args.out / 'accuracy.png'}", sep="\n")
    return runs


if __name__ == "__main__":
    main()
