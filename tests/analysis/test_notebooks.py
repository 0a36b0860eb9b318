"""The notebooks: executed from the committed reference, without torch or a network, and no output in the files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from analysis.notebooks import __main__ as command
from analysis.notebooks.__main__ import execute, main, notebooks

NO_NETWORK = """import socket

def refuse(*_):
    raise OSError("a notebook reached for the network")

socket.socket.connect = refuse"""
NO_TORCH = "import sys\n\nassert 'torch' not in sys.modules"
PATHS = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)


def said(notebook: nbformat.NotebookNode) -> str:
    """Every text that the cells put out."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(str(output.get("text") or output.get("data", {}).get("text/plain", "")) for output in outputs)


def num_pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


@PATHS
def test_notebook_runs_from_the_committed_reference(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [new_code_cell(NO_NETWORK), *notebook.cells, new_code_cell(NO_TORCH)]
    assert execute(notebook, tmp_path) == ""
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert num_pictures(notebook) >= 1
    if path.stem == "your-own-runs":
        assert said(notebook).count("There is no study in") == 1


@PATHS
def test_notebook_file_holds_no_output_and_nothing_of_a_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert dict(notebook.metadata.language_info) == {"name": "python"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
        else:
            assert not re.search(r"\d\.\d\d", cell.source), "a result in prose is computed, not typed"
        assert not re.search(r"/(home|root|tmp|Users)/", cell.source)


def test_own_runs_are_read_from_the_store(make_store) -> None:
    path = next(path for path in notebooks() if path.stem == "your-own-runs")
    notebook = nbformat.read(path, as_version=4)
    assert execute(notebook, make_store()) == ""
    text = said(notebook)
    assert "There is no study in" not in text and "('lr', 'mini')" in text
    assert re.search(r"diverged\s+9", text)  # what became of the runs
    assert num_pictures(notebook) == 2


def test_kernel_ends_with_its_notebook(tmp_path: Path) -> None:
    notebook = new_notebook(cells=[new_code_cell("import os\n\nprint(os.getpid())")])
    assert execute(notebook, tmp_path) == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(said(notebook)), 0)


def test_command_executes_into_the_store_and_says_which_cell_failed(tmp_path, monkeypatch, capsys) -> None:
    broken = tmp_path / "broken.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("print(6 * 7)"), new_code_cell("1 / 0")]), broken)
    monkeypatch.setattr(command, "notebooks", lambda: [broken])
    assert main(["--root", str(tmp_path / "runs")]) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: broken.ipynb: ZeroDivisionError: division by zero\n"
    assert f"executed copies: {tmp_path / 'runs' / 'notebooks'}" in captured.out
    assert "42" in said(nbformat.read(tmp_path / "runs" / "notebooks" / "broken.ipynb", as_version=4))
    (tmp_path / "file").write_text("")
    assert main(["--root", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
