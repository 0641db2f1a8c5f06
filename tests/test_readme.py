import json
import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_code_draws_ten_networks(monkeypatch):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {}
    exec(code, names)
    assert [tuple(t.shape) for t in names["theta"]] == [
        (10, 32, 26),
        (10, 16, 801),
        (10, 8, 785),
        (10, 10, 9),
    ]
    probabilities = names["mnist"].predict(names["theta"], torch.rand(5, 1, 28, 28))
    torch.testing.assert_close(probabilities.sum(dim=-1), torch.ones(10, 5))


def test_links_and_pictures_exist():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_headline_numbers_are_the_documented_runs():
    for name in ("02_mnist_hypernet", "02_mnist_lam1e5"):
        tested = json.loads((ROOT / "results" / name / "metrics.json").read_text())["tested"]
        for key in ("single_mean", "majority_mean", "disagreement"):
            assert f"{100 * tested[key]:.2f} %" in README
    toy = json.loads((ROOT / "results/01_toy_gaussian_mixture/metrics.json").read_text())
    assert toy["claims_hold"] in README
