"""One hypernetwork that generates all 20,018 weights of an MNIST classifier, accurate and diverse.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[gauge(G(z))]

Section "MNIST" of the paper. New against the toy: the samples are networks, so the trivial
symmetries of their weights are removed (gauge fixing) before diversity is measured, and G shares
parameters: an extractor E turns z into one code per filter, one weight generator per layer turns
codes into filters. The networks are then taken apart: accuracies, votes, filters, PCA, paths,
attacks. Beside it the baseline MNFG, and the paper's own recipe for training the hypernetwork.

    python 02_mnist_hypernet.py --quick            # all runs in minutes: does it run?
    python 02_mnist_hypernet.py --runs hypernet    # one run; again: it goes on, or redraws
    python 02_mnist_hypernet.py                    # all runs: 3.5 hours on one CPU core
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision import datasets
from torchvision.transforms.functional import InterpolationMode, rotate
from tqdm import tqdm

from common import conv2d, each_network, fix_gauge, knn_entropy, linear, max_pool2d

NAME = "02_mnist_hypernet"
# The documented runs. Training images are moved by up to `shift` pixels. MNFG's lam is the number
# of training images, as its bound demands.
RECIPES = dict(
    hypernet=dict(steps=3000, lr=2e-3, lam=1e3, networks=32, images=32, shift=1, start="copies"),
    mnfg=dict(steps=55_000, lr=1e-3, lam=55e3, networks=4, images=32, shift=1, start=None),
    paper=dict(steps=13_000, lr=3e-4, lam=1e3, networks=32, images=32, shift=0, start="random"),
)
QUICK = dict(steps=250)  # at most
# What is analysed: networks tested, images along paths, images attacked. CUDA's is the paper's.
COSTS = dict(
    quick=dict(tested=40, path_images=100, attacked=100),
    cpu=dict(tested=400, path_images=1000, attacked=500),
    cuda=dict(tested=4000, path_images=10_000, attacked=10_000),
)
TITLES = dict(hypernet="hypernetwork", mnfg="MNFG", paper="paper's recipe")
PAPER = dict(hypernet=99.14, mnfg=99.28, paper=99.14)  # the paper's vote of 200, by our run's name
# By recipe: the colour of its documented run, and of runs with other settings.
COLOURS = dict(hypernet=["C0", "navy", "deepskyblue"], mnfg=["C2", "darkgreen"], paper=["C4", "m"])
SIZES = [1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200]  # of ensembles
EPSILONS = [i / 100 for i in range(25)]  # of adversarial examples: 0 to 0.24
ANGLES = list(range(0, 181, 10))  # of a rotated digit, in degrees
VALIDATION, TEST, ENSEMBLES, PATHS, ATTACKS, ROTATION, SHOWN = range(1, 8)  # seeds of evaluation
LOG_ROWS = 20  # in a run's log, at most: as many validations
SAVE_SECONDS = 120  # of training that a killed run loses at most


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{NAME}.py", description=__doc__.splitlines()[0])
    add, recipes = parser.add_argument, list(RECIPES)
    add("--runs", dest="recipes", nargs="+", choices=recipes, default=recipes, help="all if absent")
    add("--steps", type=int, help="of training; the recipe's unless given, as all that follow")
    add("--lr", type=float, help="rate of Adam")
    add("--lam", type=float, help="weight of accuracy against diversity")
    add("--networks", type=int, help="in a step: samples of z")
    add("--images", type=int, help="in a step, for each network")
    add("--seed", type=int, help="of all random numbers of training")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=device, help=f"here: {device}")
    add("--data", type=Path, default=Path("data"), help="folder of MNIST; filled if it is empty")
    add("--fake-data", action="store_true", help="made-up images, to try the code without MNIST")
    add("--out", type=Path, default=Path("runs") / NAME, help="a folder for each run goes in here")
    add("--quick", action="store_true", help=f"small costs, at most {QUICK | COSTS['quick']}")
    args = parser.parse_args(argv)
    for name in ("steps", "lr", "lam", "networks", "images"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"argument --{name}: {value} is not a positive number")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device; use cpu, or install CUDA")
    if args.networks == 1:
        parser.error("diversity needs at least 2 --networks in a step")
    args.runs = [settings(args, recipe) for recipe in args.recipes]
    return args


def settings(args: argparse.Namespace, recipe: str) -> argparse.Namespace:
    """A recipe with what the command overrides; its name says so."""
    flags = ("steps", "lr", "lam", "networks", "images", "seed")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    values = RECIPES[recipe]
    quick = {name: min(most, values[name]) for name, most in QUICK.items() if args.quick}
    words = [f"{name}{value:.12g}" for name, value in given.items()]
    words += ["quick"] * args.quick + ["fake"] * args.fake_data
    c = argparse.Namespace(script=NAME, recipe=recipe, **dict(seed=0) | values | quick | given)
    c.fake_data, c.name = args.fake_data, "_".join([recipe, *words])
    return c


# ---- Data ----------------------------------------------------------------------------------------
def load_data(args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Images (B, 1, 28, 28) in [0, 1] and labels (B,) of the splits train, val and test, all on the
    training device: 55,000, 5,000 and 10,000 of MNIST."""
    if args.fake_data:  # a smooth random pattern for each class, moved by two pixels, and noise
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 1, 7, 7, generator=generator)
        patterns = F.interpolate(patterns, 28, mode="bicubic", align_corners=False)
        (x,), (y,) = draw(F.pad(patterns, [2] * 4), torch.arange(10), (1, 3000), generator)
        x = (0.6 * x + 0.1 * torch.randn(x.shape, generator=generator)).clamp(0, 1)
        (x, x_test), (y, y_test) = x.split([2500, 500]), y.split([2500, 500])
    else:
        try:
            train, test = (datasets.MNIST(args.data, train=t, download=True) for t in (True, False))
        except Exception as error:
            remedy = f"put its four *-ubyte files in {args.data}/MNIST/raw, or try --fake-data"
            sys.exit(f"no MNIST and no download ({type(error).__name__}): {remedy}")
        x, x_test = (split.data[:, None].float() / 255 for split in (train, test))
        y, y_test = train.targets, test.targets
    n = len(x) // 12
    splits = dict(train=(x[n:], y[n:]), val=(x[:n], y[:n]), test=(x_test, y_test))
    return {k: (x.to(args.device), y.to(args.device)) for k, (x, y) in splits.items()}


def draw(padded: Tensor, y: Tensor, shape: tuple, generator) -> tuple[Tensor, Tensor]:
    """Random crops (N, B, 1, 28, 28) of padded images, and labels (N, B)."""
    crops = padded.unfold(2, 28, 1).unfold(3, 28, 1)  # a view: all s * s crops of each image
    index, row, column = (
        torch.randint(n, shape, device=y.device, generator=generator)
        for n in (len(crops), *crops.shape[2:4])
    )
    return crops[index, :, row, column], y[index]


# ---- Target network ------------------------------------------------------------------------------
SHAPES = [(32, 26), (16, 801), (8, 785), (10, 9)]  # (F, K + 1) of its layers: 20,018 weights


def target_network(x: Tensor, theta: list[Tensor]) -> Tensor:
    """(N, B, 1, 28, 28) -> logits (N, B, 10); max pooling before ReLU is the same and cheaper."""
    x = max_pool2d(conv2d(x, theta[0], 5, padding=2), 2).relu()  # (N, B, 32, 14, 14)
    x = max_pool2d(conv2d(x, theta[1], 5, padding=2), 2).relu()  # (N, B, 16, 7, 7)
    x = linear(x.flatten(2), theta[2]).relu()  # (N, B, 8)
    return linear(x, theta[3])


def flat(theta: list[Tensor]) -> Tensor:
    return torch.cat([filters.flatten(1) for filters in theta], dim=1)  # (N, D)


# ---- Hypernetwork --------------------------------------------------------------------------------
def mlp(*widths: int) -> nn.Sequential:
    """Linear layers without biases; leaky ReLU, then batch norm, between them."""
    layers = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:]):
        layer = nn.Linear(fan_in, fan_out, bias=False)
        std = 0.1 / fan_in**0.5  # the authors' gain; with a gain of 1 the logits explode
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
        norm = nn.BatchNorm1d(fan_out, eps=1e-7, momentum=0.02)
        layers += [layer, nn.LeakyReLU(0.05), norm]
    return nn.Sequential(*layers[:-2])


class Hypernetwork(nn.Module):
    """G: noise z (N, Z) -> weights of N target networks, a list of (N, F, K + 1), gauge fixed.

    `shapes` are the (F, K + 1) of the target network's layers; `codes` says how many codes a layer
    has: F, one for each filter, or 1 for the whole layer; `widths` are the hidden widths of the
    layers' weight generators. start "copies": codes have a random bias and depend on z only weakly
    at first, so that all networks begin as near-copies of one, which is learned fast, and then
    spread; "random", the paper's: no bias, and any two z begin as unrelated networks.
    """

    noise_size, code_size = 300, 15

    def __init__(self, shapes, codes, widths, start: str = "copies"):
        super().__init__()
        self.shapes, self.codes = shapes, codes
        self.extractor = mlp(self.noise_size, 300, 300, self.code_size * sum(codes))
        self.generators = nn.ModuleList(
            mlp(self.code_size, width, width, f * k // n)
            for width, (f, k), n in zip(widths, shapes, codes, strict=True)
        )
        if start == "copies":
            last = self.extractor[-1]
            last.bias = nn.Parameter(torch.randn(last.out_features))
            nn.init.normal_(last.weight, std=0.2 / last.in_features**0.5)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.extractor[0].weight.device
        return torch.rand(n, self.noise_size, device=device, generator=generator) * 2 - 1

    def forward(self, z: Tensor) -> list[Tensor]:
        codes = self.extractor(z).unflatten(1, (-1, self.code_size)).split(self.codes, dim=1)
        theta = [
            generator(code.flatten(0, 1)).view(len(z), *shape)  # one row per code: a filter
            for generator, code, shape in zip(self.generators, codes, self.shapes)
        ]
        return fix_gauge(theta)

    def theta_and_entropy(self, z: Tensor) -> tuple[list[Tensor], Tensor]:
        """What a training step needs: N networks, and how diverse they are."""
        theta = self(z)
        return theta, knn_entropy(flat(theta), dim=self.noise_size)


# ---- Baseline: multiplicative normalizing flows (MNFG) -------------------------------------------
class Flow(nn.Module):
    """Two masked RealNVP steps, z (N, d) -> z' and log |det dz'/dz| (N,). A step keeps the masked
    half and moves the rest towards u: z' = M z + (1 - M) (g z + (1 - g) u), both u and g from M z.
    The masks are complements, drawn once and saved, so that the same noise is the same network."""

    def __init__(self, d: int, width: int):
        super().__init__()
        mask = torch.randint(2, (d,)).float()
        self.register_buffer("masks", torch.stack([mask, 1 - mask]))
        self.hidden = nn.ModuleList([nn.Linear(d, width) for _ in range(2)])
        self.moves = nn.ModuleList([nn.Linear(width, 2 * d) for _ in range(2)])
        for layer in (*self.hidden, *self.moves):
            nn.init.normal_(layer.weight, std=(4 / (d + width)) ** 0.5)
            nn.init.zeros_(layer.bias)
        for layer in self.moves:
            nn.init.constant_(layer.bias[d:], 2.0)  # gates begin open: z' is nearly z

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros_like(z[:, 0])
        for mask, hidden, move in zip(self.masks, self.hidden, self.moves):
            u, logit = move(hidden(mask * z).tanh()).chunk(2, dim=1)
            g = logit.sigmoid()
            z = mask * z + (1 - mask) * (g * z + (1 - g) * u)
            log_det = log_det + ((1 - mask) * F.logsigmoid(logit)).sum(dim=1)
        return z, log_det


class MNFGLayer(nn.Module):
    """One layer's posterior: W | z ~ N(z * mean, std^2), z from a flow, one z per filter of a
    convolution (for its bias too) or per input of a dense layer."""

    def __init__(self, filters: int, fan_in: int, conv: bool, init_std: float):
        super().__init__()
        self.conv, self.d = conv, filters if conv else fan_in
        self.mean = nn.Parameter(F.pad(torch.randn(filters, fan_in) * init_std, (0, 1)))
        # Deviations begin at exp(-9) for weights and exp(-4.5) for biases, as its authors'.
        self.log_std = nn.Parameter(F.pad(torch.full((filters, fan_in), -9.0), (0, 1), value=-4.5))
        self.start_log_var = nn.Parameter(torch.full((self.d,), math.log(0.1)))
        self.flow = Flow(self.d, 50)
        # r(z | W), the auxiliary posterior: its own flow, then a Gaussian that depends on W.
        self.r_flow = Flow(self.d, 100)
        self.start_mean, self.r_weight, self.r_mean, self.r_precision = (
            nn.Parameter(torch.randn(self.d) * (4 / self.d) ** 0.5) for _ in range(4)
        )

    def forward(self, noise_z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Noise (N, d) and (N, F, K + 1) -> filters (N, F, K + 1), and a bound (N,) on the KL
        divergence of their distribution from the prior N(0, 1)."""
        z, log_det = self.flow(self.start_mean + (self.start_log_var / 2).exp() * noise_z)
        scale = z[:, :, None] if self.conv else F.pad(z, (0, 1), value=1.0)[:, None]
        mean = scale * self.mean  # (N, F, K + 1)
        # As its authors: deviations of at most 0.5 in the network, unlimited in the divergence.
        filters = mean + self.log_std.exp().clamp(max=0.5) * noise
        divergence = mean.square() + (2 * self.log_std).exp() - 1 - 2 * self.log_std
        log_q = -0.5 * (math.log(2 * math.pi) + self.start_log_var + 1).sum() - log_det
        return filters, 0.5 * divergence.sum(dim=(1, 2)) + log_q - self.log_r(z, filters)

    def log_r(self, z: Tensor, filters: Tensor) -> Tensor:
        """log r(z | W) (N,), which stands in for the unknown log q(z | W)."""
        if self.conv:
            inner = torch.einsum("f,nfk->nk", self.r_weight, filters)
            inner = inner[:, :-1] + inner[:, -1:]
        else:
            inner = (filters[..., :-1] @ self.r_weight).tanh()
        activation = inner.mean(dim=1, keepdim=True)  # (N, 1)
        log_precision = (self.r_precision * activation).clamp(-10, 10)  # it may blow up early
        start, log_det = self.r_flow(z)
        error = start - self.r_mean * activation
        log_normal = log_precision - log_precision.exp() * error.square() - math.log(2 * math.pi)
        return log_det + 0.5 * log_normal.sum(dim=1)


class MNFG(nn.Module):
    """Louizos and Welling (2017): the same weights from a variational posterior, each layer by
    itself. Its bound takes the place of the entropy: with lam = the number of training images,
    lam * loss_acc - entropy is the negative evidence lower bound. The first `convs` layers are
    convolutions; `stds` are the initial deviations of `mean`. Paper (of MNFG): one z per image and
    noise on activations. Here: explicit weights, as in the analyses, one network per batch."""

    def __init__(self, shapes, convs: int, stds):
        super().__init__()
        self.shapes = shapes
        self.layers = nn.ModuleList(
            MNFGLayer(f, k - 1, conv=i < convs, init_std=std)
            for i, ((f, k), std) in enumerate(zip(shapes, stds, strict=True))
        )
        self.sizes = [layer.d for layer in self.layers] + [f * k for f, k in shapes]

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """For the flows of all layers, then for all weights: (N, 840 + 20,018)."""
        device = self.layers[0].mean.device
        return torch.randn(n, sum(self.sizes), device=device, generator=generator)

    def theta_and_entropy(self, z: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gauge is not fixed: it changes no answer, and nothing is measured in weights."""
        parts, n = z.split(self.sizes, dim=1), len(self.layers)
        noises = (part.unflatten(1, shape) for part, shape in zip(parts[n:], self.shapes))
        theta, bounds = zip(*map(lambda layer, *e: layer(*e), self.layers, parts[:n], noises))
        return list(theta), -sum(bounds).mean()

    def forward(self, z: Tensor) -> list[Tensor]:
        return fix_gauge(self.theta_and_entropy(z)[0])


def make_model(c: argparse.Namespace) -> nn.Module:
    if c.recipe == "mnfg":  # 808,156 parameters; deviations as its authors', from unusual fans
        return MNFG(SHAPES, convs=2, stds=[0.156, 0.039, 0.071, 0.471])
    # 633,640 parameters with the paper's start, 855 more with ours.
    return Hypernetwork(SHAPES, codes=[32, 16, 8, 1], widths=[40, 100, 100, 60], start=c.start)


# ---- Training ------------------------------------------------------------------------------------
def training_step(model: nn.Module, z: Tensor, x: Tensor, y: Tensor, c) -> tuple[Tensor, ...]:
    """Images (N, B, 1, 28, 28), labels (N, B): network n sees batch n."""
    theta, entropy = model.theta_and_entropy(z)  # of gauge-fixed weights; MNFG: minus its bound
    logits = each_network(target_network, x, theta)  # (N, B, 10)
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss = c.lam * loss_acc - entropy
    acc = (logits.argmax(dim=-1) == y).float().mean()
    return loss, loss_acc, entropy, acc


def rate_factor(c: argparse.Namespace, step: int) -> float:
    """A step's share of the learning rate: a short rise, then a linear fall to 0."""
    if c.recipe == "paper":
        return 0.99998**step
    warm_up = min(200, c.steps // 5 + 1)
    return min((step + 1) / warm_up, (c.steps - step) / max(1, c.steps - warm_up))


def train(c: argparse.Namespace, data: dict, file: Path) -> None:
    """Train one run, or go on where a stopped one stood. What it leaves behind is the file."""
    x, y = data["train"]
    stream = (1 + c.seed % 4000) * 10**6  # torch's generator has 2**32 seeds
    torch.manual_seed(stream)
    model = make_model(c).to(y.device)
    optimizer = torch.optim.Adam(model.parameters(), c.lr, fused=True)
    record = dict(settings=vars(c), step=0, seconds=0.0, log=[])
    if file.exists():
        record = read(file, c)
        model.load_state_dict(record["model"])
        for state in record["optimizers"]:
            optimizer.load_state_dict(state)

    padded = F.pad(x, [c.shift] * 4)
    first, every = record["step"], max(50, math.ceil(c.steps / LOG_ROWS))
    begun, saved = time.perf_counter() - record["seconds"], time.perf_counter()
    bar = tqdm(range(first, c.steps), c.name, initial=first, total=c.steps, mininterval=1)
    for step in bar:
        # A step's random numbers depend on seed and step alone: a run goes on as if never stopped.
        generator = torch.Generator(y.device).manual_seed(stream + 1 + step)
        z = model.noise(c.networks, generator)
        images, labels = draw(padded, y, (c.networks, c.images), generator)  # other ones for each
        model.train()
        loss, loss_acc, entropy, acc = training_step(model, z, images, labels, c)
        optimizer.zero_grad()
        loss.backward()
        # Rare spikes of the gradient can kill every network for good; they are cut at 5 lam.
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5 * c.lam)
        optimizer.param_groups[0]["lr"] = c.lr * rate_factor(c, step)
        optimizer.step()

        done = step + 1
        logging = done % every == 0 or done == c.steps
        if logging or time.perf_counter() - saved > SAVE_SECONDS:
            row = dict(loss_acc=loss_acc, entropy=entropy, acc=acc, norm=norm)
            row = dict(step=done) | {name: value.item() for name, value in row.items()}
            if not all(map(math.isfinite, row.values())):
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr")
            if logging:
                row |= validate(model, data)
                record["log"].append(row)
                bar.set_postfix(val_one=f"{row['val_one']:.3f}", refresh=False)
            saved = time.perf_counter()
            record |= dict(step=done, seconds=saved - begun, model=model.state_dict())
            record["optimizers"] = [optimizer.state_dict()] if done < c.steps else []
            torch.save(record, file.with_suffix(".new"))  # a killed run never leaves half a file
            os.replace(file.with_suffix(".new"), file)


def read(file: Path, c: argparse.Namespace | None = None) -> dict:
    """A checkpoint or metrics.json of this script and, with `c`, of a run with these settings."""
    try:
        if file.suffix == ".json":
            record = json.loads(file.read_text())
        else:
            record = torch.load(file, map_location="cpu", weights_only=True)
        theirs = dict(record["settings"])
        ours = vars(c) if c else dict(script=NAME)
    except Exception as error:
        sys.exit(f"{file} is missing, damaged or not of this script ({type(error).__name__})")
    if other := {k: theirs.get(k) for k, v in ours.items() if theirs.get(k) != v}:
        sys.exit(f"{file} is of other settings, {other}: remove {file.parent} to start afresh")
    return record


def load(file: str | Path, device: str = "cpu") -> nn.Module:
    """A trained model, ready to `sample`."""
    record = read(Path(file))
    model = make_model(argparse.Namespace(**record["settings"]))
    model.load_state_dict(record["model"])
    return model.to(device).eval()


# ---- Evaluation and figures ----------------------------------------------------------------------
@torch.no_grad()
def sample(model: nn.Module, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """The weights of n networks. In inference mode a network depends on its own noise alone."""
    return model.eval()(model.noise(n, generator))


@torch.no_grad()
def predict(theta: list[Tensor], x: Tensor) -> Tensor:
    """Probabilities (N, B, 10) of N networks on the same images (B, 1, 28, 28), few at a time so
    that the activations stay small: on the CPU a network runs alone, elsewhere all together."""
    n = len(theta[0])
    portions = x.split(250 if x.device.type == "cpu" else max(1, 10_000 // n))
    logits = [each_network(target_network, x.expand(n, *x.shape), theta) for x in portions]
    return torch.cat(logits, dim=1).softmax(dim=-1)


def majority(votes: Tensor) -> Tensor:
    """(N, B) -> (B,); ties go to the smallest class."""
    return torch.stack([(votes == k).sum(dim=0) for k in range(10)]).argmax(dim=0)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    n = len(votes)
    same = sum((votes == vote).float().mean() for vote in votes)  # pairs with itself included
    return 1 - ((same - 1) / (n - 1)).item() if n > 1 else 0.0


def calibration_error(probabilities: Tensor, y: Tensor) -> Tensor:
    """Distance of confidence and accuracy, in 15 bins of confidence, weighted by their images."""
    confidence, predicted = probabilities.max(dim=-1)
    bins = (confidence * 15).long().clamp(max=14)
    gap = confidence.new_zeros(15).index_add(0, bins, confidence - (predicted == y).float())
    return gap.abs().sum() / len(y)


def evaluate(probabilities: Tensor, y: Tensor, number: int = 20) -> dict:
    """Of N networks' (N, B, 10): their accuracies, and how often two disagree; for ensembles of 1,
    2, 3, ... the accuracy of the vote and three numbers of the mean probability. Size 1 is all
    networks; the rest are means over `number` ensembles drawn from them, disjoint if N suffices."""
    n, votes = len(probabilities), probabilities.argmax(dim=-1).byte()
    accs = (votes == y).float().mean(dim=1)
    result = dict(networks=n, mean=accs.mean().item(), std=accs.std(correction=0).item())
    result |= dict(accuracies=accs.tolist(), disagreement=disagreement(votes))
    result |= dict(vote={}, mean_probability={}, nll={}, calibration_error={})
    sizes = [size for size in SIZES if size <= n]
    generator, whole = torch.Generator().manual_seed(ENSEMBLES), n // sizes[-1] * sizes[-1]
    shuffles = [torch.randperm(n, generator=generator)[:whole] for _ in range(number)]
    ensembles = torch.cat(shuffles).view(-1, sizes[-1])[:number]
    for size in sizes:
        groups = ensembles[:, :size] if size > 1 else torch.arange(n)[:, None]
        means = [probabilities[group].mean(dim=0) for group in groups]  # (B, 10) each
        numbers = dict(
            vote=[(majority(votes[group]) == y).float().mean() for group in groups],
            mean_probability=[(mean.argmax(dim=-1) == y).float().mean() for mean in means],
            nll=[F.nll_loss(mean.clamp_min(1e-12).log(), y) for mean in means],
            calibration_error=[calibration_error(mean, y) for mean in means],
        )
        for name, values in numbers.items():
            result[name][str(size)] = torch.stack(values).mean().item()
    return result


def validate(model: nn.Module, data: dict) -> dict:
    """Ten networks, and the entropy of 200, as the authors estimate it, from the same z each time.
    Its dimension is that of the hypernetwork's z for MNFG too."""
    x, y = data["val"]
    theta = sample(model, 200, torch.Generator(x.device).manual_seed(VALIDATION))
    result = evaluate(predict([filters[:10] for filters in theta], x), y, number=1)
    entropy = knn_entropy(flat(theta), Hypernetwork.noise_size).item()
    row = dict(val_one=result["mean"], val_vote=result["vote"]["10"], val_entropy=entropy)
    return row | dict(val_nll=result["nll"]["1"], val_disagreement=result["disagreement"])


def paths(model: nn.Module, x: Tensor, y: Tensor, pairs: int = 10, points: int = 40) -> dict:
    """Accuracy from network 2 to network 1: straight between their gauged weights, or through z.
    A path's dip is how far its worst point lies below the worse of its ends."""
    generator = torch.Generator(x.device).manual_seed(PATHS)
    t = torch.linspace(0, 1, points, device=x.device)[:, None, None]
    accs = dict(direct=[], interpolated=[])
    for _ in tqdm(range(pairs), "walking paths"):
        z1, z2 = model.noise(2, generator)
        with torch.no_grad():
            through_z = model.eval()(z1 * t[:, 0] + z2 * (1 - t[:, 0]))
        direct = [filters[-1] * t + filters[0] * (1 - t) for filters in through_z]
        for name, theta in dict(direct=direct, interpolated=through_z).items():
            accs[name].append((predict(theta, x).argmax(dim=-1) == y).float().mean(dim=1).tolist())
    dips = {name: [min(a[0], a[-1]) - min(a) for a in walked] for name, walked in accs.items()}
    dips = {f"{name}_dip": sum(values) / pairs for name, values in dips.items()}
    return dict(images=len(x)) | accs | dips


def fast_gradient(theta: list[Tensor], x: Tensor, target: Tensor) -> Tensor:
    """The sign of the gradient of log p(target | x) of ONE network: which way to change x."""
    x = x.clone().requires_grad_()
    log_p = target_network(x[None], theta)[0].log_softmax(dim=-1)
    return torch.autograd.grad(log_p[torch.arange(len(x)), target].sum(), x)[0].sign()


def adversarial(model: nn.Module, x: Tensor, y: Tensor, members: int = 100) -> dict:
    """Fool one network into a random wrong class with x + epsilon * sign, unclipped, then show the
    images to an ensemble. Only images that the attacked network gets right are attacked. Paper: a
    new network and ensemble per image. Here: per 100 images."""
    generator, hits = torch.Generator(x.device).manual_seed(ATTACKS), []
    for part, labels in zip(tqdm(x.split(100), "attacking"), y.split(100)):
        one, ensemble = sample(model, 1, generator), sample(model, members, generator)
        right = predict(one, part)[0].argmax(dim=-1) == labels
        part, labels = part[right], labels[right]
        shift = torch.randint(1, 10, labels.shape, device=x.device, generator=generator)
        target = (labels + shift) % 10
        sign = fast_gradient(one, part, target)
        images = torch.cat([part + epsilon * sign for epsilon in EPSILONS])
        votes = [predict(theta, images).argmax(dim=-1) for theta in (one, ensemble)]
        answers = torch.stack([majority(vote).view(len(EPSILONS), -1) for vote in votes])
        hits.append(torch.stack([answers != labels, answers == target]))  # (2, 2, epsilons, B)
    hits = torch.cat(hits, dim=-1)
    names = ("one_fooled", "ensemble_fooled", "one_target", "ensemble_target")
    rates = dict(zip(names, hits.float().mean(dim=-1).flatten(0, 1).tolist()))
    return dict(images=hits.shape[-1]) | rates


def turn(image: Tensor) -> Tensor:
    """An image (1, 28, 28) turned by ANGLES: (19, 1, 28, 28)."""
    return torch.stack([rotate(image, angle, InterpolationMode.BILINEAR) for angle in ANGLES])


def rotation(model: nn.Module, image: Tensor, members: int = 200) -> dict:
    """How uncertain networks are of a digit (1, 28, 28) that is turned: entropy of the answers."""
    generator = torch.Generator(image.device).manual_seed(ROTATION)
    probabilities = predict(sample(model, members, generator), turn(image))  # (N, angles, 10)
    mean = probabilities.mean(dim=0)
    one, ensemble = (torch.special.entr(p).sum(dim=-1) for p in (probabilities, mean))
    result = dict(one=one.mean(dim=0).tolist(), ensemble=ensemble.tolist())
    return result | dict(answers=mean.argmax(dim=-1).tolist(), image=image.tolist())


def pca(samples: Tensor, components: int = 6) -> tuple[Tensor, Tensor]:
    """(N, D) -> scores (N, components), and their shares of the variance, by the eigenvectors of
    X X^T: N x N numbers, however many weights a network has."""
    centred = samples - samples.mean(dim=0)
    values, vectors = torch.linalg.eigh(centred @ centred.T)  # in increasing order
    values, vectors = values.clamp_min(0).flip(0), vectors.flip(1)
    return (vectors * values.sqrt())[:, :components], (values / values.sum())[:components]


def analyse(model: nn.Module, data: dict, tested: int, path_images: int, attacked: int) -> dict:
    """All numbers that figures and table show."""
    x, y = data["test"]
    generator = torch.Generator(x.device).manual_seed(TEST)
    tens = tqdm(range(tested // 10), "testing networks, ten at a time")
    probabilities = torch.cat([predict(sample(model, 10, generator), x) for _ in tens])
    return dict(
        parameters=sum(p.numel() for p in model.parameters()),
        test=evaluate(probabilities, y),
        paths=paths(model, x[:path_images], y[:path_images]),
        adversarial=adversarial(model, x[:attacked], y[:attacked]),
        rotation=rotation(model, x[(y == 6).nonzero()[0, 0]]),
    )


def title(c: dict) -> str:
    """The recipe, lam, and what else the command overrode, of a run's settings."""
    recipe, *words = c["name"].split("_")
    lam = "lam = " + f"{c['lam']:.3g}".replace("e+0", "e")  # 1e3
    return ", ".join([TITLES[recipe], lam, *(w for w in words if not w.startswith("lam"))])


def plot_curves(runs, lines, panels: dict, styles: dict, sharey=False, **labels) -> Figure:
    """`panels` are titles and keys; lines(run, key) gives (x, y) for each of the line `styles`.
    A run has one colour: its recipe's, or a shade of it."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=sharey, squeeze=False)[0]
    shades = {recipe: cycle(colours) for recipe, colours in COLOURS.items()}
    for run in runs:
        colour = next(shades[run["settings"]["recipe"]])
        axes[0].plot([], [], color=colour, label=title(run["settings"]))
        for ax, (name, key) in zip(axes, panels.items()):
            for (x, y), style in zip(lines(run, key), styles.values()):
                ax.plot(x, [100 * v for v in y] if "%" in name else y, style, color=colour, ms=5)
            ax.set(title=name, **labels)
            ax.grid(alpha=0.3)
    for name, style in styles.items():
        axes[0].plot([], [], style, color="black", label=name)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def plot_training(runs: list[dict]) -> Figure:
    def lines(run, names):
        c, log = run["settings"], run["log"]
        millions = [row["step"] * c["networks"] * c["images"] / 1e6 for row in log]
        return [(millions, [row[name] for row in log]) for name in names]

    panels = {"validation accuracy (%)": ["val_vote", "val_one"]}
    panels |= {"entropy of 200 networks (nats)": ["val_entropy"]}
    styles = {"vote of ten": "-", "one network (mean of ten)": ":"}
    figure = plot_curves(runs, lines, panels, styles, xlabel="training images (millions)")
    worst = min(100 * run["log"][-1]["val_one"] for run in runs)
    figure.axes[0].set(ylim=(min(97, worst - 1), 100))
    return figure


def plot_histogram(runs: list[dict]) -> Figure:
    accs = [sorted(run["test"]["accuracies"]) for run in runs]
    low = min(one[len(one) // 100] for one in accs)  # one network in a hundred may be below
    edges = torch.linspace(low - 0.001, max(one[-1] for one in accs) + 0.001, 40)

    def lines(run, _):
        share = torch.histogram(torch.tensor(run["test"]["accuracies"]), edges).hist
        vote = list(run["test"]["vote"].values())[-1]
        return [(100 * edges[:-1], share / run["test"]["networks"]), ([100 * vote], [0])]

    styles = {"one network": "-", "vote of 200": "^"}
    return plot_curves(runs, lines, {"networks (%)": None}, styles, xlabel="test accuracy (%)")


def plot_ensembles(runs: list[dict]) -> Figure:
    def lines(run, names):
        curves = [run["test"][name] for name in names]
        paper = {200: PAPER.get(run["settings"]["name"], math.nan) / 100}
        curves += [paper] * ("vote" in names)
        return [([int(size) for size in curve], curve.values()) for curve in curves]

    panels = {"test accuracy (%)": ["mean_probability", "vote"]}
    panels |= {"negative log-likelihood": ["nll"], "calibration error (%)": ["calibration_error"]}
    styles = {"mean probability": "s:", "vote": "o-", "vote of 200, paper's": "X"}
    labels = dict(xscale="log", xticks=[1, 10, 100], xticklabels=[1, 10, 100], xlabel="networks")
    return plot_curves(runs, lines, panels, styles, **labels)


def plot_paths(runs: list[dict]) -> Figure:
    def lines(run, name):
        accs = torch.tensor(run["paths"][name])  # (pairs, points)
        t = torch.linspace(0, 1, accs.shape[1])
        return [(t, accs.mean(dim=0)), (t, accs.amin(dim=0))]

    panels = {f"{name} path: accuracy (%)": name for name in ("direct", "interpolated")}
    styles = {"mean of ten paths": "-", "worst of ten": ":"}
    return plot_curves(runs, lines, panels, styles, True, xlabel="t, from G(z2) to G(z1)")


def plot_adversarial(runs: list[dict]) -> Figure:
    def lines(run, what):
        return [(EPSILONS, run["adversarial"][f"{who}_{what}"]) for who in ("one", "ensemble")]

    panels = {"misclassified (%)": "fooled", "taken for the attacker's target (%)": "target"}
    styles = {"the attacked network": ":", "ensemble of 100 others": "-"}
    labels = dict(xlabel="change of a pixel (1: black to white)")
    return plot_curves(runs, lines, panels, styles, True, **labels)


def plot_rotation(runs: list[dict]) -> Figure:
    """A six turns into a nine. Below the curves: what the ensembles answer."""

    def lines(run, _):
        return [(ANGLES, run["rotation"]["ensemble"]), (ANGLES, run["rotation"]["one"])]

    panels = {"entropy of the answer (nats)": None}
    styles = {"mean probability of 200": "o-", "one network (mean)": ":"}
    figure = plot_curves(runs, lines, panels, styles, xlabel="rotation (degrees)")
    ax = figure.axes[0]
    for i, run in enumerate(runs):  # has three lines: one for the legend, and these two
        for angle, answer in zip(ANGLES, run["rotation"]["answers"]):
            ax.text(angle, -0.2 * (i + 1), answer, color=ax.lines[3 * i].get_color(), ha="center")
    images = turn(torch.tensor(runs[0]["rotation"]["image"]))[:, 0]
    strip = torch.cat(list(images), dim=1)
    ax.imshow(strip, cmap="gray_r", extent=(-5, 185, 2.4, 2.8), aspect="auto")
    ax.set(xlim=(-5, 185), ylim=(-0.2 * len(runs) - 0.1, 2.8), xticks=ANGLES[::3], yticks=[0, 1, 2])
    return figure


def plot_filters(theta: list[Tensor], c: dict) -> Figure:
    """25 samples of one slice of a filter, for three filters."""
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    for ax, (layer, number) in zip(figure.subplots(1, 3), ((1, 1), (1, 2), (2, 1))):
        images = theta[layer - 1][:25, number - 1, :25].view(5, 5, 5, 5)  # input channel 1
        tiles = F.pad(images, (0, 1, 0, 1), value=torch.nan)
        reach = images.abs().quantile(0.98).item()  # one wild sample must not pale the rest
        mosaic = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
        drawn = ax.imshow(mosaic, cmap="RdBu", vmin=-reach, vmax=reach)
        figure.colorbar(drawn, ax=ax, shrink=0.8)
        ax.set_title(f"layer {layer}, filter {number}")
        ax.axis("off")
    figure.suptitle(f"{title(c)}: 25 samples of a filter slice, gauge fixed")
    return figure


def plot_pca(theta: list[Tensor], c: dict) -> Figure:
    """Two principal components of whole networks, and of their convolutions."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    parts = {"whole network": flat(theta)}
    parts |= {"layer 1": theta[0].flatten(1), "layer 2": theta[1].flatten(1)}
    for ax, (name, samples) in zip(figure.subplots(1, 3), parts.items()):
        scores, shares = pca(samples)
        ax.plot(scores[:, 0], scores[:, 1], ".", color=COLOURS[c["recipe"]][0], ms=2)
        ax.set(title=name, xlabel=f"PC 1 ({shares[0]:.1%})", ylabel=f"PC 2 ({shares[1]:.1%})")
        ax.axis("equal")
    figure.suptitle(f"{title(c)}: weights of {len(scores)} networks, shares of the variance")
    return figure


def draw_figures(out: Path) -> list[dict]:
    """All figures of the finished runs in a folder; those of weights where a checkpoint is."""
    files = sorted(out.glob("*/metrics.json"))
    runs = [read(file) for file in files]
    if not runs:
        sys.exit(f"no finished run in {out}")
    pictures = dict(training=plot_training, histogram=plot_histogram, ensembles=plot_ensembles)
    pictures |= dict(paths=plot_paths, adversarial=plot_adversarial, rotation=plot_rotation)
    for name, plot in pictures.items():
        plot(runs).savefig(out / f"{name}.png", dpi=150)
    for file, run in zip(files, runs):
        if (checkpoint := file.with_name("checkpoint.pt")).exists():
            theta = sample(load(checkpoint), 1000, torch.Generator().manual_seed(SHOWN))
            for name, plot in dict(filters=plot_filters, pca=plot_pca).items():
                plot(theta, run["settings"]).savefig(file.with_name(f"{name}.png"), dpi=150)
    return runs


def table(runs: list[dict]) -> str:
    head = ["", "paper: vote of 200", "one network", "vote of 200", "disagree"]
    rows = [[*head, "NLL: one, 200", "calibration error: one, 200"], ["---"] * 7]
    for run in runs:
        c, test = run["settings"], run["test"]
        size, vote = list(test["vote"].items())[-1]
        rows.append([title(c), f"{PAPER[c['name']]} %" if c["name"] in PAPER else ""])
        rows[-1] += [f"{100 * test['mean']:.2f} ± {100 * test['std']:.2f} %"]
        rows[-1] += [f"{100 * vote:.2f} %" + f" (of {size})" * (size != "200")]
        rows[-1] += [f"{100 * test['disagreement']:.2f} %"]
        rows[-1] += [f"{test['nll']['1']:.4f}, {test['nll'][size]:.4f}"]
        errors = (100 * test["calibration_error"][n] for n in ("1", size))
        rows[-1] += [", ".join(f"{error:.2f} %" for error in errors)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---- Main ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> list[dict]:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
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
        record, begun = read(checkpoint), time.perf_counter()
        run = dict(settings=vars(c), command=" ".join(["python", f"{NAME}.py", *argv]))
        git = f'git -C "{Path(__file__).parent}" describe --always --dirty'
        run |= dict(commit=subprocess.getoutput(git), torch=torch.__version__, log=record["log"])
        cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        run["hardware"] = torch.cuda.get_device_name() if args.device == "cuda" else cpu
        costs = COSTS["quick" if args.quick else args.device]
        run |= analyse(load(checkpoint, args.device), data, **costs)
        run["training_seconds"] = round(record["seconds"])
        run["analysis_seconds"] = round(time.perf_counter() - begun)
        file.with_suffix(".new").write_text(json.dumps(run, indent=1))
        os.replace(file.with_suffix(".new"), file)
    runs = draw_figures(args.out)
    print(table(runs), f"\nfigures: {args.out}", sep="\n")
    return runs


if __name__ == "__main__":
    main()
