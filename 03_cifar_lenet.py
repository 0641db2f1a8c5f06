"""Ensembles of LeNets on CIFAR from one hypernetwork, beside ensembles made by SGD.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[answers of T(.; G(z)) to shared images]

Section "CIFAR-10" of the paper, the LeNet row of its table. New against MNIST: diversity is in what
the networks answer, which no symmetry of the weights can fake. (a) is one network by SGD, (b) ten
from chains of SGD, (c) the paper's hypernetwork without diversity, (d) with it. Ours: (c+) and (d+)
generate around a learned mean, (e) around one of five. c-decay, d-random, free are controls.

    python 03_cifar_lenet.py --quick        # all columns in minutes: does it run?
    python 03_cifar_lenet.py --columns d+   # one column; the same command again goes on, or redraws
    python 03_cifar_lenet.py                # all columns: five hours on one CPU core
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision import datasets
from tqdm import tqdm

from common import conv2d, each_network, fix_gauge, knn_entropy, linear, majority, max_pool2d

NAME = "03_cifar_lenet"
CLASSES = dict(cifar10=10, cifar100=100)
# The documented runs, by column. SGD trains `networks`, PAPERS the paper's G by Adam; AROUND learns
# `means` by SGD, at the rate `lr`, and deviations, times `scale`, by Adam, at the rate `adam`. Of
# the `images` of a step `shared` are the same for all networks; diversity has its full weight after
# the share `ramp` of the steps. `tested` networks are tested, the weights of `averaged` averaged.
SGD = dict(steps=100_000, lr=0.03, networks=1, images=128, shared=0, crop=2, lam=1.0, ramp=0.5)
SGD |= dict(codes=None, means=0, scale=0.0, adam=0.0, decay=0.0, diversity="none", seed=0)
SGD |= dict(copies=True, rows=40, tested=10, averaged=0)
PAPERS = SGD | dict(steps=25_000, lr=1e-3, networks=8, images=64, shared=8, lam=1e3)
PAPERS |= dict(codes=[6, 16, 120, 1, 1], tested=100, averaged=10_000)
AROUND = PAPERS | dict(steps=30_000, lr=0.06, networks=4, images=64, means=1, scale=0.1, adam=1e-3)
FIVE = dict(steps=40_000, lr=0.03, networks=5, images=128, shared=128, ramp=0.0)
FIVE |= dict(diversity="ensemble", lam=200.0)  # half of the loss is the averaged prediction's
RECIPES = {
    "a": SGD,
    "b": SGD | dict(steps=40_000, lr=0.003, networks=5),  # five chains, two networks of each
    "c": PAPERS,
    "c-decay": PAPERS | dict(decay=2.5e-4),  # of generated weights, as much as SGD's weight decay
    "d": PAPERS | dict(diversity="outputs"),
    "d-random": PAPERS | dict(diversity="outputs", copies=False),  # far apart at first
    "c+": AROUND,
    "d+": AROUND | dict(diversity="outputs", lam=3e3),
    "e": AROUND | FIVE | dict(means=5),
    "free": SGD | FIVE,  # a control: (e) without deviation is five networks by SGD
}
QUICK = dict(steps=200, images=64, rows=5, tested=20, averaged=500)  # at most
PAPER = dict(b=(0.7495, 0.8060), c=(0.7626, 0.7647), d=(0.7234, 0.7821))  # one network, ten
COLOURS = dict(chance="black", none="C0", outputs="C1", weights="C2", variance="C4", ensemble="C3")
SIZES = [1, 2, 5, 10, 20, 50, 100]  # of ensembles
VALIDATION, TEST = 1, 2  # seeds of evaluation; those of training begin at a million
SAVE_SECONDS = 120  # of training that a killed run loses at most


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{NAME}.py", description=__doc__.splitlines()[0])
    add, measures = parser.add_argument, ["outputs", "weights", "variance", "ensemble", "none"]
    add("--columns", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="all or some")
    add("--dataset", choices=list(CLASSES), default="cifar10", help="cifar10 unless given")
    add("--diversity", choices=measures, help="the recipe's unless given, as all that follow")
    add("--steps", type=int, help="of training")
    add("--lr", type=float, help="rate of SGD, or of Adam in columns without SGD")
    add("--lam", type=float, help="weight of accuracy against diversity")
    add("--networks", type=int, help="in a step: samples of z, or chains of SGD")
    add("--means", type=int, help="in columns c+, d+, e: learned networks to deviate from")
    add("--images", type=int, help="in a step, for each network")
    add("--seed", type=int, help="of all random numbers of training")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[0], help=f"here: {devices[0]}")
    add("--data", type=Path, default=Path("data"), help="folder of CIFAR; filled if it is empty")
    add("--fake-data", action="store_true", help="made-up images, to try the code without CIFAR")
    add("--out", type=Path, default=Path("runs") / NAME, help="a folder for each run goes in here")
    add("--quick", action="store_true", help=f"small costs, at most {QUICK}")
    args = parser.parse_args(argv)
    args.runs = [settings(args, column) for column in args.columns]
    for c in args.runs:
        if not all(0 < v < math.inf for v in (c.steps, c.lr, c.lam, c.networks, c.images)):
            parser.error("--steps, --lr, --lam, --networks, --images: positive numbers")
        if c.diversity != "none" and (c.networks < 2 or not c.shared):
            parser.error("diversity needs at least 2 --networks in a step; columns a, b have none")
        if c.networks % max(1, c.means) or (args.means is not None and min(c.adam, c.means) <= 0):
            parser.error("--means: of columns c+, d+, e; --networks must be a multiple of it")
    return args


def settings(args: argparse.Namespace, column: str) -> argparse.Namespace:
    """A column's recipe with what the command overrides; its name says so."""
    recipe, dataset, fake = RECIPES[column], args.dataset, args.fake_data
    quick = {name: min(most, recipe[name]) for name, most in QUICK.items() if args.quick}
    given = {name: v for name, v in vars(args).items() if name in recipe and v is not None}
    words = [v if isinstance(v, str) else f"{name}{v:.12g}" for name, v in given.items()]
    name = "_".join([dataset, column, *words, *["quick"] * args.quick, *["fake"] * fake])
    c = dict(script=NAME, name=name, column=column, dataset=dataset, fake_data=fake)
    c |= recipe | quick | given
    return argparse.Namespace(**c | dict(means=c["means"] if c["codes"] else c["networks"]))


# ---- Data ----------------------------------------------------------------------------------------
def load_data(args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Normalised images (B, 3, 32, 32), channels last, and labels (B,), on the training device.
    train, val, test: 45,000, 5,000 and 10,000 of CIFAR; other: test images of the other CIFAR."""
    (other,), splits = CLASSES.keys() - {args.dataset}, {}
    for name, dataset in dict(train=args.dataset, test=args.dataset, other=other).items():
        if args.fake_data:  # a smooth random pattern for each class, and noise
            generator = torch.Generator().manual_seed(CLASSES[dataset])
            patterns = torch.randn(CLASSES[dataset], 3, 6, 6, generator=generator)
            y = torch.randint(len(patterns), (3000,), generator=generator)
            x = F.interpolate(patterns, 32, mode="bicubic")[y].movedim(1, -1)
            x = x + 0.5 * torch.randn(x.shape, generator=generator)
            splits[name] = (x[500:], y[500:]) if name == "train" else (x[:500], y[:500])
            continue
        cifar = dict(cifar10=datasets.CIFAR10, cifar100=datasets.CIFAR100)[dataset]
        try:
            split = cifar(args.data, train=name == "train", download=True)
        except Exception as error:
            remedy = f"unpack {cifar.filename} in {args.data}, or try the code with --fake-data"
            sys.exit(f"no {dataset} and no download ({type(error).__name__}): {remedy}")
        splits[name] = torch.from_numpy(split.data).float(), torch.tensor(split.targets)
    x, y = splits["train"]
    n, mean, std = len(x) // 10, x.mean(dim=(0, 1, 2)), x.std(dim=(0, 1, 2))  # of each colour
    splits |= dict(train=(x[n:], y[n:]), val=(x[:n], y[:n]))
    for name, (x, y) in splits.items():
        most = 1000 if args.quick and name != "train" else None
        x = ((x[:most] - mean) / std).contiguous().permute(0, 3, 1, 2)
        splits[name] = x.to(args.device), y[:most].to(args.device)
    return splits


def draw(padded: Tensor, y: Tensor, shape: tuple, shared: int, generator) -> tuple[Tensor, Tensor]:
    """Random crops (N, B, 3, 32, 32) of padded images, and labels (N, B). The first `shared` are
    the same for all networks, to compare their answers; the rest differ, as in the paper."""
    crops = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # a view: all s * s crops of each image
    sizes = len(crops), *crops.shape[2:4]
    choices = [torch.randint(n, shape, device=y.device, generator=generator) for n in sizes]
    for choice in choices:
        choice[1:, :shared] = choice[0, :shared]
    return crops[choices[0], :, choices[1], choices[2]], y[choices[0]]


# ---- Target network ------------------------------------------------------------------------------
HIDDEN = [(6, 76), (16, 151), (120, 401), (84, 121)]  # (F, K + 1) of all layers but the last


def target_network(x: Tensor, theta: list[Tensor]) -> Tensor:
    """LeNet, (N, B, 3, 32, 32) -> logits (N, B, classes): 62,006 weights for 10 classes."""
    x = max_pool2d(conv2d(x, theta[0], 5), 2).relu()  # (N, B, 6, 14, 14)
    x = max_pool2d(conv2d(x, theta[1], 5), 2).relu()  # (N, B, 16, 5, 5)
    x = linear(x.flatten(2), theta[2]).relu()  # (N, B, 120)
    x = linear(x, theta[3]).relu()  # (N, B, 84)
    return linear(x, theta[4])


# ---- Hypernetwork --------------------------------------------------------------------------------
def mlp(*widths: int) -> nn.Sequential:
    """Linear layers without biases, leaky ReLU between them; output as large as the input."""
    layers = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:]):
        layers += [nn.LeakyReLU(0.05), nn.Linear(fan_in, fan_out, bias=False)]
        nn.init.normal_(layers[-1].weight, std=(2 / fan_in) ** 0.5)
    layers[-1].weight.data *= 0.5**0.5
    return nn.Sequential(*layers[1:])


class Hypernetwork(nn.Module):
    """G: noise z (N, Z) -> weights of N target networks, a list of (N, F, K + 1).

        G(z) = W(E(z) + bias)                                             the paper's
        G(z) = mean_m + scale * (W(E(z) + bias_m) - W(bias_m))            around M learned means

    `shapes` are the (F, K + 1) of the target network's layers, `codes` their codes: F, one for each
    filter, or 1. Without codes G is M ordinary networks, for SGD. The first number of z chooses the
    mean. With `copies` networks begin as near-copies of one, without it far apart.
    """

    noise_size, code_size = 100, 8

    def __init__(self, shapes, codes, means: int = 0, scale: float = 0.1, copies: bool = True):
        super().__init__()
        self.shapes, self.codes, self.scale, width = shapes, codes, scale, self.code_size
        start = (torch.randn(means, f, k) * (2 / (k - 1)) ** 0.5 for f, k in shapes if means)
        self.means = nn.ParameterList(start)
        if codes:
            outputs = [f * k // n for (f, k), n in zip(shapes, codes)]
            self.generators = nn.ModuleList(mlp(width, 400, 400, n) for n in outputs)
            self.extractor = mlp(self.noise_size, 200, 200, width * sum(codes))
            self.extractor[-1].weight.data *= 0.2 if copies else 1.0
            self.bias = nn.Parameter(copies * torch.randn(max(1, means), width * sum(codes)))

    def noise(self, n: int, generator=None, stratified: bool = False) -> Tensor:
        """(N, Z); `stratified`: each of M means is chosen equally often. Without codes N is M."""
        m, device = len(self.means[0]) if self.means else 1, next(self.parameters()).device
        n = n if self.codes else m
        z = torch.randn(n, self.noise_size, device=device, generator=generator)
        if stratified or not self.codes:
            u = torch.rand(n, device=device, generator=generator).clamp(1e-5, 1 - 1e-5)
            z[:, 0] = torch.special.ndtri((torch.arange(n, device=device) % m + u) / m)
        return z

    def generate(self, codes: Tensor) -> list[Tensor]:
        """W: codes (N, C) -> weights of N networks."""
        codes = codes.unflatten(1, (-1, self.code_size)).split(self.codes, dim=1)
        # A step of Adam is small for W's outputs, of size 1, not for weights of sqrt(2 / fan-in).
        parts = zip(self.generators, codes, self.shapes)
        return [w(c).view(len(c), f, k) * (2 / (k - 1)) ** 0.5 for w, c, (f, k) in parts]

    def forward(self, z: Tensor, deviate: bool = True) -> list[Tensor]:
        number = len(self.means[0]) if self.means else 1
        m = (number * torch.special.ndtr(z[:, 0])).long().clamp(max=number - 1)  # (N,)
        means = [mean.index_select(0, m) for mean in self.means]
        if not (self.codes and deviate):
            return means
        codes = self.extractor(z) + self.bias.index_select(0, m)
        if not means:
            return self.generate(codes)
        made = [w.split([len(z), number]) for w in self.generate(torch.cat([codes, self.bias]))]
        return [a + self.scale * (b - c.index_select(0, m)) for a, (b, c) in zip(means, made)]


def make_model(c: argparse.Namespace, device) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The model and its optimizers: means learn by SGD, as any network does, the rest by Adam."""
    shapes = [*HIDDEN, (CLASSES[c.dataset], 85)]
    model = Hypernetwork(shapes, c.codes, c.means, c.scale, c.copies).to(device)
    rest = [p for name, p in model.named_parameters() if not name.startswith("means")]
    sgd = dict(momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    optimizers = [torch.optim.SGD(model.means, c.lr, **sgd)] if c.means else []
    optimizers += [torch.optim.Adam(rest, c.adam or c.lr, fused=True)] if c.codes else []
    return model, optimizers


# ---- Training ------------------------------------------------------------------------------------
def measure_diversity(kind: str, theta: list[Tensor], logits: Tensor, y: Tensor) -> Tensor:
    """How different are N networks, by their weights or their logits (N, B, classes) on the same
    images with labels y (B,)? The factor dim z is the entropy's; for answers a part of lam."""
    dim = Hypernetwork.noise_size
    if kind == "none":
        return logits.new_zeros(())
    if kind == "outputs":
        return knn_entropy(logits.softmax(dim=-1).flatten(1), dim)
    if kind == "ensemble":  # by how much is the loss of the averaged prediction smaller?
        log_p = -F.cross_entropy(logits.mT, y.expand(len(logits), -1), reduction="none")  # (N, B)
        return dim * (log_p.logsumexp(dim=0) - math.log(len(log_p)) - log_p.mean(dim=0)).mean()
    weights = torch.cat([filters.flatten(1) for filters in fix_gauge(theta)], dim=1)  # (N, D)
    return knn_entropy(weights, dim) if kind == "weights" else dim * weights.var(dim=0).mean()


def training_step(model, z: Tensor, x: Tensor, y: Tensor, c, ramp: float = 1.0) -> tuple:
    """Images (N, B, 3, 32, 32), labels (N, B): network n sees batch n."""
    theta = model(z)
    logits = each_network(target_network, x, theta)  # (N, B, classes)
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    diversity = measure_diversity(c.diversity, theta, logits[:, : c.shared], y[0, : c.shared])
    loss = c.lam * loss_acc - ramp * diversity
    if c.decay:  # else nothing keeps generated weights small
        loss = loss + c.lam * c.decay * sum(t.square().sum() for t in theta) / len(z)
    acc = (logits.argmax(dim=-1) == y).float().mean()
    return loss, loss_acc, diversity, acc


def train(c: argparse.Namespace, data: dict, file: Path) -> None:
    """Train one column, or go on where a stopped run stood. What it leaves behind is the file."""
    x, y = data["train"]
    stream = (1 + c.seed % 4000) * 10**6  # torch's generator has 2**32 seeds
    torch.manual_seed(stream)
    model, optimizers = make_model(c, y.device)
    git = subprocess.getoutput(f'git -C "{Path(__file__).parent}" describe --always --dirty')
    record = dict(settings=vars(c), commit=git, step=0, seconds=0.0, log=[], chain=[])
    if file.exists():
        record = read(file, c)
        model.load_state_dict(record["model"])
        for optimizer, state in zip(optimizers, record["optimizers"]):
            optimizer.load_state_dict(state)
    padded, y = F.pad(torch.cat([x, x.flip(-1)]), [c.crop] * 4), y.repeat(2)  # mirrored too
    # (b) takes ten networks, or nearly, from the second half of its chains, the last ones too.
    taken = range(c.steps, c.steps // 2, -math.ceil(c.steps / 2 / max(1, 10 // c.networks)))
    steps, every = range(record["step"], c.steps), math.ceil(c.steps / c.rows)
    begun, saved = time.perf_counter() - record["seconds"], time.perf_counter()
    bar = tqdm(steps, c.name, c.steps, initial=steps.start, mininterval=1)
    for step in bar:
        # A step's random numbers depend on seed and step alone: a run goes on as if never stopped.
        generator = torch.Generator(y.device).manual_seed(stream + 1 + step)
        z = model.noise(c.networks, generator, stratified=True)
        images, labels = draw(padded, y, (c.networks, c.images), c.shared, generator)
        ramp = min(1.0, step / max(1, c.ramp * c.steps))  # learn first, spread later
        loss, loss_acc, diversity, acc = training_step(model, z, images, labels, c, ramp)
        model.zero_grad()
        # So each mean has the gradient of its own networks' mean loss; Adam minds no factor.
        (loss / c.lam * max(1, c.means)).backward()
        spread = optimizers[-1].param_groups[0]["params"] if c.codes else []
        norm = nn.utils.clip_grad_norm_(spread, 5.0 * max(1, c.means))  # against rare spikes
        # Rates rise, then fall to 0. Paper: (b)'s is constant. Here: in the second half, where its
        # networks are taken; before, it falls from 10 to 1 lr, or they would be far from converged.
        rise, left = (step + 1) / min(200, c.steps // 5 + 1), 1 - step / c.steps
        rate = min(10 * rise, max(1, 18 * left - 8)) if c.column == "b" else min(rise, left)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate * optimizer.defaults["lr"]
            optimizer.step()
        done = step + 1
        if c.column == "b" and done in taken:
            record["chain"].append([mean.detach().cpu().clone() for mean in model.means])
        logging = done % every == 0 or done == c.steps
        if logging or time.perf_counter() - saved > SAVE_SECONDS:
            row = dict(loss_acc=loss_acc, diversity=diversity, acc=acc, norm=norm)
            row = dict(step=done) | {name: value.item() for name, value in row.items()}
            if not all(map(math.isfinite, row.values())):
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr")
            if logging:  # ten networks, from the same z every time, or those of SGD
                z = model.noise(10, torch.Generator(y.device).manual_seed(VALIDATION))
                with torch.no_grad():
                    theta, middle = model(z), model(z, deviate=False)
                row |= evaluate(predict(theta, data["val"][0]), data["val"][1])
                if c.codes and middle:
                    theta, middle = map(nn.utils.parameters_to_vector, (theta, middle))
                    row["deviation"] = ((theta - middle).norm() / middle.norm()).item()
                record["log"].append(row)
                bar.set_postfix({"vote 1": row["vote 1"]}, refresh=False)
            saved = time.perf_counter()
            record |= dict(step=done, seconds=saved - begun, model=model.state_dict())
            record["optimizers"] = [o.state_dict() for o in optimizers if done < c.steps]
            torch.save(record, file.with_suffix(".new"))  # a killed run never leaves half a file
            file.with_suffix(".new").replace(file)


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
    """Probabilities (N, B, classes) of N networks on the same images (B, 3, 32, 32)."""
    n = len(theta[0])  # on the CPU a network runs alone, elsewhere all together: images in memory
    portions = x.split(250 if x.device.type == "cpu" else max(1, 50_000 // n))
    logits = [each_network(target_network, x.expand(n, *x.shape), theta) for x in portions]
    return torch.cat(logits, dim=1).softmax(dim=-1)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    return (sum((votes != v).float().mean() for v in votes) / max(1, len(votes) - 1)).item()


def evaluate(probabilities: Tensor, y: Tensor, unknown: Tensor | None = None) -> dict:
    """How often N networks (N, B, classes) disagree. Of ensembles of 1, 2, 5, ...: majority vote;
    of their mean probability: NLL, calibration error, how its entropy tells `unknown` classes."""
    n = len(probabilities)
    result = dict(networks=n, disagreement=disagreement(probabilities.argmax(dim=-1)))
    for size in (size for size in SIZES if size <= n):
        groups = probabilities[: n - n % size].unflatten(0, (-1, size))  # no network in two
        hits = torch.stack([majority(group.argmax(dim=-1)) == y for group in groups])
        result[f"vote {size}"] = hits.float().mean().item()
        mean = groups.mean(dim=1)  # (groups, B, classes)
        logs = mean.clamp_min(1e-12).log().flatten(0, 1)
        result[f"nll {size}"] = F.nll_loss(logs, y.repeat(len(mean))).item()
        confidence, predicted = mean.max(dim=-1)
        bins = F.one_hot((15 * confidence).long().clamp(max=14), 15)  # (groups, B, 15)
        gaps = (bins * (confidence - (predicted == y).float())[..., None]).mean(dim=1)
        result[f"calibration {size}"] = gaps.abs().sum(dim=1).mean().item()
        if unknown is not None:  # how often has one of them more entropy than a known one? (AUROC)
            other = unknown[: n - n % size].unflatten(0, (-1, size)).mean(dim=1)
            known, other = (torch.special.entr(p).sum(-1).sort().values for p in (mean, other))
            ranks = [torch.searchsorted(known, other, right=r).double() for r in (False, True)]
            result[f"auroc {size}"] = sum(ranks).mean().item() / 2 / len(y)
    return result


@torch.no_grad()
def analyse(model: nn.Module, c: argparse.Namespace, data: dict) -> dict:
    """Networks of z, and the average of their weights, for each mean (distillation). Around means
    also what G must beat: the means alone, and noise around the averages, of deviation sigma * root
    mean square of a layer, of 25 sigma the one at which a network is about as good as one of G."""
    (x, y), (_, y_test), null, results = data["val"], data["test"], [], {}
    generator, m = torch.Generator(y.device).manual_seed(TEST), max(1, c.means)
    networks = dict(sampled=model(model.noise(c.tested, generator)[: c.tested]))
    if c.averaged:
        z = model.noise(c.averaged // m * m, generator, stratified=True).split(100 // m * m)
        parts = [[t.unflatten(0, (-1, m)).mean(dim=0) for t in model(part)] for part in z]
        networks["averaged"] = [torch.stack(t).mean(dim=0) for t in zip(*parts)]
    if c.codes and c.means:
        z = model.noise(m * math.ceil(10 / m), generator, stratified=True)
        networks["of each mean"], networks["means alone"] = model(z), model(z[:m], deviate=False)
        centre = [t.repeat(len(z) // m, 1, 1) for t in networks["averaged"]]
        noise = [torch.randn(t.shape, device=y.device, generator=generator) for t in centre]
        noise = [t.square().mean().sqrt() * n for t, n in zip(centre, noise)]
        goal = evaluate(predict(networks["of each mean"], x), y)["vote 1"]
        for sigma in torch.logspace(-2, -0.5, 25).tolist():  # 0.01 to 0.3
            val = evaluate(predict([t + sigma * n for t, n in zip(centre, noise)], x), y)
            null.append([val["vote 1"], val["vote 10"], sigma])
        sigma = min(null, key=lambda row: abs(row[0] - goal))[2]
        networks["averages and noise"] = [t + sigma * n for t, n in zip(centre, noise)]
    for name, theta in networks.items():
        val, test, other = (predict(theta, data[k][0]) for k in ("val", "test", "other"))
        results[name] = dict(val=evaluate(val, y), test=evaluate(test, y_test, other))
    return dict(networks=results, null=null)


def plot_fronts(runs: list[dict]) -> Figure:
    """Is diversity worth its price? Validation images of CIFAR-10; right: around one mean."""
    figure, fronts = Figure(figsize=(9, 4.8), layout="constrained"), {}
    axes = figure.subplots(1, 2, subplot_kw=dict(xlabel="one network (%)", xmargin=0.2))
    axes[0].set(title="all, on validation images", ylabel="vote of ten (%)")
    axes[1].set_title("around one learned mean; numbers: lam")
    runs = [run for run in runs if run["settings"]["dataset"] == "cifar10"]
    for run in sorted(runs, key=lambda run: run["settings"]["lam"]):
        c, val = run["settings"], run["networks"]["sampled"]["val"]
        same = str([v for key, v in c.items() if key not in ("lam", "name")])  # joined by a line
        votes = [100 * val[n] for n in ("vote 1", "vote 5", "vote 10") if n in val]  # (a) has one
        fronts.setdefault(same, []).append((votes[0], votes[-1], c))
    for front in fronts.values():
        one, ten, (*_, c) = zip(*front)
        around, kind = int("+" in c["column"]), "chance" if c["column"] in "ab" else c["diversity"]
        for ax in axes[: 1 + around]:
            ax.plot(one, ten, "o-", color=COLOURS[kind], label=f"diversity: {kind}")
        for x, y, c in front:
            text = f"{c['lam']:.3g}".replace("e+0", "e") if len(front) > 1 else c["column"]
            at = dict(outputs=(-26, -10), weights=(-26, 4)).get(kind if around else "", (7, -4))
            axes[around].annotate(text, (x, y), at, color=COLOURS[kind], textcoords="offset points")
    for column, (one, ten) in PAPER.items():
        axes[0].plot(100 * one, 100 * ten, marker=f"${column}$", ls="", c="grey", label="paper")
    for ax in axes:
        ax.axis(ax.axis())  # these limits stay
        for run in (run for run in runs if run["settings"]["column"] == "c+"):
            one, ten, _ = (100 * torch.tensor(sorted(run["null"]))).T
            ax.plot(one, ten, ":", color="black", label="noise around (c+), averaged")
        ax.axline((75, 75), slope=1, color="lightgrey", zorder=0, label="a vote is as good as one")
    labels = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels())))  # each once
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def table(runs: list[dict]) -> str:
    """Markdown; votes in percent. Seeds of a run share a row: mean ± standard deviation."""
    groups, tables = {}, []
    for run in runs:
        name = "_".join(w for w in run["settings"]["name"].split("_") if w[:4] != "seed")
        for kind, result in run["networks"].items():
            groups.setdefault(f"{name}: {kind}", []).append(result["test"])
    votes = ["vote 1", "vote 5", "vote 10", "vote 100", "disagreement"]
    others = [f"{name} {n}" for name in ("nll", "calibration", "auroc") for n in (1, 10)]
    for unit, keys in (100, votes), (1, others):
        lines = [["", *keys], ["---"] * (1 + len(keys))]
        for name, tests in groups.items():
            lines.append([name])
            for key in keys:
                values = unit * torch.tensor([test[key] for test in tests if key in test])
                spread = f" ± {values.std():.2g}" if len(values) > 1 else ""
                lines[-1].append(f"{values.mean():.4g}{spread}" if len(values) else "")
        tables.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(tables)


# ---- Main ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> list[dict]:
    argv = sys.argv[1:] if argv is None else argv
    args, data = parse_args(argv), None
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
        run |= dict(hardware=args.device, threads=torch.get_num_threads(), torch=torch.__version__)
        run |= dict(commit=record["commit"], training_seconds=round(record["seconds"]))
        run |= dict(log=record["log"]) | analyse(load(checkpoint, args.device), c, data)
        run["analysis_seconds"] = round(time.perf_counter() - begun)
        file.with_suffix(".new").write_text(json.dumps(run, indent=1))
        file.with_suffix(".new").replace(file)
    runs = [read(file) for file in sorted(args.out.glob("*/metrics.json"))]
    if not runs:
        sys.exit(f"no finished run in {args.out}")
    plot_fronts(runs).savefig(args.out / "fronts.png", dpi=150)
    print(table(runs), f"\nfigure: {args.out / 'fronts.png'}", sep="\n")
    return runs


if __name__ == "__main__":
    main()
