"""The LeNet script against plain loops, torch.nn, the paper's counts, and against bad input."""

import dataclasses
import errno
import importlib
import inspect
import json
import math
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
MEASURES = ["none", "outputs", "weights", "variance", "ensemble"]
SMALL = "--device cpu --steps 8 --networks 2 --images 6 --shared-images 4"
SMALL += " --test-images 20 --test-networks 12 --averaged 20 --columns "


def small(lenet, flags):
    """Settings of one small column, named first in the flags."""
    (s,) = lenet.parse_args((SMALL + flags).split()).settings.values()
    return s


def command(data, out, flags):
    return [*(SMALL + flags).split(), "--data", str(data), "--out", str(out)]


def spread_model(lenet, s):
    """A hypernetwork whose networks have little in common."""
    torch.manual_seed(0)
    model = lenet.make_model(s)
    model.extractor[-1].weight.data *= 10
    return model


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def one_network(theta, n):
    return [layer[n : n + 1] for layer in theta]


def saved(file):
    return torch.load(file, weights_only=True)


def files_in(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def forbidden(*_, **__):
    raise AssertionError("this must not be called")


def interrupted(*_, **__):
    raise KeyboardInterrupt


# ---- Settings and arguments ----------------------------------------------------------------------
def test_help_names_each_setting(lenet, capsys):
    with pytest.raises(SystemExit, match="0"):
        lenet.main(["--help"])
    text = capsys.readouterr().out
    assert lenet.__doc__ in text
    for field in dataclasses.fields(lenet.Settings):
        assert "--" + field.name.replace("_", "-") in text and f"(c): {field.default}" in text


def test_flags_win_over_quick_and_quick_over_columns(lenet):
    assert lenet.parse_args([]).settings == lenet.COLUMNS
    assert lenet.parse_args([]).out == Path("runs/03_cifar_lenet")
    args = lenet.parse_args(["--quick", "--images", "70", "--constant-rate", "--columns", "a"])
    limits = dict(steps=200, test_images=1000, test_networks=20, averaged=500)
    expected = dataclasses.replace(lenet.COLUMNS["a"], images=70, constant_rate=True, **limits)
    assert args.settings == {"a": expected} and args.out == Path("runs/03_cifar_lenet_quick")
    quick = lenet.parse_args(["--quick", "--no-constant-rate"]).settings["b"]
    assert (quick.networks, quick.images, quick.constant_rate) == (5, 64, False)


WRONG = """--steps 0; --steps 1000000; --sgd-lr nan; --lam inf; --lam 0; --networks -3; --seed -1
--seed 4000; --columns d --networks 1; --columns d --shared-images 0; --diversity output
--model network; --dataset mnist; --device cuda; --columns e; --steps many"""


@pytest.mark.parametrize("words", WRONG.replace("\n", "; ").split("; "))
def test_wrong_flags(lenet, tmp_path, monkeypatch, capsys, words):
    """Exit code 2 before any work; the last line names the flag or the setting that is wrong."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(lenet, "load_data", forbidden)
    with pytest.raises(SystemExit) as stop:
        lenet.main([*words.split(), "--out", str(tmp_path / "runs")])
    wrong = words.split()[-2].strip("-").replace("-", "_")
    assert wrong in capsys.readouterr().err.splitlines()[-1].replace("-", "_")
    assert stop.value.code == 2 and not (tmp_path / "runs").exists()


# ---- Data ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dataset, folder, key", [
    ("cifar10", "cifar-10-batches-py", "labels"), ("cifar100", "cifar-100-python", "fine_labels")
])  # fmt: skip
@pytest.mark.parametrize("limit, val, test", [(10_000, 50, 100), (20, 20, 20)])
def test_load_data(lenet, data, dataset, folder, key, limit, val, test):
    """Against the pickles in numpy: the first images are for validation, the others for training.
    Float32: pixels below 4 after sums of 500,000 numbers."""
    files = sorted((data / folder).glob("data_batch_*")) or [data / folder / "train"]
    files += (data / folder).glob("test*")
    contents = [pickle.loads(file.read_bytes()) for file in files]
    pixels = np.concatenate([content["data"] for content in contents]).astype(float)
    pixels = pixels.reshape(600, 3, 32, 32)
    labels = sum([content[key] for content in contents], [])
    for colour in range(3):
        training = pixels[:500, colour]
        pixels[:, colour] = (pixels[:, colour] - training.mean()) / training.std()
    splits = lenet.load_data(lenet.Settings(dataset=dataset, test_images=limit), data, "cpu")
    expected = dict(train=(val, 500), val=(0, val), test=(500, 500 + test))
    assert list(splits) == list(expected)
    for split, (start, end) in expected.items():
        x, y = splits[split]
        assert x.dtype == torch.float32 and y.tolist() == labels[start:end]
        plain = torch.from_numpy(pixels[start:end])
        torch.testing.assert_close(x.double(), plain, rtol=0, atol=1e-5)


def test_no_data(lenet, data, tmp_path):
    """One line: which file to put where. There is no network here."""
    folder = tmp_path / "data"
    for state in ("missing", "damaged"):
        message = refused(lenet, command(folder, tmp_path / "out", "a"), tmp_path)
        assert f"cifar10 is {state} in {folder}" in message
        assert "put cifar-10-python.tar.gz there" in message
        shutil.copytree(data, folder, dirs_exist_ok=True)
        batch = folder / "cifar-10-batches-py/data_batch_3"
        batch.write_bytes(batch.read_bytes()[:-1])


def test_random_crops(lenet):
    """Each is a crop of its own image, every second mirrored; the first are the same for all."""
    y = torch.arange(5) % 4
    padded = torch.rand(5, 3, 36, 36) + 10 * torch.arange(5).view(5, 1, 1, 1)
    s = lenet.Settings(networks=3, images=40, shared_images=7)
    x, labels = lenet.random_crops(padded, y, s, generator_of(0))
    assert x.shape == (3, 40, 3, 32, 32)
    places = []
    for i in range(120):
        n, b = divmod(i, 40)
        image = x[n, b].flip(-1) if b % 2 == 1 else x[n, b]
        original = int(image.min() // 10)
        assert labels[n, b] == y[original]
        for row in range(5):
            for column in range(5):
                crop = padded[original, :, row : row + 32, column : column + 32]
                if torch.equal(image, crop):
                    places.append((row, column))
    assert len(places) == 120  # all are found, once
    assert len(set(places)) > 20  # of 25; 106 draws miss one of them with a chance of 1 %
    same = (x == x[0]).flatten(2).all(dim=2)
    assert same[1].tolist() == same[2].tolist() == [True] * 7 + [False] * 33
    again, _ = lenet.random_crops(padded, y, s, generator_of(0))
    assert torch.equal(again, x)


# ---- Networks ------------------------------------------------------------------------------------
def parameters(module):
    return sum(p.numel() for p in module.parameters())


def test_counts_of_the_paper(lenet):
    model = lenet.make_model(lenet.COLUMNS["d"])
    parts = [parameters(part) for part in (model.extractor, *model.generators)]
    assert parts == [290400, 193600, 223600, 323600, 4228800, 503200]
    assert parameters(model) == 5763200 + 1152  # the bias of the codes
    hundred = lenet.make_model(lenet.Settings(dataset="cifar100"))
    assert parameters(hundred.generators[-1]) == 3563200
    for dataset, weights in ("cifar10", 62006), ("cifar100", 69656):
        s = lenet.Settings(model="networks", networks=3, dataset=dataset)
        assert parameters(lenet.make_model(s)) == 3 * weights
        s = lenet.Settings(model="around mean", dataset=dataset)
        assert parameters(lenet.make_model(s).weights) == weights


@pytest.mark.parametrize("classes", [10, 100])
def test_target_network_is_lenet(lenet, classes):
    """Two networks against torch.nn modules, ReLU before pooling. Float32: sums of 400 terms."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 32, 32)
    theta = lenet.he_weights([*lenet.LAYERS, (classes, 85)], 2)
    logits = lenet.each_network(lenet.target_network, x, theta)
    for n in range(2):
        twin = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
        )  # fmt: skip
        layers = [module for module in twin if hasattr(module, "weight")]
        for layer, filters in zip(layers, theta):
            layer.weight.data = filters[n, :, :-1].reshape(layer.weight.shape)
            layer.bias.data = filters[n, :, -1].clone()
        torch.testing.assert_close(logits[n], twin(x[n]), rtol=1e-4, atol=1e-4)


def plain_mlp(module, x):
    """Three matrices with leaky ReLU between them."""
    for i in (0, 2, 4):
        x = module[i].weight @ x
        if i < 4:
            x = torch.where(x > 0, x, 0.05 * x)
    return x


def plain_weights(model, z):
    """W(E(z) + bias) of one network, one code after the other, of the size of He's weights."""
    codes = (plain_mlp(model.extractor, z) + model.bias).view(144, 8)
    theta = []
    used = 0
    for module, number, (filters, size) in zip(model.generators, [6, 16, 120, 1, 1], model.shapes):
        made = [plain_mlp(module, code) for code in codes[used : used + number]]
        used += number
        theta.append(torch.cat(made).view(filters, size) * math.sqrt(2 / (size - 1)))
    return theta


@torch.no_grad()
@pytest.mark.parametrize("column", ["c", "c+"])
def test_hypernetworks(lenet, column):
    """W(E + b), and mean + scale * (W(E + b) - W(b)), where E(0) = 0. Float32: sums of 400
    numbers of size 1."""
    model = spread_model(lenet, dataclasses.replace(lenet.COLUMNS[column], scale=0.3))
    z = model.draw_z(2, generator_of(0))
    assert z.shape == (2, 100) and not torch.equal(z[0], z[1])
    theta = model(z)
    for n in range(2):
        plain = plain_weights(model, z[n])
        if column == "c+":
            origin = plain_weights(model, torch.zeros(100))
            for k, mean in enumerate(model.weights):
                plain[k] = mean[0] + 0.3 * (plain[k] - origin[k])
        for ours, expected in zip(theta, plain):
            torch.testing.assert_close(ours[n], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("column, low, high", [("c", 0.9, 0.999), ("c+", 0.9, 0.9999),
                                               ("five", -0.1, 0.1)])  # fmt: skip
def test_networks_at_first(lenet, column, low, high):
    """Near-copies, but not the same, or unrelated, of He's size. Layer 3 has 120 codes: its size
    scatters by 5 %, and leaky ReLU adds a little. The likeness of (c) is 0.97 to 0.98."""
    torch.manual_seed(0)
    theta = lenet.sample(lenet.make_model(lenet.COLUMNS[column]), 20, generator_of(0))
    assert 0.7 < theta[2].square().mean() * 400 / 2 < 1.4
    vectors = F.normalize(theta[2].flatten(1), dim=1)
    others = ~torch.eye(len(vectors), dtype=torch.bool)
    assert low < (vectors @ vectors.T)[others].mean() < high


def test_each_optimizer_has_its_own_parameters(lenet):
    """SGD has ordinary networks, or the mean, Adam the rest."""
    for column, kinds in ("a", ["SGD"]), ("c", ["Adam"]), ("c+", ["SGD", "Adam"]):
        s = small(lenet, column + " --sgd-lr 0.3 --adam-lr 0.4")
        model = lenet.make_model(s)
        optimizers = lenet.make_optimizers(model, s)
        assert [type(optimizer).__name__ for optimizer in optimizers] == kinds
        mean = set(model.weights) if "SGD" in kinds else set()
        parts = dict(SGD=(mean, 0.3, 5e-4), Adam=(set(model.parameters()) - mean, 0.4, 0))
        for kind, optimizer in zip(kinds, optimizers):
            mine = set(optimizer.param_groups[0]["params"])
            facts = (mine, optimizer.defaults["lr"], optimizer.defaults["weight_decay"])
            assert facts == parts[kind]


# ---- The objective -------------------------------------------------------------------------------
def plain_diversity(kind, theta, probabilities, y):
    """From the probabilities (B, classes) of each network, and all weights."""
    n = len(probabilities)
    if kind == "none":
        return torch.tensor(0.0)
    if kind == "ensemble":  # what the log of the mean probability gains over the mean log
        gain = 0
        for b, label in enumerate(y):
            own = [p[b, label] for p in probabilities]
            gain += (sum(own) / n).log() - sum(p.log() for p in own) / n
        return 100 * gain / len(y)
    if kind == "outputs":
        points = [p.flatten() for p in probabilities]
    else:
        points = [torch.cat([layer[i].flatten() for layer in theta]) for i in range(n)]
    if kind == "variance":
        mean = sum(points) / n
        return 100 * (sum((point - mean) ** 2 for point in points) / (n - 1)).mean()
    logs = []
    for i in range(n):
        distances = [torch.dist(points[i], points[j]) for j in range(n) if j != i]
        logs.append(min(distances).log())
    return torch.digamma(torch.tensor(float(n))) + 100 * sum(logs) / n


@pytest.mark.parametrize("kind", MEASURES)
def test_objective(lenet, kind):
    """loss = lam * cross-entropy - ramp * diversity, each from plain loops; images 0 and 1 are
    shared. Float32: the entropy of weights is a difference of vectors of 62,006 numbers."""
    s = lenet.Settings(diversity=kind, shared_images=2, lam=70.0)
    model = spread_model(lenet, s)
    x = torch.randn(3, 4, 3, 32, 32)
    y = torch.randint(10, (3, 4))
    x[:, :2] = x[0, :2].clone()
    y[:, :2] = y[0, :2].clone()
    z = model.draw_z(3, None)
    result = lenet.training_step(model, z, x, y, s, 0.3)
    theta = model(z)
    probabilities = []
    loss_acc = 0
    hits = 0
    for n in range(3):
        logits = lenet.target_network(x[n : n + 1], one_network(theta, n))[0]
        loss_acc += F.cross_entropy(logits, y[n]) / 3
        hits += (logits.argmax(dim=1) == y[n]).sum().item()
        probabilities.append(logits[:2].double().softmax(dim=1))
    entropy = plain_diversity(kind, lenet.fix_gauge(theta), probabilities, y[0, :2]).float()
    torch.testing.assert_close(result["loss_acc"], loss_acc)
    torch.testing.assert_close(result["entropy"], entropy, rtol=1e-4, atol=1e-4)
    loss = 70 * loss_acc - 0.3 * entropy
    torch.testing.assert_close(result["loss"], loss, rtol=1e-4, atol=1e-3)
    assert result["acc"].item() == pytest.approx(hits / 12)


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("column", ["five", "d", "d+"])
def test_without_the_device(lenet, device, column):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    with FakeTensorMode() if device == "cuda" else nullcontext():
        with torch.device(device):  # for the parameters; the rest must find it by itself
            model = lenet.make_model(small(lenet, column))
            padded = torch.rand(20, 3, 36, 36)
            y = torch.zeros(20, dtype=torch.long)
        for kind in MEASURES:
            s = small(lenet, f"{column} --diversity {kind}")
            batch = lenet.random_crops(padded, y, s, None)
            result = lenet.training_step(model, model.draw_z(2, None), *batch, s, 0.5)
            assert all(value.device.type == device for value in result.values())
            if device == "meta":
                result["loss"].backward()
                assert all(p.grad.device.type == device for p in model.parameters())
        theta = lenet.gaussian_like(lenet.sample(model, 2, None), 6, None)
        assert lenet.predict(theta, padded[:, :, :32, :32]).device.type == device
        assert lenet.average(model, 2, None)[0].device.type == device


# ---- Training ------------------------------------------------------------------------------------
def test_lr_factor(lenet):
    """By hand: up to 1 in 200 steps, or a fifth, and down to 0; (b) from 10 to 1, then 1."""
    falling = {0: 1 / 200, 99: 1 / 2, 199: 0.801, 500: 0.5, 999: 0.001}
    b = {0: 10 / 200, 99: 5, 199: 6.418, 250: 5.5, 400: 2.8, 500: 1, 999: 1}
    for constant, by_hand in (False, falling), (True, b):
        s = lenet.Settings(model="networks", steps=1000, constant_rate=constant)
        factors = [lenet.lr_factor(s, step) for step in by_hand]
        assert factors == pytest.approx(list(by_hand.values()))
    short = lenet.Settings(steps=10)
    assert [lenet.lr_factor(short, step) for step in (0, 1)] == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize("steps, networks, taken", [
    (20, 1, range(11, 21)), (40, 1, range(22, 41, 2)), (1000, 2, [600, 700, 800, 900, 1000]),
    (40, 5, [30, 40]), (1235, 10, [1235]),
])  # fmt: skip
def test_ten_networks_of_the_chains(lenet, tmp_path, monkeypatch, steps, networks, taken):
    """Of (b): from the second half, equally far apart, all chains at once, the last included. A
    network is one number here, that of the step. Also the ramp of each step."""
    ramps = []

    def counting_step(model, z, x, y, s, ramp):
        model.weights[0].data += 1
        ramps.append(ramp)
        return dict(loss=model.weights[0].sum())

    chains = lenet.Networks([torch.zeros(networks, 1, 1)])
    monkeypatch.setattr(lenet, "make_model", lambda s: chains)
    monkeypatch.setattr(lenet, "training_step", counting_step)
    monkeypatch.setattr(lenet, "validate", lambda *_: {})
    s = small(lenet, f"b --steps {steps} --networks {networks} --sgd-lr 0")
    data = {"train": (torch.zeros(9, 3, 32, 32), torch.zeros(9, dtype=torch.long))}
    model, log = lenet.train(s, data, tmp_path / "checkpoint.pt")
    assert model.weights[0].view(-1, networks).tolist() == [[number] * networks for number in taken]
    assert len(model.weights[0]) == 10 and log[-1]["step"] == steps and 20 <= len(log) <= 40
    assert ramps == [min(1, step / (steps / 2)) for step in range(steps)]


@pytest.mark.parametrize("flags, rates", [
    ("b", (10, 4, 1)), ("five --seed 2", (1, 2 / 3, 1 / 3)), ("c+", (1, 2 / 3, 1 / 3))
])  # fmt: skip
def test_networks_follow_their_own_gradients(lenet, data, tmp_path, flags, rates):
    """The whole of train() against torch's SGD on the loss of one network alone, and, of the mean
    without deviations, on the mean loss of all. A factor lam or N would move them by as much."""
    s = small(lenet, flags + " --steps 3 --networks 3 --sgd-lr 0.01 --scale 0 --lam 70")
    data = lenet.load_data(s, data, "cpu")
    lenet.train(s, data, tmp_path / "checkpoint.pt")
    trained = saved(tmp_path / "checkpoint.pt")["model"]
    first_seed = 10**6 * (1 + s.seed)
    torch.manual_seed(first_seed)
    model = lenet.make_model(s)
    x, y = data["train"]
    padded = F.pad(x, [2, 2, 2, 2])
    for i in range(len(model.weights[0])):
        start = [layer.detach()[i : i + 1] for layer in model.weights]
        theta = [layer.clone().requires_grad_() for layer in start]
        sgd = torch.optim.SGD(theta, momentum=0.9, weight_decay=5e-4, nesterov=True)
        for step in range(3):
            generator = generator_of(first_seed + 1 + step)
            model.draw_z(3, generator)  # drawn first
            images, labels = lenet.random_crops(padded, y, s, generator)
            losses = []
            for n in range(3):
                logits = lenet.target_network(images[n : n + 1], theta)[0]
                losses.append(F.cross_entropy(logits, labels[n]))
            loss = sum(losses) / 3 if flags == "c+" else losses[i]
            sgd.param_groups[0]["lr"] = 0.01 * rates[step]
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        for k, alone in enumerate(theta):
            moved = (alone - start[k]).abs().max().item()
            ours = trained[f"weights.{k}"][i : i + 1]
            torch.testing.assert_close(ours, alone, rtol=0, atol=0.01 * moved)


def test_seeds_of_evaluation_are_not_those_of_training(lenet):
    """Training has (1 + seed) * 10^6 + 0 to 10^6; torch uses the last 32 bits of a seed."""
    assert {lenet.VALIDATION, lenet.TEST} == {1, 2}
    assert (1 + 3999) * 10**6 + 10**6 < 2**32  # the last that Settings allows


def test_gradients_of_the_mean_are_not_clipped(lenet, data, tmp_path, monkeypatch):
    """Those of E, W and bias are, together, to norm 5."""
    norms = dict(SGD=[], Adam=[])

    def step(optimizer):
        squares = [p.grad.square().sum() for p in optimizer.param_groups[0]["params"]]
        norms[type(optimizer).__name__].append(sum(squares).sqrt().item())

    training_step = lenet.training_step

    def steep(*args):
        result = training_step(*args)
        return dict(result, loss=1e6 * result["loss"])

    monkeypatch.setattr(lenet, "training_step", steep)
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    monkeypatch.setattr(torch.optim.Adam, "step", step)
    s = small(lenet, "d+ --steps 2")
    lenet.train(s, lenet.load_data(s, data, "cpu"), tmp_path / "checkpoint.pt")
    assert min(norms["SGD"]) > 1000 and norms["Adam"] == pytest.approx([5, 5], rel=1e-3)


@pytest.mark.parametrize("column", ["five", "d", "d+"])
def test_it_learns(lenet, data, tmp_path, column):
    """Made-up patterns, a short life: far above the 10 % of chance. The log has the last step, and
    ten networks of the model that is returned, on validation images."""
    s = small(lenet, column + " --steps 60 --images 16 --sgd-lr 0.02")
    data = lenet.load_data(s, data, "cpu")
    model, log = lenet.train(s, data, tmp_path / "checkpoint.pt")
    row = log[-1]
    assert row["one"] > 50 and row["step"] == 60
    assert row["loss"] == pytest.approx(s.lam * row["loss_acc"] - row["entropy"], rel=1e-4)
    x, y = data["val"]
    theta = lenet.sample(model, 10, generator_of(lenet.VALIDATION))
    assert lenet.evaluate(lenet.predict(theta, x), y).items() < row.items()


# ---- Evaluation ----------------------------------------------------------------------------------
@pytest.mark.parametrize("number, votes", [(23, 2), (7, 1), (1, 1)])
def test_evaluate(lenet, number, votes):
    """Against loops over networks and images: 23 networks make two votes of ten, none is in both;
    fewer than ten make one of all. With ties: the smallest class wins."""
    torch.manual_seed(0)
    y = torch.randint(4, (60,))
    probabilities = (2 * torch.randn(number, 60, 4) + F.one_hot(y, 4)).softmax(dim=-1)
    answers = probabilities.argmax(dim=-1).tolist()
    size = min(10, number)
    expected = dict(one=0, ten=0, disagree=0, nll_one=0, nll_ten=0)
    ties = 0
    for b, label in enumerate(y.tolist()):
        for n in range(number):
            expected["one"] += 100 * (answers[n][b] == label) / number / 60
            expected["nll_one"] -= math.log(probabilities[n, b, label]) / number / 60
            for m in range(n):
                pairs = number * (number - 1) / 2
                expected["disagree"] += 100 * (answers[n][b] != answers[m][b]) / pairs / 60
        for group in range(votes):
            networks = range(group * size, group * size + size)
            classes = [answers[n][b] for n in networks]
            counts = [classes.count(k) for k in range(4)]
            ties += counts.count(max(counts)) > 1
            expected["ten"] += 100 * (counts.index(max(counts)) == label) / votes / 60
            mean = sum(probabilities[n, b, label].item() for n in networks) / size
            expected["nll_ten"] -= math.log(mean) / votes / 60
    assert ties > 5 or number == 1
    assert lenet.evaluate(probabilities, y) == pytest.approx(expected, rel=1e-5)


def test_gaussian_like(lenet):
    """Mean and covariance, between layers too, of 40,000 draws, like 5 networks: an entry has a
    standard error of at most sqrt(2 / 40,000) times the largest variance, if that is above 1."""
    torch.manual_seed(0)
    points = torch.randn(5, 6) @ torch.randn(6, 6) + 3
    theta = [points[:, :4].reshape(5, 2, 2), points[:, 4:].reshape(5, 1, 2)]
    drawn = lenet.gaussian_like(theta, 40_000, generator_of(0))
    assert [layer.shape for layer in drawn] == [(40_000, 2, 2), (40_000, 1, 2)]
    vectors = torch.cat([layer.flatten(1) for layer in drawn], dim=1)
    error = 5 * (2 / 40_000) ** 0.5 * points.var(dim=0).max()
    assert points.var(dim=0).max() > 1
    assert (vectors.T.cov() - points.T.cov()).abs().max() < error
    assert (vectors.mean(dim=0) - points.mean(dim=0)).abs().max() < error


@torch.no_grad()
def test_analyse(lenet):
    """Networks, their average and Gaussian ones, one network at a time, on images of two portions;
    250 networks are three portions. Float32: an answer of 3,600 may differ."""
    s = small(lenet, "d --averaged 250")
    model = spread_model(lenet, s)
    data = {}
    for split in ("val", "test"):
        data[split] = (torch.randn(300, 3, 32, 32), torch.randint(10, (300,)))
    results = lenet.analyse(model, s, data)
    generator = generator_of(lenet.TEST)
    networks = lenet.sample(model, 12, generator)
    many = model(model.draw_z(250, generator))
    average = [layer.mean(dim=0, keepdim=True) for layer in many]
    gaussian = lenet.gaussian_like(lenet.sample(model, 500, generator), 12, generator)
    for split, (x, y) in data.items():
        assert list(results[split]) == ["networks", "average", "gaussian"]
        for kind, theta in dict(networks=networks, average=average, gaussian=gaussian).items():
            hits = []
            for n in range(len(theta[0])):
                logits = lenet.target_network(x[None], one_network(theta, n))[0]
                hits.append((logits.argmax(dim=1) == y).float().mean().item())
            assert results[split][kind]["one"] == pytest.approx(100 * np.mean(hits), abs=0.03)
    s = small(lenet, "five")
    assert list(lenet.analyse(lenet.make_model(s), s, data)["test"]) == ["networks"]


# ---- Figure and table ----------------------------------------------------------------------------
@pytest.fixture
def runs(lenet):
    """Of (d+) two seeds, another lam, CIFAR-100, and (b), that has no average."""

    def run(name, one, **changes):
        test = dict(networks=dict(one=one, ten=one + 4, disagree=14.0, nll_one=0.8123, nll_ten=0.7))
        if name != "b":
            test["average"] = dict(one=one + 1)
            test["gaussian"] = dict(one=one - 7, ten=one - 5)
        s = dataclasses.replace(lenet.COLUMNS[name.split("/")[-1]], **changes)
        return dict(name=name, settings=s, seconds=61.7, results=dict(test=test))

    lam = run("lam9/d+", 65.0, lam=9.0)
    hundred = run("cifar100/d+", 40.0, dataset="cifar100")
    return [hundred, run("d+", 70.0), lam, run("seed1/d+", 73.0, seed=1), run("b", 60.0)]


def test_table(lenet, runs):
    """The standard deviation of 70 and 73 is 3 / sqrt(2)."""
    tables = []
    for part in lenet.table(runs).strip().split("\n\n"):
        lines = part.splitlines()
        assert len({len(line) for line in lines}) == 1 and len(lines[0]) < 100
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        tables.append({row[0]: row[1:] for row in rows})
    first, second = tables
    assert list(first) == list(second) == ["run", "---", "cifar100/d+", "d+", "lam9/d+", "b"]
    assert first["run"] == ["one", "ten", "average", "disagree", "seconds"]
    assert first["d+"] == ["71.50 ± 2.12", "75.50 ± 2.12", "72.50 ± 2.12", "14.00 ± 0.00", "62"]
    assert first["lam9/d+"] == ["65.00", "69.00", "66.00", "14.00", "62"]
    assert first["b"] == ["60.00", "64.00", "", "14.00", "62"]
    assert second["run"] == ["Gaussian: one", "Gaussian: ten", "NLL: one", "NLL: ten", "seconds"]
    assert second["lam9/d+"] == ["58.00", "60.00", "0.8123", "0.7000", "62"]
    assert second["b"] == ["", "", "0.8123", "0.7000", "62"]


def test_plot_votes(lenet, runs):
    """Points where they belong, of CIFAR-10 alone; the rule of votes, by hand."""
    (ax,) = lenet.plot_votes(runs).axes
    drawn = {}
    rules = []
    for line in ax.lines:
        x, y = line.get_xydata().T
        if len(x) == 1:
            drawn[x[0], y[0]] = (line.get_color(), line.get_fillstyle())
        else:
            rules.append((x, y))
    expected = {(one, ten): ("grey", "full") for one, ten in lenet.PAPER.values()}
    for one in (65, 70, 73):
        expected[one, one + 4] = ("C1", "full")
        expected[one, one + 1] = ("C1", "none")
    expected[60, 64] = ("black", "full")
    assert drawn == expected and len(lenet.PAPER) == 3
    assert {"d+", "lam9/d+", "b"} < {text.get_text().strip() for text in ax.texts}
    for d, (x, y) in zip((0, 10, 15, 20, 25, 30), rules, strict=True):
        assert np.allclose(y, x + 0.21 * d * d / (100 - x))


# ---- The script ----------------------------------------------------------------------------------
def test_the_command_again(lenet, data, tmp_path, monkeypatch, capsys):
    """All columns; then the same command trains nothing and draws again, and --draw needs neither
    data nor weights: the same bytes."""
    out = tmp_path / "below"
    argv = command(data, out, " ".join(lenet.COLUMNS) + " --networks 5")
    runs = lenet.main(argv)
    text = capsys.readouterr().out
    before = files_in(out)
    assert [run["name"] for run in runs] == sorted(lenet.COLUMNS)
    assert len(before) == 2 * len(runs) + 1  # checkpoint.pt, metrics.json; one picture
    assert before[out / "votes.png"].startswith(b"\x89PNG")
    for run in runs:
        folder = out / run["name"]
        metrics = json.loads(before[folder / "metrics.json"])
        assert {"command", "commit", "hardware", "threads", "torch", "results"} < set(metrics)
        assert [row["step"] for row in metrics["log"]] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert 0 < metrics["seconds"] == sum(row["seconds"] for row in metrics["log"]) < 100
        theta = lenet.sample(lenet.load(folder / "checkpoint.pt"), 12, generator_of(0))
        assert next(lenet.load(folder / "checkpoint.pt", "meta").parameters()).device.type == "meta"
        assert len(theta[0]) == dict(a=5, b=10, five=5).get(run["name"], 12)
        assert f"{metrics['results']['test']['networks']['one']:#.4g}" in text

    for name in ("load_data", "train", "analyse"):
        monkeypatch.setattr(lenet, name, forbidden)
    (out / "votes.png").unlink()
    assert lenet.main(argv) == runs and files_in(out) == before
    for file in [out / "votes.png", *out.rglob("*.pt")]:
        file.unlink()
    assert lenet.main(["--draw", "--out", str(out)]) == runs
    assert (out / "votes.png").read_bytes() == before[out / "votes.png"]
    assert capsys.readouterr().out == text + text
    names = [run["name"] for run in lenet.main(["--draw", "--out", str(tmp_path)])]
    assert names == ["below/" + run["name"] for run in runs]


def assert_same_run(whole, other):
    """Models, snapshots, logs and results of the run in each of two folders, bit for bit."""
    numbers = []
    tensors = []
    for out in (whole, other):
        (file,) = out.glob("*/metrics.json")
        metrics = json.loads(file.read_text())
        checkpoint = saved(file.with_name("checkpoint.pt"))
        assert checkpoint["optimizers"] == []  # a finished run keeps none
        for row in metrics["log"] + checkpoint["log"]:
            del row["seconds"]
        names = {path.name for path in out.rglob("*")}
        numbers.append([metrics["log"], checkpoint["log"], metrics["results"], names])
        tensors.append(list(checkpoint["model"].values()) + sum(checkpoint["snapshots"], []))
    assert numbers[0] == numbers[1] and len(tensors[0]) == len(tensors[1])
    assert all(torch.equal(a, b) for a, b in zip(*tensors))


def dying(lenet, last, death):
    """A training step that dies when it is called for the last time."""
    training_step = lenet.training_step
    calls = []

    def step(*args):
        calls.append(1)
        if len(calls) == last:
            death()
        return training_step(*args)

    return step


@pytest.mark.parametrize("column", ["b", "d+"])
def test_a_stopped_run_goes_on(lenet, data, tmp_path, monkeypatch, column):
    """Stopped between two rows of the log, in the last step, and in the analysis: the same bits as
    undisturbed. A row is two steps long."""
    lenet.main(command(data, tmp_path / "whole", column + " --steps 42"))
    argv = command(data, tmp_path / "stopped", column + " --steps 42")
    for last, step in (24, 22), (20, 40):  # the second life begins at step 22
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(lenet, "training_step", dying(lenet, last, interrupted))
            lenet.main(argv)
        checkpoint = saved(tmp_path / "stopped" / column / "checkpoint.pt")
        assert checkpoint["log"][-1]["step"] == step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lenet, "analyse", interrupted)
        lenet.main(argv)
    monkeypatch.setattr(lenet, "training_step", forbidden)
    lenet.main(argv)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


CHILD = """
import importlib, os, signal, sys
import conftest, test_03_cifar_lenet as tests
lenet = importlib.import_module("03_cifar_lenet")
def death():
    os.kill(os.getpid(), signal.SIGKILL)
lenet.training_step = tests.dying(lenet, int(sys.argv[1]), death)
lenet.main(sys.argv[2:])
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_killed_and_then_two_processes_at_once(lenet, data, tmp_path):
    """kill -9 in step 24, then twice the same command in the same folder: both end well, and with
    the bits of an undisturbed run. tests/kill.py kills at any moment."""
    out = tmp_path / "killed"
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"

    def start(last):
        words = [sys.executable, "-c", CHILD, str(last), *command(data, out, "b --steps 42")]
        environment = dict(os.environ, PYTHONPATH=path)
        return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)

    killed = start(24)
    _, error = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, error
    assert saved(out / "b/checkpoint.pt")["log"][-1]["step"] == 22
    for process in [start(0), start(0)]:
        _, error = process.communicate()
        assert process.returncode == 0, error
    lenet.main(command(data, tmp_path / "whole", "b --steps 42"))
    assert_same_run(tmp_path / "whole", out)


COMMON = "write read commit percent mean_nll gaussian_like cell check_folder read_runs "
SAME = {
    "02_mnist_hypernet": COMMON,
    "04_cifar_resnet32": COMMON + "parse_args random_crops Networks AroundMean make_optimizers "
    "lr_factor save resume load sample evaluate colour_of table",
}


@pytest.mark.parametrize("name", SAME)
def test_what_the_scripts_share_is_word_for_word_the_same(lenet, name):
    """So that what is tested here need not be tested there."""
    other = importlib.import_module(name)
    for part in SAME[name].split():
        assert inspect.getsource(getattr(lenet, part)) == inspect.getsource(getattr(other, part))


# ---- Bad input: one line, and nothing is overwritten ---------------------------------------------
def refused(lenet, argv, folder):
    """The message of a command that must stop without a change to the files in a folder."""
    before = files_in(folder)
    with pytest.raises(SystemExit) as stop:
        lenet.main(argv)
    assert files_in(folder) == before
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code
    return stop.value.code


class Hostile:
    """Unpickled by the usual pickle, it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["metrics.json", "checkpoint.pt"])
@pytest.mark.parametrize("kind", ["settings", "script", "half", "text", "no record", "hostile"])
def test_other_files_are_refused_before_any_work(lenet, data, tmp_path, monkeypatch, name, kind):
    """In the folder of the second column, so that the first must not begin."""
    lenet.main(command(data, tmp_path, "a"))
    monkeypatch.setattr(lenet, "load_data", forbidden)
    if name == "checkpoint.pt":
        (tmp_path / "a/metrics.json").unlink()  # of a run that is not finished
    file = tmp_path / "a" / name
    victim = tmp_path / "executed"
    content = file.read_bytes()
    torch.save(dict(log=Hostile(victim)), tmp_path / "hostile")
    file.write_bytes({
        "settings": content,
        "script": content.replace(b"03_cifar_lenet", b"02_mnist_hyper"),
        "half": content[: len(content) // 2],
        "text": b"hello",
        "no record": b"{}",
        "hostile": (tmp_path / "hostile").read_bytes(),
    }[kind])  # fmt: skip
    flags = "b a --seed 1" if kind == "settings" else "b a"
    message = refused(lenet, command(data, tmp_path, flags), tmp_path)
    reason = "a run of other settings" if kind == "settings" else "damaged, or no run of 03_cifar"
    assert f"{file} is {reason}" in message and "choose another --out" in message
    assert not victim.exists()
    if kind == "hostile":
        torch.load(file, weights_only=False)
        assert victim.exists()  # the file would have done it


def test_a_loss_that_is_not_finite_stops_the_run(lenet, data, tmp_path, monkeypatch):
    """Nothing is written after the last good state. A rate that is too large shows at once."""
    training_step = lenet.training_step
    calls = []

    def broken(*args):
        calls.append(1)
        result = training_step(*args)
        return dict(result, entropy=torch.tensor(math.nan)) if len(calls) == 5 else result

    file = tmp_path / "checkpoint.pt"
    s = small(lenet, "a --sgd-lr 1e30")
    data = lenet.load_data(s, data, "cpu")
    with pytest.raises(SystemExit, match="the loss is not finite: try a smaller rate"):
        lenet.train(s, data, file)
    assert not files_in(tmp_path)
    monkeypatch.setattr(lenet, "training_step", broken)
    with pytest.raises(SystemExit, match="the loss is not finite"):
        lenet.train(small(lenet, "d"), data, file)
    assert list(files_in(tmp_path)) == [file] and len(saved(file)["log"]) == 4


def run_as_script(monkeypatch, argv):
    """What the shell prints at last."""
    monkeypatch.setattr(sys, "argv", ["03_cifar_lenet.py", *argv])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "03_cifar_lenet.py"), run_name="__main__")
    assert "\n" not in stop.value.code
    return stop.value.code


def test_a_full_disk_keeps_the_last_good_state(lenet, data, tmp_path, monkeypatch):
    """A disk that takes half of the third file."""
    write_bytes = Path.write_bytes
    calls = []

    def full(file, content):
        calls.append(1)
        if len(calls) < 3:
            return write_bytes(file, content)
        write_bytes(file, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    argv = command(data, tmp_path, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        message = run_as_script(patch, argv)
    assert "No space left on device" in message and "is there room" in message
    file = tmp_path / "a/checkpoint.pt"
    assert list(files_in(tmp_path)) == [file] and len(saved(file)["log"]) == 2
    (run,) = lenet.main(argv)
    assert len(run["log"]) == 8


def test_errors_of_the_shell(data, tmp_path, monkeypatch):
    """--out is a file; nothing to draw; Ctrl-C."""
    file = tmp_path / "file"
    file.write_text("mine")
    assert str(file) in run_as_script(monkeypatch, command(data, file, "a"))
    assert file.read_text() == "mine"
    message = run_as_script(monkeypatch, ["--draw", "--out", str(tmp_path)])
    assert message == f"no finished run in {tmp_path}"
    monkeypatch.setattr("torchvision.datasets.CIFAR10", interrupted)
    message = run_as_script(monkeypatch, command(data, tmp_path / "out", "a"))
    assert message == "stopped; the same command goes on"


def test_commit_without_git(lenet, tmp_path, monkeypatch):
    assert "\n" not in lenet.commit() and "fatal" not in lenet.commit()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lenet.commit() == "unknown"
