"""One hypernetwork that generates all 20,018 weights of an MNIST classifier, accurate and diverse.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[gauge(G(z))]

Section "MNIST" of the paper. New against the toy: the samples are networks, so the trivial
symmetries of their weights are removed (gauge fixing) before diversity is measured, and G shares
parameters: an extractor E turns z into one code per filter, one weight generator per layer turns
codes into filters. The networks are then taken apart: accuracies, votes, PCA, paths, attacks.

    hypernet  ours: all networks begin as near-copies of one; images moved by up to a pixel
    paper     the paper's recipe: unrelated networks at first; images unmoved; four times as long
    mnfg      a baseline, multiplicative normalizing flows: weights by variational inference

    python 02_mnist_hypernet.py --quick           # all runs in minutes: does it run?
    python 02_mnist_hypernet.py --runs hypernet   # one run; the same command again goes on
    python 02_mnist_hypernet.py                   # all runs: two and a half hours on one CPU core
    python 02_mnist_hypernet.py --draw --out results/02_mnist_hypernet   # the documented runs
"""

import argparse
import dataclasses
import io
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision import datasets
from tqdm import tqdm

from common import conv2d, each_network, fix_gauge, knn_entropy, linear, majority, max_pool2d

NAME = "02_mnist_hypernet"
Theta = list[Tensor]  # the weights of N networks: a tensor (N, F, K + 1) for each layer


# ---- Settings ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Settings:
    """One run. The defaults are the paper's recipe."""

    model: str = "hypernetwork"  # or "mnfg", the baseline
    start: str = "random"  # networks begin unrelated; or as near-"copies" of one (ours)
    steps: int = 13_000
    networks: int = 32  # in a step: samples of z
    images: int = 32  # in a step, for each network
    shift: int = 0  # training images are moved by up to so many pixels
    lr: float = 3e-4
    decay: bool = True  # of lr, by 0.002 % a step; or else a short rise, then a linear fall to 0
    gauge: bool = True  # remove the symmetries of the weights before their entropy is measured
    lam: float = 1e3  # weight of accuracy against diversity; of mnfg: number of training images
    seed: int = 0
    test_images: int = 10_000  # at most, of validation and of test images
    test_networks: int = 200

    def __post_init__(self):
        for name, value in vars(self).items():
            if name in CHOICES and value not in CHOICES[name]:
                raise ValueError(f"{name} must be one of {CHOICES[name]}")
            if name not in CHOICES and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number, not below 0")
        for name in ("steps", "images", "lr", "lam", "test_images"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must not be 0")
        if self.steps >= 1_000_000 or self.seed >= 4000 or self.shift > 14:
            raise ValueError("steps must be below a million, seed below 4000, shift at most 14")
        if min(self.networks, self.test_networks) < 2:
            raise ValueError("networks and test_networks must be at least 2")


CHOICES = {"model": ["hypernetwork", "mnfg"], "start": ["random", "copies"]}
RUNS = {
    "hypernet": Settings(start="copies", steps=3000, shift=1, lr=2e-3, decay=False),
    "paper": Settings(),
    "mnfg": Settings(
        model="mnfg", steps=30_000, networks=4, shift=1, lr=1e-3, decay=False, lam=55e3
    ),
}
QUICK = dict(steps=250, test_images=1000, test_networks=20)  # at most
VALIDATION = 1  # seeds of evaluation; those of training begin at a million
TEST = 2


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add = parser.add_argument
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="default: all")
    add("--quick", action="store_true", help=f"small costs, at most: {QUICK}")
    add("--draw", action="store_true", help="only draw the finished runs in --out")
    add("--device", choices=devices, default=devices[0], help="default: %(default)s")
    add("--data", type=Path, default="data", help="default: %(default)s; filled if empty")
    add("--out", type=Path, help="default: runs/ and the name of this script, with _quick if so")
    group = parser.add_argument_group("settings, instead of the runs' own (see class Settings)")
    for field in dataclasses.fields(Settings):
        kind = dict(type=field.type)
        if field.type is bool:
            kind = dict(action=argparse.BooleanOptionalAction)
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, help=f"paper: {field.default}", **kind)
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = Path("runs", f"{NAME}_quick" if args.quick else NAME)
    args.settings = {}
    for run in args.runs:
        try:
            args.settings[run] = choose_settings(RUNS[run], args)
        except ValueError as error:
            parser.error(f"run {run}: {error}")
    return args


def choose_settings(run, args):
    """A run's settings with what the command overrides."""
    values = dataclasses.asdict(run)
    for name in values:
        given = getattr(args, name)
        if given is not None:
            values[name] = given
        elif args.quick and name in QUICK:
            values[name] = min(values[name], QUICK[name])
    return Settings(**values)


# ---- Data ----------------------------------------------------------------------------------------
def load_data(s, folder, device):
    """Images (B, 1, 28, 28) in [0, 1] and labels (B,), on the training device: 55,000 of MNIST for
    training ("train"), 5,000 for all choices ("val"), 10,000 for the final numbers ("test")."""
    try:
        train = datasets.MNIST(folder, train=True, download=True)
        test = datasets.MNIST(folder, train=False, download=True)
    except Exception as error:
        state = "damaged" if any(folder.glob("MNIST/raw/*-ubyte")) else "missing"
        sys.exit(
            f"mnist is {state} in {folder}, and not to be downloaded "
            f"({type(error).__name__}): put its four files *-ubyte in {folder}/MNIST/raw"
        )
    x = torch.cat([train.data, test.data])[:, None].to(device) / 255
    y = torch.cat([train.targets, test.targets]).to(device)

    number = len(train.data)
    val = min(number // 12, s.test_images)
    splits = {
        "train": slice(val, number),
        "val": slice(val),
        "test": slice(number, number + s.test_images),
    }
    return {name: (x[part], y[part]) for name, part in splits.items()}


def random_crops(padded: Tensor, y: Tensor, s: Settings, generator):
    """Training images (N, B, 1, 28, 28), moved at random, and labels (N, B)."""
    crops = padded.unfold(2, 28, 1).unfold(3, 28, 1)  # a view: all crops of each image
    moves = 2 * s.shift + 1  # in each direction
    sizes = (len(crops), moves, moves)
    shape = (s.networks, s.images)
    choice = torch.randint(math.prod(sizes), shape, device=y.device, generator=generator)
    image, row, column = torch.unravel_index(choice, sizes)
    return crops[image, :, row, column], y[image]


# ---- Target network ------------------------------------------------------------------------------
SHAPES = [(32, 26), (16, 801), (8, 785), (10, 9)]  # (F, K + 1) of its layers: 20,018 weights


def target_network(x: Tensor, theta: Theta) -> Tensor:
    """(N, B, 1, 28, 28) -> logits (N, B, 10)."""
    x = max_pool2d(conv2d(x, theta[0], 5, padding=2), 2).relu()  # (N, B, 32, 14, 14)
    x = max_pool2d(conv2d(x, theta[1], 5, padding=2), 2).relu()  # (N, B, 16, 7, 7)
    x = linear(x.flatten(2), theta[2]).relu()  # (N, B, 8)
    return linear(x, theta[3])


# ---- Networks and hypernetworks ------------------------------------------------------------------
# Each has draw_z(n, generator) -> z, and forward(z) -> theta: the weights of n networks, a list of
# tensors (n, F, K + 1), first layer first.
NOISE_SIZE = 300  # numbers in z
CODE_SIZE = 15
CODES = [32, 16, 8, 1]  # of each layer: one for each filter, or one for the whole layer
WIDTHS = [40, 100, 100, 60]  # of the weight generators


def linear_layer(fan_in, fan_out):
    layer = nn.Linear(fan_in, fan_out, bias=False)
    std = 0.1 / fan_in**0.5  # the authors'; ten times as much, and the logits explode
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    return layer


def mlp(fan_in, width, fan_out):
    """Three linear layers; batch norm comes after the activations, as in the authors' code."""
    return nn.Sequential(
        linear_layer(fan_in, width),
        nn.LeakyReLU(0.05),
        nn.BatchNorm1d(width, eps=1e-7, momentum=0.02),
        linear_layer(width, width),
        nn.LeakyReLU(0.05),
        nn.BatchNorm1d(width, eps=1e-7, momentum=0.02),
        linear_layer(width, fan_out),
    )


class Hypernetwork(nn.Module):
    """G(z) = W(E(z)): the extractor E turns z into codes of 15 numbers, and the weight generators
    W, one for each layer, turn a code into a filter, or into a whole layer.

    The paper's start is "random": any two z begin as unrelated networks. Ours is "copies": E(z) is
    small beside a bias, so that all networks begin as near-copies of one; it is learned first, and
    then they spread."""

    def __init__(self, start):
        super().__init__()
        self.extractor = mlp(NOISE_SIZE, 300, CODE_SIZE * sum(CODES))
        self.generators = nn.ModuleList()
        for (filters, size), number, width in zip(SHAPES, CODES, WIDTHS):
            self.generators.append(mlp(CODE_SIZE, width, filters * size // number))
        if start == "copies":
            last = self.extractor[-1]
            last.bias = nn.Parameter(torch.randn(last.out_features))
            nn.init.normal_(last.weight, std=0.2 / last.in_features**0.5)

    def draw_z(self, n, generator):
        z = torch.rand(n, NOISE_SIZE, device=generator.device, generator=generator)
        return 2 * z - 1

    def forward(self, z):
        codes = self.extractor(z).unflatten(1, (-1, CODE_SIZE)).split(CODES, dim=1)
        theta = []
        for generator, part, shape in zip(self.generators, codes, SHAPES):
            filters = generator(part.flatten(0, 1))  # (N, codes, 15) -> a row for each code
            theta.append(filters.view(len(z), *shape))
        return theta


# ---- Baseline: MNFG (skip at first reading) ------------------------------------------------------
class Flow(nn.Module):
    """Two masked RealNVP steps, z (N, d) -> z' and log |det dz'/dz| (N,). A step keeps the masked
    half and moves the rest towards u: z' = M z + (1 - M) (g z + (1 - g) u), both u and g from M z.
    The masks are complements, drawn once and saved, so that the same noise is the same network."""

    def __init__(self, d, width):
        super().__init__()
        mask = torch.randint(2, (d,)).float()
        self.register_buffer("masks", torch.stack([mask, 1 - mask]))
        self.networks = nn.ModuleList()
        for _ in self.masks:
            network = nn.Sequential(nn.Linear(d, width), nn.Tanh(), nn.Linear(width, 2 * d))
            for layer in network[::2]:
                nn.init.normal_(layer.weight, std=(4 / (d + width)) ** 0.5)
                nn.init.zeros_(layer.bias)
            nn.init.constant_(network[2].bias[d:], 2.0)  # gates begin open: z' is nearly z
            self.networks.append(network)

    def forward(self, z):
        log_det = 0.0
        for mask, network in zip(self.masks, self.networks):
            u, logit = network(mask * z).chunk(2, dim=1)
            g = logit.sigmoid()
            z = mask * z + (1 - mask) * (g * z + (1 - g) * u)
            log_det += ((1 - mask) * F.logsigmoid(logit)).sum(dim=1)
        return z, log_det


def random_vector(d):
    return nn.Parameter((4 / d) ** 0.5 * torch.randn(d))


class MNFGLayer(nn.Module):
    """One layer's posterior: W | z ~ N(z * mean, std^2), z from a flow, one z per filter of a
    convolution (for its bias too) or per input of a dense layer."""

    def __init__(self, filters, fan_in, conv, init_std):
        super().__init__()
        self.conv = conv
        d = filters if conv else fan_in  # numbers in z
        self.mean = nn.Parameter(F.pad(init_std * torch.randn(filters, fan_in), [0, 1]))
        # Deviations begin at exp(-9) for weights and exp(-4.5) for biases, as its authors'.
        log_std = torch.full((filters, fan_in), -9.0)
        self.log_std = nn.Parameter(F.pad(log_std, [0, 1], value=-4.5))
        self.start_mean = random_vector(d)
        self.start_log_var = nn.Parameter(torch.full((d,), math.log(0.1)))
        self.flow = Flow(d, 50)
        # r(z | W), the auxiliary posterior: its own flow, then a Gaussian that depends on W.
        self.r_flow = Flow(d, 100)
        self.r_weight = random_vector(d)
        self.r_mean = random_vector(d)
        self.r_precision = random_vector(d)

    def forward(self, noise_z, noise):
        """Noise (N, d) and (N, F, K + 1) -> filters (N, F, K + 1), and a bound (N,) on the KL
        divergence of their distribution from the prior N(0, 1)."""
        z, log_det = self.flow(self.start_mean + (self.start_log_var / 2).exp() * noise_z)
        factor = F.pad(z, [0, 1], value=1.0)[:, None]  # (N, 1, K + 1): biases have no z
        if self.conv:
            factor = z[:, :, None]  # (N, F, 1)
        mean = factor * self.mean  # (N, F, K + 1)
        # As its authors: deviations of at most 0.5 in the network, unlimited in the divergence.
        filters = mean + self.log_std.exp().clamp(max=0.5) * noise
        divergence = mean.square() + (2 * self.log_std).exp() - 1 - 2 * self.log_std
        # Without log 2 pi, here and in log r, as it cancels.
        log_q = -0.5 * (self.start_log_var + 1).sum() - log_det
        return filters, 0.5 * divergence.sum(dim=(1, 2)) + log_q - self.log_r(z, filters)

    def log_r(self, z, filters):
        """log r(z | W) (N,), which stands in for the unknown log q(z | W)."""
        weight = filters[..., :-1]
        bias = filters[..., -1:]
        if self.conv:
            inner = torch.einsum("f,nfk->nk", self.r_weight, weight + bias)
        else:
            inner = (weight @ self.r_weight).tanh()
        activation = inner.mean(dim=1, keepdim=True)  # (N, 1)
        log_precision = (self.r_precision * activation).clamp(-10, 10)  # it may blow up early
        start, log_det = self.r_flow(z)
        squares = (start - self.r_mean * activation).square()
        return log_det + 0.5 * (log_precision - log_precision.exp() * squares).sum(dim=1)


class MNFG(nn.Module):
    """Louizos and Welling (2017): the weights from a variational posterior, each layer by itself.
    With lam = the number of training images, lam * loss_acc + bound is the negative evidence lower
    bound. Paper (of MNFG): one z per image, noise on activations. Here: one network per batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(  # deviations of the initial means as its authors'
            [
                MNFGLayer(32, 25, True, 0.156),
                MNFGLayer(16, 800, True, 0.039),
                MNFGLayer(8, 784, False, 0.071),
                MNFGLayer(10, 8, False, 0.471),
            ]
        )
        # Of noise: for the flows of all layers, then for their weights.
        self.sizes = [32, 16, 784, 8, 832, 12_816, 6280, 90]

    def draw_z(self, n, generator):
        return torch.randn(n, 20_858, device=generator.device, generator=generator)

    def forward(self, z):
        return self.theta_and_entropy(z)[0]

    def theta_and_entropy(self, z):
        """N networks, and what takes the place of their entropy: minus the bound."""
        parts = z.split(self.sizes, dim=1)
        theta = []
        entropy = 0.0
        for layer, noise_z, noise, shape in zip(self.layers, parts[:4], parts[4:], SHAPES):
            filters, bound = layer(noise_z, noise.unflatten(1, shape))
            theta.append(filters)
            entropy -= bound.mean()
        return theta, entropy


# ---- Networks and hypernetworks, by their settings -----------------------------------------------
def make_model(s):
    if s.model == "mnfg":
        return MNFG()
    return Hypernetwork(s.start)


# ---- Training ------------------------------------------------------------------------------------
def training_step(model: nn.Module, z: Tensor, x: Tensor, y: Tensor, s: Settings) -> dict:
    """The method. Images (N, B, 1, 28, 28), labels (N, B): network n sees batch n."""
    if s.model == "mnfg":
        theta, entropy = model.theta_and_entropy(z)
    else:
        theta = model(z)
        if s.gauge:
            theta = fix_gauge(theta)
        weights = torch.cat([layer.flatten(1) for layer in theta], dim=1)  # (N, D)
        entropy = knn_entropy(weights, NOISE_SIZE)
    logits = each_network(target_network, x, theta)  # (N, B, classes)
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss = s.lam * loss_acc - entropy
    acc = (logits.argmax(dim=-1) == y).float().mean()
    return dict(loss=loss, loss_acc=loss_acc, entropy=entropy, acc=acc)


def lr_factor(s, step):
    """What the rate is multiplied by."""
    if s.decay:
        return 0.99998**step
    warm_up = min(200, s.steps // 5 + 1)
    return min((step + 1) / warm_up, (s.steps - step) / max(1, s.steps - warm_up))


def train(s, data, file):
    """Train one run, or go on where a stopped run stood: the model and its log."""
    first_seed = (1 + s.seed) * 1_000_000
    torch.manual_seed(first_seed)
    x, y = data["train"]
    padded = F.pad(x, [s.shift] * 4)
    model = make_model(s).to(x.device)
    optimizer = torch.optim.Adam(model.parameters(), s.lr, fused=True)
    log = resume(file, model, optimizer)
    log_every = math.ceil(s.steps / 40)
    first = log_every * len(log)
    started = time.perf_counter()
    norms = []  # of gradients, since the last row of the log

    for step in tqdm(
        range(first, s.steps), file.parent.name, s.steps, initial=first, mininterval=1
    ):
        # Draw. A step's random numbers depend on seed and step alone, so that a run that was
        # stopped goes on as if it never had been.
        generator = torch.Generator(x.device).manual_seed(first_seed + 1 + step)
        z = model.draw_z(s.networks, generator)
        images, labels = random_crops(padded, y, s, generator)

        model.train()
        result = training_step(model, z, images, labels, s)

        # Step. Rare spikes of the gradient can kill every network for good: it is cut at 5 lam.
        model.zero_grad()
        result["loss"].backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 5 * s.lam))
        optimizer.param_groups[0]["lr"] = lr_factor(s, step) * s.lr
        optimizer.step()

        # Log and save, forty times a run.
        done = step + 1
        if done % log_every == 0 or done == s.steps:
            row = dict(step=done, nll=validate(model, data), seconds=time.perf_counter() - started)
            started = time.perf_counter()
            result["norm"] = max(norms)
            norms = []
            for name, value in result.items():
                row[name] = value.item()
            if not math.isfinite(sum(row.values())):
                sys.exit("the loss is not finite: try a smaller rate")
            log.append(row)
            save(file, s, model, optimizer.state_dict() if done < s.steps else None, log)
    return load(file, x.device), log


def validate(model, data):
    """Negative log-likelihood of ten networks, of the same z each time, on validation images."""
    x, y = data["val"]
    theta = sample(model, 10, torch.Generator(y.device).manual_seed(VALIDATION))
    return evaluate(predict(theta, x[::10]), y[::10])["nll_one"]


# ---- Files ---------------------------------------------------------------------------------------
def write(file, content):
    """All or nothing: written beside, under a name of this process's own, then renamed."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def read(file):
    """A checkpoint.pt or metrics.json of this script, its settings as Settings."""
    try:
        if file.suffix == ".json":
            record = json.loads(file.read_text())
        else:
            record = torch.load(file, map_location="cpu", weights_only=True)
        if record["script"] != NAME:
            raise ValueError("of another script")
        record["settings"] = Settings(**record["settings"])
        return record
    except Exception:
        sys.exit(f"{file} is damaged, or no run of {NAME}: choose another --out")


def save(file, s, model, optimizer, log):
    record = dict(
        script=NAME,
        settings=dataclasses.asdict(s),
        log=log,
        model=model.state_dict(),
        optimizer=optimizer,
    )
    buffer = io.BytesIO()
    torch.save(record, buffer)
    write(file, buffer.getvalue())


def resume(file, model, optimizer):
    """The log of a stopped run, if there was one; its model is loaded."""
    if not file.exists():
        return []
    record = read(file)
    model.load_state_dict(record["model"])
    if record["optimizer"]:
        optimizer.load_state_dict(record["optimizer"])
    return record["log"]


def load(file, device="cpu"):
    """A trained model, ready to `sample`."""
    record = read(Path(file))
    model = make_model(record["settings"])
    model.load_state_dict(record["model"])
    return model.to(device).eval()


def commit():
    """The version of this code, if git knows it."""
    folder = Path(__file__).parent
    status, text = subprocess.getstatusoutput(f'git -C "{folder}" describe --always --dirty')
    return text if status == 0 else "unknown"


# ---- Evaluation ----------------------------------------------------------------------------------
@torch.no_grad()
def weights_of(model, z):
    """Those of the networks that z gives, gauge fixed, which changes no network's answers."""
    model.eval()  # batch norm by its running moments: each network depends on its own z alone
    return fix_gauge(model(z))


def sample(model, n, generator):
    """The weights of n networks, gauge fixed."""
    return weights_of(model, model.draw_z(n, generator))


@torch.no_grad()
def predict(theta: Theta, x: Tensor):
    """Probabilities (N, B, classes) of N networks on the same images (B, 1, 28, 28)."""
    number = len(theta[0])
    parts = []
    for images in tqdm(x.split(50), "testing", delay=5, leave=False):
        logits = each_network(target_network, images.expand(number, *images.shape), theta)
        parts.append(logits.softmax(dim=-1))
    return torch.cat(parts, dim=1)


def percent(right):
    return 100 * right.float().mean().item()


def mean_nll(probabilities, y):
    logs = probabilities.clamp_min(1e-12).log()
    return F.nll_loss(logs.flatten(0, 1), y.repeat(len(logs))).item()


def evaluate(probabilities, y):
    """Of N networks (N, B, classes), in percent: accuracy of each, of one, and of the vote of all;
    how often two networks disagree. Also the negative log-likelihood (NLL) of one, and of the mean
    probability of all."""
    answers = probabilities.argmax(dim=-1)  # (N, B)
    differ = [percent(answers != own) for own in answers]  # from itself no network differs
    return dict(
        each=[percent(own == y) for own in answers],
        one=percent(answers == y),
        vote=percent(majority(answers) == y),
        disagree=sum(differ) / max(1, len(answers) - 1),
        nll_one=mean_nll(probabilities, y),
        nll_vote=mean_nll(probabilities.mean(dim=0, keepdim=True), y),
    )


def average(theta):
    """Distillation: the ONE network whose weights are the mean of many networks'."""
    return [layer.mean(dim=0, keepdim=True) for layer in theta]


def gaussian_like(theta: Theta, n, generator):
    """n networks from the normal distribution with the mean and the covariance of the N in theta.
    If they are as good as those, G has learned no more than that distribution."""
    number = len(theta[0])
    mixture = torch.randn(n, number, device=theta[0].device, generator=generator)
    mixture = mixture / (number - 1) ** 0.5
    networks = []
    for layer in theta:  # (N, F, K + 1)
        mean = layer.mean(dim=0)
        networks.append(mean + torch.tensordot(mixture, layer - mean, dims=1))
    return networks


def walk_paths(model, x, y, generator):
    """Accuracies along ten paths, each from one network to another: straight from weights to
    weights, and through z, so that all points of a path are samples."""
    t = torch.linspace(0, 1, 11, device=y.device).view(11, 1, 1)
    paths = {"straight": [], "through z": []}
    for _ in tqdm(range(10), "walking paths", leave=False):
        z = model.draw_z(2, generator)
        straight = [torch.lerp(layer[0], layer[1], t) for layer in weights_of(model, z)]
        through_z = weights_of(model, torch.lerp(z[0], z[1], t[:, 0]))
        paths["straight"].append(evaluate(predict(straight, x), y)["each"])
        paths["through z"].append(evaluate(predict(through_z, x), y)["each"])
    return paths


def mean_dip(paths):
    """How far the worst point of a path lies below the worse of its ends."""
    return statistics.mean(min(path[0], path[-1]) - min(path) for path in paths)


EPSILONS = [0.0, 0.02, 0.04, 0.06, 0.1, 0.16, 0.24]  # changes of a pixel


def fast_gradient(theta, x, target):
    """The sign of the gradient of log p(target | x) of ONE network: which way to change x."""
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(target_network(x[None], theta)[0], target, reduction="sum")
    return -torch.autograd.grad(loss, x)[0].sign()


def attack(one, others, x, y, generator):
    """Adversarial examples x + epsilon * sign, not clipped, that shall bring ONE network to random
    wrong classes. By how many percent are that network and the vote of others fooled? Counted are
    images that the attacked network gets right; a row for each epsilon."""
    offset = torch.randint(1, 10, y.shape, device=y.device, generator=generator)
    sign = fast_gradient(one, x, (y + offset) % 10)
    right = vote(one, x) == y
    rows = []
    for epsilon in EPSILONS:
        changed = x + epsilon * sign
        rows.append([percent((vote(theta, changed) != y)[right]) for theta in (one, others)])
    return rows


def vote(theta, x):
    return majority(predict(theta, x).argmax(dim=-1))


def principal_components(weights):
    """PCA of N samples (N, ...): coordinates; what shares of the variance these have; and how much
    of the second component the square of the first explains: much of it if the set is curved."""
    centred = (weights - weights.mean(dim=0)).flatten(1)
    variances, vectors = torch.linalg.eigh(centred @ centred.T)  # the largest are the last
    coordinates = (vectors * variances.sqrt()).T[[-1, -2]].double()
    first, second = coordinates
    return dict(
        coordinates=coordinates.round(decimals=3).tolist(),
        shares=(variances / variances.sum())[[-1, -2]].tolist(),
        explained=torch.corrcoef(torch.stack([first.square(), second]))[0, 1].item() ** 2,
    )


MANY = 1000  # networks of which the mean, the covariance and PCA are taken
PARTS = ["layer 1", "layer 2", "layer 3", "layer 4", "filter of layer 2", "filter of layer 3"]


def analyse_pca(theta, generator):
    """Of each layer and of two filters: where are the networks? To compare: how much is explained
    in samples of the normal distribution with the same covariance."""
    theta = [*theta, theta[1][:, 0], theta[2][:, 0]]
    panels = {}
    for name, part, normal in zip(PARTS, theta, gaussian_like(theta, MANY, generator)):
        panels[name] = principal_components(part)
        panels[name]["explained_if_normal"] = principal_components(normal)["explained"]
    return panels


def analyse(model, s, data):
    """The numbers of validation images, for choices, and of test images."""
    x, y = data["val"]
    generator = torch.Generator(y.device).manual_seed(TEST)
    networks = sample(model, s.test_networks, generator)
    many = sample(model, MANY, generator)
    normal = gaussian_like(many, s.test_networks, generator)
    pca = analyse_pca(many, generator)
    val = {"networks": evaluate(predict(networks, x), y)}

    # Paths and attacks: of every tenth test image.
    x, y = data["test"]
    paths = walk_paths(model, x[::10], y[::10], generator)
    # Paper: a new network and ensemble for each image. Here: for each of 25 parts of the images.
    rates = []
    parts = zip(x[::10].chunk(25), y[::10].chunk(25))
    for images, labels in tqdm(parts, "attacking", 25, leave=False):
        one = sample(model, 1, generator)
        others = sample(model, s.test_networks // 2, generator)
        rates.append(attack(one, others, images, labels, generator))
    fooled = torch.tensor(rates).nanmean(dim=0).nan_to_num().tolist()

    test = {
        "networks": evaluate(predict(networks, x), y),
        "average": evaluate(predict(average(many), x), y),
        "gaussian": evaluate(predict(normal, x), y),
        "dips": {way: mean_dip(walked) for way, walked in paths.items()},
        "fooled": {"others": fooled[4][1]},  # by an epsilon of 0.1
    }
    return dict(val=val, test=test, paths=paths, adversarial=fooled, pca=pca)


# ---- Figures and table ---------------------------------------------------------------------------
PAPER = {"hypernetwork": 99.14, "mnfg": 99.28}  # votes of 200, images unmoved


def colour_of(s):
    if s.model == "mnfg":
        return "C2"
    return "C0" if s.start == "copies" else "C4"


def panels(runs, kind, columns, height, **sharing):
    """A figure, and a row of panels for each run that has this kind of results."""
    runs = [run for run in runs if kind in run["results"]]
    number = max(1, len(runs))
    figure = Figure(figsize=(10, height * number), layout="constrained")
    rows = list(zip(figure.subplots(number, columns, squeeze=False, **sharing), runs))
    for row, run in rows:
        row[0].set_title(run["name"], loc="left")
    return figure, rows


def plot_accuracies(runs):
    """How good is one network, and how good is the vote? On test images."""
    figure, rows = panels(runs, "test", 1, 1.5, sharex=True)
    for (ax,), run in rows:
        s = run["settings"]
        networks = run["results"]["test"]["networks"]
        ax.hist(networks["each"], "auto", color=colour_of(s), label=f"{s.test_networks} networks")
        ax.axvline(networks["vote"], color="black", label="their vote")
        ax.axvline(PAPER[s.model], color="grey", ls=":", label="the paper's vote of 200")
        ax.legend()
    figure.supxlabel("test accuracy (%)")
    return figure


def plot_pca(runs):
    """Do the networks lie on a curved set?"""
    figure, rows = panels(runs, "pca", 6, 2.4)
    for row, run in rows:
        for ax, (name, panel) in zip(row, run["results"]["pca"].items()):
            ax.plot(*panel["coordinates"], ".", ms=2, color=colour_of(run["settings"]))
            first, second = panel["shares"]
            ax.set(xlabel=f"{name}\n{first:.0%}, {second:.0%}", xticks=[], yticks=[])
    return figure


def plot_paths(runs):
    """Are the points between two networks good networks? Ten paths of each run."""
    figure, rows = panels(runs, "paths", 2, 2.2, sharex=True, sharey=True)
    for row, run in rows:
        for ax, (way, paths) in zip(row, run["results"]["paths"].items()):
            ax.plot(torch.tensor(paths).T, color=colour_of(run["settings"]), lw=0.8)
            ax.set_title(way)
    figure.supxlabel("eleven points from one network to another")
    figure.supylabel("test accuracy (%)")
    return figure


def plot_adversarial(runs):
    """Are others fooled by what fools one network?"""
    figure, rows = panels(runs, "adversarial", 1, 2.2, sharex=True, sharey=True)
    for (ax,), run in rows:
        colour = colour_of(run["settings"])
        one, others = torch.tensor(run["results"]["adversarial"]).T
        ax.plot(EPSILONS, one, "o:", color=colour, label="the attacked network")
        ax.plot(EPSILONS, others, "o-", color=colour, label="vote of others")
        ax.legend()
    figure.supxlabel("change of a pixel (1: black to white)")
    figure.supylabel("misclassified images (%)")
    return figure


TABLES = [  # title: where the number is in the results of test images
    {
        "one": ("networks", "one"),
        "vote of all": ("networks", "vote"),
        "average": ("average", "one"),
        "disagree": ("networks", "disagree"),
        "NLL of vote": ("networks", "nll_vote"),
    },
    {
        "Gaussian": ("gaussian", "one"),
        "its vote": ("gaussian", "vote"),
        "dip straight": ("dips", "straight"),
        "dip by z": ("dips", "through z"),
        "fooled": ("fooled", "others"),
    },
]


def table(runs):
    """Markdown, padded so that it also reads in a terminal: numbers on test images, accuracies in
    percent. Runs that differ in their seed alone share a row: mean ± standard deviation."""
    groups = {}
    for run in runs:
        settings = dataclasses.replace(run["settings"], seed=0)
        groups.setdefault(settings, []).append(run)
    lines = []
    for columns in TABLES:
        rows = [["run", *columns], ["---"] * (len(columns) + 1)]
        for group in groups.values():
            row = [group[0]["name"]]
            for kind, key in columns.values():
                row.append(cell([run["results"]["test"].get(kind, {}).get(key) for run in group]))
            rows.append(row)
        for row in rows:
            cells = [text.ljust(11) for text in row]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def cell(values):
    if None in values:
        return ""
    if len(values) == 1:
        return f"{values[0]:#.4g}"
    return f"{statistics.mean(values):#.4g} ± {statistics.stdev(values):.2f}"


# ---- Main ----------------------------------------------------------------------------------------
def check_folder(folder, s):
    """Exits if the folder holds another run."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (folder / "metrics.json", folder / "checkpoint.pt"):
        if file.exists() and read(file)["settings"] != s:
            sys.exit(f"{file} is a run of other settings: choose another --out")


def run_one(folder, s, args):
    """Train and analyse one run, unless that is done."""
    if (folder / "metrics.json").exists():
        return
    data = load_data(s, args.data, args.device)
    model, log = train(s, data, folder / "checkpoint.pt")
    run = dict(
        script=NAME,
        settings=dataclasses.asdict(s),
        command=" ".join(sys.argv),
        commit=commit(),
        hardware=platform.machine() if args.device == "cpu" else torch.cuda.get_device_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        seconds=sum(row["seconds"] for row in log),
        log=log,
        results=analyse(model, s, data),
    )
    write(folder / "metrics.json", json.dumps(run, indent=1).encode())


def read_runs(out):
    """Every finished run at or below a folder, named by its path below it."""
    runs = []
    for file in sorted(out.rglob("metrics.json")):
        run = read(file)
        run["name"] = file.parent.relative_to(out).as_posix()
        runs.append(run)
    if not runs:
        sys.exit(f"no finished run in {out}")
    return runs


def main(argv=None):
    args = parse_args(argv)
    if not args.draw:
        # All folders are looked at before anything is trained.
        for name, settings in args.settings.items():
            check_folder(args.out / name, settings)
        for name, settings in args.settings.items():
            run_one(args.out / name, settings, args)
    runs = read_runs(args.out)
    # Seeds and sweeps, in folders below, are in the table and among the accuracies.
    top = [run for run in runs if "/" not in run["name"]] or runs
    figures = {
        "accuracies": plot_accuracies(runs),
        "pca": plot_pca(top),
        "paths": plot_paths(top),
        "adversarial": plot_adversarial(top),
    }
    for name, figure in figures.items():
        if figure.axes[0].has_data():
            picture = io.BytesIO()
            figure.savefig(picture, dpi=150)
            write(args.out / f"{name}.png", picture.getvalue())
    print(table(runs))
    print("figures:", args.out)
    return runs


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    except OSError as error:
        sys.exit(f"{error}: is there room, and may this program write there?")
