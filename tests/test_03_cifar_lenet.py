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
    numbers = dict(train=50, val=20, test=40)
    return {split: (x[:n], y[:n]) for split, n in numbers.items() for x, y in [data[split]]}


def shrink(script, put) -> None:
    """Every column in a second or two; `put` is setattr, or one that is undone after the test."""
    tiny = dict(steps=8, images=6, shared=4, rows=2, tested=12, averaged=20, moments=30)
    recipes = {
        column: recipe | {k: min(v, recipe[k]) for k, v in tiny.items() if k in recipe}
        for column, recipe in script.RECIPES.items()
    }
    for column in "cd":
        recipes[column]["networks"] = 2
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
    if c.start is None:
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
    hypernet = model_of(lenet, start="random")
    parts = [parameters(part) for part in (hypernet.extractor, *hypernet.generators)]
    assert parts == [290400, 193600, 223600, 323600, 4228800, 503200]
    assert parameters(hypernet) == 5763200
    assert parameters(model_of(lenet)) == 5763200 + 1152
    hundred = model_of(lenet, dataset="cifar100")
    assert parameters(hundred.generators[-1]) == 3563200
    for m in (1, 3):
        assert parameters(model_of(lenet, means=m)) == 5763200 + m * (62006 + 1152)
    assert parameters(model_of(lenet, "a")) == 62006
    assert parameters(model_of(lenet, "b")) == 5 * 62006


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


def test_starts(lenet):
    """Near-copies or not, of the usual size 2 / fan-in either way. Random codes share two thirds of
    their direction after two layers of ReLU without biases."""
    torch.manual_seed(0)
    for start, low, high in ("copies", 0.9, 1.0), ("random", 0.0, 0.75):
        theta = lenet.sample(model_of(lenet, start=start), 20)
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
    """W(E(0) + bias) - W(bias) = 0: exactly if both products have one row, else to rounding. Of
    three means it is the middle one. Other z, of the same mean, give other networks."""
    script = importlib.import_module(name)
    shrink(script, monkeypatch.setattr)
    torch.manual_seed(0)
    model, middle = model_of(script, means=m), m // 2
    z = torch.zeros(2, model.noise_size)
    z[1, 1:] = torch.randn(model.noise_size - 1)
    with torch.no_grad():
        theta, alone = model(z), model(z[:1])
    for made, one, mean in zip(theta, alone, model.means):
        torch.testing.assert_close(made[0], mean[middle], rtol=0, atol=1e-6)
        assert m > 1 or torch.equal(one, mean)
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
    make_model, models = script.make_model, []

    def without_deviation(*args):
        model, optimizers = make_model(*args)
        model.scale = 0.0
        models.append(model)
        return model, optimizers

    monkeypatch.setattr(script, "make_model", without_deviation)
    changes = dict(networks=networks, means=m, diversity="none", lam=70.0, steps=3, lr=0.01)
    c, data = settings(script, column, **changes), data_of(script)
    script.train(c, data, tmp_path / "checkpoint.pt")
    trained = saved(tmp_path / "checkpoint.pt")["model"]
    torch.manual_seed(10**6)  # as train() does for seed 0
    start = [mean.detach() for mean in make_model(c, "cpu")[0].means]

    x, y = data["train"]
    padded, y = F.pad(torch.cat([x, x.flip(-1)]), [c.crop] * 4), y.repeat(2)
    for i in range(m):
        theta = [mean[i : i + 1].clone().requires_grad_() for mean in start]
        sgd = torch.optim.SGD(theta, c.lr, 0.9, weight_decay=5e-4, nesterov=True)
        for step in range(3):
            generator = torch.Generator().manual_seed(10**6 + 1 + step)
            noise_of_a_step(script, models[0], networks, generator)  # drawn first
            batch = script.draw(padded, y, (networks, c.images), c.shared, generator)
            own = [part[i::m] for part in batch]  # network n has the mean n modulo M
            losses = [
                F.cross_entropy(script.target_network(images[None], theta)[0], labels)
                for images, labels in zip(*own)
            ]
            sgd.param_groups[0]["lr"] = c.lr * script.rate_factor(c, step)
            sgd.zero_grad()
            (sum(losses) / len(losses)).backward()
            sgd.step()
        for k, alone in enumerate(theta):
            ours, moved = trained[f"means.{k}"][i : i + 1], alone - start[k][i : i + 1]
            torch.testing.assert_close(ours, alone, rtol=1e-3, atol=0.01 * moved.abs().max().item())


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
    cifar = getattr(lenet.datasets, dataset.upper())
    files = write_cifar(tmp_path, cifar, monkeypatch)
    splits = {}
    for name in ("train_list", "test_list"):
        pixels = np.concatenate([part for part, _ in files[name]]).reshape(-1, 3, 32, 32)
        labels = [label for _, part in files[name] for label in part]
        splits[name] = pixels.astype(np.float64), labels
    pixels, labels = splits["train_list"]
    mean, std = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3), ddof=1)
    n = len(labels) // 10
    expected = dict(
        val=(pixels[:n], labels[:n]), train=(pixels[n:], labels[n:]), test=splits["test_list"]
    )
    for script in (lenet, resnet):
        argv = ["--dataset", dataset, "--data", str(tmp_path), "--device", "cpu"]
        data = script.load_data(script.parse_args(argv))
        assert set(data) == set(expected)
        for split, (pixels, labels) in expected.items():
            x, y = data[split]
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
    assert [len(data[k][0]) for k in ("train", "val", "test")] == [2250, 250, 500]
    x, y = data["train"]
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01  # val is a tenth of what was normalised
    assert len(torch.cat([x for x, _ in data.values()]).sum(dim=(1, 2, 3)).unique()) > 2900
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
        mean = sum(probabilities) / n
        return 100 * sum(mean[b, y[b]].log() for b in range(len(y))) / len(y)
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
    model = model_of(small, start="random")
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


def test_rate_factor(script):
    """By hand: up to 1 in 200 steps and down to 0; (b) from 10 to 1 in the first half, then 1."""
    c = settings(script, "d", steps=1000)
    rates = [script.rate_factor(c, step) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 200) and rates[99] == pytest.approx(1 / 2)
    assert max(rates) == rates[199] == 1 and rates[-1] == pytest.approx(1 / 800)
    c = settings(script, "b", steps=1000)
    rates = [script.rate_factor(c, step) for step in range(1000)]
    assert rates[0] == pytest.approx(10 / 200) and max(rates) < 10
    assert rates[250] == pytest.approx(5.5) and rates[400] == pytest.approx(2.8)
    assert set(rates[500:]) == {1}
    for column, steps in (("d", 1), ("d", 2), ("b", 1), ("b", 3)):
        c = settings(script, column, steps=steps)
        assert all(0 < script.rate_factor(c, k) <= 10 for k in range(steps))


class Recorder(nn.Module):
    """A model of one number that writes down the first number of each stream it is given."""

    def __init__(self, numbers: list):
        super().__init__()
        self.weight, self.numbers = nn.Parameter(torch.zeros(())), numbers
        self.first(torch.default_generator)  # what initialisation would draw

    def first(self, generator):
        self.numbers.append(torch.randint(2**62, (), generator=generator).item())

    def noise(self, n, generator=None, stratified=False):
        self.first(generator)
        return torch.zeros(n, 1)

    def forward(self, z):
        raise InterruptedError


def test_no_two_streams_of_random_numbers_are_the_same(script, tmp_path, monkeypatch):
    """Initialisation and each of 1000 steps, for four seeds; validation; test; made-up images. Two
    different streams of 62 bits agree with a chance of 1e-11."""
    numbers, validate = [], script.validate

    def make_model(c, device):
        model = Recorder(numbers)
        return model, [torch.optim.SGD(model.parameters(), 0.0)]

    def training_step(model, *_):
        return model.weight * 1, *torch.zeros(3)

    monkeypatch.setattr(script, "make_model", make_model)
    monkeypatch.setattr(script, "training_step", training_step)
    monkeypatch.setattr(script, "draw", lambda *_: (torch.zeros(8, 1), torch.zeros(8, 1)))
    monkeypatch.setattr(script, "validate", lambda *_: dict(val_one=0.0))
    data = data_of(script)
    for seed in range(4):
        c = settings(script, "d", steps=1000, rows=1, seed=seed)
        script.train(c, data, tmp_path / f"{seed}.pt")
    assert len(numbers) == 4 * 1001
    model = Recorder([])
    with pytest.raises(InterruptedError):
        validate(model, data)
    with pytest.raises(InterruptedError):
        script.analyse(model, c, data)
    model.first(torch.Generator().manual_seed(0))  # load_data's
    numbers += model.numbers[1:]
    assert len(set(numbers)) == len(numbers) == 4 * 1001 + 3


@pytest.mark.parametrize("steps, networks", [(20, 1), (40, 1), (1000, 2), (40, 5), (1235, 10)])
def test_ten_networks_of_the_chains(script, tmp_path, monkeypatch, steps, networks):
    """From the second half, equally far apart, the last included, all chains at the same time."""
    model = nn.Linear(1, 1, bias=False)
    model.means, model.noise = model.parameters(), lambda *_, **__: torch.zeros(networks, 1)
    seen = []

    def training_step(*_):
        seen.append(None)
        model.means = [torch.full((networks, 1), float(len(seen)))]  # the number of the step
        return model.weight.sum(), *torch.zeros(3)

    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    monkeypatch.setattr(script, "make_model", lambda *_: (model, [optimizer]))
    monkeypatch.setattr(script, "training_step", training_step)
    monkeypatch.setattr(script, "draw", lambda *_: (torch.zeros(networks, 1),) * 2)
    monkeypatch.setattr(script, "validate", lambda *_: dict(val_one=0.0))
    c = settings(script, "b", steps=steps, networks=networks, rows=1)
    script.train(c, data_of(script), tmp_path / "checkpoint.pt")
    taken = [int(theta[0][0, 0]) for theta in saved(tmp_path / "checkpoint.pt")["chain"]]
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
    assert run["test"]["networks"] == 10
    assert run["test"]["vote"]["1"] == pytest.approx(sum(accs) / 10, abs=1e-6)


def test_it_learns(script, tmp_path, monkeypatch):
    """Made-up patterns, a short life: far above the 10 % of chance."""
    monkeypatch.undo()  # the real hypernetworks, more images
    if script.NAME == "04_cifar_resnet32":
        monkeypatch.setattr(script, "BLOCKS", 1)
    data = script.load_data(script.parse_args(FAKE))
    data = {k: (x[:n], y[:n]) for (k, (x, y)), n in zip(data.items(), (150, 50, 50))}
    c = settings(script, "d", steps=60, networks=2, images=16, rows=1, lr=3e-4)
    script.train(c, data, tmp_path / "checkpoint.pt")
    (row,) = saved(tmp_path / "checkpoint.pt")["log"]
    assert row["val_one"] > 0.4


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("kind", MEASURES)
@pytest.mark.parametrize("means", [0, 2])
def test_training_step_without_the_device(small, kind, device, means):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    c = settings(small, "d", diversity=kind, means=means)
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        with torch.device(device):  # for the parameters; the step must find its device by itself
            model = small.Hypernetwork(shapes_of(small), [6, 16, 120, 1, 1], means)
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
    probabilities = logits.softmax(dim=-1)
    result = script.evaluate(probabilities, y)
    networks, labels = probabilities.double().tolist(), y.tolist()
    assert result["networks"] == 23
    for name in ("vote", "nll", "calibration_error"):
        assert list(result[name]) == ["1", "2", "5", "10", "20"]
    for size in (1, 2, 5, 10, 20):
        groups = [networks[i : i + size] for i in range(0, 23 - size + 1, size)]
        numbers = [plain_ensemble(group, labels) for group in groups]
        expected = [sum(column) / len(groups) for column in zip(*numbers)]
        ours = [result[name][str(size)] for name in ("vote", "nll", "calibration_error")]
        assert ours == pytest.approx(expected, rel=1e-4)
    votes = [[image.index(max(image)) for image in network] for network in networks]
    pairs = [(a, b) for i, a in enumerate(votes) for b in votes[:i]]
    different = sum(u != v for a, b in pairs for u, v in zip(a, b))
    assert result["disagreement"] == pytest.approx(different / len(pairs) / 60, rel=1e-4)
    alone = script.evaluate(probabilities[:1], y)
    assert alone["disagreement"] == 0 and list(alone["vote"]) == ["1"]


def test_votes_by_hand(script):
    #                       image: 0  1  2  3
    votes = torch.tensor([[7, 2, 9, 4], [7, 2, 3, 5], [1, 8, 3, 6]])
    assert script.majority(votes).tolist() == [7, 2, 3, 4]  # the last is a tie: smallest class
    # Pairs that differ, of three: 2, 2, 2, 3
    assert script.disagreement(votes) == pytest.approx((2 + 2 + 2 + 3) / 12)


def test_ensemble_by_hand(script):
    """Three networks, two images, three classes: the vote and the mean disagree on image 0."""
    probabilities = torch.tensor(
        [
            [[0.50, 0.45, 0.05], [0.1, 0.8, 0.1]],
            [[0.50, 0.45, 0.05], [0.2, 0.7, 0.1]],
            [[0.05, 0.90, 0.05], [0.3, 0.6, 0.1]],
        ]
    )
    vote, nll, error = script.ensemble(probabilities, torch.tensor([0, 1])).tolist()
    assert vote == 1.0
    assert nll == pytest.approx(-(math.log(0.35) + math.log(0.7)) / 2, rel=1e-5)
    assert error == pytest.approx((0.6 + 0.3) / 2, rel=1e-5)  # alone in their bins: 0.6-0, 0.7-1


def test_prediction(script):
    """One network at a time on all images at once; 300 are two portions. Float32."""
    torch.manual_seed(0)
    theta = script.sample(model_of(script, start="random"), 3)
    x = torch.randn(300, 3, 32, 32)
    if hasattr(script, "recalibrate"):  # without moments of its own an image depends on the others
        theta = script.recalibrate(theta, x[:50])
    probabilities = script.predict(theta, x)
    for n in range(3):
        logits = script.target_network(x[None], [t[n : n + 1] for t in theta])[0]
        torch.testing.assert_close(probabilities[n], logits.softmax(dim=1), rtol=1e-3, atol=1e-5)


def test_distillation(script, monkeypatch):
    """The networks that are averaged, and tested, against torch.mean over all networks at once. 230
    are several portions. The tested networks are the first of the same z."""
    c, data = settings(script, "d", tested=12, averaged=230), data_of(script)
    torch.manual_seed(0)
    model, predict, predicted = model_of(script, start="random"), script.predict, []
    monkeypatch.setattr(
        script, "predict", lambda theta, x: predicted.append(theta) or predict(theta, x)
    )
    result = script.analyse(model, c, data)
    z = model.noise(230, torch.Generator().manual_seed(script.TEST))
    with torch.no_grad():
        theta = model(z)
    (x, y), images = data["test"], data["train"][0][:30]
    tested, _, *averaged = predicted
    for ours, plain in zip(tested, theta):
        torch.testing.assert_close(ours[..., : plain.shape[2]], plain[:12], rtol=1e-4, atol=1e-5)
    sizes = [n for n in script.SIZES if n <= 230]
    assert list(result["averaged"]) == [str(n) for n in sizes] and len(averaged) == len(sizes) >= 6
    for n, ours in zip(sizes, averaged):
        mean = [t[:n].mean(dim=0, keepdim=True) for t in theta]
        if hasattr(script, "recalibrate"):
            mean = script.recalibrate(mean, images)
        for a, b in zip(ours, mean):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        logits = script.target_network(x[None], ours)[0]
        acc = (logits.argmax(dim=1) == y).float().mean().item()
        assert result["averaged"][str(n)] == pytest.approx(acc, abs=1e-6)


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
    folders = [f"cifar10_{column}_quick_fake" for column in "abcd"]
    expected = {f"{name}/{file}" for name in folders for file in ("checkpoint.pt", "metrics.json")}
    assert set(files_in(out)) == expected | {"accuracy.png"}
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    for run, folder in zip(runs, folders):
        assert run == json.loads((out / folder / "metrics.json").read_text())
        facts = ("settings", "command", "commit", "hardware", "torch", "log", "test", "val")
        assert set(facts) <= set(run) and run["command"].startswith(f"python {script.NAME}.py --f")
        assert run["settings"]["steps"] == 4 and [row["step"] for row in run["log"]] == [2, 4]
        assert run["settings"]["fake_data"] and run["settings"]["name"] == folder
        tested = dict(a=1, b=10 if script.NAME[1] == "3" else 2)
        assert run["test"]["networks"] == tested.get(run["settings"]["column"], 12)
    table = capsys.readouterr().out
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4 and all("quick, fake" in row for row in rows[2:])
    for run, row in zip(runs, rows[2:]):
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[3] == f"{100 * run['test']['vote']['1']:.2f} %"
        votes = run["test"]["vote"].get("10")
        assert cells[4] == (f"{100 * votes:.2f} %" if votes else "")

    for name in ("load_data", "train", "analyse"):
        monkeypatch.setattr(script, name, forbidden)
    before = files_in(out)
    (out / "accuracy.png").unlink()
    assert script.main([*argv, "--out", str(out)]) == runs
    assert files_in(out) == before
    assert script.main([*argv, "--columns", "d", "--out", str(out)]) == runs
    assert capsys.readouterr().out.count(table) == 2

    documented = tmp_path / "results" / script.NAME
    shutil.copytree(out, documented, ignore=shutil.ignore_patterns("*.pt", "*.png"))
    assert script.main(["--device", "cpu", "--out", str(documented)]) == runs
    assert (documented / "accuracy.png").read_bytes() == before["accuracy.png"]
    with pytest.raises(SystemExit, match="no finished run"):
        script.main(["--device", "cpu", "--out", str(tmp_path / "results" / "other")])


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
        ("04_cifar_resnet32", "d", 0),
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
    """kill -9 of a process in step 6 of column d, after all of b: the same command again leaves b
    as it is, and ends with the bits of an undisturbed run. tests/kill.py kills at any moment."""
    argv = [*FAKE, "--columns", "b", "d", "--out"]
    process = subprocess.run(
        [sys.executable, "-c", KILLED, script.NAME, str(8 + 6), *argv, str(tmp_path / "stopped")],
        env=os.environ | dict(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"),
        capture_output=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    (first,) = tmp_path.glob("stopped/*/metrics.json")
    before = first.read_bytes()
    assert saved(tmp_path / "stopped/cifar10_d_fake/checkpoint.pt")["step"] == 4
    script.main([*argv, str(tmp_path / "stopped")])
    assert first.read_bytes() == before
    script.main([*argv, str(tmp_path / "whole")])
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_names_of_folders(lenet, resnet):
    """A name says what was overridden, and two runs of other settings never have the same one."""

    def names(script, line: str) -> list[str]:
        return [c.name for c in script.parse_args(["--device", "cpu", *line.split()]).runs]

    assert names(lenet, "") == [f"cifar10_{column}" for column in "abcd"]
    line = "--columns d --dataset cifar100 --lam 300 --seed 1 --quick --fake-data"
    assert names(lenet, line) == ["cifar100_d_lam300_seed1_quick_fake"]
    assert names(lenet, "--columns c d --lr 1e-4 --diversity weights") == [
        "cifar10_c_weights_lr0.0001",
        "cifar10_d_weights_lr0.0001",
    ]
    values = ["--steps 100", "--steps 1000", "--lr 0.01", "--lr 0.001", "--lam 300", "--lam 3e3"]
    values += ["--networks 2", "--networks 20", "--images 8", "--seed 1", "--seed 2", "--quick"]
    values += ["--fake-data", "--dataset cifar100", "--seed 20260101", "--seed 20260102", ""]
    for script, own in (lenet, ["--diversity weights", "--diversity none"]), (resnet, ["--amp"]):
        lines = [f"--columns c d {a} {b}" for a in values + own for b in values + own]
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


@pytest.mark.parametrize("kind", ["half", "empty", "text", "other script", "weights", "settings"])
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
    elif kind == "settings":
        torch.save(dict(settings="none"), file)
    else:
        whole = file.read_bytes()
        file.write_bytes(dict(half=whole[: len(whole) // 2], empty=b"", text=b"hello")[kind])
    message = refused(script, [*FAKE, "--columns", "a", "--out", str(tmp_path)], tmp_path)
    assert str(file) in message
    assert "of other settings" in message if kind == "other script" else "damaged" in message
    with pytest.raises(SystemExit):
        script.load(file)


@pytest.mark.parametrize("save", [torch.save, lambda x, f: f.write_bytes(pickle.dumps(x, 2))])
def test_a_hostile_file_is_refused_and_not_run(script, tmp_path, save):
    folder, victim = tmp_path / "cifar10_a_fake", tmp_path / "executed"
    folder.mkdir()
    save(dict(settings=Hostile(victim)), folder / "checkpoint.pt")
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


def test_out_is_a_file(script, tmp_path, monkeypatch):
    """Python's own error says so, before any training."""
    (tmp_path / "out").write_text("precious")
    monkeypatch.setattr(script, "train", forbidden)
    with pytest.raises(OSError, match=str(tmp_path / "out")):
        script.main([*FAKE, "--columns", "a", "--out", str(tmp_path / "out")])
    assert (tmp_path / "out").read_text() == "precious"


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--steps 0", "--steps: 0 is not a positive number"),
        ("--lr nan", "--lr: nan is not"),
        ("--lam inf", "--lam: inf is not"),
        ("--lam -1", "--lam: -1.0 is not"),
        ("--networks -3", "--networks: -3 is not"),
        ("--images 0", "--images: 0 is not"),
        ("--columns d --networks 1", "diversity needs at least 2"),
        ("--device cuda", "torch sees no CUDA device"),
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
