"""The notebooks run from top to bottom on made-up data, and are committed with their outputs."""

import ast
import os
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
    "01_toy_gaussian_mixture": "--steps 300",
    "02_mnist_hypernet": "--fake-data",
    "03_cifar_lenet": "--fake-data --steps 4 --networks 3 --images 8 --validate-every 4",
    "04_cifar_resnet32": "--fake-data --steps 2 --networks 2 --images 8 --validate-every 2",
}


def test_one_notebook_per_script():
    scripts = {path.stem for path in ROOT.glob("0*.py")}
    assert {path.stem for path in NOTEBOOKS} == scripts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_small_on_made_up_data(path, tmp_path, monkeypatch):
    """In a copy of the repository without data; any error of a cell is an error here."""
    for name in ("common.py", f"{path.stem}.py", "results", "notebooks"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    monkeypatch.setitem(os.environ, "NOTEBOOK_ARGS", SMALL[path.stem])
    notebook = nbformat.read(path, as_version=4)
    resources = dict(metadata=dict(path=str(tmp_path / "notebooks")))
    NotebookClient(notebook, timeout=120, resources=resources).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_as_run(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(notebook.cells) <= 25 and path.stat().st_size < 1.5e6
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    text = path.read_text()
    places = (ROOT, Path.home(), tempfile.gettempdir(), sys.prefix)
    assert not [place for place in places if f"{place}/" in text]
    for cell in cells:
        source = "\n".join(s for s in cell.source.splitlines() if not s.startswith("%"))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 8, node.name
