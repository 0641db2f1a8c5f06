"""Tests of the LeNet script, and of what the ResNet-32 script has in common with it: a test that
takes `script` runs on both, with small hypernetworks, few images and (ResNet) one block a stage."""

import argparse
import contextlib
import functools
import importlib
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
FAKE = ["--fake-data", "--device", "cpu"]
MEASURES = ["outputs", "weights", "variance", "ensemble", "none"]


@functools.cache
def few_images(load_data, dataset: str) -> dict:
    args = dict(dataset=dataset, fake_data=True, quick=False, device="cpu")
    data = load_data(argparse.Namespace(**args))
    numbers = dict(train=50, val=20, test=40, other=40)
    return {split: (x[: numbers[split]], y[: numbers[split]]) for split, (x, y) in data.items()}


def shrink(script, put) -> None:
    """Every column in a second or two; `put` is setattr, or one that is undone after the test."""
    tiny = dict(steps=8, images=6, shared=4, rows=2, tested=12, averaged=20, moments=30)
    recipes = {
        column: recipe | {k: min(v, recipe[k]) for k, v in tiny.items() if k in recipe}
        for column, recipe in script.RECIPES.items()
    }
    for recipe in recipes.values():
        if recipe["codes"]:
            recipe |= dict(networks=2, means=min(2, recipe["means"]))
    load_data, mlp = script.load_data, script.mlp

    def narrow(first, *hidden):
        *hidden, last = hidden
        return mlp(first, *(width // 8 for width in hidden), last)

    put(script, "RECIPES", recipes)
    put(script, "load_data", lambda args: few_images(load_data, args.dataset))
    put(script, "mlp", narrow)
    if hasattr(script, "BLOCKS"):
        put(script, "BLOCKS", 1)


@pytest.fixture(params=["03_cifar_lenet", "04_cifar_resnet32"])
def script(request, monkeypatch):
    script = importlib.import_module(request.param)
    shrink(script, monkeypatch.setattr)
    return script


@pytest.fixture
def small(lenet, monkeypatch):
    shrink(lenet, monkeypatch.setattr)
    return lenet


def settings(script, column: str, **changes) -> argparse.Namespace:
    (c,) = script.parse_args([*FAKE, "--columns", column]).runs
    vars(c).update(changes)
    if c.codes is None:
        c.means = c.networks
    return c


def data_of(script, dataset: str = "cifar10") -> dict:
    return script.load_data(argparse.Namespace(dataset=dataset))


def shapes_of(script, classes: int = 10) -> list[tuple[int, int]]:
    if hasattr(script, "HIDDEN"):
        return [*script.HIDDEN, (classes, 85)]
    return [shape for group in script.target_shapes(classes) for shape in group]


def model_of(script, column: str = "d", **changes):
    return script.make_model(settings(script, column, **changes), "cpu")[0]


def spread_model(script):
    """A hypernetwork whose networks have little in common."""
    model = model_of(script)
    model.extractor[-1].weight.data *= 10
    return model


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def saved(file: Path) -> dict:
    return torch.load(file, weights_only=True)


def tensors(checkpoint: dict) -> list[torch.Tensor]:
    return [*checkpoint["model"].values(), *(t for theta in checkpoint["chain"] for t in theta)]


def without_seconds(file: Path) -> dict:
    record = json.loads(file.read_text())
    return {name: value for name, value in record.items() if not name.endswith("_seconds")}


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


# ---- counts and architecture ---------------------------------------------------------------------


def test_counts_of_the_paper(lenet):
    assert sum(f * k for f, k in shapes_of(lenet, 10)) == 62006
    assert sum(f * k for f, k in shapes_of(lenet, 100)) == 69656
    hypernet = model_of(lenet)
    parts = [parameters(part) for part in (hypernet.extractor, *hypernet.generators)]
    assert parts == [290400, 193600, 223600, 323600, 4228800, 503200]
    assert parameters(hypernet) == 5763200 + 1152
    assert parameters(model_of(lenet, dataset="cifar100").generators[-1]) == 3563200
    for column, m in ("c+", 1), ("d+", 1), ("e", 5):
        assert parameters(model_of(lenet, column)) == 5763200 + m * (62006 + 1152)
    for column, n in ("a", 1), ("b", 5), ("free", 5):
        assert parameters(model_of(lenet, column)) == n * 62006


@pytest.mark.parametrize("classes", [10, 100])
def test_target_network_is_lenet(lenet, classes):
    """Values and gradients of two networks against torch.nn modules, ReLU before pooling. Float32:
    sums of 400 terms, and of four images in a gradient."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 32, 32)
    theta = [(torch.randn(2, f, k) / k**0.5).requires_grad_() for f, k in shapes_of(lenet, classes)]
    logits = lenet.each_network(lenet.target_network, x, theta)
    logits.square().sum().backward()
    for n in range(2):
        twin = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
        )  # fmt: skip
        layers = [m for m in twin if hasattr(m, "weight")]
        with torch.no_grad():
            for layer, filters in zip(layers, theta):
                layer.weight.copy_(filters[n, :, :-1].view_as(layer.weight))
                layer.bias.copy_(filters[n, :, -1])
        torch.testing.assert_close(logits[n], twin(x[n]), rtol=1e-4, atol=1e-5)
        twin(x[n]).square().sum().backward()
        for layer, filters in zip(layers, theta):
            grad = torch.cat([layer.weight.grad.flatten(1), layer.bias.grad[:, None]], dim=1)
            torch.testing.assert_close(filters.grad[n], grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("column, low, high", [("d", 0.9, 0.999), ("d-random", 0.5, 0.8)])
def test_start(lenet, column, low, high):
    """Near-copies, but not the same, or far apart, of the usual size 2 / fan-in. (Far apart is not
    orthogonal: a leaky ReLU has a positive mean. Of three seeds: 0.98, and 0.64 to 0.66.)"""
    torch.manual_seed(0)
    theta = lenet.sample(model_of(lenet, column), 20)
    size = theta[2].square().mean() * 400 / 2  # 120 filters, 400 inputs
    assert 0.7 < size < 1.4  # 120 codes of eight numbers: 5 % of scatter, and a little slope
    vectors = F.normalize(theta[2].flatten(1), dim=1)
    likeness = (vectors @ vectors.T)[~torch.eye(20, dtype=torch.bool)].mean()
    assert low < likeness < high


def test_a_filter_comes_from_its_own_code(small):
    torch.manual_seed(0)
    hypernet = model_of(small)
    with torch.no_grad():
        hypernet.extractor[-1].weight.zero_()  # the codes are the bias alone
        codes = hypernet.bias.view(144, 8)
        codes[1] = codes[0]  # the first two filters of the first layer
        before = small.sample(hypernet, 1)
        codes[6 + 16 + 3] += 1  # the fourth of the third layer
        after = small.sample(hypernet, 1)
    torch.testing.assert_close(before[0][:, 0], before[0][:, 1])
    changed = [(a != b).any(dim=-1).nonzero()[:, 1].tolist() for a, b in zip(before, after)]
    assert changed == [[], [], [3], [], []]


# ---- learned means -------------------------------------------------------------------------------


def noise_of_a_step(script, model, n: int, generator):
    """As train() draws it: in 03 the means are chosen in turn, in 04 there is one at most."""
    stratified = dict(stratified=True) if script.NAME == "03_cifar_lenet" else {}
    return model.noise(n, generator, **stratified)


@pytest.mark.parametrize(
    "name, m", [("03_cifar_lenet", 1), ("03_cifar_lenet", 3), ("04_cifar_resnet32", 1)]
)
def test_no_noise_gives_the_mean(monkeypatch, name, m):
    """W(E(0) + bias) - W(bias) = 0, to rounding. Of three means it is the middle one. Other z, of
    the same mean, give other networks."""
    script = importlib.import_module(name)
    shrink(script, monkeypatch.setattr)
    torch.manual_seed(0)
    model, middle = model_of(script, means=m, scale=0.1), m // 2
    z = torch.zeros(2, model.noise_size)
    z[1, 1:] = torch.randn(model.noise_size - 1)
    with torch.no_grad():
        theta = model(z)
    for made, mean in zip(theta, model.means):
        torch.testing.assert_close(made[0], mean[middle], rtol=0, atol=1e-6)
        distances = (made[1] - mean).square().mean(dim=(1, 2))
        assert distances[middle] > 1e-6 and distances.argmin() == middle


@pytest.mark.parametrize("m", [1, 2, 5, 10])
def test_noise_chooses_each_mean_equally_often(small, monkeypatch, m):
    """Exactly, in training, at the ends of the uniform numbers too; freely drawn: 4 sigma of a
    binomial distribution. The numbers are those of a normal distribution, and finite."""
    torch.manual_seed(0)
    model = small.Hypernetwork([(1, 2)], [1], means=m, scale=0.0)
    model.means[0].data = torch.arange(m).view(m, 1, 1).expand(m, 1, 2).float()
    generator = torch.Generator().manual_seed(0)

    def chosen(z):
        return model(z)[0][:, 0, 0].long()

    z, free = model.noise(200 * m, generator, stratified=True), model.noise(200 * m, generator)
    assert chosen(z).bincount().tolist() == [200] * m
    deviation = (200 * (1 - 1 / m)) ** 0.5
    assert ((chosen(free).bincount(minlength=m) - 200).abs() <= 4 * deviation).all()
    for noise in (z, free):
        assert noise.isfinite().all()
        assert abs(noise[:, 0].mean()) < 4 / len(z) ** 0.5
        assert abs(noise[:, 0].var() - 1) < 4 * (2 / len(z)) ** 0.5
        assert abs(noise[:, 1:].var() - 1) < 0.04  # 4 sigma of 19,800 numbers
    for end in (0.0, 1 - 2**-24):
        monkeypatch.setattr(torch, "rand", lambda n, end=end, **_: torch.full((n,), end))
        z = model.noise(3 * m, generator, stratified=True)
        assert z.isfinite().all() and chosen(z).tolist() == list(range(m)) * 3


@pytest.mark.parametrize(
    "name, column, networks, m",
    [
        ("03_cifar_lenet", "b", 3, 3),
        ("03_cifar_lenet", "d", 6, 3),
        ("03_cifar_lenet", "d", 2, 1),
        ("04_cifar_resnet32", "b", 3, 3),
        ("04_cifar_resnet32", "d", 2, 1),
    ],
)
def test_means_train_as_free_networks(tmp_path, monkeypatch, name, column, networks, m):
    """The whole of train() against M networks, each with its own SGD on the mean loss of its own
    batches: chains of (b), and the means of a G whose deviation is switched off. A factor M or lam
    too much would move them by as much. Float32, whose rounding batch norm amplifies."""
    script = importlib.import_module(name)
    shrink(script, monkeypatch.setattr)
    changes = dict(networks=networks, means=m, scale=0.0, diversity="none", lam=70.0, lr=0.01)
    c, data = settings(script, column, **changes, steps=3), data_of(script)
    script.train(c, data, tmp_path / "checkpoint.pt")
    trained = saved(tmp_path / "checkpoint.pt")["model"]
    torch.manual_seed(10**6)  # as train() does for seed 0
    model, _ = script.make_model(c, "cpu")
    start = [mean.detach() for mean in model.means]

    x, y = data["train"]
    padded, y = F.pad(torch.cat([x, x.flip(-1)]), [c.crop] * 4), y.repeat(2)
    rates = dict(b=(10, 4, 1), d=(1, 2 / 3, 1 / 3))  # of three steps, the first is the warm-up
    for i in range(m):
        theta = [mean[i : i + 1].clone().requires_grad_() for mean in start]
        sgd = torch.optim.SGD(theta, c.lr, 0.9, weight_decay=5e-4, nesterov=True)
        for step in range(3):
            generator = torch.Generator().manual_seed(10**6 + 1 + step)
            noise_of_a_step(script, model, networks, generator)  # drawn first
            batch = script.draw(padded, y, (networks, c.images), c.shared, generator)
            own = [part[i::m] for part in batch]  # network n has the mean n modulo M
            losses = [
                F.cross_entropy(script.target_network(images[None], theta)[0], labels)
                for images, labels in zip(*own)
            ]
            sgd.param_groups[0]["lr"] = c.lr * rates[column][step]
            sgd.zero_grad()
            (sum(losses) / len(losses)).backward()
            sgd.step()
        for k, alone in enumerate(theta):
            ours, moved = trained[f"means.{k}"][i : i + 1], alone - start[k][i : i + 1]
            torch.testing.assert_close(ours, alone, rtol=1e-3, atol=0.01 * moved.abs().max().item())


def test_free_networks_are_a_mixture_without_deviation(small, tmp_path):
    """Column `free` trains as (e) does with scale 0: the same images, the same loss, the same bits.
    With the deviation, it does not."""
    trained = []
    for column, changes in ("free", {}), ("e", dict(scale=0.0)), ("e", dict(scale=0.5)):
        c = settings(small, column, networks=4, means=4, **changes)
        file = tmp_path / f"{len(trained)}.pt"
        small.train(c, data_of(small), file)
        trained.append([saved(file)["model"][f"means.{k}"] for k in range(5)])
    assert all(torch.equal(a, b) for a, b in zip(trained[0], trained[1]))
    assert not any(torch.equal(a, b) for a, b in zip(trained[0], trained[2]))


def test_a_rate_for_each_optimizer(script):
    """Means by SGD at `lr`, the rest by Adam at `adam`; Adam at `lr` where there are no means."""
    optimizers = script.make_model(settings(script, "c+", lr=0.3, adam=0.4), "cpu")[1]
    assert [o.defaults["lr"] for o in optimizers] == [0.3, 0.4]
    numbers = [sum(p.numel() for p in o.param_groups[0]["params"]) for o in optimizers]
    model = model_of(script, "c+")
    assert numbers == [parameters(model.means), parameters(model) - parameters(model.means)]
    (adam,) = script.make_model(settings(script, "c", lr=0.3), "cpu")[1]
    assert isinstance(adam, torch.optim.Adam) and adam.defaults["lr"] == 0.3


# ---- data ----------------------------------------------------------------------------------------


def test_draw(script):
    """Each image is a crop of its original, as large as 32 x 32 and anywhere in it; labels belong
    to images; the first ones are shared; the same seed draws the same."""
    y = torch.arange(5) % 4
    padded = torch.rand(5, 3, 36, 36) + 10 * torch.arange(5).view(-1, 1, 1, 1)

    def draw(seed):
        return script.draw(padded, y, (3, 40), 7, torch.Generator().manual_seed(seed))

    x, labels = draw(0)
    assert x.shape == (3, 40, 3, 32, 32) and labels.shape == (3, 40)
    places = set()
    for image, label in zip(x.flatten(0, 1), labels.flatten()):
        original = int(image.min() // 10)
        assert y[original] == label
        (place,) = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if torch.equal(image, padded[original, :, i : i + 32, j : j + 32])
        ]
        places.add(place)
    assert len(places) > 20  # of 25; 106 draws miss one of them with a chance of 1 %
    for n in (1, 2):
        assert torch.equal(x[n, :7], x[0, :7]) and torch.equal(labels[n, :7], labels[0, :7])
        assert not (x[n, 7:] == x[0, 7:]).flatten(1).all(dim=1).all()
    assert torch.equal(draw(0)[0], x) and not torch.equal(draw(1)[0], x)


def write_cifar(folder: Path, cifar, monkeypatch) -> dict:
    """Made-up files in CIFAR's format: 20 images in each, labels in turn. Their checksums are not
    those of the real ones, so the lists are without."""
    classes, base, result = 100 if "100" in cifar.__name__ else 10, folder / cifar.base_folder, {}
    base.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("train_list", "test_list"):
        entries = [[file, None] for file, _ in getattr(cifar, name)]
        monkeypatch.setattr(cifar, name, entries)
        result[name] = []
        for file, _ in entries:
            pixels = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
            pixels[:, :1024] //= 4  # the red channel is dark
            labels = rng.integers(0, classes, 20).tolist()
            key = "labels" if classes == 10 else "fine_labels"
            (base / file).write_bytes(pickle.dumps({"data": pixels, key: labels}, protocol=2))
            result[name].append((pixels, labels))
    meta = cifar.meta | dict(md5=None)
    monkeypatch.setattr(cifar, "meta", meta)
    (base / meta["filename"]).write_bytes(pickle.dumps({meta["key"]: [str(k) for k in range(100)]}))
    return result


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_real_data(lenet, resnet, monkeypatch, tmp_path, dataset):
    """torchvision's files against numpy: shapes, normalisation by all training images, split,
    labels, channels last. Float32: sums of 100,000 numbers."""
    names = sorted(["CIFAR10", "CIFAR100"], key=dataset.upper().__ne__)  # its own first
    files, others = (
        write_cifar(tmp_path, getattr(lenet.datasets, name), monkeypatch) for name in names
    )
    files["other"] = others["test_list"]
    splits = {}
    for name in files:
        pixels = np.concatenate([part for part, _ in files[name]]).reshape(-1, 3, 32, 32)
        labels = [label for _, part in files[name] for label in part]
        splits[name] = pixels.astype(np.float64), labels
    pixels, labels = splits["train_list"]
    mean, std = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3), ddof=1)
    n = len(labels) // 10
    expected = dict(val=(pixels[:n], labels[:n]), train=(pixels[n:], labels[n:]))
    expected |= dict(test=splits["test_list"], other=splits["other"])
    for script in (lenet, resnet):
        argv = ["--dataset", dataset, "--data", str(tmp_path), "--device", "cpu"]
        data = script.load_data(script.parse_args(argv))
        assert set(expected) - set(data) == ({"other"} if script is resnet else set())
        for split, (x, y) in data.items():
            pixels, labels = expected[split]
            assert x.dtype == torch.float32 and y.dtype == torch.int64
            assert x.is_contiguous(memory_format=torch.channels_last)
            pixels = (pixels - mean[:, None, None]) / std[:, None, None]
            torch.testing.assert_close(x.double(), torch.from_numpy(pixels), rtol=1e-5, atol=1e-5)
            assert y.tolist() == labels


@pytest.mark.parametrize("dataset, classes", [("cifar10", 10), ("cifar100", 100)])
def test_made_up_data(lenet, dataset, classes):
    """Three splits without a common image, normalised, and learnable: an image is nearest to the
    mean of its class much more often than chance."""
    args = lenet.parse_args([*FAKE, "--dataset", dataset])
    data = lenet.load_data(args)
    sizes = {split: len(x) for split, (x, _) in data.items()}
    assert sizes == dict(train=2250, val=250, test=500, other=500)
    x, y = data["train"]
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01  # val is a tenth of what was normalised
    assert len(torch.cat([x for x, _ in data.values()]).sum(dim=(1, 2, 3)).unique()) > 3400
    means = torch.stack([x[y == k].mean(dim=0) for k in range(classes)])
    x, y = data["test"]
    nearest = torch.cdist(x.flatten(1), means.flatten(1)).argmin(dim=1)
    assert (nearest == y).float().mean() > 0.5


# ---- training ------------------------------------------------------------------------------------


def plain_diversity(kind, theta, probabilities, y):
    """From lists of vectors and probabilities, one network at a time."""
    n = len(probabilities)
    vectors = torch.stack([torch.cat([t[i].flatten() for t in theta]) for i in range(n)])
    if kind == "ensemble":
        own = sum(p[b, y[b]].log() for p in probabilities for b in range(len(y))) / n
        mean = sum(probabilities) / n
        return 100 * (sum(mean[b, y[b]].log() for b in range(len(y))) - own) / len(y)
    if kind == "variance":
        mean = vectors.sum(dim=0) / n
        return 100 * ((vectors - mean) ** 2).sum() / (n - 1) / vectors.shape[1]
    points = [p.flatten() for p in probabilities] if kind == "outputs" else vectors
    near = [
        min(torch.dist(points[i], points[j]) for j in range(n) if j != i).log() for i in range(n)
    ]
    return torch.digamma(torch.tensor(float(n))) + 100 * sum(near) / n


@pytest.mark.parametrize("kind", MEASURES)
def test_objective(small, kind):
    """loss = lam * cross-entropy - ramp * diversity, each from plain loops; images 0 and 1 are
    shared. Float32: the entropy of weights is a difference of vectors of 62,006 numbers."""
    c = settings(small, "d", diversity=kind, shared=2, lam=70.0)
    torch.manual_seed(0)
    model = spread_model(small)
    x, y = torch.randn(3, 4, 3, 32, 32), torch.randint(10, (3, 4))
    x[:, :2], y[:, :2] = x[0, :2].clone(), y[0, :2].clone()
    z = model.noise(3)
    loss, loss_acc, diversity, acc = small.training_step(model, z, x, y, c, ramp=0.3)
    theta = model(z)
    logits = [
        small.target_network(x[n : n + 1], [t[n : n + 1] for t in theta])[0] for n in range(3)
    ]
    cross_entropy = sum(F.cross_entropy(logits[n], y[n]) for n in range(3)) / 3
    torch.testing.assert_close(loss_acc, cross_entropy)
    expected = torch.tensor(0.0)
    if kind != "none":
        shared = [logit[:2].softmax(dim=1) for logit in logits]
        expected = plain_diversity(kind, small.fix_gauge(theta), shared, y[0, :2])
    torch.testing.assert_close(diversity, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, 70 * cross_entropy - 0.3 * expected, rtol=1e-4, atol=1e-3)
    hits = sum((logits[n].argmax(dim=1) == y[n]).sum().item() for n in range(3))
    assert acc.item() == pytest.approx(hits / 12)
    c.decay = 0.01
    decayed, *_ = small.training_step(model, z, x, y, c, ramp=0.3)
    squares = sum((t[n] ** 2).sum() for t in theta for n in range(3)) / 3
    torch.testing.assert_close(decayed - loss, 70 * 0.01 * squares, rtol=1e-3, atol=1e-3)


class Stub(nn.Module):
    """A model of one number a network that writes down the first number of each stream it gets."""

    def __init__(self, networks: int = 2):
        super().__init__()
        self.weight, self.numbers = nn.Parameter(torch.zeros(networks, 1)), []
        self.means = [self.weight]

    def first(self, generator):
        self.numbers.append(torch.randint(2**62, (), generator=generator).item())

    def noise(self, n, generator=None, stratified=False):
        self.first(generator)
        return torch.zeros(len(self.weight), 1)

    def forward(self, z, deviate=True):
        return []


def train_stub(script, monkeypatch, model, c, file, data, training_step=None):
    """train() around a stub, with nothing to draw and to validate; the rates of its steps."""
    optimizer, rates = torch.optim.SGD([model.weight], 1.0), []
    optimizer.step = lambda: rates.append(optimizer.param_groups[0]["lr"])
    nothing = torch.zeros(len(model.weight), 1)
    with monkeypatch.context() as patch:
        patch.setattr(script, "make_model", lambda *_: (model, [optimizer]))
        step = training_step or (lambda *_: (model.weight.sum(), *torch.zeros(3)))
        patch.setattr(script, "training_step", step)
        patch.setattr(script, "draw", lambda *_: (nothing, nothing))
        patch.setattr(script, "evaluate", lambda *_: {"vote 1": 0.0})
        patch.setattr(script, "predict", lambda *_: None)
        patch.setattr(script, "recalibrate", lambda *_: None, raising=False)
        script.train(c, data, file)
    return rates


@pytest.mark.parametrize("column", ["a", "b"])
def test_rates(script, tmp_path, monkeypatch, column):
    """By hand: up to 1 in 200 steps and down to 0; (b) from 10 to 1 in the first half, then 1."""
    c = settings(script, column, steps=1000, rows=1, networks=2)
    file, data = tmp_path / "checkpoint.pt", data_of(script)
    rates = train_stub(script, monkeypatch, Stub(), c, file, data)
    if column == "a":
        assert rates[0] == pytest.approx(1 / 200) and rates[99] == pytest.approx(1 / 2)
        assert rates[500] == pytest.approx(1 / 2) and rates[-1] == pytest.approx(1 / 1000)
    else:
        assert rates[0] == pytest.approx(10 / 200) and max(rates) < 10
        assert rates[250] == pytest.approx(5.5) and rates[400] == pytest.approx(2.8)
        assert rates[500:] == [1] * 500


def test_no_two_streams_of_random_numbers_are_the_same(script, tmp_path, monkeypatch):
    """Each of 1000 steps, for four seeds; validation; test; made-up images. Two different streams
    agree in 62 bits with a chance of 1e-11."""
    data, numbers = data_of(script), []
    for seed in range(4):
        c, model = settings(script, "a", steps=1000, rows=1, seed=seed), Stub(1)
        torch.manual_seed(0)
        train_stub(script, monkeypatch, model, c, tmp_path / f"{seed}.pt", data)
        *steps, validation = model.numbers
        model.numbers.clear()
        model.first(torch.default_generator)  # what initialisation drew
        numbers += steps + model.numbers
    model.numbers.clear()
    with pytest.raises(IndexError):  # no networks
        script.analyse(model, settings(script, "a"), data)
    model.first(torch.Generator().manual_seed(10))  # load_data's
    numbers += [validation, *model.numbers]
    assert len(set(numbers)) == len(numbers) == 4 * 1001 + 3


@pytest.mark.parametrize("steps, networks", [(20, 1), (40, 1), (1000, 2), (40, 5), (1235, 10)])
def test_ten_networks_of_the_chains(script, tmp_path, monkeypatch, steps, networks):
    """From the second half, equally far apart, the last included, all chains at the same time."""
    model = Stub(networks)

    def training_step(*_):
        model.weight.data += 1  # the number of the step
        return model.weight.sum(), *torch.zeros(3)

    c, file = settings(script, "b", steps=steps, networks=networks, rows=1), tmp_path / "c.pt"
    train_stub(script, monkeypatch, model, c, file, data_of(script), training_step)
    taken = [int(theta[0][0, 0]) for theta in saved(file)["chain"]]
    assert len(taken) * networks == 10 and taken[-1] == steps and taken[0] > steps / 2
    assert len({b - a for a, b in zip(taken, taken[1:])}) <= 1


def test_networks_of_the_chains_are_tested(script, tmp_path):
    """load() gives ten different ones, copies and not the live weights; the last are the end's; the
    numbers of metrics.json are theirs, from a plain loop over networks."""
    argv = [*FAKE, "--columns", "b", "--networks", "2", "--steps", "10"]
    (run,) = script.main([*argv, "--out", str(tmp_path)])
    file = next(tmp_path.glob("*/checkpoint.pt"))
    theta = script.sample(script.load(file), 3)  # all there are, whatever is asked for
    assert [tuple(t.shape) for t in theta] == [(10, *shape) for shape in shapes_of(script)]
    assert all(len(t.flatten(1).unique(dim=0)) == 10 for t in theta)
    for i, taken in enumerate(theta):
        assert torch.equal(taken[-2:], saved(file)["model"][f"means.{i}"])
    data = data_of(script)
    if hasattr(script, "recalibrate"):
        images = data["train"][0][: run["settings"]["moments"]]
        theta = script.recalibrate(theta, images)
    (x, y), accs = data["test"], []
    for n in range(10):
        logits = script.target_network(x[None], [t[n : n + 1] for t in theta])[0]
        accs.append((logits.argmax(dim=1) == y).float().mean().item())
    test = run["networks"]["sampled"]["test"]
    assert test["networks"] == 10 and test["vote 1"] == pytest.approx(sum(accs) / 10, abs=1e-6)


@pytest.mark.parametrize("column", ["d", "d+"])
def test_it_learns(script, tmp_path, monkeypatch, column):
    """Made-up patterns, a short life: far above the 10 % of chance."""
    monkeypatch.undo()  # the real hypernetworks, more images
    if script.NAME == "04_cifar_resnet32":
        monkeypatch.setattr(script, "BLOCKS", 1)
    data = script.load_data(script.parse_args(FAKE))
    sizes = dict(train=150, val=50, test=50)
    data = {k: (data[k][0][:n], data[k][1][:n]) for k, n in sizes.items()}
    changes = dict(lr=3e-4, lam=5e3) if column == "d" else dict(lr=0.03)
    c = settings(script, column, steps=60, networks=2, images=16, rows=1, **changes)
    script.train(c, data, tmp_path / "checkpoint.pt")
    (row,) = saved(tmp_path / "checkpoint.pt")["log"]
    assert row["vote 1"] > 0.4
    assert ("deviation" in row) == (column == "d+")


def test_deviation_is_logged(script, tmp_path):
    """|deviation| / |mean| of networks of the same z, from plain vectors; in 04 of the first."""
    c, file = settings(script, "c+", rows=1), tmp_path / "checkpoint.pt"
    script.train(c, data_of(script), file)
    model, (row,) = script.load(file), saved(file)["log"]
    theta = script.sample(model, 10, torch.Generator().manual_seed(script.VALIDATION))
    theta = torch.cat([t.flatten(1) for t in theta], dim=1).double()
    mean = torch.cat([t.flatten(1) for t in model.means], dim=1).double().detach()
    theta = theta[:1] if script.NAME[1] == "4" else theta
    expected = (theta - mean).square().sum() / len(theta) / mean.square().sum()
    assert row["deviation"] == pytest.approx(expected.sqrt().item(), rel=1e-3)


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("kind", MEASURES)
@pytest.mark.parametrize("means", [0, 2])
def test_training_step_without_the_device(small, kind, device, means):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    c = settings(small, "d", diversity=kind, means=means)
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        with torch.device(device):  # for the parameters; the step must find its device by itself
            model = small.Hypernetwork(shapes_of(small), c.codes, means)
        padded = torch.rand(20, 3, 36, 36, device=device)
        y = torch.zeros(20, dtype=torch.long, device=device)
        batch = small.draw(padded, y, (4, 8), 2, generator=None)  # no device, no generator
        loss, *_ = small.training_step(model, model.noise(4, stratified=True), *batch, c)
        assert loss.device.type == device
        if device == "meta":
            loss.backward()
            assert all(p.grad.device.type == device for p in model.parameters())


# ---- evaluation ----------------------------------------------------------------------------------


def plain_ensemble(networks, y):
    """Accuracy of the vote, negative log-likelihood and calibration error, from nested lists of
    probabilities: networks, images, classes."""
    hits, nll, bins = 0, 0.0, {}
    for b, label in enumerate(y):
        votes = [network[b].index(max(network[b])) for network in networks]
        hits += min(set(votes), key=lambda k: (-votes.count(k), k)) == label
        mean = [
            sum(column) / len(networks) for column in zip(*(network[b] for network in networks))
        ]
        nll -= math.log(mean[label]) / len(y)
        gap = max(mean) - (mean.index(max(mean)) == label)
        bins.setdefault(min(14, int(15 * max(mean))), []).append(gap)
    return hits / len(y), nll, sum(abs(sum(gaps)) for gaps in bins.values()) / len(y)


def test_evaluation(script):
    """The function behind every number of the tables, against loops over networks and images: 23
    networks make 23, 11, 4, 2, 1 ensembles of 1, 2, 5, 10, 20, and no network is in two."""
    torch.manual_seed(0)
    y = torch.randint(7, (60,))
    logits = 1.5 * torch.randn(23, 60, 7) + 2 * torch.randn(60, 7) + 2 * F.one_hot(y, 7)
    probabilities, unknown = logits.softmax(dim=-1), torch.randn(23, 40, 7).softmax(dim=-1)
    lenet = script.NAME == "03_cifar_lenet"
    result = script.evaluate(probabilities, y, *[unknown] * lenet)
    networks, labels = probabilities.double().tolist(), y.tolist()
    assert result.pop("networks") == 23
    votes = [[image.index(max(image)) for image in network] for network in networks]
    pairs = [(a, b) for i, a in enumerate(votes) for b in votes[:i]]
    different = sum(u != v for a, b in pairs for u, v in zip(a, b))
    assert result.pop("disagreement") == pytest.approx(different / len(pairs) / 60, rel=1e-4)
    for size in (1, 2, 5, 10, 20):
        groups = [range(i, i + size) for i in range(0, 23 - size + 1, size)]
        numbers = [plain_ensemble([networks[i] for i in group], labels) for group in groups]
        expected = [sum(column) / len(groups) for column in zip(*numbers)]
        ours = [result.pop(f"{name} {size}") for name in ("vote", "nll", "calibration")]
        assert ours == pytest.approx(expected, rel=1e-4)
        if lenet:
            means = [
                [p[list(g)].double().mean(dim=0) for p in (probabilities, unknown)] for g in groups
            ]
            known_unknown = [[-(p * p.log()).sum(dim=1) for p in pair] for pair in means]
            hits = [(b > a).item() for k, u in known_unknown for a in k for b in u]
            assert result.pop(f"auroc {size}") == pytest.approx(sum(hits) / len(hits), abs=1e-3)
            assert script.evaluate(probabilities, y, probabilities)[f"auroc {size}"] == 0.5
    assert not result
    alone = script.evaluate(probabilities[:1], y)
    assert alone["disagreement"] == 0 and "vote 1" in alone and "vote 2" not in alone


def test_votes_by_hand(script):
    #                       image: 0  1  2  3
    votes = torch.tensor([[7, 2, 9, 4], [7, 2, 3, 5], [1, 8, 3, 6]])
    assert script.majority(votes).tolist() == [7, 2, 3, 4]  # the last is a tie: smallest class
    # Pairs that differ, of three: 2, 2, 2, 3
    assert script.disagreement(votes) == pytest.approx((2 + 2 + 2 + 3) / 12)


def test_prediction(script):
    """One network at a time on all images at once; 300 are two portions. Float32."""
    torch.manual_seed(0)
    theta = script.sample(spread_model(script), 3)
    x = torch.randn(300, 3, 32, 32)
    if hasattr(script, "recalibrate"):  # without moments of its own an image depends on the others
        theta = script.recalibrate(theta, x[:50])
    probabilities = script.predict(theta, x)
    for n in range(3):
        logits = script.target_network(x[None], [t[n : n + 1] for t in theta])[0]
        torch.testing.assert_close(probabilities[n], logits.softmax(dim=1), rtol=1e-3, atol=1e-5)


def test_distillation(script, monkeypatch):
    """The networks that are tested, and averaged, against torch.mean over all networks at once, in
    several portions. In 04 the tested networks are the first of the same z."""
    c, data = settings(script, "d", tested=12, averaged=200), data_of(script)
    torch.manual_seed(0)
    model, predict, predicted = spread_model(script), script.predict, []
    monkeypatch.setattr(
        script, "predict", lambda theta, x: predicted.append(theta) or predict(theta, x)
    )
    results = script.analyse(model, c, data)["networks"]
    generator = torch.Generator().manual_seed(script.TEST)
    with torch.no_grad():
        if script.NAME == "04_cifar_resnet32":
            theta = first = model(model.noise(200, generator))
        else:
            first = model(model.noise(12, generator))
            theta = model(model.noise(200, generator, stratified=True))
    sizes = dict(averaged=200)
    if script.NAME == "04_cifar_resnet32":
        sizes = {"average of 1": 1, "average of 10": 10, "average of 100": 100}
    assert list(results) == ["sampled", *sizes]
    tested, *averaged = predicted[:: len(predicted) // len(results)]
    for ours, plain in zip(tested, first):
        torch.testing.assert_close(ours[..., : plain.shape[2]], plain[:12], rtol=1e-4, atol=1e-5)
    for (name, n), ours in zip(sizes.items(), averaged):
        mean = [t[:n].mean(dim=0, keepdim=True) for t in theta]
        if hasattr(script, "recalibrate"):
            mean = script.recalibrate(mean, data["train"][0][:30])
        for a, b in zip(ours, mean):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        for split in ("val", "test"):
            x, y = data[split]
            hits = script.target_network(x[None], ours)[0].argmax(dim=1) == y
            acc = hits.float().mean().item()
            assert results[name][split]["vote 1"] == pytest.approx(acc, abs=1e-6)


def test_controls(small, monkeypatch):
    """Beside G's networks: their average and the mean alone, for each mean, ten networks with
    equally many of each mean, and Gaussian noise around the averages, of the size of their layer,
    that costs as much accuracy. Networks are replaced by ones that are worse, smoothly, the farther
    their weights are from an average."""
    c, y = settings(small, "e", means=2, tested=12, averaged=200), torch.randint(10, (3000,))
    torch.manual_seed(0)
    model, seen = model_of(small, "e", means=2, scale=0.5), []
    noise = torch.randn(12, 3000, 10)
    with torch.no_grad():
        theta = model(model.noise(4000, stratified=True))
    centre = torch.cat([t.unflatten(0, (-1, 2)).mean(dim=0).flatten(1) for t in theta], dim=1)

    def distances(theta):
        return torch.cdist(torch.cat([t.flatten(1) for t in theta], dim=1), centre)  # (N, M)

    def predict(theta, x):
        seen.append(theta)
        off = 0.3 * distances(theta).amin(dim=1)[:, None, None]
        return (F.one_hot(y, 10) + off * noise[: len(off)]).softmax(dim=-1)

    monkeypatch.setattr(small, "predict", predict)
    result = small.analyse(model, c, {k: (torch.zeros(1), y) for k in ("val", "test", "other")})
    kinds = ["sampled", "averaged", "of each mean", "means alone", "averages and noise"]
    networks = dict(zip(kinds, seen[-15::3]))
    assert list(result["networks"]) == kinds
    assert distances(networks["of each mean"]).argmin(dim=1).tolist() == [0, 1] * 5
    between = torch.dist(*centre)
    assert distances(networks["averaged"]).diag().max() < 0.1 * between
    assert all(torch.equal(t, mean) for t, mean in zip(networks["means alone"], model.means))
    one = {kind: result["networks"][kind]["val"]["vote 1"] for kind in kinds}
    assert one["averaged"] > 0.99 and one["of each mean"] < 0.9
    # The sigma are a sixth apart: the accuracy is off by a few percent at most.
    assert one["averages and noise"] == pytest.approx(one["of each mean"], abs=0.04)
    off = [abs(row[0] - one["of each mean"]) for row in result["null"]]
    val_one, val_ten, sigma = result["null"][off.index(min(off))]
    assert val_one == one["averages and noise"] and val_ten > val_one
    for t, average in zip(networks["averages and noise"], networks["averaged"]):
        spread = (t - average.repeat(5, 1, 1)).std() / average.square().mean().sqrt()
        assert spread.item() == pytest.approx(sigma, rel=0.1)  # the first layer has 4,560 numbers


FRONTS = [("outputs", 40, 50, 50, 60), ("outputs", 70, 80)]  # of the runs below


def test_figure_and_table(lenet):
    """Runs that differ in lam alone are one line of the figure, which has CIFAR-10 alone; seeds
    share a row of the table."""

    def run(name, one, **changes):
        c = dict(name=name, column="d+", diversity="outputs", lam=1e3, seed=0, codes=[1])
        c |= dict(dataset=name.split("_")[0]) | changes
        scores = {"vote 1": one, "vote 10": one + 0.1, "nll 10": 0.5}
        return dict(settings=c, networks=dict(sampled=dict(val=scores, test=scores)), null=[])

    runs = [run("cifar10_d+", 0.5), run("cifar10_d+_lam9", 0.4, lam=9.0)]
    runs += [run("cifar10_d+_seed1", 0.7, seed=1), run("cifar100_a", 0.2)]
    runs += [run("cifar10_b", 0.3, column="b", diversity="none", codes=None)]
    left, right = lenet.plot_fronts(runs).axes
    names = [*lenet.PAPER.keys(), "diagonal"]
    for ax, lines in (left, [*FRONTS, ("chance", 30, 40), *names]), (right, [*FRONTS, "diagonal"]):
        drawn = [(line.get_label()[11:], *line.get_xydata().round().flatten()) for line in ax.lines]
        assert len(drawn) == len(lines)
        assert all(line in drawn for line in lines if isinstance(line, tuple))
    assert [text.get_text() for text in left.texts] == ["b"]
    assert sorted(text.get_text() for text in right.texts) == ["1e3", "9", "d+"]
    first, second = (part.splitlines() for part in lenet.table(runs).split("\n\n"))
    assert max(line.count("|") for line in first + second) == 1 + 7  # columns at most
    assert "| cifar10_d+: sampled |" in first[2] and "| 60 ± 14 |" in first[2]  # of 50 and 70
    assert "| 30 |  | 40 |" in first[-1] and "|  | 0.5 |" in second[-1]


# ---- the script ----------------------------------------------------------------------------------


def forbidden(*_, **__):
    raise AssertionError("this must not be called")


def test_the_command_again(script, tmp_path, monkeypatch, capsys):
    """All columns; then the same command trains nothing, loads nothing, and draws again; one column
    alone shows all that are finished; a folder called results is drawn without data and weights,
    and nothing is trained there."""
    monkeypatch.setattr(script, "QUICK", dict(steps=4, rows=2, averaged=5))
    out, argv = tmp_path / "runs", [*FAKE, "--quick"]
    runs = script.main([*argv, "--out", str(out)])
    folders = sorted(f"cifar10_{column}_quick_fake" for column in script.RECIPES)
    expected = {f"{name}/{file}" for name in folders for file in ("checkpoint.pt", "metrics.json")}
    assert set(files_in(out)) == expected | {"fronts.png"}
    assert (out / "fronts.png").read_bytes().startswith(b"\x89PNG")
    for run, folder in zip(runs, folders):
        assert run == json.loads((out / folder / "metrics.json").read_text())
        facts = ("settings", "command", "commit", "hardware", "torch", "log", "networks")
        assert set(facts) <= set(run) and run["command"].startswith(f"python {script.NAME}.py --f")
        assert run["settings"]["steps"] == 4 and [row["step"] for row in run["log"]] == [2, 4]
        assert run["settings"]["fake_data"] and run["settings"]["name"] == folder
        tested = dict(a=1, b=10 if script.NAME[1] == "3" else 2, free=5)
        sampled = run["networks"]["sampled"]
        assert sampled["val"]["networks"] == tested.get(run["settings"]["column"], 12)
        assert ("auroc 1" in sampled["test"]) == (script.NAME[1] == "3")
    table = capsys.readouterr().out
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 2 * (2 + sum(len(run["networks"]) for run in runs))
    rows = [[cell.strip() for cell in row.split("|")] for row in rows]
    for run in runs:
        row, _ = [row for row in rows if row[1] == f"{run['settings']['name']}: sampled"]
        test = run["networks"]["sampled"]["test"]
        assert float(row[2]) == pytest.approx(100 * test["vote 1"], rel=1e-3)

    for name in ("load_data", "train", "analyse"):
        monkeypatch.setattr(script, name, forbidden)
    before = files_in(out)
    (out / "fronts.png").unlink()
    assert script.main([*argv, "--out", str(out)]) == runs
    assert files_in(out) == before
    assert script.main([*argv, "--columns", "d", "--out", str(out)]) == runs
    assert capsys.readouterr().out.count(table) == 2

    documented = tmp_path / "results" / script.NAME
    shutil.copytree(out, documented, ignore=shutil.ignore_patterns("*.pt", "*.png"))
    assert script.main(["--device", "cpu", "--out", str(documented)]) == runs
    assert (documented / "fronts.png").read_bytes() == before["fronts.png"]


def interrupted(*_, **__):
    raise KeyboardInterrupt


def assert_same_run(whole: Path, stopped: Path) -> None:
    """Models, chains, logs and results of all runs in two folders, bit for bit."""
    names = [file.parent.name for file in sorted(whole.glob("*/metrics.json"))]
    assert names
    assert set(files_in(whole)) == set(files_in(stopped))
    for name in names:
        metrics = [without_seconds(out / name / "metrics.json") for out in (whole, stopped)]
        metrics[0]["command"] = metrics[1]["command"]  # their --out differs
        assert metrics[0] == metrics[1]
        a, b = (saved(out / name / "checkpoint.pt") for out in (whole, stopped))
        assert a["log"] == b["log"] == metrics[0]["log"] and a["step"] == b["step"]
        assert a["optimizers"] == b["optimizers"] == []  # a finished run keeps none
        assert len(tensors(a)) == len(tensors(b)) > 4
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b)))


@pytest.mark.parametrize(
    "name, column, save_seconds",
    [
        ("03_cifar_lenet", "b", 0),
        ("03_cifar_lenet", "b", 1000),
        ("03_cifar_lenet", "d", 0),
        ("03_cifar_lenet", "e", 0),
        ("04_cifar_resnet32", "d+", 0),
    ],
)
def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, name, column, save_seconds):
    """Stopped in the middle of step 6, of step 8, the last, and of the analysis; a row of the log
    is 4 steps long. Saved at every step, or at the rows: bit for bit the run that was never
    stopped, and what is trained is not trained again."""
    script = importlib.import_module(name)
    shrink(script, monkeypatch.setattr)
    argv = [*FAKE, "--columns", column, "--out"]
    script.main([*argv, str(tmp_path / "whole")])
    monkeypatch.setattr(script, "SAVE_SECONDS", save_seconds)
    training_step, analyse, steps = script.training_step, script.analyse, []
    file = tmp_path / "stopped" / f"cifar10_{column}_fake" / "checkpoint.pt"
    for last in (6, 8):

        def dying(*args, last=last):
            result = training_step(*args)
            if len(steps) == last - 1:
                raise KeyboardInterrupt
            steps.append(None)
            return result

        monkeypatch.setattr(script, "training_step", dying)
        with pytest.raises(KeyboardInterrupt):
            script.main([*argv, str(tmp_path / "stopped")])
        step = saved(file)["step"]
        assert step == (last - 1 if save_seconds == 0 else 4)
        del steps[step:]
    monkeypatch.setattr(script, "training_step", training_step)
    monkeypatch.setattr(script, "analyse", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.main([*argv, str(tmp_path / "stopped")])
    monkeypatch.setattr(script, "training_step", forbidden)
    monkeypatch.setattr(script, "analyse", analyse)
    script.main([*argv, str(tmp_path / "stopped")])
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


KILLED = """
import importlib, os, signal, sys
from test_03_cifar_lenet import shrink

script, calls = importlib.import_module(sys.argv[1]), []
shrink(script, setattr)
training_step = script.training_step

def dying(*args):
    calls.append(None)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return training_step(*args)

script.training_step = dying
script.main(sys.argv[3:])
"""


def test_a_killed_run_goes_on(script, tmp_path):
    """kill -9 of a process in step 6 of column d+, after all of b: the same command again leaves b
    as it is, and ends with the bits of an undisturbed run. tests/kill.py kills at any moment."""
    argv = [*FAKE, "--columns", "b", "d+", "--out"]
    process = subprocess.run(
        [sys.executable, "-c", KILLED, script.NAME, str(8 + 6), *argv, str(tmp_path / "stopped")],
        env=os.environ | dict(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"),
        capture_output=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    (first,) = tmp_path.glob("stopped/*/metrics.json")
    before = first.read_bytes()
    assert saved(tmp_path / "stopped/cifar10_d+_fake/checkpoint.pt")["step"] == 4
    script.main([*argv, str(tmp_path / "stopped")])
    assert first.read_bytes() == before
    script.main([*argv, str(tmp_path / "whole")])
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_names_of_folders(lenet, resnet):
    """A name says what was overridden, and two runs of other settings never have the same one."""

    def names(script, line: str) -> list[str]:
        return [c.name for c in script.parse_args(["--device", "cpu", *line.split()]).runs]

    assert names(lenet, "") == [f"cifar10_{column}" for column in lenet.RECIPES]
    line = "--columns d+ --dataset cifar100 --lam 300 --seed 1 --quick --fake-data"
    assert names(lenet, line) == ["cifar100_d+_lam300_seed1_quick_fake"]
    assert names(lenet, "--columns e --lr 1e-4 --diversity weights --means 1") == [
        "cifar10_e_weights_lr0.0001_means1"
    ]
    values = ["--steps 100", "--steps 1000", "--lr 0.01", "--lr 0.001", "--lam 300", "--lam 3e3"]
    values += ["--networks 2", "--networks 20", "--images 8", "--seed 1", "--seed 2", "--quick"]
    values += ["--fake-data", "--dataset cifar100", "--seed 20260101", "--seed 20260102", ""]
    for script, own in (lenet, ["--diversity weights", "--diversity none"]), (resnet, ["--amp"]):
        lines = [f"--columns c d+ {a} {b}" for a in values + own for b in values + own]
        runs = {}
        for line in lines:
            for c in script.parse_args(["--device", "cpu", *line.split()]).runs:
                assert runs.setdefault(c.name, vars(c)) == vars(c), line


def test_quick_costs_little(lenet, resnet):
    """At most what the table says, and a flag still wins."""
    for script in (lenet, resnet):
        for c in script.parse_args([*FAKE, "--quick", "--images", "70"]).runs:
            recipe = script.RECIPES[c.column]
            for name, most in (script.QUICK | dict(images=70)).items():
                assert getattr(c, name) == (70 if name == "images" else min(most, recipe[name]))


# ---- bad input: one line, and nothing is overwritten ---------------------------------------------


def refused(script, argv: list[str], folder: Path) -> str:
    """The message of a command that must stop without a change to the files in a folder."""
    before = files_in(folder)
    with pytest.raises(SystemExit) as stop:
        script.main(argv)
    assert files_in(folder) == before
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code
    return stop.value.code


def test_files_of_other_settings_are_refused(script, tmp_path, monkeypatch):
    """The recipe changed since: an unfinished run and then a finished one."""
    argv = [*FAKE, "--columns", "a", "--out", str(tmp_path)]
    recipes = script.RECIPES
    changed = recipes | dict(a=recipes["a"] | dict(crop=3))
    with monkeypatch.context() as patch:
        patch.setattr(script, "analyse", interrupted)
        with pytest.raises(KeyboardInterrupt):
            script.main(argv)
    for file in ("checkpoint.pt", "metrics.json"):
        monkeypatch.setattr(script, "RECIPES", changed)
        message = refused(script, argv, tmp_path)
        folder = tmp_path / "cifar10_a_fake"
        assert f"{folder / file} is of other settings" in message and f"remove {folder}" in message
        assert f"'crop': {recipes['a']['crop']}" in message
        monkeypatch.setattr(script, "RECIPES", recipes)
        script.main(argv)


class Hostile:
    """Unpickled by the usual pickle, it makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("kind", ["half", "text", "other script", "weights"])
def test_damaged_and_foreign_files_are_refused(script, tmp_path, kind):
    folder = tmp_path / "cifar10_a_fake"
    folder.mkdir()
    file, c = folder / "checkpoint.pt", settings(script, "a")
    model, _ = script.make_model(c, "cpu")
    record = dict(settings=vars(c), step=2, seconds=1.0, log=[], chain=[], optimizers=[])
    torch.save(record | dict(model=model.state_dict()), file)
    if kind == "other script":
        torch.save(saved(file) | dict(settings=vars(c) | dict(script="02_mnist_hypernet")), file)
    elif kind == "weights":
        torch.save(saved(file)["model"], file)
    else:
        whole = file.read_bytes()
        file.write_bytes(dict(half=whole[: len(whole) // 2], text=b"hello")[kind])
    message = refused(script, [*FAKE, "--columns", "a", "--out", str(tmp_path)], tmp_path)
    assert str(file) in message
    assert "of other settings" in message if kind == "other script" else "damaged" in message
    with pytest.raises(SystemExit):
        script.load(file)


def test_a_hostile_file_is_refused_and_not_run(script, tmp_path):
    folder, victim = tmp_path / "cifar10_a_fake", tmp_path / "executed"
    folder.mkdir()
    torch.save(dict(settings=Hostile(victim)), folder / "checkpoint.pt")
    message = refused(script, [*FAKE, "--columns", "a", "--out", str(tmp_path)], tmp_path)
    assert "damaged or not of this script" in message
    with pytest.raises(SystemExit, match="damaged or not of this script"):
        script.load(folder / "checkpoint.pt")
    assert not victim.exists()
    pickle.loads(pickle.dumps(Hostile(victim)))  # the file would have done it
    assert victim.exists()


def test_a_damaged_metrics_file_is_refused(script, tmp_path):
    folder = tmp_path / "cifar10_a_fake"
    folder.mkdir()
    (folder / "metrics.json").write_text('{"settings": {"script"')
    message = refused(script, [*FAKE, "--columns", "a", "--out", str(tmp_path)], tmp_path)
    assert "metrics.json is missing, damaged" in message


def test_no_data_and_no_network(lenet, resnet, tmp_path, monkeypatch):
    """One line with the file to fetch, and no folder of a run."""

    def no_network(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr(lenet.datasets.cifar, "download_and_extract_archive", no_network)
    for script in (lenet, resnet):
        argv = ["--device", "cpu", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
        message = refused(script, argv, tmp_path)
        assert "cifar-10-python.tar.gz" in message and "--fake-data" in message
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--steps 0", "positive numbers"),
        ("--lr nan", "positive numbers"),
        ("--lam inf", "positive numbers"),
        ("--networks -3", "positive numbers"),
        ("--columns d --networks 1", "diversity needs"),
        ("--device cuda", "invalid choice: 'cuda'"),
    ],
)
def test_bad_values(script, tmp_path, monkeypatch, capsys, argv, message):
    """Exit code 2 before any work, the reason in the last line, and no folder is made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "load_data", forbidden)
    with pytest.raises(SystemExit) as stop:
        script.main(["--out", str(tmp_path / "runs"), *argv.split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "argv", ["--columns c --means 1", "--columns a --means 1", "--columns e --networks 6",
             "--columns e --means 0", "--columns e --means -5", "--columns d+ --means 3"]
)  # fmt: skip
def test_bad_means(lenet, capsys, argv):
    with pytest.raises(SystemExit):
        lenet.parse_args(argv.split())
    assert "--networks must be a multiple of it" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_stops_the_run(script, tmp_path, monkeypatch):
    """Nothing is written after the last good state."""
    training_step, calls = script.training_step, []

    def broken(*args):
        calls.append(None)
        loss, *rest = training_step(*args)
        return loss * (math.nan if len(calls) > 4 else 1), *rest

    monkeypatch.setattr(script, "training_step", broken)
    c, file = settings(script, "d"), tmp_path / "checkpoint.pt"
    with pytest.raises(SystemExit, match="step 8: the loss is not finite; try a smaller --lr"):
        script.train(c, data_of(script), file)
    assert saved(file)["step"] == 4 and set(files_in(tmp_path)) == {"checkpoint.pt"}
    assert all(tensor.isfinite().all() for tensor in saved(file)["model"].values())


def test_a_rate_that_is_too_large_stops_sgd(script, tmp_path):
    """SGD's gradients are not clipped and have no norm in the log: the loss itself must tell."""
    c = settings(script, "a", lr=1e20)
    with pytest.raises(SystemExit, match="the loss is not finite; try a smaller --lr"):
        script.train(c, data_of(script), tmp_path / "checkpoint.pt")


def test_diversity_of_columns_without_shared_images(lenet, capsys):
    with pytest.raises(SystemExit):
        lenet.parse_args(["--columns", "b", "--diversity", "outputs"])
    assert "columns a, b have none" in capsys.readouterr().err
