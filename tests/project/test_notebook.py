"""The notebook in examples/ runs, and its stored outputs are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "train.ipynb"

pytestmark = pytest.mark.newest_torch


def pictures(cells: list[dict[str, Any]]) -> int:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.second_tier
def test_the_notebook_trains_monitors_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    pytest.importorskip("safetensors")
    monkeypatch.syspath_prepend(ROOT / "tools")
    import notebook

    text = NOTEBOOK.read_text()
    assert "(60, 8, 1)" in text
    fewer_steps = tmp_path / "train.ipynb"
    fewer_steps.write_text(text.replace("(60, 8, 1)", "(6, 8, 1)"))
    cells = notebook.run(fewer_steps).cells
    assert pictures(cells) == 2
    assert "torch.float8_e4m3fn" in str(cells)
    exact = 21
    quantized_again = 0
    assert cells[-1].outputs[-1].data["text/plain"] == f"({exact}, {quantized_again})"


def test_every_code_cell_was_run_for_the_site() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert pictures(cells) == 2
