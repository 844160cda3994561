#!/usr/bin/env python3
"""Generate the table of docs/clients.md from the tests with clients.

    .venv-clients/bin/python tools/client_table.py            # run the tests, write the table
    .venv-clients/bin/python tools/client_table.py --check    # run them, compare with the page
    .venv-clients/bin/python tools/client_table.py --only torchao peft    # only rows of clients
    .venv-clients/bin/python tools/client_table.py --claim resumed        # only rows with a text

A row is a claim. ROWS names its tests, which must all pass. fp8rs must be importable. The tests
take half an hour on two cores. Rows that do not run are not changed, because their clients are not
selected or not installed, or their files are missing. Several runs in different environments can
therefore fill one table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import written

ROOT = Path(__file__).resolve().parent.parent
PAGE = written.Page(ROOT / "docs" / "clients.md", "client_table")

#: Names of test files.
PARTIES, PARAMETERS = "convert/test_third_parties", "convert/test_parameters"
ACCELERATE, TRAINER, PEFT, OPTIMIZERS = (
    f"clients/test_{n}" for n in ("accelerate", "transformers", "peft", "optimizers")
)
TITAN, LIGHTNING, AXOLOTL = (f"clients/test_{n}" for n in ("torchtitan", "lightning", "axolotl"))

#: The client, the claim, and its tests: (file, prefix of their names).
ROWS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "accelerate",
        "training with FSDP2: losses close to bf16's, every parameter is updated, weights are "
        "gathered with 1 byte per element",
        [(ACCELERATE, "test_losses_agree")],
    ),
    ("accelerate", "`save_state`, `load_state`", [(ACCELERATE, "test_a_resumed_run")]),
    (
        "accelerate",
        "an unconverted model resumes from the checkpoint",
        [(ACCELERATE, "test_sharded_state_dicts")],
    ),
    (
        "accelerate",
        "gradient accumulation and clipping",
        [(ACCELERATE, "test_gradients_accumulate")],
    ),
    ("accelerate", "`cpu_ram_efficient_loading`", [(ACCELERATE, "test_cpu_ram_efficient")]),
    (
        "accelerate",
        '`mixed_precision="fp8"` with `use_fp8rs`; an optimizer created before the conversion',
        [(ACCELERATE, "test_mixed_precision_fp8"), (ACCELERATE, "test_the_shim")],
    ),
    (
        "transformers",
        "Trainer with FSDP2: losses close to bf16's, every parameter is updated, FP8 all-gathers,"
        " evaluation",
        [(TRAINER, "test_losses_agree"), (TRAINER, "test_converted_weights_are_gathered")],
    ),
    (
        "transformers",
        "Trainer: resumes from a checkpoint; checkpoints have the unconverted model's names, "
        "shapes and dtypes",
        [(TRAINER, "test_a_resumed_run"), (TRAINER, "test_checkpoints_equal")],
    ),
    ("transformers", "Trainer: gradient accumulation and clipping", [(TRAINER, "test_gradients")]),
    (
        "transformers",
        "`save_pretrained`, `generate`",
        [(PARTIES, "test_save_pretrained"), (PARTIES, "test_generate")],
    ),
    (
        "transformers",
        "training of Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss with converted experts: sharded,"
        " compiled, and with the masked rows of expert parallelism",
        [
            (PARTIES, "test_a_mixture_of_experts"),
            ("convert/test_experts", "test_mixtures_train"),
            ("convert/test_experts", "test_sharded_mixtures_train"),
            ("nn/test_experts", "test_a_compiled_block"),
            ("nn/test_experts", "test_experts_of_other_ranks"),
            ("clients/test_experts", "test_losses_agree"),
        ],
    ),
    (
        "peft",
        "LoRA and DoRA with FSDP2, converted before or after `get_peft_model`: only adapters are "
        "updated, FP8 all-gathers",
        [(PEFT, "test_adapters_train")],
    ),
    (
        "peft",
        "saving adapters, and merging them into converted layers",
        [(PEFT, "test_adapters_have_peft_names"), (PEFT, "test_merged_adapters")],
    ),
    (
        "torchtitan",
        "Trainer with FSDP2, selective activation checkpointing and the chunked loss, in "
        "`current`, `delayed` and `mxfp8`: losses close to bf16's, every parameter is updated, "
        "FP8 all-gathers, evaluation",
        [(TITAN, "test_it_trains")],
    ),
    (
        "torchtitan",
        "`compile` (each block with `fullgraph=True`, backend `aot_eager`)",
        [(TITAN, "test_it_compiles")],
    ),
    (
        "torchtitan",
        "tensor parallelism, with `spmd_types` and with `partial_dtensor`",
        [(TITAN, "test_tensor_parallelism")],
    ),
    (
        "torchtitan",
        "HSDP, and tensor parallelism with FSDP2, on four ranks",
        [(TITAN, "test_hsdp")],
    ),
    ("torchtitan", "resumes from a checkpoint", [(TITAN, "test_a_checkpoint")]),
    (
        "lightning",
        "Trainer with FSDP2: losses close to bf16's, every parameter is updated, FP8 all-gathers,"
        " evaluation; resumes from a checkpoint",
        [(LIGHTNING, "test_it_trains")],
    ),
    ("lightning", "Fabric's `parallelize_fn`", [(LIGHTNING, "test_fabric")]),
    (
        "axolotl",
        "plugin: hooks run in the loader's order, axolotl's config accepts its keys, adapters are"
        " added after the conversion. No training run, because axolotl needs a GPU",
        [(AXOLOTL, "test_")],
    ),
    ("torchao", "8-bit AdamW, on one device", [(OPTIMIZERS, "test_torchaos_8_bit_adamw_trains[")]),
    (
        "torchao",
        "8-bit AdamW on FSDP2's shards",
        [(OPTIMIZERS, "test_torchaos_8_bit_adamw_trains_s")],
    ),
    ("schedulefree", "AdamW, on one device and on shards", [(OPTIMIZERS, "test_schedule_free")]),
    (
        "torch",
        "an optimizer created before the conversion; one whose parameters are replaced by the "
        "shards with the same `data_ptr`, as in accelerate",
        [
            (PARAMETERS, "test_an_optimizer_created_before"),
            (PARAMETERS, "test_optimizers_mapped_by_pointer"),
        ],
    ),
    (
        "torch",
        "FSDP1, with `use_orig_params` True and False: trains, gathers in bf16, and warns about "
        "that",
        [(PARAMETERS, "test_fsdp1")],
    ),
    ("torch", "DDP", [(PARTIES, "test_ddp")]),
    ("torch", "ZeRO-1 (`ZeroRedundancyOptimizer`)", [(PARTIES, "test_zero_1")]),
    (
        "torch",
        "`torch.optim.Muon` updates every weight and every shard",
        [(PARTIES, "test_muon")],
    ),
    (
        "torch",
        "averages: `copy.deepcopy`, `AveragedModel` (with delayed scaling, created after the "
        "conversion)",
        [(PARTIES, "test_an_average"), (PARAMETERS, "test_an_average")],
    ),
    ("torch", "`torch.export`", [(PARTIES, "test_an_exported_model")]),
    ("torch", "forward and backward on meta, FLOP counts", [(PARTIES, "test_a_model_on_meta")]),
    (
        "safetensors",
        "`save_file(dict(model.named_parameters()))`, and shards by `full_tensor()`",
        [
            (PARTIES, "test_named_parameters_are_saved"),
            (PARTIES, "test_shards_are_saved_as_safetensors"),
        ],
    ),
]


@dataclass(eq=False)
class Results:
    """A pytest plugin that collects the result of each test by file and name."""

    wanted: list[tuple[str, str]]
    seen: dict[tuple[str, str], str] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        """Store the result of a test."""
        report = yield
        if report.when == "call" or not report.passed:
            file = Path(item.path).relative_to(ROOT / "tests").with_suffix("").as_posix()
            word = "passed" if report.passed else "skipped" if report.skipped else "failed"
            self.seen[file, item.name] = word
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep only tests of rows, on the CPU."""
        wanted = [
            item
            for item in items
            if item.get_closest_marker("gpu") is None
            and any(self._is(item, file, name) for file, name in self.wanted)
        ]
        items[:] = wanted

    @staticmethod
    def _is(item: Any, file: str, name: str) -> bool:
        return item.path == ROOT / "tests" / f"{file}.py" and item.name.startswith(name)

    def row(self, tests: list[tuple[str, str]]) -> tuple[str, int]:
        """Return "works", "**no**", or "" if a test did not run, and the number of cases."""
        words = []
        for file, name in tests:
            mine = [w for (f, n), w in self.seen.items() if f == file and n.startswith(name)]
            if not mine or "skipped" in mine:
                return "", 0
            words += mine
        return ("**no**" if "failed" in words else "works"), len(words)


def version(client: str) -> str:
    """Return the version of a client, or "" if it is not installed."""
    try:
        found = importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return found.partition("+")[0]


def lines(results: Results, old: dict[tuple[str, ...], str]) -> list[str]:
    """Return the lines of the table. Rows that did not run are those on the page."""
    found = ["| client | tested | result | cases |", "|---|---|---|---|"]
    for client, what, tests in ROWS:
        word, cases = results.row(tests)
        if word:
            found.append(f"| {client} {version(client)} | {what} | {word} | {cases} |")
        else:
            found.append(old.get((client, what), f"| {client} | {what} | not run | 0 |"))
    return found


def main() -> int:
    """Run the tests of the chosen rows, and write or check the table. Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    clients = sorted({client for client, _, _ in ROWS})
    parser.add_argument("--only", nargs="+", choices=clients, default=clients, metavar="CLIENT")
    parser.add_argument("--claim", default="", help="run only rows that contain this")
    options = parser.parse_args()
    check = options.check

    wanted = [
        test
        for client, what, tests in ROWS
        if client in options.only and options.claim in what
        for test in tests
    ]
    files = sorted({f"tests/{file}.py" for file, _ in wanted})
    results = Results(wanted)
    present = [str(ROOT / f) for f in files if (ROOT / f).exists()]
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *present], plugins=[results]
    )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)

    old = {claim(line): line for line in PAGE.body().splitlines() if line.count(" | ") == 3}
    table = lines(results, old)
    # Versions and numbers of cases may differ from the page. Results may not.
    differ = [
        line
        for line in table
        if line.count(" | ") == 3
        and (claim(line) not in old or words(line) != words(old[claim(line)]))
    ]
    print(*differ, sep="\n")
    if check:
        return int(bool(differ))
    heading = (
        f"torch {torch.__version__.partition('+')[0]}, CPU, gloo. Sharded models have two ranks."
    )
    PAGE.write("\n".join(["", heading, "", *table, ""]))
    return 0


def claim(line: str) -> tuple[str, ...]:
    """Return the client of a row, without its version, and the claim."""
    return tuple(words(line)[:2])


def words(line: str) -> list[str]:
    """Return the cells of a row, without versions and counts."""
    client, what, today, _ = line.strip("| ").split(" | ")
    return [re.sub(r" [\d.a-z]+$", "", client), what, today]


if __name__ == "__main__":
    sys.exit(main())
