"""One hypernetwork that generates all 20,018 weights of an MNIST classifier, accurate and diverse.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[gauge(G(z))]

Section "MNIST" of the paper. New against the toy: the samples are networks, so the trivial
symmetries of their weights are removed (gauge fixing) before diversity is measured, and G shares
parameters: an extractor E turns z into one code per filter, one weight generator per layer turns
codes into filters. Then the generated networks are taken apart: accuracies, filters, PCA, paths,
ensembles, adversarial examples, calibration.

    python 02_mnist_hypernet.py                      # documented run: about 35 minutes on two cores
    python 02_mnist_hypernet.py --quick              # three minutes
    python 02_mnist_hypernet.py --checkpoint results/02_mnist_hypernet/hypernet.pt
"""

import argparse
import csv
import json
import math
import os
import platform
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

from common import conv2d, each_network, fix_gauge, knn_entropy, linear, max_pool2d

NAME = "02_mnist_hypernet"
LOG_EVERY = 10
CHECKPOINT_EVERY = 100
SIZES = [1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200]  # of ensembles, in the size figure
EPSILONS = [i / 100 for i in range(25)]  # of adversarial examples: 0 to 0.24
QUICK = dict(steps=300, networks=40, ensemble_size=20, pca_samples=300, path_pairs=3)
QUICK |= dict(path_images=300, attacked_images=40, attacked_ensemble=20)


# ---- Arguments -----------------------------------------------------------------------------------


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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--recipe", choices=["ours", "paper"], default="ours", help="start and learning rates")
    add("--steps", type=count, help="training steps; ours 3500, paper 13000")
    add("--lr", type=positive, help="learning rate of Adam; ours 2e-3 at its highest, paper 3e-4")
    add("--lam", type=positive, default=1e3, help="weight of accuracy against entropy")
    add("--batch", type=count, default=32, help="samples of z, that is networks, in a step")
    add("--images", type=count, default=32, help="images per network in a step")
    add("--seed", type=int, default=0, help="random seed")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--data", type=Path, default=Path("data"), help="folder of MNIST; filled if it is empty")
    add("--fake-data", action="store_true", help="made-up images, to try the code without MNIST")
    add("--out", type=Path, default=Path("runs") / NAME, help="folder for all results")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--checkpoint", type=Path, help="analyse this trained hypernetwork, without training")
    add("--validate-every", type=count, default=250, help="steps between two validations")
    add("--networks", type=count, help="networks to test; 4000 on CUDA, 600 on the CPU")
    add("--ensembles", type=count, default=20, help="ensembles, drawn from these networks")
    add("--ensemble-size", type=count, default=200, help="networks in an ensemble")
    add("--pca-samples", type=count, default=3000, help="networks in the PCA figures")
    add("--path-pairs", type=count, default=10, help="pairs of networks joined by paths")
    add("--path-images", type=count, help="test images along paths; all on CUDA, 2000 on the CPU")
    add("--attacked-images", type=count, help="images to attack; all on CUDA, 1000 on the CPU")
    add("--attacked-ensemble", type=count, default=100, help="networks in the attacked ensemble")
    add("--quick", action="store_true", help="a preset of small costs: " + str(QUICK))
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu, or install CUDA")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"device: {args.device}")
    cuda, ours = args.device == "cuda", args.recipe == "ours"
    defaults = dict(
        steps=3500 if ours else 13000,
        lr=2e-3 if ours else 3e-4,
        networks=4000 if cuda else 600,
        path_images=10000 if cuda else 2000,
        attacked_images=10000 if cuda else 1000,
    )
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.batch < 2:
        parser.error("--batch must be at least 2: entropy needs a nearest other sample")
    if args.ensemble_size > args.networks:
        parser.error("--ensemble-size cannot exceed --networks, from which ensembles are drawn")
    if args.pca_samples < 6:
        parser.error("--pca-samples must be at least 6, the number of components shown")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "config.json").touch()
    except OSError as error:
        parser.error(f"--out {args.out}: cannot write there ({error.strerror})")
    return args


# ---- Data ----------------------------------------------------------------------------------------


def load_data(args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Images (B, 1, 28, 28) in [0, 1] and labels (B,) of the splits train, val and test, all on the
    training device: 55,000, 5,000 and 10,000 of MNIST."""
    if args.fake_data:
        x, y = fake_data(7000)
        splits = dict(train=(x[:5000], y[:5000]), val=(x[5000:6000], y[5000:6000]))
        splits["test"] = (x[6000:], y[6000:])
    else:
        try:
            train, test = (datasets.MNIST(args.data, train=t, download=True) for t in (True, False))
        except Exception as error:
            sys.exit(
                f"no MNIST in {args.data} and no download ({type(error).__name__}): put its four "
                f"*-ubyte files into {args.data}/MNIST/raw, or try the code with --fake-data"
            )
        (x, y), (x_test, y_test) = (
            (split.data[:, None].float() / 255, split.targets) for split in (train, test)
        )
        splits = dict(train=(x[5000:], y[5000:]), val=(x[:5000], y[:5000]), test=(x_test, y_test))
    return {k: (x.to(args.device), y.to(args.device)) for k, (x, y) in splits.items()}


def fake_data(number: int) -> tuple[Tensor, Tensor]:
    """Ten smooth random patterns, shifted by up to two pixels, plus noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 7, 7, generator=generator)
    patterns = F.interpolate(patterns, 32, mode="bicubic", align_corners=False)
    windows = patterns.unfold(2, 28, 1).unfold(3, 28, 1)  # (10, 1, 5, 5, 28, 28): all shifts
    y, row, column = (torch.randint(k, (number,), generator=generator) for k in (10, 5, 5))
    noise = torch.randn(number, 1, 28, 28, generator=generator)
    return (0.5 + 0.15 * windows[y, :, row, column] + 0.15 * noise).clamp(0, 1), y


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


def unflat(vectors: Tensor) -> list[Tensor]:
    parts = vectors.split([f * k for f, k in SHAPES], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, SHAPES)]


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
    """G: noise z (N, 300) -> weights of N target networks, a list of (N, F, K + 1), gauge fixed.

    recipe "paper": 633,640 parameters, as printed. Any two z then start as unrelated networks.
    recipe "ours": 855 more. The codes of E get a random bias and depend on z only weakly at first,
    so that all networks begin as near-copies of one network, which is learned fast, and then spread.
    """

    noise_size = 300
    codes = [32, 16, 8, 1]  # per layer: a code for each filter, but one for the whole last layer
    code_size = 15

    def __init__(self, recipe: str = "ours"):
        super().__init__()
        self.extractor = mlp(self.noise_size, 300, 300, self.code_size * sum(self.codes))
        self.generators = nn.ModuleList(
            [
                mlp(15, 40, 40, 26),
                mlp(15, 100, 100, 801),
                mlp(15, 100, 100, 785),
                mlp(15, 60, 60, 90),
            ]
        )
        if recipe == "ours":
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
            for generator, code, shape in zip(self.generators, codes, SHAPES)
        ]
        return fix_gauge(theta)

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """The weights of n networks. In inference mode a network depends on its own z alone."""
        return self.eval()(self.noise(n, generator))


# ---- Training ------------------------------------------------------------------------------------


def training_step(model: nn.Module, x: Tensor, y: Tensor, lam: float) -> tuple[Tensor, ...]:
    """Images (N, B, 1, 28, 28), labels (N, B): network n sees batch n."""
    theta = model(model.noise(len(x)))
    logits = each_network(target_network, x, theta)  # (N, B, 10)
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    entropy = knn_entropy(flat(theta), dim=model.noise_size)
    loss = lam * loss_acc - entropy
    acc = (logits.argmax(dim=-1) == y).float().mean()
    return loss, loss_acc, entropy, acc


def learning_rate(args: argparse.Namespace, step: int) -> float:
    if args.recipe == "paper":
        return args.lr * 0.99998**step
    warm_up = min(200, args.steps // 5 + 1)
    return args.lr * min((step + 1) / warm_up, (args.steps - step) / (args.steps - warm_up))


SETTINGS = ["recipe", "steps", "lr", "lam", "batch", "images", "seed", "fake_data"]


def train(args: argparse.Namespace, data: dict) -> tuple[nn.Module, list[dict], float]:
    """Returns the trained model, its log and the seconds it took."""
    torch.manual_seed(args.seed)
    model = Hypernetwork(args.recipe).to(args.device)
    optimizer = torch.optim.Adam(model.parameters())
    file, first, log, seconds = args.out / "checkpoint.pt", 0, [], 0.0
    if args.resume and file.exists():
        state = load_checkpoint(file, args)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, log, seconds = state["step"], state["log"], state["seconds"]
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])
        print(f"resuming at step {first} of {args.steps}")

    x, y = data["train"]
    start = time.perf_counter() - seconds
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, mininterval=2)
    for step in bar:
        model.train()
        optimizer.param_groups[0]["lr"] = learning_rate(args, step)
        index = torch.randint(len(x), (args.batch, args.images), device=x.device)
        loss, loss_acc, entropy, acc = training_step(model, x[index], y[index], args.lam)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        done, last = step + 1, step + 1 == args.steps
        if done % LOG_EVERY == 0 or last:
            row = dict(step=done, loss=loss, loss_acc=loss_acc, entropy=entropy, acc=acc)
            row = {name: float(value) for name, value in row.items()}
            if not math.isfinite(row["loss"]):
                good = f"; {file} is the last good checkpoint" if file.exists() else ""
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr{good}")
            log.append(row)
            bar.set_postfix({name: f"{row[name]:.4g}" for name in ("loss", "acc", "entropy")})
        if done % args.validate_every == 0 or last:
            row = dict(step=done) | validate(model, *data["val"])
            log.append(row)
            bar.write(" ".join(f"{name} {value:.4f}" for name, value in row.items()))
        if done % CHECKPOINT_EVERY == 0 or last:
            seconds = time.perf_counter() - start
            content = dict(settings=settings(args), step=done, log=log, seconds=seconds)
            content |= dict(model=model.state_dict(), optimizer=optimizer.state_dict())
            content |= dict(rng=torch.get_rng_state(), cuda_rng=None)
            if args.device == "cuda":
                content["cuda_rng"] = torch.cuda.get_rng_state()
            save(content, file)
            write_log(log, args.out / "log.csv")
    save(dict(settings=settings(args), model=model.state_dict()), args.out / "hypernet.pt")
    return model, log, seconds


def settings(args: argparse.Namespace) -> dict:
    return {name: getattr(args, name) for name in SETTINGS}


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
        state["model"]["extractor.0.weight"]
    except Exception as error:
        sys.exit(f"{file} is missing, damaged or not from this script ({type(error).__name__})")
    for name, value in settings(args).items() if args else ():
        if theirs.get(name) != value:
            flag = name.replace("_", "-")
            sys.exit(
                f"{file} has --{flag} {theirs.get(name)}, not {value}: use that or another --out"
            )
    return state


def load(file: str | Path, device: str = "cpu") -> nn.Module:
    """A trained hypernetwork, ready to `sample`."""
    state = load_checkpoint(Path(file))
    model = Hypernetwork(state["settings"]["recipe"])
    model.load_state_dict(state["model"])
    return model.to(device).eval()


def write_log(log: list[dict], file: Path) -> None:
    names = list(dict.fromkeys(name for row in log for name in row))
    with open(file, "w", newline="") as handle:
        writer = csv.DictWriter(handle, names)
        writer.writeheader()
        writer.writerows(log)


# ---- Evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def predict(theta: list[Tensor], x: Tensor, images: int = 500) -> Tensor:
    """Probabilities (N, B, 10) of N networks on the same images (B, 1, 28, 28), `images` at a time
    so that the activations stay small."""
    logits = [
        each_network(target_network, part.expand(len(theta[0]), *part.shape), theta)
        for part in x.split(images)
    ]
    return torch.cat(logits, dim=1).softmax(dim=-1)


def majority(votes: Tensor) -> Tensor:
    """Votes (N, B) -> the most frequent class of each image (B,); ties go to the smallest class."""
    return F.one_hot(votes.long(), 10).sum(dim=0).argmax(dim=-1)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    n = len(votes)
    shares = F.one_hot(votes.long(), 10).sum(dim=0) / n  # (B, 10)
    return ((1 - shares.square().sum(dim=1)).mean() * n / (n - 1)).item()


def accuracy(predicted: Tensor, y: Tensor) -> Tensor:
    return (predicted == y).float().mean(dim=-1)


@torch.no_grad()
def validate(model: nn.Module, x: Tensor, y: Tensor, networks: int = 10) -> dict:
    """The same z every time. Entropy is estimated from 200 networks, as the authors did."""
    generator = torch.Generator(x.device).manual_seed(1)
    theta = model.sample(200, generator)
    probabilities = predict([filters[:networks] for filters in theta], x)
    votes = probabilities.argmax(dim=-1)
    single = accuracy(votes, y)
    return dict(
        val_mean=single.mean().item(),
        val_min=single.min().item(),
        val_max=single.max().item(),
        val_majority=accuracy(majority(votes), y).item(),
        val_mean_probability=accuracy(probabilities.mean(dim=0).argmax(dim=-1), y).item(),
        val_entropy=knn_entropy(flat(theta), model.noise_size).item(),
        val_disagreement=disagreement(votes),
    )
