"""The guarantees of common.py, each against something that is not common.py."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from common import (
    batch_norm,
    conv2d,
    each_network,
    fix_gauge,
    knn_entropy,
    linear,
    max_pool2d,
)

ROOT = Path(__file__).resolve().parents[1]
EULER_GAMMA = -torch.digamma(torch.tensor(1.0, dtype=torch.float64)).item()


# ---- knn_entropy ---------------------------------------------------------------------------------


def log_unit_ball(d: int) -> float:
    return d / 2 * math.log(math.pi) - math.lgamma(d / 2 + 1)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_entropy_of_a_gaussian(d):
    torch.manual_seed(0)
    n, sigma = 4000, 3.0
    samples = torch.randn(n, d, dtype=torch.float64) * sigma
    exact = d / 2 * math.log(2 * math.pi * math.e * sigma**2)
    full = knn_entropy(samples, d) + EULER_GAMMA + log_unit_ball(d)
    # The estimator's standard deviation is about sqrt((pi^2 / 6 + d / 2) / n): five times it.
    assert abs(full.item() - exact) < 0.15


def test_entropy_of_a_uniform_line_in_high_dimension():
    """A line of length 7 in 50 dimensions: with dim = 1, not 50, its entropy is log 7."""
    torch.manual_seed(0)
    direction = F.normalize(torch.randn(50, dtype=torch.float64), dim=0)
    samples = 7 * torch.rand(4000, 1, dtype=torch.float64) * direction + 3
    full = knn_entropy(samples, 1) + EULER_GAMMA + log_unit_ball(1)
    assert abs(full.item() - math.log(7)) < 0.15


def test_entropy_equals_a_plain_loop():
    torch.manual_seed(0)
    samples = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    logs = []
    for i in range(9):
        others = [torch.linalg.vector_norm(samples[i] - samples[j]) for j in range(9) if j != i]
        logs.append(torch.stack(others).min().log())
    plain = torch.digamma(torch.tensor(9.0, dtype=torch.float64)) + 4 * torch.stack(logs).mean()
    ours = knn_entropy(samples, 4)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours, samples)[0], torch.autograd.grad(plain, samples)[0]
    )


def test_entropy_scales_with_the_samples():
    torch.manual_seed(0)
    samples = torch.randn(200, 10)
    gain = knn_entropy(samples * 1e-3, 6) - knn_entropy(samples, 6)
    assert gain.item() == pytest.approx(6 * math.log(1e-3), rel=1e-5)  # float32 rounding


def test_coincident_samples_are_finite():
    samples = torch.ones(6, 4)
    samples[3:] = 2.0
    samples.requires_grad_()
    entropy = knn_entropy(samples, 3)
    entropy.backward()
    assert entropy.isfinite() and samples.grad.isfinite().all()


def test_large_offsets_do_not_lose_the_distances():
    """float32 samples a thousand away from the origin, on two sides of it so that subtracting the
    mean does not help, a hundredth apart. |a|^2 is 2e7 and has a resolution of 2 in float32."""
    torch.manual_seed(0)
    sides = torch.tensor([1000.0, -1000.0]).repeat(50)[:, None]
    samples = sides + 0.01 * torch.randn(100, 20)
    exact = (samples.double()[:, None] - samples.double()).norm(dim=-1).fill_diagonal_(torch.inf)
    entropy = torch.digamma(torch.tensor(100.0)) + 20 * exact.amin(dim=1).log().mean()
    assert knn_entropy(samples, 20).item() == pytest.approx(entropy.item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 5), (0, 5), (5,)])
def test_too_few_samples(shape):
    with pytest.raises(ValueError, match="N >= 2"):
        knn_entropy(torch.zeros(shape), 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_entropy_memory():
    """2,000 samples of 20,018 numbers, forward and backward, in 1.5 GB above the 160 MB input: any
    allocation beyond that fails. All N * N differences of D numbers would be 320 GB."""
    code = """
import resource, torch
from common import knn_entropy
samples = torch.randn(2000, 20018, requires_grad=True)
knn_entropy(samples[:50], 300).backward()  # start threads and libraries first
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA, used + EXTRA))
knn_entropy(samples, 300).backward()
"""

    def exit_code(limit: float) -> int:
        program = code.replace("EXTRA", str(int(limit)))
        return subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=-3).returncode

    assert exit_code(1.5e9) == 0
    assert exit_code(0.2e9) != 0  # the limit does bite


# ---- fix_gauge -----------------------------------------------------------------------------------


def random_network(n: int = 3, dtype=torch.float64) -> list[torch.Tensor]:
    """conv 3x3 (2 -> 4), conv 3x3 (4 -> 3), dense 3 * 25 -> 6, dense 6 -> 5."""
    shapes = [(4, 19), (3, 37), (6, 76), (5, 7)]
    return [torch.randn(n, *shape, dtype=dtype) / shape[1] ** 0.5 for shape in shapes]


def probabilities(x: torch.Tensor, layers: list[torch.Tensor], n: int) -> torch.Tensor:
    """Network n, in plain torch."""
    w1, w2, w3, w4 = (layer[n] for layer in layers)
    x = F.conv2d(x, w1[:, :-1].reshape(4, 2, 3, 3), w1[:, -1], padding=1).relu()
    x = F.max_pool2d(x, 2)
    x = F.conv2d(x, w2[:, :-1].reshape(3, 4, 3, 3), w2[:, -1], padding=1).relu().flatten(1)
    x = F.linear(x, w3[:, :-1], w3[:, -1]).relu()
    return F.linear(x, w4[:, :-1], w4[:, -1]).softmax(dim=1)


def symmetric_copy(layers, permute: bool) -> list[torch.Tensor]:
    """The same functions with other weights: filters scaled, logits shifted, filters permuted. A
    plain loop over networks, layers and filters."""
    layers = [layer.clone() for layer in layers]
    for n in range(len(layers[0])):
        for this, following in zip(layers[:-1], layers[1:]):
            count = this.shape[1]
            taps = (following.shape[2] - 1) // count
            order = torch.randperm(count) if permute else torch.arange(count)
            factors = torch.rand(count, dtype=this.dtype) * 3 + 0.1
            old, old_following = this[n].clone(), following[n].clone()
            for new_place, f in enumerate(order.tolist()):
                this[n, new_place] = old[f] * factors[f]
                following[n, :, new_place * taps : (new_place + 1) * taps] = (
                    old_following[:, f * taps : (f + 1) * taps] / factors[f]
                )
        layers[-1][n, :, -1] += torch.randn(1).item() * 5
    return layers


@pytest.mark.parametrize("sort_filters", [False, True])
def test_gauge_keeps_the_function(sort_filters):
    torch.manual_seed(0)
    layers = random_network()
    gauged = fix_gauge(layers, sort_filters)
    x = torch.rand(7, 2, 10, 10, dtype=torch.float64)
    for n in range(3):
        torch.testing.assert_close(probabilities(x, gauged, n), probabilities(x, layers, n))


def test_gauge_keeps_the_function_in_float32():
    torch.manual_seed(0)
    layers = random_network(dtype=torch.float32)
    x = torch.rand(7, 2, 10, 10)
    gauged = fix_gauge(layers)
    for n in range(3):  # A few hundred float32 roundings of 6e-8.
        torch.testing.assert_close(
            probabilities(x, gauged, n), probabilities(x, layers, n), atol=2e-6, rtol=0
        )


def test_gauge_conditions():
    torch.manual_seed(0)
    *hidden, last = fix_gauge(random_network())
    for layer in hidden:
        count = torch.full(layer.shape[:2], float(layer.shape[2]), dtype=torch.float64)
        torch.testing.assert_close(layer.square().sum(dim=-1), count)
    # Subtracting the sum of the biases instead of their mean would leave -4 times the sum here.
    assert last[..., -1].sum(dim=1).abs().max() < 1e-12


@pytest.mark.parametrize("permute", [False, True])
def test_symmetric_copies_get_the_same_gauge(permute):
    torch.manual_seed(0)
    layers = random_network()
    copy = symmetric_copy(layers, permute)
    assert not torch.allclose(copy[0], layers[0])
    for a, b in zip(fix_gauge(layers, permute), fix_gauge(copy, permute)):
        torch.testing.assert_close(a, b)


def test_permuted_copies_differ_without_sorting():
    torch.manual_seed(0)
    layers = random_network()
    copy = symmetric_copy(layers, permute=True)
    assert not torch.allclose(fix_gauge(layers)[0], fix_gauge(copy)[0])


@pytest.mark.parametrize("sort_filters", [False, True])
def test_gauge_twice_is_gauge_once(sort_filters):
    torch.manual_seed(0)
    once = fix_gauge(random_network(), sort_filters)
    for a, b in zip(once, fix_gauge(once, sort_filters)):
        torch.testing.assert_close(a, b)


def test_gauge_of_a_dead_filter():
    torch.manual_seed(0)
    layers = random_network()
    layers[1][:, 2] = 0.0
    for layer in layers:
        layer.requires_grad_()
    gauged = fix_gauge(layers)
    assert (gauged[1][:, 2] == 0).all()
    sum(layer.square().sum() + layer.sum() for layer in gauged).backward()
    assert all(layer.grad.isfinite().all() for layer in layers)


@pytest.mark.parametrize("sort_filters", [False, True])
def test_gauge_gradients(sort_filters):
    torch.manual_seed(0)
    layers = [
        torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True),
        torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True),
    ]
    assert torch.autograd.gradcheck(lambda *ls: tuple(fix_gauge(list(ls), sort_filters)), layers)


def test_gauge_leaves_its_input_alone():
    torch.manual_seed(0)
    layers = random_network()
    before = [layer.clone() for layer in layers]
    fix_gauge(layers, sort_filters=True)
    assert all(torch.equal(a, b) for a, b in zip(layers, before))


# ---- layers --------------------------------------------------------------------------------------


def assert_same_values_and_gradients(ours, plain, inputs):
    torch.manual_seed(1)
    torch.testing.assert_close(ours, plain)
    direction = torch.randn_like(plain)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, direction), torch.autograd.grad(plain, inputs, direction)
    ):
        torch.testing.assert_close(a, b)


def double(*shape) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# (N, B, C, H, W, F, kernel, stride, padding)
CONVOLUTIONS = [
    (3, 4, 2, 9, 7, 5, 3, 1, 1),
    (3, 4, 2, 9, 7, 5, 3, 2, 1),
    (2, 3, 1, 8, 8, 4, 5, 1, 2),
    (1, 4, 3, 11, 11, 2, 5, 1, 0),
    (4, 1, 3, 7, 7, 2, 1, 2, 0),
    (1, 1, 1, 5, 5, 1, 5, 3, 0),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", CONVOLUTIONS)
def test_conv2d(sizes, bias):
    n, b, c, h, w, f, k, stride, padding = sizes
    torch.manual_seed(0)
    x, filters = double(n, b, c, h, w), double(n, f, c * k * k + bias)
    plain = []
    for i in range(n):
        weight = filters[i, :, : c * k * k].reshape(f, c, k, k)
        shift = filters[i, :, -1] if bias else None
        plain.append(F.conv2d(x[i], weight, shift, stride=stride, padding=padding))
    ours = conv2d(x, filters, k, stride, padding, bias)
    assert_same_values_and_gradients(ours, torch.stack(plain), [x, filters])


@pytest.mark.parametrize("n, b, k, f", [(3, 4, 7, 5), (1, 4, 7, 5), (3, 1, 7, 5), (1, 1, 1, 1)])
def test_linear(n, b, k, f):
    torch.manual_seed(0)
    x, filters = double(n, b, k), double(n, f, k + 1)
    plain = [F.linear(x[i], filters[i, :, :-1], filters[i, :, -1]) for i in range(n)]
    assert_same_values_and_gradients(linear(x, filters), torch.stack(plain), [x, filters])


@pytest.mark.parametrize("n, b", [(3, 4), (1, 4), (3, 1)])
@pytest.mark.parametrize("own_moments", [True, False])
def test_batch_norm(n, b, own_moments):
    torch.manual_seed(0)
    x, gamma, beta = double(n, b, 5, 3, 7), double(n, 5), double(n, 5)
    moments = () if own_moments else (double(n, 5).detach(), double(n, 5).detach().exp())
    plain = []
    for i in range(n):
        module = torch.nn.BatchNorm2d(5, dtype=torch.float64).train(own_moments)
        if not own_moments:
            module.running_mean, module.running_var = moments[0][i], moments[1][i]
        plain.append(module(x[i]) * gamma[i, :, None, None] + beta[i, :, None, None])
    ours = batch_norm(x, gamma, beta, *moments)
    assert_same_values_and_gradients(ours, torch.stack(plain), [x, gamma, beta])


def test_batch_norm_with_columns_of_the_filters():
    """Gamma and beta with strides, as in a filter (N, F, K + 2) that holds them at its end."""
    torch.manual_seed(0)
    x, filters = double(2, 4, 5, 3, 7), double(2, 5, 9)
    mean, var = double(2, 5, 2).detach().exp().unbind(dim=-1)
    for moments in (), (mean, var):
        ours = batch_norm(x, filters[..., -2], filters[..., -1], *moments)
        copies = [m.clone(memory_format=torch.contiguous_format) for m in moments]
        plain = batch_norm(x, filters[..., -2].clone(), filters[..., -1].clone(), *copies)
        assert_same_values_and_gradients(ours, plain, [x, filters])


@pytest.mark.parametrize("n, b, h, w", [(3, 4, 8, 6), (1, 4, 7, 9), (3, 1, 5, 5)])
def test_max_pool2d(n, b, h, w):
    torch.manual_seed(0)
    x = double(n, b, 3, h, w)
    plain = torch.stack([F.max_pool2d(x[i], 2) for i in range(n)])
    assert_same_values_and_gradients(max_pool2d(x, 2), plain, [x])


def small_network(x, layers):
    x = max_pool2d(conv2d(x, layers[0], 3, padding=1), 2).relu()
    return linear(x.flatten(2), layers[1])


def test_each_network_is_all_networks():
    torch.manual_seed(0)
    x, layers = double(4, 3, 2, 6, 6), [double(4, 5, 19), double(4, 7, 46)]
    ours = each_network(small_network, x, layers)
    assert_same_values_and_gradients(ours, small_network(x, layers), [x, *layers])


@pytest.mark.parametrize("layer", ["conv2d", "batch_norm", "max_pool2d"])
def test_the_accelerator_branch_computes_the_same(layer, monkeypatch):
    """The branch for CUDA is plain torch: it runs here if the tensors deny being on the CPU."""
    torch.manual_seed(0)
    x, filters, gamma, beta = double(3, 4, 2, 7, 6), double(3, 5, 19), double(3, 2), double(3, 2)
    mean, var = torch.randn(3, 2).double(), torch.rand(3, 2).double()
    call = {
        "conv2d": lambda x: conv2d(x, filters, 3, stride=2, padding=1),
        "batch_norm": lambda x: torch.cat(
            [batch_norm(x, gamma, beta), batch_norm(x, gamma, beta, mean, var)]
        ),
        "max_pool2d": lambda x: max_pool2d(x, 2),
    }[layer]
    on_cpu = call(x)

    class Elsewhere(torch.Tensor):
        device = type("device", (), {"type": "accelerator"})()

    elsewhere = call(x.as_subclass(Elsewhere)).as_subclass(torch.Tensor)
    inputs = {"conv2d": [x, filters], "batch_norm": [x, gamma, beta], "max_pool2d": [x]}[layer]
    assert_same_values_and_gradients(elsewhere, on_cpu, inputs)
