"""A hypernetwork in the plane: one noise number z becomes a point that should be good AND diverse.

    loss = lam * loss_acc - entropy,     loss_acc = -(value of a Gaussian mixture at the point)

Section "Toy Problem" of the paper. The points of all z form a curve. Accuracy alone would shrink it
to the highest peak; entropy stretches it; together they draw a path through all peaks that hurries
(few points) where the mixture is low. A point has no symmetries, so there is no gauge to fix; a
small l2 term keeps the curve from running away.

    python 01_toy_gaussian_mixture.py                        # one minute on two CPU cores
    python 01_toy_gaussian_mixture.py --seeds 5 --animate    # the documented run

Expect, for four seeds of five: within 0.5 of all six peaks, and a rank correlation of mixture
value and spacing below -0.5.
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

import matplotlib
import numpy as np
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from common import knn_entropy

NAME = "01_toy_gaussian_mixture"
LAMS = (0.15, 0.5, 1.5, 5.0, 15.0)  # what lam does: the second figure
LOG_EVERY = 100


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
    add("--steps", type=count, default=7500, help="training steps of each hypernetwork")
    add("--batch", type=count, default=6, help="samples of z in a step")
    add("--lr", type=positive, default=5e-3, help="highest learning rate of Adam")
    add("--lam", type=positive, default=1.5, help="weight of accuracy against entropy")
    add("--l2", type=positive, default=0.02, help="weight of the mean squared norm of the points")
    add("--seed", type=int, default=0, help="first random seed")
    add("--seeds", type=count, default=1, help="train this many seeds and report their spread")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--out", type=Path, default=Path("runs") / NAME, help="folder for all results")
    add("--resume", action="store_true", help="keep the finished trainings of a stopped run")
    add("--animate", action="store_true", help="also write training.gif")
    add("--quick", action="store_true", help="a preset: --steps 1500")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(steps=1500)
        args = parser.parse_args(argv)
    if args.batch < 2:
        parser.error("--batch must be at least 2: entropy needs a nearest other sample")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu, or install CUDA")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"device: {args.device}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "config.json").touch()
    except OSError as error:
        parser.error(f"--out {args.out}: cannot write there ({error.strerror})")
    return args


# ---- Data: the Gaussian mixture ------------------------------------------------------------------


class Mixture:
    """The authors' mixture of ten Gaussians in the plane; six peaks, as two triples merge into one
    each. Their code multiplies (not divides) a Gaussian by 2 pi s^2, and so does this."""

    def __init__(self, device: str = "cpu"):
        random = np.random.RandomState(69319)  # the seed in the authors' code
        means = random.uniform(-5, 5, (10, 2))
        sigmas = random.uniform(1, 1.1, 10)
        weights = random.uniform(1, 3, 10)
        heights = weights / weights.sum() * 2 * math.pi * sigmas**2
        self.means, self.sigmas, self.heights = (
            torch.tensor(array, dtype=torch.float32, device=device)
            for array in (means, sigmas, heights)
        )

    def __call__(self, y: Tensor) -> Tensor:
        squares = (y[..., None, :] - self.means).square().sum(dim=-1)  # (..., 10)
        return (self.heights * torch.exp(-squares / (2 * self.sigmas**2))).sum(dim=-1)


def plane(size: int = 361, reach: float = 9.0) -> Tensor:
    axis = torch.linspace(-reach, reach, size)
    return torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)  # (size, size, 2)


def find_peaks() -> Tensor:
    """(6, 2): the points of a fine grid that are higher than all their neighbours."""
    points = plane()
    values = Mixture()(points)
    highest = nn.functional.max_pool2d(values[None], 3, stride=1, padding=1)[0]
    return points[(values == highest) & (values > 0.1)]


# ---- Hypernetwork: z (N, 1) -> a point of the plane (N, 2) ---------------------------------------


def make_hypernetwork() -> nn.Sequential:
    """An MLP 1-30-10-10-2 with tanh, as the authors'. Large initial weights (variance 2 / fan-in,
    for biases too) bend the first curve enough to unfold it later; theirs are larger still (6)."""
    widths = [1, 30, 10, 10, 2]
    layers = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:]):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.normal_(layer.weight, std=(2 / fan_in) ** 0.5)
        nn.init.normal_(layer.bias, std=(2 / fan_in) ** 0.5)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# ---- Training ------------------------------------------------------------------------------------


def training_step(hypernet: nn.Module, mixture: Mixture, batch: int, lam: float, l2: float):
    device = mixture.means.device
    z = torch.rand(batch, 1, device=device) * 2 - 1  # (N, 1) uniform in (-1, 1)
    y = hypernet(z)  # (N, 2)
    loss_acc = -mixture(y).mean()
    entropy = knn_entropy(y, dim=1)
    loss = lam * loss_acc - entropy + l2 * y.square().sum(dim=1).mean()
    return loss, loss_acc, entropy


def train(args: argparse.Namespace, lam: float, seed: int) -> dict:
    """Train one hypernetwork. Returns its weights, its log, and its curve at 80 moments."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    hypernet = make_hypernetwork().to(args.device)
    mixture = Mixture(args.device)
    optimizer = torch.optim.Adam(hypernet.parameters(), lr=args.lr, fused=True)
    log, curves = [], []
    bar = tqdm(range(args.steps), desc=f"lam {lam:g} seed {seed}", mininterval=1)
    for step in bar:
        # lam rises from lam / 15 over the first 70 % of the steps: first the entropy unfolds the
        # curve over the whole plane, then the peaks pull it in. A constant lam often misses a peak.
        progress = step / args.steps
        lam_now = lam * 15 ** (min(progress / 0.7, 1) - 1)
        optimizer.param_groups[0]["lr"] = args.lr * min(1, 2 - 2 * progress)

        loss, loss_acc, entropy = training_step(hypernet, mixture, args.batch, lam_now, args.l2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        last = step == args.steps - 1
        if step % LOG_EVERY == 0 or last:
            row = dict(lam=lam, seed=seed, step=step, lam_now=lam_now)
            row |= dict(loss=loss.item(), acc=-loss_acc.item(), entropy=entropy.item())
            if not math.isfinite(row["loss"]):
                kept = "finished trainings are kept in checkpoint.pt"
                sys.exit(f"step {step}: the loss is not finite; try a smaller --lr ({kept})")
            log.append(row)
            bar.set_postfix(acc=f"{row['acc']:.2f}", entropy=f"{row['entropy']:.2f}")
        if step % max(1, args.steps // 80) == 0 or last:
            curves.append(curve(hypernet))
    state = {name: tensor.cpu() for name, tensor in hypernet.state_dict().items()}
    seconds = time.perf_counter() - start
    curves = torch.stack(curves)  # (moments, 400, 2)
    return dict(lam=lam, seed=seed, seconds=seconds, hypernet=state, log=log, curves=curves)


# ---- Evaluation and figures ----------------------------------------------------------------------


@torch.no_grad()
def curve(hypernet: nn.Module, points: int = 400) -> Tensor:
    """(points, 2): where equally spaced z end up."""
    device = next(hypernet.parameters()).device
    return hypernet(torch.linspace(-1, 1, points, device=device)[:, None]).cpu()


def spacing(path: Tensor) -> Tensor:
    """(points,): the distance of each point to its nearest neighbour."""
    distances = torch.cdist(path.double(), path.double())  # float32 loses small distances
    return distances.fill_diagonal_(torch.inf).amin(dim=1)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: the ordinary correlation of the ranks."""
    ranks = torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double()
    return torch.corrcoef(ranks)[0, 1].item()


def evaluate(result: dict) -> dict:
    """The paper's claims as numbers, for one trained hypernetwork."""
    hypernet = make_hypernetwork()
    hypernet.load_state_dict(result["hypernet"])
    path, mixture = curve(hypernet), Mixture()
    to_peaks = torch.cdist(find_peaks(), path).amin(dim=1)  # (6,)
    correlation = rank_correlation(mixture(path), spacing(path))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        samples = hypernet(torch.rand(2000, 1, generator=generator) * 2 - 1)
    return dict(
        lam=result["lam"],
        seed=result["seed"],
        seconds=round(result["seconds"], 1),
        distance_to_peaks=[round(d, 3) for d in to_peaks.tolist()],
        peaks_reached=int((to_peaks < 0.5).sum()),
        rank_correlation=correlation,
        acc=mixture(samples).mean().item(),
        entropy=knn_entropy(samples, dim=1).item(),
        claim_holds=bool((to_peaks < 0.5).all() and correlation < -0.5),
    )


def shade(ax) -> None:
    """The mixture as a background, its peaks as crosses."""
    ax.imshow(Mixture()(plane()), extent=(-9, 9, -9, 9), origin="lower", cmap="Greys", vmax=2)
    ax.plot(*find_peaks().T, "x", color="black", markersize=5, label="peaks")
    ax.set(
        xlabel="first weight", ylabel="second weight", xlim=(-9, 9), ylim=(-9, 9), aspect="equal"
    )


def plot_toy(path: Tensor) -> Figure:
    """The paper's figure 1."""
    z = torch.linspace(-1, 1, len(path))
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.35])
    shade(left)
    dots = left.scatter(*path.T, c=z, s=8, cmap="viridis")
    figure.colorbar(dots, ax=left, label="z", shrink=0.85)
    left.set_title(f"(a) G(z) for {len(path)} equally spaced z")
    left.legend(loc="upper right")

    value_line = right.plot(z, Mixture()(path), color="C0", label="mixture value (left axis)")
    right.scatter(z, torch.full_like(z, -0.05), c=z, s=6, cmap="viridis")
    right.set(xlabel="z", ylabel="value of the mixture", ylim=(-0.1, 1.9))
    far = right.twinx()
    far_line = far.plot(z, spacing(path), "--", color="C1", label="neighbour distance (right axis)")
    far.set(ylabel="distance to the nearest neighbour", ylim=(0, None))
    far.set_ylim(-0.1 / 1.9 * far.get_ylim()[1] * 1.25, far.get_ylim()[1] * 1.25)
    right.legend(handles=value_line + far_line, loc="upper right")
    right.set_title("(b) where the mixture is low, points are sparse")
    return figure


def plot_lam(results: list[dict], metrics: list[dict]) -> Figure:
    """The same toy for several lam, and the trade-off that lam moves along."""
    figure = Figure(figsize=(15, 6.8), layout="constrained")
    axes = figure.subplot_mosaic([list(range(len(results))), ["trade"] * len(results)])
    for i, (result, row) in enumerate(zip(results, metrics)):
        path = result["curves"][-1]
        shade(axes[i])
        axes[i].scatter(*path.T, c=torch.linspace(-1, 1, len(path)), s=5, cmap="viridis")
        numbers = f"accuracy {row['acc']:.2f}, entropy {row['entropy']:.2f}"
        axes[i].set_title(f"lam = {row['lam']:g}\n{numbers}", fontsize=11)
        axes["trade"].annotate(
            f"lam = {row['lam']:g}",
            (row["entropy"], row["acc"]),
            xytext=(8, 5),
            textcoords="offset points",
        )
    axes["trade"].plot([m["entropy"] for m in metrics], [m["acc"] for m in metrics], "o-")
    axes["trade"].set(xlabel="entropy (nats)", ylabel="accuracy (mean mixture value)")
    axes["trade"].set_title("the trade-off: lam buys accuracy with entropy")
    axes["trade"].margins(x=0.1, y=0.15)
    return figure


def animate_training(curves: Tensor, file: Path) -> None:
    figure = Figure(figsize=(3.6, 3.6), layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    ax = figure.subplots()
    shade(ax)
    z = torch.linspace(-1, 1, len(curves[0]))
    dots = ax.scatter(*curves[0].T, c=z, s=6, cmap="viridis")

    def draw(frame: int):
        dots.set_offsets(curves[min(frame, len(curves) - 1)])
        ax.set_title(f"training: {min(100, round(100 * frame / max(1, len(curves) - 1)))} %")
        return [dots]

    frames = len(curves) + 15  # hold the last one for a moment
    FuncAnimation(figure, draw, frames=frames).save(file, PillowWriter(fps=12), dpi=80)


# ---- Main ----------------------------------------------------------------------------------------


def provenance(argv: list[str] | None, args: argparse.Namespace, seconds: float) -> dict:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # no git here
        commit = "unknown"
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return dict(
        command=" ".join(["python", f"{NAME}.py", *(sys.argv[1:] if argv is None else argv)]),
        seed=args.seed,
        commit=commit,
        hardware=torch.cuda.get_device_name() if args.device == "cuda" else hardware,
        torch=torch.__version__,
        seconds=round(seconds, 1),
    )


def save(content: dict, file: Path) -> None:
    """Written beside the file and then renamed: a run that dies never leaves half a file."""
    temporary = file.with_suffix(".tmp")
    torch.save(content, temporary)
    os.replace(temporary, file)


def load_finished(file: Path, settings: dict) -> dict:
    if not file.exists():
        return {}
    try:
        checkpoint = torch.load(file, weights_only=True)
        theirs, finished = checkpoint["settings"], checkpoint["finished"]
    except Exception as error:
        sys.exit(f"{file} is damaged or not a checkpoint of this script ({type(error).__name__})")
    for name, value in settings.items():
        if theirs.get(name) != value:
            remedy = "use that or another --out, or remove the file"
            sys.exit(f"{file} has --{name} {theirs.get(name)}, not {value}: {remedy}")
    return finished


def main(argv: list[str] | None = None) -> dict:
    args = parse_args(argv)
    start = time.perf_counter()
    settings = {name: getattr(args, name) for name in ("steps", "batch", "lr", "l2")}
    checkpoint = args.out / "checkpoint.pt"
    finished = load_finished(checkpoint, settings)  # refuses to replace a run of other settings
    finished = finished if args.resume else {}
    (args.out / "config.json").write_text(json.dumps(vars(args), indent=1, default=str))

    seeds = [(args.lam, seed) for seed in range(args.seed, args.seed + args.seeds)]
    sweep = [(lam, args.seed) for lam in sorted({*LAMS, args.lam})]
    for lam, seed in dict.fromkeys(seeds + sweep):
        if f"{lam} {seed}" not in finished:
            finished[f"{lam} {seed}"] = train(args, lam, seed)
            save(dict(settings=settings, finished=finished), checkpoint)
    seed_results = [finished[f"{lam} {seed}"] for lam, seed in seeds]
    sweep_results = [finished[f"{lam} {seed}"] for lam, seed in sweep]

    by_seed = [evaluate(result) for result in seed_results]
    by_lam = [evaluate(result) for result in sweep_results]
    metrics = provenance(argv, args, time.perf_counter() - start)
    metrics["claims_hold"] = f"{sum(row['claim_holds'] for row in by_seed)} of {len(by_seed)} seeds"
    for name in ("peaks_reached", "rank_correlation", "acc", "entropy"):
        values = torch.tensor([float(row[name]) for row in by_seed])
        spread = values.std().item() if len(values) > 1 else 0.0
        metrics[name] = dict(mean=values.mean().item(), std=spread)
        print(f"{name:18s} {values.mean():7.3f} +- {spread:.3f}")
    print(f"six peaks within 0.5 and rank correlation below -0.5: {metrics['claims_hold']}")
    metrics |= dict(seeds=by_seed, lams=by_lam)

    with open(args.out / "log.csv", "w", newline="") as file:
        rows = [row for result in finished.values() for row in result["log"]]
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2))
    plot_toy(seed_results[0]["curves"][-1]).savefig(args.out / "toy.png", dpi=150)
    plot_lam(sweep_results, by_lam).savefig(args.out / "lam.png", dpi=150)
    if args.animate:
        animate_training(seed_results[0]["curves"], args.out / "training.gif")
    print(f"figures and metrics: {args.out}")
    return metrics


if __name__ == "__main__":
    main()
