import importlib
import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def run(marker: str) -> dict:
    """The names after running the one code block that contains the marker."""
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if marker in c]
    names = {}
    exec(code, names)
    return names


def test_the_code_draws_ten_networks(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = run("hypernet.pt")
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


def test_links_and_pictures_exist():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


COMMANDS = re.findall(r"(0[1-4]_\w+)\.py((?: [^`\n|)]+)?)`", README)


@pytest.mark.parametrize("script, flags", COMMANDS, ids=lambda text: text.strip() or "none")
def test_commands_are_understood(script, flags, tmp_path, monkeypatch):
    """Every command of the README, run as far as reading its flags."""
    monkeypatch.chdir(tmp_path)  # they make folders
    for run in re.findall("runs/[^ ]+", flags):  # made by the commands before
        (tmp_path / run).mkdir(parents=True, exist_ok=True)
        for name in ("metrics.json", "hypernet.pt"):
            (tmp_path / run / name).touch()
    importlib.import_module(script).parse_args(flags.split())


def test_there_are_commands_of_every_script():
    assert {script for script, _ in COMMANDS} == {path.stem for path in ROOT.glob("0*.py")}


def test_lengths_of_scripts():
    for path in ROOT.glob("0*.py"):
        (row,) = [line for line in README.splitlines() if line.startswith(f"| [{path.name}]")]
        assert f"| {len(path.read_text().splitlines())} |" in row


def test_headline_numbers_are_the_documented_runs():
    for name in ("02_mnist_hypernet", "02_mnist_lam1e5"):
        tested = json.loads((ROOT / "results" / name / "metrics.json").read_text())["tested"]
        for key in ("single_mean", "majority_mean", "disagreement"):
            assert f"{100 * tested[key]:.2f} %" in README
    toy = json.loads((ROOT / "results/01_toy_gaussian_mixture/metrics.json").read_text())
    assert toy["claims_hold"] in README


def test_comparison_with_mnfg_is_the_documented_one():
    rows = json.loads((ROOT / "results/02_mnist_compare/compare.json").read_text())
    kinds = dict(single="{:.2f} %", majority="{:.2f} %", disagreement="{:.2f} %")
    kinds |= dict(direct_dip="{:.2f} points", fooled_single="{:.2f} %", fooled_ensemble="{:.2f} %")
    for name, text in kinds.items():
        line = " | ".join(text.format(100 * row[name]) for row in rows)
        assert line in README, name
    for name, text in dict(entropy="{:.0f}", training_seconds="{:.0f}", parameters="{:,}").items():
        assert " | ".join(text.format(row[name]) for row in rows) in README, name


# Heading in README: folder in results, runs in the order of the table.
TABLES = {
    "CIFAR-10, LeNet": (
        "03_cifar_lenet",
        "cifar10_a cifar10_b cifar10_b_5_chains cifar10_c_trained cifar10_d_trained "
        "cifar10_c_chains cifar10_d_chains cifar100_a cifar100_d_trained",
    ),
    "CIFAR-10, ResNet-32": (
        "04_cifar_resnet32",
        "cifar10_a cifar10_b cifar10_c cifar10_d",
    ),
}


@pytest.mark.parametrize("heading", TABLES)
def test_tables_of_cifar_are_the_documented_runs(heading):
    section = README.split(f"### {heading}\n")[1].split("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| (")]
    results, folders = TABLES[heading]
    assert len(rows) == len(folders.split())
    for folder, row in zip(folders.split(), rows):
        run = json.loads((ROOT / "results" / results / folder / "metrics.json").read_text())
        tested = run["tested"]
        keys = ["single", "single_calibration_error"]
        keys += ["ten_majority", "disagreement"] if tested["networks"] > 1 else []
        keys += ["all_majority"] if tested["networks"] > 10 else []
        for key in keys:
            assert f"{100 * tested[key]:.2f} %" in row, (folder, key)
        assert f"| {run['images_seen'] / 1e6:.1f} | {run['training_seconds']:.0f} |" in row
        assert f"`{run['command']}`" in section
        if "distilled" in run:
            assert f"{100 * run['distilled']['accuracy'][-1]:.2f} %" in section, folder


def test_runs_beside_the_table_are_the_documented_ones():
    section = README.split("### CIFAR-10, LeNet\n")[1].split("\n#")[0]
    starts = ["03_start/cifar10_d", "03_start/cifar10_d_random"]
    for folder in [*starts, "03_seed1/cifar10_c_chains", "03_seed1/cifar10_d_chains"]:
        run = json.loads((ROOT / f"results/{folder}/metrics.json").read_text())
        for key in ("single", "ten_majority", "all_majority"):
            assert f"{100 * run['tested'][key]:.2f} %" in section, (folder, key)
        assert f"`{run['command']}`" in section


def test_measures_of_diversity_are_the_documented_runs():
    section = README.split("### CIFAR-10, LeNet\n")[1].split("\n#")[0]
    for name in ("none", "outputs", "ensemble", "weights", "variance"):
        column = dict(none="c", outputs="d").get(name, f"d_{name}")
        file = ROOT / f"results/03_diversity/cifar10_{column}_trained/metrics.json"
        run = json.loads(file.read_text())
        (row,) = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
        keys = ("single", "ten_majority", "all_majority", "disagreement")
        cells = [run["tested"][key] for key in keys] + [run["distilled"]["accuracy"][-1]]
        assert all(f"{100 * cell:.2f} %" in row for cell in cells), name
        assert f"{run['tested']['single_nll']:.3f} / {run['tested']['ten_nll']:.3f}" in row
