"""A hypernetwork in the plane: one noise number z becomes a point that should be good AND diverse.

    loss = lam * loss_acc - entropy,     loss_acc = -(value of a Gaussian mixture at the point)

Section "Toy Problem" of the paper. The points of all z form a curve. Accuracy alone would shrink it
to one peak, entropy stretches it; together they draw a path through all six peaks, which hurries
where the mixture is low, so that few points are bad. A point has no symmetries: no gauge to fix.
Written are toy.png, the paper's figure 1; lam.png, what lam does; training.gif; metrics.json.

    python 01_toy_gaussian_mixture.py --quick   # in seconds: does it run?
    python 01_toy_gaussian_mixture.py           # five lam: one minute on one CPU core
"""

import argparse
import io
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from common import knn_entropy

NAME = "01_toy_gaussian_mixture"
LAMS = [0.15, 0.5, 1.5, 5.0, 15.0]  # weights of accuracy against entropy: lam.png
LAM = 1.5  # of these, the one of toy.png and training.gif
NETWORKS = 80  # samples of z in a step
GROUP = 5  # of these, among which the nearest is sought, as in the authors' code
LR = 5e-3  # highest rate of Adam
L2 = 0.015  # weight of the points' mean squared norm: keeps the curve from running away


# ---- Arguments -----------------------------------------------------------------------------------
def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add = parser.add_argument
    add("--steps", type=int, default=7500, help="of each training; default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--quick", action="store_true", help="small costs, at most: 1000 steps")
    add("--device", choices=devices, default=devices[0], help="default: %(default)s")
    add("--out", type=Path, help="default: runs/ and the name of this script, with _quick if so")
    args = parser.parse_args(argv)
    if not 0 < args.steps < 1_000_000 or not 0 <= args.seed < 4000:
        parser.error("steps must be above 0 and below a million, seed from 0 to 3999")
    if args.quick:
        args.steps = min(args.steps, 1000)
    if args.out is None:
        args.out = Path("runs", f"{NAME}_quick" if args.quick else NAME)
    return args


# ---- Data: a Gaussian mixture --------------------------------------------------------------------
PEAKS = [(-4.35, -4.0), (-0.7, -2.25), (3.75, -2.15), (-1.2, 1.65), (-4.65, 3.7), (-3.05, 4.4)]


class Mixture:
    """The authors' mixture of ten Gaussians; two triples merge, so that there are six peaks."""

    def __init__(self):
        random = np.random.RandomState(69319)  # the seed in the authors' code
        means = random.uniform(-5, 5, (10, 2))
        sigmas = random.uniform(1, 1.1, 10)
        weights = random.uniform(1, 3, 10)
        self.means = torch.tensor(means).float()
        self.variances = torch.tensor(sigmas).float() ** 2
        weights = torch.tensor(weights).float()
        # Their code multiplies (not divides) a Gaussian by 2 pi sigma^2, and so does this.
        self.heights = weights / weights.sum() * 2 * math.pi * self.variances

    def __call__(self, y: Tensor) -> Tensor:
        """Points (..., 2) -> the value at each (...,)."""
        squares = (y.unsqueeze(-2) - self.means).square().sum(dim=-1)  # (..., 10)
        return (self.heights * torch.exp(-squares / (2 * self.variances))).sum(dim=-1)


# ---- Hypernetwork --------------------------------------------------------------------------------
def linear_layer(fan_in, fan_out):
    """Large initial weights, and biases, bend the first curve enough to unfold it later. The
    authors' are larger still: variance 6 / fan-in."""
    layer = nn.Linear(fan_in, fan_out)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=(4 / fan_in) ** 0.5)
    return layer


class Hypernetwork(nn.Sequential):
    """G: z (N, 1) -> points (N, 2). The paper's MLP."""

    def __init__(self):
        super().__init__(
            linear_layer(1, 30),
            nn.Tanh(),
            linear_layer(30, 10),
            nn.Tanh(),
            linear_layer(10, 10),
            nn.Tanh(),
            linear_layer(10, 2),
        )

    def draw_z(self, n, generator):
        """(N, 1), uniform in (-1, 1): one in each of n equal parts, in random order."""
        position = torch.rand(n, 1, device=generator.device, generator=generator)
        part = torch.randperm(n, device=generator.device, generator=generator)[:, None]
        return 2 * ((position + part) / n) - 1

    @torch.no_grad()
    def curve(self):
        """The points (400, 2) of equally spaced z."""
        z = torch.linspace(-1, 1, 400, device=self[0].weight.device)
        return self(z[:, None]).cpu()


# ---- Training ------------------------------------------------------------------------------------
def training_step(model: nn.Module, mixture: Mixture, z: Tensor, lam: float) -> dict:
    """The method. z is (N, 1)."""
    y = model(z)  # (N, 2)
    loss_acc = -mixture(y).mean()
    # The nearest of many points is the next one on the curve; the nearest of five may lie anywhere,
    # so that distant parts of the curve repel each other, too. The authors' step has five points;
    # here it has many groups of five, as the gradient of one group is so noisy that a peak is often
    # lost. A third coordinate keeps the groups far apart: the nearest point is one of the group.
    # It is farther away than the nearest of many: this entropy is larger than that of `evaluate`.
    group = torch.arange(len(y), device=y.device)[:, None] // GROUP
    entropy = knn_entropy(torch.cat([y, 100.0 * group], dim=1), dim=1)
    loss = lam * loss_acc - entropy + L2 * y.square().sum(dim=1).mean()
    return dict(loss=loss, loss_acc=loss_acc, entropy=entropy)


def train(lam, steps, seed=0, device="cpu"):
    """Train one hypernetwork: what was found, and its curves on the way, each (400, 2)."""
    first_seed = (1 + seed) * 1_000_000
    torch.manual_seed(first_seed)
    with torch.device(device):
        model = Hypernetwork()
        mixture = Mixture()
    generator = torch.Generator(device).manual_seed(first_seed + 1)
    optimizer = torch.optim.Adam(model.parameters(), LR, fused=True)
    log = []
    curves = [model.curve()]
    log_every = math.ceil(steps / 60)

    bar = tqdm(range(steps), f"lam {lam:g}", mininterval=1)
    for step in bar:
        # Draw. lam rises over the first 70 % of the steps: first the entropy unfolds the curve over
        # the whole plane, then the peaks pull it in. A constant lam often misses a peak.
        progress = step / steps
        lam_now = lam * 15 ** (min(1.0, progress / 0.7) - 1)
        z = model.draw_z(NETWORKS, generator)
        result = training_step(model, mixture, z, lam_now)

        # Step. The rate falls to 0 in the second half.
        model.zero_grad()
        result["loss"].backward()
        optimizer.param_groups[0]["lr"] = LR * min(1.0, 2 - 2 * progress)
        optimizer.step()

        # Log, sixty times a run.
        done = step + 1
        if done % log_every == 0 or done == steps:
            row = evaluate(model)
            bar.set_postfix(row, refresh=False)
            log.append(dict(step=done, **row))
            curves.append(model.curve())
    return log, curves


# ---- Files ---------------------------------------------------------------------------------------
def write(file, content):
    """All or nothing: written beside, under a name of this process's own, then renamed."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def commit():
    """The version of this code, if git knows it."""
    folder = Path(__file__).parent
    status, text = subprocess.getstatusoutput(f'git -C "{folder}" describe --always --dirty')
    return text if status == 0 else "unknown"


# ---- Evaluation ----------------------------------------------------------------------------------
def spacing(curve: Tensor) -> Tensor:
    """(points,): the distance of each point to its nearest neighbour."""
    curve = curve.double()  # float32 loses small distances
    return torch.cdist(curve, curve).fill_diagonal_(torch.inf).amin(dim=1)


@torch.no_grad()
def evaluate(model):
    """Accuracy and entropy of random z; and the paper's claims as numbers, of equally spaced z: how
    many peaks are within 0.5, and are points far apart where the mixture is low (then Spearman's
    rank correlation is below 0)?"""
    curve = model.curve()
    z = 2 * torch.rand(2000, 1, generator=torch.Generator().manual_seed(0)) - 1
    samples = model(z.to(model[0].weight.device)).cpu()
    distances = torch.cdist(torch.tensor(PEAKS), curve).amin(dim=1)  # (6,)
    ranks = torch.stack([Mixture()(curve), spacing(curve)]).argsort().argsort()  # (2, 400)
    return dict(
        acc=Mixture()(samples).mean().item(),
        entropy=knn_entropy(samples, dim=1).item(),
        peaks=(distances < 0.5).sum().item(),
        correlation=torch.corrcoef(ranks.double())[0, 1].item(),
    )


# ---- Figures -------------------------------------------------------------------------------------
def draw(ax, curve, size):
    """A curve (points, 2), coloured by z, on the mixture (darker is better) and its peaks."""
    axis = torch.linspace(-9, 9, 181)
    x, y = torch.meshgrid(axis, axis, indexing="xy")
    values = Mixture()(torch.stack([x, y], dim=-1))
    ax.contourf(x, y, values, levels=15, cmap="Greys", vmax=2.1)
    for peak in PEAKS:
        ax.plot(*peak, "x", color="red")
    ax.axis("square")
    ax.locator_params(nbins=5)
    z = torch.linspace(-1, 1, len(curve))
    return ax.scatter(curve[:, 0], curve[:, 1], size, z)


def plot_toy(curve):
    """The paper's figure 1: the curve, and the mixture along it."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    dots = draw(left, curve, size=6)
    figure.colorbar(dots, label="z")
    left.set(xlabel="first weight", ylabel="second weight", title="G(z) of 400 z; crosses: peaks")

    z = torch.linspace(-1, 1, len(curve))
    right.plot(z, Mixture()(curve))
    right.set(
        xlabel="z",
        ylabel="value of the mixture (blue)",
        ylim=(0, 1.5),
        title="where the mixture is low, points are sparse",
    )
    far = right.twinx()
    far.plot(z, spacing(curve), "--", color="C1")
    far.set(ylabel="distance to the nearest point (dashed)", ylim=(0, None))
    return figure


def plot_lam(runs, curves):
    """The last curves of several lam, and how lam trades accuracy for entropy."""
    figure = Figure(figsize=(6.2, 4.5), layout="compressed")
    axes = figure.subplots(2, 3).flatten()
    trade = axes[-1]
    for ax, run in zip(axes, runs):
        name = f"lam = {run['lam']:g}"
        draw(ax, curves[run["lam"]][-1], size=2)
        ax.set(title=name, xticks=[], yticks=[])
        found = run["log"][-1]
        trade.plot(found["entropy"], found["acc"], ".", color="C0")
        trade.annotate(name, (found["entropy"], found["acc"]), ha="center", va="bottom")
    trade.margins(0.4)
    trade.set(xlabel="entropy of the points (nats)", ylabel="accuracy: their mean value")
    return figure


def animate(curves):
    """The curve while it trains, as a GIF; the last picture is held for two seconds."""
    figure = Figure(figsize=(3, 3))
    ax = figure.add_axes((0.12, 0.09, 0.86, 0.82))  # at rest
    dots = draw(ax, curves[0], size=4)
    last = len(curves) - 1
    frames = []
    for i, curve in enumerate(curves):
        dots.set_offsets(curve)
        ax.set_title(f"after {i / last:.0%} of training")
        frames.append(Image.open(io.BytesIO(png(figure))))
    gif = io.BytesIO()
    durations = [80] * last + [2000]  # milliseconds
    frames[0].save(gif, "gif", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return gif.getvalue()


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    return buffer.getvalue()


# ---- Main ----------------------------------------------------------------------------------------
def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = []
    curves = {}
    for lam in LAMS:
        log, curves[lam] = train(lam, args.steps, args.seed, args.device)
        runs.append(dict(lam=lam, log=log))
    metrics = dict(
        script=NAME,
        settings=dict(steps=args.steps, seed=args.seed),
        command=" ".join(sys.argv),
        commit=commit(),
        hardware=platform.machine() if args.device == "cpu" else torch.cuda.get_device_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        runs=runs,
    )
    write(args.out / "metrics.json", json.dumps(metrics, indent=1).encode())
    write(args.out / "toy.png", png(plot_toy(curves[LAM][-1])))
    write(args.out / "lam.png", png(plot_lam(runs, curves)))
    write(args.out / "training.gif", animate(curves[LAM]))
    print("figures and metrics:", args.out)
    return metrics


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command begins again")
    except OSError as error:
        sys.exit(f"{error}: is there room, and may this program write there?")
