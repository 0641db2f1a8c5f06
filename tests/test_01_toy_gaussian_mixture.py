"""The toy: its mixture, its step, its numbers and its files."""

import io
import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from torch._subclasses import FakeTensorMode

SCRIPT = Path(__file__).resolve().parents[1] / "01_toy_gaussian_mixture.py"


def nearest(points):
    """The distance of each point to its nearest other one, by a plain loop."""
    points = points.detach().double().tolist()
    distances = []
    for p in points:
        distances.append(min(math.dist(p, q) for q in points if q is not p))
    return torch.tensor(distances)


def test_mixture_has_the_authors_components(toy):
    """Written down with three digits, so that the sum agrees to half a percent."""
    means = [(3.518, -1.396), (3.655, -3.689), (-0.717, -2.271), (-4.360, -3.999), (-4.889, 3.612)]
    means += [(-1.320, 1.620), (-1.865, 1.854), (-2.787, 4.611), (4.060, -2.396), (0.136, 1.364)]
    sigmas = [1.055, 1.036, 1.025, 1.049, 1.022, 1.060, 1.005, 1.006, 1.022, 1.007]
    weights = [0.126, 0.104, 0.101, 0.113, 0.103, 0.099, 0.073, 0.100, 0.088, 0.094]
    for point in [(1, -2), (-3, 4), (4, -2)]:
        value = 0.0
        for mean, s, p in zip(means, sigmas, weights):
            value += p * 2 * math.pi * s**2 * math.exp(-(math.dist(point, mean) ** 2) / (2 * s**2))
        assert toy.Mixture()(torch.tensor(point)).item() == pytest.approx(value, rel=5e-3)


def test_the_peaks_are_those_of_the_mixture(toy):
    """All points of a grid of 0.05 that are higher than their neighbours, and no others."""
    axis = torch.linspace(-9, 9, 361)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
    values = toy.Mixture()(grid)
    highest = nn.functional.max_pool2d(values[None], 3, stride=1, padding=1)[0]
    found = grid[(values == highest) & (values > 0.1)]
    assert len(found) == len(toy.PEAKS) == 6
    distances = torch.cdist(torch.tensor(toy.PEAKS), found).amin(dim=1)
    assert distances.max() < 1e-3  # float32, squared by cdist
    assert values.max().item() == pytest.approx(1.433, abs=1e-3)  # the authors' highest


def test_hypernetwork_is_the_authors_mlp(toy):
    torch.manual_seed(0)
    model = toy.Hypernetwork()
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == 60 + 310 + 110 + 22
    z = torch.linspace(-1, 1, 400)[:, None]
    y = z
    for i in range(0, 8, 2):
        y = y @ parameters[i].T + parameters[i + 1]
        y = y.tanh() if i < 6 else y
    torch.testing.assert_close(model(z), y)
    torch.testing.assert_close(model.curve(), y)
    # The standard deviation of n numbers is known to 1 / sqrt(2 n) of itself: three times that.
    for i, fan_in, n in [(0, 1, 30), (1, 1, 30), (2, 30, 300), (4, 10, 100)]:
        expected = (4 / fan_in) ** 0.5
        assert parameters[i].std().item() == pytest.approx(expected, rel=3 / (2 * n) ** 0.5)


def test_one_z_in_each_part_in_random_order(toy):
    z = toy.Hypernetwork().draw_z(1000, torch.Generator().manual_seed(1))
    scaled = (z[:, 0].double() + 1) / 2 * 1000
    part = scaled.floor()
    place = scaled - part
    assert z.shape == (1000, 1) and part.sort().values.tolist() == list(range(1000))
    # Uniform numbers have this deviation; correlations are of the size 1 / sqrt(1000).
    assert place.std().item() == pytest.approx(12**-0.5, rel=0.1)
    table = torch.stack([part, place, torch.arange(1000.0)])
    assert (torch.corrcoef(table) - torch.eye(3)).abs().max() < 0.15


def test_objective(toy):
    """loss = lam * loss_acc - entropy + L2 * mean square norm, from its parts."""
    torch.manual_seed(0)
    model = toy.Hypernetwork()
    mixture = toy.Mixture()
    z = model.draw_z(20, torch.Generator().manual_seed(5))
    result = toy.training_step(model, mixture, z, lam=3.0)
    y = model(z)
    distances = torch.cat([nearest(group) for group in y.split(5)])
    entropy = torch.digamma(torch.tensor(20.0)) + distances.log().mean()
    loss = -3.0 * mixture(y).mean() - entropy + 0.015 * (y**2).sum() / 20
    torch.testing.assert_close(result["entropy"], entropy)
    torch.testing.assert_close(result["loss_acc"], -mixture(y).mean())
    torch.testing.assert_close(result["loss"], loss)


def test_training_step_on_a_gpu(toy):
    """Without one: a tensor on the wrong device raises here, and so does reading a value back."""
    with FakeTensorMode():
        with torch.device("cuda"):  # as `train` does; the step must find its device by itself
            model = toy.Hypernetwork()
            mixture = toy.Mixture()
            z = torch.rand(10, 1)
        loss = toy.training_step(model, mixture, z, lam=1.0)["loss"]
    assert loss.device.type == "cuda"


def test_spacing_is_the_distance_to_the_nearest(toy):
    close = torch.stack([8 + 1e-4 * torch.arange(40), torch.full((40,), 8.0)], dim=1)
    for curve in (torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 1.0], [3.0, 5.0]]), close):
        # At distances of 1e-4, 8 from the origin, float64 has seven digits left.
        torch.testing.assert_close(toy.spacing(curve).float(), nearest(curve))


class Given(nn.Sequential):
    """A model whose points are known."""

    def __init__(self, curve, samples):
        super().__init__(nn.Linear(1, 1))
        self.curve = lambda: curve
        self.samples = samples

    def forward(self, z):
        assert z.shape == (2000, 1) and -1 < z.min() < -0.99 and 0.99 < z.max() < 1
        return self.samples


def test_evaluate(toy):
    generator = torch.Generator().manual_seed(3)
    samples = 3 * torch.randn(50, 2, generator=generator)
    away = torch.tensor([[0.0, 0.49]] * 5 + [[0.0, 0.51]])  # from the peaks: five are reached
    found = toy.evaluate(Given(torch.tensor(toy.PEAKS) + away, samples))
    assert found["peaks"] == 5
    assert found["acc"] == pytest.approx(toy.Mixture()(samples).mean().item())
    entropy = torch.digamma(torch.tensor(50.0)) + nearest(samples).log().mean()
    assert found["entropy"] == pytest.approx(entropy.item(), rel=1e-5)  # float32

    # Away from a peak the mixture falls, and the steps grow: Spearman's correlation is -1, but for
    # the first two points, whose distances are the same.
    steps = torch.arange(30.0).square() / 1000
    curve = torch.stack([3.75 + steps, -2.15 + 0 * steps], dim=1)[
        torch.randperm(30, generator=generator)
    ]
    assert toy.evaluate(Given(curve, samples))["correlation"] == pytest.approx(-1, abs=0.001)
    model = toy.Hypernetwork()
    assert toy.evaluate(model) == toy.evaluate(model)  # of the same z


def test_training_finds_peaks(toy):
    """A twelfth of the documented steps. The least of eight seeds: 4 peaks, -0.68, 0.84, 0.42."""
    log, curves = toy.train(1.5, steps=610)
    assert [row["step"] for row in log] == [*range(11, 610, 11), 610]
    assert len(curves) == 1 + len(log)  # the first one is untrained
    assert log[-1]["peaks"] >= 4 and log[-1]["correlation"] < -0.5
    assert log[-1]["entropy"] > log[0]["entropy"] + 0.5  # it unfolds
    greedy, _ = toy.train(15.0, steps=610)
    assert greedy[-1]["acc"] > log[-1]["acc"] + 0.3  # what lam is for


def test_a_training_depends_on_its_seed_alone(toy):
    curves = []
    for i, seed in enumerate((3, 3, 4)):
        torch.manual_seed(i)
        curves.append(toy.train(1.5, steps=5, seed=seed)[1][-1])
    assert torch.equal(curves[0], curves[1]) and not torch.equal(curves[0], curves[2])


def test_schedules(toy, monkeypatch):
    """Of lam and of the rate, which is what Adam subtracts where all gradients are 1."""
    lams = []
    weights = []

    def step(model, mixture, z, lam):
        lams.append(lam)
        weights.append(model[0].bias[0].item())
        return dict(loss=sum(p.sum() for p in model.parameters()))

    monkeypatch.setattr(toy, "training_step", step)
    toy.train(1.5, steps=100)
    assert lams[0] == pytest.approx(0.1) and lams[35] == pytest.approx(1.5 / 15**0.5)
    assert lams[70:] == [1.5] * 30
    rates = [weights[i] - weights[i + 1] for i in (0, 50, 75, 98)]
    assert rates == pytest.approx([5e-3, 5e-3, 2.5e-3, 2e-4], abs=1e-6)  # of a float32 near 1


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    """A small finished run: its folder and what `main` returned."""
    out = tmp_path_factory.mktemp("finished") / "new" / "toy"
    return out, toy.main(["--steps", "3", "--seed", "5", "--device", "cpu", "--out", str(out)])


def test_small_run_writes_everything(toy, finished):
    out, metrics = finished
    names = {path.name for path in out.iterdir()}
    assert names == {"metrics.json", "toy.png", "lam.png", "training.gif"}
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert metrics["settings"] == dict(steps=3, seed=5)
    assert [run["lam"] for run in metrics["runs"]] == [0.15, 0.5, 1.5, 5.0, 15.0]
    log, curves = toy.train(1.5, steps=3, seed=5)
    assert metrics["runs"][2]["log"] == log
    assert (out / "toy.png").read_bytes() == toy.png(toy.plot_toy(curves[-1]))
    assert (out / "training.gif").read_bytes() == toy.animate(curves)


def test_figures_show_what_they_say(toy, finished):
    curve = torch.rand(400, 2, generator=torch.Generator().manual_seed(0))
    left, right, _, far = toy.plot_toy(curve).axes
    assert left.collections[-1].get_offsets().data == pytest.approx(curve.numpy())
    assert left.collections[0].get_paths()[-2].get_extents().contains(*toy.PEAKS[2])  # darkest
    assert right.lines[0].get_ydata() == pytest.approx(toy.Mixture()(curve).numpy())
    assert far.lines[0].get_ydata() == pytest.approx(nearest(curve).numpy())
    runs = finished[1]["runs"]
    *panels, trade = toy.plot_lam(runs, {lam: [curve, lam * curve] for lam in toy.LAMS}).axes
    for panel, run, point in zip(panels, runs, trade.lines):
        assert panel.get_title() == f"lam = {run['lam']:g}"
        offsets = panel.collections[-1].get_offsets().data
        assert offsets == pytest.approx(run["lam"] * curve.numpy())
        row = run["log"][-1]
        assert point.get_xydata().tolist() == [[row["entropy"], row["acc"]]]


def test_animation_moves_the_curve(toy):
    """Only the title and the curve differ; the window below the title has 450 x 400 pixels."""
    with Image.open(io.BytesIO(toy.animate([torch.zeros(400, 2), torch.ones(400, 2)]))) as image:
        first = image.convert("RGB").crop((0, 50, 450, 450)).tobytes()
        image.seek(1)
        assert image.n_frames == 2 and image.info["duration"] == 2000  # held
        assert image.convert("RGB").crop((0, 50, 450, 450)).tobytes() != first


def test_flags(toy, capsys):
    for flags in ("--steps 0", "--steps 1000000", "--seed -1", "--seed 4000"):
        with pytest.raises(SystemExit):
            toy.parse_args(flags.split())
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.endswith("steps must be above 0 and below a million, seed from 0 to 3999")
    args = toy.parse_args(["--quick"])
    assert args.steps == 1000 and args.out.name == "01_toy_gaussian_mixture_quick"
    assert toy.parse_args(["--quick", "--steps", "20"]).steps == 20
    with pytest.raises(SystemExit):
        toy.parse_args(["--help"])
    text = capsys.readouterr().out
    assert toy.__doc__ in text and "default: 7500" in text


@pytest.mark.parametrize("case", ["a file in the way", "no room", "Ctrl-C"])
def test_what_stops_it_is_told_in_one_line(tmp_path, monkeypatch, case):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt if case == "Ctrl-C" else OSError(28, "No space left on device")

    (tmp_path / "metrics.json").write_text("mine")
    out = tmp_path / "metrics.json" if case == "a file in the way" else tmp_path
    monkeypatch.setattr(sys, "argv", ["01", "--steps", "1", "--out", str(out)])
    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    words = {"a file in the way": "File exists", "no room": "No space", "Ctrl-C": "stopped; the"}
    assert words[case] in stopped.value.code and "\n" not in stopped.value.code
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
