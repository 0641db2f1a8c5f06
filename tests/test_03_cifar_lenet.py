import contextlib
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

TINY = ["--fake-data", "--device", "cpu", "--steps", "6", "--networks", "3", "--images", "8"]
TINY += ["--tested", "10", "--averaged", "30", "--validate-every", "3"]
ONE = [*TINY, "--networks", "1"]  # columns (a) and (b)


def arguments(lenet, tmp_path, *more: str):
    return lenet.parse_args([*TINY, "--out", str(tmp_path), *more])


def draw(hypernet, n: int):
    return hypernet(hypernet.noise(n))


# ---- counts and architecture ---------------------------------------------------------------------


def test_counts_of_the_paper(lenet):
    def parameters(module):
        return sum(p.numel() for p in module.parameters())

    assert sum(f * k for f, k in lenet.shapes(10)) == 62006
    assert sum(f * k for f, k in lenet.shapes(100)) == 69656
    hypernet = lenet.Hypernetwork(10, "random")
    parts = [parameters(part) for part in (hypernet.extractor, *hypernet.generators)]
    assert parts == [290400, 193600, 223600, 323600, 4228800, 503200]
    assert parameters(hypernet) == 5763200
    assert parameters(lenet.Hypernetwork(10)) == 5763200 + 1152
    assert parameters(lenet.Hypernetwork(100, "random").generators[-1]) == 3563200
    assert parameters(lenet.FreeNetworks(10)) == 62006


@pytest.mark.parametrize("classes", [10, 100])
def test_target_network_is_lenet(lenet, classes):
    """Values and gradients of two networks against torch.nn modules, ReLU before pooling."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 32, 32)
    theta = [torch.randn(2, f, k, requires_grad=True) for f, k in lenet.shapes(classes)]
    theta = [(t.detach() / t.shape[-1] ** 0.5).requires_grad_() for t in theta]
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
        with torch.no_grad():
            theta = draw(lenet.Hypernetwork(10, start), 20)
        size = theta[2].square().mean() * 400 / 2  # 120 filters, 400 inputs
        assert 0.7 < size < 1.4  # 120 codes of eight numbers: 5 % of scatter, and a little slope
        vectors = F.normalize(theta[2].flatten(1), dim=1)
        likeness = (vectors @ vectors.T)[~torch.eye(20, dtype=torch.bool)].mean()
        assert low < likeness < high


@pytest.mark.parametrize("classes", [10, 100])
def test_starts_at_a_given_network(lenet, classes):
    """z = 0 gives its weights, to float32's rounding of sums of 400 terms; other z give others."""
    torch.manual_seed(0)
    network = lenet.FreeNetworks(classes)
    hypernet = lenet.Hypernetwork(classes, "trained")
    hypernet.start_at(network(None))
    with torch.no_grad():
        for made, given in zip(hypernet(torch.zeros(1, 100)), network(None)):
            torch.testing.assert_close(made, given, rtol=0, atol=1e-4)
        others = lenet.flat(draw(hypernet, 20)) - lenet.flat(network(None))
    share = others.square().sum(dim=1) / lenet.flat(network(None)).square().sum()
    assert ((share > 1e-3) & (share < 0.1)).all()


def test_starts_among_given_networks(lenet):
    """Where z[0] is clearly in the k-th third of all z, networks are near the k-th given one.
    Unrelated ones are at a relative squared distance of 2; the third layer, with the most filters,
    learns last."""
    torch.manual_seed(0)
    networks = [filters.detach() for filters in lenet.FreeNetworks(10, 3)(None)]
    hypernet = lenet.Hypernetwork(10, "chains")
    hypernet.start_among(networks, steps=100)
    z = hypernet.noise(30)
    z[:, 0] = torch.tensor([-1.0, 0.0, 1.0]).repeat_interleave(10)
    with torch.no_grad():
        made = hypernet(z)
    for layer in (0, 1, 3, 4):
        given = networks[layer].repeat_interleave(10, dim=0)
        for wanted, low, high in (given, 0.0, 0.3), (given.roll(10, dims=0), 1.0, 3.0):
            distance = (made[layer] - wanted).square().mean() / wanted.square().mean()
            assert low < distance < high, layer


def test_z_chooses_among_codes(lenet):
    """Code k, but for rounding, where the mean of |z| is as expected and z[0] not on a step."""
    torch.manual_seed(0)
    hypernet, codes = lenet.Hypernetwork(10, "chains"), torch.randn(5, 1152)
    z = hypernet.noise(1000)
    with torch.no_grad():
        hypernet.extractor[-1].weight.zero_()  # what else depends on z
        hypernet.choose_among(codes)
        z[:, 1:] *= (100 * (2 / math.pi) ** 0.5 - z[:, :1].abs()) / z[:, 1:].abs().sum(1, True)
        made = hypernet.extractor(z)
    past = z[:, :1] - torch.distributions.Normal(0, 1).icdf(torch.arange(1, 5) / 5)
    clear = ((past < 0) | (past > 0.04)).all(dim=1)  # a step is 1 / 30 wide
    assert clear.float().mean() > 0.9
    expected = codes[(past > 0).sum(dim=1)]
    torch.testing.assert_close(made[clear], expected[clear], rtol=0, atol=5e-3)


def test_chains_start_needs_column_b(lenet, tmp_path, monkeypatch):
    start_among = lenet.Hypernetwork.start_among
    monkeypatch.setattr(lenet.Hypernetwork, "start_among", lambda *most: start_among(*most, 2))
    begun = arguments(lenet, tmp_path, "--start", "chains", "--column", "c")
    data = lenet.load_data(begun)
    with pytest.raises(SystemExit, match="first train --column b --networks 5"):
        lenet.train(begun, data)
    chains = ["--column", "b", "--networks", "5", "--out", str(tmp_path)]
    lenet.train(lenet.parse_args([*TINY, *chains]), data)
    spent = lenet.train(begun, data)[-1]
    assert spent["images_seen"] == 6 * 3 * 8 + 5 * 6 * 8  # its own, and those of five chains
    (tmp_path / "cifar10_b_5_chains" / "model.pt").unlink()  # --resume does not need it
    begun.resume = True
    assert lenet.train(begun, data)[-1]["images_seen"] == spent["images_seen"]


def test_trained_start_needs_column_a(lenet, tmp_path):
    begun = arguments(lenet, tmp_path, "--start", "trained")
    data = lenet.load_data(begun)
    with pytest.raises(SystemExit, match="first train --column a"):
        lenet.train(begun, data)
    lenet.train(lenet.parse_args([*ONE, "--column", "a", "--out", str(tmp_path)]), data)
    spent = lenet.train(begun, data)[-1]
    assert spent["images_seen"] == 6 * 3 * 8 + 6 * 8  # its own, and those of column (a)
    begun.fake_data, begun.folder = False, tmp_path / "other"
    with pytest.raises(SystemExit, match="do not share their images"):
        lenet.train(begun, data)


def test_a_filter_comes_from_its_own_code(lenet):
    torch.manual_seed(0)
    hypernet = lenet.Hypernetwork()
    with torch.no_grad():
        hypernet.extractor[-1].weight.zero_()  # the codes are the bias alone
        bias = hypernet.extractor[-1].bias.view(144, 8)
        bias[1] = bias[0]  # the first two filters of the first layer
        before = draw(hypernet, 1)
        bias[6 + 16 + 3] += 1  # the fourth of the third layer
        after = draw(hypernet, 1)
    torch.testing.assert_close(before[0][:, 0], before[0][:, 1])
    changed = [(a != b).any(dim=-1).nonzero()[:, 1].tolist() for a, b in zip(before, after)]
    assert changed == [[], [], [3], [], []]


# ---- data ----------------------------------------------------------------------------------------


def test_all_crops(lenet):
    """Against slices of each padded image, and without a copy per crop."""
    x = torch.rand(2, 3, 32, 32)
    crops = lenet.all_crops(x, 3)
    assert crops.shape == (2, 7, 7, 3, 32, 32)
    padded = F.pad(x, [3] * 4)
    for row in range(7):
        for column in range(7):
            window = padded[:, :, row : row + 32, column : column + 32]
            assert torch.equal(crops[:, row, column], window)
    assert crops.untyped_storage().nbytes() == padded.untyped_storage().nbytes()


def test_batches_keep_labels_share_images_and_are_seeded(lenet, tmp_path):
    args = arguments(lenet, tmp_path, "--shared", "3")
    y = torch.arange(10) % 4
    x = torch.rand(10, 3, 32, 32) * 0.1 + 10 * y.view(-1, 1, 1, 1)  # the label shows in the image
    crops = lenet.all_crops(x, 2)
    x, labels = lenet.draw_batch(crops, y, args, lenet.seeded(args, step=7))
    assert x.shape == (3, 8, 3, 32, 32) and labels.shape == (3, 8)
    assert torch.equal(x.amax(dim=(2, 3, 4)).div(10).floor().long(), labels)
    for n in (1, 2):
        assert torch.equal(x[n, :3], x[0, :3]) and torch.equal(labels[n, :3], labels[0, :3])
        assert not torch.equal(x[n, 3:], x[0, 3:])
    again, other = (lenet.draw_batch(crops, y, args, lenet.seeded(args, k))[0] for k in (7, 8))
    assert torch.equal(again, x) and not torch.equal(other, x)
    args.seed = 1
    assert not torch.equal(lenet.draw_batch(crops, y, args, lenet.seeded(args, 7))[0], x)


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


@pytest.mark.parametrize("kind", ["outputs", "weights", "variance", "ensemble", "none"])
def test_objective(lenet, tmp_path, kind):
    """loss = lam * cross-entropy - diversity, each from plain loops; images 0 and 1 are shared."""
    column = ["--column", "c"] if kind == "none" else ["--column", "d", "--diversity", kind]
    args = arguments(lenet, tmp_path, *column, "--shared", "2", "--lam", "70")
    args.shared = 2
    torch.manual_seed(0)
    model = lenet.Hypernetwork(10, "random")
    x, y = torch.randn(3, 4, 3, 32, 32), torch.randint(10, (3, 4))
    x[:, :2], y[:, :2] = x[0, :2].clone(), y[0, :2].clone()
    z = model.noise(3)
    loss, loss_acc, diversity, acc = lenet.training_step(model, z, x, y, args, ramp=0.3)
    theta = model(z)
    logits = [
        lenet.target_network(x[n : n + 1], [t[n : n + 1] for t in theta])[0] for n in range(3)
    ]
    cross_entropy = sum(F.cross_entropy(logits[n], y[n]) for n in range(3)) / 3
    torch.testing.assert_close(loss_acc, cross_entropy)
    expected = torch.tensor(0.0)
    if kind != "none":
        shared = [logit[:2].softmax(dim=1) for logit in logits]
        expected = plain_diversity(kind, lenet.fix_gauge(theta), shared, y[0, :2])
    torch.testing.assert_close(diversity, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, 70 * cross_entropy - 0.3 * expected, rtol=1e-4, atol=1e-3)
    hits = sum((logits[n].argmax(dim=1) == y[n]).sum().item() for n in range(3))
    assert acc.item() == pytest.approx(hits / 12)


def test_learning_rates(lenet, tmp_path):
    decaying = arguments(lenet, tmp_path, "--steps", "1000", "--lr", "1")
    rates = [lenet.learning_rate(decaying, step) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 200) and max(rates) <= 1
    assert rates[-1] == pytest.approx(1 / 800)
    chain = lenet.parse_args(
        [*ONE, "--column", "b", "--steps", "1000", "--lr", "1", "--out", str(tmp_path)]
    )
    rates = [lenet.learning_rate(chain, step) for step in range(1000)]
    assert rates[0] == pytest.approx(10 / 200) and max(rates) < 10
    assert rates[250] == pytest.approx(5.5) and rates[400] == pytest.approx(2.8)
    assert set(rates[500:]) == {1}


@pytest.mark.parametrize("steps", [6, 40, 1000, 12345])
def test_ten_networks_of_the_chain(lenet, steps):
    """From the second half, equally far apart, the last included; fewer if there are not ten."""
    taken = [done for done in range(1, steps + 1) if lenet.in_chain(steps, done)]
    assert len(taken) == min(10, steps) and taken[-1] == steps
    assert len({b - a for a, b in zip(taken, taken[1:])}) == 1
    assert steps < 20 or taken[0] > steps / 2


def test_the_chain_holds_the_networks_of_its_steps(lenet, tmp_path):
    """Ten different networks, copies and not the live weights; the last is that of the end."""
    more = ["--column", "b", "--steps", "40", "--out", str(tmp_path)]
    args = lenet.parse_args([*ONE, *more])
    model, chain, *_ = lenet.train(args, lenet.load_data(args))
    assert [tuple(t.shape) for t in chain] == [(10, *shape) for shape in lenet.shapes(10)]
    for last, now in zip(chain, model(None)):
        torch.testing.assert_close(last[9:], now, rtol=1e-3, atol=1e-4)  # kept in half precision
        assert len({tuple(network.flatten().tolist()) for network in last}) == 10


def test_chains_are_independent(lenet, tmp_path, monkeypatch):
    """Two chains at once: ten networks, and each chain moves as it would alone on its images, but
    for spikes of the gradient, which are cut for both together."""
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda parameters, norm: torch.zeros(()))
    more = ["--column", "b", "--steps", "5", "--networks", "2", "--images", "64"]
    args = lenet.parse_args([*ONE, *more, "--out", str(tmp_path)])
    data = lenet.load_data(args)
    model, chain, *_ = lenet.train(args, data)
    assert all(len(layer) == 10 for layer in chain)

    torch.manual_seed(args.seed)
    start = [layer.detach() for layer in lenet.FreeNetworks(10, 2)(None)]
    x, y = data["train"]
    crops, y = lenet.all_crops(torch.cat([x, x.flip(-1)]), args.crop), y.repeat(2)
    for n in range(2):
        theta = [layer[n : n + 1].clone().requires_grad_() for layer in start]
        sgd = torch.optim.SGD(theta, 1.0, 0.9, weight_decay=args.weight_decay, nesterov=True)
        for step in range(5):
            images, labels = lenet.draw_batch(crops, y, args, lenet.seeded(args, step))
            loss = F.cross_entropy(lenet.target_network(images[n : n + 1], theta)[0], labels[n])
            sgd.param_groups[0]["lr"] = lenet.learning_rate(args, step)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        for layer, alone in zip(chain, theta):  # the last two networks are those of the end
            torch.testing.assert_close(layer[8 + n], alone[0], rtol=1e-3, atol=1e-4)


# ---- evaluation ----------------------------------------------------------------------------------


def test_votes_by_hand(lenet):
    #                       image: 0  1  2  3
    votes = torch.tensor([[7, 2, 9, 4], [7, 2, 3, 5], [1, 8, 3, 6]])
    assert lenet.majority(votes, 10).tolist() == [7, 2, 3, 4]  # the last is a tie: smallest class
    # Pairs that differ, of three: 2, 2, 2, 3
    assert lenet.disagreement(votes) == pytest.approx((2 + 2 + 2 + 3) / 12)
    assert lenet.disagreement(votes[:1]) == 0


def test_ensemble_by_hand(lenet):
    """Three networks, two images, three classes: the vote and the mean disagree on image 0."""
    probabilities = torch.tensor(
        [
            [[0.50, 0.45, 0.05], [0.1, 0.8, 0.1]],
            [[0.50, 0.45, 0.05], [0.2, 0.7, 0.1]],
            [[0.05, 0.90, 0.05], [0.3, 0.6, 0.1]],
        ]
    )
    y = torch.tensor([0, 1])
    vote, mean, nll, error = lenet.ensemble(probabilities, y).tolist()
    assert (vote, mean) == (1.0, 0.5)
    assert nll == pytest.approx(-(math.log(0.35) + math.log(0.7)) / 2, rel=1e-5)
    assert error == pytest.approx((0.6 + 0.3) / 2, rel=1e-5)  # alone in their bins: 0.6-0, 0.7-1


def test_evaluation(lenet):
    """Single networks, tens and all, against one network at a time."""
    torch.manual_seed(0)
    theta = draw(lenet.Hypernetwork(10, "random"), 21)
    x, y = torch.randn(300, 3, 32, 32), torch.randint(10, (300,))  # two portions
    result = lenet.evaluate(theta, x, y)
    votes = torch.stack(
        [
            lenet.target_network(x[None], [t[n : n + 1] for t in theta])[0].argmax(dim=1)
            for n in range(21)
        ]
    )
    single = (votes == y).float().mean(dim=1)
    assert result["single"] == pytest.approx(single.mean().item())
    assert result["networks"] == 21
    tens = [(votes[i : i + 10].mode(dim=0).values == y).float().mean() for i in (0, 10)]
    assert result["ten_majority"] == pytest.approx(sum(tens).item() / 2)  # mode: ties to smallest
    assert result["all_majority"] == pytest.approx((votes.mode(dim=0).values == y).float().mean())
    assert result["majority_by_size"][0] == pytest.approx(single[0].item())
    assert result["sizes"] == [1, 2, 5, 10, 20]


def test_running_mean_of_weights(lenet):
    """Against torch.mean of all networks at once, across a portion of 100 networks."""
    torch.manual_seed(0)
    model = lenet.Hypernetwork()
    z = model.noise(230)
    with torch.no_grad():
        theta = model(z)
    for n, mean in lenet.averages(model, z, [1, 7, 230]):
        for a, b in zip(mean, theta):
            torch.testing.assert_close(a, b[:n].mean(dim=0, keepdim=True), rtol=1e-4, atol=1e-5)


def test_averaging_copies_changes_nothing(lenet):
    torch.manual_seed(0)
    model = lenet.Hypernetwork()
    x, y = lenet.fake_data(50, 10)
    z = model.noise(1).expand(20, -1)
    result = lenet.distil(model, z, x, y)
    assert result["numbers"] == [1, 2, 5, 10, 20] and len(set(result["accuracy"])) == 1
    assert result["nll"] == pytest.approx([result["nll"][0]] * 5, rel=1e-5)


# ---- the script ----------------------------------------------------------------------------------


def test_hundred_classes(lenet, tmp_path):
    metrics = lenet.main([*TINY, "--dataset", "cifar100", "--out", str(tmp_path)])
    assert "CIFAR-100" in metrics["title"] and metrics["settings"]["dataset"] == "cifar100"
    assert (tmp_path / "cifar100_d" / "distillation.png").exists()


def test_all_columns(lenet, tmp_path):
    small = ["--fake-data", "--device", "cpu", "--steps", "6", "--images", "8", "--tested", "10"]
    small += ["--averaged", "30", "--validate-every", "3"]
    lenet.main([*small, "--column", "all", "--out", str(tmp_path)])
    for column in "abcd":
        folder = tmp_path / f"cifar10_{column}"
        metrics = json.loads((folder / "metrics.json").read_text())
        for name in ("command", "seed", "commit", "hardware", "torch", "seconds", "images_seen"):
            assert name in metrics
        assert metrics["data"] == "made up" and "MADE-UP" in metrics["title"]
        assert (folder / "training.png").stat().st_size > 1000
        assert (folder / "distillation.png").exists() == (column in "cd")
        assert metrics["tested"]["networks"] == dict(a=1, b=6, c=10, d=10)[column]
    rows = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert [row["single"] for row in rows][3] == metrics["tested"]["single"]
    assert (tmp_path / "compare" / "compare.png").stat().st_size > 1000

    again = lenet.main(
        [*small, "--checkpoint", str(folder / "model.pt"), "--out", str(tmp_path / "again")]
    )
    assert again["tested"] == metrics["tested"] and again["distilled"] == metrics["distilled"]
    alone = lenet.main(["--compare", str(tmp_path / "cifar10_a"), "--out", str(tmp_path)])["rows"]
    assert alone == rows[:1]


def test_it_learns(lenet, tmp_path):
    """Made-up patterns, a short life: far above the 10 % of chance. A smaller sigma gives networks
    that agree more."""
    more = ["--steps", "60", "--images", "32", "--lr", "1e-3", "--validate-every", "60"]
    near, far = (
        lenet.main([*TINY, *more, "--out", str(tmp_path), "--resume", "--sigma", sigma])["tested"]
        for sigma in ("0.1", "1")
    )
    assert near["single"] > 0.5
    assert near["disagreement"] < far["disagreement"]


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("kind", ["outputs", "weights", "variance", "ensemble", "none"])
def test_training_step_without_the_device(lenet, tmp_path, kind, device):
    """A tensor made on the wrong device raises here, and so does reading a value back. Autograd
    cannot run backward on fake CUDA tensors where there is no GPU; on meta tensors it can."""
    args = arguments(lenet, tmp_path)
    args.diversity = kind
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        with torch.device(device):  # for the parameters; the step must find its device by itself
            model = lenet.Hypernetwork()
        crops = lenet.all_crops(torch.rand(20, 3, 32, 32, device=device), 4)
        y = torch.zeros(20, dtype=torch.long, device=device)
        batch = lenet.draw_batch(crops, y, args, generator=None)  # no device, no generator
        loss, *_ = lenet.training_step(model, model.noise(3), *batch, args)
        assert loss.device.type == device
        if device == "meta":
            loss.backward()
            assert all(p.grad.device.type == device for p in model.parameters())


@pytest.mark.parametrize("column", ["b", "d"])
def test_resume_is_bit_identical(lenet, tmp_path, monkeypatch, column):
    """Stopped in the middle of step 8, two steps after a checkpoint."""

    def args(name: str, *more: str):
        tiny = [*(ONE if column == "b" else TINY), "--column", column, "--steps", "12", *more]
        return lenet.parse_args([*tiny, "--out", str(tmp_path / name)])

    data = lenet.load_data(args("whole"))
    lenet.train(args("whole"), data)
    whole_step, calls = lenet.training_step, []

    def dying(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return whole_step(*arguments)

    monkeypatch.setattr(lenet, "training_step", dying)
    with pytest.raises(KeyboardInterrupt):
        lenet.train(args("stopped"), data)
    monkeypatch.setattr(lenet, "training_step", whole_step)
    lenet.train(args("stopped", "--resume"), data)
    whole, resumed = (
        torch.load(tmp_path / name / f"cifar10_{column}/checkpoint.pt", weights_only=True)
        for name in ("whole", "stopped")
    )
    assert whole["log"] == resumed["log"] and whole["step"] == resumed["step"] == 12
    assert len(whole["chain"]) == (10 if column == "b" else 0)
    tensors = [
        [*state["model"].values(), *(t for theta in state["chain"] for t in theta)]
        + [t for slot in state["optimizer"]["state"].values() for t in slot.values()]
        for state in (whole, resumed)
    ]
    assert len(tensors[0]) == len(tensors[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*tensors))


def test_a_checkpoint_is_never_started_over(lenet, tmp_path):
    args = arguments(lenet, tmp_path)
    data = lenet.load_data(args)
    lenet.train(args, data)
    with pytest.raises(SystemExit, match="is at step 6: --resume goes on"):
        lenet.train(args, data)


def test_one_network_is_not_sampled(lenet, tmp_path):
    args = lenet.parse_args([*ONE, "--column", "a", "--out", str(tmp_path)])
    lenet.train(args, lenet.load_data(args))
    with pytest.raises(SystemExit, match="no hypernetwork to sample"):
        checkpoint = ["--checkpoint", str(args.folder / "model.pt"), "--out", str(tmp_path)]
        lenet.main(["--device", "cpu", *checkpoint])


def test_foreign_and_damaged_checkpoints_are_refused(lenet, tmp_path):
    args = arguments(lenet, tmp_path)
    data = lenet.load_data(args)
    lenet.train(args, data)
    file = args.folder / "checkpoint.pt"
    before = file.read_bytes()
    for more in (["--resume"], []):
        with pytest.raises(SystemExit, match="has --lam 1000.0, not 7.0"):
            lenet.train(arguments(lenet, tmp_path, "--lam", "7", *more), data)
    assert file.read_bytes() == before
    damaged = before[: len(before) // 2]
    file.write_bytes(damaged)
    with pytest.raises(SystemExit, match="damaged"):
        lenet.train(arguments(lenet, tmp_path, "--resume"), data)
    assert file.read_bytes() == damaged


def test_a_loss_that_is_not_finite_stops_the_run(lenet, tmp_path, monkeypatch):
    args = arguments(lenet, tmp_path)
    whole_step = lenet.training_step

    def broken(*arguments):
        loss, *rest = whole_step(*arguments)
        broken.calls += 1
        return loss * (math.nan if broken.calls > 4 else 1), *rest

    broken.calls = 0
    monkeypatch.setattr(lenet, "training_step", broken)
    with pytest.raises(SystemExit, match="step 6: the loss is not finite.*last good checkpoint"):
        lenet.train(args, lenet.load_data(args))
    saved = torch.load(args.folder / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 3
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())


def test_no_data_is_one_clear_message(lenet, tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise RuntimeError("Error downloading")

    no_network.filename = "cifar-10-python.tar.gz"
    monkeypatch.setattr(lenet.datasets, "CIFAR10", no_network)
    with pytest.raises(SystemExit, match="cifar-10-python.tar.gz.*--fake-data"):
        lenet.main(["--device", "cpu", "--data", str(tmp_path), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "0 is not a positive whole number"),
        (["--column", "e"], "invalid choice"),
        (["--diversity", "none"], "is --column c"),
        (["--networks", "1"], "at least 2"),
        (["--column", "a", "--networks", "2"], "trains one network"),
        (["--column", "b", "--networks", "3"], "divisor of ten"),
        (["--images", "4", "--shared", "5"], "cannot exceed --images"),
        (["--tested", "9"], "at least 10"),
        (["--crop", "-1"], "cannot be negative"),
        (["--column", "all", "--networks", "1"], "at least 2"),
        (["--column", "all", "--start", "chains"], "after --column b"),
        (["--out", "README.md/folder"], "cannot write there"),
        (["--checkpoint", "nowhere.pt"], "no such file"),
        (["--compare", "nowhere"], "no metrics.json"),
    ],
)
def test_bad_flags_are_one_line(lenet, tmp_path, capsys, arguments, message):
    """And no folder of a run is made."""
    with pytest.raises(SystemExit) as stop:
        lenet.main(["--device", "cpu", "--out", str(tmp_path / "runs"), *arguments])
    assert not list(tmp_path.glob("runs/*"))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1
