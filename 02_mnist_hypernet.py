"""One hypernetwork that generates all 20,018 weights of an MNIST classifier, accurate and diverse.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[gauge(G(z))]

Section "MNIST" of the paper. New against the toy: the samples are networks, so the trivial
symmetries of their weights are removed (gauge fixing) before diversity is measured, and G shares
parameters: an extractor E turns z into one code per filter, one weight generator per layer turns
codes into filters. The networks are then taken apart: accuracies, votes, filters, PCA, paths,
attacks. Beside it the baseline MNFG, and the paper's own recipe for training the hypernetwork.

    python 02_mnist_hypernet.py --quick            # all runs in minutes: does it run?
    python 02_mnist_hypernet.py --runs hypernet    # one run; the same command again goes on, redraws
    python 02_mnist_hypernet.py                    # all runs: four hours on one CPU core
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
from tqdm import tqdm

from common import conv2d, each_network, fix_gauge, knn_entropy, linear, max_pool2d

NAME = "02_mnist_hypernet"
# The documented runs. A step draws `networks` samples of z and `images` for each of them, which are
# moved by up to `shift` pixels. MNFG's lam is the number of training images, as its bound demands.
HYPERNET = dict(steps=3000, lr=2e-3, lam=1e3, networks=32, images=32, shift=1, start="copies")
RECIPES = dict(
    hypernet=HYPERNET | dict(seed=0),
    mnfg=dict(steps=55_000, lr=1e-3, lam=55e3, networks=4, images=32, shift=1, start=None, seed=0),
    paper=HYPERNET | dict(steps=13_000, lr=3e-4, shift=0, start="random", seed=0),
)
QUICK = dict(steps=250)  # at most
# What the analysis costs: networks tested, pairs joined by paths, images along them, images to
# attack, networks in the attacked ensemble. The paper's numbers are those of CUDA.
COSTS = dict(
    quick=dict(tested=40, pairs=3, path_images=300, attacked=40, members=20),
    cpu=dict(tested=400, pairs=10, path_images=1000, attacked=500, members=100),
    cuda=dict(tested=4000, pairs=10, path_images=10_000, attacked=10_000, members=100),
)
TITLES = dict(hypernet="hypernetwork", mnfg="MNFG", paper="paper's recipe")
PAPER = dict(hypernet=99.14, mnfg=99.28, paper=99.14)  # the paper's vote of 200, by our run's name
# A recipe's runs with other settings have other shades of its colour.
COLOURS = dict(
    hypernet=["C0", "navy", "deepskyblue", "slategrey"],
    mnfg=["C2", "darkgreen", "yellowgreen"],
    paper=["C4", "indigo", "orchid"],
)
SIZES = [1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200]  # of ensembles
EPSILONS = [i / 100 for i in range(25)]  # of adversarial examples: 0 to 0.24
ANGLES = list(range(0, 181, 10))  # of the rotated digit, in degrees
VALIDATION, TEST, ENSEMBLES, PATHS, ATTACKS, ROTATION, SHOWN = range(1, 8)  # seeds of evaluation
LOG_ROWS = 20  # in a run's log: as many validations
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
        parser.error("argument --networks: diversity needs at least 2, to have a nearest other")
    args.runs = [settings(args, recipe) for recipe in args.recipes]
    return args


def settings(args: argparse.Namespace, recipe: str) -> argparse.Namespace:
    """A recipe with what the command overrides; its name says so."""
    flags = ("steps", "lr", "lam", "networks", "images", "seed")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    values = RECIPES[recipe]
    quick = {name: min(most, values[name]) for name, most in QUICK.items() if args.quick}
    words = [f"{name}{value:g}" for name, value in given.items()]
    words += ["quick"] * args.quick + ["fake"] * args.fake_data
    c = argparse.Namespace(script=NAME, recipe=recipe, **values | quick | given)
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
        self.hidden, self.shift, self.gate = (
            nn.ModuleList([nn.Linear(*sizes) for _ in range(2)])
            for sizes in ((d, width), (width, d), (width, d))
        )
        for layers in (self.hidden, self.shift, self.gate):
            for layer in layers:
                nn.init.normal_(layer.weight, std=(4 / (d + width)) ** 0.5)
                nn.init.constant_(layer.bias, 2.0 if layers is self.gate else 0.0)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros_like(z[:, 0])
        for mask, hidden, shift, gate in zip(self.masks, self.hidden, self.shift, self.gate):
            h = hidden(mask * z).tanh()
            u, logit = shift(h), gate(h)
            g = logit.sigmoid()
            z = mask * z + (1 - mask) * (g * z + (1 - g) * u)
            log_det = log_det + ((1 - mask) * F.logsigmoid(logit)).sum(dim=1)
        return z, log_det


class MNFGLayer(nn.Module):
    """One layer's posterior: W | z ~ N(z * mean, std^2), z from a flow, one z per filter of a
    convolution (for its bias too) or per input of a dense layer."""

    def __init__(self, filters: int, fan_in: int, conv: bool, init_std: float):
        super().__init__()
        d = filters if conv else fan_in
        self.conv, self.d = conv, d
        self.mean = nn.Parameter(torch.randn(filters, fan_in) * init_std)
        self.bias_mean = nn.Parameter(torch.zeros(filters))
        self.log_std = nn.Parameter(torch.full((filters, fan_in), -9.0))
        self.bias_log_var = nn.Parameter(torch.full((filters,), -9.0))
        self.start_mean = nn.Parameter(torch.randn(d) * (4 / d) ** 0.5)
        self.start_log_var = nn.Parameter(torch.full((d,), math.log(0.1)))
        self.flow = Flow(d, 50)
        # r(z | W), the auxiliary posterior: its own flow, then a Gaussian that depends on W
        self.r_flow = Flow(d, 100)
        self.r_weight, self.r_mean, self.r_precision = (
            nn.Parameter(torch.randn(d) * (4 / d) ** 0.5) for _ in range(3)
        )

    def means(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.conv:  # z scales filters, and their biases
            return z[:, :, None] * self.mean, z * self.bias_mean  # (N, F, K), (N, F)
        return z[:, None, :] * self.mean, self.bias_mean.expand(len(z), -1)

    def forward(self, noise_z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Noise (N, d) and (N, F, K + 1) -> filters (N, F, K + 1), their z and its log |det|."""
        z, log_det = self.flow(self.start_mean + (self.start_log_var / 2).exp() * noise_z)
        mean, bias_mean = self.means(z)
        # As its authors: deviations of at most 0.5 in the network, unlimited in the KL divergence.
        weight = mean + self.log_std.exp().clamp(max=0.5) * noise[..., :-1]
        bias = bias_mean + (self.bias_log_var / 2).exp().clamp(max=0.5) * noise[..., -1]
        return torch.cat([weight, bias[..., None]], dim=-1), z, log_det

    def bound(self, filters: Tensor, z: Tensor, log_det: Tensor) -> Tensor:
        """The bound (N,) on the KL divergence of the weights from the prior N(0, 1)."""
        mean, bias_mean = self.means(z)
        divergence = gaussian_divergence(mean, 2 * self.log_std).sum(dim=(1, 2))
        divergence = divergence + gaussian_divergence(bias_mean, self.bias_log_var).sum(dim=1)
        log_q = -0.5 * (math.log(2 * math.pi) + self.start_log_var + 1).sum() - log_det
        return divergence + log_q - self.log_r(z, filters[..., :-1], filters[..., -1])

    def log_r(self, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """log r(z | W) (N,), which stands in for the unknown log q(z | W)."""
        if self.conv:
            inner = torch.einsum("f,nfk->nk", self.r_weight, weight)
            inner = inner + (bias @ self.r_weight)[:, None]
        else:
            inner = (weight @ self.r_weight).tanh()
        activation = inner.mean(dim=1, keepdim=True)  # (N, 1)
        log_precision = (self.r_precision * activation).clamp(-10, 10)  # it may blow up early
        start, log_det = self.r_flow(z)
        error = start - self.r_mean * activation
        log_normal = log_precision - log_precision.exp() * error.square() - math.log(2 * math.pi)
        return log_det + 0.5 * log_normal.sum(dim=1)


def gaussian_divergence(mean: Tensor, log_var: Tensor) -> Tensor:
    """KL(N(mean, var) || N(0, 1)), elementwise."""
    return 0.5 * (log_var.exp() + mean.square() - 1 - log_var)


class MNFG(nn.Module):
    """Louizos and Welling (2017): the same weights from a variational posterior, each layer by
    itself. Its bound takes the place of the entropy: with lam = the number of training images,
    lam * loss_acc - entropy is the negative evidence lower bound.

    The first `convs` of the layers are convolutions; `stds` are the initial deviations of weights.
    Paper (of MNFG): one z per image and noise on activations. Here: explicit weights in training,
    as in the analyses, one network per batch of images.
    """

    def __init__(self, shapes, convs: int, stds):
        super().__init__()
        self.shapes = shapes
        self.layers = nn.ModuleList(
            MNFGLayer(f, k - 1, conv=i < convs, init_std=std)
            for i, ((f, k), std) in enumerate(zip(shapes, stds, strict=True))
        )
        self.sizes = [layer.d for layer in self.layers] + [f * k for f, k in shapes]
        self.noise_size = sum(self.sizes)  # of z and of the weights: 840 + 20,018

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.layers[0].mean.device
        return torch.randn(n, self.noise_size, device=device, generator=generator)

    def layers_drawn(self, noise: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts, n = noise.split(self.sizes, dim=1), len(self.layers)
        noise_w = [part.unflatten(1, shape) for part, shape in zip(parts[n:], self.shapes)]
        return [layer(*e) for layer, *e in zip(self.layers, parts[:n], noise_w)]

    def forward(self, noise: Tensor) -> list[Tensor]:
        return fix_gauge([filters for filters, _, _ in self.layers_drawn(noise)])

    def theta_and_entropy(self, noise: Tensor) -> tuple[list[Tensor], Tensor]:
        """What a training step needs. The gauge changes no answer, so it is not fixed here."""
        drawn = self.layers_drawn(noise)
        bound = sum(layer.bound(*one) for layer, one in zip(self.layers, drawn))
        return [filters for filters, _, _ in drawn], -bound.mean()


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
    first, every = record["step"], math.ceil(c.steps / LOG_ROWS)
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
        theirs = record["settings"]
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


# ---- Evaluation ----------------------------------------------------------------------------------


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
    return torch.stack([(votes == k).sum(dim=0) for k in range(votes.max() + 1)]).argmax(dim=0)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    n = len(votes)
    same = sum((votes == vote).float().mean() for vote in votes)  # pairs with itself included
    return 1 - ((same - 1) / (n - 1)).item() if n > 1 else 0.0


def reliability(probabilities: Tensor, y: Tensor) -> Tensor:
    """(B, 10) -> (3, 15): images, their confidence and their hits, in 15 bins of confidence."""
    confidence, predicted = probabilities.max(dim=-1)
    bins = (confidence * 15).long().clamp(max=14)
    sums = (torch.ones_like(confidence), confidence, (predicted == y).float())
    return torch.stack([confidence.new_zeros(15).index_add(0, bins, s) for s in sums])


def evaluate(probabilities: Tensor, y: Tensor, ensembles: int = 20) -> dict:
    """Of N networks' (N, B, 10): their accuracies; how often two disagree; for sizes 1, 2, 3, ...
    the accuracy of the vote and three numbers of the mean probability. Size 1 is the mean over all
    networks, the others over `ensembles` drawn from them: in a shuffle no network is in two."""
    n, votes = len(probabilities), probabilities.argmax(dim=-1).byte()
    accs = (votes == y).float().mean(dim=1)
    sizes = [size for size in SIZES if size <= n]
    generator = torch.Generator().manual_seed(ENSEMBLES)
    whole = n // sizes[-1] * sizes[-1]  # the rest of a shuffle makes no ensemble
    shuffles = [torch.randperm(n, generator=generator)[:whole] for _ in range(ensembles)]
    groups = torch.cat(shuffles).view(-1, sizes[-1])[:ensembles]
    result = dict(networks=n, ensembles=ensembles, mean=accs.mean().item())
    result |= dict(std=accs.std(correction=0).item(), disagreement=disagreement(votes))
    result |= dict(accuracies=[round(acc, 4) for acc in accs.tolist()])
    result |= dict(vote={}, mean_probability={}, nll={}, calibration_error={}, reliability={})
    for size in sizes:
        numbers, bins = [], 0
        for group in groups[:, :size] if size > 1 else torch.arange(n)[:, None]:
            mean = probabilities[group].mean(dim=0)  # (B, 10)
            of_mean = reliability(mean, y)
            row = [(majority(votes[group]) == y).float().mean()]
            row += [(mean.argmax(dim=-1) == y).float().mean()]
            row += [F.nll_loss(mean.clamp_min(1e-12).log(), y)]
            row += [(of_mean[1] - of_mean[2]).abs().sum() / len(y)]  # expected calibration error
            numbers.append(torch.stack(row))
            bins = bins + of_mean
        means = torch.stack(numbers).mean(dim=0).tolist()
        for name, value in zip(("vote", "mean_probability", "nll", "calibration_error"), means):
            result[name][str(size)] = value
        if size in (1, sizes[-1]):
            result["reliability"][str(size)] = bins.tolist()
    return result


def validate(model: nn.Module, data: dict) -> dict:
    """Ten networks, from the same z every time. Entropy from 200, as the authors did, and with the
    hypernetwork's dim z for any model."""
    x, y = data["val"]
    theta = sample(model, 200, torch.Generator(x.device).manual_seed(VALIDATION))
    result = evaluate(predict([filters[:10] for filters in theta], x), y, ensembles=1)
    row = dict(val_one=result["mean"], val_vote=result["vote"]["10"], val_nll=result["nll"]["1"])
    row["val_disagreement"] = result["disagreement"]
    return row | dict(val_entropy=knn_entropy(flat(theta), Hypernetwork.noise_size).item())


def paths(model: nn.Module, x: Tensor, y: Tensor, pairs: int, points: int = 40) -> dict:
    """Accuracy from network 2 to network 1: straight between their gauged weights, or through z.
    The dip of a path is how far its worst point lies below the worse of its ends."""
    generator = torch.Generator(x.device).manual_seed(PATHS)
    t = torch.linspace(0, 1, points, device=x.device)[:, None]
    curves = dict(direct=[], interpolated=[])
    for _ in tqdm(range(pairs), "walking paths"):
        z1, z2 = model.noise(2, generator)
        with torch.no_grad():
            interpolated = model.eval()(z1 * t + z2 * (1 - t))
        s = t[..., None]
        direct = [filters[-1] * s + filters[0] * (1 - s) for filters in interpolated]
        for name, theta in dict(direct=direct, interpolated=interpolated).items():
            curves[name].append((predict(theta, x).argmax(dim=-1) == y).float().mean(dim=1))
    result = dict(images=len(x))
    for name, accs in curves.items():
        accs = torch.stack(accs)  # (pairs, points)
        worse_end = torch.minimum(accs[:, 0], accs[:, -1])
        result[name] = accs.tolist()
        result[f"{name}_dip"] = (worse_end - accs.amin(dim=1)).mean().item()
    return result


def fast_gradient(theta: list[Tensor], x: Tensor, target: Tensor) -> Tensor:
    """The sign of the gradient of log p(target | x) of ONE network: which way to change x."""
    x = x.clone().requires_grad_()
    log_p = target_network(x[None], theta)[0].log_softmax(dim=-1)
    return torch.autograd.grad(log_p[torch.arange(len(x)), target].sum(), x)[0].sign()


def adversarial(model: nn.Module, x: Tensor, y: Tensor, members: int) -> dict:
    """Fool one network into a random wrong class with x + epsilon * sign, unclipped, then show the
    images to an ensemble. Only images that the attacked network gets right are attacked. Paper: a
    new network and ensemble per image. Here: per 100 images."""
    generator = torch.Generator(x.device).manual_seed(ATTACKS)
    hits = torch.zeros(4, len(EPSILONS), device=x.device)
    attacked = 0
    for part_x, part_y in zip(tqdm(x.split(100), "attacking"), y.split(100)):
        one, ensemble = sample(model, 1, generator), sample(model, members, generator)
        right = predict(one, part_x)[0].argmax(dim=-1) == part_y
        part_x, part_y = part_x[right], part_y[right]
        if not right.any():
            continue
        shift = torch.randint(1, 10, part_y.shape, device=x.device, generator=generator)
        target = (part_y + shift) % 10
        sign = fast_gradient(one, part_x, target)
        images = torch.cat([part_x + epsilon * sign for epsilon in EPSILONS])
        for i, theta in enumerate((one, ensemble)):
            answer = majority(predict(theta, images).argmax(dim=-1)).view(len(EPSILONS), -1)
            hits[2 * i] += (answer != part_y).sum(dim=1)
            hits[2 * i + 1] += (answer == target).sum(dim=1)
        attacked += len(part_x)
    names = ["single_fooled", "single_target", "ensemble_fooled", "ensemble_target"]
    rates = dict(zip(names, (hits / max(1, attacked)).tolist()))
    return dict(images=attacked, members=members, **rates)


def turn(image: Tensor) -> Tensor:
    """An image (28, 28) turned by ANGLES: (19, 1, 28, 28)."""
    angles = torch.deg2rad(torch.tensor(ANGLES, device=image.device))
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    turns = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(turns, (len(turns), 1, 28, 28), align_corners=False)
    return F.grid_sample(image.expand(len(turns), 1, 28, 28), grid, align_corners=False)


def rotation(model: nn.Module, image: Tensor, members: int = 200) -> dict:
    """How uncertain networks are of a digit (28, 28) that is turned: entropy of their answers."""
    generator = torch.Generator(image.device).manual_seed(ROTATION)
    probabilities = predict(sample(model, members, generator), turn(image))  # (N, angles, 10)
    mean = probabilities.mean(dim=0)
    return dict(
        image=(255 * image).round().int().tolist(),
        single_entropy=torch.special.entr(probabilities).sum(dim=-1).mean(dim=0).tolist(),
        ensemble_entropy=torch.special.entr(mean).sum(dim=-1).tolist(),
        ensemble_answer=mean.argmax(dim=-1).tolist(),
    )


def pca(samples: Tensor, components: int = 6) -> tuple[Tensor, Tensor]:
    """(N, D) -> scores (N, components), and their shares of the variance, by the eigenvectors of
    X X^T, which is small: N numbers squared, however many weights a network has."""
    centred = samples - samples.mean(dim=0)
    values, vectors = torch.linalg.eigh(centred @ centred.T)  # in increasing order
    values = values.clamp_min(0)
    scores = vectors * values.sqrt()
    return scores.flip(1)[:, :components], (values.flip(0) / values.sum())[:components]


def shown(model: nn.Module) -> dict[str, Tensor]:
    """1000 networks (paper: 3000) as vectors: as a whole and each layer, for filters and PCA."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(SHOWN)
    theta = sample(model, 1000, generator)
    layers = {f"layer {i}": filters.flatten(1) for i, filters in enumerate(theta, start=1)}
    return {"whole network": flat(theta), **layers}


def analyse(model: nn.Module, data: dict, costs: dict) -> dict:
    """All analyses of the paper and a few more."""
    x, y = data["test"]
    generator = torch.Generator(x.device).manual_seed(TEST)
    tens = tqdm(range(costs["tested"] // 10), "testing networks, ten at a time")
    probabilities = torch.cat([predict(sample(model, 10, generator), x) for _ in tens])
    on_path, attacked = slice(costs["path_images"]), slice(costs["attacked"])
    return dict(
        parameters=sum(p.numel() for p in model.parameters()),
        test=evaluate(probabilities, y),
        paths=paths(model, x[on_path], y[on_path], costs["pairs"]),
        adversarial=adversarial(model, x[attacked], y[attacked], costs["members"]),
        rotation=rotation(model, x[(y == 6).nonzero()[0, 0], 0]),
        variance_shares={name: pca(part)[1].tolist() for name, part in shown(model).items()},
    )


# ---- Figures -------------------------------------------------------------------------------------


def title(c: dict) -> str:
    """The recipe, lam, and what else the command overrode, of a run's settings."""
    recipe, *words = c["name"].split("_")
    lam = "lam = " + f"{c['lam']:.3g}".replace("e+0", "e")  # 1e3
    return ", ".join([TITLES[recipe], lam, *(w for w in words if not w.startswith("lam"))])


def panels(runs: list[dict], number: int, styles: dict, **shared) -> tuple:
    """A figure, its axes, and (run, colour) pairs; a legend below says what colours and line styles
    mean. A recipe's first run has its colour, the others shades of it."""
    figure = Figure(figsize=(9 if number > 1 else 7, 4.6), layout="constrained")
    axes = figure.subplots(1, number, squeeze=False, **shared)[0]
    shades = {recipe: cycle(colours) for recipe, colours in COLOURS.items()}
    coloured = [(run, next(shades[run["settings"]["recipe"]])) for run in runs]
    for run, colour in coloured:
        axes[0].plot([], [], color=colour, label=title(run["settings"]))
    for label, style in styles.items():
        axes[0].plot([], [], style, color="black", label=label)
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure, axes, coloured


def plot_training(runs: list[dict]) -> Figure:
    styles = {"vote of ten": "-", "one network (mean of ten)": ":"}
    figure, (left, right), coloured = panels(runs, 2, styles)
    for run, colour in coloured:
        c, log = run["settings"], run["log"]
        millions = [row["step"] * c["networks"] * c["images"] / 1e6 for row in log]
        for name, style in zip(("val_vote", "val_one"), styles.values()):
            left.plot(millions, [100 * row[name] for row in log], style, color=colour)
        right.plot(millions, [row["val_entropy"] for row in log], color=colour)
    low = min(100 * run["log"][-1]["val_one"] for run in runs)
    left.set(xlabel="training images (millions)", ylabel="validation accuracy (%)")
    left.set(ylim=(min(97, low - 1), 100))
    right.set(xlabel="training images (millions)", ylabel="entropy of 200 networks (nats)")
    return figure


def plot_histogram(runs: list[dict]) -> Figure:
    """Test accuracies of generated networks, in bins 0.05 % wide or wider."""
    figure, (ax,), coloured = panels(runs, 1, {"vote of 200": "--"})
    accs = [[100 * acc for acc in sorted(run["test"]["accuracies"])] for run in runs]
    low = min(97, *(math.floor(one[len(one) // 100]) for one in accs))
    width = max(0.05, (100 - low) / 60)
    edges = [low + i * width for i in range(math.ceil((99.6 - low) / width) + 1)]
    for (run, colour), one in zip(coloured, accs):
        one = [min(max(acc, low), edges[-1]) for acc in one]
        share = [100 / len(one)] * len(one)
        ax.hist(one, edges, weights=share, histtype="stepfilled", color=colour, alpha=0.3)
        ax.hist(one, edges, weights=share, histtype="step", color=colour)
        ax.axvline(100 * list(run["test"]["vote"].values())[-1], ls="--", color=colour)
    ax.set(xlabel="test accuracy (%); the first bin holds all below", ylabel="networks (%)")
    return figure


def plot_ensembles(runs: list[dict]) -> Figure:
    styles = {"vote": "o-", "mean probability": "s:", "vote, paper's": "x"}
    figure, (ax,), coloured = panels(runs, 1, styles)
    for run, colour in coloured:
        for name, style in zip(("vote", "mean_probability"), styles.values()):
            sizes = [int(size) for size in run["test"][name]]
            accs = [100 * acc for acc in run["test"][name].values()]
            ax.plot(sizes, accs, style, color=colour, markersize=4)
        if run["settings"]["name"] in PAPER:
            ax.plot([200], [PAPER[run["settings"]["name"]]], "x", color=colour, markersize=9)
    ax.set(xscale="log", xlabel="networks in the ensemble", ylabel="test accuracy (%)")
    ax.set_xticks([1, 2, 5, 10, 20, 50, 100, 200], [1, 2, 5, 10, 20, 50, 100, 200])
    return figure


def plot_calibration(runs: list[dict]) -> Figure:
    """Is a network right as often as it says? Bins with less than one image in 10,000 are left out."""
    figure, axes, coloured = panels(runs, 2, {"perfect": ":"}, sharex=True, sharey=True)
    for ax, of, which in zip(axes, ("one network", "mean probability of 200"), (0, -1)):
        ax.plot([0, 1], [0, 1], ":", color="black")
        for run, colour in coloured:
            images, confidence, hits = torch.tensor(
                list(run["test"]["reliability"].values())[which]
            )
            full = images > 1e-4 * images.sum()
            ax.plot((confidence / images)[full], (hits / images)[full], "o-", color=colour)
        ax.set(xlabel="confidence", title=of)
    axes[0].set(ylabel="accuracy on the test set")
    return figure


def plot_paths(runs: list[dict]) -> Figure:
    styles = {"mean of all pairs": "-"}
    figure, axes, coloured = panels(runs, 2, styles, sharey=True)
    for ax, name in zip(axes, ("direct", "interpolated")):
        for run, colour in coloured:
            accs = 100 * torch.tensor(run["paths"][name])  # (pairs, points)
            t = torch.linspace(0, 1, accs.shape[1])
            ax.plot(t, accs.T, color=colour, lw=0.6, alpha=0.4)
            ax.plot(t, accs.mean(dim=0), color=colour, lw=2.5)
    axes[0].set(title="direct: G(z1) t + G(z2) (1 - t)", xlabel="t")
    axes[1].set(title="interpolated: G(z1 t + z2 (1 - t))", xlabel="t")
    axes[0].set(ylabel=f"accuracy (%) on {runs[0]['paths']['images']} test images")
    return figure


def plot_adversarial(runs: list[dict]) -> Figure:
    """How often adversarial examples of one network fool it, and an ensemble it is not part of."""
    styles = dict(single="--", ensemble="-")
    labels = {"the attacked network": "--", f"ensemble of {runs[0]['adversarial']['members']}": "-"}
    figure, axes, coloured = panels(runs, 2, labels, sharey=True)
    for ax, criterion in zip(axes, ("fooled", "target")):
        for run, colour in coloured:
            for kind, style in styles.items():
                rates = [100 * rate for rate in run["adversarial"][f"{kind}_{criterion}"]]
                ax.plot(EPSILONS, rates, style, color=colour)
        ax.set(xlabel="change of each pixel (1 = white - black)", ylim=(0, 100))
    axes[0].set(title="misclassified", ylabel="adversarial examples (%)")
    axes[1].set(title="taken for the attacker's target")
    return figure


def plot_rotation(runs: list[dict]) -> Figure:
    """A six becomes a nine; the small digits below are what the ensemble answers."""
    styles = {"mean probability of 200": "o-", "one network (mean)": ":"}
    figure, (ax,), coloured = panels(runs, 1, styles)
    images = turn(torch.tensor(runs[0]["rotation"]["image"]) / 255)[:, 0]
    strip = ax.inset_axes([0, 1.02, 1, 0.12])
    strip.imshow(torch.cat(list(images), dim=1), cmap="gray_r", aspect="auto")
    strip.axis("off")
    for i, (run, colour) in enumerate(coloured):
        result = run["rotation"]
        ax.plot(ANGLES, result["ensemble_entropy"], "o-", color=colour, markersize=4)
        ax.plot(ANGLES, result["single_entropy"], ":", color=colour)
        for angle, answer in zip(ANGLES, result["ensemble_answer"]):
            ax.text(angle, -0.15 * (i + 1), answer, color=colour, ha="center", fontsize=9)
    ax.set(xlabel="rotation (degrees), and the ensemble's answers", xlim=(-5, 185))
    ax.set(ylabel="entropy of the answer (nats)", ylim=(-0.15 * len(runs) - 0.1, 2.3))
    return figure


def plot_filters(parts: dict[str, Tensor], name: str) -> Figure:
    """25 samples of one slice of a filter, for three filters, as in the paper."""
    slices = {
        "layer 1, filter 1": parts["layer 1"][:25, :25],
        "layer 1, filter 2": parts["layer 1"][:25, 26:51],
        "layer 2, filter 1, channel 1": parts["layer 2"][:25, :25],
    }
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for ax, (of, images) in zip(figure.subplots(1, 3), slices.items()):
        tiles = F.pad(images.unflatten(1, (5, 5)), (0, 1, 0, 1), value=torch.nan)
        mosaic = tiles.unflatten(0, (5, 5)).transpose(1, 2).flatten(2).flatten(0, 1)
        reach = images.abs().quantile(0.98).item()  # one wild sample must not pale the rest
        drawn = ax.imshow(mosaic, cmap="RdBu", vmin=-reach, vmax=reach)
        ax.set_title(of, fontsize=11)
        ax.axis("off")
        figure.colorbar(drawn, ax=ax, shrink=0.8)
    figure.suptitle(f"{name}: 25 samples of a filter slice, gauge fixed")
    return figure


def plot_pca(samples: Tensor, name: str) -> Figure:
    """Each principal component against each other one, and its histogram."""
    scores, shares = pca(samples)
    k, reach = scores.shape[1], 1.05 * scores.abs().max().item()
    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots(k, k, sharex=True)
    for i in range(k):
        for j in range(k):
            if i == j:
                axes[i][j].hist(scores[:, i], bins=40, color="C0")
            else:
                axes[i][j].plot(scores[:, j], scores[:, i], ".", markersize=1.5, alpha=0.5)
                axes[i][j].set(ylim=(-reach, reach))
            axes[i][j].set(xlim=(-reach, reach), xticks=[], yticks=[])
        axes[-1][i].set_xlabel(f"PC {i + 1} ({100 * shares[i]:.2g} %)", fontsize=12)
        axes[i][0].set_ylabel(f"PC {i + 1}", fontsize=12)
    figure.suptitle(f"{name}: {len(scores)} networks, shares of the variance, one scale for all")
    return figure


def draw_figures(out: Path) -> list[dict]:
    """All figures of the finished runs in a folder; those of samples where there is a checkpoint."""
    files = sorted(out.glob("*/metrics.json"))
    runs = [read(file) for file in files]
    if not runs:
        sys.exit(f"no finished run in {out}")
    for plot in (
        *(plot_training, plot_histogram, plot_ensembles, plot_calibration),
        *(plot_paths, plot_adversarial, plot_rotation),
    ):
        plot(runs).savefig(out / f"{plot.__name__.removeprefix('plot_')}.png", dpi=150)
    for file, run in zip(files, runs):
        if not file.with_name("checkpoint.pt").exists():
            continue
        parts = shown(load(file.with_name("checkpoint.pt")))
        plot_filters(parts, title(run["settings"])).savefig(file.with_name("filters.png"), dpi=150)
        for name, samples in parts.items():
            figure = plot_pca(samples, f"{title(run['settings'])}, {name}")
            figure.savefig(file.with_name(f"pca_{name.replace(' ', '_')}.png"), dpi=100)
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
        run |= analyse(load(checkpoint, args.device), data, costs)
        run["training_seconds"] = round(record["seconds"])
        run["analysis_seconds"] = round(time.perf_counter() - begun)
        file.with_suffix(".new").write_text(json.dumps(run, indent=1))
        os.replace(file.with_suffix(".new"), file)
    runs = draw_figures(args.out)
    print(table(runs), f"\nfigures: {args.out}", sep="\n")
    return runs


if __name__ == "__main__":
    main()
