"""README.md and results/README.md say what the repository does."""

import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "results/README.md"]


def run(marker: str) -> dict:
    """The names after running the one code block that contains the marker."""
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if marker in c]
    names = {}
    exec(code, names)
    return names


def test_the_code_draws_ten_networks(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = run("checkpoint.pt")
    shapes = [(10, 32, 26), (10, 16, 801), (10, 8, 785), (10, 10, 9)]
    assert [tuple(t.shape) for t in names["theta"]] == shapes
    probabilities = names["mnist"].predict(names["theta"], torch.rand(5, 1, 28, 28))
    torch.testing.assert_close(probabilities.sum(dim=-1), torch.ones(10, 5))


def test_pieces_to_copy():
    names = run("from common import")
    grad = names["samples"].grad
    assert grad.isfinite().all() and grad.abs().sum() > 0
    torch.testing.assert_close(names["gauged"][0].square().mean(dim=-1), torch.ones(1, 8))
    assert names["y"].shape == (5, 16, 10)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_links_and_pictures_exist(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    links = [link for link in links if not link.startswith("https://")]
    assert links
    assert not [link for link in links if not (page.parent / link).exists()]


# Commands in fenced blocks; those under "Runs of commit c30cc19" are that commit's.
CURRENT = README + PAGES[1].read_text().split("## Runs of commit")[0]
BLOCKS = "".join(re.findall(r"```bash\n(.*?)```", CURRENT, re.DOTALL))
COMMANDS = re.findall(r"(0[1-4]_\w+)\.py([^#&\n]*)", BLOCKS)


@pytest.mark.parametrize("script, flags", COMMANDS, ids=lambda text: text.strip() or "none")
def test_commands_are_understood(script, flags):
    """Every command, run as far as reading its flags."""
    importlib.import_module(script).parse_args(flags.split())


def test_there_are_commands_of_every_script():
    assert {script for script, _ in COMMANDS} == {path.stem for path in ROOT.glob("0*.py")}


def test_lengths_of_scripts():
    for path in ROOT.glob("0*.py"):
        (row,) = [line for line in README.splitlines() if line.startswith(f"| [{path.name}]")]
        assert f"| {len(path.read_text().splitlines())} |" in row
