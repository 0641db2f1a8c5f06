import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--fake-data", "--device", "cpu", "--steps", "6", "--batch", "4", "--images", "4"]
TINY += ["--networks", "6", "--ensemble-size", "3", "--ensembles", "4", "--pca-samples", "30"]
TINY += ["--path-pairs", "3", "--path-images", "40", "--attacked-images", "20"]
TINY += ["--attacked-ensemble", "3", "--validate-every", "3"]


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ---- counts and architecture ---------------------------------------------------------------------


def test_counts_of_the_paper(mnist):
    hypernet = mnist.Hypernetwork("paper")
    linear = [m for m in hypernet.modules() if isinstance(m, nn.Linear)]
    assert sum(f * k for f, k in mnist.SHAPES) == 20018
    assert parameters(hypernet) == 633640
    assert sum(layer.weight.numel() for layer in linear) == 631240
    assert all(layer.bias is None for layer in linear)
    parts = [hypernet.extractor, *hypernet.generators]
    counts = [sum(m.weight.numel() for m in part if m in linear) for part in parts]
    assert counts == [436500, 3240, 91600, 90000, 9900]
    assert parameters(mnist.Hypernetwork("ours")) == 633640 + 855
    assert parameters(mnist.MNFG()) == 808156


def test_target_network_is_the_papers(mnist):
    """Against torch.nn modules, ReLU before pooling as printed."""
    torch.manual_seed(0)
    twin = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10),
    )  # fmt: skip
    layers = [m for m in twin if hasattr(m, "weight")]
    theta = [torch.cat([m.weight.flatten(1), m.bias[:, None]], dim=1)[None] for m in layers]
    assert [tuple(t.shape[1:]) for t in theta] == mnist.SHAPES
    x = torch.rand(5, 1, 28, 28)
    torch.testing.assert_close(mnist.target_network(x[None], theta)[0], twin(x))


def test_generators_are_shared_by_the_filters_of_a_layer(mnist):
    """Equal codes give equal filters, and a filter depends on its own code only."""
    torch.manual_seed(0)
    hypernet = mnist.Hypernetwork("ours").eval()
    with torch.no_grad():
        hypernet.extractor[-1].weight.zero_()  # the codes are the bias alone
        bias = hypernet.extractor[-1].bias.view(57, 15)
        bias[1] = bias[0]
        theta = hypernet(hypernet.noise(2))
    torch.testing.assert_close(theta[0][:, 0], theta[0][:, 1])
    assert not torch.allclose(theta[0][:, 0], theta[0][:, 2])


def test_near_copies_at_the_start(mnist):
    """With "ours" networks of different z start alike; with the paper's recipe they do not."""
    torch.manual_seed(0)

    def likeness(recipe):
        theta = mnist.flat(mnist.sample(mnist.Hypernetwork(recipe), 8))
        theta = F.normalize(theta, dim=1)
        return (theta @ theta.T)[~torch.eye(8, dtype=torch.bool)].mean().item()

    assert likeness("ours") > 0.8
    assert likeness("paper") < 0.5


def test_sampled_networks_are_gauge_fixed(mnist):
    torch.manual_seed(0)
    for model in (mnist.Hypernetwork("ours"), mnist.MNFG()):
        theta = mnist.sample(model, 3)
        assert [tuple(t.shape) for t in theta] == [(3, *shape) for shape in mnist.SHAPES]
        for layer in theta[:-1]:
            norms = layer.square().sum(dim=-1)
            torch.testing.assert_close(norms, torch.full_like(norms, layer.shape[-1]))
        assert theta[-1][..., -1].mean(dim=1).abs().max() < 1e-5


def test_a_network_depends_on_its_own_z(mnist):
    torch.manual_seed(0)
    for model in (mnist.Hypernetwork("ours").eval(), mnist.MNFG().eval()):
        noise = model.noise(4)
        with torch.no_grad():
            together, alone = mnist.flat(model(noise)), mnist.flat(model(noise[2:3]))
        torch.testing.assert_close(together[2:3], alone, rtol=1e-4, atol=1e-4)


def test_flat_and_back(mnist):
    theta = [torch.randn(2, *shape) for shape in mnist.SHAPES]
    assert mnist.flat(theta).shape == (2, 20018)
    assert all(torch.equal(a, b) for a, b in zip(theta, mnist.unflat(mnist.flat(theta))))


def test_shifted_windows(mnist):
    """Against torch.roll: the border is black, so that what leaves and what enters is zero."""
    x = F.pad(torch.rand(3, 1, 20, 20), [4] * 4)
    windows = mnist.shifted_windows(x, 2)
    assert windows.shape == (3, 5, 5, 1, 28, 28)
    assert torch.equal(windows[:, 2, 2], x)
    assert torch.equal(windows[:, 0, 3], x.roll((2, -1), dims=(2, 3)))
    assert torch.equal(mnist.shifted_windows(x, 0)[:, 0, 0], x)


def plain_logits(x, theta, n):
    """Network n on batch n, in plain torch."""
    w1, w2, w3, w4 = (filters[n] for filters in theta)
    x = F.conv2d(x[n], w1[:, :-1].reshape(32, 1, 5, 5), w1[:, -1], padding=2)
    x = F.conv2d(F.max_pool2d(x.relu(), 2), w2[:, :-1].reshape(16, 32, 5, 5), w2[:, -1], padding=2)
    x = F.linear(F.max_pool2d(x.relu(), 2).flatten(1), w3[:, :-1], w3[:, -1]).relu()
    return F.linear(x, w4[:, :-1], w4[:, -1])


@pytest.mark.parametrize("kind", ["hypernet", "mnfg"])
def test_objective(mnist, kind):
    """loss = lam * cross-entropy - entropy (of MNFG: + its bound), from plain loops."""
    torch.manual_seed(0)
    model = mnist.make_model(dict(model=kind, recipe="paper"))
    x, y = torch.rand(4, 3, 1, 28, 28), torch.randint(10, (4, 3))
    torch.manual_seed(1)
    loss, loss_acc, entropy, acc = mnist.training_step(model, x, y, lam=70.0)
    torch.manual_seed(1)
    noise = model.noise(4)
    if kind == "hypernet":
        theta = model(noise)
        vectors = torch.cat([filters.flatten(1) for filters in theta], dim=1)
        logs = [
            min(torch.dist(vectors[i], vectors[j]) for j in range(4) if j != i).log()
            for i in range(4)
        ]
        plain = torch.digamma(torch.tensor(4.0)) + 300 * sum(logs) / 4
    else:
        drawn = model.layers_drawn(noise)
        theta = [filters for filters, _, _ in drawn]
        bounds = [layer.bound(*one) for layer, one in zip(model.layers, drawn)]  # (4 layers, N)
        plain = -sum(bound.sum() for bound in bounds) / 4
    logits = [plain_logits(x, theta, n) for n in range(4)]
    cross_entropy = sum(F.cross_entropy(logits[n], y[n]) for n in range(4)) / 4
    torch.testing.assert_close(entropy, plain)
    torch.testing.assert_close(loss_acc, cross_entropy)
    torch.testing.assert_close(loss, 70 * cross_entropy - plain)
    hits = sum((logits[n].argmax(dim=1) == y[n]).sum().item() for n in range(4))
    assert acc.item() == pytest.approx(hits / 12)


# ---- evaluation ----------------------------------------------------------------------------------


def test_majority_by_hand(mnist):
    #                       image: 0  1  2  3
    votes = torch.tensor([[7, 2, 9, 4], [7, 2, 3, 5], [1, 8, 3, 6]])
    assert mnist.majority(votes).tolist() == [7, 2, 3, 4]  # the last is a tie: smallest class
    # Pairs that differ, of three: 2, 2, 2, 3
    assert mnist.disagreement(votes) == pytest.approx((2 + 2 + 2 + 3) / 12)


def test_evaluation_in_chunks_is_evaluation_at_once(mnist):
    torch.manual_seed(0)
    theta = mnist.sample(mnist.Hypernetwork("ours"), 3)
    x = torch.rand(20, 1, 28, 28)
    torch.testing.assert_close(mnist.predict(theta, x, images=7), mnist.predict(theta, x))
    alone = mnist.predict([filters[1:2] for filters in theta], x)
    torch.testing.assert_close(mnist.predict(theta, x)[1:2], alone)


def test_calibration_by_hand(mnist):
    """Two images at confidence 0.9, one right; one at 0.5, right: error (|1.8-1| + |0.5-1|) / 3."""
    probabilities = torch.full((3, 10), 0.0)
    probabilities[0, 1], probabilities[1, 2], probabilities[2, 3] = 0.9, 0.9, 0.5
    probabilities[:, 0] = 1 - probabilities.sum(dim=1)
    probabilities[2, 0] = 0.25
    probabilities[2, 5] = 0.25
    y = torch.tensor([1, 7, 3])
    bins = mnist.reliability(probabilities, y)
    assert bins[0].sum() == 3
    assert mnist.calibration_error(bins).item() == pytest.approx((0.8 + 0.5) / 3, rel=1e-5)


@pytest.mark.parametrize("n, d", [(50, 8), (20, 60)])
def test_pca_is_numpys_svd(mnist, n, d):
    torch.manual_seed(0)
    samples = torch.randn(n, d, dtype=torch.float64) * torch.linspace(3, 0.5, d) + 5
    scores, shares = mnist.pca(samples)
    centred = (samples - samples.mean(dim=0)).numpy()
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(scores), np.abs(u * s)[:, :6], atol=1e-8)
    np.testing.assert_allclose(shares, (s**2 / (s**2).sum())[:6])


def test_paths_share_their_ends(mnist):
    torch.manual_seed(0)
    x, y = mnist.fake_data(60)
    result = mnist.paths(mnist.Hypernetwork("paper"), x, y, pairs=2, points=5)
    for direct, interpolated in zip(result["direct"], result["interpolated"]):
        assert len(direct) == 5
        assert direct[0] == interpolated[0] and direct[-1] == interpolated[-1]


def test_paths_go_through_the_right_networks(mnist, monkeypatch):
    """t = 0 is G(z2), t = 1 is G(z1), the middles are the mean of the weights and of the noise."""
    torch.manual_seed(0)
    model = mnist.Hypernetwork("paper").eval()
    seen = []
    monkeypatch.setattr(
        mnist, "predict", lambda theta, x: seen.append(mnist.flat(theta)) or torch.rand(3, 4, 10)
    )
    mnist.paths(model, torch.rand(4, 1, 28, 28), torch.zeros(4), pairs=1, points=3)
    z1, z2 = model.noise(2, torch.Generator().manual_seed(4))
    with torch.no_grad():
        one, two, middle = mnist.flat(model(torch.stack([z1, z2, (z1 + z2) / 2])))
    direct, interpolated = seen
    torch.testing.assert_close(direct, torch.stack([two, (one + two) / 2, one]))
    torch.testing.assert_close(interpolated, torch.stack([two, middle, one]))


def test_fast_gradient_moves_by_epsilon_towards_the_target(mnist):
    torch.manual_seed(0)
    theta = [torch.randn(1, f, k) / k**0.5 for f, k in mnist.SHAPES]
    x = torch.rand(8, 1, 28, 28)
    target = torch.arange(8)
    sign = mnist.fast_gradient(theta, x, target)
    moved = (x + 0.03 * sign - x).abs()
    reached = sign != 0  # pixels that no live neuron sees have no gradient
    assert reached.float().mean() > 0.5
    torch.testing.assert_close(moved[reached], torch.full_like(moved[reached], 0.03))
    before, after = (
        mnist.predict(theta, images)[0, torch.arange(8), target] for images in (x, x + 1e-3 * sign)
    )
    assert (after > before).all()


def test_attacks_aim_at_wrong_classes_of_images_that_were_right(mnist, monkeypatch):
    torch.manual_seed(0)
    model = mnist.Hypernetwork("ours")
    x, _ = mnist.fake_data(60)
    first = mnist.sample(model, 1, torch.Generator().manual_seed(5))  # the network to be attacked
    y = mnist.predict(first, x)[0].argmax(dim=-1)
    y[30:] = (y[30:] + 1) % 10  # it gets half of them right
    targets = []
    fast_gradient = mnist.fast_gradient
    monkeypatch.setattr(
        mnist, "fast_gradient", lambda theta, x, t: targets.append(t) or fast_gradient(theta, x, t)
    )
    result = mnist.adversarial(model, x, y, members=3)
    assert result["images"] == 30 and len(targets[0]) == 30
    assert (targets[0] != y[:30]).all() and len(targets[0].unique()) > 3
    assert result["single_fooled"][0] == 0  # epsilon = 0


def test_learning_rates(mnist, tmp_path):
    out = ["--device", "cpu", "--out", str(tmp_path)]
    ours = mnist.parse_args(["--steps", "1000", "--lr", "1", *out])
    assert mnist.learning_rate(ours, 0) == pytest.approx(1 / 200)
    assert max(mnist.learning_rate(ours, s) for s in range(1000)) <= 1
    assert mnist.learning_rate(ours, 999) == pytest.approx(1 / 800)
    assert mnist.learning_rate(mnist.parse_args(["--steps", "1", *out]), 0) > 0
    paper = mnist.parse_args(["--recipe", "paper", *out])
    assert mnist.learning_rate(paper, 13000) == pytest.approx(2.3e-4, rel=0.01)


# ---- MNFG ----------------------------------------------------------------------------------------


def test_flow_determinant_is_autograds(mnist):
    torch.manual_seed(0)
    flow = mnist.Flow(6, 5).double()
    z = torch.randn(1, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None])[0][0], z[0])
    torch.testing.assert_close(flow(z)[1][0], torch.linalg.slogdet(jacobian).logabsdet)
    moved = flow(z)[0]
    assert (moved != z).all()  # complementary masks: every coordinate moves


def test_gaussian_divergence_is_torchs(mnist):
    mean, log_var = torch.randn(50), torch.randn(50)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(mean, (log_var / 2).exp()), normal(torch.zeros(50), torch.ones(50))
    )
    torch.testing.assert_close(mnist.gaussian_divergence(mean, log_var), expected)


@pytest.mark.parametrize("conv", [True, False])
def test_posterior_moments(mnist, conv):
    """Weights drawn for one z: mean z * mu and variance sigma^2, for bias and weights."""
    torch.manual_seed(0)
    layer = mnist.MNFGLayer(3, 4, conv, init_std=0.5)
    with torch.no_grad():
        layer.log_std.uniform_(-2, -1)
        layer.bias_log_var.uniform_(-4, -2)
        layer.bias_mean.normal_()
        noise_z = torch.randn(1, layer.d)
        draws = layer(noise_z.expand(40000, -1), torch.randn(40000, 3, 5))[0]
        z = layer.flow(layer.start_mean + (layer.start_log_var / 2).exp() * noise_z)[0][0]
    for f in range(3):
        for k in range(4):
            mean = layer.mean[f, k] * (z[f] if conv else z[k])
            std = layer.log_std[f, k].exp()
            assert abs(draws[:, f, k].mean() - mean) < 5 * std / 200  # standard error: std / 200
            assert draws[:, f, k].std() == pytest.approx(std.item(), rel=0.02)
        bias_mean = layer.bias_mean[f] * (z[f] if conv else 1)
        bias_std = (layer.bias_log_var[f] / 2).exp()
        assert abs(draws[:, f, -1].mean() - bias_mean) < 5 * bias_std / 200
        assert draws[:, f, -1].std() == pytest.approx(bias_std.item(), rel=0.02)


def test_bound_is_above_the_true_divergence(mnist):
    """A dense layer with two weights: q(W) = E_z N(W; z mu, sigma^2) by a long Monte Carlo sum over
    z, and the KL divergence from the prior by one over W. The bound must lie above it, and not by
    the full information between z and W if r were useless."""
    torch.manual_seed(0)
    layer = mnist.MNFGLayer(1, 2, conv=False, init_std=1.0).double()
    with torch.no_grad():
        layer.log_std.fill_(-1.0)
        layer.bias_log_var.fill_(-1.0)
        layer.start_log_var.fill_(0.0)
        noise_z, noise = torch.randn(4000, 2).double(), torch.randn(4000, 1, 3).double()
        drawn = layer(noise_z, noise)
        filters, bound = drawn[0], layer.bound(*drawn)
        z = layer.flow(layer.start_mean + torch.randn(4000, 2).double())[0]
        weight = filters[:, 0, :2]  # (4000, 2)
        std = layer.log_std.exp()[0]
        normal = torch.distributions.Normal(z[None] * layer.mean, std)
        log_q = normal.log_prob(weight[:, None]).sum(dim=-1).logsumexp(dim=1) - math.log(4000)
        log_prior = torch.distributions.Normal(0.0, 1.0).log_prob(weight).sum(dim=1)
        of_bias = mnist.gaussian_divergence(layer.bias_mean, layer.bias_log_var).sum()
        true = (log_q - log_prior).mean() + of_bias
        error = 4 * (bound.std() + (log_q - log_prior).std()) / 4000**0.5
    assert bound.mean() > true - error
    # Exact if r(z|W) were q(z|W): train r alone and the gap must close to a fraction.
    gap = (bound.mean() - true).item()
    ours = [layer.r_mean, layer.r_precision, layer.r_weight, *layer.r_flow.parameters()]
    optimizer = torch.optim.Adam(ours, lr=0.02)
    for _ in range(300):
        drawn = layer(torch.randn(256, 2).double(), torch.randn(256, 1, 3).double())
        loss = layer.bound(*drawn).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        trained = layer.bound(*layer(noise_z, noise)).mean()
    assert true - error < trained < true + 0.7 * gap


def test_mnfg_same_noise_same_network(mnist, tmp_path):
    torch.manual_seed(0)
    model = mnist.MNFG()
    noise = model.noise(2)
    file = tmp_path / "hypernet.pt"
    mnist.save(dict(settings=dict(model="mnfg", recipe="ours"), model=model.state_dict()), file)
    torch.manual_seed(99)  # other masks, if they were not saved
    again = mnist.load(file)
    torch.testing.assert_close(mnist.flat(model(noise)), mnist.flat(again(noise)))


# ---- the script ----------------------------------------------------------------------------------

FIGURES = ["training", "histogram", "ensembles", "calibration", "filters", "paths", "adversarial"]
FIGURES += ["rotation", "pca_network", *(f"pca_filter{i}" for i in (1, 2, 3))]
FIGURES += [f"pca_layer{i}" for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("model", ["hypernet", "mnfg"])
def test_small_run_writes_everything(mnist, tmp_path, model):
    metrics = mnist.main([*TINY, "--model", model, "--out", str(tmp_path)])
    for name in FIGURES:
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert metrics["data"] == "made up" and "MADE-UP" in metrics["title"]
    for name in ("command", "seed", "commit", "hardware", "torch", "seconds"):
        assert name in metrics
    log = (tmp_path / "log.csv").read_text().splitlines()
    assert "val_disagreement" in log[0] and len(log) == 1 + 1 + 2  # header, last step, validations

    if model == "mnfg":
        return
    again = mnist.main(
        [*TINY, "--checkpoint", str(tmp_path / "hypernet.pt"), "--out", str(tmp_path / "again")]
    )
    assert again["tested"] == metrics["tested"]

    mnist.main(["--compare", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "both")])
    rows = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert len(rows) == 2 and rows[0]["single"] == metrics["tested"]["single_mean"]
    for name in ("histogram", "paths", "pca", "adversarial"):
        assert (tmp_path / "both" / f"compare_{name}.png").stat().st_size > 1000


def test_it_learns(mnist, tmp_path):
    """Made-up patterns, a short life: far above the 10 % of chance. Around 50 %; how far it gets
    depends on the processor's rounding."""
    arguments = ["--fake-data", "--device", "cpu", "--lam", "1e5", "--steps", "150"]
    arguments += ["--batch", "16", "--images", "16", "--out", str(tmp_path)]
    args = mnist.parse_args(arguments)
    _, log, _ = mnist.train(args, mnist.load_data(args))
    assert log[-1]["val_majority"] > 0.3


@pytest.mark.parametrize("model", ["hypernet", "mnfg"])
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_training_step_without_the_device(mnist, model, device, monkeypatch):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda tensor, **_: tensor)  # it reads values
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        with torch.device(device):  # for the parameters; the step must find its device by itself
            net = mnist.make_model(dict(model=model, recipe="ours"))
        x = torch.rand(4, 3, 1, 28, 28, device=device)
        y = torch.zeros(4, 3, dtype=torch.long, device=device)
        loss, *_ = mnist.training_step(net, x, y, 1e3)
        assert loss.device.type == device
        if device == "meta":
            loss.backward()
            assert all(p.grad.device.type == device for p in net.parameters())


def test_resume_after_kill_is_bit_identical(mnist, tmp_path):
    def start(out: Path, *more: str) -> subprocess.Popen:
        code = (
            "import sys, importlib\n"
            "mnist = importlib.import_module('02_mnist_hypernet')\n"
            "mnist.CHECKPOINT_EVERY = 2\n"
            "args = mnist.parse_args(sys.argv[1:])\n"
            "mnist.train(args, mnist.load_data(args))\n"
        )
        arguments = [*TINY, "--steps", "24", "--out", str(out), *more]
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    assert start(tmp_path / "whole").wait() == 0
    victim = start(tmp_path / "killed")
    while not (tmp_path / "killed" / "checkpoint.pt").exists():
        time.sleep(0.01)
        assert victim.poll() is None
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    stopped = torch.load(tmp_path / "killed" / "checkpoint.pt", weights_only=True)["step"]
    assert stopped < 24
    resumed = start(tmp_path / "killed", "--resume")
    assert f"resuming at step {stopped} of 24" in resumed.communicate()[0]
    assert resumed.returncode == 0
    whole, resumed = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "killed")
    )
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    assert whole["log"] == resumed["log"]


def test_foreign_and_damaged_checkpoints_are_refused(mnist, tmp_path):
    args = mnist.parse_args([*TINY, "--out", str(tmp_path)])
    data = mnist.load_data(args)
    mnist.train(args, data)
    file = tmp_path / "checkpoint.pt"
    before = file.read_bytes()
    config = (tmp_path / "config.json").read_text()
    for more in (["--resume"], []):
        other = mnist.parse_args([*TINY, "--out", str(tmp_path), "--lam", "7", *more])
        with pytest.raises(SystemExit, match="has --lam 1000.0, not 7.0"):
            mnist.train(other, data)
    assert file.read_bytes() == before and (tmp_path / "config.json").read_text() == config
    damaged = before[: len(before) // 2]
    file.write_bytes(damaged)
    with pytest.raises(SystemExit, match="damaged"):
        mnist.train(mnist.parse_args([*TINY, "--out", str(tmp_path), "--resume"]), data)
    assert file.read_bytes() == damaged
    torch.save(dict(weights=torch.zeros(3)), file)
    with pytest.raises(SystemExit, match="not from this script"):
        mnist.load(file)


def test_a_loss_that_is_not_finite_stops_the_run(mnist, tmp_path, monkeypatch):
    args = mnist.parse_args([*TINY, "--out", str(tmp_path)])
    args.steps = 30
    whole_step = mnist.training_step

    def broken(model, x, y, lam):
        loss, *rest = whole_step(model, x, y, lam)
        broken.calls += 1
        return loss * (math.nan if broken.calls > 12 else 1), *rest

    broken.calls = 0
    monkeypatch.setattr(mnist, "training_step", broken)
    monkeypatch.setattr(mnist, "CHECKPOINT_EVERY", 10)
    with pytest.raises(SystemExit, match="step 20: the loss is not finite.*last good checkpoint"):
        mnist.train(args, mnist.load_data(args))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 10
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())


def test_no_data_is_one_clear_message(mnist, tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise RuntimeError("Error downloading")

    monkeypatch.setattr(mnist.datasets, "MNIST", no_network)
    with pytest.raises(SystemExit, match="--fake-data"):
        mnist.main(["--device", "cpu", "--data", str(tmp_path), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "0 is not a positive whole number"),
        (["--ensemble-size", "20", "--networks", "10"], "cannot exceed --networks"),
        (["--model", "vae"], "invalid choice"),
        (["--out", "README.md/folder"], "cannot write there"),
        (["--checkpoint", "nowhere.pt"], "no such file"),
        (["--compare", "nowhere"], "no metrics.json"),
    ],
)
def test_bad_flags_are_one_line(mnist, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        mnist.main(["--device", "cpu", *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1
