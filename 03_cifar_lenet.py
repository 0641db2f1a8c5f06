"""Ensembles of LeNets on CIFAR from one hypernetwork, beside ensembles made by SGD.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[answers of T(.; G(z)) to shared images]

Section "CIFAR-10" of the paper, the LeNet row of its table. New against MNIST: diversity is in what
the networks answer, which no symmetry of the weights can fake. (a) to (d) are the paper's columns:

    a     one network by SGD
    b     ten networks of five chains of SGD at a constant rate
    c     networks of the paper's hypernetwork, without diversity
    d     the same with the entropy of outputs
    five  a control: five networks by SGD, each from its own start
    c+    ours: a hypernetwork around a learned mean, without diversity
    d+    the same with the entropy of outputs

    python 03_cifar_lenet.py --quick        # all columns in minutes: does it run?
    python 03_cifar_lenet.py --columns d+   # one column; the same command again goes on
    python 03_cifar_lenet.py                # all columns: five hours on one CPU core
    python 03_cifar_lenet.py --draw --out results/03_cifar_lenet   # the documented runs
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

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision import datasets
from tqdm import tqdm

from common import conv2d, each_network, fix_gauge, knn_entropy, linear, majority, max_pool2d

NAME = "03_cifar_lenet"
Theta = list[Tensor]  # the weights of N networks: a tensor (N, F, K + 1) for each layer


# ---- Settings ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Settings:
    """One column of the table. The defaults are those of (c), the paper's hypernetwork."""

    model: str = "hypernetwork"  # or "networks" (by SGD), or "around mean" (ours)
    dataset: str = "cifar10"  # or "cifar100"
    steps: int = 25_000
    networks: int = 8  # in a step: samples of z, or networks of SGD
    images: int = 64  # in a step, for each network
    shared_images: int = 8  # so many of them are the same for all networks, to compare answers
    adam_lr: float = 1e-3  # of the hypernetwork
    sgd_lr: float = 0.0  # of ordinary networks, and of the learned mean
    constant_rate: bool = False  # in the second half, where ten networks are taken: (b)
    scale: float = 0.1  # of the deviations from the learned mean
    diversity: str = "none"  # or "outputs", "weights", "variance", "ensemble": measure_entropy
    lam: float = 1e3  # weight of accuracy against diversity
    seed: int = 0
    test_images: int = 10_000  # at most, of validation and of test images
    test_networks: int = 100  # at most
    averaged: int = 10_000  # networks whose weights are averaged: distillation

    def __post_init__(self):
        for name, value in vars(self).items():
            if name in CHOICES and value not in CHOICES[name]:
                raise ValueError(f"{name} must be one of {CHOICES[name]}")
            if name not in CHOICES and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number, not below 0")
        for name in ("steps", "networks", "images", "lam", "test_networks"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must not be 0")
        if self.steps >= 1_000_000 or self.seed >= 4000:
            raise ValueError("steps must be below a million, seed below 4000")
        if self.diversity != "none" and (self.networks < 2 or self.shared_images < 1):
            raise ValueError("diversity needs 2 networks in a step, and shared_images")


CHOICES = {
    "model": ["networks", "hypernetwork", "around mean"],
    "dataset": ["cifar10", "cifar100"],
    "diversity": ["none", "outputs", "weights", "variance", "ensemble"],
}
COLUMNS = {
    "a": Settings(model="networks", steps=100_000, networks=1, images=128, sgd_lr=0.03),
    "b": Settings(
        model="networks",
        steps=40_000,
        networks=5,
        images=128,
        shared_images=0,
        sgd_lr=0.003,
        constant_rate=True,
    ),
    "c": Settings(),
    "d": Settings(diversity="outputs"),
    "five": Settings(
        model="networks", steps=40_000, networks=5, images=128, shared_images=0, sgd_lr=0.03
    ),
    "c+": Settings(model="around mean", steps=30_000, networks=4, sgd_lr=0.06),
    "d+": Settings(
        model="around mean", steps=30_000, networks=4, sgd_lr=0.06, diversity="outputs", lam=3e3
    ),
}
QUICK = dict(steps=200, images=64, test_images=1000, test_networks=20, averaged=500)  # at most
VALIDATION = 1  # seeds of evaluation; those of training begin at a million
TEST = 2


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add = parser.add_argument
    add("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), help="default: all")
    add("--quick", action="store_true", help=f"small costs, at most: {QUICK}")
    add("--draw", action="store_true", help="only draw the finished runs in --out")
    add("--device", choices=devices, default=devices[0], help="default: %(default)s")
    add("--data", type=Path, default="data", help="default: %(default)s; filled if empty")
    add("--out", type=Path, help="default: runs/ and the name of this script, with _quick if so")
    group = parser.add_argument_group("settings, instead of the columns' own (see class Settings)")
    for field in dataclasses.fields(Settings):
        kind = dict(type=field.type)
        if field.type is bool:
            kind = dict(action=argparse.BooleanOptionalAction)
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, help=f"(c): {field.default}", **kind)
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = Path("runs", f"{NAME}_quick" if args.quick else NAME)
    args.settings = {}
    for column in args.columns:
        try:
            args.settings[column] = choose_settings(COLUMNS[column], args)
        except ValueError as error:
            parser.error(f"column {column}: {error}")
    return args


def choose_settings(column, args):
    """A column's settings with what the command overrides."""
    values = dataclasses.asdict(column)
    for name in values:
        given = getattr(args, name)
        if given is not None:
            values[name] = given
        elif args.quick and name in QUICK:
            values[name] = min(values[name], QUICK[name])
    return Settings(**values)


# ---- Data ----------------------------------------------------------------------------------------
def load_data(s, folder, device):
    """Normalised images (B, 3, 32, 32) and labels (B,), on the training device: 45,000 of CIFAR for
    training ("train"), 5,000 for all choices ("val"), 10,000 for the final numbers ("test")."""
    cifar = datasets.CIFAR10 if s.dataset == "cifar10" else datasets.CIFAR100
    try:
        train = cifar(folder, train=True, download=True)
        test = cifar(folder, train=False, download=True)
    except Exception as error:
        state = "damaged" if (folder / cifar.base_folder).exists() else "missing"
        sys.exit(
            f"{s.dataset} is {state} in {folder}, and not to be downloaded "
            f"({type(error).__name__}): put {cifar.filename} there"
        )
    x = torch.from_numpy(np.concatenate([train.data, test.data])).float()  # (B, 32, 32, 3)
    y = torch.tensor(train.targets + test.targets, device=device)
    number = len(train.data)
    mean = x[:number].mean(dim=(0, 1, 2))  # of each colour
    std = x[:number].std(dim=(0, 1, 2))
    x = ((x - mean) / std).permute(0, 3, 1, 2).to(device)

    val = min(number // 10, s.test_images)
    splits = {
        "train": slice(val, number),
        "val": slice(val),
        "test": slice(number, number + s.test_images),
    }
    return {name: (x[part], y[part]) for name, part in splits.items()}


MOVES = 5  # positions of a crop in each direction: images are moved by up to two pixels


def random_crops(padded: Tensor, y: Tensor, s: Settings, generator):
    """Training images (N, B, 3, 32, 32), moved and mirrored at random, and labels (N, B). The first
    `shared_images` are the same for all networks, the rest differ, as in the paper."""
    crops = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # a view: all crops of each image
    sizes = (len(crops), MOVES, MOVES)
    shape = (s.networks, s.images)
    choice = torch.randint(math.prod(sizes), shape, device=y.device, generator=generator)
    choice[1:, : s.shared_images] = choice[0, : s.shared_images]
    image, row, column = torch.unravel_index(choice, sizes)
    x = crops[image, :, row, column]  # (N, B, 3, 32, 32)
    # Every second one is mirrored: which images these are is random already.
    x[:, 1::2] = x[:, 1::2].flip(-1)
    return x, y[image]


# ---- Target network ------------------------------------------------------------------------------
LAYERS = [(6, 76), (16, 151), (120, 401), (84, 121)]  # (F, K + 1) of all layers but the last


def target_network(x: Tensor, theta: Theta) -> Tensor:
    """LeNet, (N, B, 3, 32, 32) -> logits (N, B, classes)."""
    x = max_pool2d(conv2d(x, theta[0], 5), 2).relu()  # (N, B, 6, 14, 14)
    x = max_pool2d(conv2d(x, theta[1], 5), 2).relu()  # (N, B, 16, 5, 5)
    x = linear(x.flatten(2), theta[2]).relu()  # (N, B, 120)
    x = linear(x, theta[3]).relu()  # (N, B, 84)
    return linear(x, theta[4])


def he_weights(shapes, number):
    """Random initial weights of ordinary networks."""
    theta = []
    for filters, size in shapes:
        theta.append((2 / (size - 1)) ** 0.5 * torch.randn(number, filters, size))
    return theta


# ---- Networks and hypernetworks ------------------------------------------------------------------
# Each has draw_z(n, generator) -> z, and forward(z) -> theta: the weights of n networks, a list of
# tensors (n, F, K + 1), first layer first.
NOISE_SIZE = 100  # numbers in z
CODE_SIZE = 8
CODES = [6, 16, 120, 1, 1]  # of each layer: one for each filter, or one for the whole layer


class Networks(nn.Module):
    """Ordinary networks, each with weights of its own, for SGD: z is a network's number."""

    def __init__(self, theta):
        super().__init__()
        self.weights = nn.ParameterList(theta)

    def draw_z(self, n, generator):
        """The first n of them, or all if there are fewer."""
        return torch.arange(len(self.weights[0]), device=self.weights[0].device)[:n]

    def forward(self, z):
        return [layer.index_select(0, z) for layer in self.weights]


def linear_layer(fan_in, fan_out, variance):
    layer = nn.Linear(fan_in, fan_out, bias=False)
    nn.init.normal_(layer.weight, std=variance**0.5)
    return layer


def mlp(fan_in, width, fan_out):
    """Three linear layers. What comes out is as large as what goes in."""
    return nn.Sequential(
        linear_layer(fan_in, width, 2 / fan_in),
        nn.LeakyReLU(0.05),
        linear_layer(width, width, 2 / width),
        nn.LeakyReLU(0.05),
        linear_layer(width, fan_out, 1 / width),
    )


class Hypernetwork(nn.Module):
    """The paper's, G(z) = W(E(z) + bias): the extractor E turns z into codes of eight numbers, and
    the weight generators W, one for each layer, turn a code into a filter, or into a whole layer.

    Networks begin as near-copies of one, as E(z) is small beside the bias: it is learned first."""

    def __init__(self, shapes, codes):
        super().__init__()
        self.shapes = shapes  # (F, K + 1) of each layer
        self.codes = codes  # how many codes it has
        self.extractor = mlp(NOISE_SIZE, 200, CODE_SIZE * sum(codes))
        self.extractor[-1].weight.data *= 0.2
        self.bias = nn.Parameter(torch.randn(CODE_SIZE * sum(codes)))
        self.generators = nn.ModuleList()
        for (filters, size), number in zip(shapes, codes):
            self.generators.append(mlp(CODE_SIZE, 400, filters * size // number))

    def draw_z(self, n, generator):
        return torch.randn(n, NOISE_SIZE, device=self.bias.device, generator=generator)

    def forward(self, z):
        codes = self.extractor(z) + self.bias  # (N, C)
        return self.last_layers(self.hidden_layers(codes))

    def hidden_layers(self, codes):
        """W but for its last linear layers: (N, C) -> (N, codes, 400) for each layer of T."""
        parts = codes.unflatten(1, (-1, CODE_SIZE)).split(self.codes, dim=1)
        return [generator[:-1](part) for generator, part in zip(self.generators, parts)]

    def last_layers(self, hidden):
        theta = []
        for generator, part, (filters, size) in zip(self.generators, hidden, self.shapes):
            weights = generator[-1](part).view(len(part), filters, size)
            # A step of Adam is small for numbers of size 1, not for weights of this size.
            theta.append((2 / (size - 1)) ** 0.5 * weights)
        return theta


class AroundMean(Hypernetwork):
    """Ours: G(z) = mean + scale * (W(E(z) + bias) - W(bias)). The mean is learned by SGD."""

    def __init__(self, shapes, codes, scale):
        super().__init__(shapes, codes)
        self.scale = scale
        self.weights = nn.ParameterList(he_weights(shapes, 1))  # the mean

    def forward(self, z):
        codes = torch.cat([self.extractor(z) + self.bias, self.bias[None]])  # (N + 1, C)
        # W's last layer is linear: subtract before it, and it runs once.
        offsets = [hidden[:-1] - hidden[-1:] for hidden in self.hidden_layers(codes)]
        deviations = self.last_layers(offsets)
        return [mean + self.scale * part for mean, part in zip(self.weights, deviations)]


def make_model(s):
    classes = 10 if s.dataset == "cifar10" else 100
    shapes = [*LAYERS, (classes, 85)]  # 62,006 weights for 10 classes
    if s.model == "networks":
        return Networks(he_weights(shapes, s.networks))
    if s.model == "hypernetwork":
        return Hypernetwork(shapes, CODES)
    return AroundMean(shapes, CODES, s.scale)


def make_optimizers(model, s):
    """SGD for weights of ordinary networks, Adam for what generates weights."""
    optimizers = []
    if s.model != "hypernetwork":
        sgd = dict(momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
        optimizers.append(torch.optim.SGD(model.weights, s.sgd_lr, **sgd))
    if s.model != "networks":
        generating = [*model.extractor.parameters(), *model.generators.parameters(), model.bias]
        optimizers.append(torch.optim.Adam(generating, s.adam_lr, fused=True))
    return optimizers


# ---- Training ------------------------------------------------------------------------------------
def measure_entropy(s: Settings, theta: Theta, logits: Tensor, y: Tensor) -> Tensor:
    """How different are N networks, by their weights or by their logits (N, B, classes) on shared
    images with labels y (B,)? The entropy has a factor dim z; the other measures have it, too."""
    if s.diversity == "none":
        return logits.new_zeros(())
    if s.diversity == "outputs":
        answers = logits.softmax(dim=-1).flatten(1)  # (N, B * classes)
        return knn_entropy(answers, NOISE_SIZE)
    if s.diversity == "ensemble":  # by how much is the loss of the averaged prediction smaller?
        targets = y.expand(len(logits), -1)
        losses = F.cross_entropy(logits.mT, targets, reduction="none")  # (N, B)
        averaged = math.log(len(losses)) - torch.logsumexp(-losses, dim=0)
        return NOISE_SIZE * (losses - averaged).mean()
    weights = torch.cat([layer.flatten(1) for layer in fix_gauge(theta)], dim=1)  # (N, D)
    if s.diversity == "variance":
        return NOISE_SIZE * weights.var(dim=0).mean()
    return knn_entropy(weights, NOISE_SIZE)


def training_step(
    model: nn.Module, z: Tensor, x: Tensor, y: Tensor, s: Settings, ramp: float
) -> dict:
    """The method. Images (N, B, 3, 32, 32), labels (N, B): network n sees batch n."""
    theta = model(z)
    logits = each_network(target_network, x, theta)  # (N, B, classes)
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    shared = s.shared_images
    entropy = measure_entropy(s, theta, logits[:, :shared], y[0, :shared])
    loss = s.lam * loss_acc - ramp * entropy
    acc = (logits.argmax(dim=-1) == y).float().mean()
    return dict(loss=loss, loss_acc=loss_acc, entropy=entropy, acc=acc)


def lr_factor(s, step):
    """What the rates of all optimizers are multiplied by."""
    left = 1 - step / s.steps
    warm_up = min(1.0, (step + 1) / min(200, s.steps // 5 + 1))
    if s.constant_rate:
        # Paper: constant from the first step. Here only in the second half, where networks are
        # taken; before, it falls from ten times as much, or they would be far from converged.
        return min(10 * warm_up, max(1.0, 18 * left - 8))
    return min(warm_up, left)


def train(s, data, file):
    """Train one column, or go on where a stopped run stood: the model and its log."""
    first_seed = (1 + s.seed) * 1_000_000
    torch.manual_seed(first_seed)
    x, y = data["train"]
    padded = F.pad(x, [MOVES // 2] * 4)
    model = make_model(s).to(x.device)
    optimizers = make_optimizers(model, s)
    log, snapshots = resume(file, model, optimizers)
    log_every = math.ceil(s.steps / 40)
    first = log_every * len(log)
    started = time.perf_counter()
    snapshot_every = math.ceil(s.steps * s.networks / 20)

    for step in tqdm(
        range(first, s.steps), file.parent.name, s.steps, initial=first, mininterval=1
    ):
        # Draw. A step's random numbers depend on seed and step alone, so that a run that was
        # stopped goes on as if it never had been.
        generator = torch.Generator(x.device).manual_seed(first_seed + 1 + step)
        z = model.draw_z(s.networks, generator)
        images, labels = random_crops(padded, y, s, generator)

        # Accuracy first: diversity gets its full weight in the first half of the steps.
        ramp = min(1.0, 2 * step / s.steps)
        result = training_step(model, z, images, labels, s, ramp)

        # Step. SGD is not scale-free: its loss is divided by lam, and each ordinary network follows
        # its own loss, not its share of the mean.
        loss = result["loss"] / s.lam
        if s.model == "networks":
            loss = s.networks * loss
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            group = optimizer.param_groups[0]
            if isinstance(optimizer, torch.optim.Adam):
                nn.utils.clip_grad_norm_(group["params"], 5.0)  # against rare spikes
            group["lr"] = lr_factor(s, step) * optimizer.defaults["lr"]
            optimizer.step()

        # (b) takes ten networks from the second half of its chains, the last ones too.
        done = step + 1
        if s.constant_rate and done > s.steps // 2 and (s.steps - done) % snapshot_every == 0:
            taken = [layer.detach().cpu().clone() for layer in model.weights]
            snapshots.append(taken)

        # Log and save, forty times a run.
        if done % log_every == 0 or done == s.steps:
            row = validate(model, data)
            row.update(step=done, seconds=time.perf_counter() - started)
            started = time.perf_counter()
            for name, value in result.items():
                row[name] = value.item()
            if not math.isfinite(sum(row.values())):
                sys.exit("the loss is not finite: try a smaller rate")
            log.append(row)
            save(file, s, model, optimizers if done < s.steps else [], log, snapshots)
    return load(file, x.device), log


def validate(model, data):
    """Ten networks, of the same z each time, on validation images."""
    x, y = data["val"]
    theta = sample(model, 10, torch.Generator(y.device).manual_seed(VALIDATION))
    return evaluate(predict(theta, x), y)


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


def save(file, s, model, optimizers, log, snapshots):
    record = dict(
        script=NAME,
        settings=dataclasses.asdict(s),
        log=log,
        snapshots=snapshots,
        model=model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
    )
    buffer = io.BytesIO()
    torch.save(record, buffer)
    write(file, buffer.getvalue())


def resume(file, model, optimizers):
    """The log and the snapshots of a stopped run, if there was one; its model is loaded."""
    if not file.exists():
        return [], []
    record = read(file)
    model.load_state_dict(record["model"])
    for optimizer, state in zip(optimizers, record["optimizers"]):
        optimizer.load_state_dict(state)
    return record["log"], record["snapshots"]


def load(file, device="cpu"):
    """A trained model, ready to `sample`; of (b) the networks that were taken."""
    record = read(Path(file))
    model = make_model(record["settings"])
    model.load_state_dict(record["model"])
    if record["snapshots"]:
        model = Networks([torch.cat(layers) for layers in zip(*record["snapshots"])])
    return model.to(device)


def commit():
    """The version of this code, if git knows it."""
    folder = Path(__file__).parent
    status, text = subprocess.getstatusoutput(f'git -C "{folder}" describe --always --dirty')
    return text if status == 0 else "unknown"


# ---- Evaluation ----------------------------------------------------------------------------------
@torch.no_grad()
def sample(model, n, generator):
    """The weights of n networks, or of as many as there are."""
    return model(model.draw_z(n, generator))


@torch.no_grad()
def predict(theta: Theta, x: Tensor):
    """Probabilities (N, B, classes) of N networks on the same images (B, 3, 32, 32)."""
    number = len(theta[0])
    parts = []
    for images in tqdm(x.split(250), "testing", delay=5):
        logits = each_network(target_network, images.expand(number, *images.shape), theta)
        parts.append(logits.softmax(dim=-1))
    return torch.cat(parts, dim=1)


def percent(right):
    return 100 * right.float().mean().item()


def mean_nll(probabilities, y):
    logs = probabilities.clamp_min(1e-12).log()
    return F.nll_loss(logs.flatten(0, 1), y.repeat(len(logs))).item()


def evaluate(probabilities, y):
    """Of N networks (N, B, classes), in percent: accuracy of one; of votes of ten (or of all, if
    there are fewer), no network in two of them; how often two networks disagree. Also the negative
    log-likelihood (NLL) of one, and of the mean probability of ten."""
    number = len(probabilities)
    size = min(10, number)
    groups = probabilities[: number - number % size].unflatten(0, (-1, size))
    answers = probabilities.argmax(dim=-1)  # (N, B)
    votes = torch.stack([majority(group.argmax(dim=-1)) for group in groups])
    differ = [percent(answers != own) for own in answers]  # from itself no network differs
    return dict(
        one=percent(answers == y),
        ten=percent(votes == y),
        disagree=sum(differ) / max(1, number - 1),
        nll_one=mean_nll(probabilities, y),
        nll_ten=mean_nll(groups.mean(dim=1), y),
    )


@torch.no_grad()
def average(model, n, generator):
    """Distillation: the ONE network whose weights are the mean of n networks'."""
    z = model.draw_z(n, generator)
    sums = [torch.zeros_like(layer) for layer in model(z[:1])]
    for part in z.split(100):
        for total, layer in zip(sums, model(part)):
            total += layer.sum(dim=0, keepdim=True)
    return [total / len(z) for total in sums]


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


def analyse(model, s, data):
    """The numbers of validation images, for choices, and of test images."""
    generator = torch.Generator(data["test"][1].device).manual_seed(TEST)
    ensembles = {"networks": sample(model, s.test_networks, generator)}
    if s.model != "networks":
        ensembles["average"] = average(model, s.averaged, generator)
        many = sample(model, 500, generator)
        ensembles["gaussian"] = gaussian_like(many, s.test_networks, generator)
    results = {"val": {}, "test": {}}
    for split in results:
        x, y = data[split]
        for kind, theta in ensembles.items():
            results[split][kind] = evaluate(predict(theta, x), y)
    return results


# ---- Figure and table ----------------------------------------------------------------------------
PAPER = {"b": (74.95, 80.60), "c": (76.26, 76.47), "d": (72.34, 78.21)}  # one network, ten


def colour_of(s):
    if s.model == "networks":
        return "black"
    return "C0" if s.diversity == "none" else "C1"


def plot_votes(runs):
    """Is a vote of ten better than one network, and than the average? Test images of CIFAR-10."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    ax = figure.subplots()
    for column, (one, ten) in PAPER.items():
        ax.plot(one, ten, marker=f"${column}$", color="grey")
    for run in runs:
        if run["settings"].dataset == "cifar10":
            test = run["results"]["test"]
            one = test["networks"]["one"]
            ten = test["networks"]["ten"]
            colour = colour_of(run["settings"])
            ax.plot(one, ten, "o", color=colour)
            if run["settings"].seed == 0:
                ax.annotate(f" {run['name']}", (one, ten))
            if "average" in test:
                ax.plot(one, test["average"]["one"], "o", color=colour, fillstyle="none")

    # A rule fitted to earlier ensembles: if two networks disagree on D % of the images, a vote of
    # ten gains about 0.21 D^2 / (100 - one) points.
    ax.margins(0.1)
    one = torch.linspace(*ax.get_xlim(), 100)
    ax.autoscale(False)
    for d in (0, 10, 15, 20, 25, 30):
        ten = one + 0.21 * d**2 / (100 - one)
        ax.plot(one, ten, color="lightgrey", zorder=0)
        ax.annotate(f"D = {d} %", (one[45], ten[45]), color="grey")
    ax.set(
        xlabel="one network: test accuracy (%)",
        ylabel="vote of ten: test accuracy (%)",
        title="black: SGD; blue: hypernetwork, orange: with diversity; open: its average network\n"
        "letters: the paper's; lines: rule of votes, if two networks disagree on D %",
    )
    return figure


TABLES = [  # title: the kind of networks, and its number
    {
        "one": ("networks", "one"),
        "ten": ("networks", "ten"),
        "average": ("average", "one"),
        "disagree": ("networks", "disagree"),
    },
    {
        "Gaussian: one": ("gaussian", "one"),
        "Gaussian: ten": ("gaussian", "ten"),
        "NLL: one": ("networks", "nll_one"),
        "NLL: ten": ("networks", "nll_ten"),
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
        rows = [["run", *columns, "seconds"], ["---"] * (len(columns) + 2)]
        for group in groups.values():
            row = [group[0]["name"]]
            for kind, key in columns.values():
                row.append(cell([run["results"]["test"].get(kind, {}).get(key) for run in group]))
            row.append(f"{group[0]['seconds']:.0f}")
            rows.append(row)
        for row in rows:
            cells = [text.ljust(13) for text in row]
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


def run_column(folder, s, args):
    """Train and analyse one column, unless that is done."""
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
        for column, settings in args.settings.items():
            check_folder(args.out / column, settings)
        for column, settings in args.settings.items():
            run_column(args.out / column, settings, args)
    runs = read_runs(args.out)
    picture = io.BytesIO()
    plot_votes(runs).savefig(picture, dpi=150)
    write(args.out / "votes.png", picture.getvalue())
    print(table(runs))
    print(args.out / "votes.png")
    return runs


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    except OSError as error:
        sys.exit(f"{error}: is there room, and may this program write there?")
