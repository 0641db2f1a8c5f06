"""A ResNet-32 with every weight from one vector: 466,906 weights, batch norm's gamma and beta too.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[answers of T(.; G(z)) to shared images]

Section "CIFAR-10" of the paper, ResNet-32, and distillation. New against LeNet: skips inside G, one
generator for all layers of a stage, and batch norm in the target network: moments of its batch in
training, then a pass over training images for its own. Several GPUs share the networks of a step.

    python 04_cifar_resnet32.py --quick        # all columns in minutes: does it run?
    python 04_cifar_resnet32.py --columns c+   # one column: 90 minutes on one CPU core
    torchrun --nproc_per_node=2 04_cifar_resnet32.py --columns c d --networks 10 --images 512
"""

import argparse
import json
import math
import os
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
from torchvision import datasets
from tqdm import tqdm

from common import batch_norm, conv2d, each_network, knn_entropy, linear, majority

NAME = "04_cifar_resnet32"
CLASSES = dict(cifar10=10, cifar100=100)
# The documented runs, by column. SGD trains `networks`, PAPERS the paper's G by Adam; AROUND learns
# `means` by SGD, at the rate `lr`, and deviations, times `scale`, by Adam, at the rate `adam`. Of
# the `images` of a step `shared` are the same for all networks; diversity has its full weight after
# the share `ramp` of the steps. `tested` networks are tested, the weights of `averaged` averaged.
SGD = dict(steps=23_400, lr=0.05, networks=1, images=64, shared=0, crop=4, lam=1.0, ramp=0.5)
SGD |= dict(codes=None, means=0, scale=0.0, adam=0.0, amp=False, diversity="none", seed=0)
SGD |= dict(copies=True, rows=15, tested=10, averaged=0, moments=5000)
PAPERS = SGD | dict(steps=3900, lr=1e-4, networks=4, shared=16, lam=5e3)
PAPERS |= dict(codes=[16, 16, 32, 64, 1], tested=20, averaged=10_000)
AROUND = PAPERS | dict(steps=11_700, lr=0.1, networks=2, shared=0, means=1, scale=0.1, adam=1e-4)
RECIPES = {
    "a": SGD,
    "b": SGD | dict(lr=0.005),  # one chain, ten networks
    "c": PAPERS,
    "d": PAPERS | dict(diversity="outputs"),
    "c+": AROUND,
    "d+": AROUND | dict(diversity="outputs", lam=1e4, shared=16),
}
QUICK = dict(steps=20, images=16, rows=2, tested=10, averaged=20, moments=200)  # at most
PAPER = dict(b=(0.9103, 0.9496), c=(0.8820, 0.8826), d=(0.8361, 0.9037))  # one network, ten
COLOURS = dict(chance="black", none="C0", outputs="C1")
SIZES = [1, 2, 5, 10, 20]  # of ensembles
VALIDATION, TEST = 1, 2  # seeds of evaluation; those of training begin at a million
SAVE_SECONDS = 120  # of training that a killed run loses at most
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of torchrun


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{NAME}.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--columns", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="all or some")
    add("--dataset", choices=list(CLASSES), default="cifar10", help="cifar10 unless given")
    add("--steps", type=int, help="of training; the recipe's unless given, as all that follow")
    add("--lr", type=float, help="rate of SGD, or of Adam in columns without SGD")
    add("--lam", type=float, help="weight of accuracy against diversity")
    add("--networks", type=int, help="in a step, on all GPUs together: samples of z, or chains")
    add("--means", type=int, choices=[0, 1], help="in columns c+, d+; 0: the paper's G instead")
    add("--images", type=int, help="in a step, for each network")
    add("--seed", type=int, help="of all random numbers of training")
    add("--amp", action="store_true", default=None, help="train in bfloat16; not for d, d+")
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
        if c.networks % RANKS or (c.diversity != "none" and c.networks < 2):
            parser.error(f"--networks: diversity needs 2, {RANKS} processes a multiple of {RANKS}")
        if args.means is not None and not c.adam:
            parser.error("--means: of columns c+, d+")
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
    """Normalised images (B, 3, 32, 32), channels last, and labels (B,), on the training device."""
    splits = {}
    if RANK > 0 and not args.fake_data:
        dist.barrier()  # until the first process has downloaded
    for name in ("train", "test"):
        if args.fake_data:  # a smooth random pattern for each class, and noise
            generator = torch.Generator().manual_seed(CLASSES[args.dataset])
            patterns = torch.randn(CLASSES[args.dataset], 3, 6, 6, generator=generator)
            y = torch.randint(len(patterns), (3000,), generator=generator)
            x = F.interpolate(patterns, 32, mode="bicubic")[y].movedim(1, -1)
            x = x + 0.5 * torch.randn(x.shape, generator=generator)
            splits[name] = (x[500:], y[500:]) if name == "train" else (x[:500], y[:500])
            continue
        cifar = dict(cifar10=datasets.CIFAR10, cifar100=datasets.CIFAR100)[args.dataset]
        try:
            split = cifar(args.data, train=name == "train", download=True)
        except Exception as error:
            remedy = f"unpack {cifar.filename} in {args.data}, or try the code with --fake-data"
            sys.exit(f"no {args.dataset} and no download ({type(error).__name__}): {remedy}")
        splits[name] = torch.from_numpy(split.data).float(), torch.tensor(split.targets)
    if RANK == 0 and RANKS > 1 and not args.fake_data:
        dist.barrier()
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
BLOCKS = 5  # in a stage, of two convolutions each: 1 + 3 * 5 * 2 + 1 = 32 layers, and 2 projections
STAGES = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]  # channels in, filters, stride of the first block


def target_shapes(classes: int) -> list[list[tuple[int, int]]]:
    """(F, K + 2), gamma and beta last, of the layers of the stem, of each stage; the last layer."""
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
    """As in 03, with the identity added around the square layer in the middle."""
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

    def __init__(self, shapes, codes, means: int = 0, scale: float = 0.1, copies: bool = True):
        super().__init__()
        self.shapes, self.codes, self.scale, width = shapes, codes, scale, self.code_size
        start = (torch.randn(means, f, k) * (2 / k) ** 0.5 for g in shapes for f, k in g if means)
        self.means = nn.ParameterList(start)
        for mean in self.means[:-1]:
            mean.data[..., -2:] = 0.0  # gamma is 1, beta 0
        if codes:
            outputs = [sum(f * k for f, k in group) // n for group, n in zip(shapes, codes)]
            self.generators = nn.ModuleList(mlp(width, 800, n) for n in outputs)
            self.extractor = mlp(self.noise_size, 1000, width * sum(codes))
            self.extractor[-1].weight.data *= 0.2 if copies else 1.0
            self.bias = nn.Parameter(copies * torch.randn(1, width * sum(codes)))

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        if not self.codes:  # the numbers of its networks
            return torch.arange(len(self.means[0]), device=self.means[0].device)
        return torch.randn(n, self.noise_size, device=self.bias.device, generator=generator)

    def generate(self, codes: Tensor) -> list[Tensor]:
        """W(codes), codes (N, C), or around a mean W(codes) - W(bias): weights of N networks."""
        codes = torch.cat([codes, self.bias]) if self.means else codes
        codes = codes.unflatten(1, (-1, self.code_size)).split(self.codes, dim=1)
        theta = []
        for generator, code, group in zip(self.generators, codes, self.shapes):
            hidden = generator[:-1](code)  # W is linear from here on: cheaper to subtract now
            hidden = hidden[:-1] - hidden[-1:] if self.means else hidden
            sizes = [f * k // code.shape[1] for f, k in group]
            parts = generator[-1](hidden).split(sizes, -1)  # (N, codes, weights); factor: see 03
            theta += [p.reshape(len(p), f, k) * (2 / k) ** 0.5 for p, (f, k) in zip(parts, group)]
        return theta

    def forward(self, z: Tensor) -> list[Tensor]:
        if not self.codes:
            return [mean.index_select(0, z) for mean in self.means]
        theta = self.generate(self.extractor(z) + self.bias)
        return [a + self.scale * b for a, b in zip(self.means, theta)] if self.means else theta


def make_model(c: argparse.Namespace, device) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The model and its optimizers: means learn by SGD, as any network does, the rest by Adam."""
    shapes = target_shapes(CLASSES[c.dataset])
    model = Hypernetwork(shapes, c.codes, c.means, c.scale, c.copies).to(device)
    rest = [p for name, p in model.named_parameters() if not name.startswith("means")]
    sgd = dict(momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    optimizers = [torch.optim.SGD(model.means, c.lr, **sgd)] if c.means else []
    optimizers += [torch.optim.Adam(rest, c.adam or c.lr, fused=True)] if c.codes else []
    return model, optimizers


# ---- Training ------------------------------------------------------------------------------------
def training_step(model, z: Tensor, x: Tensor, y: Tensor, c, ramp: float = 1.0) -> tuple:
    """Images (N, B, 3, 32, 32), labels (N, B): network n sees batch n."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=c.amp):
        theta = model(z)
        logits = each_network(target_network, x, theta)
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
    parallel = nn.parallel.DistributedDataParallel(model) if RANKS > 1 else model
    padded, y = F.pad(torch.cat([x, x.flip(-1)]), [c.crop] * 4), y.repeat(2)  # mirrored too
    # (b) takes ten networks, or nearly, from the second half of its chains, the last ones too.
    taken = range(c.steps, c.steps // 2, -math.ceil(c.steps / 2 / max(1, 10 // c.networks)))
    steps, every = range(record["step"], c.steps), math.ceil(c.steps / c.rows)
    begun, saved = time.perf_counter() - record["seconds"], time.perf_counter()
    bar = tqdm(steps, c.name, c.steps, initial=steps.start, mininterval=1, disable=RANK > 0)
    for step in bar:
        # A step's random numbers depend on seed and step alone: a run goes on as if never stopped.
        generator = torch.Generator(y.device).manual_seed(stream + 1 + step)
        z = model.noise(c.networks, generator)
        batch = z, *draw(padded, y, (c.networks, c.images), c.shared, generator)
        z, images, labels = (part.chunk(RANKS)[RANK] for part in batch)  # those of this process
        ramp = min(1.0, step / max(1, c.ramp * c.steps))  # learn first, spread later
        loss, loss_acc, diversity, acc = training_step(parallel, z, images, labels, c, ramp)
        model.zero_grad()
        # So each mean has the gradient of its own networks' mean loss; Adam minds no factor.
        (loss / c.lam * max(1, c.means)).backward()
        spread = optimizers[-1].param_groups[0]["params"] if c.codes else []
        norm = nn.utils.clip_grad_norm_(spread, 5.0)  # against rare spikes
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
        if RANK == 0 and (logging or time.perf_counter() - saved > SAVE_SECONDS):
            row = dict(loss_acc=loss_acc, diversity=diversity, acc=acc, norm=norm)
            row = dict(step=done) | {name: value.item() for name, value in row.items()}
            if not all(map(math.isfinite, row.values())):
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr")
            if logging:  # ten networks, from the same z every time, or those of SGD
                theta = sample(model, 10, torch.Generator(y.device).manual_seed(VALIDATION))
                x_val, y_val = (part[:1000] for part in data["val"])  # more would cost too much
                row |= evaluate(predict(recalibrate(theta, x[:500]), x_val), y_val)
                if c.codes and c.means:
                    offsets = [(a - b)[0] for a, b in zip(theta, model.means)]  # of the first
                    offset, middle = map(nn.utils.parameters_to_vector, (offsets, model.means))
                    row["deviation"] = (offset.norm() / middle.norm()).item()
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
    portions = x.split(250 if x.device.type == "cpu" else max(1, 10_000 // n))
    logits = [each_network(target_network, x.expand(n, *x.shape), theta) for x in portions]
    return torch.cat(logits, dim=1).softmax(dim=-1)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    return (sum((votes != v).float().mean() for v in votes) / max(1, len(votes) - 1)).item()


def evaluate(probabilities: Tensor, y: Tensor) -> dict:
    """How often N networks (N, B, classes) disagree. For 1, 2, 5, ...: vote, NLL, calibration."""
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
    return result


@torch.no_grad()
def analyse(model: nn.Module, c: argparse.Namespace, data: dict) -> dict:
    """Networks of z, the weights of n of them averaged (distillation), and a learned mean alone."""
    y, images = data["test"][1], data["train"][0][: c.moments]
    z = model.noise(max(c.tested, c.averaged), torch.Generator(y.device).manual_seed(TEST))
    networks, results, average, first = dict(sampled=model(z[: c.tested])), {}, None, 0
    for n in (n for n in (1, 10, 100, 10_000) if n <= c.averaged):
        for part in z[first:n].split(20):
            first += len(part)
            new = [filters.mean(dim=0, keepdim=True) for filters in model(part)]
            average = [a + (b - a) * len(part) / first for a, b in zip(average or new, new)]
        networks[f"average of {n}"] = average
    if c.codes and c.means:
        networks["mean alone"] = list(model.means)
    for name, theta in networks.items():
        theta = recalibrate(theta, images)
        parts = {k: (predict(theta, data[k][0]), data[k][1]) for k in ("val", "test")}
        results[name] = {k: evaluate(*part) for k, part in parts.items()}
    return dict(networks=results)


def plot_fronts(runs: list[dict]) -> Figure:
    """Is diversity worth its price? Validation images of CIFAR-10."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    ax = figure.subplots(subplot_kw=dict(xmargin=0.15))
    for run in (run for run in runs if run["settings"]["dataset"] == "cifar10"):
        c, val = run["settings"], run["networks"]["sampled"]["val"]
        one, ten = 100 * val["vote 1"], 100 * val.get("vote 10", val["vote 1"])  # (a) has one
        kind = "chance" if c["column"] in "ab" else c["diversity"]
        ax.plot(one, ten, "o-", color=COLOURS[kind], label=f"diversity: {kind}")
        ax.annotate(c["name"].partition("_")[2], (one, ten), (7, -4), textcoords="offset points")
    for column, (one, ten) in PAPER.items():
        ax.plot(100 * one, 100 * ten, marker=f"${column}$", ls="", c="grey", label="paper")
    ax.axline((90, 90), slope=1, color="lightgrey", zorder=0, label="a vote is as good as one")
    ax.set(xlabel="one network (%)", ylabel="vote of ten (%)", title="on validation images")
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
    votes = ["vote 1", "vote 10", "vote 20", "disagreement"]
    others = [f"{name} {n}" for name in ("nll", "calibration") for n in (1, 10)]
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
    args = parse_args(argv)
    if RANKS > 1:  # started by torchrun
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(timeout=timedelta(days=1))  # others wait for rank 0's analyses
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA
    start = "python" if RANKS == 1 else f"torchrun --nproc_per_node={RANKS}"
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
        if RANK > 0:
            continue
        record, begun = read(checkpoint), time.perf_counter()
        run = dict(settings=vars(c), command=" ".join([start, f"{NAME}.py", *argv]))
        run |= dict(hardware=args.device, threads=torch.get_num_threads(), torch=torch.__version__)
        run |= dict(commit=record["commit"], training_seconds=round(record["seconds"]))
        run |= dict(log=record["log"]) | analyse(load(checkpoint, args.device), c, data)
        run["analysis_seconds"] = round(time.perf_counter() - begun)
        file.with_suffix(".new").write_text(json.dumps(run, indent=1))
        file.with_suffix(".new").replace(file)
    if RANKS > 1:
        dist.destroy_process_group()
    if RANK > 0:
        return []
    runs = [read(file) for file in sorted(args.out.glob("*/metrics.json"))]
    if not runs:
        sys.exit(f"no finished run in {args.out}")
    plot_fronts(runs).savefig(args.out / "fronts.png", dpi=150)
    print(table(runs), f"\nfigure: {args.out / 'fronts.png'}", sep="\n")
    return runs


if __name__ == "__main__":
    main()
