"""The MNIST script against plain loops, torch.nn, torch.distributions and the paper's counts. What
it shares with 03 word for word is tested there."""

import dataclasses
import json
import math
import os
import runpy
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
KINDS = ["hypernet", "paper", "mnfg"]
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


def one_network(theta, n):
    return [layer[n : n + 1] for layer in theta]


def random_theta(mnist, number):
    """Networks whose answers differ."""
    torch.manual_seed(0)
    return [2 * torch.randn(number, f, k) / k**0.5 for f, k in mnist.SHAPES]


def vectors(theta):
    return torch.cat([layer.flatten(1) for layer in theta], dim=1)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def files_in(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def forbidden(*_, **__):
    raise AssertionError("this must not be called")


@pytest.fixture(autouse=True)
def fewer_networks(mnist, monkeypatch):
    """In PCA and covariances: 30 instead of 1,000."""
    monkeypatch.setattr(mnist, "MANY", 30)


# ---- Settings and data ---------------------------------------------------------------------------
def test_runs_are_the_documented_ones(mnist):
    rows = {name: dataclasses.astuple(s)[:10] for name, s in mnist.parse_args([]).settings.items()}
    network = "hypernetwork"
    assert rows == {
        "hypernet": (network, "copies", 3000, 32, 32, 1, 2e-3, False, True, 1e3),
        "paper": (network, "random", 13_000, 32, 32, 0, 3e-4, True, True, 1e3),
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
    files = [data / "MNIST/raw" / f"{name}-images-idx3-ubyte" for name in ("train", "t10k")]
    pixels = b"".join(file.read_bytes()[16:] for file in files)
    images = np.frombuffer(pixels, np.uint8).reshape(600, 1, 28, 28) / 255
    labels = b"".join(
        Path(str(file).replace("images-idx3", "labels-idx1")).read_bytes()[8:] for file in files
    )
    splits = mnist.load_data(mnist.Settings(test_images=limit), data, "cpu")
    expected = dict(train=(val, 500), val=(0, val), test=(500, 500 + test))
    assert list(splits) == list(expected)
    for split, (start, end) in expected.items():
        x, y = splits[split]
        assert x.dtype == torch.float32 and y.tolist() == list(labels[start:end])
        np.testing.assert_allclose(x, images[start:end], rtol=1e-6)


def test_random_crops(mnist):
    """Each is its own image, moved by up to two pixels; without `shift` it is the image."""
    y = torch.arange(5) % 4
    padded = torch.rand(5, 1, 32, 32) + 10 * torch.arange(5).view(5, 1, 1, 1)
    s = mnist.Settings(networks=3, images=40, shift=2)
    x, labels = mnist.random_crops(padded, y, s, generator_of(0))
    places = []
    for image, label in zip(x.flatten(0, 1), labels.flatten()):
        original = int(image.min() // 10)
        assert label == y[original]
        for row in range(5):
            for column in range(5):
                crop = padded[original, :, row : row + 28, column : column + 28]
                if torch.equal(image, crop):
                    places.append((row, column))
    assert len(places) == 120 and len(set(places)) > 20  # all are found, at most of the places
    unmoved = padded[:, :, 2:30, 2:30]
    x, _ = mnist.random_crops(unmoved, torch.arange(5), mnist.Settings(), generator_of(0))
    assert x.shape == (32, 32, 1, 28, 28)
    assert torch.equal(x[3, 7], unmoved[int(x[3, 7].min() // 10)])


# ---- Networks ------------------------------------------------------------------------------------
def test_counts_of_the_paper(mnist):
    paper = build(mnist, "paper")
    matrices = [m for m in paper.modules() if isinstance(m, nn.Linear)]
    assert sum(f * k for f, k in mnist.SHAPES) == 20_018
    assert parameters(paper) == 633_640
    assert all(layer.bias is None for layer in matrices)
    counts = []
    for part in (paper.extractor, *paper.generators):
        counts.append(sum(layer.weight.numel() for layer in part if layer in matrices))
    assert counts == [436_500, 3240, 91_600, 90_000, 9900]
    assert parameters(build(mnist, "hypernet")) == 633_640 + 855
    mnfg = build(mnist, "mnfg")
    assert [parameters(layer) for layer in mnfg.layers] == [31_180, 40_540, 728_652, 7784]
    assert mnfg.draw_z(2, generator_of(0)).shape == (2, 840 + 20_018)


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


@pytest.mark.parametrize("run", KINDS)
def test_sampled_networks(mnist, run):
    """Gauge fixed; each depends on its own z alone; a model in training mode is not changed."""
    model = build(mnist, run).train()
    before = [value.clone() for value in model.state_dict().values()]
    z = model.draw_z(4, generator_of(0))
    theta = mnist.sample(model, 4, generator_of(0))
    assert [tuple(layer.shape[1:]) for layer in theta] == mnist.SHAPES
    for layer in theta[:-1]:
        torch.testing.assert_close(
            layer.square().sum(dim=-1), torch.full(layer.shape[:2], float(layer.shape[-1]))
        )
    assert theta[-1][..., -1].mean(dim=1).abs().max() < 1e-5
    alone = mnist.weights_of(model, z[2:3])
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


def mnfg_layer(mnist, conv):
    """A layer of three filters with four inputs, its parameters spread out."""
    torch.manual_seed(0)
    layer = mnist.MNFGLayer(3, 4, conv, 0.5).double()
    with torch.no_grad():
        layer.mean.normal_()
        layer.log_std.uniform_(-2, -1)
    return layer, torch.randn(1, 3 if conv else 4).double()


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


@torch.no_grad()
def test_bound_is_above_the_true_divergence(mnist):
    """A dense layer with two weights: q(W) = E_z N(W; z mu, sigma^2) by a long Monte Carlo sum over
    z, and the KL divergence from the prior by one over W. Four standard errors."""
    torch.manual_seed(0)
    layer = mnist.MNFGLayer(1, 2, False, 1.0).double()
    normal = torch.distributions.Normal
    layer.log_std.fill_(-1.0)
    layer.start_log_var.fill_(0.0)
    filters, bound = layer(torch.randn(4000, 2).double(), torch.randn(4000, 1, 3).double())
    z = layer.flow(layer.start_mean + torch.randn(4000, 2).double())[0]
    weight = filters[:, 0, :2]
    q = normal(z[None] * layer.mean[:, :2], layer.log_std.exp()[0, :2])
    log_q = q.log_prob(weight[:, None]).sum(dim=-1).logsumexp(dim=1) - math.log(4000)
    log_ratio = log_q - normal(0.0, 1.0).log_prob(weight).sum(dim=1)
    bias = normal(layer.mean[0, 2], layer.log_std[0, 2].exp())
    true = log_ratio.mean() + torch.distributions.kl_divergence(bias, normal(0.0, 1.0))
    error = 4 * (bound.std() + log_ratio.std()) / 4000**0.5
    assert true - error < bound.mean() < true + 20


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
    # Float32: sums of 20,000 terms
    torch.testing.assert_close(result["entropy"], entropy.float(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(result["loss_acc"], loss_acc)
    torch.testing.assert_close(
        result["loss"], 70 * loss_acc - entropy.float(), rtol=1e-5, atol=1e-3
    )
    assert result["acc"].item() == pytest.approx(
        (logits.argmax(dim=-1) == y).double().mean().item()
    )


def test_learning_rates(mnist):
    ours = mnist.Settings(decay=False, steps=1000)
    by_hand = {0: 1 / 200, 199: 1, 200: 1, 600: 1 / 2, 999: 1 / 800}
    assert [mnist.lr_factor(ours, step) for step in by_hand] == pytest.approx(
        list(by_hand.values())
    )
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
    """At 5 lam, here in the second of each two steps between rows of the log."""
    norms = []

    def step(optimizer):
        squares = [p.grad.square().sum() for p in optimizer.param_groups[0]["params"]]
        norms.append(sum(squares).sqrt().item())

    training_step = mnist.training_step

    def steep(*args):
        result = training_step(*args)
        factor = 1e-3 if len(norms) % 2 == 0 else 1e3
        return dict(result, loss=factor * result["loss"])

    monkeypatch.setattr(mnist, "training_step", steep)
    monkeypatch.setattr(torch.optim.Adam, "step", step)
    s = small(mnist, "hypernet --steps 42 --lam 50")
    _, log = mnist.train(s, mnist.load_data(s, data, "cpu"), tmp_path / "checkpoint.pt")
    assert len(log) == 21 and max(norms[::2]) < 250
    assert norms[1::2] == pytest.approx([250] * 21, rel=1e-3)
    assert min(row["norm"] for row in log) > 1000


def test_it_learns(mnist, data, tmp_path):
    """Made-up patterns, a short life: far better than chance, whose NLL is log 10 = 2.3."""
    s = small(mnist, "hypernet --steps 150 --networks 8 --images 16 --lam 1e5")
    _, log = mnist.train(s, mnist.load_data(s, data, "cpu"), tmp_path / "checkpoint.pt")
    assert log[-1]["nll"] < 1.2 and log[-1]["step"] == 150


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
def test_predict(mnist):
    """Two portions of images; one network after the other."""
    theta = random_theta(mnist, 3)
    x = torch.rand(70, 1, 28, 28)
    probabilities = mnist.predict(theta, x)
    for n in range(3):
        torch.testing.assert_close(probabilities[n], plain_logits(x, theta, n).softmax(dim=-1))


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


def test_fast_gradient(mnist):
    """Autograd of the target's probability, image by image."""
    theta = random_theta(mnist, 1)
    x = torch.rand(8, 1, 28, 28)
    target = torch.arange(8)
    sign = mnist.fast_gradient(theta, x, target)
    for i in range(8):
        image = x[i : i + 1].clone().requires_grad_()
        plain_logits(image, theta, 0).softmax(dim=-1)[0, i].backward()
        # Signs of gradients that are nearly 0 may differ, in float32.
        assert (sign[i] == image.grad[0].sign()).double().mean() > 0.99
    assert not x.requires_grad and (sign != 0).double().mean() > 0.5


def test_attack(mnist, monkeypatch):
    """One network and three others, image by image: targets are wrong classes; counted are images
    that the attacked network gets right."""
    theta = random_theta(mnist, 4)
    one = one_network(theta, 0)
    others = [layer[1:] for layer in theta]
    x = torch.rand(60, 1, 28, 28)
    y = mnist.predict(one, x)[0].argmax(dim=-1)
    y[:20] = (y[:20] + 1) % 10
    targets = []
    fast_gradient = mnist.fast_gradient
    monkeypatch.setattr(
        mnist, "fast_gradient", lambda *a: targets.append(a[2]) or fast_gradient(*a)
    )
    rows = mnist.attack(one, others, x, y, generator_of(0))
    (target,) = targets
    assert (target != y).all() and len((target - y).remainder(10).unique()) > 5
    sign = fast_gradient(one, x, target)
    assert mnist.EPSILONS[4] == 0.1  # that of the table
    for epsilon, row in zip(mnist.EPSILONS, rows, strict=True):
        fooled = [0, 0]
        for i in range(20, 60):
            image = x[i : i + 1] + epsilon * sign[i]
            classes = [int(plain_logits(image, theta, n).argmax()) for n in range(4)]
            winner = min(classes[1:], key=lambda k: (-classes[1:].count(k), k))
            fooled[0] += int(classes[0] != y[i])
            fooled[1] += int(winner != y[i])
        assert row == pytest.approx([100 * count / 40 for count in fooled])
    assert rows[0][0] == 0 and rows[-1][0] > 50


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


def test_analyse(mnist):
    """The same numbers from the samples, in the order in which they are drawn."""
    model = build(mnist, "paper")
    data = {"val": (torch.rand(30, 1, 28, 28), torch.randint(10, (30,)))}
    data["test"] = (torch.rand(30, 1, 28, 28), torch.randint(10, (30,)))
    results = mnist.analyse(model, small(mnist, "paper"), data)
    generator = generator_of(mnist.TEST)
    networks = mnist.sample(model, 6, generator)
    many = mnist.sample(model, 30, generator)
    average = [sum(layer)[None] / 30 for layer in many]
    normal = mnist.gaussian_like(many, 6, generator)
    x, y = data["test"]
    for kind, theta in dict(networks=networks, average=average, gaussian=normal).items():
        again = mnist.evaluate(mnist.predict(theta, x), y)
        for key in ("one", "vote", "nll_vote"):  # float32: one answer of 180 may differ
            assert results["test"][kind][key] == pytest.approx(again[key], rel=1e-3, abs=0.6)
    x, y = data["val"]
    again = mnist.evaluate(mnist.predict(networks, x), y)
    assert results["val"]["networks"]["nll_one"] == pytest.approx(again["nll_one"])
    parts = [*many, many[1][:, 0], many[2][:, 0]]
    for name, part in zip(mnist.PARTS, parts, strict=True):
        again = mnist.principal_components(part)
        assert results["pca"][name]["shares"] == again["shares"]
        assert results["pca"][name]["explained_if_normal"] != again["explained"]
    for way, paths in results["paths"].items():
        assert results["test"]["dips"][way] == mnist.mean_dip(paths)
    assert np.shape(results["adversarial"]) == (7, 2)
    assert results["test"]["fooled"]["others"] == results["adversarial"][4][1]


# ---- Figures, table and the script ---------------------------------------------------------------
def test_the_command_again(mnist, data, tmp_path, monkeypatch, capsys):
    """All runs; then the same command trains nothing, and --draw needs neither data nor weights:
    the same bytes. Figures but the first show the runs of the folder itself."""
    runs = mnist.main(command(data, tmp_path, "hypernet paper mnfg"))
    seeds = mnist.main(command(data, tmp_path / "seed1", "hypernet --seed 1"))
    (tmp_path / "seed1/pca.png").unlink()
    assert [run["name"] for run in runs] == ["hypernet", "mnfg", "paper"] and len(seeds) == 1
    capsys.readouterr()
    monkeypatch.setattr(mnist, "load_data", forbidden)
    runs = mnist.main(command(data, tmp_path, "hypernet paper mnfg"))
    text = capsys.readouterr().out
    assert [run["name"] for run in runs] == ["hypernet", "mnfg", "paper", "seed1/hypernet"]
    before = files_in(tmp_path)
    names = {"accuracies.png", "pca.png", "paths.png", "adversarial.png"}
    assert {file.name for file in tmp_path.glob("*.png")} == names
    for file in [*tmp_path.glob("*.png"), *tmp_path.rglob("*.pt")]:
        file.unlink()
    assert mnist.main(["--draw", "--out", str(tmp_path)]) == runs
    for file, content in before.items():
        assert file.suffix == ".pt" or file.read_bytes() == content
    assert capsys.readouterr().out == text
    assert max(map(len, text.splitlines()[:-1])) < 100
    assert [len(mnist.plot_accuracies(runs).axes), len(mnist.plot_pca(runs[:2]).axes)] == [4, 12]
    vote = mnist.plot_accuracies(runs).axes[1].lines[0].get_xdata()[0]
    assert vote == runs[1]["results"]["test"]["networks"]["vote"]


def test_results_that_a_run_has_not(mnist, tmp_path):
    """Cells stay empty, rows and figures are left out."""
    test = dict(networks=dict(each=[90.0, 91.0], one=90.5, vote=92.0, disagree=3.0, nll_vote=0.2))
    for name, seed in ("hypernet", 0), ("seed1/hypernet", 1):
        s = dataclasses.replace(mnist.RUNS["hypernet"], seed=seed)
        run = dict(script=mnist.NAME, settings=dataclasses.asdict(s), results=dict(test=test))
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.json").write_text(json.dumps(run))
    runs = mnist.main(["--draw", "--out", str(tmp_path)])
    assert [file.name for file in tmp_path.glob("*.png")] == ["accuracies.png"]
    rows = [[cell.strip() for cell in line.split("|")] for line in mnist.table(runs).splitlines()]
    assert rows[2][1:-1] == [
        "hypernet",
        "90.50 ± 0.00",
        "92.00 ± 0.00",
        "",
        "3.000 ± 0.00",
        "0.2000 ± 0.00",
    ]
    assert rows[6][1:-1] == ["hypernet", "", "", "", "", ""] and len(rows) == 7


CHILD = """
import importlib, os, signal, sys
import conftest
mnist = importlib.import_module("02_mnist_hypernet")
mnist.MANY = 30
step = mnist.lr_factor
def lr_factor(s, number):
    if number == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(s, number)
mnist.lr_factor = lr_factor
mnist.main(sys.argv[2:])
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
@pytest.mark.parametrize("run", ["hypernet", "mnfg"])
def test_killed_and_begun_again(mnist, data, tmp_path, run):
    """kill -9 between two rows of the log, of two steps each: the same bits as undisturbed."""
    argv = command(data, tmp_path / "killed", run + " --steps 42")
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    words = [sys.executable, "-c", CHILD, "23", *argv]
    child = subprocess.run(words, env=dict(os.environ, PYTHONPATH=path), capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert torch.load(tmp_path / "killed" / run / "checkpoint.pt")["log"][-1]["step"] == 22
    mnist.main(argv)
    mnist.main(command(data, tmp_path / "whole", run + " --steps 42"))
    ends = []
    for out in ("killed", "whole"):
        record = torch.load(tmp_path / out / run / "checkpoint.pt")
        assert record["optimizer"] is None  # a finished run keeps none
        metrics = json.loads((tmp_path / out / run / "metrics.json").read_text())
        for row in record["log"]:
            del row["seconds"]
        ends.append((record["log"], metrics["results"], list(record["model"].values())))
    assert ends[0][:2] == ends[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][2], ends[1][2], strict=True))


def test_seeds_of_evaluation_are_not_those_of_training(mnist):
    """Training has (1 + seed) * 10^6 + 0 to 10^6; torch uses the last 32 bits of a seed."""
    assert {mnist.VALIDATION, mnist.TEST} == {1, 2}
    assert (1 + 3999) * 10**6 + 10**6 < 2**32  # the last that Settings allows


def refused(monkeypatch, argv, folder):
    """The one line with which a command stops; files in the folder stay."""
    before = files_in(folder)
    monkeypatch.setattr(sys, "argv", ["02_mnist_hypernet.py", *argv])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "02_mnist_hypernet.py"), run_name="__main__")
    assert files_in(folder) == before and "\n" not in stop.value.code
    return stop.value.code


def test_errors_are_one_line(mnist, data, tmp_path, monkeypatch):
    """No data, damaged data, another run, another script's, half a file; a rate that is too large:
    nothing is written."""
    bad = tmp_path / "bad"
    message = refused(monkeypatch, command(bad, tmp_path / "out", "paper"), tmp_path)
    assert f"mnist is missing in {bad}" in message and f"{bad}/MNIST/raw" in message
    raw = bad / "MNIST/raw"
    raw.mkdir(parents=True, exist_ok=True)
    for file in (data / "MNIST/raw").iterdir():
        (raw / file.name).write_bytes(file.read_bytes()[:-5])
    message = refused(monkeypatch, command(bad, tmp_path / "out", "paper"), tmp_path)
    assert f"mnist is damaged in {bad}" in message

    argv = command(data, tmp_path / "out", "paper --lr 1e30")
    assert "the loss is not finite" in refused(monkeypatch, argv, tmp_path)
    s = small(mnist, "paper")
    file = tmp_path / "out/paper/checkpoint.pt"
    mnist.train(s, mnist.load_data(s, data, "cpu"), file)
    message = refused(monkeypatch, command(data, tmp_path / "out", "paper --no-gauge"), tmp_path)
    assert f"{file} is a run of other settings" in message
    content = file.read_bytes()
    argv = command(data, tmp_path / "out", "paper")
    for other in (content.replace(b"02_mnist_hypernet", b"03_cifar_lenet_xy"), content[:5000]):
        file.write_bytes(other)
        assert "damaged, or no run of 02_mnist" in refused(monkeypatch, argv, tmp_path)


# ---- Documented runs -----------------------------------------------------------------------------
def test_documented_settings(mnist):
    """The same commands would find these runs finished."""
    names = []
    for run in mnist.read_runs(RESULTS):
        first, *rest = run["name"].split("/")
        changes = {"seed1": dict(seed=1), "seed2": dict(seed=2), "lam1e4": dict(lam=1e4)}
        changes.update(lam1e5=dict(lam=1e5), unmoved=dict(shift=0))
        kind = rest[0] if rest else first
        s = dataclasses.replace(mnist.RUNS[kind], **changes.get(first, {}))
        assert run["settings"] == s, run["name"]
        names.append(run["name"])
    assert {"hypernet", "paper", "mnfg"} <= set(names)


@pytest.mark.parametrize("run", ["hypernet", "mnfg"])
def test_documented_weights_have_the_documented_accuracies(mnist, run):
    """The first network, drawn as one of ten, on MNIST. Float32 may differ on another processor:
    two answers of 10,000."""
    if not (ROOT / "data/MNIST/raw/t10k-images-idx3-ubyte").exists():
        pytest.skip("needs MNIST in data/")
    model = mnist.load(RESULTS / run / "checkpoint.pt")
    x, y = mnist.load_data(mnist.RUNS[run], ROOT / "data", "cpu")["test"]
    theta = one_network(mnist.sample(model, 10, generator_of(mnist.TEST)), 0)
    metrics = json.loads((RESULTS / run / "metrics.json").read_text())
    expected = metrics["results"]["test"]["networks"]["each"][0]
    assert mnist.evaluate(mnist.predict(theta, x), y)["one"] == pytest.approx(expected, abs=0.021)
