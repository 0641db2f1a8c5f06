"""The pieces that every experiment shares, each pure torch and easy to copy.

    knn_entropy                              how diverse is a batch of samples? (differentiable)
    fix_gauge                                remove the trivial symmetries of a network's weights
    conv2d, linear, batch_norm, max_pool2d   N different networks on N different batches
    majority                                 what their ensemble answers

Letters for shapes: N networks, B images per network, F filters, K fan-in of a filter, C H W.
The weights of one layer, for N networks, are ONE tensor `filters` of shape (N, F, K + 1): fan-in in
torch's order (channel, row, column), the bias in the last column. A target network's weights are a
list of such tensors, first layer first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def knn_entropy(samples: Tensor, dim: int) -> Tensor:
    """Entropy in nats of the distribution behind `samples` (N, D), up to a constant.

        H = psi(N) + dim / N * sum_i log eps_i,     eps_i: distance of sample i to its nearest other

    This is the Kozachenko-Leonenko estimator (paper, appendix "Entropy Estimation") without the
    constants -psi(1) + log(volume of the unit ball). `dim` is the dimension of the manifold that
    the samples lie on: the size of the noise z, not D.
    """
    n = samples.shape[0]
    if samples.ndim != 2 or n < 2:
        raise ValueError(
            f"knn_entropy needs samples of shape (N, D) with N >= 2, got {tuple(samples.shape)}"
        )
    # Which sample is nearest has no gradient, so the N x N distances need none, and only the N
    # smallest are computed again with it. |a - b|^2 = |a|^2 + |b|^2 - 2 ab is the fastest way to
    # find them; in float64, as in float32 it loses samples that are close but far from the origin.
    with torch.no_grad():
        centred = samples.double()
        centred = centred - centred.mean(dim=0)
        squares = torch.einsum("nd,nd->n", centred, centred)
        distances = squares[:, None] + squares - 2 * (centred @ centred.T)  # (N, N)
        nearest = distances.fill_diagonal_(torch.inf).argmin(dim=1)  # (N,)

    # The floor keeps value and gradient finite where two samples coincide.
    offset = samples - samples.index_select(0, nearest)  # (N, D); reproducible on the CPU
    log_eps = 0.5 * torch.log(offset.square().sum(dim=1) + 1e-24)
    psi_n = sum(1 / k for k in range(1, n)) - 0.5772156649015329  # digamma of an integer
    return psi_n + dim * log_eps.mean()


def fix_gauge(layers: list[Tensor], sort_filters: bool = False) -> list[Tensor]:
    """Replace each network's weights by the one representative of all their symmetric copies.

    Paper, section "Taking Symmetries Into Account". Three changes leave the function of a network
    as it is, if its activations are ReLU or leaky ReLU, it has no normalisation layers and no skip
    connections, and a softmax follows (for any other network this function changes what it does):
    - scaling a filter and its bias by a > 0, and its channel in the next layer by 1 / a.
      Here: the squares of each filter with its bias sum to K + 1, in all layers but the last.
    - adding one number to all logits. Here: the biases of the last layer have mean 0.
    - permuting the filters of a layer (the paper leaves this one in). Here, if `sort_filters`: by
      increasing projection on a fixed direction, on which two filters hardly ever agree.

    `layers` are (N, F, K + 1) tensors, first layer first, convolutions or dense layers.
    """
    layers = list(layers)
    for i in range(len(layers) - 1):
        filters, following = layers[i], layers[i + 1]
        mean_square = filters.square().mean(dim=-1)  # (N, F)
        # A dead filter stays dead. Replaced before the root: its slope at 0 is infinite.
        scale = torch.where(mean_square > 1e-30, mean_square, 1.0).sqrt()
        filters = filters / scale[..., None]

        # Channel f of this layer feeds K_next / F inputs of the next one: the k * k taps of a
        # convolution, or all pixels of that channel where a dense layer follows a convolution.
        weight = following[..., :-1]
        bias = following[..., -1:]
        taps = weight.unflatten(-1, (filters.shape[1], -1))  # (N, F_next, F, taps)
        taps = taps * scale[:, None, :, None]
        if sort_filters:
            direction = torch.arange(filters.shape[-1], device=filters.device).cos()
            order = (filters * direction).sum(dim=-1).argsort(dim=1)  # (N, F)
            network = torch.arange(len(order), device=order.device)[:, None]
            filters = filters[network, order]
            taps = taps.transpose(1, 2)[network, order].transpose(1, 2)
        layers[i] = filters
        layers[i + 1] = torch.cat([taps.flatten(2), bias], dim=-1)

    last = layers[-1]
    weight = last[..., :-1]
    bias = last[..., -1:]  # (N, F, 1)
    bias = bias - bias.mean(dim=1, keepdim=True)
    layers[-1] = torch.cat([weight, bias], dim=-1)
    return layers


# The layers of N networks at once: a convolution with N groups, whose memory holds the images as
# (B, N * C, H, W), so that layers chain without copies. On an accelerator that is one launch for
# all networks. On the CPU one network after the other, channels last, is faster, as measured by
# tests/benchmark.py: call your network through `each_network`, and N is 1 in the layers.


def each_network(network, x: Tensor, layers: list[Tensor]) -> Tensor:
    """network(x, layers) for (N, B, ...) images and N networks, in the order that is fastest.

    On the CPU a network runs through all its layers, its activations still in the cache, before the
    next one starts; elsewhere all networks run together. The result is the same.
    """
    if x.device.type != "cpu":
        return network(x, layers)
    split = [filters.split(1) for filters in layers]
    answers = []
    for n, images in enumerate(x.split(1)):
        theta = [filters[n] for filters in split]
        answers.append(network(images, theta))
    return torch.cat(answers)


def conv2d(
    x: Tensor,
    filters: Tensor,
    kernel_size: int,
    stride: int = 1,
    padding: int = 0,
    bias: bool = True,
) -> Tensor:
    """Network n's filters on batch n: (N, B, C, H, W), (N, F, K + 1) -> (N, B, F, H', W').

    Without `bias` the filters have no last column for it: (N, F, K), K = C * kernel_size^2.
    """
    n, channels = len(x), x.shape[2]
    weight = filters[..., :-1] if bias else filters
    weight = weight.unflatten(-1, (channels, kernel_size, kernel_size)).flatten(0, 1)
    shift = filters[..., -1].flatten() if bias else None
    x = side_by_side(x)  # (B, N * C, H, W)
    if x.device.type != "cpu" or x.shape[1] > 1:
        y = F.conv2d(x, weight, shift, stride, padding, groups=n)
        return apart(y, n)

    # One network and one input channel on the CPU: there the library's gradient is slow, patches
    # times filters are three times as fast, and the result is channels last by itself.
    x = F.pad(x, [padding] * 4)[:, 0]  # (B, H, W)
    patches = x.unfold(1, kernel_size, stride).unfold(2, kernel_size, stride)
    y = F.linear(patches.flatten(3), weight.flatten(1), shift)  # (B, H', W', F)
    return apart(y.permute(0, 3, 1, 2), n)


def linear(x: Tensor, filters: Tensor) -> Tensor:
    """Network n's neurons on batch n: (N, B, K), (N, F, K + 1) -> (N, B, F)."""
    weight = filters[..., :-1]
    bias = filters[..., -1].unsqueeze(1)  # (N, 1, F)
    return torch.baddbmm(bias, x, weight.transpose(1, 2))


def batch_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> Tensor:
    """Batch norm of (N, B, C, H, W) with parameters (N, C), each network by itself.

    With `mean` and `var` (N, C) those moments are used, without them the batch's own.
    """
    # Torch's gradient is wrong, without a word, if one of these is a column of a larger tensor.
    gamma, beta = gamma.flatten().contiguous(), beta.flatten().contiguous()
    if mean is not None:
        mean, var = mean.flatten().contiguous(), var.flatten().contiguous()
    y = F.batch_norm(side_by_side(x), mean, var, gamma, beta, training=mean is None)
    return apart(y, len(x))


def max_pool2d(x: Tensor, kernel_size: int) -> Tensor:
    """Max pooling of (N, B, C, H, W) with stride `kernel_size`. Pool first, then ReLU: cheaper."""
    return apart(F.max_pool2d(side_by_side(x), kernel_size), len(x))


def side_by_side(x: Tensor) -> Tensor:
    """(N, B, C, H, W) -> (B, N * C, H, W); on the CPU channels last."""
    x = x.transpose(0, 1).flatten(1, 2)
    return x.contiguous(memory_format=torch.channels_last) if x.device.type == "cpu" else x


def apart(x: Tensor, n: int) -> Tensor:
    return x.unflatten(1, (n, -1)).transpose(0, 1)  # (B, N * C, H, W) -> (N, B, C, H, W)


def majority(votes: Tensor) -> Tensor:
    """The classes (N, B) that N networks chose -> (B,): those with the most votes; ties go to the
    smallest class."""
    classes = range(int(votes.max()) + 1)
    counts = torch.stack([(votes == k).sum(dim=0) for k in classes])  # (classes, B)
    return counts.argmax(dim=0)
