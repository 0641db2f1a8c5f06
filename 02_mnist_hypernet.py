"""One hypernetwork that generates all 20,018 weights of an MNIST classifier, accurate and diverse.

    loss = lam * E_z[cross-entropy of T(x; G(z))] - H[gauge(G(z))]

Section "MNIST" of the paper. New against the toy: the samples are networks, so the trivial
symmetries of their weights are removed (gauge fixing) before diversity is measured, and G shares
parameters: an extractor E turns z into one code per filter, one weight generator per layer turns
codes into filters. Then the generated networks are taken apart: accuracies, filters, PCA, paths,
ensembles, adversarial examples, calibration. Expect 99.3 % from a majority of 200 networks.

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
QUICK = dict(steps=250, networks=30, ensemble_size=15, pca_samples=300, path_pairs=3)
QUICK |= dict(path_images=300, attacked_images=40, attacked_ensemble=20)


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
    add("--model", choices=["hypernet", "mnfg"], default="hypernet", help="method or baseline")
    add("--recipe", choices=["ours", "paper"], default="ours", help="start and learning rates")
    add("--steps", type=count, help="training steps; 3000, mnfg 55000, the paper's recipe 13000")
    add("--lr", type=positive, help="of Adam; 2e-3, for mnfg 1e-3, for the paper's recipe 3e-4")
    add("--lam", type=positive, help="weight of accuracy; 1e3, for mnfg the number of images")
    add("--batch", type=count, help="samples of z, that is networks, in a step; 32, for mnfg 4")
    add("--images", type=count, default=32, help="images per network in a step")
    add("--shift", type=int, help="pixels that training images move at most; 1, paper's recipe 0")
    add("--seed", type=int, default=0, help="random seed")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--data", type=Path, default=Path("data"), help="folder of MNIST; filled if it is empty")
    add("--fake-data", action="store_true", help="made-up images, to try the code without MNIST")
    add("--out", type=Path, help=f"folder for all results; runs/{NAME}[_mnfg, _analysis, _compare]")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--checkpoint", type=Path, help="analyse this trained hypernetwork, without training")
    add("--compare", type=Path, nargs="+", metavar="RUN", help="draw finished runs side by side")
    add("--validate-every", type=count, help="steps between two validations; 250, for mnfg 2500")
    add("--networks", type=count, help="networks to test; 4000 on CUDA, 400 on the CPU")
    add("--ensembles", type=count, default=20, help="ensembles, drawn from these networks")
    add("--ensemble-size", type=count, default=200, help="networks in an ensemble")
    add("--pca-samples", type=count, default=3000, help="networks in the PCA figures")
    add("--path-pairs", type=count, default=10, help="pairs of networks joined by paths")
    add("--path-images", type=count, help="test images along paths; all on CUDA, 1000 on the CPU")
    add("--attacked-images", type=count, help="images to attack; all on CUDA, 500 on the CPU")
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
    cuda, paper, mnfg = args.device == "cuda", args.recipe == "paper", args.model == "mnfg"
    suffix = "_analysis" if args.checkpoint else "_compare" if args.compare else "_mnfg" * mnfg
    defaults = dict(
        out=Path("runs") / (NAME + suffix),
        steps=55000 if mnfg else 13000 if paper else 3000,
        batch=4 if mnfg else 32,
        validate_every=2500 if mnfg else 250,
        lr=1e-3 if mnfg else 3e-4 if paper else 2e-3,
        shift=0 if paper else 1,
        lam=1e3 if not mnfg else 2000.0 if args.fake_data else 55000.0,
        networks=4000 if cuda else 400,
        path_images=10000 if cuda else 1000,
        attacked_images=10000 if cuda else 500,
    )
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.batch < 2:
        parser.error("--batch must be at least 2: entropy needs a nearest other sample")
    if args.shift < 0:
        parser.error("--shift cannot be negative")
    if args.networks < 2:
        parser.error("--networks must be at least 2, to see how far they disagree")
    if args.checkpoint and not args.checkpoint.is_file():
        parser.error(f"--checkpoint {args.checkpoint}: no such file")
    if args.ensemble_size > args.networks:
        parser.error("--ensemble-size cannot exceed --networks, from which ensembles are drawn")
    for folder in args.compare or ():
        if not (folder / "metrics.json").exists() or not (folder / "hypernet.pt").exists():
            parser.error(f"--compare {folder}: no metrics.json or no hypernet.pt there")
    if args.pca_samples < 25:
        parser.error("--pca-samples must be at least 25, the number of filters shown")
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
        x, y = (part.split([2000, 500, 500]) for part in fake_data(3000))
        splits = dict(zip(("train", "val", "test"), zip(x, y)))
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


def shifted_windows(x: Tensor, shift: int) -> Tensor:
    """(B, 1, 28, 28) -> (B, s, s, 1, 28, 28): every image in all s = 2 * shift + 1 positions per
    direction. A view of the padded images, so that it costs no more memory than they do."""
    windows = F.pad(x, [shift] * 4).unfold(2, 28, 1).unfold(3, 28, 1)  # (B, 1, s, s, 28, 28)
    return windows.permute(0, 2, 3, 1, 4, 5)


def fake_data(number: int) -> tuple[Tensor, Tensor]:
    """Ten smooth random patterns, shifted by up to two pixels, plus noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 7, 7, generator=generator)
    patterns = F.interpolate(patterns, 28, mode="bicubic", align_corners=False)
    windows = shifted_windows(patterns, 2)
    y, row, column = (torch.randint(k, (number,), generator=generator) for k in windows.shape[:3])
    noise = torch.randn(number, 1, 28, 28, generator=generator)
    return (0.6 * windows[y, row, column] + 0.1 * noise).clamp(0, 1), y


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
    so that all networks begin as near-copies of one, which is learned fast, and then spread.
    """

    noise_size = 300
    codes = [32, 16, 8, 1]  # per layer: a code for each filter, but one for the whole last layer
    code_size = 15

    def __init__(self, recipe: str = "ours"):
        super().__init__()
        self.extractor = mlp(self.noise_size, 300, 300, self.code_size * sum(self.codes))
        self.generators = nn.ModuleList(
            mlp(self.code_size, width, width, f * k // codes)
            for width, (f, k), codes in zip((40, 100, 100, 60), SHAPES, self.codes)
        )
        if recipe == "ours":
            last = self.extractor[-1]
            last.bias = nn.Parameter(torch.randn(last.out_features))
            nn.init.normal_(last.weight, std=0.2 / last.in_features**0.5)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.extractor[0].weight.device
        return torch.rand(n, self.noise_size, device=device, generator=generator) * 2 - 1

    def forward(self, z: Tensor) -> list[Tensor]:
        """Weights as trained and analysed: gauge fixed."""
        codes = self.extractor(z).unflatten(1, (-1, self.code_size)).split(self.codes, dim=1)
        theta = [
            generator(code.flatten(0, 1)).view(len(z), *shape)  # one row per code: a filter
            for generator, code, shape in zip(self.generators, codes, SHAPES)
        ]
        return fix_gauge(theta)

    def draw(self, n: int) -> tuple[list[Tensor], Tensor]:
        """n networks to train on, and how diverse they are."""
        theta = self(self.noise(n))
        return theta, knn_entropy(flat(theta), dim=self.noise_size)


@torch.no_grad()
def sample(model: nn.Module, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """The weights of n networks. In inference mode a network depends on its own noise alone."""
    return model.eval()(model.noise(n, generator))


# ---- Training ------------------------------------------------------------------------------------


def training_step(model: nn.Module, x: Tensor, y: Tensor, lam: float) -> tuple[Tensor, ...]:
    """Images (N, B, 1, 28, 28), labels (N, B): network n sees batch n."""
    theta, entropy = model.draw(len(x))
    logits = each_network(target_network, x, theta)  # (N, B, 10)
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss = lam * loss_acc - entropy
    acc = (logits.argmax(dim=-1) == y).float().mean()
    return loss, loss_acc, entropy, acc


def learning_rate(args: argparse.Namespace, step: int) -> float:
    if args.recipe == "paper":
        return args.lr * 0.99998**step
    warm_up = min(200, args.steps // 5 + 1)
    return args.lr * min((step + 1) / warm_up, (args.steps - step) / max(1, args.steps - warm_up))


SETTINGS = "model recipe steps lr lam batch images shift seed fake_data"


def train(args: argparse.Namespace, data: dict) -> tuple[nn.Module, list[dict], float]:
    """Returns the trained model, its log and the seconds it took."""
    torch.manual_seed(args.seed)
    model = make_model(settings(args)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    file, first, log, seconds = args.out / "checkpoint.pt", 0, [], 0.0
    state = load_checkpoint(file, args) if file.exists() else None  # refuses another run's file
    if state and not args.resume:
        sys.exit(f"{file} is at step {state['step']}: --resume goes on, without it remove the file")
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, log, seconds = state["step"], state["log"], state["seconds"]
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])
        print(f"resuming at step {first} of {args.steps}")

    (args.out / "config.json").write_text(json.dumps(vars(args), indent=1, default=str))

    windows, y = shifted_windows(data["train"][0], args.shift), data["train"][1]
    start = time.perf_counter() - seconds
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, mininterval=2)
    for step in bar:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        index, row, column = (
            torch.randint(k, (args.batch, args.images), device=y.device) for k in windows.shape[:3]
        )
        x = windows[index, row, column]  # (N, B, 1, 28, 28): different images for each network
        loss, loss_acc, entropy, acc = training_step(model, x, y[index], args.lam)
        optimizer.zero_grad()
        loss.backward()
        # Rare spikes of the gradient can kill every network for good; they are cut at 5 lam.
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5 * args.lam)
        optimizer.step()

        done, last = step + 1, step + 1 == args.steps
        if done % LOG_EVERY == 0 or last:
            row = dict(step=done, loss=loss, loss_acc=loss_acc, entropy=entropy, acc=acc)
            row = {name: value if name == "step" else value.item() for name, value in row.items()}
            if not math.isfinite(row["loss"] + norm.item()):
                good = f"; {file} is the last good checkpoint" if file.exists() else ""
                sys.exit(f"step {done}: the loss is not finite; try a smaller --lr{good}")
            log.append(row)
            bar.set_postfix({name: f"{row[name]:.4g}" for name in ("loss", "acc", "entropy")})
        if done % args.validate_every == 0 or last:
            row = validate(model, *data["val"])
            log.append(dict(step=done) | row)
            numbers = (f"{name[4:]} {value:.4f}" for name, value in row.items())
            bar.write(f"step {done}: " + ", ".join(numbers))
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


def make_model(settings: dict) -> nn.Module:
    return MNFG() if settings["model"] == "mnfg" else Hypernetwork(settings["recipe"])


def settings(args: argparse.Namespace) -> dict:
    return {name: getattr(args, name) for name in SETTINGS.split()}


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


def load(file: str | Path, device: str = "cpu") -> nn.Module:
    """A trained model, ready to `sample`."""
    state = load_checkpoint(Path(file))
    model = make_model(state["settings"])
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
def predict(theta: list[Tensor], x: Tensor, images: int | None = None) -> Tensor:
    """Probabilities (N, B, 10) of N networks on the same images (B, 1, 28, 28), `images` at a time
    so that the activations stay small: on the CPU a network runs alone, elsewhere all together."""
    images = images or (250 if x.device.type == "cpu" else max(1, 10000 // len(theta[0])))
    logits = [
        each_network(target_network, part.expand(len(theta[0]), *part.shape), theta)
        for part in x.split(images)
    ]
    return torch.cat(logits, dim=1).softmax(dim=-1)


def vote_counts(votes: Tensor) -> Tensor:
    """Votes (N, B) of N networks -> how many voted for each class (B, 10)."""
    return torch.stack([(votes == c).sum(dim=0) for c in range(10)], dim=-1)


def majority(votes: Tensor) -> Tensor:
    """(N, B) -> (B,); ties go to the smallest class."""
    return vote_counts(votes).argmax(dim=-1)


def disagreement(votes: Tensor) -> float:
    """How often two different networks of (N, B) votes give different answers, over all pairs."""
    n, counts = len(votes), vote_counts(votes)
    same_pairs = (counts * (counts - 1)).sum(dim=-1) / (n * (n - 1))
    return 1 - same_pairs.mean().item()


def accuracy(predicted: Tensor, y: Tensor) -> Tensor:
    return (predicted == y).float().mean(dim=-1)


@torch.no_grad()
def validate(model: nn.Module, x: Tensor, y: Tensor, networks: int = 10) -> dict:
    """The same z every time. Entropy is estimated from 200 networks, as the authors did."""
    generator = torch.Generator(x.device).manual_seed(1)
    theta = sample(model, 200, generator)
    probabilities = predict([filters[:networks] for filters in theta], x)
    votes = probabilities.argmax(dim=-1)
    single = accuracy(votes, y)
    return dict(
        val_mean=single.mean().item(),
        val_min=single.min().item(),
        val_max=single.max().item(),
        val_majority=accuracy(majority(votes), y).item(),
        val_mean_probability=accuracy(probabilities.mean(dim=0).argmax(dim=-1), y).item(),
        val_entropy=knn_entropy(flat(theta), Hypernetwork.noise_size).item(),  # for any model
        val_disagreement=disagreement(votes),
    )


def reliability(probabilities: Tensor, y: Tensor) -> Tensor:
    """(B, 10) -> (3, 15): images, their confidence and their hits, in 15 bins of confidence."""
    confidence, predicted = probabilities.max(dim=-1)
    bins = (confidence * 15).long().clamp(max=14)
    sums = (torch.ones_like(confidence), confidence, (predicted == y).float())
    return torch.stack([confidence.new_zeros(15).index_add(0, bins, s) for s in sums])


def calibration_error(bins: Tensor) -> Tensor:
    """Expected calibration error: mean distance of confidence and accuracy, weighted by images."""
    return (bins[1] - bins[2]).abs().sum() / bins[0].sum()


def nll(probabilities: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(probabilities.clamp_min(1e-12).log(), y)


def test_networks(model: nn.Module, x: Tensor, y: Tensor, args: argparse.Namespace) -> dict:
    """Draw many networks, ten at a time, and keep only their votes (one byte per image) and running
    sums of their probabilities. Every `ensemble_size` networks in a row are one ensemble of mean
    probabilities; the ensembles of the majority vote are drawn from all networks at random."""
    generator = torch.Generator(x.device).manual_seed(2)
    size, votes, singles, ensembles, curves = args.ensemble_size, [], [], [], []
    single_bins = ensemble_bins = 0
    for first in tqdm(range(0, args.networks, 10), desc="testing networks"):
        theta = sample(model, min(10, args.networks - first), generator)
        for member, probabilities in enumerate(predict(theta, x), start=first):
            votes.append(probabilities.argmax(dim=-1).byte())
            bins = reliability(probabilities, y)
            single_bins = single_bins + bins
            singles.append(torch.stack([nll(probabilities, y), calibration_error(bins)]))
            if member % size == 0:
                total, curve = 0, []
            total, members = total + probabilities, member % size + 1
            if members in SIZES:
                curve.append(accuracy(total.argmax(dim=-1), y))
            if members == size:
                bins = reliability(total / size, y)
                ensemble_bins = ensemble_bins + bins
                ensembles.append(torch.stack([nll(total / size, y), calibration_error(bins)]))
                curves.append(torch.stack(curve))
    votes = torch.stack(votes)  # (networks, B)

    torch.manual_seed(3)
    number = args.ensembles
    if args.networks >= number * size:  # no network in two ensembles
        groups = torch.randperm(args.networks)[: number * size].view(number, size)
    else:
        groups = torch.stack([torch.randperm(args.networks)[:size] for _ in range(number)])
    sizes = [k for k in SIZES if k <= size]
    by_size = torch.tensor(
        [[accuracy(majority(votes[g[:k]]), y) for k in sizes] for g in groups.to(x.device)]
    )
    by_majority = torch.stack([accuracy(majority(votes[g]), y) for g in groups.to(x.device)])
    single = accuracy(votes, y)
    single_nll, single_ece = torch.stack(singles).mean(dim=0).tolist()
    ensemble_nll, ensemble_ece = torch.stack(ensembles).mean(dim=0).tolist()
    return dict(
        networks=args.networks,
        single_mean=single.mean().item(),
        single_std=single.std(correction=0).item(),
        single_min=single.min().item(),
        single_max=single.max().item(),
        majority_mean=by_majority.mean().item(),
        majority_std=by_majority.std(correction=0).item(),
        ensembles_overlap=args.networks < number * size,
        ensembles=number,
        ensemble_size=size,
        disagreement=disagreement(votes),
        sizes=sizes,
        majority_by_size=by_size.mean(dim=0).tolist(),
        mean_probability_by_size=torch.stack(curves).mean(dim=0).tolist(),
        calibration=dict(
            single_nll=single_nll,
            single_error=single_ece,
            ensemble_nll=ensemble_nll,
            ensemble_error=ensemble_ece,
            single_bins=single_bins.tolist(),
            ensemble_bins=ensemble_bins.tolist(),
        ),
        accuracies=[round(a, 4) for a in single.tolist()],
    )


def paths(model: nn.Module, x: Tensor, y: Tensor, pairs: int, points: int = 40) -> dict:
    """Accuracy from network 2 to network 1: straight between their gauged weights, or through z."""
    generator = torch.Generator(x.device).manual_seed(4)
    t = torch.linspace(0, 1, points, device=x.device)[:, None]
    curves = dict(direct=[], interpolated=[])
    for _ in tqdm(range(pairs), desc="walking paths"):
        z1, z2 = model.noise(2, generator)
        with torch.no_grad():
            interpolated = model.eval()(z1 * t + z2 * (1 - t))
        ends = flat(interpolated)
        direct = unflat(ends[-1] * t + ends[0] * (1 - t))
        for name, theta in dict(direct=direct, interpolated=interpolated).items():
            curves[name].append(accuracy(predict(theta, x).argmax(dim=-1), y))
    result = dict(pairs=pairs, images=len(x))
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
    images to an ensemble. Paper: a new network and ensemble per image. Here: per 100 images."""
    generator = torch.Generator(x.device).manual_seed(5)
    hits = torch.zeros(4, len(EPSILONS), device=x.device)
    attacked = 0
    for part_x, part_y in zip(tqdm(x.split(100), desc="attacking"), y.split(100)):
        one, ensemble = sample(model, 1, generator), sample(model, members, generator)
        right = predict(one, part_x)[0].argmax(dim=-1) == part_y  # attack what it gets right
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
    return dict(images=attacked, ensemble_size=members, epsilons=EPSILONS, **rates)


def rotation(model: nn.Module, x: Tensor, members: int) -> dict:
    """Predictive entropy of the digit x (1, 28, 28), turned by 0 to 180 degrees."""
    angles = torch.arange(0, 181, 10, device=x.device)
    cos, sin = torch.deg2rad(angles).cos(), torch.deg2rad(angles).sin()
    zero = torch.zeros_like(cos)
    turns = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(turns, (len(angles), 1, 28, 28), align_corners=False)
    images = F.grid_sample(x.expand(len(angles), -1, -1, -1), grid, align_corners=False)
    generator = torch.Generator(x.device).manual_seed(6)
    probabilities = predict(sample(model, members, generator), images)  # (N, angles, 10)
    mean = probabilities.mean(dim=0)
    return dict(
        angles=angles.tolist(),
        members=members,
        single_entropy=torch.special.entr(probabilities).sum(dim=-1).mean(dim=0).tolist(),
        ensemble_entropy=torch.special.entr(mean).sum(dim=-1).tolist(),
        ensemble_answer=mean.argmax(dim=-1).tolist(),
        images=images[:, 0].tolist(),
    )


def pca(samples: Tensor, components: int = 6) -> tuple[Tensor, Tensor]:
    """(N, D) -> scores (N, components), and their shares of the variance. By the eigenvectors of
    the smaller of the two products X X^T and X^T X."""
    centred = samples - samples.mean(dim=0)
    if len(centred) < centred.shape[1]:
        values, vectors = torch.linalg.eigh(centred @ centred.T)
        scores = vectors * values.clamp_min(0).sqrt()
    else:
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        scores = centred @ vectors
    return scores.flip(1)[:, :components], (values.flip(0) / values.sum())[:components]


# ---- Figures -------------------------------------------------------------------------------------


def plot_training(log: list[dict]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [row for row in log if "val_mean" in row]
    steps = [row["step"] for row in rows]
    labels = dict(
        mean="mean of ten networks", majority="their majority vote", min="worst", max="best"
    )
    for name, label in labels.items():
        style = "o-" if name in ("mean", "majority") else ":"
        left.plot(steps, [100 * row[f"val_{name}"] for row in rows], style, label=label)
    bottom = min(97, 100 * rows[-1]["val_min"] - 2)
    left.set(xlabel="training step", ylabel="validation accuracy (%)", ylim=(bottom, 100))
    left.legend()
    right.plot(steps, [row["val_entropy"] for row in rows], "o-", color="C4")
    right.set(xlabel="training step", ylabel="entropy of the weights (nats)")
    return figure


def plot_histogram(runs: list[dict]) -> Figure:
    """Test accuracies of generated networks, one panel for each run."""
    figure = Figure(figsize=(5.2 * len(runs), 3.6), layout="constrained")
    for ax, run in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs):
        accs = [100 * a for a in run["tested"]["accuracies"]]
        low = min(97, math.floor(sorted(accs)[len(accs) // 100]))  # hides at most one in a hundred
        high = max(99.6, max(accs))
        ax.hist(accs, bins=[low + (high - low) * i / 52 for i in range(53)])
        vote = 100 * run["tested"]["majority_mean"]
        size = run["tested"]["ensemble_size"]
        ax.axvline(vote, color="C1", ls="--", label=f"majority of {size}: {vote:.2f} %")
        below = sum(a < low for a in accs)
        note = f"\n({below} below {low} % not shown)" if below else ""
        ax.set(xlabel="test accuracy (%)", ylabel="number of networks", xlim=(low, high))
        ax.set_title(f"{run['title']}, {len(accs)} networks{note}", fontsize=11)
        ax.legend(loc="upper left")
    return figure


def plot_filters(theta: list[Tensor]) -> Figure:
    """25 samples of one slice of a filter, for four filters."""
    slices = {
        "layer 1, filter 1": theta[0][:, 0, :25].unflatten(1, (5, 5)),
        "layer 1, filter 2": theta[0][:, 1, :25].unflatten(1, (5, 5)),
        "layer 2, filter 1, channel 1": theta[1][:, 0, :25].unflatten(1, (5, 5)),
        "layer 3, neuron 1, channel 1": theta[2][:, 0, :49].unflatten(1, (7, 7)),
    }
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for ax, (title, images) in zip(figure.subplots(1, 4), slices.items()):
        tiles = F.pad(images[:25].cpu(), (0, 1, 0, 1), value=torch.nan).unflatten(0, (5, 5))
        mosaic = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
        reach = images[:25].abs().quantile(0.98).item()  # one wild sample must not pale the rest
        shown = ax.imshow(mosaic, cmap="RdBu", vmin=-reach, vmax=reach)
        ax.set_title(title, fontsize=11)
        ax.axis("off")
        figure.colorbar(shown, ax=ax, shrink=0.8)
    figure.suptitle("25 samples of one filter slice each (weights after gauge fixing)")
    return figure


def plot_pca(samples: Tensor, title: str) -> Figure:
    scores, shares = pca(samples)
    scores, k = scores.cpu(), scores.shape[1]
    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots(k, k, sharex="col")
    for i in range(k):
        for j in range(k):
            ax = axes[i][j]
            if i == j:
                ax.hist(scores[:, i], bins=40)
            else:
                ax.plot(scores[:, j], scores[:, i], ".", markersize=1, alpha=0.4)
            ax.set(xticks=[], yticks=[])
        axes[-1][i].set_xlabel(f"PC {i + 1} ({100 * shares[i]:.0f} %)")
        axes[i][0].set_ylabel(f"PC {i + 1}")
    figure.suptitle(f"{title}: {len(scores)} samples, share of the variance in brackets")
    return figure


def plot_paths(runs: list[dict], pairs: int = 3) -> Figure:
    """Accuracy along paths between two networks: one row for each run, one column for each pair."""
    figure = Figure(figsize=(3.6 * pairs, 3 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), pairs, sharey="row", squeeze=False)
    for row, run in zip(axes, runs):
        for i, ax in enumerate(row[: run["paths"]["pairs"]]):
            for name, style in (("interpolated", "-"), ("direct", "--")):
                accs = [100 * a for a in run["paths"][name][i]]
                t = [k / (len(accs) - 1) for k in range(len(accs))]
                ax.plot(t, accs, style, label=f"{name} path")
            ax.set(xlabel="t, from G(z2) to G(z1)", title=f"{run['title']}, pair {i + 1}")
        row[0].set_ylabel(f"accuracy (%) on {run['paths']['images']} images")
        row[0].legend()
    return figure


def plot_ensembles(tested: dict) -> Figure:
    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    ax = figure.subplots()
    for name in ("majority", "mean_probability"):
        accs = [100 * a for a in tested[f"{name}_by_size"]]
        ax.plot(tested["sizes"], accs, "o-", label=name.replace("_", " "))
    ax.set(xscale="log", xlabel="networks in the ensemble", ylabel="test accuracy (%)")
    ax.legend()
    return figure


def plot_adversarial(runs: list[dict]) -> Figure:
    """How often adversarial examples succeed: one row for each run, one column per criterion."""
    figure = Figure(figsize=(9, 3.2 * len(runs)), layout="constrained")
    titles = dict(fooled="misclassified", target="taken for the attacker's target")
    for row, run in zip(figure.subplots(len(runs), 2, sharey=True, squeeze=False), runs):
        result = run["adversarial"]
        for ax, (criterion, title) in zip(row, titles.items()):
            for kind, style in (("single", "--"), ("ensemble", "-")):
                members = result["ensemble_size"]
                label = "the attacked network" if kind == "single" else f"ensemble of {members}"
                ax.plot(result["epsilons"], result[f"{kind}_{criterion}"], style, label=label)
            ax.set(xlabel="epsilon (1 = white - black)", ylim=(0, 1))
            ax.set_title(f"{run['title']}: {title}", fontsize=11)
        row[0].set_ylabel(f"share of {result['images']} images")
        row[0].legend()
    return figure


def plot_calibration(calibration: dict) -> Figure:
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1], ":", color="grey", label="perfect")
    for kind in ("single", "ensemble"):
        images, confidence, hits = torch.tensor(calibration[f"{kind}_bins"])
        full = images > 0
        label = f"{kind}: error {100 * calibration[f'{kind}_error']:.2f} %"
        ax.plot((confidence / images)[full], (hits / images)[full], "o-", label=label)
    ax.set(xlabel="confidence", ylabel="accuracy", title="reliability on the test set")
    ax.legend()
    return figure


def plot_rotation(result: dict) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    digits, ax = figure.subplots(2, 1, height_ratios=[1, 4])
    digits.imshow(
        torch.cat(list(torch.tensor(result["images"])), dim=1), cmap="gray_r", aspect="auto"
    )
    digits.axis("off")
    for kind in ("single", "ensemble"):
        label = "one network (mean)" if kind == "single" else f"ensemble of {result['members']}"
        ax.plot(result["angles"], result[f"{kind}_entropy"], "o-", label=label)
    for angle, answer in zip(result["angles"], result["ensemble_answer"]):
        ax.text(angle, -0.16, str(answer), ha="center", fontsize=9)
    ax.set(xlabel="rotation (degrees); small digits: the ensemble's answer")
    ax.set(ylabel="predictive entropy (nats)", ylim=(-0.25, 2.35), xlim=(-5, 185))
    ax.legend(loc="upper left")
    return figure


def analyse(model: nn.Module, data: dict, args: argparse.Namespace, title: str) -> dict:
    """All analyses of the paper and a few more: figures into --out, numbers returned."""
    x, y = data["test"]
    generator = torch.Generator(x.device).manual_seed(7)
    theta = sample(model, args.pca_samples, generator)
    six = x[(y == 6).nonzero()[0, 0]]
    rotated = rotation(model, six, args.ensemble_size)
    run = dict(
        title=title,
        tested=test_networks(model, x, y, args),
        paths=paths(model, x[: args.path_images], y[: args.path_images], args.path_pairs),
        adversarial=adversarial(
            model, x[: args.attacked_images], y[: args.attacked_images], args.attacked_ensemble
        ),
        variance_shares=pca(flat(theta))[1].tolist(),
        rotation={name: value for name, value in rotated.items() if name != "images"},
    )
    figures = dict(
        histogram=plot_histogram([run]),
        ensembles=plot_ensembles(run["tested"]),
        calibration=plot_calibration(run["tested"]["calibration"]),
        paths=plot_paths([run]),
        adversarial=plot_adversarial([run]),
        rotation=plot_rotation(rotated),
        filters=plot_filters(theta),
        pca_network=plot_pca(flat(theta), "whole network"),
    )
    for i, filters in enumerate(theta, start=1):
        figures[f"pca_layer{i}"] = plot_pca(filters.flatten(1), f"layer {i}")
        if i < 4:
            figures[f"pca_filter{i}"] = plot_pca(filters[:, 0], f"layer {i}, filter 1")
    for name, figure in figures.items():
        figure.savefig(args.out / f"{name}.png", dpi=150)
    return run


def compare(folders: list[Path], out: Path, device: str) -> dict:
    """A table and four figures of finished runs side by side."""
    runs, rows, scores = [], [], []
    for folder in folders:
        run = json.loads((folder / "metrics.json").read_text())
        model = load(folder / "hypernet.pt", device)
        sample(model, 1000)  # the first call is slow
        start = time.perf_counter()
        theta = flat(sample(model, 1000, torch.Generator(device).manual_seed(8))).cpu()
        rate = 1000 / (time.perf_counter() - start)
        runs.append(run)
        scores.append(pca(theta))
        rows.append(
            dict(
                model=run["title"],
                single=run["tested"]["single_mean"],
                majority=run["tested"]["majority_mean"],
                disagreement=run["tested"]["disagreement"],
                entropy=knn_entropy(theta, dim=Hypernetwork.noise_size).item(),  # one dim for all
                direct_dip=run["paths"]["direct_dip"],
                interpolated_dip=run["paths"]["interpolated_dip"],
                fooled_single=run["adversarial"]["single_fooled"][10],  # epsilon = 0.1
                fooled_ensemble=run["adversarial"]["ensemble_fooled"][10],
                parameters=run["parameters"],
                training_seconds=run.get("training_seconds"),
                networks_per_second=round(rate),
            )
        )
    figure = Figure(figsize=(4 * len(runs), 3.8), layout="constrained")
    for ax, run, (points, shares) in zip(
        figure.subplots(1, len(runs), squeeze=False)[0], runs, scores
    ):
        ax.plot(points[:, 0], points[:, 1], ".", markersize=2, alpha=0.5)
        ax.set(xlabel=f"PC 1 ({100 * shares[0]:.1f} %)", ylabel=f"PC 2 ({100 * shares[1]:.1f} %)")
        ax.set(title=f"{run['title']}: whole network")
    figures = dict(histogram=plot_histogram(runs), paths=plot_paths(runs, pairs=5), pca=figure)
    figures["adversarial"] = plot_adversarial(runs)
    for name, figure in figures.items():
        figure.savefig(out / f"compare_{name}.png", dpi=150)
    (out / "compare.json").write_text(json.dumps(rows, indent=1))
    for name in rows[0]:
        print(
            f"{name:20s}",
            *(f"{v:>14.4f}" if isinstance(v := row[name], float) else f"{v!s:>14}" for row in rows),
        )
    return dict(rows=rows)


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
            inner = (
                torch.einsum("f,nfk->nk", self.r_weight, weight) + (bias @ self.r_weight)[:, None]
            )
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
    itself; 808,156 parameters. Its bound takes the place of the entropy: with lam = the number of
    training images, lam * loss_acc - entropy is the negative evidence lower bound.
    Paper (of MNFG): one z per image and noise on activations. Here: explicit weights in training,
    as in the analyses, one network per batch of images."""

    def __init__(self):
        super().__init__()
        # The authors' initial deviations; those of the convolutions come from unusual fans.
        stds = [0.156, 0.039, 0.071, 0.471]
        self.layers = nn.ModuleList(
            MNFGLayer(f, k - 1, conv=i < 2, init_std=std)
            for i, ((f, k), std) in enumerate(zip(SHAPES, stds))
        )
        self.sizes = [layer.d for layer in self.layers] + [f * k for f, k in SHAPES]
        self.noise_size = sum(self.sizes)  # 840 + 20,018

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.layers[0].mean.device
        return torch.randn(n, self.noise_size, device=device, generator=generator)

    def layers_drawn(self, noise: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = noise.split(self.sizes, dim=1)
        noise_w = [part.unflatten(1, shape) for part, shape in zip(parts[4:], SHAPES)]
        return [layer(*e) for layer, *e in zip(self.layers, parts[:4], noise_w)]

    def forward(self, noise: Tensor) -> list[Tensor]:
        return fix_gauge([filters for filters, _, _ in self.layers_drawn(noise)])

    def draw(self, n: int) -> tuple[list[Tensor], Tensor]:
        drawn = self.layers_drawn(self.noise(n))
        bound = sum(layer.bound(*one) for layer, one in zip(self.layers, drawn))
        return [filters for filters, _, _ in drawn], -bound.mean()


# ---- Main ----------------------------------------------------------------------------------------


def provenance(argv: list[str] | None, args: argparse.Namespace) -> dict:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # no git here
        commit = "unknown"
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return dict(
        command=" ".join(["python", f"{NAME}.py", *(sys.argv[1:] if argv is None else argv)]),
        commit=commit,
        hardware=torch.cuda.get_device_name() if args.device == "cuda" else hardware,
        torch=torch.__version__,
        data="made up" if args.fake_data else "MNIST",
    )


def main(argv: list[str] | None = None) -> dict:
    args = parse_args(argv)
    if args.compare:
        return compare(args.compare, args.out, args.device)
    data = load_data(args)
    metrics = provenance(argv, args)
    if args.checkpoint:
        model = load(args.checkpoint, args.device)
        used = load_checkpoint(args.checkpoint)["settings"]
    else:
        model, log, seconds = train(args, data)
        used = settings(args)
        metrics |= dict(training_seconds=round(seconds, 1), validation=log[-1])
        plot_training(log).savefig(args.out / "training.png", dpi=150)

    start = time.perf_counter()
    title = "MNFG" if used["model"] == "mnfg" else f"lam = {used['lam']:g}"
    title += ", MADE-UP DATA" if args.fake_data or used["fake_data"] else ""
    parameters = sum(p.numel() for p in model.parameters())
    metrics |= dict(seed=used["seed"], settings=used, parameters=parameters)
    metrics |= analyse(model, data, args, title)
    analysis = round(time.perf_counter() - start, 1)
    metrics |= dict(analysis_seconds=analysis)
    metrics["seconds"] = round(metrics.get("training_seconds", 0) + analysis, 1)
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    tested = metrics["tested"]
    print(f"{tested['networks']} networks: mean accuracy {100 * tested['single_mean']:.2f} %")
    print(
        f"majority vote, {tested['ensembles']} ensembles of {tested['ensemble_size']}: "
        f"{100 * tested['majority_mean']:.2f} %"
    )
    print(f"figures and metrics: {args.out}")
    return metrics


if __name__ == "__main__":
    main()
