import contextlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--fake-data", "--device", "cpu", "--steps", "4", "--networks", "2", "--images", "4"]
TINY += ["--images-per-forward", "2", "--shared", "2", "--tested", "10", "--averaged", "12"]
TINY += ["--validate-every", "2", "--calibration", "20"]


@pytest.fixture
def small(resnet, monkeypatch):
    """One block per stage and few test images: the same code in a tenth of the time."""
    monkeypatch.setattr(resnet, "BLOCKS", 1)
    monkeypatch.setattr(resnet, "load_data", few_images(resnet.load_data))
    return resnet


def few_images(load_data):
    def load(args):
        data = load_data(args)
        return {name: (x[:40], y[:40]) for name, (x, y) in data.items()}

    return load


def arguments(resnet, tmp_path, *more: str):
    return resnet.parse_args([*TINY, "--out", str(tmp_path), *more])


# ---- counts and architecture ---------------------------------------------------------------------


def test_counts_of_the_paper(resnet):
    def parameters(module):
        return sum(p.numel() for p in module.parameters())

    hypernet = resnet.Hypernetwork(10, "random")
    outputs = [generator.last.out_features for generator in hypernet.generators]
    assert outputs == [29, 1460, 2774, 5526, 650]
    parts = [parameters(part) for part in (hypernet.extractor, *hypernet.generators)]
    assert parts == [2532000, 669600, 1814400, 2865600, 5067200, 1166400]
    assert parameters(resnet.Hypernetwork(10)) == sum(parts) + 1032
    theta = hypernet(hypernet.noise(2))
    assert sum(layer[0].numel() for layer in theta) == 466906
    assert parameters(resnet.OneNetwork(10)) == 466906
    shapes = [layer.shape[1:] for layer in resnet.OneNetwork(10)(None)]
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


def twin_network():
    """ResNet-32 of torch.nn modules; their order is that of our layers."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for channels, filters, stride in (16, 16, 1), (16, 32, 2), (32, 64, 2):
        layers += [Block(channels, filters, stride)]
        layers += [Block(filters, filters, 1) for _ in range(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).double()


def load_twin(twin, theta, moments=None):
    convs = [m for m in twin.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in twin.modules() if isinstance(m, nn.BatchNorm2d)]
    first = 0
    with torch.no_grad():
        for conv, norm, layer in zip(convs, norms, theta):
            conv.weight.copy_(layer[:, :-2].view_as(conv.weight))
            norm.weight.copy_(layer[:, -2])
            norm.bias.copy_(layer[:, -1])
            if moments is not None:
                norm.running_mean.copy_(moments[first : first + len(layer), 0])
                norm.running_var.copy_(moments[first : first + len(layer), 1])
                first += len(layer)
        twin[-1].weight.copy_(theta[-1][:, :-1])
        twin[-1].bias.copy_(theta[-1][:, -1])
    return convs, norms


def random_theta(resnet, n):
    """In double precision, as 32 layers amplify rounding."""
    torch.manual_seed(0)
    networks = [resnet.OneNetwork(10)(None) for _ in range(n)]
    theta = [torch.cat(layers).detach().double() for layers in zip(*networks)]
    return [t + 0.1 * torch.randn_like(t) / t.shape[-1] ** 0.5 for t in theta]


@pytest.mark.parametrize("training", [True, False])
def test_target_network_is_resnet32(resnet, training):
    """Values and gradients of two networks against torch.nn, in training and in inference mode."""
    theta = [layer.requires_grad_() for layer in random_theta(resnet, 2)]
    x = torch.randn(2, 4, 3, 32, 32, dtype=torch.float64)
    moments = torch.rand(2, 1232, 2, dtype=torch.float64) + 0.5
    if training:
        logits = resnet.each_network(resnet.target_network, x, theta)
    else:
        logits = resnet.each_network(resnet.calibrated_network, x, [*theta, moments])
    logits.square().sum().backward()
    for n in range(2):
        twin = twin_network().train(training)
        convs, norms = load_twin(twin, [layer[n] for layer in theta], moments[n])
        expected = twin(x[n])
        torch.testing.assert_close(logits[n], expected, rtol=1e-6, atol=1e-6)
        expected.square().sum().backward()
        for conv, norm, layer in zip(convs, norms, theta):
            columns = (conv.weight.grad.flatten(1), norm.weight.grad, norm.bias.grad)
            grad = torch.cat([c.view(len(columns[1]), -1) for c in columns], dim=1)
            torch.testing.assert_close(layer.grad[n], grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(theta[-1].grad[n, :, -1], twin[-1].bias.grad)


def test_starts(resnet):
    """Gamma near 1, beta near 0, weights of the usual size; copies are near-copies."""
    torch.manual_seed(0)
    with torch.no_grad():
        theta = resnet.Hypernetwork().eval()(torch.randn(5, 500))
    for layer in theta[:-1]:
        assert 0.7 < layer[..., -2].mean() < 1.3 and layer[..., -2].std() < 0.4
        assert abs(layer[..., -1].mean()) < 0.3
    third = theta[-2]  # 64 filters, 576 inputs
    assert 0.5 < third[..., :-2].square().mean() * 576 / 2 < 2
    vectors = F.normalize(third.flatten(1), dim=1)
    assert (vectors @ vectors.T).min() > 0.9


# ---- batch norm ----------------------------------------------------------------------------------


def test_moments_of_one_batch_make_inference_equal_training(resnet):
    theta = random_theta(resnet, 2)
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    moments = resnet.recalibrate(theta, x)
    assert moments.shape == (2, 1232, 2)
    stack = x.expand(2, *x.shape)
    torch.testing.assert_close(
        resnet.each_network(resnet.calibrated_network, stack, [*theta, moments]),
        resnet.each_network(resnet.target_network, stack, theta),
        rtol=1e-6,
        atol=1e-6,
    )


def test_recalibration(resnet):
    """A stack equals its networks one by one; the moments are those of torch.nn. In portions, those
    of the first layer are exact, the later ones near, as a portion is normalised by itself."""
    theta = random_theta(resnet, 2)
    x = torch.randn(64, 3, 32, 32, dtype=torch.float64)
    whole, portions = (resnet.recalibrate(theta, x, images=images) for images in (64, 24))
    alone = [
        resnet.recalibrate([layer[n : n + 1] for layer in theta], x, images=24) for n in (0, 1)
    ]
    torch.testing.assert_close(portions, torch.cat(alone))
    torch.testing.assert_close(portions[:, :16], whole[:, :16])
    error = (portions - whole).abs() / whole[..., 1:].sqrt()
    assert error.mean() < 0.1 and not torch.equal(portions, whole)

    twin = twin_network().train()
    _, norms = load_twin(twin, [layer[1] for layer in theta])
    for norm in norms:
        norm.momentum = 1.0  # the last batch
    twin(x)
    for number, name in enumerate(("running_mean", "running_var")):
        moments = torch.cat([getattr(norm, name) for norm in norms])
        # torch.nn divides by n - 1, and n is 64 * 8 * 8 or more.
        torch.testing.assert_close(whole[1, :, number], moments, rtol=1e-3, atol=1e-8)


def test_recalibration_of_many_networks(small):
    """More than ten are taken in portions."""
    theta = random_theta(small, 12)
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    parts = [small.recalibrate([layer[n : n + 6] for layer in theta], x) for n in (0, 6)]
    torch.testing.assert_close(small.recalibrate(theta, x), torch.cat(parts))


# ---- training ------------------------------------------------------------------------------------


def test_batches_depend_on_seed_step_and_rank(resnet, tmp_path):
    args = arguments(resnet, tmp_path)
    y = torch.arange(50)
    crops = resnet.all_crops(torch.rand(50, 3, 32, 32), 4)

    def batch(step, rank=0):
        return resnet.draw_batch(crops, y, args, step, resnet.seeded(args, step, rank))

    x, labels = batch(step=3)
    other, other_labels = batch(step=3, rank=1)
    assert torch.equal(x, batch(step=3)[0]) and not torch.equal(x, batch(step=4)[0])
    for n in range(2):
        assert torch.equal(x[n, :2], x[0, :2]) and torch.equal(other[n, :2], x[0, :2])
        assert torch.equal(labels[n, :2], other_labels[n, :2])
    assert not torch.equal(x[0, 2:], x[1, 2:]) and not torch.equal(x[:, 2:], other[:, 2:])


def plain_loss(resnet, model, z, x, y, args):
    """The objective without portions or leaves, one graph; batch norm still sees two at a time."""
    theta = model(z)
    logits = torch.cat(
        [resnet.each_network(resnet.target_network, part, theta) for part in x.split(2, dim=1)], 1
    )
    loss_acc = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    probabilities = logits[:, : args.shared].softmax(dim=-1)
    if args.diversity == "outputs":
        diversity = resnet.knn_entropy(probabilities.flatten(1), 500)
    elif args.diversity == "ensemble":
        diversity = -500 * F.nll_loss(probabilities.mean(dim=0).log(), y[0, : args.shared])
    else:
        diversity = torch.zeros(())
    return args.lam * loss_acc - 0.3 * diversity, loss_acc, diversity


@pytest.mark.parametrize("kind", ["outputs", "ensemble", "none"])
def test_objective_and_its_gradient(small, tmp_path, kind):
    """Portions whose gradients add up in the generated weights, against one graph."""
    args = arguments(small, tmp_path, "--networks", "3", "--lam", "70")
    args.diversity = kind
    torch.manual_seed(0)
    model = small.Hypernetwork().double()
    z = torch.randn(3, 500).double()
    x, y = torch.randn(3, 4, 3, 32, 32).double(), torch.randint(10, (3, 4))
    x[:, :2], y[:, :2] = x[0, :2].clone(), y[0, :2].clone()
    loss, loss_acc, diversity, acc = small.training_step(model, z, x, y, args, ramp=0.3)
    ours = [p.grad.clone() for p in model.parameters()]
    expected, expected_acc, expected_diversity = plain_loss(small, model, z, x, y, args)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(loss_acc, expected_acc.detach())
    torch.testing.assert_close(diversity.double(), expected_diversity.detach().double())
    model.zero_grad()
    expected.backward()
    for parameter, grad in zip(model.parameters(), ours):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-6, atol=1e-9)


RANK = """
import importlib, sys, types
import torch, torch.distributed as dist
from torch import nn
resnet = importlib.import_module("04_cifar_resnet32")
resnet.BLOCKS = 1
torch.set_num_threads(1)
dist.init_process_group("gloo")
saved = torch.load(sys.argv[1], weights_only=True)
mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
results = {}
for kind in ("outputs", "ensemble"):
    args = types.SimpleNamespace(**saved["args"], diversity=kind)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(resnet.Hypernetwork().double())
    batch = [saved[name][mine] for name in ("z", "x", "y")]
    loss, *_ = resnet.training_step(model, *batch, args)
    dist.all_reduce(loss)
    results[kind] = dict(loss=loss / 2, grads=[p.grad for p in model.parameters()])
if dist.get_rank() == 0:
    torch.save(results, sys.argv[1] + ".out")

load = resnet.load_data
resnet.load_data = lambda args: {k: (x[:40], y[:40]) for k, (x, y) in load(args).items()}
metrics = resnet.main(sys.argv[2:])
assert bool(metrics) == (dist.get_rank() == 0)
"""


def test_two_ranks_equal_one_process(small, tmp_path):
    """Two gloo processes with two z each, and one with all four: same loss, same gradients. Then
    the whole script on both: rank 0 alone evaluates and writes."""
    torch.manual_seed(1)
    z, x = torch.randn(4, 500).double(), torch.randn(4, 4, 3, 32, 32).double()
    y = torch.randint(10, (4, 4))
    x[:, :2], y[:, :2] = x[0, :2].clone(), y[0, :2].clone()
    args = dict(images_per_forward=2, shared=2, lam=70.0, amp=False)
    file = tmp_path / "step.pt"
    torch.save(dict(z=z, x=x, y=y, args=args), file)
    (tmp_path / "rank.py").write_text(RANK)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
        + [str(tmp_path / "rank.py"), str(file), *TINY, "--out", str(tmp_path)],
        check=True, cwd=ROOT, env=os.environ | dict(PYTHONPATH=str(ROOT)), capture_output=True,
    )  # fmt: skip
    for kind, ranks in torch.load(str(file) + ".out", weights_only=True).items():
        torch.manual_seed(0)
        model = small.Hypernetwork().double()
        args["diversity"] = kind
        loss, *_ = small.training_step(model, z, x, y, types.SimpleNamespace(**args))
        torch.testing.assert_close(ranks["loss"], loss, rtol=1e-5, atol=1e-5)
        for grad, parameter in zip(ranks["grads"], model.parameters()):
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-5, atol=1e-8)
    metrics = json.loads((tmp_path / "cifar10_d/metrics.json").read_text())
    assert metrics["images_seen"] == 4 * 2 * 4 * 2 and metrics["settings"]["ranks"] == 2


def test_amp_changes_little(small, tmp_path):
    """bfloat16 has eight bits: a cross-entropy within a few percent, entropy in float32."""
    torch.manual_seed(0)
    model = small.Hypernetwork()
    z, x, y = model.noise(2), torch.randn(2, 4, 3, 32, 32), torch.randint(10, (2, 4))
    results = []
    for more in ([], ["--amp"]):
        loss_acc, diversity = small.training_step(
            model, z, x, y, arguments(small, tmp_path, *more)
        )[1:3]
        assert loss_acc.dtype == diversity.dtype == torch.float32
        results.append(loss_acc)
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)
    assert results[0] != results[1]


# ---- the script ----------------------------------------------------------------------------------


def test_averaged_network(small):
    """The running mean of weights against torch.mean, and copies average to themselves."""
    torch.manual_seed(0)
    model = small.Hypernetwork()
    z = model.noise(25)
    with torch.no_grad():
        theta = model(z)
    for n, mean in small.averages(model, z, [1, 3, 25]):
        for a, b in zip(mean, theta):
            torch.testing.assert_close(a, b[:n].mean(dim=0, keepdim=True), rtol=1e-4, atol=1e-5)
    x, y = small.fake_data(40, 10)
    result = small.distil(model, z[:1].expand(10, -1), x[:20], x[:40], y[:40])
    assert result["numbers"] == [1, 2, 5, 10] and len(set(result["accuracy"])) == 1
    assert result["nll"] == pytest.approx([result["nll"][0]] * 4, rel=1e-4)


def test_all_columns(small, lenet, tmp_path):
    columns = ["--fake-data", "--device", "cpu", "--steps", "4", "--images", "4", "--tested", "10"]
    columns += ["--averaged", "12", "--validate-every", "2", "--calibration", "20"]
    small.main([*columns, "--column", "all", "--out", str(tmp_path)])
    for column in "abcd":
        folder = tmp_path / f"cifar10_{column}"
        metrics = json.loads((folder / "metrics.json").read_text())
        for name in ("command", "seed", "commit", "hardware", "torch", "seconds", "images_seen"):
            assert name in metrics
        assert metrics["data"] == "made up" and "MADE-UP" in metrics["title"]
        assert (folder / "training.png").stat().st_size > 1000
        assert (folder / "distillation.png").exists() == (column in "cd")
        assert metrics["tested"]["networks"] == dict(a=1, b=4, c=10, d=10)[column]
    folders = [str(tmp_path / f"cifar10_{column}") for column in "abcd"]
    rows = lenet.main(["--compare", *folders, "--out", str(tmp_path)])["rows"]
    assert rows[3]["single"] == metrics["tested"]["single"]
    assert (tmp_path / "compare" / "compare.png").stat().st_size > 1000
    again = small.main(
        [*columns, "--checkpoint", str(folder / "model.pt"), "--out", str(tmp_path / "again")]
    )
    assert again["tested"] == metrics["tested"] and again["distilled"] == metrics["distilled"]


@pytest.mark.parametrize("device, amp", [("cuda", False), ("cuda", True), ("meta", False)])
def test_training_step_without_the_device(small, tmp_path, device, amp, monkeypatch):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    args = arguments(small, tmp_path, *(["--amp"] if amp else []))
    if device == "cuda":
        monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
        monkeypatch.setattr(torch.autograd, "backward", lambda *_: None)
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        with torch.device(device):  # for the parameters; the step must find its device by itself
            model = small.Hypernetwork()
        x = torch.rand(2, 4, 3, 32, 32, device=device)
        y = torch.zeros(2, 4, dtype=torch.long, device=device)
        results = small.training_step(model, model.noise(2), x, y, args)
        assert all(result.device.type == device for result in results)
        if device == "meta":
            assert all(p.grad.device.type == device for p in model.parameters())


@pytest.mark.parametrize("column", ["b", "d"])
def test_resume_is_bit_identical(small, tmp_path, monkeypatch, column):
    """Stopped after the checkpoint of step 2, in the middle of step 3."""
    more = ["--column", column, "--networks", "1" if column == "b" else "2"]
    whole = arguments(small, tmp_path / "whole", *more)
    data = small.load_data(whole)
    small.train(whole, data)
    with pytest.raises(SystemExit, match="--resume goes on"):
        small.train(whole, data)
    with pytest.raises(SystemExit, match="has --lr .*, not 7.0"):
        small.train(arguments(small, tmp_path / "whole", *more, "--lr", "7", "--resume"), data)
    whole_step, calls = small.training_step, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole_step(*args)

    monkeypatch.setattr(small, "training_step", dying)
    with pytest.raises(KeyboardInterrupt):
        small.train(arguments(small, tmp_path / "stopped", *more), data)
    monkeypatch.setattr(small, "training_step", whole_step)
    small.train(arguments(small, tmp_path / "stopped", *more, "--resume"), data)
    whole, resumed = (
        torch.load(tmp_path / name / f"cifar10_{column}/checkpoint.pt", weights_only=True)
        for name in ("whole", "stopped")
    )
    assert whole["log"] == resumed["log"]
    assert all(torch.equal(a, resumed["model"][name]) for name, a in whole["model"].items())
    assert len(whole["chain"]) == len(resumed["chain"]) == (whole["step"] if column == "b" else 0)
    pairs = zip(whole["chain"], resumed["chain"])
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other))


def test_a_loss_that_is_not_finite_stops_the_run(small, tmp_path):
    args = arguments(small, tmp_path, "--lr", "1e30")
    with pytest.raises(SystemExit, match="the loss is not finite; try a smaller --lr"):
        small.train(args, small.load_data(args))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "0 is not a positive whole number"),
        (["--diversity", "weights"], "invalid choice"),
        (["--shared", "65"], "cannot exceed --images-per-forward"),
        (["--networks", "1"], "at least 2"),
        (["--out", "README.md/folder"], "cannot write there"),
    ],
)
def test_bad_flags_are_one_line(resnet, tmp_path, capsys, arguments, message):
    """And no folder of a run is made."""
    with pytest.raises(SystemExit) as stop:
        resnet.main(["--device", "cpu", "--out", str(tmp_path / "runs"), *arguments])
    assert not list(tmp_path.glob("runs/*"))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1
