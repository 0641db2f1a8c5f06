r"""Ensembles of LeNets on CIFAR from one hypernetwork, against ensembles made by SGD.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[outputs of T(.; G(z)) on shared images]

Section "CIFAR-10" of the paper, the LeNet row of its table, and distillation. New against MNIST:
diversity is measured in what the networks answer, which no symmetry of the weights can fake, and
the columns of the table: (a) one network by SGD, (b) ten networks from a chain of SGD, (c) the
hypernetwork without a diversity term, (d) with it. The weights of many samples, averaged, make one
network again.

    python 03_cifar_lenet.py --column b --networks 5 --steps 40000    # 53 minutes, one core: 81 %
    python 03_cifar_lenet.py --column d --start chains --networks 4 --images 64 \
        --steps 24000 --lr 3e-5 --lam 3000           # 30 more: 79 % from ten, 81 % from a hundred
    python 03_cifar_lenet.py --column all --quick --out runs/quick    # all columns, in minutes
    python 03_cifar_lenet.py --compare runs/03_cifar_lenet/cifar10_*
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
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision import datasets
from tqdm import tqdm

from common import conv2d, each_network, fix_gauge, knn_entropy, linear, max_pool2d

NAME = "03_cifar_lenet"
CLASSES = dict(cifar10=10, cifar100=100)
DIVERSITIES = ["outputs", "weights", "variance", "ensemble", "none"]
STARTS = ["copies", "random", "trained", "chains"]
BURN_IN = 10  # a chain of (b) begins at this many times its rate, as large as that of (a)
LOG_EVERY = 10
NUMBERS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]  # of networks, figures
# What the columns do not share: (a) and (b) train networks by SGD, (c) and (d) a hypernetwork.
SGD = dict(steps=100000, lr=0.03, networks=1, images=128, validate_every=2000)
HYPERNET = dict(steps=10000, lr=1e-3, lam=1e3, networks=10, images=512, validate_every=200)
COLUMNS = dict(a=SGD, b=SGD | dict(lr=0.003), c=HYPERNET, d=HYPERNET)
QUICK = dict(steps=200, images=64, validate_every=50, tested=20, averaged=500)


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
    add("--diversity", choices=DIVERSITIES, default="outputs", help="what column d rewards")
    add("--start", choices=STARTS, default="copies", help="trained: at (a); chains: at (b)'s five")
    add("--steps", type=count, help="training steps; 100000 (a, b) or 10000 (c, d)")
    add("--lr", type=positive, help="of SGD, 0.03 (a) or at last 0.003 (b); of Adam, 1e-3 (c, d)")
    add("--weight-decay", type=float, default=5e-4, help="of SGD")
    add("--lam", type=positive, help="weight of accuracy; 1e3")
    add("--ramp", type=float, default=0.5, help="share of steps until diversity has full weight")
    add("--networks", type=count, help="samples of z in a step; 10. Of b: independent chains; 1")
    add("--images", type=count, help="images per network in a step; 128 (a, b) or 512 (c, d)")
    add("--shared", type=count, help="of these, images that all networks see; an eighth")
    add("--crop", type=int, default=2, help="pixels that training images move at most")
    add("--seed", type=int, default=0, help="random seed")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--data", type=Path, default=Path("data"), help="folder of CIFAR; filled if it is empty")
    add("--fake-data", action="store_true", help="made-up images, to try the code without CIFAR")
    add("--out", type=Path, default=Path("runs") / NAME, help="a run has its folder in this one")
    add("--resume", action="store_true", help="go on with the run in its folder")
    add("--checkpoint", type=Path, help="evaluate this trained hypernetwork, without training")
    add("--compare", type=Path, nargs="+", metavar="RUN", help="a table of finished runs")
    add("--validate-every", type=count, help="steps between two validations; 2000 or 200")
    add("--tested", type=count, default=100, help="networks to test, by tens and all together")
    add("--averaged", type=count, default=10000, help="networks averaged into one")
    add("--sigma", type=positive, default=1.0, help="scale of sampled z; keep 1 for chains")
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
    if args.column == "d" and args.diversity == "none":
        parser.error("--diversity none is --column c")
    args.diversity = args.diversity if args.column == "d" else "none"
    if args.column in ("a", "b"):
        args.start = "copies"  # there is no hypernetwork
        args.lam = float(args.networks)  # nor diversity: the sum of the networks' losses
        if args.networks > 1 and (args.column == "a" or 10 % args.networks):
            parser.error("--networks: column a trains one network, column b a divisor of ten")
    elif args.column == "all" and args.start == "chains":
        parser.error("--start chains is for --column c or d, after --column b --networks 5")
    elif args.diversity != "none" and args.networks < 2:
        parser.error("--networks must be at least 2: diversity needs a nearest other network")
    if args.diversity not in ("outputs", "ensemble"):
        args.shared = 0
    elif args.shared is None:
        args.shared = max(1, args.images // 8)
    if args.shared and args.shared > args.images:
        parser.error("--shared cannot exceed --images")
    if not 0 <= args.ramp <= 1:
        parser.error("--ramp must lie between 0 and 1")
    if args.crop < 0 or args.weight_decay < 0:
        parser.error("--crop and --weight-decay cannot be negative")
    if args.tested < 10:
        parser.error("--tested must be at least 10, the size of the paper's ensembles")
    if args.checkpoint and not args.checkpoint.is_file():
        parser.error(f"--checkpoint {args.checkpoint}: no such file")
    for folder in args.compare or ():
        if not (folder / "metrics.json").exists():
            parser.error(f"--compare {folder}: no metrics.json there; has that run finished?")
    if args.compare or args.column == "all":
        args.folder = args.out / "compare"
    elif args.checkpoint:
        args.folder = args.out / "evaluation"
    else:
        suffix = "" if args.diversity in ("outputs", "none") else f"_{args.diversity}"
        suffix += "" if args.start == "copies" else f"_{args.start}"
        suffix += f"_{args.networks}_chains" if args.column == "b" and args.networks > 1 else ""
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


def seeded(args: argparse.Namespace, step: int) -> torch.Generator:
    """The random numbers of a step depend on seed and step alone: --resume needs no state."""
    return torch.Generator(args.device).manual_seed(args.seed * 1_000_003 + step)


def draw_batch(
    crops: Tensor, y: Tensor, args: argparse.Namespace, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random images (N, B, 3, 32, 32) and labels (N, B). The first `shared` are the same for all N
    networks, to compare their answers; the others differ, as in the paper."""
    shape = (args.networks, args.images)
    index, row, column = choices = [
        torch.randint(k, shape, device=y.device, generator=generator) for k in crops.shape[:3]
    ]
    for choice in choices:
        choice[1:, : args.shared] = choice[0, : args.shared]
    return crops[index, row, column], y[index]


# ---- Target network ------------------------------------------------------------------------------


def shapes(classes: int) -> list[tuple[int, int]]:
    """(F, K + 1) of the layers: 62,006 weights for 10 classes, 69,656 for 100."""
    return [(6, 76), (16, 151), (120, 401), (84, 121), (classes, 85)]


def target_network(x: Tensor, theta: list[Tensor]) -> Tensor:
    """LeNet, (N, B, 3, 32, 32) -> logits (N, B, classes); convolutions without padding."""
    x = max_pool2d(conv2d(x, theta[0], 5), 2).relu()  # (N, B, 6, 14, 14)
    x = max_pool2d(conv2d(x, theta[1], 5), 2).relu()  # (N, B, 16, 5, 5)
    x = linear(x.flatten(2), theta[2]).relu()  # (N, B, 120)
    x = linear(x, theta[3]).relu()  # (N, B, 84)
    return linear(x, theta[4])


def flat(theta: list[Tensor]) -> Tensor:
    return torch.cat([filters.flatten(1) for filters in theta], dim=1)  # (N, D)


class FreeNetworks(nn.Module):
    """Target networks with weights of their own, for SGD: columns (a) and (b)."""

    def __init__(self, classes: int, number: int = 1):
        super().__init__()
        self.theta = nn.ParameterList(
            torch.randn(number, f, k) * (2 / (k - 1)) ** 0.5 for f, k in shapes(classes)
        )

    def noise(self, n: int, generator: torch.Generator | None = None) -> None:
        return None

    def forward(self, z: None) -> list[Tensor]:
        return list(self.theta)


# ---- Hypernetwork --------------------------------------------------------------------------------


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers without biases, leaky ReLU between them; output as large as the input. Without
    batch norm: ten z are too few for its moments, and it does not train."""
    layers = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:]):
        layer = nn.Linear(fan_in, fan_out, bias=False)
        nn.init.normal_(layer.weight, std=(2 / fan_in) ** 0.5)
        layers += [layer, nn.LeakyReLU(0.05)]
    nn.init.normal_(layer.weight, std=fan_in**-0.5)
    return nn.Sequential(*layers[:-1])


class Hypernetwork(nn.Module):
    """G: noise z (N, 100) -> weights of N target networks, a list of (N, F, K + 1).

    start "random": 5,763,200 parameters. Any two z start as unrelated networks.
    start "copies": 1,152 more. The identity of a filter is a random bias of its code, which depends
    on z only weakly at first: all networks begin as near-copies of one, and then spread.
    start "trained": as "copies", then `start_at` a network that SGD has trained.
    start "chains": as "copies", then `start_among` several that SGD has trained independently.
    """

    noise_size = 100
    codes = [6, 16, 120, 1, 1]  # per layer: a code for each filter, or one for the whole layer
    code_size = 8

    def __init__(self, classes: int = 10, start: str = "copies"):
        super().__init__()
        self.shapes = shapes(classes)
        self.extractor = mlp(self.noise_size, 200, 200, self.code_size * sum(self.codes))
        self.generators = nn.ModuleList(
            mlp(self.code_size, 400, 400, f * k // codes)
            for (f, k), codes in zip(self.shapes, self.codes)
        )
        if start != "random":
            last = self.extractor[-1]
            last.bias = nn.Parameter(torch.randn(last.out_features))
            nn.init.normal_(last.weight, std=0.2 * last.in_features**-0.5)

    @torch.no_grad()
    def start_at(self, theta: list[Tensor]) -> None:
        """Make near-copies of this network: the least change of the generators' last layers for
        which the codes of z = 0 give its filters. A layer has fewer codes (at most 120) than its
        generator has features (400), so that there is an exact one."""
        last = self.extractor[-1]
        last.weight *= 0.25  # its filters are in tune with each other: smaller differences
        codes = last.bias.unflatten(0, (-1, self.code_size)).split(self.codes)
        for generator, code, filters, (_, k) in zip(self.generators, codes, theta, self.shapes):
            features = generator[:-1](code).double()  # (codes, 400)
            wanted = (filters.flatten() / (2 / (k - 1)) ** 0.5).view(len(code), -1).double()
            missing = wanted - features @ generator[-1].weight.T.double()
            generator[-1].weight += (torch.linalg.pinv(features) @ missing).T.float()

    def start_among(self, theta: list[Tensor], steps: int = 5000) -> None:
        """Make near-copies of M networks, one for each of M intervals of the first number of z.
        Generators learn the filters, with noise on the codes so that near codes give near filters;
        then the extractor is told which codes belong to z. This needs no images."""
        m, size = len(theta[0]), self.extractor[-1].out_features
        codes = nn.Parameter(torch.randn(m, size, device=theta[0].device))
        optimizer = torch.optim.Adam([codes, *self.generators.parameters()], 2e-3, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        for _ in tqdm(range(steps), desc="imitating", mininterval=2):
            made = self.generate(codes + 0.1 * torch.randn_like(codes))
            loss = sum(F.mse_loss(a, b) / b.square().mean() for a, b in zip(made, theta))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self.choose_among(codes.detach())

    @torch.no_grad()
    def choose_among(self, codes: Tensor, steepness: float = 30.0) -> None:
        """Let E give code k of M where z[0] is in the k-th of M equally likely intervals. Steps
        lead from code to code: for a leaky ReLU r, r(t) - r(t - 1) rises from slope at t = 0 to
        1 at t = 1 and is level elsewhere. Here t = steepness * (z[0] - border)."""
        first, relu, second, _, last = self.extractor
        n, slope = self.noise_size, relu.negative_slope
        first.weight.copy_(torch.cat([torch.eye(n), -torch.eye(n)]))
        # Weights of the first layer's outputs that give z[0], and those that give about 1, as the
        # second layer has no biases: the mean of |z|, scaled, which varies by 8 %.
        number, one = second.weight.new_zeros(2, 2 * n)
        number[0], number[n] = 1 / (1 + slope), -1 / (1 + slope)
        one += (math.pi / 2) ** 0.5 / (1 - slope) / n
        last.weight *= 0.25  # as in start_at
        last.bias.copy_(codes[0])
        factor = steepness**0.5  # shared by two layers, or one would have weights of 30 and more
        for k, change in enumerate(codes.diff(dim=0)):
            border = torch.special.ndtri(torch.tensor((k + 1) / len(codes))).item()
            second.weight[2 * k] = factor * (number - border * one)
            second.weight[2 * k + 1] = second.weight[2 * k] - one / factor
            last.weight[:, 2 * k] = change * factor / (1 - slope)
            last.weight[:, 2 * k + 1] = -last.weight[:, 2 * k]
            last.bias -= change * slope / (1 - slope)  # a leaky step begins above 0

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.extractor[0].weight.device
        return torch.randn(n, self.noise_size, device=device, generator=generator)

    def forward(self, z: Tensor) -> list[Tensor]:
        return self.generate(self.extractor(z))

    def generate(self, codes: Tensor) -> list[Tensor]:
        codes = codes.unflatten(1, (-1, self.code_size)).split(self.codes, dim=1)
        # Without the factor, the usual size of a weight with fan-in K, one step of Adam would move
        # a weight by more than its size.
        return [
            generator(code.flatten(0, 1)).view(len(code), f, k) * (2 / (k - 1)) ** 0.5
            for generator, code, (f, k) in zip(self.generators, codes, self.shapes)
        ]


# ---- Training ------------------------------------------------------------------------------------


def measure_diversity(kind: str, theta: list[Tensor], logits: Tensor, y: Tensor) -> Tensor:
    """How different are N networks? From their weights, or from their logits (N, B, classes) on the
    same images with labels y (B,). All measures carry the factor 100 = dim z of the entropy."""
    dim = Hypernetwork.noise_size
    if kind == "outputs":
        return knn_entropy(logits.softmax(dim=-1).flatten(1), dim)
    if kind == "weights":
        return knn_entropy(flat(fix_gauge(theta)), dim)
    if kind == "variance":
        return dim * flat(fix_gauge(theta)).var(dim=0).mean()
    if kind == "ensemble":  # the loss of the averaged prediction
        log_mean = logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(logits))
        return -dim * F.nll_loss(log_mean, y)
    return logits.new_zeros(())


def training_step(
    model: nn.Module, z: Tensor, x: Tensor, y: Tensor, args: argparse.Namespace, ramp: float = 1.0
) -> tuple[Tensor, ...]:
    """Images (N, B, 3, 32, 32), labels (N, B): network n sees batch n. Diversity has its full
    weight when ramp is 1."""
    theta = model(z)
    logits = each_network(target_network, x, theta)  # (N, B, classes)
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    shared = slice(args.shared)
    diversity = measure_diversity(args.diversity, theta, logits[:, shared], y[0, shared])
    loss = args.lam * loss_acc - ramp * diversity
    acc = (logits.argmax(dim=-1) == y).float().mean()
    return loss, loss_acc, diversity, acc


def learning_rate(args: argparse.Namespace, step: int) -> float:
    warm_up = min(200, args.steps // 5 + 1)
    # Paper: (b) has a constant rate. Here: only in the second half, where networks are taken; it
    # falls to lr in the first, or the chain would be far from converged, or noisy.
    if args.column == "b":
        factor = max(1.0, BURN_IN - 2 * (BURN_IN - 1) * step / args.steps)
        return args.lr * min(factor, (step + 1) / warm_up * BURN_IN)
    return args.lr * min((step + 1) / warm_up, (args.steps - step) / max(1, args.steps - warm_up))


def in_chain(steps: int, done: int, number: int = 10) -> bool:
    """Is the network after `done` steps one of the `number` that column (b) takes from a chain?
    They come from its second half, equally far apart, the last step among them."""
    gap = max(1, steps // (2 * number))
    return (steps - done) % gap == 0 and (steps - done) // gap < number


def train(args: argparse.Namespace, data: dict) -> tuple[nn.Module, list[Tensor], list, dict]:
    """Returns the model, the weights of the ten networks of column (b), the log, and the cost."""
    torch.manual_seed(args.seed)
    model = make_model(settings(args)).to(args.device)
    if args.column in "ab":
        sgd = dict(momentum=0.9, nesterov=True, weight_decay=args.weight_decay, fused=True)
        optimizer = torch.optim.SGD(model.parameters(), args.lr, **sgd)
    else:
        optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    file, first, log, seconds, chain = args.folder / "checkpoint.pt", 0, [], 0.0, []
    images_before = 0
    state = load_checkpoint(file, args) if file.exists() else None  # refuses another run's file
    if state and not args.resume:
        sys.exit(f"{file} is at step {state['step']}: --resume goes on, without it remove the file")
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, log, seconds = state["step"], state["log"], state["seconds"]
        images_before = state["images_before"]
        chain = [[filters.to(args.device) for filters in theta] for theta in state["chain"]]
        print(f"resuming at step {first} of {args.steps}")
    start = time.perf_counter() - seconds
    if args.start in ("trained", "chains") and not state:
        theta, images_before = trained_networks(args)
        (model.start_at if args.start == "trained" else model.start_among)(theta)
    args.folder.mkdir(exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(vars(args), indent=1, default=str))

    x, y = data["train"]
    crops = all_crops(torch.cat([x, x.flip(-1)]), args.crop)  # mirror images are images too
    y = y.repeat(2)
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, mininterval=2)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        generator = seeded(args, step)
        z = model.noise(args.networks, generator)
        images, labels = draw_batch(crops, y, args, generator)
        # Learn first, spread later: networks that are spread while they know nothing stay useless.
        ramp = min(1.0, step / max(1, args.ramp * args.steps))
        loss, loss_acc, diversity, acc = training_step(model, z, images, labels, args, ramp)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5 * args.lam)  # against rare spikes
        optimizer.step()

        done = step + 1
        validating = done % args.validate_every == 0 or done == args.steps
        if args.column == "b" and in_chain(args.steps, done, 10 // args.networks):
            chain.append([filters.detach().clone() for filters in model(None)])
        if done % LOG_EVERY == 0 or validating:
            row = dict(loss=loss, loss_acc=loss_acc, diversity=diversity, acc=acc)
            row = dict(step=done) | {name: value.item() for name, value in row.items()}
            if not math.isfinite(row["loss"] + norm.item()):
                good = f"; {file} is the last good checkpoint" if file.exists() else ""
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr{good}")
            log.append(row)
            bar.set_postfix({k: f"{row[k]:.4g}" for k in ("loss_acc", "acc", "diversity")})
        if validating:
            row = validate(model, *data["val"])
            log.append(dict(step=done) | row)
            numbers = (f"{name[4:]} {value:.4f}" for name, value in row.items())
            bar.write(f"step {done}: " + ", ".join(numbers))
            seconds = time.perf_counter() - start
            content = dict(settings=settings(args), step=done, log=log, seconds=seconds)
            content |= dict(model=model.state_dict(), optimizer=optimizer.state_dict())
            save(content | dict(chain=chain, images_before=images_before), file)
            write_log(log, args.folder / "log.csv")
    # In half precision, for half the size, and tested so; (b)'s networks are tested in full.
    halves = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save(dict(settings=settings(args), model=halves), args.folder / "model.pt")
    model.load_state_dict(halves)
    spent = dict(training_seconds=round(seconds, 1))
    spent["images_seen"] = args.steps * args.networks * args.images + images_before
    return model, [torch.cat(filters) for filters in zip(*chain)], log, spent


def trained_networks(args: argparse.Namespace) -> tuple[list[Tensor], int]:
    """Weights of the networks of SGD at which the hypernetwork starts, and the images they saw."""
    folder, flags = dict(
        trained=("a", "--column a"), chains=("b_5_chains", "--column b --networks 5")
    )[args.start]
    file = args.out / f"{args.dataset}_{folder}" / "model.pt"
    if not file.is_file():
        sys.exit(f"--start {args.start}: no {file}; first train {flags}")
    networks, theirs = load(file, args.device)
    if theirs["fake_data"] != args.fake_data:
        sys.exit(f"--start {args.start}: {file} and this run do not share their images")
    theta = [filters.detach() for filters in networks(None)]
    return theta, len(theta[0]) * theirs["steps"] * theirs["images"]


def make_model(settings: dict) -> nn.Module:
    classes = CLASSES[settings["dataset"]]
    if settings["column"] in "ab":
        return FreeNetworks(classes, settings["networks"])
    return Hypernetwork(classes, settings["start"])


def settings(args: argparse.Namespace) -> dict:
    names = "column dataset diversity start steps lr weight_decay lam ramp networks images shared"
    return {name: getattr(args, name) for name in (names + " crop seed fake_data").split()}


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
def predict(theta: list[Tensor], x: Tensor) -> Tensor:
    """Probabilities (N, B, classes) of N networks on the same images (B, 3, 32, 32), few at a time
    so that the activations stay small: on the CPU a network runs alone, elsewhere all together."""
    images = 250 if x.device.type == "cpu" else max(1, 50000 // len(theta[0]))
    logits = [
        each_network(target_network, part.expand(len(theta[0]), *part.shape), theta)
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


def evaluate(theta: list[Tensor], x: Tensor, y: Tensor) -> dict:
    """Networks one by one, in ensembles of ten (no network in two of them), and all together."""
    probabilities = predict(theta, x)
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
def validate(model: nn.Module, x: Tensor, y: Tensor) -> dict:
    """Ten networks of a hypernetwork, from the same z every time, or those of SGD."""
    z = model.noise(10, torch.Generator(x.device).manual_seed(1))
    tested = evaluate(model(z), x, y)
    names = dict(mean="single", majority="all_majority", mean_probability="all_mean_probability")
    names |= dict(nll="single_nll", disagreement="disagreement")
    return {f"val_{name}": tested[key] for name, key in names.items()}


@torch.no_grad()
def averages(model: nn.Module, z: Tensor, numbers: list[int]):
    """Yields (n, the mean of the weights of the networks of the first n z) for increasing n, at
    most 100 networks in memory."""
    mean, first = None, 0
    for n in numbers:
        for part in z[first:n].split(100):
            first += len(part)
            total = [filters.sum(dim=0, keepdim=True) for filters in model(part)]
            if mean is None:
                mean = [torch.zeros_like(filters) for filters in total]
            for m, t in zip(mean, total):
                m += (t - len(part) * m) / first
        yield n, mean


def distil(model: nn.Module, z: Tensor, x: Tensor, y: Tensor) -> dict:
    """One network from the averaged weights of n samples: its accuracy, for increasing n."""
    numbers = [n for n in NUMBERS if n < len(z)] + [len(z)]
    tested = [ensemble(predict(theta, x), y) for _, theta in averages(model, z, numbers)]
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


def plot_distillation(runs: list[dict]) -> Figure:
    """Accuracy against the number of networks: averaged into one, or voting."""
    columns, rows = min(2, len(runs)), math.ceil(len(runs) / 2)
    figure = Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained")
    for place, run in enumerate(runs, start=1):
        ax = figure.add_subplot(rows, columns, place)
        tested, averaged = run["tested"], run["distilled"]
        ax.plot(averaged["numbers"], 100 * torch.tensor(averaged["accuracy"]), "o-", color="C0")
        ax.plot(tested["sizes"], 100 * torch.tensor(tested["majority_by_size"]), "s--", color="C1")
        ax.axhline(100 * tested["single"], color="black", linestyle=":")
        ax.legend(["ONE network, weights averaged", "majority vote of n", "a typical member"])
        ax.set(xscale="log", xlabel="networks n", ylabel="test accuracy (%)", title=run["title"])
    return figure


def plot_comparison(runs: list[dict]) -> Figure:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=[5, 4])
    for i, (name, label) in enumerate(dict(single="one", ten_majority="majority of ten").items()):
        shown = [k for k, run in enumerate(runs) if i == 0 or run["tested"]["networks"] > 1]
        places = [k + 0.4 * i for k in shown]
        values = [100 * runs[k]["tested"][name] for k in shown]
        bars.bar_label(bars.bar(places, values, 0.4, label=label), fmt="%.1f", fontsize=8)
    everything = [100 * run["tested"][k] for run in runs for k in ("single", "ten_majority")]
    bars.set(ylim=(min(everything) - 8, max(everything) + 4), ylabel="test accuracy (%)")
    names = [run["title"].replace(", ", "\n") for run in runs]
    bars.set_xticks([k + 0.2 for k in range(len(runs))], names, fontsize=8)
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    for run in runs:
        rows = run.get("log")
        if not rows:  # evaluated without training
            continue
        used = run["settings"]
        own = used["networks"] * used["images"] * used.get("ranks", 1)
        before = run["images_seen"] - own * rows[-1]["step"]  # by the networks that it started at
        millions = [(before + own * row["step"]) / 1e6 for row in rows]
        curves.plot(millions, [100 * row["val_majority"] for row in rows], label=run["title"])
    curves.set(xlabel="training images seen by all networks (millions)")
    curves.set(ylabel="validation accuracy (%)", title="majority of ten, or of the networks of SGD")
    curves.legend(fontsize=8)
    return figure


def compare(folders: list[Path], out: Path) -> dict:
    """A table and a figure of finished runs."""
    out.mkdir(exist_ok=True)
    runs = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    runs = [run | dict(title=title(run["settings"])) for run in runs]
    names = ["single", "ten_majority", "all_majority", "disagreement", "single_nll", "ten_nll"]
    names += ["single_calibration_error", "ten_calibration_error"]
    rows = []
    for run in runs:
        row = dict(title=run["title"]) | {name: run["tested"][name] for name in names}
        row["networks"] = run["tested"]["networks"]
        row["averaged"] = run["distilled"]["accuracy"][-1] if "distilled" in run else None
        rows.append(row | {name: run.get(name) for name in ("images_seen", "training_seconds")})
    for name in rows[0]:
        cells = (f"{v:.4f}" if isinstance(v := row[name], float) else str(v) for row in rows)
        print(f"{name:26s}", *(f"{cell:>22s}" for cell in cells))
    (out / "compare.json").write_text(json.dumps(rows, indent=1))
    plot_comparison(runs).savefig(out / "compare.png", dpi=150)
    distilled = [run for run in runs if "distilled" in run]
    if distilled:
        plot_distillation(distilled).savefig(out / "compare_distillation.png", dpi=150)
    return dict(rows=rows)


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
    words += "s" if used["column"] == "b" and used["networks"] > 1 else ""
    words += f"{used['diversity']}, lam = {used['lam']:g}" if used["column"] == "d" else ""
    words += "" if used["start"] == "copies" else f", {used['start']} start"
    words += ", CIFAR-100" if used["dataset"] == "cifar100" else ""
    return words + (", MADE-UP DATA" if used["fake_data"] else "")


def main(argv: list[str] | None = None) -> dict:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.compare:
        return compare(args.compare, args.folder)
    if args.column == "all":
        columns = [[*argv, "--device", args.device, "--column", column] for column in COLUMNS]
        folders = [parse_args(column).folder for column in columns]  # a wrong flag stops here
        for column in columns:
            main(column)
        return compare(folders, args.folder)
    metrics = provenance(argv, args)
    if args.checkpoint:
        args.folder.mkdir(exist_ok=True)
        model, used = load(args.checkpoint, args.device)
        if isinstance(model, FreeNetworks):
            sys.exit(f"{args.checkpoint} is of column a or b: there is no hypernetwork to sample")
        args.dataset, args.fake_data = used["dataset"], used["fake_data"]
        data, chain = load_data(args), []
    else:
        data, used = load_data(args), settings(args)
        model, chain, log, spent = train(args, data)
        metrics |= spent | dict(log=[row for row in log if "val_mean" in row])
        plot_training(log, title(used)).savefig(args.folder / "training.png", dpi=150)

    start = time.perf_counter()
    parameters = sum(p.numel() for p in model.parameters())
    metrics |= dict(title=title(used), seed=used["seed"], settings=used, parameters=parameters)
    metrics |= dict(data="made up" if used["fake_data"] else used["dataset"], sigma=args.sigma)
    z = model.noise(max(args.tested, args.averaged), torch.Generator(args.device).manual_seed(2))
    z = z if z is None else args.sigma * z
    with torch.no_grad():
        theta = chain or model(z if z is None else z[: args.tested])
    metrics["validated"] = evaluate(theta, *data["val"])  # for choices; the test set is for the end
    metrics["tested"] = tested = evaluate(theta, *data["test"])
    print(f"{title(used)}: {tested['networks']} networks, mean {100 * tested['single']:.2f} %")
    if tested["networks"] >= 10:
        print(f"majority of ten {100 * tested['ten_majority']:.2f} %")
    if z is not None:
        metrics["distilled"] = distil(model, z[: args.averaged], *data["test"])
        print(f"averaged into one network {100 * metrics['distilled']['accuracy'][-1]:.2f} %")
        plot_distillation([metrics]).savefig(args.folder / "distillation.png", dpi=150)
    analysis = time.perf_counter() - start
    metrics["seconds"] = round(metrics.get("training_seconds", 0) + analysis, 1)
    (args.folder / "metrics.json").write_text(json.dumps(metrics, indent=1))
    print(f"figures and metrics: {args.folder}")
    return metrics


if __name__ == "__main__":
    main()
