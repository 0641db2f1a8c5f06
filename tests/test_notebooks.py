"""The notebooks run from top to bottom on made-up data, are committed with their outputs, and show
today's code. As a script, this file executes notebooks in place, on real data, for a commit:

    python tests/test_notebooks.py notebooks/01_toy_gaussian_mixture.ipynb
"""

import ast
import importlib
import inspect
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {
    "01_toy_gaussian_mixture": "--steps 100",
    "02_mnist_hypernet": "--fake-data --steps 2 --networks 3 --images 4",
    "03_cifar_lenet": "--fake-data --steps 3 --networks 3 --images 8",
    "04_cifar_resnet32": "--fake-data --steps 2 --networks 2 --images 4",
}
WIDGET = "application/vnd.jupyter.widget-view+json"
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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
    assert {path.stem for path in NOTEBOOKS} == scripts == set(SMALL)


@each
def test_runs_small_on_made_up_data(path, tmp_path, monkeypatch):
    """In a copy of the repository without data; of the results a notebook has only its script's."""
    for name in ("common.py", f"{path.stem}.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    results = Path("results", path.stem)
    if (ROOT / results).exists():
        shutil.copytree(ROOT / results, tmp_path / results)
    before = sorted(tmp_path.rglob("results/**/*"))
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("NOTEBOOK_ARGS", SMALL[path.stem])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads are slower for so little work
    execute(path, tmp_path / "notebooks", timeout=120)
    assert sorted(tmp_path.rglob("results/**/*")) == before  # nothing is written there
    assert not list((tmp_path / "notebooks").iterdir()) and not (tmp_path / "runs").exists()


@each
def test_is_committed_as_run(path):
    notebook, cells = nbformat.read(path, as_version=4), code_cells(path)
    assert len(notebook.cells) <= 25 and path.stat().st_size < 1.5e6
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


@each
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


@each
def test_functions_are_short_or_the_scripts(path):
    """A function in a cell has at most 8 lines, or is the script's word for word, to be edited."""
    script, copied = importlib.import_module(path.stem), 0
    for cell in code_cells(path):
        for node in ast.walk(parse(cell)):
            if isinstance(node, ast.FunctionDef) and hasattr(script, node.name):
                assert inspect.getsource(getattr(script, node.name)).strip() in cell.source
                copied += 1
            elif isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 8, node.name
    assert copied or path.stem[:2] in ("03", "04")


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        options = dict(timeout=1800, record_timing=False, coalesce_streams=True)
        run = execute(file, file.parent, **options)
        run.metadata = {name: run.metadata[name] for name in ("kernelspec", "language_info")}
        run.metadata["language_info"] = dict(name="python")
        for cell in (cell for cell in run.cells if cell.cell_type == "code"):
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
        nbformat.write(run, file)
