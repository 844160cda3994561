#!/usr/bin/env python3
"""Generate the tables of docs/compile-tables.md from the tests of torch.compile.

    python tools/compile_table.py [--check] [--device cpu|cuda] [-n PROCESSES]

Runs every combination of the parameters of tests/nn/test_compile.py and tests/fsdp/test_compile.py.
Writes one table per device between the markers in the page. Tables of other torch versions and
devices are not changed. ``--check`` writes nothing, and fails if a cell differs from the page.

Fails if a test with recipes has no row here, or a row has no test. A row that this machine skips
because it has too few GPUs keeps its cells.

Run it where fp8rs is installed or on PYTHONPATH. Each torch version writes its own tables.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import written

ROOT = Path(__file__).resolve().parent.parent
PAGE = written.Page(ROOT / "docs" / "compile-tables.md", "compile_table")
FILES = ["tests/nn/test_compile.py", "tests/fsdp/test_compile.py"]

LAYER, MODEL, BLOCKS = (
    "test_a_layer_is_one_graph",
    "test_a_model_is_one_graph",
    "test_equal_blocks_are_one_graph",
)
CHECKPOINT, SHARDED = "test_checkpointing_inside", "test_sharded_models_compile"
WAYS = {
    "block.compile() before": "`block.compile()`, then `fully_shard(block)`",
    "block.compile() after": "`fully_shard(block)`, then `block.compile()`",
    "torch.compile(block)": "`fully_shard(block)`, then `torch.compile(block)`",
    "torch.compile(model)": "`torch.compile(model)`, whole",
}
#: The text of a row, its test, and the parameters that select its cases.
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("a layer", LAYER, {}),
    ("a model", MODEL, {"gather": True}),
    ("a model with high-precision all-gather", MODEL, {"gather": False}),
    ("equal blocks, each compiled, share one graph", BLOCKS, {}),
    ("a model with checkpointed blocks", CHECKPOINT, {"wrap": "plainly"}),
    ("a model with selectively checkpointed blocks", CHECKPOINT, {"wrap": "selective"}),
    ("alternating evaluation and training", "test_evaluation_and_training", {}),
    ("varying sequence lengths (`dynamic=True`)", "test_sequence_lengths_do_not_recompile", {}),
    ("a data-dependent number of tokens (`x[mask]`)", "test_data_dependent_token_counts", {}),
    ("a compiled loss", "test_compiled_loss_rolls_histories", {}),
    (
        'CUDA graphs (`mode="reduce-overhead"`)',
        "test_cuda_graphs_of_a_compiled_model",
        {},
    ),
    (
        "nothing of a weight's size is saved for the backward",
        "test_no_second_plane_of_a_weight_is_saved",
        {},
    ),
    ("layers with the same input quantize it once", "test_siblings_are_quantized_once", {}),
    (
        "inputs are recomputed for the backward, and quantized once",
        "test_inputs_are_recomputed_and_quantized_once",
        {},
    ),
    ("codes are saved instead (`save_input=False`)", "test_codes_may_be_saved", {}),
    *(
        (f"FSDP2, {gathered} gather: {text}", SHARDED, {"how": how, "gather": gather})
        for gather, gathered in ((True, "FP8"), (False, "high-precision"))
        for how, text in WAYS.items()
    ),
]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Attach the result of a case. pytest's processes load this module as a plugin (`-p`)."""
    report = yield
    callspec = getattr(item, "callspec", None)
    if callspec is None or "recipe" not in callspec.params:
        return report
    if report.when == "call" or not report.passed:
        params = {k: getattr(v, "__name__", v) for k, v in callspec.params.items()}
        error = "" if call.excinfo is None else call.excinfo.exconly().splitlines()[0][:160]
        case = {"test": item.originalname, "name": item.name, "params": params, "error": error}
        case["column"] = list(import_module("cases").RECIPES).index(params["recipe"])
        report.user_properties.append(("case", json.dumps(case, default=str)))
    return report


@dataclass
class Results:
    """A pytest plugin that collects the result of each case by device, row and recipe."""

    cells: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)
    #: Failures outside of cells: tests without recipes, and processes that died.
    failed: dict[str, None] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Store the result of a case, or a failure outside of cells."""
        case = dict(report.user_properties).get("case")
        if case is not None:
            self._note(report, json.loads(case))
        elif report.failed:
            self.failed[report.nodeid] = None

    def _note(self, report: Any, case: dict[str, Any]) -> None:
        params = case["params"]
        rows = [
            text
            for text, name, chosen in ROWS
            if name == case["test"] and all(params[k] == v for k, v in chosen.items())
        ]
        if len(rows) != 1:
            self.unknown[case["name"]] = None
            return
        self.columns[params["recipe"]] = case["column"]
        if hasattr(report, "wasxfail"):
            new = ("**no**", report.wasxfail)
        elif report.skipped:
            new = ("skipped", report.longrepr[2].removeprefix("Skipped: "))
        elif report.passed:
            new = ("yes", "")
        else:
            new = ("**no**", case["error"])
        # If a cell has several cases, all must pass.
        key = (params.get("device", params.get("device_type")), rows[0], params["recipe"])
        old = self.cells.get(key, ("yes", ""))
        self.cells[key] = new if old[0] == "yes" else old

    def table(self, device: str, old: str = "") -> str | None:
        """Return the table of a device, or None if no case ran.

        A row that was skipped is copied from the table ``old``, if it ran there.
        """
        mine = {k: cell for k, cell in self.cells.items() if k[0] == device}
        if all(cell[0] == "skipped" for cell in mine.values()):
            return None
        recipes = sorted(self.columns, key=self.columns.__getitem__)
        reasons: dict[str, int] = {}
        head, *rows = written.rows(old) or [[]]
        ran = {row[0]: row[1:] for row in rows if head[1:] == recipes and "yes" in row}
        lines = [f"| | {' | '.join(recipes)} |", "|---" * (len(recipes) + 1) + "|"]
        for text, _, _ in ROWS:
            found = [mine.get((device, text, recipe), ("not run", "")) for recipe in recipes]
            if text in ran and all(word == "skipped" for word, _ in found):
                found = [(word, "") for word in ran[text]]
            cells = []
            for word, reason in found:
                if reason:
                    word += f" ({reasons.setdefault(reason, len(reasons) + 1)})"
                cells.append(word)
            lines.append(f"| {text} | {' | '.join(cells)} |")
        notes = [f"({number}) {reason}" for reason, number in reasons.items()]
        return "\n".join([*lines, "", *notes]).strip()


def cells(table: str) -> list[list[str]]:
    """Return the cells of a table, without references to reasons."""
    return [[re.sub(r"\(\d+\)$", "", cell).strip() for cell in row] for row in written.rows(table)]


def main() -> int:
    """Run the tests, and write or check the tables. Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="run only this device")
    parser.add_argument("-n", metavar="PROCESSES", help="number of processes of pytest-xdist")
    chosen = parser.parse_args()

    results = Results()
    options = ["-q", "--full", "--rootdir", str(ROOT), "-p", "compile_table"]
    options += written.on_device(chosen.device)
    if chosen.n:  # pytest-benchmark would warn that it is disabled
        options += ["-n", chosen.n, "--dist", "worksteal", "-p", "no:benchmark"]
    status = pytest.main([*options, *(str(ROOT / f) for f in FILES)], plugins=[results])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    if results.failed:
        print("failed outside of cells:", *results.failed, sep="\n  ")
        return 2
    if results.unknown:
        print("no row (or more than one) for:", *results.unknown, sep="\n  ")
        return 2

    tables = {}
    places = {"cpu": "CPU"}
    if torch.cuda.is_available():
        places["cuda"] = torch.cuda.get_device_name()
    for device, place in places.items():
        name = written.name_of(place)
        table = results.table(device, PAGE.tables().get(name, ""))
        if table is not None:
            tables[name] = table
    return written.update(PAGE, tables, cells, chosen.check)


if __name__ == "__main__":
    sys.exit(main())
