"""Run examples/train.ipynb and write its outputs.

    python tools/notebook.py   # requires nbclient, ipykernel, matplotlib and safetensors

The documentation site shows the outputs.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "train.ipynb"


def run(path: Path = NOTEBOOK) -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    notebook.metadata.pop("language_info", None)  # the version of Python
    return notebook


if __name__ == "__main__":
    nbformat.write(run(), NOTEBOOK)
