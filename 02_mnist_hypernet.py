"""One hypernetwork that generates all 20,018 weights of an MNIST classifier, accurate and diverse.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[gauge(G(z))]

Section "MNIST" of the paper. New against the toy: the samples are networks, so the trivial
symmetries of their weights are removed (gauge fixing) before diversity is measured, and G shares
parameters: an extractor E turns z into one code per filter, one weight generator per layer turns
codes into filters. The networks are then taken apart: accuracies, votes, filters, PCA, paths,
attacks. Beside it the baseline MNFG, and the paper's own recipe for training the hypernetwork.

    python 02_mnist_hypernet.py --quick            # all runs in minutes: does it run?
    python 02_mnist_hypernet.py --runs hypernet    # one run; again: it goes on, or redraws
    python 02_mnist_hypernet.py                    # all runs: 2 hours on one CPU core
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

from common import conv2d, each_network, fix_gauge, knn_entropy, linear, majority, max_pool2d

NAME = "02_mnist_hypernet"
# The documented runs. Training images are moved by up to `shift` pixels. MNFG's lam is the number
# of training images, as its bound demands.
RECIPES = dict(
    hypernet=dict(steps=3000, lr=2e-3, lam=1e3, networks=32, images=32, shift=1, start="copies"),
    mnfg=dict(steps=30_000, lr=1e-3, lam=55e3, networks=4, images=32, shift=1, start=None),
)
RECIPES["paper"] = RECIPES["hypernet"] | dict(steps=13_000, lr=3e-4, shift=0, start="random")
QUICK = dict(steps=250)  # at most
# Networks tested; five times as many images along paths, a fifth for each of 25 attacked networks.
TESTED = dict(quick=20, cpu=200, cuda=2000)
TITLES = dict(hypernet="hypernetwork", mnfg="MNFG", paper="paper's recipe", shift0="images unmoved")
PAPER = dict(paper=0.9914, mnfg_shift0=0.9928)  # the paper's vote of 200, by our run's name
# By recipe: the colour of its documented run, and of runs with other settings.
COLOURS = dict(hypernet=["C0", "navy", "deepskyblue"], mnfg=["C2", "darkgreen"], paper=["C4", "m"])
STYLES = ["o-", "s:", "X"]  # of lines in a figure
SIZES = [1, 2, 5, 10, 20, 50, 100, 200]  # of ensembles
EPSILONS = [i / 50 for i in range(13)]  # of adversarial examples: 0 to 0.24
ANGLES = list(range(0, 181, 10))  # of a rotated digit, in degrees
TEST, PATHS, ATTACKS, ROTATION = range(1, 5)  # seeds of evaluation
SAVE_SECONDS = 120  # of training that a killed run loses at most


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{NAME}.py", description=__doc__.splitlines()[0])
    add, recipes = parser.add_argument, list(RECIPES)
    add("--runs", dest="recipes", nargs="+", choices=recipes, default=recipes, help="all if absent")
    add("--steps", type=int, help="of training; the recipe's unless given, as all that follow")
    add("--shift", type=int, help="of training images, in pixels at most")
    add("--lr", type=float, help="rate of Adam")
    add("--lam", type=float, help="weight of accuracy against diversity")
    add("--networks", type=int, help="in a step: samples of z")
    add("--images", type=int, help="in a step, for each network")
    add("--seed", type=int, help="of all random numbers of training")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[0], help=f"here: {devices[0]}")
    add("--data", type=Path, default=Path("data"), help="folder of MNIST; filled if it is empty")
    add("--fake-data", action="store_true", help="made-up images, to try the code without MNIST")
    add("--out", type=Path, default=Path("runs") / NAME, help="a folder for each run goes in here")
    add("--quick", action="store_true", help="small costs: does it run?")
    args = parser.parse_args(argv)
    args.runs = [settings(args, recipe) for recipe in args.recipes]
    for c in args.runs:
        if not all(0 < v < math.inf for v in (c.steps, c.lr, c.lam, c.networks, c.images)):
            parser.error("--steps, --lr, --lam, --networks, --images: positive numbers")
        if c.networks < 2:
            parser.error("diversity needs at least 2 --networks in a step")
    return args


def settings(args: argparse.Namespace, recipe: str) -> argparse.Namespace:
    """A recipe with what the command overrides; its name says so."""
    flags = ("steps", "shift", "lr", "lam", "networks", "images", "seed")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    values = RECIPES[recipe]
    quick = {name: min(most, values[name]) for name, most in QUICK.items() if args.quick}
    words = [f"{name}{value:.12g}" for name, value in given.items()]
    words += ["quick"] * args.quick + ["fake"] * args.fake_data
    c = argparse.Namespace(script=NAME, recipe=recipe, **dict(seed=0) | values | quick | given)
    c.fake_data, c.name = args.fake_data, "_".join([recipe, *words])
    c.title = ", ".join(TITLES.get(word, word) for word in [recipe, *words])
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
    n, most = len(x) // 12, 1000 if args.quick else None  # images of the smaller splits
    splits = dict(train=(x[n:], y[n:]), val=(x[:n][:most], y[:n][:most]))
    splits["test"] = (x_test[:most], y_test[:most])
    return {k: (x.to(args.device), y.to(args.device)) for k, (x, y) in splits.items()}


def draw(padded: Tensor, y: Tensor, shape: tuple, generator) -> tuple[Tensor, Tensor]:
    """Random crops (N, B, 1, 28, 28) of padded images, and labels (N, B)."""
    crops = padded.unfold(2, 28, 1).unfold(3, 28, 1)  # a view: all s * s crops of each image
    sizes = len(crops), *crops.shape[2:4]
    choices = [torch.randint(n, shape, device=y.device, generator=generator) for n in sizes]
    return crops[choices[0], :, choices[1], choices[2]], y[choices[0]]


# ---- Target network ------------------------------------------------------------------------------
SHAPES = [(32, 26), (16, 801), (8, 785), (10, 9)]  # (F, K + 1) of its layers: 20,018 weights


def target_network(x: Tensor, theta: list[Tensor], record: list | None = None) -> Tensor:
    """(N, B, 1, 28, 28) -> logits (N, B, 10); what the hidden layers give goes to `record`. Max
    pooling before ReLU is the same and cheaper."""
    first = max_pool2d(conv2d(x, theta[0], 5, padding=2), 2).relu()  # (N, B, 32, 14, 14)
    second = max_pool2d(conv2d(first, theta[1], 5, padding=2), 2).relu()  # (N, B, 16, 7, 7)
    third = linear(second.flatten(2), theta[2]).relu()  # (N, B, 8)
    if record is not None:
        record += [first, second, third]
    return linear(third, theta[3])


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
    """G: noise z (N, Z) -> weights of N target networks, a list of (N, F, K + 1).

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
        return [
            generator(code.flatten(0, 1)).view(len(z), *shape)  # one row per code: a filter
            for generator, code, shape in zip(self.generators, codes, self.shapes)
        ]


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
    """Louizos and Welling (2017): the weights from a variational posterior, each layer by itself.
    With lam = the number of training images, lam * loss_acc + bound is the negative evidence lower
    bound. The first `convs` layers are convolutions; `stds` are the initial deviations of `mean`.
    Paper (of MNFG): one z per image, noise on activations. Here: one network per batch."""

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

    def theta_and_bound(self, z: Tensor) -> tuple[list[Tensor], Tensor]:
        """N networks, and minus the bound: what takes the place of their entropy."""
        parts, n = z.split(self.sizes, dim=1), len(self.layers)
        noises = (part.unflatten(1, shape) for part, shape in zip(parts[n:], self.shapes))
        theta, bounds = zip(*map(lambda layer, *e: layer(*e), self.layers, parts[:n], noises))
        return list(theta), -sum(bounds).mean()

    def forward(self, z: Tensor) -> list[Tensor]:
        return self.theta_and_bound(z)[0]


def make_model(c: argparse.Namespace) -> nn.Module:
    if c.recipe == "mnfg":  # 808,156 parameters; deviations as its authors', from unusual fans
        return MNFG(SHAPES, convs=2, stds=[0.156, 0.039, 0.071, 0.471])
    # 633,640 parameters with the paper's start, 855 more with ours.
    return Hypernetwork(SHAPES, codes=[32, 16, 8, 1], widths=[40, 100, 100, 60], start=c.start)


# ---- Training ------------------------------------------------------------------------------------
def training_step(model: nn.Module, z: Tensor, x: Tensor, y: Tensor, c) -> tuple[Tensor, ...]:
    """Images (N, B, 1, 28, 28), labels (N, B): network n sees batch n."""
    if isinstance(model, MNFG):
        theta, entropy = model.theta_and_bound(z)
    else:
        theta = fix_gauge(model(z))
        entropy = knn_entropy(flat(theta), dim=model.noise_size)
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
    git = f'git -C "{Path(__file__).parent}" describe --always --dirty'
    record = dict(settings=vars(c), commit=subprocess.getoutput(git), step=0, seconds=0.0, log=[])
    if file.exists():
        record = read(file, c)
        model.load_state_dict(record["model"])
        for state in record["optimizers"]:
            optimizer.load_state_dict(state)

    padded = F.pad(x, [c.shift] * 4)
    first, every = record["step"], math.ceil(c.steps / 20)
    begun, saved = time.perf_counter() - record["seconds"], time.perf_counter()
    bar = tqdm(range(first, c.steps), c.name, initial=first, total=c.steps, mininterval=1)
    for step in bar:
        # A step's random numbers depend on seed and step alone: a run goes on as if never stopped.
        generator = torch.Generator(y.device).manual_seed(stream + 1 + step)
        z = model.noise(c.networks, generator)
        images, labels = draw(padded, y, (c.networks, c.images), generator)
        model.train()
        loss, loss_acc, entropy, acc = training_step(model, z, images, labels, c)
        optimizer.zero_grad()
        loss.backward()
        # Rare spikes of the gradient can kill every network for good; they are cut at 5 lam.
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5 * c.lam)
        optimizer.param_groups[0]["lr"] = c.lr * rate_factor(c, step)
        optimizer.step()

        done = step + 1
        if done % every == 0 or done == c.steps or time.perf_counter() - saved > SAVE_SECONDS:
            row = dict(loss_acc=loss_acc, entropy=entropy, acc=acc, norm=norm)
            row = dict(step=done) | {name: value.item() for name, value in row.items()}
            if not all(map(math.isfinite, row.values())):
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr")
            bar.set_postfix(acc=f"{row['acc']:.3f}", entropy=f"{row['entropy']:.0f}", refresh=False)
            if done % every == 0:
                record["log"].append(row)
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
        theirs, ours = dict(record["settings"]), vars(c) if c else dict(script=NAME)
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
    """The weights of n networks, gauge fixed; each depends on its own noise alone."""
    return fix_gauge(model.eval()(model.noise(n, generator)))


@torch.no_grad()
def predict(theta: list[Tensor], x: Tensor) -> Tensor:
    """Probabilities (N, B, 10) of N networks on the same images (B, 1, 28, 28), few at a time so
    that the activations stay small: on the CPU a network runs alone, elsewhere all together."""
    n = len(theta[0])
    portions = x.split(50 if x.device.type == "cpu" else max(1, 10_000 // n))
    logits = [each_network(target_network, x.expand(n, *x.shape), theta) for x in portions]
    return torch.cat(logits, dim=1).softmax(dim=-1)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    return (sum((votes != v).float().mean() for v in votes) / max(1, len(votes) - 1)).item()


def evaluate(probabilities: Tensor, y: Tensor) -> dict:
    """Of N networks' (N, B, 10): their accuracies, how often two disagree, and means over ensembles
    of 1, 2, 5, ... of them: accuracy of the vote, and negative log-likelihood (NLL) of the mean
    probability."""
    n, votes = len(probabilities), probabilities.argmax(dim=-1)
    accs = (votes == y).float().mean(dim=1).tolist()
    result = dict(networks=n, accuracies=accs, disagreement=disagreement(votes), vote={}, nll={})
    for size in (size for size in SIZES if size <= n):
        groups = range(0, n - size + 1, size)  # no network in two ensembles
        hits = [(majority(votes[i : i + size]) == y).float().mean() for i in groups]
        result["vote"][str(size)] = torch.stack(hits).mean().item()
        means = [probabilities[i : i + size].mean(dim=0) for i in groups]
        nlls = [F.nll_loss(mean.clamp_min(1e-12).log(), y) for mean in means]
        result["nll"][str(size)] = torch.stack(nlls).mean().item()
    return result


@torch.no_grad()
def silence(theta: list[Tensor], x: Tensor) -> list[Tensor]:
    """theta without its idle units, which on images x (B, 1, 28, 28) give less than a thousandth of
    what is usual in their layer: their filters, and what the next layer reads of them, set to 0."""

    def activity(x: Tensor, theta: list[Tensor]) -> Tensor:  # mean squares of all units, (N, 56)
        target_network(x, theta, units := [])
        return torch.cat([a.transpose(1, 2).flatten(2).square().mean(dim=-1) for a in units], dim=1)

    n, live = len(theta[0]), list(theta)
    squares = [each_network(activity, part.expand(n, *part.shape), theta) for part in x.split(50)]
    for i, square in enumerate(torch.stack(squares).mean(dim=0).split([32, 16, 8], dim=1)):
        works = square > 1e-6 * square.mean(dim=1, keepdim=True)  # (N, F)
        live[i] = live[i] * works[..., None]
        taps = live[i + 1][..., :-1].unflatten(-1, (works.shape[1], -1)) * works[:, None, :, None]
        live[i + 1] = torch.cat([taps.flatten(2), live[i + 1][..., -1:]], dim=-1)
    return live


def live_diversity(theta: list[Tensor], x: Tensor) -> dict:
    """How much of the diversity of gauge-fixed networks sits in units that are idle on x? With and
    without them: entropy, and the share of the variance in two principal components (PCA)."""
    live = silence(theta, x)
    idle = sum((filters == 0).all(dim=-1).sum(dim=1) for filters in live[:-1])  # (N,)
    squares = (flat(theta) - flat(theta).mean(dim=0)).square()
    share = squares[flat(theta) != flat(live)].sum() / squares.sum()
    changed = predict(theta, x[:1000]).argmax(dim=-1) != predict(live, x[:1000]).argmax(dim=-1)
    result = dict(idle_units=idle.float().mean(), idle_share=share, changed=changed.float().mean())
    for name, weights in {"": flat(theta), "live_": flat(fix_gauge(live))}.items():
        result[name + "entropy"] = knn_entropy(weights, Hypernetwork.noise_size)
        variances = torch.linalg.svdvals(weights - weights.mean(dim=0)).square()
        result[name + "pca"] = variances[:2].sum() / variances.sum()
    return {name: number.item() for name, number in result.items()}


@torch.no_grad()
def paths(model: nn.Module, x: Tensor, y: Tensor, images: int, pairs=10, points=11) -> dict:
    """Accuracy from network 2 to network 1: straight between their gauged weights, straight without
    units that are idle on x, and through z. A path's dip is how far its worst point lies below
    the worse of its ends."""
    generator = torch.Generator(x.device).manual_seed(PATHS)
    t = torch.linspace(0, 1, points, device=x.device)[:, None, None]
    walked = {"straight": [], "straight, without idle units": [], "through z": []}
    for _ in tqdm(range(pairs), "walking paths"):
        z = model.noise(2, generator)
        ends = fix_gauge(model.eval()(z))
        live = fix_gauge(silence(ends, x))
        ways = [[w[:1] * t + w[1:] * (1 - t) for w in weights] for weights in (ends, live)]
        ways.append(model(z[:1] * t[:, 0] + z[1:] * (1 - t[:, 0])))
        for accs, theta in zip(walked.values(), ways):
            hits = predict(theta, x[:images]).argmax(dim=-1) == y[:images]
            accs.append(hits.float().mean(dim=1))
    curves, dips = {}, {}
    for name, accs in walked.items():
        accs = torch.stack(accs)  # (pairs, points)
        ways = {"mean of ten paths": accs.mean(dim=0), "worst of ten": accs.amin(dim=0)}
        curves[name] = {way: [t.flatten().tolist(), a.tolist()] for way, a in ways.items()}
        dips[name] = (accs[:, [0, -1]].amin(dim=1) - accs.amin(dim=1)).mean().item()
    return dict(curves=curves, dips=dips)


def fast_gradient(theta: list[Tensor], x: Tensor, target: Tensor) -> Tensor:
    """The sign of the gradient of log p(target | x) of ONE network: which way to change x."""
    x = x.clone().requires_grad_()
    log_p = target_network(x[None], theta)[0].log_softmax(dim=-1)
    return torch.autograd.grad(log_p[torch.arange(len(x)), target].sum(), x)[0].sign()


def adversarial(model, x: Tensor, y: Tensor, images: int, networks=25, members=100) -> dict:
    """Fool a network into a random wrong class with x + epsilon * sign, unclipped, then show the
    images to an ensemble of others: how many are misclassified, of those that the attacked network
    gets right. Paper: a new network and ensemble for each image, here for every `images`."""
    generator, fooled = torch.Generator(x.device).manual_seed(ATTACKS), []
    parts = list(zip(x.split(images), y.split(images)))[:networks]
    for part, labels in tqdm(parts, "attacking"):
        one, ensemble = sample(model, 1, generator), sample(model, members, generator)
        right = predict(one, part)[0].argmax(dim=-1) == labels
        shift = torch.randint(1, 10, labels.shape, device=x.device, generator=generator)
        sign = fast_gradient(one, part, (labels + shift) % 10)
        shown = torch.cat([part + epsilon * sign for epsilon in EPSILONS])
        votes = [predict(theta, shown).argmax(dim=-1) for theta in (one, ensemble)]
        answers = torch.stack([majority(vote).view(len(EPSILONS), -1) for vote in votes])
        fooled.append(((answers != labels) & right).sum(dim=-1) / right.sum().clamp_min(1))
    fooled = torch.stack(fooled)  # (networks, 2, epsilons)
    errors = fooled.std(dim=0, correction=0) / len(fooled) ** 0.5  # standard errors, over networks
    rates = zip(("the attacked network", "ensemble of 100 others"), fooled.mean(dim=0), errors)
    return {"": {who: [EPSILONS, rate.tolist(), error.tolist()] for who, rate, error in rates}}


def turn(image: Tensor) -> Tensor:
    """An image (1, 28, 28) turned by ANGLES: (19, 1, 28, 28)."""
    return torch.stack([rotate(image, angle, InterpolationMode.BILINEAR) for angle in ANGLES])


def rotation(model: nn.Module, image: Tensor, members: int = 200) -> dict:
    """How uncertain networks are of a digit (1, 28, 28) that is turned: entropy of the answers."""
    generator = torch.Generator(image.device).manual_seed(ROTATION)
    probabilities = predict(sample(model, members, generator), turn(image))  # (N, angles, 10)
    mean = probabilities.mean(dim=0)
    ensemble, one = (torch.special.entr(p).sum(dim=-1) for p in (mean, probabilities))
    lines = {"mean probability of 200": ensemble, "one network (mean)": one.mean(dim=0)}
    curves = {"": {name: [ANGLES, entropy.tolist()] for name, entropy in lines.items()}}
    return dict(curves=curves, answers=mean.argmax(dim=-1).tolist(), image=image.tolist())


def analyse(model: nn.Module, data: dict, tested: int) -> dict:
    """All numbers that figures and table show; those of validation images are for choices."""
    result = dict(parameters=sum(p.numel() for p in model.parameters()), exchanged=[])
    for split, networks in dict(val=min(50, tested), test=tested).items():
        x, y = data[split]
        generator = torch.Generator(x.device).manual_seed(TEST)
        tens = tqdm(range(networks // 10), f"{split}: ten networks at a time")
        probabilities = torch.cat([predict(sample(model, 10, generator), x) for _ in tens])
        result[split] = evaluate(probabilities, y) | paths(model, x, y, images=5 * tested)
        theta = sample(model, min(50, tested), generator)
        result[split] |= live_diversity(theta, x)
    for i in range(len(theta)):  # this layer taken from another sample
        mixed = [*theta[:i], theta[i].roll(1, dims=0), *theta[i + 1 :]]
        hits = predict(mixed, x[: 5 * tested]).argmax(dim=-1) == y[: 5 * tested]
        result["exchanged"].append(hits.float().mean().item())
    result["adversarial"] = adversarial(model, x, y, images=tested // 5)
    return result | dict(rotation=rotation(model, x[(y == 6).nonzero()[0, 0]]))


def plot_curves(runs: list[dict], curves: list[dict], ticks="{x:.0%}", **labels) -> Figure:
    """`curves`: of each run {panel: {line: [x, y] or [x, y, error]}}. Colours tell runs apart."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots(1, len(curves[0]), sharey=True, squeeze=False)[0]
    shades = {recipe: cycle(colours) for recipe, colours in COLOURS.items()}
    for run, panels in zip(runs, curves):
        colour = next(shades[run["settings"]["recipe"]])
        axes[0].plot([], [], color=colour, label=run["settings"]["title"])
        for ax, (name, lines) in zip(axes, panels.items()):
            for line, style in zip(lines.values(), STYLES):
                ax.errorbar(*line, fmt=style, color=colour, ms=4)
            ax.set(title=name, **labels)
            ax.yaxis.set_major_formatter(ticks)
            ax.label_outer()
            ax.grid(alpha=0.3)
    for name, style in zip(next(iter(curves[0].values())), STYLES):
        axes[0].plot([], [], style, color="black", label=name)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def plot_accuracy(runs: list[dict]) -> Figure:
    accs = [torch.tensor(run["test"]["accuracies"]) for run in runs]
    low, high = min(a.quantile(0.02).item() for a in accs), max(a.max().item() for a in accs)
    edges, curves = torch.arange(low, high + 0.001, 0.0005), []  # the paper's bins, of 0.05 %
    for run, acc in zip(runs, accs):
        share = torch.histogram(acc, edges).hist / len(acc)
        vote, paper = list(run["test"]["vote"].values())[-1], PAPER.get(run["settings"]["name"])
        lines = {"one network": [(edges[:-1] + 0.00025).tolist(), share.tolist()]}
        lines |= {"vote of 200": [[vote], [-0.015]], "paper's vote": [[paper or math.nan], [-0.03]]}
        curves.append({"": lines})
    figure = plot_curves(runs, curves, xlabel="test accuracy", ylabel="networks, in bins of 0.05 %")
    figure.axes[0].xaxis.set_major_formatter("{x:.1%}")
    return figure


def plot_paths(runs: list[dict]) -> Figure:
    curves = [run["test"]["curves"] for run in runs]
    return plot_curves(runs, curves, xlabel="t, from G(z2) to G(z1)", ylabel="test accuracy")


def plot_adversarial(runs: list[dict]) -> Figure:
    labels = dict(xlabel="change of a pixel (1: black to white)", ylabel="misclassified images")
    panels = [{name: {"": y} for name, y in run["adversarial"][""].items()} for run in runs]
    return plot_curves(runs, panels, **labels)


def plot_rotation(runs: list[dict]) -> Figure:
    """A six turns into a nine. Below the curves: what the ensembles answer."""
    runs = [run for run in runs if run["settings"]["name"] in ("hypernet", "mnfg")] or runs
    labels = dict(xlabel="rotation (degrees)", ylabel="entropy of the answer (nats)")
    figure = plot_curves(runs, [run["rotation"]["curves"] for run in runs], "{x:.0f}", **labels)
    ax = figure.axes[0]
    for i, run in enumerate(runs):  # has three lines: one for the legend, and two
        for angle, answer in zip(ANGLES, run["rotation"]["answers"]):
            ax.text(angle, -0.2 * (i + 1), answer, color=ax.lines[3 * i].get_color(), ha="center")
    strip = torch.cat(list(turn(torch.tensor(runs[0]["rotation"]["image"]))[:, 0]), dim=1)
    ax.imshow(strip, cmap="gray_r", extent=(-5, 185, 2.4, 2.8), aspect="auto")
    ax.set(xlim=(-5, 185), ylim=(-0.2 * len(runs) - 0.1, 2.8), xticks=ANGLES[::3], yticks=[0, 1, 2])
    return figure


def table(runs: list[dict]) -> str:
    """Validation images, for choices, and test images; then what the diversity is worth."""

    def percent(*shares: float) -> str:
        return ", ".join(f"{100 * share:.2f}" for share in shares) + " %"

    head = ["one network", "vote", "disagree", "NLL: one, vote", "idle units, their variance"]
    rows = [["", *head, "dips: straight, live, z"], ["---"] * 7]
    more = [["test images", "entropy: all, live", "variance in 2 components: all, live"]]
    more += [["---"] * 5]
    more[0] += ["another's layer 1, 2, 3, 4", "fooled: one, 100 others"]
    for run in runs:
        name, paper = run["settings"]["title"], PAPER.get(run["settings"]["name"])
        for split in ("val", "test"):
            part = run[split]
            size, vote = list(part["vote"].items())[-1]
            rows.append([f"{name}: {split}", percent(part["vote"]["1"])])
            rows[-1] += [f"{percent(vote)} (of {size})", percent(part["disagreement"])]
            rows[-1] += [f"{part['nll']['1']:.4f}, {part['nll'][size]:.4f}"]
            rows[-1] += [f"{part['idle_units']:.1f} of 56, {percent(part['idle_share'])}"]
            rows[-1] += [percent(*part["dips"].values())]
        rows[-1][2] += f", paper {percent(paper)}" if paper else ""
        fooled = [rates[EPSILONS.index(0.1)] for _, rates, _ in run["adversarial"][""].values()]
        more.append([name, f"{part['entropy']:.0f}, {part['live_entropy']:.0f}"])
        more[-1] += [percent(part["pca"], part["live_pca"])]
        more[-1] += [percent(*run["exchanged"]), percent(*fooled)]
    lines = [f"| {' | '.join(row)} |" for row in rows] + [""]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in more])


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
        run |= dict(commit=record["commit"], torch=torch.__version__, log=record["log"])
        cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        run["hardware"] = torch.cuda.get_device_name() if args.device == "cuda" else cpu
        tested = TESTED["quick" if args.quick else args.device]
        run |= analyse(load(checkpoint, args.device), data, tested)
        run["training_seconds"] = round(record["seconds"])
        run["analysis_seconds"] = round(time.perf_counter() - begun)
        file.with_suffix(".new").write_text(json.dumps(run, indent=1))
        os.replace(file.with_suffix(".new"), file)
    runs = [read(file) for file in sorted(args.out.glob("*/metrics.json"))]
    if not runs:
        sys.exit(f"no finished run in {args.out}")
    for plot in (plot_accuracy, plot_paths, plot_adversarial, plot_rotation):
        plot(runs).savefig(args.out / f"{plot.__name__.removeprefix('plot_')}.png", dpi=150)
    print(table(runs), f"\nfigures: {args.out}", sep="\n")
    return runs


if __name__ == "__main__":
    main()
