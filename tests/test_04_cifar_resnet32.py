"""What is new in the ResNet-32 script: the target network, batch norm's moments, processes that
share a step. What it has in common with LeNet's is tested in test_03_cifar_lenet.py."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_03_cifar_lenet import FAKE, model_of, parameters, saved, settings, shrink, spread_model
from torch import nn
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def small(resnet, monkeypatch):
    """One block per stage, small hypernetworks, few images."""
    shrink(resnet, monkeypatch.setattr)
    return resnet


# ---- counts and architecture ---------------------------------------------------------------------


def test_counts_of_the_paper(resnet):
    hypernet = model_of(resnet)
    outputs = [generator[-1].out_features for generator in hypernet.generators]
    assert outputs == [29, 1460, 2774, 5526, 650]
    parts = [parameters(part) for part in (hypernet.extractor, *hypernet.generators)]
    assert parts == [2532000, 669600, 1814400, 2865600, 5067200, 1166400]
    assert parameters(hypernet) == sum(parts) + 1032
    for column in ("c+", "d+"):
        assert parameters(model_of(resnet, column)) == sum(parts) + 1032 + 466906
    theta = resnet.sample(hypernet, 2)
    assert sum(layer[0].numel() for layer in theta) == 466906
    network = model_of(resnet, "a")
    assert parameters(network) == 466906
    shapes = [layer.shape[1:] for layer in resnet.sample(network, 1)]
    assert [layer.shape[1:] for layer in theta] == shapes
    assert sum(shape[0] for shape in shapes[:-1]) == 1232


class Block(nn.Module):
    def __init__(self, channels, filters, stride):
        super().__init__()
        self.projection = nn.Identity()
        if stride > 1:
            self.projection = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters)
            )
        self.body = nn.Sequential(
            nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1, bias=False),
            nn.BatchNorm2d(filters),
        )

    def forward(self, x):
        return (self.body(x) + self.projection(x)).relu()


def twin_network(theta, blocks: int = 5):
    """ResNet-32 of torch.nn modules with these weights, its layers in the order of ours; theta's
    gamma is gamma - 1."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for channels, filters, stride in (16, 16, 1), (16, 32, 2), (32, 64, 2):
        layers += [Block(channels, filters, stride)]
        layers += [Block(filters, filters, 1) for _ in range(blocks - 1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    twin = nn.Sequential(*layers).to(theta[0].dtype)
    convs = [m for m in twin.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in twin.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(convs) == len(norms) == len(theta) - 1 == 3 + 6 * blocks
    with torch.no_grad():
        for conv, norm, layer in zip(convs, norms, theta):
            conv.weight.copy_(layer[:, :-2].view_as(conv.weight))
            norm.weight.copy_(1 + layer[:, -2])
            norm.bias.copy_(layer[:, -1])
        twin[-1].weight.copy_(theta[-1][:, :-1])
        twin[-1].bias.copy_(theta[-1][:, -1])
    return twin, convs, norms


def random_theta(resnet, n: int) -> list[torch.Tensor]:
    """In double precision, as 32 layers amplify rounding."""
    torch.manual_seed(0)
    return [layer.double() for layer in resnet.sample(model_of(resnet, "a", networks=n), n)]


def test_target_network_is_resnet32(resnet):
    """Values and gradients of two networks against torch.nn, in training mode."""
    theta = [layer.requires_grad_() for layer in random_theta(resnet, 2)]
    x = torch.randn(2, 4, 3, 32, 32, dtype=torch.float64)
    logits = resnet.each_network(resnet.target_network, x, theta)
    logits.square().sum().backward()
    for n in range(2):
        twin, convs, norms = twin_network([layer[n] for layer in theta])
        expected = twin(x[n])
        torch.testing.assert_close(logits[n], expected, rtol=1e-6, atol=1e-6)
        expected.square().sum().backward()
        for conv, norm, layer in zip(convs, norms, theta):
            columns = (conv.weight.grad.flatten(1), norm.weight.grad, norm.bias.grad)
            grad = torch.cat([c.view(len(columns[1]), -1) for c in columns], dim=1)
            torch.testing.assert_close(layer.grad[n], grad, rtol=1e-5, atol=1e-5)
        grad = torch.cat([twin[-1].weight.grad, twin[-1].bias.grad[:, None]], dim=1)
        torch.testing.assert_close(theta[-1].grad[n], grad)


@pytest.mark.parametrize("blocks, images", [(5, 6), (1, 505)])
def test_recalibration_and_inference(resnet, monkeypatch, blocks, images):
    """Moments of the inputs of torch.nn's batch norms in training mode, portions of 500 images
    weighted by their number, and then inference in its eval mode. One block a stage and float32 for
    two portions."""
    monkeypatch.setattr(resnet, "BLOCKS", blocks)
    theta = random_theta(resnet, 2)
    x = torch.randn(images, 3, 32, 32, dtype=torch.float64)
    x[:, 0] += 3  # a mean to subtract
    exact = dict(rtol=1e-6, atol=1e-9)
    if images > 500:
        theta, x = [layer[1:].float() for layer in theta], x.float()
        exact = dict(rtol=1e-3, atol=1e-4)
    calibrated = resnet.recalibrate(theta, x)
    twin, _, norms = twin_network([layer[-1] for layer in theta], blocks)
    sums = {norm: 0 for norm in norms}

    def moments(norm, inputs):
        channels = inputs[0].transpose(0, 1).flatten(1)  # (C, B * H * W)
        means = torch.stack([channels.mean(dim=1), channels.square().mean(dim=1)], dim=1)
        sums[norm] = sums[norm] + means * len(inputs[0]) / images

    hooks = [norm.register_forward_pre_hook(moments) for norm in norms]
    with torch.no_grad():
        for part in x.split(500):
            twin(part)
        for hook in hooks:
            hook.remove()
        for layer, old, norm in zip(calibrated, theta, norms):
            assert torch.equal(layer[..., :-2], old)
            mean, square = sums[norm].unbind(dim=1)
            torch.testing.assert_close(layer[-1, :, -2], mean, **exact)
            torch.testing.assert_close(layer[-1, :, -1], square - mean**2, **exact)
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(square - mean**2)
        assert torch.equal(calibrated[-1], theta[-1])
        expected = twin.eval()(x[:6]).softmax(dim=1)
    torch.testing.assert_close(resnet.predict(calibrated, x[:6])[-1], expected, **exact)


def test_moments_of_one_batch_make_inference_equal_training(resnet):
    theta = random_theta(resnet, 2)
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    calibrated = resnet.predict(resnet.recalibrate(theta, x), x)
    torch.testing.assert_close(calibrated, resnet.predict(theta, x), rtol=1e-6, atol=1e-6)


def test_start(resnet):
    """Gamma near 1, beta near 0, weights of the usual size; near-copies, but not the same. Networks
    of SGD, and a learned mean, begin at gamma = 1 and beta = 0 exactly, as in torch.nn."""
    torch.manual_seed(0)
    for column in ("a", "c+"):
        means = model_of(resnet, column).means
        assert all((mean[..., -2:] == 0).all() for mean in means[:-1]) and (means[-1] != 0).all()
    theta = resnet.sample(model_of(resnet), 5)
    for layer in theta[:-1]:
        assert abs(layer[..., -2:].mean()) < 0.3 and layer[..., -2].std() < 0.4
    third = theta[-2]  # 64 filters, 576 inputs
    assert 0.5 < third[..., :-2].square().mean() * 576 / 2 < 2
    vectors = F.normalize(third.flatten(1), dim=1)
    likeness = (vectors @ vectors.T)[~torch.eye(5, dtype=torch.bool)]
    assert 0.9 < likeness.mean() < 0.999


def test_a_filter_comes_from_its_own_code(small):
    """A code stands for the filters of its number in all layers of its stage, projection included,
    and for no others; the last one for the whole last layer."""
    torch.manual_seed(0)
    hypernet = model_of(small)
    with torch.no_grad():
        hypernet.extractor[-1].weight.zero_()  # the codes are the bias alone
        codes = hypernet.bias.view(129, 8)
        before = small.sample(hypernet, 1)
        codes[16 + 16 + 3] += 1  # the fourth of the second stage
        codes[-1] += 1
        after = small.sample(hypernet, 1)
    changed = [(a != b).any(dim=-1).nonzero()[:, 1].tolist() for a, b in zip(before, after)]
    assert changed == [[]] + [[]] * 2 + [[3]] * 3 + [[]] * 3 + [list(range(10))]


# ---- training ------------------------------------------------------------------------------------


def step_inputs(n: int) -> tuple[torch.Tensor, ...]:
    """z, images and labels of a step in double precision; the first two images are shared."""
    torch.manual_seed(1)
    z, x = torch.randn(n, 500).double(), torch.randn(n, 4, 3, 32, 32).double()
    y = torch.randint(10, (n, 4))
    x[:, :2], y[:, :2] = x[0, :2].clone(), y[0, :2].clone()
    return z, x, y


@pytest.mark.parametrize("kind", ["outputs", "none"])
def test_objective(small, kind):
    """loss = lam * cross-entropy - ramp * entropy, from loops over networks."""
    c = settings(small, "d", diversity=kind, shared=2, lam=70.0)
    torch.manual_seed(0)
    model, (z, x, y) = spread_model(small).double(), step_inputs(3)
    loss, loss_acc, entropy, acc = small.training_step(model, z, x, y, c, ramp=0.3)
    theta = model(z)
    logits = [
        small.target_network(x[n : n + 1], [t[n : n + 1] for t in theta])[0] for n in range(3)
    ]
    cross_entropy = sum(F.cross_entropy(logits[n], y[n]) for n in range(3)) / 3
    torch.testing.assert_close(loss_acc, cross_entropy)
    expected = torch.zeros(()).double()
    if kind == "outputs":
        points = [logit[:2].softmax(dim=1).flatten() for logit in logits]
        near = [min(torch.dist(p, q) for q in points if q is not p).log() for p in points]
        expected = torch.digamma(torch.tensor(3.0)).double() + 500 * sum(near) / 3
    torch.testing.assert_close(entropy, expected)
    torch.testing.assert_close(loss, 70 * cross_entropy - 0.3 * expected)
    hits = sum((logits[n].argmax(dim=1) == y[n]).sum().item() for n in range(3))
    assert acc.item() == pytest.approx(hits / 12)


def test_amp_changes_little(small):
    """bfloat16 has eight bits: a cross-entropy within a few percent, entropy in float32."""
    torch.manual_seed(0)
    model = model_of(small)
    z, x, y = model.noise(2), torch.randn(2, 4, 3, 32, 32), torch.randint(10, (2, 4))
    results = []
    for amp in (False, True):
        c = settings(small, "d", amp=amp)
        loss, loss_acc, entropy, _ = small.training_step(model, z, x, y, c)
        loss.backward()
        assert loss_acc.dtype == entropy.dtype == torch.float32
        assert all(p.grad.isfinite().all() for p in model.parameters())
        results.append(loss_acc)
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)
    assert results[0] != results[1]


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("kind", ["outputs", "none"])
@pytest.mark.parametrize("means", [0, 1])
def test_training_step_without_the_device(small, monkeypatch, device, kind, means):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    c = settings(small, "d", diversity=kind, means=means)
    if device == "meta":
        monkeypatch.setattr(
            torch, "autocast", lambda *_, **__: contextlib.nullcontext()
        )  # it does not know meta
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        with torch.device(device):  # for the parameters; the step must find its device by itself
            model = small.Hypernetwork(small.target_shapes(10), c.codes, means)
        padded = torch.rand(20, 3, 40, 40, device=device)
        y = torch.zeros(20, dtype=torch.long, device=device)
        batch = small.draw(padded, y, (2, 4), 2, generator=None)  # no device, no generator
        results = small.training_step(model, model.noise(2), *batch, c)
        assert all(result.device.type == device for result in results)
        if device == "meta":
            results[0].backward()
            assert all(p.grad.device.type == device for p in model.parameters())


# ---- several processes ---------------------------------------------------------------------------

WORKER = """
import importlib, os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from test_03_cifar_lenet import model_of, settings, shrink
from test_04_cifar_resnet32 import step_inputs

torch.set_num_threads(1)
resnet, calls = importlib.import_module("04_cifar_resnet32"), []
shrink(resnet, setattr)
training_step, load_data = resnet.training_step, resnet.load_data

def dying(*args):
    calls.append(None)
    if len(calls) == 6 and resnet.RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return training_step(*args)

def one_step(args):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(model_of(resnet, "d+").double())
    part = [tensor.chunk(2)[resnet.RANK] for tensor in step_inputs(4)]
    loss, *_ = training_step(model, *part, settings(resnet, "d+", shared=2, lam=70.0))
    loss.backward()
    dist.all_reduce(loss)
    if resnet.RANK == 0:
        torch.save([loss / 2, *(p.grad for p in model.parameters())], sys.argv[1])
    return load_data(args)

if sys.argv[2] == "killed":
    resnet.training_step = dying
else:
    resnet.load_data = one_step  # main() calls it when the process group is there
runs = resnet.main(sys.argv[3:])
assert len(runs) == (2 if resnet.RANK == 0 else 0) and not dist.is_initialized()
"""


def start_two(*argv: str) -> list[subprocess.Popen]:
    """Two processes with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    env |= dict(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}", WORLD_SIZE="2")
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *argv],
            env=os.environ | env | dict(RANK=rank, LOCAL_RANK=rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]


def test_two_processes_equal_one(small, tmp_path):
    """The whole script: `networks` is the number in all processes; one of them is killed in step 6,
    the same command goes on from step 4; rank 0 alone evaluates and writes. And a single step with
    two z in each process, and with all four in one: same loss, same gradients. Float32 sums in
    another order: Adam turns the rounding of a gradient near 0 into a step of another sign, and SGD
    at a rate of 0.1 lets rounding grow to 2 or 3 percent of the way. So trained weights are
    compared by their mean, to a tenth; half of the networks missing makes it the whole way."""
    argv = [*FAKE, "--columns", "d+", "b", "--networks", "4", "--out"]
    processes = start_two(str(tmp_path / "step"), "killed", *argv, str(tmp_path / "two"))
    processes[1].communicate()
    processes[0].kill()  # as torchrun does then
    processes[0].communicate()
    assert processes[1].returncode == -signal.SIGKILL
    assert saved(tmp_path / "two/cifar10_d+_networks4_fake/checkpoint.pt")["step"] == 4
    processes = start_two(str(tmp_path / "step"), "again", *argv, str(tmp_path / "two"))
    tables = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        tables.append(out.count("| cifar10_d+_networks4_fake: sampled"))
    assert tables == [2, 0]
    loss, *grads = torch.load(tmp_path / "step", weights_only=True)
    torch.manual_seed(0)
    model, c = model_of(small, "d+").double(), settings(small, "d+", shared=2, lam=70.0)
    expected, *_ = small.training_step(model, *step_inputs(4), c)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for grad, parameter in zip(grads, model.parameters()):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-6, atol=1e-9)

    small.main([*argv, str(tmp_path / "one")])
    for column in ("b", "d+"):
        folder = f"cifar10_{column}_networks4_fake"
        one, two = (
            json.loads((tmp_path / out / folder / "metrics.json").read_text())
            for out in ("one", "two")
        )
        assert two["command"].startswith("torchrun --nproc_per_node=2 04_cifar_resnet32.py --fake")
        assert one["settings"] == two["settings"]
        assert [row["step"] for row in two["log"]] == [4, 8]
        models = [saved(tmp_path / out / folder / "checkpoint.pt") for out in ("one", "two")]
        torch.manual_seed(10**6)  # as train() does for seed 0
        start = model_of(small, column, networks=4).state_dict()
        for name, a in models[0]["model"].items():
            b = models[1]["model"][name]
            moved, different = (a - start[name]).abs().mean(), (a - b).abs().mean()
            assert moved > 0 and different < 0.1 * moved, name
        assert len(models[0]["chain"]) == len(models[1]["chain"]) == 2 * (column == "b")
    for a, b in zip(one["log"], two["log"]):  # of d+
        assert a["diversity"] == pytest.approx(b["diversity"], rel=0.01)
        assert a["norm"] == pytest.approx(b["norm"], rel=0.01)


def test_processes_need_a_multiple_of_networks(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(small, "RANKS", 3)
    with pytest.raises(SystemExit):
        small.main([*FAKE, "--networks", "4", "--out", str(tmp_path / "out")])
    assert "3 processes a multiple of 3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_deviations_are_differences_of_the_papers_g(small):
    """G around a mean subtracts before W's last layer; here two whole networks are subtracted."""
    torch.manual_seed(0)
    model, paper = model_of(small, "d+").double(), model_of(small, "d").double()
    state = {name: v for name, v in model.state_dict().items() if not name.startswith("means")}
    paper.load_state_dict(state)
    with torch.no_grad():
        z = torch.randn(3, 500).double()
        made, networks, (origin,) = model(z), paper(z), zip(*paper(torch.zeros(1, 500).double()))
    for layer, mean, network, start in zip(made, model.means, networks, origin):
        torch.testing.assert_close(layer, mean + 0.1 * (network - start))


def test_means(small, capsys):
    """--means 0 in a column around a mean is the paper's G, which Adam alone trains; columns
    without a mean refuse the flag."""
    (c,) = small.parse_args(["--device", "cpu", "--columns", "c+", "--means", "0"]).runs
    model, optimizers = small.make_model(c, "cpu")
    assert c.name == "cifar10_c+_means0" and parameters(model) == parameters(model_of(small))
    assert [type(o).__name__ for o in optimizers] == ["Adam"]
    for argv in ("--columns a --means 1", "--columns c --means 1", "--columns c+ --means 2"):
        with pytest.raises(SystemExit):
            small.parse_args(argv.split())
        assert "--means" in capsys.readouterr().err
