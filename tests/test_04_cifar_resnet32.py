"""What is new in the ResNet-32 script: the target network, batch norm's moments, generators of
stages, processes that share a step. What it has word for word in common with LeNet's is tested in
test_03_cifar_lenet.py, some of whose tests run here once more."""

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import test_03_cifar_lenet as lenet_tests
import torch
import torch.nn.functional as F
from test_03_cifar_lenet import command, generator_of, one_network, parameters, saved, small
from torch import nn
from torch._subclasses import FakeTensorMode
from torchvision.models.resnet import BasicBlock


def shrink(resnet, put):
    """One block in a stage, narrow hypernetworks; `put` is setattr, or one that is undone."""
    mlp = resnet.mlp
    layers = [(16, [29]), (16, [146] * 2), (32, [18, 146, 290]), (64, [34, 290, 578]), (10, [65])]
    put(resnet, "LAYERS", layers)
    put(resnet, "STRIDES", [1, 2, 2])
    put(resnet, "mlp", lambda fan_in, width, fan_out: mlp(fan_in, width // 8, fan_out))


@pytest.fixture
def little(resnet, monkeypatch):
    shrink(resnet, monkeypatch.setattr)
    return resnet


# ---- Counts and the target network ---------------------------------------------------------------
def test_counts_of_the_paper(resnet):
    """And the start: gamma is 1, beta 0 in ordinary networks, and in the mean, as in torch.nn."""
    model = resnet.make_model(resnet.COLUMNS["d"])
    assert [module[-1].out_features for module in model.generators] == [29, 1460, 2774, 5526, 650]
    parts = [parameters(part) for part in (model.extractor, *model.generators)]
    assert parts == [2532000, 669600, 1814400, 2865600, 5067200, 1166400]
    assert parameters(model) == sum(parts) + 1032  # the bias of the codes
    theta = resnet.sample(model, 2, None)
    assert sum(layer[0].numel() for layer in theta) == 466906
    assert sum(layer.shape[1] for layer in theta[:-1]) == 1232  # batch norms
    for column in ("a", "d+"):
        weights = resnet.make_model(resnet.COLUMNS[column]).weights
        assert [layer.shape[1:] for layer in weights] == [layer.shape[1:] for layer in theta]
        assert all((layer[..., -2:] == 0).all() for layer in weights[:-1])
        size = weights[-2][..., :-2].square().mean().item()
        assert size == pytest.approx(2 / 578, rel=0.04)  # 5 standard errors of 36,864 squares


def random_theta(resnet, number):
    """In double precision, as 32 layers amplify rounding; gamma and beta differ from 1 and 0."""
    torch.manual_seed(0)
    theta = []
    for layer in resnet.he_weights(resnet.LAYERS, number):
        theta.append(layer.double() + 0.1 * torch.randn(layer.shape).double())
    return theta


def twin_network(theta):
    """One network, of torchvision's blocks. Also its convolutions and batch norms in our order."""
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    modules = [stem, nn.BatchNorm2d(16), nn.ReLU()]
    layers = [(stem, modules[1])]
    channels = 16
    for filters in [16] * 5 + [32] * 5 + [64] * 5:
        stride = filters // channels
        shortcut = None
        if stride == 2:
            projection = nn.Conv2d(channels, filters, 1, stride, bias=False)
            shortcut = nn.Sequential(projection, nn.BatchNorm2d(filters))
            layers.append((projection, shortcut[1]))
        block = BasicBlock(channels, filters, stride, shortcut)
        modules.append(block)
        layers += [(block.conv1, block.bn1), (block.conv2, block.bn2)]
        channels = filters
    last = nn.Linear(64, 10)
    twin = nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last).double()
    for (conv, norm), layer in zip(layers, theta[:-1], strict=True):
        conv.weight.data = layer[0, :, :-2].detach().reshape(conv.weight.shape)
        norm.weight.data = 1 + layer[0, :, -2].detach()
        norm.bias.data = layer[0, :, -1].detach()
        norm.momentum = 1.0  # the moments that it keeps are those of the last batch
    last.weight.data = theta[-1][0, :, :-1].detach()
    last.bias.data = theta[-1][0, :, -1].detach()
    return twin, layers


def test_target_network_is_resnet32(resnet):
    """Two networks against torchvision's blocks: values and gradients in training mode, the moments
    that torch keeps then, and the answers to other images in eval mode. Double precision, whose
    rounding 32 layers amplify a thousandfold and more."""
    theta = [layer.requires_grad_() for layer in random_theta(resnet, 2)]
    x = torch.randn(2, 4, 3, 32, 32).double()
    x[:, :, 0] += 3  # a mean to subtract
    logits = resnet.each_network(resnet.target_network, x, theta)
    logits.square().sum().backward()
    for n in range(2):
        twin, layers = twin_network(one_network(theta, n))
        expected = twin(x[n])
        torch.testing.assert_close(logits[n], expected, rtol=1e-6, atol=1e-6)
        expected.square().sum().backward()
        grads = [[conv.weight, norm.weight, norm.bias] for conv, norm in layers]
        grads.append([twin[-1].weight, twin[-1].bias])
        for layer, parts in zip(theta, grads, strict=True):
            columns = [part.grad.view(len(part), -1) for part in parts]
            grad = torch.cat(columns, dim=1)
            torch.testing.assert_close(layer.grad[n], grad, rtol=1e-5, atol=1e-5)

        networks = resnet.recalibrate(theta, x[n])
        moments = networks[n][1]
        numbers = 4 * np.array([32 * 32] * 11 + [16 * 16] * 11 + [8 * 8] * 11)
        for (_, norm), (mean, var), number in zip(layers, moments, numbers, strict=True):
            norm.running_var *= (number - 1) / number  # torch keeps the unbiased variance
            torch.testing.assert_close(mean[0], norm.running_mean, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(var[0], norm.running_var, rtol=1e-6, atol=1e-8)
        expected = twin.eval()(x[1 - n]).softmax(dim=1)
        probabilities = resnet.predict(networks, x[1 - n])
        torch.testing.assert_close(probabilities[n], expected.detach(), rtol=1e-6, atol=1e-8)


# ---- Hypernetworks -------------------------------------------------------------------------------
def plain_mlp(module, x):
    """Three matrices, leaky ReLU after two of them, and a skip around the one in the middle."""
    x = F.leaky_relu(module[0].weight @ x, 0.05)
    x = x + F.leaky_relu(module[2][0].weight @ x, 0.05)
    return module[3].weight @ x


def plain_weights(model, z):
    """W(E(z) + bias) of one network, one code after the other: it makes the filters of one number
    in all layers of its stage, the projection first, or the whole last layer."""
    codes = (plain_mlp(model.extractor, z) + model.bias).view(129, 8)
    stages = [[29], [146] * 10, [18, 146] + [290] * 9, [34, 290] + [578] * 9]
    theta = []
    used = 0
    for module, number, sizes in zip(model.generators, [16, 16, 32, 64], stages):
        made = [plain_mlp(module, code).split(sizes) for code in codes[used : used + number]]
        used += number
        for k, size in enumerate(sizes):
            filters = [parts[k] for parts in made]
            theta.append(torch.stack(filters) * (2 / size) ** 0.5)
    last = plain_mlp(model.generators[4], codes[128])
    return [*theta, last.view(10, 65) * (2 / 65) ** 0.5]


@torch.no_grad()
@pytest.mark.parametrize("column", ["c", "c+"])
def test_hypernetworks(resnet, column):
    """W(E + b), and mean + scale * (W(E + b) - W(b)), where E(0) = 0. Float32: sums of 1,000."""
    s = dataclasses.replace(resnet.COLUMNS[column], scale=0.3)
    model = lenet_tests.spread_model(resnet, s)
    z = model.draw_z(2, generator_of(0))
    assert z.shape == (2, 500) and not torch.equal(z[0], z[1])
    theta = model(z)
    for n in range(2):
        plain = plain_weights(model, z[n])
        if column == "c+":
            origin = plain_weights(model, torch.zeros(500))
            for k, mean in enumerate(model.weights):
                plain[k] = mean[0] + 0.3 * (plain[k] - origin[k])
        for ours, expected in zip(theta, plain, strict=True):
            torch.testing.assert_close(ours[n], expected, rtol=1e-4, atol=1e-4)


# ---- The objective -------------------------------------------------------------------------------
def step_inputs(n):
    """z, images and labels of a step in double precision; the first two images are shared."""
    torch.manual_seed(1)
    z = torch.randn(n, 500).double()
    x = torch.randn(n, 4, 3, 32, 32).double()
    y = torch.randint(10, (n, 4))
    x[:, :2] = x[0, :2].clone()
    y[:, :2] = y[0, :2].clone()
    return z, x, y


@pytest.mark.parametrize("kind", ["outputs", "none"])
def test_objective(little, kind):
    """loss = lam * cross-entropy - ramp * entropy, from loops over networks, double precision."""
    s = little.Settings(diversity=kind, shared_images=2, lam=70.0)
    model = lenet_tests.spread_model(little, s).double()
    z, x, y = step_inputs(3)
    result = little.training_step(model, z, x, y, s, 0.3)
    theta = model(z)
    points = []
    loss_acc = 0
    hits = 0
    for n in range(3):
        logits = little.target_network(x[n : n + 1], one_network(theta, n))[0]
        loss_acc += F.cross_entropy(logits, y[n]) / 3
        hits += (logits.argmax(dim=1) == y[n]).sum().item()
        points.append(logits[:2].softmax(dim=1))
    entropy = torch.zeros(()).double()
    if kind == "outputs":
        logs = []
        for n, m, k in (0, 1, 2), (1, 2, 0), (2, 0, 1):
            distances = [torch.dist(points[n], points[m]), torch.dist(points[n], points[k])]
            logs.append(min(distances).log())
        entropy = torch.digamma(torch.tensor(3.0).double()) + 500 * sum(logs) / 3
    torch.testing.assert_close(result["loss_acc"], loss_acc)
    torch.testing.assert_close(result["entropy"], entropy)
    torch.testing.assert_close(result["loss"], 70 * loss_acc - 0.3 * entropy)
    assert result["acc"].item() == pytest.approx(hits / 12)


def test_amp(little, capsys):
    """bfloat16 has eight bits: a cross-entropy within a few percent, but not the same. Distances
    between answers would be noise: refused, whichever of the two is the column's own."""
    torch.manual_seed(0)
    model = little.make_model(little.COLUMNS["c+"])
    z, x, y = step_inputs(2)
    losses = []
    for amp in (False, True):
        s = little.Settings(amp=amp)
        result = little.training_step(model, z.float(), x.float(), y, s, 1.0)
        result["loss"].backward()
        assert result["loss"].dtype == torch.float32
        assert all(p.grad.isfinite().all() for p in model.parameters())
        losses.append(result["loss_acc"].item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05) and losses[0] != losses[1]
    for words in ("--columns c d+ --amp", "--columns c --amp --diversity outputs"):
        with pytest.raises(SystemExit, match="2"):
            little.main(words.split())
        assert "no amp" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("column", ["b", "d", "d+"])
def test_without_the_device(little, monkeypatch, device, column):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    s = small(little, column)
    if device == "meta":  # which autocast does not know
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with FakeTensorMode() if device == "cuda" else nullcontext():
        with torch.device(device):  # for the parameters; the rest must find it by itself
            model = little.make_model(s)
            padded = torch.rand(20, 3, 40, 40)
            y = torch.zeros(20, dtype=torch.long)
        batch = little.random_crops(padded, y, s, None)
        result = little.training_step(model, model.draw_z(2, None), *batch, s, 0.5)
        assert all(value.device.type == device for value in result.values())
        if device == "meta":
            result["loss"].backward()
            assert all(p.grad.device.type == device for p in model.parameters())
        networks = little.recalibrate(little.sample(model, 2, None), padded[:, :, :32, :32])
        assert little.predict(networks, padded[:, :, :32, :32]).device.type == device
        assert little.average(model, 2, None)[0].device.type == device


# ---- The script ----------------------------------------------------------------------------------
def test_load_data(resnet, lenet, data):
    expected = lenet.load_data(lenet.Settings(test_images=20), data, "cpu")
    for split, parts in resnet.load_data(resnet.Settings(test_images=20), data, "cpu").items():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, expected[split]))


@torch.no_grad()
def test_analyse(little, data):
    """Each network, the average one too, with moments of its own, from loops over networks."""
    s = small(little, "d --averaged 120 --moments 30 --test-networks 3")
    model = lenet_tests.spread_model(little, s)
    data = little.load_data(s, data, "cpu")
    results = little.analyse(model, s, data)
    generator = generator_of(little.TEST)
    ensembles = dict(networks=little.sample(model, 3, generator))
    many = model(model.draw_z(120, generator))
    ensembles["average"] = [layer.mean(dim=0, keepdim=True) for layer in many]
    many = little.sample(model, 100, generator)
    ensembles["gaussian"] = little.gaussian_like(many, 3, generator)
    for split in ("val", "test"):
        x, y = data[split]
        for kind, theta in ensembles.items():
            losses = []
            for n in range(len(theta[0])):
                network = one_network(theta, n)
                moments = little.target_network(data["train"][0][None, :30], network, measure=True)
                logits = little.target_network(x[None], network, moments)[0]
                losses.append(F.cross_entropy(logits, y).item())
            assert results[split][kind]["nll_one"] == pytest.approx(np.mean(losses), rel=1e-3)


def test_all_columns(little, data, tmp_path, capsys):
    little.main(command(data, tmp_path, " ".join(little.COLUMNS) + " --moments 30"))
    text = capsys.readouterr().out
    for column, networks in dict(a=2, b=8, c=12, d=12).items():
        test = json.loads((tmp_path / column / "metrics.json").read_text())["results"]["test"]
        kinds = ["networks"] if column in "ab" else ["networks", "average", "gaussian"]
        assert list(test) == kinds and f"{test['networks']['one']:#.4g}" in text
        theta = little.sample(little.load(tmp_path / column / "checkpoint.pt"), 12, None)
        assert len(theta[0]) == networks
    assert all(f"| {column} " in text for column in little.COLUMNS)


def test_gradients_of_the_mean_are_not_clipped(little, data, tmp_path, monkeypatch):
    lenet_tests.test_gradients_of_the_mean_are_not_clipped(little, data, tmp_path, monkeypatch)


@pytest.mark.parametrize("flags, rates", [("b", (10, 4, 1)), ("c+", (1, 2 / 3, 1 / 3))])
def test_networks_follow_their_own_gradients(little, data, tmp_path, monkeypatch, flags, rates):
    monkeypatch.setattr(little, "MOVES", 5)
    lenet_tests.test_networks_follow_their_own_gradients(little, data, tmp_path, flags, rates)


def test_ten_networks_of_the_chain(little, tmp_path, monkeypatch):
    taken = range(22, 41, 2)
    lenet_tests.test_ten_networks_of_the_chains(little, tmp_path, monkeypatch, 40, 1, taken)


@pytest.mark.parametrize("column", ["b", "d+"])
def test_a_stopped_run_goes_on(little, data, tmp_path, monkeypatch, column):
    recalibrate = little.recalibrate
    monkeypatch.setattr(little, "validate", lambda *_: {})
    monkeypatch.setattr(little, "recalibrate", lambda theta, x: recalibrate(theta, x[:10]))
    lenet_tests.test_a_stopped_run_goes_on(little, data, tmp_path, monkeypatch, column)


# ---- Several processes ---------------------------------------------------------------------------
def in_double_precision(resnet, put):
    """All numbers of a run, so that the rounding of another order of sums does not grow."""
    shrink(resnet, put)
    load_data = resnet.load_data

    def double_data(*args):
        return {split: (x.double(), y) for split, (x, y) in load_data(*args).items()}

    put(resnet, "load_data", double_data)
    put(resnet, "validate", lambda *_: {})
    torch.set_default_dtype(torch.float64)


WORKER = """
import importlib, os, signal, sys
sys.path[:0] = [ROOT, ROOT + "/tests"]
import conftest, test_03_cifar_lenet, test_04_cifar_resnet32
resnet = importlib.import_module("04_cifar_resnet32")
test_04_cifar_resnet32.in_double_precision(resnet, setattr)

def death():
    os.kill(os.getpid(), signal.SIGKILL)

if resnet.RANK == 1:
    resnet.save = resnet.analyse = None
    resnet.training_step = test_03_cifar_lenet.dying(resnet, 12, death)
runs = resnet.main(sys.argv[1:])
assert (runs is None) == (resnet.RANK == 1)
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_two_processes_equal_one(resnet, data, tmp_path, monkeypatch):
    """By torchrun: `networks` is the number in all processes. One of them is killed in its twelfth
    step, that is in the second column; the same command goes on, or it would be killed again.
    Rounding, 1e-16, grows in eight steps, but not to 1e-8."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.replace("ROOT", repr(str(lenet_tests.ROOT))))
    flags = "d+ b --networks 4 --shared-images 2 --moments 30"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words += [str(worker), *command(data, tmp_path / "two", flags)]
    for code, tables in (1, 0), (0, 2):
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert done.stdout.count("| d+ ") == tables  # one process alone prints its two
    try:
        in_double_precision(resnet, monkeypatch.setattr)
        resnet.main(command(data, tmp_path / "one", flags))
    finally:
        torch.set_default_dtype(torch.float32)
    for column in ("b", "d+"):
        one = saved(tmp_path / "one" / column / "checkpoint.pt")
        two = saved(tmp_path / "two" / column / "checkpoint.pt")
        assert one["settings"] == two["settings"] and len(one["log"]) == len(two["log"]) == 8
        for row, other in zip(one["log"], two["log"]):
            assert row["entropy"] == pytest.approx(other["entropy"], rel=1e-6)
        for name, layer in one["model"].items():
            torch.testing.assert_close(two["model"][name], layer, rtol=0, atol=1e-8)


def test_processes_need_a_multiple_of_networks(little, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(little, "RANKS", 3)
    with pytest.raises(SystemExit, match="2"):
        little.main(["--networks", "4", "--out", str(tmp_path / "out")])
    message = "column a: networks must be a multiple of the number of processes"
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
