import contextlib
import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]


def test_mixture_has_the_authors_components(toy):
    """Their ten means and deviations, written down independently of the random generator."""
    mixture = toy.Mixture()
    means = [(3.518, -1.396), (3.655, -3.689), (-0.717, -2.271), (-4.360, -3.999), (-4.889, 3.612)]
    means += [(-1.320, 1.620), (-1.865, 1.854), (-2.787, 4.611), (4.060, -2.396), (0.136, 1.364)]
    sigmas = [1.055, 1.036, 1.025, 1.049, 1.022, 1.060, 1.005, 1.006, 1.022, 1.007]
    weights = [0.126, 0.104, 0.101, 0.113, 0.103, 0.099, 0.073, 0.100, 0.088, 0.094]
    value = 0.0
    for (a, b), s, p in zip(means, sigmas, weights):
        value += p * 2 * math.pi * s**2 * math.exp(-((1 - a) ** 2 + (-2 - b) ** 2) / (2 * s**2))
    # The written constants have three digits.
    assert mixture(torch.tensor([1.0, -2.0])).item() == pytest.approx(value, rel=5e-3)


def test_six_peaks(toy):
    peaks = toy.find_peaks()
    assert len(peaks) == 6
    heights = toy.Mixture()(peaks)
    assert heights.max().item() == pytest.approx(1.433, abs=1e-3)
    assert torch.dist(peaks[heights.argmax()], torch.tensor([3.75, -2.15])) < 0.06  # grid: 0.05
    # No peak can be left by a small step in any direction.
    for angle in torch.arange(0, 2 * math.pi, 0.5):
        step = 0.1 * torch.stack([angle.cos(), angle.sin()])
        assert (toy.Mixture()(peaks + step) < heights).all()


def test_hypernetwork_is_the_authors_mlp(toy):
    hypernet = toy.make_hypernetwork()
    assert sum(p.numel() for p in hypernet.parameters()) == 60 + 310 + 110 + 22
    assert hypernet(torch.zeros(4, 1)).shape == (4, 2)


def test_rank_correlation(toy):
    a = torch.tensor([1.0, 5.0, 2.0, 9.0, 3.0])
    assert toy.rank_correlation(a, a.exp()) == pytest.approx(1)
    assert toy.rank_correlation(a, -a) == pytest.approx(-1)
    # Ranks 0 3 1 4 2 and 1 3 0 4 2: 1 - 6 * (1 + 1) / (5 * 24)
    assert toy.rank_correlation(a, torch.tensor([2.0, 4.0, 1.0, 7.0, 3.0])) == pytest.approx(0.9)


def test_spacing_is_the_distance_to_the_nearest(toy):
    path = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 1.0], [3.0, 5.0]])
    expected = torch.tensor([3.0, 1.0, 1.0, 4.0])
    torch.testing.assert_close(toy.spacing(path), expected, check_dtype=False)
    close = torch.stack([8 + 1e-4 * torch.arange(40), torch.full((40,), 8.0)], dim=1)
    plain = [min(torch.dist(close[i], close[j]) for j in range(40) if j != i) for i in range(40)]
    torch.testing.assert_close(toy.spacing(close), torch.stack(plain), check_dtype=False)


def test_objective(toy):
    """loss = lam * loss_acc - entropy + l2 * mean square norm, from its parts."""
    hypernet, mixture = toy.make_hypernetwork(), toy.Mixture()
    torch.manual_seed(5)
    loss, loss_acc, entropy = toy.training_step(hypernet, mixture, 10, lam=3.0, l2=0.5)
    torch.manual_seed(5)
    y = hypernet(torch.rand(10, 1) * 2 - 1)
    nearest = [min(torch.dist(y[i], y[j]).item() for j in range(10) if j != i) for i in range(10)]
    plain = torch.digamma(torch.tensor(10.0)) + sum(math.log(d) for d in nearest) / 10
    torch.testing.assert_close(entropy, plain, check_dtype=False)
    expected = -3.0 * mixture(y).mean() - plain + 0.5 * (y**2).sum() / 10
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(loss_acc, -mixture(y).mean())


def test_small_run_writes_everything(toy, tmp_path):
    metrics = toy.main(
        ["--steps", "60", "--seeds", "2", "--animate", "--device", "cpu", "--out", str(tmp_path)]
    )
    names = ["config.json", "metrics.json", "log.csv", "toy.png", "lam.png", "training.gif"]
    assert all((tmp_path / name).stat().st_size > 0 for name in names)
    assert (tmp_path / "training.gif").stat().st_size < 2e6
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert [row["seed"] for row in metrics["seeds"]] == [0, 1]
    assert len(metrics["lams"]) == 5
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert len(rows) == 12  # first and last step for each of 5 lams, and of one seed more


def test_resume_keeps_finished_trainings(toy, tmp_path):
    arguments = ["--steps", "30", "--device", "cpu", "--out", str(tmp_path)]
    first = toy.main(arguments)
    checkpoint = tmp_path / "checkpoint.pt"
    content = torch.load(checkpoint, weights_only=True)
    kept = next(iter(content["finished"]))  # as if stopped after the first training: lam = 1.5
    finished = {kept: content["finished"][kept] | dict(seconds=-1.0)}
    torch.save(content | dict(finished=finished), checkpoint)
    again = toy.main([*arguments, "--resume"])
    assert [row["seconds"] == -1.0 for row in again["lams"]] == [False, False, True, False, False]
    for old, new in zip(first["lams"], again["lams"]):
        assert old | dict(seconds=0) == new | dict(seconds=0)


def test_resume_refuses_other_settings_and_damage(toy, tmp_path):
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--resume"]
    toy.main([*arguments, "--steps", "5"])
    config = (tmp_path / "config.json").read_text()
    for more in (["--resume"], []):
        with pytest.raises(SystemExit, match="has --steps 5, not 6"):
            toy.main(["--device", "cpu", "--out", str(tmp_path), "--steps", "6", *more])
    assert (tmp_path / "config.json").read_text() == config
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(SystemExit, match="damaged"):
        toy.main([*arguments, "--steps", "5"])
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"not a checkpoint"


def test_a_loss_that_is_not_finite_stops_the_run(toy, tmp_path, monkeypatch):
    nan = torch.tensor(math.nan, requires_grad=True)
    monkeypatch.setattr(toy, "training_step", lambda *_: (nan * 1, nan, nan))
    with pytest.raises(SystemExit, match="step 0: the loss is not finite"):
        toy.main(["--steps", "5", "--device", "cpu", "--out", str(tmp_path)])


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_training_step_without_the_device(toy, device):
    """Shapes and devices of a step, without a GPU: a tensor made on the wrong device raises here,
    and so does reading a value back. Autograd cannot run backward on fake CUDA tensors where there
    is no GPU; on meta tensors it can."""
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        with torch.device(device):  # for the parameters; the step must find its device by itself
            hypernet = toy.make_hypernetwork()
        mixture = toy.Mixture(device)
        loss, _, _ = toy.training_step(hypernet, mixture, 6, lam=1.0, l2=0.1)
        assert loss.device.type == device
        if device == "meta":
            loss.backward()
            assert all(p.grad.device.type == device for p in hypernet.parameters())


def test_help_shows_the_defaults():
    command = [sys.executable, "01_toy_gaussian_mixture.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--lam" in done.stdout and "(default: 1.5)" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "-3"], "-3 is not a positive whole number"),
        (["--lam", "0"], "0 is not a positive number"),
        (["--batch", "1"], "--batch must be at least 2"),
        (["--nonsense"], "unrecognized arguments"),
        (["--out", "README.md/folder"], "cannot write there"),
    ],
)
def test_bad_flags_are_one_line(toy, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        toy.main(["--device", "cpu", *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device(toy, capsys):
    with pytest.raises(SystemExit) as stop:
        toy.main(["--device", "cuda"])
    assert stop.value.code == 2
    assert "--device cpu" in capsys.readouterr().err
