"""Execute the notebooks: ``python -m analysis.notebooks [--root runs]``, or ``make notebooks``.

The files hold no output. Copies with their output go to ``<root>/notebooks/``, and ``your-own-runs`` reads the store at
``root``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

FOLDER = Path(__file__).resolve().parent
PROJECT = FOLDER.parents[1]
LIMIT_S = 300
"""What a cell may take."""


def notebooks() -> list[Path]:
    """Every notebook, the tour first."""
    return sorted(FOLDER.glob("*.ipynb"), key=lambda path: (path.stem != "tour", path.stem))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a cell fails (the others are executed), or 2 if no copy can be written."""
    parser = argparse.ArgumentParser(prog="python -m analysis.notebooks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--root", default="runs")
    root = Path(parser.parse_args(arguments).root)
    out = root / "notebooks"
    try:
        out.mkdir(parents=True, exist_ok=True)
        failed = [path.name for path in notebooks() if not _copied(path, out / path.name, root)]
    except OSError as error:
        print(f"error: --root: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"executed copies: {out}")
    return 1 if failed else 0


def _copied(path: Path, copy: Path, root: Path) -> bool:
    """Execute one notebook into ``copy``, up to the cell that fails if one does; says how long it took."""
    notebook = nbformat.read(path, as_version=4)
    began = time.monotonic()
    problem = execute(notebook, root)
    nbformat.write(notebook, copy)
    if problem:
        print(f"error: {path.name}: {problem}", file=sys.stderr)
    else:
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)
    return not problem


def execute(notebook: nbformat.NotebookNode, root: Path) -> str:
    """Fill in the output of every cell. Returns what went wrong, in one line, or "".

    The kernel is this interpreter, in the project's folder, whatever kernels are registered on the machine; what it
    writes on its own account (history, connection) is thrown away.
    """
    with tempfile.TemporaryDirectory() as scratch:
        kernel = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # then python3 is sys.executable
            connection_file=str(Path(scratch) / "kernel.json"),
            transport="ipc",  # no port is opened
            ip=str(Path(scratch) / "ipc"),
        )
        client = NotebookClient(notebook, km=kernel, timeout=LIMIT_S, resources={"metadata": {"path": str(PROJECT)}})
        environment = {**os.environ, "ROOT": str(root.resolve()), "IPYTHONDIR": scratch}
        try:
            client.execute(env=environment, cleanup_kc=True)  # the kernel ends with it
        except CellExecutionError as error:
            return f"{error.ename}: {error.evalue}"
        except (CellTimeoutError, DeadKernelError) as error:
            return str(error).splitlines()[0]
    return ""


if __name__ == "__main__":
    sys.exit(main())
