"""The notebooks run from top to bottom on made-up data, are committed with their outputs, and show
today's code. As a script, this file executes notebooks in place, on real data, for a commit:

    python tests/test_notebooks.py notebooks/01_toy_gaussian_mixture.ipynb
"""

import ast
import importlib
import inspect
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from conftest import write_data
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {
    "01_toy_gaussian_mixture": "--steps 100",
    "02_mnist_hypernet": "--steps 2 --networks 3 --images 4",
    "03_cifar_lenet": "--steps 3 --networks 3 --images 8 --test-networks 20",
    "04_cifar_resnet32": "--steps 2 --networks 2 --images 4",
    "05_your_own_network": "--steps 3",
}
# Runs when a kernel starts: the made-up data of the tests has torchvision's checksums then.
STARTUP = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import conftest"
OWN = "05_your_own_network"  # its code is its own, apart from common.py and this script's:
SCRIPTS = {stem: "02_mnist_hypernet" if stem == OWN else stem for stem in SMALL}
WIDGET = "application/vnd.jupyter.widget-view+json"
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
of_scripts = [path for path in NOTEBOOKS if path.stem != OWN]
each_of_a_script = pytest.mark.parametrize("path", of_scripts, ids=lambda path: path.stem)


def execute(path: Path, folder: Path, **options) -> nbformat.NotebookNode:
    """Any error of a cell is an error here."""
    notebook = nbformat.read(path, as_version=4)
    resources = dict(metadata=dict(path=str(folder)))
    return NotebookClient(notebook, resources=resources, **options).execute()


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def parse(cell: nbformat.NotebookNode) -> ast.Module:
    return ast.parse("\n".join(s for s in cell.source.splitlines() if not s.startswith("%")))


def test_one_notebook_per_script():
    scripts = {path.stem for path in ROOT.glob("0*.py")}
    assert {path.stem for path in NOTEBOOKS} == scripts | {OWN} == set(SMALL)


@each
def test_runs_small_on_made_up_data(path, tmp_path, monkeypatch):
    """In a copy of the repository; of the results a notebook has only its script's."""
    for name in ("common.py", f"{SCRIPTS[path.stem]}.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for results in (ROOT / "results").glob(f"{path.stem[:2]}_*"):
        shutil.copytree(results, tmp_path / "results" / results.name)
    shutil.copy(ROOT / "results/votes.csv", tmp_path / "results")
    before = sorted(tmp_path.rglob("results/**/*"))
    (tmp_path / "notebooks").mkdir()
    write_data(tmp_path / "data")
    startup = tmp_path / "ipython/profile_default/startup/made_up_data.py"
    startup.parent.mkdir(parents=True)
    startup.write_text(STARTUP)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("NOTEBOOK_ARGS", SMALL[path.stem])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads are slower for so little work
    execute(path, tmp_path / "notebooks", timeout=120)
    assert sorted(tmp_path.rglob("results/**/*")) == before  # nothing is written there
    assert not list((tmp_path / "notebooks").iterdir()) and not (tmp_path / "runs").exists()


@each
def test_is_committed_as_run(path):
    notebook, cells = nbformat.read(path, as_version=4), code_cells(path)
    assert len(notebook.cells) <= 26 and path.stat().st_size < 1.5e6
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert len(cells[0].source.splitlines()) <= 6
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2
    # A slider is dead without its kernel: its picture stays, it does not.
    assert not [o for o in outputs if WIDGET in o.get("data", {})], "run tests/test_notebooks.py"
    text = path.read_text()
    places = (ROOT, Path.home(), tempfile.gettempdir(), sys.prefix)
    assert not [place for place in places if f"{place}/" in text]


@each_of_a_script
def test_shown_code_is_todays(path):
    """What show(...) has left in the notebook is the source of the pieces it names."""
    script, shown = importlib.import_module(path.stem), 0
    for cell in code_cells(path):
        for call in (node for node in ast.walk(parse(cell)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) != "show":
                continue
            sources = []
            for piece in call.args:  # common's function, or a piece of the script: mnist.x.y
                value, (first, *names) = script, ast.unparse(piece).split(".")
                for name in names or [first]:
                    value = getattr(value, name)
                sources.append(inspect.getsource(value))
            assert cell.outputs[0].data["text/plain"].strip() == "\n\n".join(sources).strip()
            shown += 1
    assert shown


@each_of_a_script
def test_functions_are_short_or_the_scripts(path):
    """A function in a cell has at most 10 lines, or is the script's word for word, to be edited."""
    script, copied = importlib.import_module(path.stem), 0
    for cell in code_cells(path):
        for node in ast.walk(parse(cell)):
            if isinstance(node, ast.FunctionDef) and hasattr(script, node.name):
                assert inspect.getsource(getattr(script, node.name)).strip() in cell.source
                copied += 1
            elif isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 10, node.name
    assert copied or path.stem[:2] in ("03", "04")


def test_own_functions_are_short():
    """A training, from its network to its optimiser, is the longest."""
    for cell in code_cells(ROOT / "notebooks" / f"{OWN}.ipynb"):
        for node in ast.walk(parse(cell)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 20, node.name


def table(marker: str) -> dict[str, list[float]]:
    """The numbers of a printed table, by the row's name."""
    outputs = [o for c in code_cells(ROOT / "notebooks" / f"{OWN}.ipynb") for o in c.outputs]
    (text,) = [o.text for o in outputs if o.output_type == "stream" and marker in o.text]
    rows = re.findall(r"^ *(\S.*?) {2,}([-\d. %]+)$", text, re.MULTILINE)
    return {name: [float(v) for v in numbers.replace("%", "").split()] for name, numbers in rows}


def test_words_about_regression_hold():
    """What the notebook says of its table, for the outputs that are committed."""
    rows = table("training error")  # error; std at data, in the gap, largest; off by, in band
    error, data, gap, largest, _, inside = range(6)
    fitted = [rows[f"entropy of outputs, lam = {lam}"] for lam in (300, 3000)]
    assert all(row[gap] > 20 * row[data] and row[inside] == 100 for row in fitted)
    alone, null = rows["20 trained by themselves"], rows["noise around one of them"]
    assert abs(fitted[1][error] - alone[error]) < 5e-4
    assert 0.035 < rows["entropy of outputs, lam = 30"][error] < 0.055
    runaway = rows["the same, lam = 300, without l2"]
    assert runaway[largest] > 100 and runaway[gap] < 0.1
    of_weights = [rows[f"entropy of weights, lam = {lam}"] for lam in (30, 300, 3000)]
    assert all(row[gap] < 0.2 and row[inside] < 50 for row in of_weights)
    assert alone[gap] > 10 * alone[data] and alone[inside] < 50
    assert null[gap] < null[data] and abs(null[error] - fitted[0][error]) < 2e-4


def test_words_about_your_network_hold():
    rows = table("told apart")  # accuracy: one, vote; NLL: one, all; calibration: one, all
    one, vote, nll, nll_all, apart = 0, 1, 2, 3, 6
    yours, none = rows["your network"], rows["ten, no diversity"]
    digits, random = (rows[f"ten, differ on {kind}"] for kind in ("digits", "random images"))
    assert all(abs(row[vote] - yours[vote]) < 0.4 for row in rows.values())
    assert abs(random[nll_all] - none[nll_all]) < 0.002 and none[nll] < yours[nll] - 0.005
    assert digits[one] < none[one] - 0.2 and digits[vote] > digits[one] + 0.2
    assert random[apart] == max(row[apart] for row in rows.values()) > 99.5


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        options = dict(timeout=1800, record_timing=False, coalesce_streams=True)
        run = execute(file, file.parent, **options)
        run.metadata = {name: run.metadata[name] for name in ("kernelspec", "language_info")}
        run.metadata["language_info"] = dict(name="python")
        for cell in (cell for cell in run.cells if cell.cell_type == "code"):
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
        nbformat.write(run, file)
