"""How fast are the layers of common.py, and what does a hypernetwork add to a training step?

    python tests/benchmark.py        # a few minutes; nothing else should run beside it

Forward plus backward of N networks on N batches: our layers, a plain Python loop over
torch.nn.functional, and torch.vmap of the same plain network, measured in turn so that a slow
moment of the machine hits all three. Above 1 means that ours are faster.
"""

import dataclasses
import importlib
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import batch_norm, conv2d, each_network  # noqa: E402

mnist = importlib.import_module("02_mnist_hypernet")
lenet = importlib.import_module("03_cifar_lenet")
resnet = importlib.import_module("04_cifar_resnet32")


def resnet_part(x, theta):
    """The stem of a ResNet-32, one block of its first stage, and the step to the second."""
    x = batch_norm(conv2d(x, theta[0], 3, padding=1, bias=False), theta[1], theta[2]).relu()
    y = batch_norm(conv2d(x, theta[3], 3, padding=1, bias=False), theta[1], theta[2]).relu()
    x = (x + batch_norm(conv2d(y, theta[4], 3, padding=1, bias=False), theta[1], theta[2])).relu()
    return conv2d(x, theta[5], 3, stride=2, padding=1, bias=False).mean(dim=(-2, -1))


def plain_conv(x, w, k, stride=1, padding=0, bias=True):
    weight, shift = (w[:, :-1], w[:, -1]) if bias else (w, None)
    return F.conv2d(x, weight.reshape(len(w), x.shape[1], k, k), shift, stride, padding)


def plain_linear(x, w):
    return F.linear(x, w[:, :-1], w[:, -1])


def plain_norm(x, gamma, beta):
    return F.batch_norm(x, None, None, gamma, beta, training=True)


def plain_mnist(x, *theta):
    x = F.max_pool2d(plain_conv(x, theta[0], 5, padding=2), 2).relu()
    x = F.max_pool2d(plain_conv(x, theta[1], 5, padding=2), 2).relu()
    return plain_linear(plain_linear(x.flatten(1), theta[2]).relu(), theta[3])


def plain_lenet(x, *theta):
    x = F.max_pool2d(plain_conv(x, theta[0], 5), 2).relu()
    x = F.max_pool2d(plain_conv(x, theta[1], 5), 2).relu().flatten(1)
    for w in theta[2:4]:
        x = plain_linear(x, w).relu()
    return plain_linear(x, theta[4])


def plain_resnet_part(x, *theta):
    x = plain_norm(plain_conv(x, theta[0], 3, 1, 1, False), theta[1], theta[2]).relu()
    y = plain_norm(plain_conv(x, theta[3], 3, 1, 1, False), theta[1], theta[2]).relu()
    x = (x + plain_norm(plain_conv(y, theta[4], 3, 1, 1, False), theta[1], theta[2])).relu()
    return plain_conv(x, theta[5], 3, 2, 1, False).mean(dim=(-2, -1))


# name: (our network, plain network, N, images (B, C, H, W), weights (F, K + 1))
CASES = {
    "MNIST": (mnist.target_network, plain_mnist, 32, (32, 1, 28, 28), mnist.SHAPES),
    "LeNet": (lenet.target_network, plain_lenet, 10, (128, 3, 32, 32), [*lenet.LAYERS, (10, 85)]),
    "ResNet-32, part": (
        resnet_part,
        plain_resnet_part,
        4,
        (64, 3, 32, 32),
        [(16, 27), (16,), (16,), (16, 144), (16, 144), (32, 144)],
    ),
}


def timed(functions, rounds=12):
    """Least seconds of each, called in turn: what the machine can do when nothing disturbs it."""
    seconds = {name: [] for name in functions}
    for i in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if i > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def networks_row(name):
    ours, plain, n, image, shapes = CASES[name]
    x = torch.randn(n, *image)
    theta = [(torch.randn(n, *s) / s[-1] ** 0.5).requires_grad_() for s in shapes]

    def loop():
        return torch.stack([plain(x[i], *(t[i] for t in theta)) for i in range(n)])

    def backward(out):
        torch.autograd.grad(out.square().mean(), theta)

    result = timed(
        dict(
            ours=lambda: backward(each_network(ours, x, theta)),
            loop=lambda: backward(loop()),
            vmap=lambda: backward(torch.vmap(plain)(x, *theta)),
        )
    )
    ratios = [result[k] / result["ours"] for k in ("loop", "vmap")]
    print(f"{name:18s}{1000 * result['ours']:11.0f}{ratios[0]:13.2f}{ratios[1]:13.2f}")


def step_row(script, title, model, s, padded, rounds):
    """A whole training step, batch and optimizer included, against its bare networks."""
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    y = torch.randint(10, (len(padded),))
    ramp = [] if script is mnist else [1.0]
    images, labels = script.random_crops(padded, y, s, None)
    theta = [layer.detach().requires_grad_() for layer in model(model.draw_z(s.networks, None))]

    def whole():
        z = model.draw_z(s.networks, None)
        batch = script.random_crops(padded, y, s, None)
        result = script.training_step(model, z, *batch, s, *ramp)
        model.zero_grad()
        (result["loss"] / s.lam).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    def bare():
        logits = each_network(script.target_network, images, theta)
        torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), theta)

    result = timed(dict(step=whole, bare=bare), rounds)
    ratio = result["step"] / result["bare"]
    rate = labels.numel() / result["step"]
    print(
        f"{title} training step, {s.networks} networks x {s.images} images: "
        f"{1000 * result['step']:.0f} ms, {ratio:.2f} times its networks, {rate:.0f} images/s"
    )


def mnist_step(rounds=20):
    s = mnist.RUNS["hypernet"]
    size = 28 + 2 * s.shift
    step_row(mnist, "MNIST", mnist.make_model(s), s, torch.rand(2000, 1, size, size), rounds)


def cifar_step(script, title, column, networks, images, rounds):
    s = dataclasses.replace(script.COLUMNS[column], networks=networks, images=images)
    size = 32 + script.MOVES - 1
    padded = torch.randn(2000, 3, size, size)
    step_row(script, f"{title} ({column})", script.make_model(s), s, padded, rounds)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'networks':18s}{'ours (ms)':>11s}{'loop / ours':>13s}{'vmap / ours':>13s}")
    for name in CASES:
        networks_row(name)
    mnist_step()
    cifar_step(lenet, "LeNet", "d", 10, 512, rounds=10)
    cifar_step(lenet, "LeNet", "d", 10, 128, rounds=10)
    cifar_step(lenet, "LeNet", "d+", 4, 64, rounds=20)
    cifar_step(resnet, "ResNet-32", "d", 4, 64, rounds=3)
    cifar_step(resnet, "ResNet-32", "c+", 2, 64, rounds=6)
    cifar_step(resnet, "ResNet-32", "d+", 2, 64, rounds=6)
