"""README.md and results/README.md say what the repository does."""

import dis
import importlib
import inspect
import json
import re
import statistics
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "results/README.md").read_text(encoding="utf-8")


def run(marker: str) -> dict:
    """The names after running the one code block that contains the marker."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [block for block in blocks if marker in block]
    names = {}
    exec(code, names)
    return names


def test_the_code_draws_ten_networks(data, mnist, monkeypatch, capsys):
    """On made-up images, which it has not learned."""
    images = mnist.load_data(mnist.RUNS["hypernet"], data, "cpu")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(mnist, "load_data", lambda *_: images)
    names = run("checkpoint.pt")
    vote = names["mnist"].majority(names["votes"]) == images["test"][1]
    assert f"{100 * vote.float().mean():.2f} %" in capsys.readouterr().out
    shapes = [(10, 32, 26), (10, 16, 801), (10, 8, 785), (10, 10, 9)]
    assert [tuple(layer.shape) for layer in names["theta"]] == shapes


def test_your_own_network(capsys):
    """The networks must differ in the gap and agree at the data. Of five seeds, the worst had 0.88
    in the gap and 0.05 at the data; where the gap stays closed they are equal."""
    torch.set_num_threads(1)
    names = run("def generate")
    assert names["gap"] > 5 * names["data"]
    assert names["loss_acc"] < 0.03  # the noise in y has variance 0.01, y itself 0.15
    assert f"differ by {names['gap']:.2f} in the gap" in capsys.readouterr().out


def own_functions(piece) -> set:
    """The global names that a function, or the methods of a class, use."""
    functions = [piece]
    if inspect.isclass(piece):
        functions = [value for value in vars(piece).values() if inspect.isfunction(value)]
    used = set()
    for function in functions:
        for instruction in dis.get_instructions(function):
            if instruction.opname == "LOAD_GLOBAL":
                used.add(instruction.argval)
    return used


def test_what_a_piece_needs(mnist):
    """The map: a piece uses no function of common.py or 02 but those that its row names."""
    names = dict(vars(importlib.import_module("common")))
    names.update(vars(mnist))
    functions = {name for name, value in names.items() if inspect.isfunction(value)}
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", README.split("| to copy |")[1], re.MULTILINE)
    assert len(rows) == 3
    for pieces, needs in rows:
        needs = set(re.findall(r"`(\w+)`", needs))
        for piece in re.findall(r"`(\w+)`", pieces):
            assert own_functions(names[piece]) & functions - {piece} <= needs, piece


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_links_and_pictures_exist(page):
    page = ROOT / page
    links = re.findall(r"(?:\]\(|src=\")([^)\"]+)", page.read_text(encoding="utf-8"))
    links = [link for link in links if not link.startswith(("https://", "#"))]
    assert links
    assert not [link for link in links if not (page.parent / link.split("#")[0]).exists()]


@pytest.mark.parametrize("name", ["02_mnist_hypernet", "03_cifar_lenet", "04_cifar_resnet32"])
def test_tables_are_what_the_scripts_print(name):
    """So that nobody retypes a number."""
    script = importlib.import_module(name)
    table = script.table(script.read_runs(ROOT / "results" / name))
    assert table.strip() in RESULTS


BLOCKS = "".join(re.findall(r"```bash\n(.*?)```", README + RESULTS, re.DOTALL))
COMMANDS = re.findall(r"(0[1-4]_\w+)\.py([^#&\n]*)", BLOCKS)


@pytest.mark.parametrize("script, flags", COMMANDS, ids=lambda text: text.strip() or "none")
def test_commands_are_understood(script, flags):
    """Every command, run as far as reading its flags."""
    importlib.import_module(script).parse_args(flags.split())


def test_there_are_commands_of_every_script():
    assert {script for script, _ in COMMANDS} == {path.stem for path in ROOT.glob("0*.py")}


# The row of README's table: its runs, below results. Of several seeds the mean and deviation.
ROWS = {
    "the paper's recipe": ["02_mnist_hypernet/paper"],
    "our recipe, images moved": [
        "02_mnist_hypernet/hypernet",
        "02_mnist_hypernet/seed1/hypernet",
        "02_mnist_hypernet/seed2/hypernet",
    ],
    "MNFG, images not moved": ["02_mnist_hypernet/unmoved/mnfg"],
    "MNFG, images moved": ["02_mnist_hypernet/mnfg"],
    "LeNet: (a)": ["03_cifar_lenet/a"],
    "(b) five chains": ["03_cifar_lenet/b"],
    "| (c) |": ["03_cifar_lenet/c"],
    "| (d) |": ["03_cifar_lenet/d"],
    "(c+) three": ["03_cifar_lenet/c+", "03_cifar_lenet/seed1/c+", "03_cifar_lenet/seed2/c+"],
    "(d+) three": ["03_cifar_lenet/d+", "03_cifar_lenet/seed1/d+", "03_cifar_lenet/seed2/d+"],
    "ResNet-32: (a)": ["04_cifar_resnet32/a"],
    "(b) one chain": ["04_cifar_resnet32/b"],
    "| (c+) |": ["04_cifar_resnet32/c+"],
    "| (d+) |": ["04_cifar_resnet32/d+"],
}


@pytest.mark.parametrize("row", ROWS)
def test_accuracies_are_those_of_the_runs(row):
    (line,) = [line for line in README.splitlines() if line.startswith("| ") and row in line]
    cells = [cell.strip() for cell in line.split("|")]
    runs = []
    for folder in ROWS[row]:
        file = ROOT / "results" / folder / "metrics.json"
        runs.append(json.loads(file.read_text(encoding="utf-8")))
    shown = 0
    for cell, kind, key in zip(
        cells[2:5], ["networks", "networks", "average"], [("one",), ("ten", "vote"), ("one",)]
    ):
        if cell:
            values = [result(run, kind, key) for run in runs]
            text = f"{statistics.mean(values):.2f}"
            if len(values) > 1:
                text += f" ± {statistics.stdev(values):.2f}"
            assert cell == text
            shown += 1
    assert shown


def result(run: dict, kind: str, keys: tuple) -> float:
    numbers = run["results"]["test"][kind]
    return next(numbers[key] for key in keys if key in numbers)
