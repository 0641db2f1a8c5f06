"""The MNIST script against plain loops, torch.nn, torch.distributions and the paper's counts. What
it shares with 03 word for word is tested there."""

import dataclasses
import math
import os
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

from common import fix_gauge

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/02_mnist_hypernet"
SMALL = "--device cpu --steps 8 --networks 4 --images 4 --test-images 20 --test-networks 6 --runs "


def small(mnist, flags):
    """Settings of one small run, named first in the flags."""
    (s,) = mnist.parse_args((SMALL + flags).split()).settings.values()
    return s


def command(data, out, flags):
    return [*(SMALL + flags).split(), "--data", str(data), "--out", str(out)]


def build(mnist, run):
    torch.manual_seed(0)
    return mnist.make_model(mnist.RUNS[run])


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def vectors(theta):
    return torch.cat([layer.flatten(1) for layer in theta], dim=1)


def files_in(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(autouse=True)
def fewer_networks(mnist, monkeypatch):
    """In PCA and covariances: 30 instead of 1,000."""
    monkeypatch.setattr(mnist, "MANY", 30)


# ---- Settings and data ---------------------------------------------------------------------------
def test_runs_are_the_documented_ones(mnist):
    rows = {name: dataclasses.astuple(s)[:10] for name, s in mnist.parse_args([]).settings.items()}
    assert rows == {
        "hypernet": ("hypernetwork", "copies", 3000, 32, 32, 1, 2e-3, False, True, 1e3),
        "paper": ("hypernetwork", "random", 13_000, 32, 32, 0, 3e-4, True, True, 1e3),
        "mnfg": ("mnfg", "random", 30_000, 4, 32, 1, 1e-3, False, True, 55e3),
    }
    s = mnist.parse_args(["--quick", "--runs", "paper", "--no-gauge"]).settings["paper"]
    assert (s.steps, s.gauge, s.lam, s.test_networks) == (250, False, 1e3, 20)


@pytest.mark.parametrize(
    "words", ["--lr nan", "--networks 1", "--test-networks 1", "--shift 15", "--start copy"]
)
def test_wrong_flags(mnist, tmp_path, capsys, words):
    """Exit code 2 before any work; the last line names the setting that is wrong."""
    with pytest.raises(SystemExit, match="2"):
        mnist.main([*words.split(), "--out", str(tmp_path / "runs")])
    name = words.split()[0].strip("-").replace("-", "_")
    assert name in capsys.readouterr().err.splitlines()[-1] and not any(tmp_path.iterdir())


@pytest.mark.parametrize("limit, val, test", [(10_000, 41, 100), (20, 20, 20)])
def test_load_data(mnist, data, limit, val, test):
    """Against the bytes: 500 images, of which a twelfth is for validation, and 100."""
    pixels = labels = b""
    for name in ("train", "t10k"):
        pixels += (data / f"MNIST/raw/{name}-images-idx3-ubyte").read_bytes()[16:]
        labels += (data / f"MNIST/raw/{name}-labels-idx1-ubyte").read_bytes()[8:]
    images = np.frombuffer(pixels, np.uint8).reshape(600, 1, 28, 28) / 255
    splits = mnist.load_data(mnist.Settings(test_images=limit), data, "cpu")
    expected = dict(train=(val, 500), val=(0, val), test=(500, 500 + test))
    for split, (start, end) in expected.items():
        x, y = splits[split]
        np.testing.assert_allclose(x, images[start:end], rtol=1e-6)
        assert x.dtype == torch.float32 and y.tolist() == list(labels[start:end])


def test_random_crops(mnist):
    """Each is its own image, moved by up to two pixels."""
    images = torch.arange(5.0).view(5, 1, 1, 1) + torch.rand(5, 1, 32, 32) / 2
    s = mnist.Settings(networks=3, images=40, shift=2)
    x, y = mnist.random_crops(images, 7 + torch.arange(5), s, generator_of(0))
    assert x.shape == (3, 40, 1, 28, 28)
    places = []
    for image, label in zip(x.flatten(0, 1), y.flatten()):
        for row in range(5):
            for column in range(5):
                crop = images[label - 7, :, row : row + 28, column : column + 28]
                if torch.equal(image, crop):
                    places.append((row, column))
    assert len(places) == 120 and len(set(places)) > 20  # of 25


# ---- Networks ------------------------------------------------------------------------------------
def test_counts_of_the_paper(mnist):
    def parameters(module):
        return sum(p.numel() for p in module.parameters())

    paper = build(mnist, "paper")
    assert sum(f * k for f, k in mnist.SHAPES) == 20_018 and parameters(paper) == 633_640
    counts = []
    for part in (paper.extractor, *paper.generators):
        matrices = [part[i].weight for i in (0, 3, 6)]
        counts.append(sum(weight.numel() for weight in matrices))
        assert all(part[i].bias is None for i in (0, 3, 6))
        for weight in matrices:  # a normal distribution that is cut at two deviations
            largest = weight.abs().max() * weight.shape[1] ** 0.5
            assert 0.19 < largest <= 0.2
    assert counts == [436_500, 3240, 91_600, 90_000, 9900]
    assert parameters(build(mnist, "hypernet")) == 633_640 + 855
    mnfg = build(mnist, "mnfg")
    assert [parameters(layer) for layer in mnfg.layers] == [31_180, 40_540, 728_652, 7784]
    assert mnfg.draw_z(2, generator_of(0)).shape == (2, 840 + 20_018)
    for layer, std in zip(mnfg.layers, [0.156, 0.039, 0.071, 0.471]):
        assert layer.mean[:, :-1].std().item() == pytest.approx(std, rel=0.25)  # of 80 numbers: 8 %
        assert (layer.mean[:, -1] == 0).all()


def test_target_network_is_the_papers(mnist):
    """Against torch.nn modules, ReLU before pooling as printed."""
    torch.manual_seed(0)
    twin = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10),
    )  # fmt: skip
    layers = [module for module in twin if hasattr(module, "weight")]
    theta = [torch.cat([m.weight.flatten(1), m.bias[:, None]], dim=1)[None] for m in layers]
    assert [tuple(layer.shape[1:]) for layer in theta] == mnist.SHAPES
    x = torch.rand(5, 1, 28, 28)
    torch.testing.assert_close(mnist.target_network(x[None], theta)[0], twin(x))


@torch.no_grad()
def test_a_filter_is_made_of_its_own_code(mnist):
    """Code by code through the layer's generator, in evaluation mode: batch norm by running
    moments."""
    model = build(mnist, "hypernet").eval()
    z = model.draw_z(2, generator_of(0))
    assert (z.min() < -0.9) and (z.max() > 0.9) and z.abs().max() <= 1
    codes = model.extractor(z).view(2, 57, 15)
    used = 0
    for layer, generator, number in zip(model(z), model.generators, [32, 16, 8, 1]):
        for n in range(2):
            parts = [generator(codes[n, i : i + 1]) for i in range(used, used + number)]
            torch.testing.assert_close(layer[n], torch.cat(parts).view(layer[n].shape))
        used += number


def test_starts(mnist):
    """With "copies" networks of different z start alike; with the paper's start they do not."""
    likeness = {}
    for run in ("hypernet", "paper"):
        theta = mnist.sample(build(mnist, run), 8, generator_of(0))
        directions = F.normalize(vectors(theta), dim=1)
        likeness[run] = (directions @ directions.T)[~torch.eye(8, dtype=torch.bool)].mean()
    assert likeness["hypernet"] > 0.95
    assert likeness["paper"] < 0.85  # of eight seeds: 0.25 to 0.76


@pytest.mark.parametrize("run", ["hypernet", "paper", "mnfg"])
def test_sampled_networks(mnist, run):
    """Gauge fixed; each depends on its own z alone; a model in training mode is not changed."""
    model = build(mnist, run).train()
    before = [value.clone() for value in model.state_dict().values()]
    theta = mnist.sample(model, 4, generator_of(0))
    assert [tuple(layer.shape[1:]) for layer in theta] == mnist.SHAPES
    for layer in theta[:-1]:
        squares = layer.square().sum(dim=-1)
        torch.testing.assert_close(squares, torch.full_like(squares, layer.shape[-1]))
    assert theta[-1][..., -1].mean(dim=1).abs().max() < 1e-5
    alone = mnist.weights_of(model, model.draw_z(4, generator_of(0))[2:3])
    torch.testing.assert_close(vectors(theta)[2:3], vectors(alone), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values()))


# ---- MNFG ----------------------------------------------------------------------------------------
def test_flow_determinant_is_autograds(mnist):
    torch.manual_seed(0)
    flow = mnist.Flow(6, 5).double()
    z = torch.randn(1, 6).double()
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None])[0][0], z[0])
    torch.testing.assert_close(flow(z)[1][0], torch.linalg.slogdet(jacobian).logabsdet)
    assert (flow(z)[0] != z).all()  # complementary masks: every coordinate moves
    for network in mnist.Flow(60, 40).networks:
        for layer in (network[0], network[2]):  # 2,400 and 4,800 numbers: within 2 %
            assert layer.weight.std().item() == pytest.approx((4 / 100) ** 0.5, rel=0.1)
        assert network[0].bias.unique().tolist() == [0]
        assert network[2].bias.tolist() == [0] * 60 + [2] * 60  # gates are open


@pytest.mark.parametrize("conv", [True, False])
@torch.no_grad()
def test_posterior_and_bound(mnist, conv):
    """A layer of three filters with four inputs: its weights, and KL(q(W | z) || N(0, 1)) +
    log q(z) - log r(z | W), from torch.distributions and loops."""
    torch.manual_seed(0)
    normal = torch.distributions.Normal
    layer = mnist.MNFGLayer(3, 4, conv, 0.5).double()
    layer.mean.normal_()
    layer.log_std.uniform_(-2, -0.1)  # the network's are cut at 0.5
    noise_z = torch.randn(1, 3 if conv else 4).double()
    noise = torch.randn(1, 3, 5).double()
    filters, bound = layer(noise_z, noise)
    start = normal(layer.start_mean, (layer.start_log_var / 2).exp())
    z, log_det = layer.flow(layer.start_mean + start.stddev * noise_z)
    divergence = 0.0
    for f in range(3):
        for k in range(5):  # the last is the bias
            mean = (z[0, f] if conv else (*z[0], 1)[k]) * layer.mean[f, k]
            std = layer.log_std[f, k].exp()
            torch.testing.assert_close(filters[0, f, k], mean + min(std, 0.5) * noise[0, f, k])
            divergence += torch.distributions.kl_divergence(normal(mean, std), normal(0.0, 1.0))
    c = layer.r_weight
    w = filters[0]
    if conv:
        inner = [sum(c[f] * (w[f, k] + w[f, 4]) for f in range(3)) for k in range(4)]
    else:
        inner = [torch.tanh(sum(c[k] * w[f, k] for k in range(4))) for f in range(3)]
    a = sum(inner) / len(inner)
    z_b, log_det_r = layer.r_flow(z)
    r = normal(layer.r_mean * a, (-layer.r_precision * a / 2).exp())
    log_r = log_det_r + r.log_prob(z_b).sum()
    torch.testing.assert_close(bound, divergence - start.entropy().sum() - log_det - log_r)


# ---- Training ------------------------------------------------------------------------------------
def plain_logits(x, theta, n):
    """Network n on images (B, 1, 28, 28), in plain torch."""
    w1, w2, w3, w4 = [layer[n] for layer in theta]
    x = F.conv2d(x, w1[:, :-1].reshape(32, 1, 5, 5), w1[:, -1], padding=2)
    x = F.conv2d(F.max_pool2d(x.relu(), 2), w2[:, :-1].reshape(16, 32, 5, 5), w2[:, -1], padding=2)
    x = F.linear(F.max_pool2d(x.relu(), 2).flatten(1), w3[:, :-1], w3[:, -1]).relu()
    return F.linear(x, w4[:, :-1], w4[:, -1])


@pytest.mark.parametrize("flags", ["paper", "paper --no-gauge", "mnfg"])
def test_training_step(mnist, flags):
    """loss = lam * cross-entropy - entropy (of MNFG: + its bound), from plain loops."""
    s = small(mnist, flags + " --lam 70")
    model = build(mnist, flags.split()[0])
    x = torch.rand(4, 3, 1, 28, 28)
    y = torch.randint(10, (4, 3))
    z = model.draw_z(4, generator_of(0))
    theta = model(z)
    if s.model == "mnfg":
        noise_z = z[:, :840].split([32, 16, 784, 8], dim=1)
        noise = z[:, 840:].split([f * k for f, k in mnist.SHAPES], dim=1)
        entropy = 0.0
        for i, layer in enumerate(model.layers):
            filters, bound = layer(noise_z[i], noise[i].reshape(4, *mnist.SHAPES[i]))
            assert torch.equal(filters, theta[i])
            entropy -= sum(bound) / 4
    else:
        points = vectors(fix_gauge(theta) if s.gauge else theta).double()
        entropy = torch.digamma(torch.tensor(4.0))
        for i in range(4):
            nearest = min(torch.dist(points[i], points[j]) for j in range(4) if j != i)
            entropy = entropy + 300 * nearest.log() / 4
    logits = torch.stack([plain_logits(x[n], theta, n) for n in range(4)])
    loss_acc = sum(F.cross_entropy(logits[n], y[n]) for n in range(4)) / 4
    result = mnist.training_step(model, z, x, y, s)
    expected = dict(entropy=entropy, loss_acc=loss_acc, loss=70 * loss_acc - entropy)
    expected["acc"] = (logits.argmax(dim=-1) == y).double().mean()
    for name, value in expected.items():  # float32: sums of 20,000 terms
        torch.testing.assert_close(result[name], value.float(), rtol=1e-5, atol=1e-3)


def test_learning_rates(mnist):
    ours = mnist.Settings(decay=False, steps=1000)
    for step, rate in {0: 1 / 200, 199: 1, 200: 1, 600: 1 / 2, 999: 1 / 800}.items():
        assert mnist.lr_factor(ours, step) == pytest.approx(rate)
    assert mnist.lr_factor(mnist.Settings(decay=False, steps=1), 0) == 1
    assert 3e-4 * mnist.lr_factor(mnist.RUNS["paper"], 13_000) == pytest.approx(2.3e-4, rel=0.01)


@pytest.mark.parametrize("run", ["paper", "mnfg"])
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_without_the_device(mnist, run, device, monkeypatch):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda tensor, **_: tensor)  # it reads values
    with FakeTensorMode() if device == "cuda" else nullcontext():
        with torch.device(device):  # for these; the rest must find it by itself
            model = build(mnist, run)
            z = torch.rand(4, 20_858 if run == "mnfg" else 300)
            padded = torch.rand(20, 1, 30, 30)
            y = torch.zeros(20, dtype=torch.long)
        s = small(mnist, run + " --shift 1")
        result = mnist.training_step(model, z, *mnist.random_crops(padded, y, s, None), s)
        assert all(value.device.type == device for value in result.values())
        if device == "meta":
            result["loss"].backward()
            assert all(p.grad.device.type == device for p in model.parameters())
            one = [torch.zeros(1, *shape, device="meta") for shape in mnist.SHAPES]
            sign = mnist.fast_gradient(one, padded[:, :, 1:29, 1:29], y)
            assert sign.device.type == device
        theta = mnist.gaussian_like(mnist.weights_of(model, z), 6, None)
        assert mnist.predict(theta, padded[..., :28, :28]).device.type == device


def test_gradients_are_cut_and_their_largest_norm_is_logged(mnist, data, tmp_path, monkeypatch):
    """At 5 lam. A row of the log is two steps here, the last one is one."""
    norms = []
    clip = nn.utils.clip_grad_norm_

    def recorded(parameters, limit):
        norms.append(clip(parameters, limit))
        left = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        assert limit == 350 and left == pytest.approx(min(350, norms[-1]), rel=1e-3)
        return norms[-1]

    s = small(mnist, "hypernet --steps 43 --lam 70")
    model = mnist.make_model(s)
    monkeypatch.setattr(mnist, "make_model", lambda s: model)
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", recorded)
    _, log = mnist.train(s, mnist.load_data(s, data, "cpu"), tmp_path / "checkpoint.pt")
    assert max(norms) > 350 and len(set(norms)) == 43
    assert [row["norm"] for row in log] == [max(norms[i : i + 2]) for i in range(0, 43, 2)]


def test_it_learns(mnist, data, tmp_path):
    """Made-up patterns on black, a short life: chance has an NLL of log 10 = 2.3. Two seeds reach
    0.2; how far it gets depends on the processor's rounding."""
    s = small(mnist, "hypernet --steps 200 --networks 6 --images 16 --lam 1e5")
    splits = mnist.load_data(s, data, "cpu")
    dark = {split: ((3 * x - 1.8).clamp(0, 1), y) for split, (x, y) in splits.items()}
    _, log = mnist.train(s, dark, tmp_path / "checkpoint.pt")
    assert log[-1]["nll"] < 1.2 and log[-1]["step"] == 200


# ---- Evaluation ----------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [1, 2, 23])
def test_evaluate(mnist, number):
    """Against loops over networks and images. With ties: the smallest class wins."""
    torch.manual_seed(0)
    y = torch.randint(4, (60,))
    probabilities = (2 * torch.randn(number, 60, 4) + F.one_hot(y, 4)).softmax(dim=-1)
    answers = probabilities.argmax(dim=-1).tolist()
    expected = dict(one=0, vote=0, disagree=0, nll_one=0, nll_vote=0)
    each = [0] * number
    for b, label in enumerate(y.tolist()):
        for n in range(number):
            each[n] += 100 * (answers[n][b] == label) / 60
            expected["nll_one"] -= math.log(probabilities[n, b, label]) / number / 60
            for m in range(n):
                pairs = number * (number - 1) / 2
                expected["disagree"] += 100 * (answers[n][b] != answers[m][b]) / pairs / 60
        counts = [[row[b] for row in answers].count(k) for k in range(4)]
        expected["vote"] += 100 * (counts.index(max(counts)) == label) / 60
        expected["nll_vote"] -= math.log(probabilities[:, b, label].mean()) / 60
    expected["one"] = sum(each) / number
    result = mnist.evaluate(probabilities, y)
    assert result.pop("each") == pytest.approx(each)
    assert result == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_paths(mnist, monkeypatch):
    """Eleven points: the ends are networks, the others on a line between gauge-fixed weights, or
    between their z. A dip is below the worse end, and 0 without one."""
    model = build(mnist, "paper")
    seen = []
    predict = mnist.predict
    monkeypatch.setattr(mnist, "predict", lambda *a: seen.append(vectors(a[0])) or predict(*a))
    x = torch.rand(5, 1, 28, 28)
    y = torch.randint(10, (5,))
    paths = mnist.walk_paths(model, x, y, generator_of(3))
    assert len(seen) == 20 and [len(paths[way]) for way in ("straight", "through z")] == [10, 10]
    one, other = model.draw_z(2, generator_of(3))
    for i in range(11):
        ends = vectors(mnist.weights_of(model, torch.stack([one, other])))
        straight = ends[0] + i / 10 * (ends[1] - ends[0])
        through_z = vectors(mnist.weights_of(model, (one + i / 10 * (other - one))[None]))
        torch.testing.assert_close(seen[0][i], straight, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen[1][i : i + 1], through_z, rtol=1e-4, atol=1e-4)
    hits = mnist.evaluate(predict(mnist.weights_of(model, one[None]), x), y)["one"]
    assert paths["straight"][0][0] == paths["through z"][0][0] == hits
    assert mnist.mean_dip([[9, 4, 8], [9, 9, 8], [6, 5, 9]]) == pytest.approx((4 + 0 + 1) / 3)


def test_attack(mnist, monkeypatch):
    """A network and three others, image by image, of two portions: targets are wrong classes, the
    gradient is autograd's; counted are images that the attacked network gets right."""
    torch.manual_seed(0)
    theta = [2 * torch.randn(4, f, k) / k**0.5 for f, k in mnist.SHAPES]
    one = [layer[:1] for layer in theta]
    x = torch.rand(60, 1, 28, 28)
    y = plain_logits(x, theta, 0).argmax(dim=1)
    y[:20] = (y[:20] + 1) % 10
    calls = []
    fast_gradient = mnist.fast_gradient

    def recorded(*args):
        calls.append((args[2], fast_gradient(*args)))
        return calls[0][1]

    monkeypatch.setattr(mnist, "fast_gradient", recorded)
    rows = mnist.attack(one, [layer[1:] for layer in theta], x, y, generator_of(0))
    ((target, sign),) = calls
    assert (target != y).all() and len((target - y).remainder(10).unique()) > 5
    for i in range(60):
        image = x[i : i + 1].clone().requires_grad_()
        plain_logits(image, theta, 0).softmax(dim=1)[0, target[i]].backward()
        # Signs of gradients that are nearly 0 may differ, in float32.
        assert (sign[i] == image.grad[0].sign()).double().mean() > 0.98
    for epsilon, row in zip(mnist.EPSILONS, rows, strict=True):
        fooled = [0, 0]
        for i in range(20, 60):
            image = x[i : i + 1] + epsilon * sign[i]
            first, *classes = [int(plain_logits(image, theta, n).argmax()) for n in range(4)]
            winner = min(classes, key=lambda k: (-classes.count(k), k))
            fooled[0] += int(first != y[i])
            fooled[1] += int(winner != y[i])
        assert row == pytest.approx([100 * count / 40 for count in fooled])
    assert not x.requires_grad and rows[0][0] == 0 and rows[-1][0] > 50


def test_principal_components(mnist):
    """A parabola in 50 dimensions, of known variances: along it of t, 4, across of t^2 - 1 / 3 with
    t uniform in (-1, 1), 4 / 45, times 9; the rest is small noise."""
    torch.manual_seed(0)
    t = torch.linspace(-1, 1, 400)
    axes = torch.linalg.qr(torch.randn(50, 2)).Q.T
    curve = 3.46 * t[:, None] * axes[0] + 3 * (t**2)[:, None] * axes[1]
    found = mnist.principal_components((curve + 0.01 * torch.randn(400, 50) + 7).view(400, 5, 10))
    variances = np.array([3.46**2 / 3, 9 * 4 / 45])
    assert found["shares"] == pytest.approx(variances / variances.sum(), rel=0.02)
    assert found["explained"] == pytest.approx(1, abs=0.01)
    first, second = np.array(found["coordinates"])
    np.testing.assert_allclose(abs(first), abs(3.46 * t), atol=0.1)
    np.testing.assert_allclose(abs(second), abs(3 * (t**2 - 1 / 3)), atol=0.1)
    normal = mnist.principal_components(torch.randn(400, 50))
    assert normal["explained"] < 0.05  # of independent numbers: 1 / 400 on average


def test_analyse(mnist, monkeypatch):
    """The same numbers from the samples, in the order in which they are drawn."""
    model = build(mnist, "paper")
    data = {"val": (torch.rand(30, 1, 28, 28), torch.randint(10, (30,)))}
    data["test"] = (torch.rand(30, 1, 28, 28), torch.randint(10, (30,)))
    attacks = []
    attack = mnist.attack
    monkeypatch.setattr(mnist, "attack", lambda *args: attacks.append(args) or attack(*args))
    results = mnist.analyse(model, small(mnist, "paper"), data)
    generator = generator_of(mnist.TEST)
    networks = mnist.sample(model, 6, generator)
    many = mnist.sample(model, 30, generator)
    average = [sum(layer)[None] / 30 for layer in many]
    normal = mnist.gaussian_like(many, 6, generator)
    x, y = data["test"]
    for i, (one, others, images, labels, _) in enumerate(attacks):
        assert (len(one[0]), len(others[0])) == (1, 3)
        assert torch.equal(images[0], x[10 * i]) and labels.tolist() == [y[10 * i]]
    for kind, theta in dict(networks=networks, average=average, gaussian=normal).items():
        again = mnist.evaluate(mnist.predict(theta, x), y)["nll_vote"]
        assert results["test"][kind]["nll_vote"] == pytest.approx(again, rel=1e-3)
    x, y = data["val"]
    again = mnist.evaluate(mnist.predict(networks, x), y)["nll_vote"]
    assert results["val"]["networks"]["nll_vote"] == pytest.approx(again)
    parts = [*many, many[1][:, 0], many[2][:, 0]]
    for name, part in zip(mnist.PARTS, parts, strict=True):
        again = mnist.principal_components(part)
        assert again.items() < results["pca"][name].items()
        assert results["pca"][name]["explained_if_normal"] != again["explained"]
    for way, paths in results["paths"].items():
        assert results["test"]["dips"][way] == mnist.mean_dip(paths)
    assert np.shape(results["adversarial"]) == (7, 2) and mnist.EPSILONS[4] == 0.1
    assert results["test"]["fooled"]["others"] == results["adversarial"][4][1]


# ---- Figures, table and the script ---------------------------------------------------------------
def test_the_command_again(mnist, data, tmp_path, monkeypatch, capsys):
    """All runs, and a seed below; then the same command trains nothing, and --draw needs neither
    data nor weights: the same bytes. What a run has not is left out."""
    mnist.main(command(data, tmp_path / "seed1", "hypernet --seed 1"))
    runs = mnist.main(command(data, tmp_path, "hypernet paper mnfg"))
    assert [run["name"] for run in runs] == ["hypernet", "mnfg", "paper", "seed1/hypernet"]
    names = {"accuracies.png", "pca.png", "paths.png", "adversarial.png"}
    assert {file.name for file in tmp_path.glob("*.png")} == names
    before = files_in(tmp_path)
    monkeypatch.delattr(mnist, "load_data")
    assert mnist.main(command(data, tmp_path, "hypernet paper mnfg")) == runs
    assert files_in(tmp_path) == before
    for file in [*tmp_path.glob("*.png"), *tmp_path.rglob("*.pt")]:
        file.unlink()
    assert mnist.main(["--draw", "--out", str(tmp_path)]) == runs
    assert all(file.read_bytes() == before[file] for file in files_in(tmp_path))
    assert max(map(len, capsys.readouterr().out.splitlines()[:18])) < 100
    figure = mnist.plot_accuracies(runs)
    assert len(figure.axes) == 4 and len(mnist.plot_pca(runs[:2]).axes) == 12
    vote = runs[1]["results"]["test"]["networks"]["vote"]
    assert list(figure.axes[1].lines[0].get_xdata()) == [vote, vote]

    for run in runs:
        del run["results"]["paths"], run["results"]["test"]["average"]
    assert len(mnist.table(runs).splitlines()) == 11  # two seeds share a row
    assert mnist.table(runs).splitlines()[2].split("|")[4].strip() == ""
    assert not mnist.plot_paths(runs).axes[0].has_data()


CHILD = """
import importlib, os, signal, sys
import conftest
mnist = importlib.import_module("02_mnist_hypernet")
lr_factor = mnist.lr_factor
def deadly(s, step):
    if step == 23:
        os.kill(os.getpid(), signal.SIGKILL)
    return lr_factor(s, step)
mnist.lr_factor = deadly
mnist.main(sys.argv[1:])
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_killed_and_begun_again(mnist, data, tmp_path):
    """kill -9 between two rows of the log, of two steps each: the same bits as undisturbed."""

    def state(name):
        record = torch.load(tmp_path / name / "hypernet/checkpoint.pt", weights_only=True)
        for row in record["log"]:
            del row["seconds"]
        return record

    words = [
        sys.executable,
        "-c",
        CHILD,
        *command(data, tmp_path / "killed", "hypernet --steps 42"),
    ]
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    child = subprocess.run(words, env=dict(os.environ, PYTHONPATH=path), capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert state("killed")["log"][-1]["step"] == 22
    (killed,) = mnist.main(command(data, tmp_path / "killed", "hypernet --steps 42"))
    (whole,) = mnist.main(command(data, tmp_path / "whole", "hypernet --steps 42"))
    assert killed["results"] == whole["results"]
    ends = [state("killed"), state("whole")]
    assert ends[0]["log"] == ends[1]["log"]
    assert ends[0]["optimizer"] is None  # a finished run keeps none
    for name, tensor in ends[0]["model"].items():
        assert torch.equal(tensor, ends[1]["model"][name])


def refused(mnist, argv, folder):
    """The one line with which a command stops; files in the folder stay."""
    before = files_in(folder)
    with pytest.raises(SystemExit) as stop:
        mnist.main(argv)
    assert files_in(folder) == before and "\n" not in stop.value.code
    return stop.value.code


def test_errors_are_one_line(mnist, data, tmp_path):
    """No data, damaged data; a rate that is too large; another run, another script's."""
    raw = tmp_path / "bad/MNIST/raw"
    argv = command(tmp_path / "bad", tmp_path / "out", "paper")
    message = refused(mnist, argv, tmp_path)
    assert f"mnist is missing in {tmp_path / 'bad'}" in message and str(raw) in message
    for file in (data / "MNIST/raw").iterdir():
        (raw / file.name).write_bytes(file.read_bytes()[:-5])
    assert "mnist is damaged in" in refused(mnist, argv, tmp_path)
    argv = command(data, tmp_path / "out", "paper --lr 1e30")
    assert "the loss is not finite" in refused(mnist, argv, tmp_path)

    file = tmp_path / "out/paper/checkpoint.pt"
    s = small(mnist, "paper")
    mnist.train(s, mnist.load_data(s, data, "cpu"), file)
    message = refused(mnist, command(data, tmp_path / "out", "paper --no-gauge"), tmp_path)
    assert f"{file} is a run of other settings" in message
    file.write_bytes(file.read_bytes().replace(b"02_mnist_hypernet", b"04_cifar_resnet32"))
    message = refused(mnist, command(data, tmp_path / "out", "paper"), tmp_path)
    assert "damaged, or no run of 02_mnist" in message


@pytest.mark.parametrize("run", ["hypernet", "mnfg"])
def test_documented_weights_have_the_documented_accuracies(mnist, run):
    """The first network, drawn as then, one of ten by seed 1, on MNIST. Float32 may differ on
    another processor: two answers of 10,000."""
    metrics = mnist.read(RESULTS / run / "metrics.json")
    assert metrics["settings"] == mnist.RUNS[run]  # the same command would find it finished
    model = mnist.load(RESULTS / run / "checkpoint.pt")
    if not (ROOT / "data/MNIST/raw/t10k-images-idx3-ubyte").exists():
        pytest.skip("needs MNIST in data/")
    x, y = mnist.load_data(mnist.RUNS[run], ROOT / "data", "cpu")["test"]
    theta = [layer[:1] for layer in mnist.sample(model, 10, generator_of(1))]
    expected = metrics["results"]["test"]["networks"]["each"][0]
    assert mnist.evaluate(mnist.predict(theta, x), y)["one"] == pytest.approx(expected, abs=0.021)
