"""A hypernetwork in the plane: one noise number z becomes a point that should be good AND diverse.

    loss = lam * loss_acc - entropy,     loss_acc = -(value of a Gaussian mixture at the point)

Section "Toy Problem" of the paper. The points of all z form a curve. Accuracy alone would shrink it
to the highest peak, entropy stretches it; together they draw a path through all peaks that hurries
(few points) where the mixture is low. A point has no symmetries, so there is no gauge to fix.
Expect: within 0.5 of all six peaks, and a rank correlation of mixture value and spacing below -0.5.

    python 01_toy_gaussian_mixture.py               # five trainings: one minute on two CPU cores
    python 01_toy_gaussian_mixture.py --seeds 10    # and nine more: three minutes
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib.animation import PillowWriter
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from common import knn_entropy

NAME = "01_toy_gaussian_mixture"
LAMS = (0.15, 0.5, 1.5, 5.0, 15.0)  # what lam does: the second figure
L2 = 0.015  # weight of the points' mean squared norm: keeps the curve from running away
GROUP = 5  # points among which the nearest is sought, as in the authors' code
PEAKS = ((-4.35, -4.0), (-0.7, -2.25), (3.75, -2.15), (-1.2, 1.65), (-4.65, 3.7), (-3.05, 4.4))


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{NAME}.py", description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("--steps", type=int, default=7500, help="of each training")
    add("--lr", type=float, default=5e-3, help="highest learning rate of Adam")
    add("--lam", type=float, default=1.5, help="weight of accuracy against entropy")
    add("--networks", type=int, default=80, help=f"samples of z in a step, a multiple of {GROUP}")
    add("--seed", type=int, default=0, help="of all random numbers of training")
    add("--seeds", type=int, default=1, help="so many seeds, from --seed on, to see the spread")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[0], help="where to compute")
    add("--out", type=Path, default=Path("runs") / NAME, help="folder of metrics and figures")
    add("--quick", action="store_true", help="at most 1000 steps")
    args = parser.parse_args(argv)
    for name in ("steps", "lr", "lam", "networks", "seeds"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"argument --{name}: {getattr(args, name):g} is not a positive number")
    if args.seed < 0:
        parser.error(f"argument --seed: {args.seed} is negative")
    if args.networks % GROUP:
        parser.error(f"argument --networks: {args.networks} is not a multiple of {GROUP}")
    args.steps = min(args.steps, 1000) if args.quick else args.steps
    return args


# ---- Data: the Gaussian mixture ------------------------------------------------------------------
class Mixture:
    """The authors' mixture of ten Gaussians; two triples merge, so that there are six peaks. Their
    code multiplies (not divides) a Gaussian by 2 pi s^2, and so does this."""

    def __init__(self, device: str = "cpu"):
        random = np.random.RandomState(69319)  # the seed in the authors' code
        ranges = (-5, 5, (10, 2)), (1, 1.1, 10), (1, 3, 10)
        drawn = (torch.tensor(random.uniform(*r)).float().to(device) for r in ranges)
        self.means, self.sigmas, weights = drawn
        self.heights = weights / weights.sum() * 2 * math.pi * self.sigmas**2

    def __call__(self, y: Tensor) -> Tensor:
        squares = (y[..., None, :] - self.means).square().sum(dim=-1)  # (..., 10)
        return (self.heights * torch.exp(-squares / (2 * self.sigmas**2))).sum(dim=-1)


# ---- Hypernetwork: z (N, 1) -> a point of the plane (N, 2) ---------------------------------------
class Hypernetwork(nn.Sequential):
    """An MLP 1-30-10-10-2 with tanh, as the authors'. Large initial weights (variance 4 / fan-in,
    for biases too) bend the first curve enough to unfold it later; theirs are larger still (6)."""

    def __init__(self, widths: tuple = (1, 30, 10, 10, 2)):
        layers = []
        for fan_in, fan_out in zip(widths[:-1], widths[1:]):
            layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
            for parameter in layers[-2].parameters():
                nn.init.normal_(parameter, std=(4 / fan_in) ** 0.5)
        super().__init__(*layers[:-1])

    def noise(self, n: int, generator=None, stratified: bool = False) -> Tensor:
        """(N, 1), uniform in (-1, 1); `stratified`: one in each of N equal parts, shuffled."""
        device = self[0].weight.device
        z = torch.rand(n, 1, device=device, generator=generator)
        if stratified:
            z = (z + torch.randperm(n, device=device, generator=generator)[:, None]) / n
        return 2 * z - 1


# ---- Training ------------------------------------------------------------------------------------
def training_step(hypernet: nn.Module, mixture: Mixture, z: Tensor, lam: float) -> tuple:
    y = hypernet(z)  # (N, 2)
    loss_acc = -mixture(y).mean()
    # The nearest of many points is the next one on the curve; the nearest of five may lie anywhere,
    # so that distant parts of the curve repel each other, too. The authors' step has five points;
    # here it has many groups of five, as the gradient of one group is so noisy that a peak is often
    # lost. A third coordinate keeps the groups far apart: the nearest point is one of the group.
    group = torch.arange(len(y), device=y.device)[:, None] // GROUP
    entropy = knn_entropy(torch.cat([y, 100.0 * group], dim=1), dim=1)
    loss = lam * loss_acc - entropy + L2 * y.square().sum(dim=1).mean()
    return loss, loss_acc, entropy


def train(args: argparse.Namespace, lam: float, seed: int) -> dict:
    """Train one hypernetwork: its results, and its curve on the way."""
    begun, device = time.perf_counter(), args.device
    torch.manual_seed((seed + 1) * 10**6)  # small seeds are for evaluation
    hypernet, mixture = Hypernetwork().to(device), Mixture(device)
    generator = torch.Generator(device).manual_seed((seed + 1) * 10**6 + 1)
    optimizer = torch.optim.Adam(hypernet.parameters(), lr=args.lr, fused=True)
    spaced = torch.linspace(-1, 1, 400, device=device)[:, None]  # z of the curve
    curves = [hypernet(spaced).detach()]
    bar = tqdm(range(1, args.steps + 1), f"lam {lam:g} seed {seed}", mininterval=1)
    for step in bar:
        # lam rises from lam / 15 over the first 70 % of the steps: first the entropy unfolds the
        # curve over the whole plane, then the peaks pull it in. A constant lam often misses a peak.
        progress = (step - 1) / args.steps
        lam_now = lam * 15 ** (min(progress / 0.7, 1) - 1)
        optimizer.param_groups[0]["lr"] = args.lr * min(1, 2 - 2 * progress)

        z = hypernet.noise(args.networks, generator, stratified=True)
        loss, loss_acc, entropy = training_step(hypernet, mixture, z, lam_now)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % math.ceil(args.steps / 60) == 0 or step == args.steps:
            if not math.isfinite(loss.item()):
                sys.exit(f"step {step}: the loss is not finite; try a smaller --lr")
            bar.set_postfix(acc=f"{-loss_acc:.2f}", entropy=f"{entropy:.2f}", refresh=False)
            curves.append(hypernet(spaced).detach())
    run = dict(lam=lam, seed=seed, seconds=round(time.perf_counter() - begun, 1))
    samples = hypernet(hypernet.noise(2000, torch.Generator(device).manual_seed(0))).detach()
    run |= evaluate(curves[-1].cpu(), samples.cpu())
    return run | dict(curves=torch.stack(curves).double().round(decimals=4).tolist())


# ---- Evaluation and figures ----------------------------------------------------------------------
def spacing(path: Tensor) -> Tensor:
    """(points,): the distance of each point to its nearest neighbour."""
    distances = torch.cdist(path.double(), path.double())  # float32 loses small distances
    return distances.fill_diagonal_(torch.inf).amin(dim=1)


def evaluate(path: Tensor, samples: Tensor) -> dict:
    """The paper's claims as numbers: of the points of equally spaced z, and of random z."""
    to_peaks = torch.cdist(torch.tensor(PEAKS), path).amin(dim=1)  # (6,)
    ranks = torch.stack([Mixture()(path).argsort().argsort(), spacing(path).argsort().argsort()])
    return dict(
        acc=Mixture()(samples).mean().item(),
        entropy=knn_entropy(samples, dim=1).item(),
        distance_to_peaks=to_peaks.tolist(),
        peaks_reached=int((to_peaks < 0.5).sum()),
        rank_correlation=torch.corrcoef(ranks.double())[0, 1].item(),  # Spearman's
    )


def draw(ax, path: Tensor, size: float):
    """A curve (points, 2), coloured by z, on the mixture (darker is better) and its peaks."""
    axis, levels = torch.linspace(-9, 9, 181), torch.linspace(0, 2.1, 15)  # so no level is black
    grid = torch.meshgrid(axis, axis, indexing="xy")
    ax.contourf(*grid, Mixture()(torch.stack(grid, dim=-1)), levels=levels, cmap="Greys")
    ax.plot(*zip(*PEAKS), "x", color="red", markersize=5, zorder=3, label="peaks")
    ax.set(xlim=(-9, 9), ylim=(-9, 9), aspect="equal", xticks=[-5, 0, 5], yticks=[-5, 0, 5])
    return ax.scatter(*path.T, c=torch.linspace(-1, 1, len(path)), s=size, cmap="viridis")


def plot_toy(runs: list[dict]) -> Figure:
    """The paper's figure 1, of the first run."""
    path, z = torch.tensor(runs[0]["curves"][-1]), torch.linspace(-1, 1, 400)
    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.3])
    figure.colorbar(draw(left, path, size=6), ax=left, label="z", ticks=[-1, 0, 1])
    left.set(xlabel="first weight", ylabel="second weight", title="G(z) of 400 equally spaced z")
    left.legend(loc="upper right")
    far = right.twinx()
    right.plot(z, Mixture()(path), color="C0")
    far.plot(z, spacing(path), "--", color="C1")
    right.set(xlabel="z", ylabel="value of the mixture (blue)", ylim=(0, 1.5))
    right.set(title="where the mixture is low, points are sparse")
    far.set(ylabel="distance to the nearest point (dashed)", ylim=(0, None))
    return figure


def plot_lam(runs: list[dict]) -> Figure:
    """The curves of several lam, and the trade-off that lam moves along."""
    runs = sorted((r for r in runs if r["seed"] == runs[0]["seed"]), key=lambda r: r["lam"])
    figure, rows = Figure(figsize=(6, 4.4), dpi=150, layout="constrained"), len(runs) // 3 + 1
    trade = figure.add_subplot(rows, 3, len(runs) + 1)
    trade.plot([run["entropy"] for run in runs], [run["acc"] for run in runs], "o-")
    trade.set(xlabel="entropy (nats)", title="accuracy, at lam")
    trade.margins(x=0.35, y=0.2)
    for i, run in enumerate(runs):
        ax = figure.add_subplot(rows, 3, i + 1)
        draw(ax, torch.tensor(run["curves"][-1]), size=2)
        ax.set(title=f"lam = {run['lam']:g}", xticks=[], yticks=[])
        place = dict(xytext=(4, 4), textcoords="offset points")
        trade.annotate(f"{run['lam']:g}", (run["entropy"], run["acc"]), **place)
    return figure


def animate(runs: list[dict], file: Path) -> None:
    """The curve of the first run while it trains; the last picture is held for a moment."""
    curves, writer = torch.tensor(runs[0]["curves"]), PillowWriter(fps=12)
    ax = Figure(figsize=(4.5, 4.5)).add_axes((0.08, 0.05, 0.88, 0.88))  # at rest
    dots, last = draw(ax, curves[0], size=7), len(curves) - 1
    with writer.saving(ax.figure, file, dpi=100):
        for i in [*range(last), *[last] * 20]:
            dots.set_offsets(curves[i])
            ax.set_title(f"G(z), coloured by z, after {i / last:.0%} of training")
            writer.grab_frame()


def table(runs: list[dict]) -> str:
    """Markdown: every run, then the mean of the seeds and their standard deviation."""
    seeds = [run for run in runs if run["lam"] == runs[0]["lam"]]
    rows = [["", "accuracy", "entropy (nats)", "peaks reached", "rank correlation"], ["---"] * 5]
    names = ("acc", "entropy", "peaks_reached", "rank_correlation")
    for run in sorted(runs, key=lambda run: (run["lam"], run["seed"])):
        rows.append([f"lam {run['lam']:g}, seed {run['seed']}", *(f"{run[n]:.3g}" for n in names)])
    if len(seeds) > 1:
        values = torch.tensor([[run[name] for name in names] for run in seeds])  # (seeds, 4)
        cells = (f"{m:.3g} ± {s:.2g}" for m, s in zip(values.mean(dim=0), values.std(dim=0)))
        rows.append([f"lam {runs[0]['lam']:g}, {len(seeds)} seeds", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---- Main ----------------------------------------------------------------------------------------
def read(file: Path, settings: dict) -> dict:
    """The metrics.json of a run with these settings."""
    try:
        metrics = json.loads(file.read_text())
        other = {k: v for k, v in metrics["settings"].items() if settings.get(k, v) != v}
    except Exception as error:
        sys.exit(f"{file} is missing, damaged or not of this script ({type(error).__name__})")
    if other:
        sys.exit(f"{file} has other settings, {other}: remove {file.parent} or use another --out")
    return metrics


def save(write, file: Path) -> None:
    """Write beside and rename: a killed run never leaves half a file."""
    new = file.with_name(f"new_{file.name}")
    write(new)
    new.replace(file)


def main(argv: list[str] | None = None) -> dict:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    file, documented = args.out / "metrics.json", "results" in args.out.parts
    names = () if documented else ("steps", "lr", "lam", "networks", "seed")
    settings = dict(script=NAME) | {name: getattr(args, name) for name in names}
    known = file.exists() or documented  # documented runs are drawn, never trained
    metrics = read(file, settings) if known else dict(settings=settings, runs=[])
    runs = metrics["runs"]
    todo = [(lam, args.seed) for lam in (args.lam, *LAMS)]
    todo += [(args.lam, args.seed + i) for i in range(args.seeds)]
    done = [(run["lam"], run["seed"]) for run in runs]
    todo = [] if documented else [job for job in dict.fromkeys(todo) if job not in done]
    if todo:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"--out {args.out}: cannot write there ({error.strerror})")
        git = f'git -C "{Path(__file__).parent}" describe --always --dirty'
        cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        metrics["command"] = " ".join(["python", f"{NAME}.py", *argv])
        metrics["commit"] = subprocess.getoutput(git)
        metrics["hardware"] = torch.cuda.get_device_name() if args.device == "cuda" else cpu
        metrics["torch"] = torch.__version__
    for lam, seed in todo:
        runs.append(train(args, lam, seed))
        if len(runs) > 1:  # the curve on its way is large: kept of the first run only
            runs[-1]["curves"] = runs[-1]["curves"][-1:]
        save(lambda new: new.write_text(json.dumps(metrics)), file)
    save(plot_toy(runs).savefig, args.out / "toy.png")
    save(plot_lam(runs).savefig, args.out / "lam.png")
    save(lambda new: animate(runs, new), args.out / "training.gif")
    print(table(runs), f"\nfigures and metrics: {args.out}")
    return metrics


if __name__ == "__main__":
    main()
