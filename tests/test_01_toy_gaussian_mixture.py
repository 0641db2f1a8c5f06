import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ("toy.png", "lam.png", "training.gif")


def nearest(points: torch.Tensor) -> list[float]:
    """The distance of each point to its nearest other one, by a plain loop."""
    points = points.detach().double().tolist()
    return [min(math.dist(p, q) for q in points if q is not p) for p in points]


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    """A small finished run: its folder, its command and its metrics."""
    out = tmp_path_factory.mktemp("finished") / "toy"
    command = ["--steps", "12", "--device", "cpu", "--out", str(out)]
    return out, command, toy.main(command)


@pytest.fixture
def untrained(toy, monkeypatch):
    """Training is an error."""

    def train(*_):
        raise AssertionError("a training began")

    monkeypatch.setattr(toy, "train", train)


def test_mixture_has_the_authors_components(toy):
    """Their ten means and deviations, written down independently of the random generator."""
    means = [(3.518, -1.396), (3.655, -3.689), (-0.717, -2.271), (-4.360, -3.999), (-4.889, 3.612)]
    means += [(-1.320, 1.620), (-1.865, 1.854), (-2.787, 4.611), (4.060, -2.396), (0.136, 1.364)]
    sigmas = [1.055, 1.036, 1.025, 1.049, 1.022, 1.060, 1.005, 1.006, 1.022, 1.007]
    weights = [0.126, 0.104, 0.101, 0.113, 0.103, 0.099, 0.073, 0.100, 0.088, 0.094]
    for x, y in [(1, -2), (-3, 4), (4, -2)]:
        value = 0.0
        for (a, b), s, p in zip(means, sigmas, weights):
            square = (x - a) ** 2 + (y - b) ** 2
            value += p * 2 * math.pi * s**2 * math.exp(-square / (2 * s**2))
        # The written constants have three digits.
        assert toy.Mixture()(torch.tensor([x, y])).item() == pytest.approx(value, rel=5e-3)


def test_the_peaks_are_those_of_the_mixture(toy):
    """All points of a grid of 0.05 that are higher than their neighbours, and no others."""
    axis = torch.linspace(-9, 9, 361)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
    values = toy.Mixture()(grid)
    highest = torch.nn.functional.max_pool2d(values[None], 3, stride=1, padding=1)[0]
    found = grid[(values == highest) & (values > 0.1)]
    assert len(found) == len(toy.PEAKS) == 6
    distances = torch.cdist(torch.tensor(toy.PEAKS), found).amin(dim=1)
    torch.testing.assert_close(distances, torch.zeros(6), atol=1e-3, rtol=0)  # constants' digits
    assert values.max().item() == pytest.approx(1.433, abs=1e-3)  # the paper's highest


def test_hypernetwork_is_the_authors_mlp(toy):
    torch.manual_seed(0)
    hypernet = toy.Hypernetwork()
    assert sum(p.numel() for p in hypernet.parameters()) == 60 + 310 + 110 + 22
    z = torch.linspace(-1, 1, 4)[:, None]
    layers = list(hypernet.parameters())
    y = z
    for i in range(0, 8, 2):
        y = y @ layers[i].T + layers[i + 1]
        y = y.tanh() if i < 6 else y
    torch.testing.assert_close(hypernet(z), y)


def test_noise(toy):
    hypernet = toy.Hypernetwork()
    z = hypernet.noise(1000, torch.Generator().manual_seed(1), stratified=True)
    assert z.shape == (1000, 1)
    intervals = ((z[:, 0] + 1) / 2 * 1000).floor().long()
    assert intervals.sort().values.tolist() == list(range(1000))
    # Shuffled: the correlation with the order is of the size 1 / sqrt(1000).
    order = torch.stack([intervals.double(), torch.arange(1000.0).double()])
    assert torch.corrcoef(order)[0, 1].abs() < 0.15
    z = hypernet.noise(1000, torch.Generator().manual_seed(1))
    assert len(((z + 1) / 2 * 1000).floor().unique()) < 700  # of independent ones: 632
    assert z.min() > -1 and z.max() < 1 and z.mean().abs() < 0.1  # its deviation: 0.018


def test_objective(toy):
    """loss = lam * loss_acc - entropy + l2 * mean square norm, from its parts."""
    hypernet, mixture = toy.Hypernetwork(), toy.Mixture()
    z = hypernet.noise(20, torch.Generator().manual_seed(5))
    loss, loss_acc, entropy = toy.training_step(hypernet, mixture, z, lam=3.0)
    y = hypernet(z)
    logs = [math.log(d) for group in y.split(5) for d in nearest(group)]
    plain = torch.digamma(torch.tensor(20.0)) + sum(logs) / 20
    torch.testing.assert_close(entropy, plain, check_dtype=False)
    expected = -3.0 * mixture(y).mean() - plain + toy.L2 * (y**2).sum() / 20
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(loss_acc, -mixture(y).mean())


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_training_step_without_the_device(toy, device):
    """Shapes and devices of a step, without a GPU: a tensor made on the wrong device raises here,
    and so does reading a value back. Autograd cannot run backward on fake CUDA tensors where there
    is no GPU; on meta tensors it can."""
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        with torch.device(device):  # for the parameters; the step must find its device by itself
            hypernet = toy.Hypernetwork()
        z = hypernet.noise(10, stratified=True)
        loss, _, _ = toy.training_step(hypernet, toy.Mixture(device), z, lam=1.0)
        assert loss.device.type == device
        if device == "meta":
            loss.backward()
            assert all(p.grad.device.type == device for p in hypernet.parameters())


def test_spacing_is_the_distance_to_the_nearest(toy):
    path = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 1.0], [3.0, 5.0]])
    assert toy.spacing(path).tolist() == [3.0, 1.0, 1.0, 4.0]
    close = torch.stack([8 + 1e-4 * torch.arange(40), torch.full((40,), 8.0)], dim=1)
    torch.testing.assert_close(toy.spacing(close), torch.tensor(nearest(close)), check_dtype=False)


def test_evaluate(toy):
    generator = torch.Generator().manual_seed(3)
    away = torch.tensor([[0.0, 0.49]] * 5 + [[0.0, 0.51]])  # a path near five of the peaks
    path = torch.cat([torch.tensor(toy.PEAKS) + away, 20 + torch.rand(30, 2, generator=generator)])
    samples = 3 * torch.randn(50, 2, generator=generator)
    result = toy.evaluate(path, samples)
    assert result["peaks_reached"] == 5
    assert result["distance_to_peaks"] == pytest.approx([0.49] * 5 + [0.51], abs=1e-5)
    assert result["acc"] == pytest.approx(sum(toy.Mixture()(y).item() for y in samples) / 50)
    logs = sum(math.log(d) for d in nearest(samples)) / 50
    psi = torch.digamma(torch.tensor(50.0)).item()
    assert result["entropy"] == pytest.approx(psi + logs, rel=1e-5)

    # Spearman's formula, where no two values are the same; far away all values are 0.
    path = 6 * torch.rand(30, 2, generator=generator) - 3
    both = [toy.Mixture()(path).tolist(), nearest(path)]
    if len(set(both[1])) < 30:  # mutual neighbours: the order of equal ranks is that of argsort
        both[1] = toy.spacing(path).argsort().argsort().tolist()
    a, b = ([sorted(values).index(v) for v in values] for values in both)
    rho = 1 - 6 * sum((i - j) ** 2 for i, j in zip(a, b)) / (30 * (30**2 - 1))
    assert toy.evaluate(path, samples)["rank_correlation"] == pytest.approx(rho)


def test_training_finds_peaks(toy):
    """A thirteenth of the documented steps, one seed: not all peaks, but most."""
    args = toy.parse_args(["--steps", "600", "--device", "cpu"])
    run = toy.train(args, lam=1.5, seed=0)
    assert run["peaks_reached"] >= 4 and run["rank_correlation"] < -0.5
    first, last = (torch.tensor(run["curves"][i]) for i in (0, -1))
    assert toy.spacing(last).sum() > 3 * toy.spacing(first).sum()  # it unfolds


def test_a_training_depends_on_its_seed_alone(toy):
    args = toy.parse_args(["--steps", "20", "--device", "cpu"])
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs))
        runs.append(toy.train(args, lam=1.5, seed=seed) | dict(seconds=0))
    assert runs[0] == runs[1]
    assert runs[0]["curves"] != runs[2]["curves"]


def test_a_log_file_is_not_flooded(toy, capfd):
    begun = time.perf_counter()
    toy.train(toy.parse_args(["--steps", "300", "--device", "cpu"]), lam=1.5, seed=0)
    bars = capfd.readouterr().err.count("\r")
    assert bars <= time.perf_counter() - begun + 3  # one a second, the first and the last


def test_a_loss_that_is_not_finite_stops_the_run(toy, tmp_path, monkeypatch):
    nan = torch.tensor(math.nan, requires_grad=True)
    monkeypatch.setattr(toy, "training_step", lambda *_: (nan * 1, nan, nan))
    with pytest.raises(SystemExit, match="step 1: the loss is not finite"):
        toy.main(["--steps", "5", "--device", "cpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_small_run_writes_everything(toy, finished):
    out, _, metrics = finished
    assert {path.name for path in out.iterdir()} == {"metrics.json", *FIGURES}
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert [run["lam"] for run in metrics["runs"]] == [1.5, 0.15, 0.5, 5.0, 15.0]
    assert [len(run["curves"]) for run in metrics["runs"]] == [13, 1, 1, 1, 1]
    assert all(len(run["curves"][-1]) == 400 for run in metrics["runs"])
    names = ["settings", "runs", "command", "commit", "hardware", "torch"]
    assert list(metrics) == names
    settings = dict(script=toy.NAME, steps=12, lr=5e-3, lam=1.5, networks=80, seed=0)
    assert metrics["settings"] == settings
    for name in FIGURES:
        with Image.open(out / name) as image:
            assert 440 < image.width < 1500
    with Image.open(out / "training.gif") as image:
        assert image.n_frames > 10


def test_the_same_command_again_only_draws(toy, finished, untrained):
    out, command, metrics = finished
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for name in FIGURES:
        (out / name).unlink()
    assert toy.main(command) == metrics
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_more_seeds_train_only_what_is_missing(toy, finished, tmp_path, monkeypatch):
    out, command, metrics = finished
    (tmp_path / "metrics.json").write_text((out / "metrics.json").read_text())
    trained, train = [], toy.train
    monkeypatch.setattr(toy, "train", lambda *a: trained.append(a[1:]) or train(*a))
    more = toy.main([*command, "--out", str(tmp_path), "--seeds", "3"])
    assert trained == [(1.5, 1), (1.5, 2)]
    assert more["runs"][:5] == metrics["runs"]


def test_other_settings_are_refused(toy, finished, untrained):
    out, command, _ = finished
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for flag, value, theirs in [
        ("--steps", "30", "'steps': 12"),
        ("--lam", "2", "'lam': 1.5"),
        ("--networks", "10", "'networks': 80"),
        ("--lr", "1", "'lr': 0.005"),
        ("--seed", "1", "'seed': 0"),
    ]:
        with pytest.raises(SystemExit) as stop:
            toy.main([*command, flag, value])
        message = str(stop.value)
        assert f"other settings, {{{theirs}}}: remove {out} or use another --out" in message
        assert "\n" not in message
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": {"script": "02"}}'])
def test_a_damaged_or_foreign_file_is_left_alone(toy, tmp_path, untrained, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(SystemExit, match="metrics.json (is missing, damaged|has other settings)"):
        toy.main(["--device", "cpu", "--out", str(tmp_path)])
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("metrics.json", text)]


def test_under_results_nothing_is_trained(toy, finished, tmp_path, untrained):
    out, _, metrics = finished
    folder = tmp_path / "results" / "toy"
    with pytest.raises(SystemExit, match="metrics.json is missing"):
        toy.main(["--device", "cpu", "--out", str(folder)])
    assert not folder.exists()
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text((out / "metrics.json").read_text())
    assert toy.main(["--device", "cpu", "--out", str(folder)]) == metrics  # settings of the file
    for path in out.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_a_killed_run_goes_on_as_if_undisturbed(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "animate", lambda runs, file: file.touch())  # to save time
    flags = ["--steps", "100", "--device", "cpu", "--out"]
    killed, file = tmp_path / "killed", tmp_path / "killed" / "metrics.json"
    command = [sys.executable, "01_toy_gaussian_mixture.py", *flags, str(killed)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while not file.exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert 1 <= len(json.loads(file.read_text())["runs"]) < 5
    (killed / "new_metrics.json").write_text("half a fi")  # as if killed while it wrote
    again, undisturbed = (toy.main([*flags, str(tmp_path / name)]) for name in ("killed", "whole"))
    for runs in (again["runs"], undisturbed["runs"]):
        assert all(run.pop("seconds") >= 0 for run in runs)
    assert again["runs"] == undisturbed["runs"]
    for name in ("toy.png", "lam.png"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_animation_needs_no_other_figure(tmp_path):
    """In a fresh process, where nothing has chosen a backend yet."""
    code = "import importlib, sys; toy = importlib.import_module('01_toy_gaussian_mixture');"
    code += "curve = [[z / 100, 0.0] for z in range(400)];"
    code += "toy.animate([dict(curves=[curve, curve[::-1]])], sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "a.gif"], cwd=ROOT, check=True)
    with Image.open(tmp_path / "a.gif") as image:
        assert image.size == (450, 450) and image.n_frames == 2


def test_table(toy):
    names = ("acc", "entropy", "peaks_reached", "rank_correlation")
    numbers = {(1.5, 0): (0.8, 2.0, 6, -0.8), (0.5, 0): (0.4, 2.5, 5, -0.6)}
    numbers[1.5, 1] = (0.7, 2.2, 4, -0.6)
    runs = [dict(zip(names, n), lam=lam, seed=seed) for (lam, seed), n in numbers.items()]
    rows = toy.table(runs).splitlines()
    assert rows[2:] == [
        "| lam 0.5, seed 0 | 0.4 | 2.5 | 5 | -0.6 |",
        "| lam 1.5, seed 0 | 0.8 | 2 | 6 | -0.8 |",
        "| lam 1.5, seed 1 | 0.7 | 2.2 | 4 | -0.6 |",
        # Of two numbers: the mean, and their distance over the root of 2.
        "| lam 1.5, 2 seeds | 0.75 ± 0.071 | 2.1 ± 0.14 | 5 ± 1.4 | -0.7 ± 0.14 |",
    ]
    assert all(row.count("|") == 6 for row in rows)
    assert len(toy.table(runs[:2]).splitlines()) == 4  # one seed has no spread


def test_help_shows_the_defaults():
    command = [sys.executable, "01_toy_gaussian_mixture.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--lam" in done.stdout and "(default: 1.5)" in done.stdout


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--steps -3", "argument --steps: -3 is not a positive number"),
        ("--lam 0", "argument --lam: 0 is not a positive number"),
        ("--lr nan", "argument --lr: nan is not a positive number"),
        ("--lr inf", "argument --lr: inf is not a positive number"),
        ("--seeds 0", "argument --seeds: 0 is not a positive number"),
        ("--seed -1", "argument --seed: -1 is negative"),
        ("--networks 12", "argument --networks: 12 is not a multiple of 5"),
    ],
)
def test_bad_values(toy, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        toy.parse_args(flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.endswith(f"error: {message}\n")


def test_quick(toy):
    assert toy.parse_args(["--quick"]).steps == 1000
    assert toy.parse_args(["--quick", "--steps", "20"]).steps == 20


def test_a_file_in_the_way_of_the_folder(toy, tmp_path, untrained):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "toy"):
        with pytest.raises(SystemExit, match="cannot write there"):
            toy.main(["--device", "cpu", "--out", str(out)])
    assert (tmp_path / "file").read_text() == "mine"
