#!/usr/bin/env python3
"""Write docs/tested.md, the page of tested combinations, from the parameters of the tests.

    .venv/bin/python tools/tested.py

Imports the test files, so torch and fp8rs must be importable. Nothing is run. A test compares the
page with what this writes.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from fp8rs.quantize.recipes import describe

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "tested.md"

INTRODUCTION = """\
# What is tested together

`python tools/tested.py` writes this page from the parameters of the tests.

- `make test` runs each value of a parameter that is not marked for the second tier.
- `make test-all` runs each pair of values of two parameters.
- `pytest --full FILE` runs all combinations.
"""

#: Titles, what holds for every combination, and the tests with their parameters.
COMBINATIONS = [
    (
        "FSDP2",
        "Three steps of AdamW give the losses, gradients, parameters and gathered bytes of the "
        "unsharded, eager model, to the bit. Meshes have 1, 2 or 4 ranks. "
        "`HSDP, shard size 1` and `world size 1` have even shards only.",
        [("fsdp.test_matrix", "test_it_trains_as_the_whole_model")],
    ),
    (
        "torch.compile",
        "Losses and gradients equal those of eager code to the bit, in the expected number of "
        "graphs and without graph breaks. The backend is `aot_eager`. CUDA graphs run Inductor's "
        "code, and their losses are within 1% of eager's.",
        [
            ("nn.test_compile", "test_a_layer_is_one_graph"),
            ("nn.test_compile", "test_a_model_is_one_graph"),
            ("nn.test_compile", "test_equal_blocks_are_one_graph"),
            ("nn.test_compile", "test_checkpointing_inside"),
            ("nn.test_compile", "test_evaluation_and_training"),
            ("nn.test_compile", "test_sequence_lengths_do_not_recompile"),
            ("nn.test_compile", "test_data_dependent_token_counts"),
            ("nn.test_compile", "test_compiled_loss_rolls_histories"),
            ("nn.test_compile", "test_cuda_graphs_of_a_compiled_model"),
            ("nn.test_compile", "test_no_second_plane_of_a_weight_is_saved"),
            ("nn.test_compile", "test_siblings_are_quantized_once"),
            ("nn.test_compile", "test_inputs_are_recomputed_and_quantized_once"),
            ("nn.test_compile", "test_codes_may_be_saved"),
            ("fsdp.test_compile", "test_sharded_models_compile"),
        ],
    ),
    (
        "Checkpoints",
        "What `fp8rs.checkpoint` saves in one layout loads in another one, to the bit. Before a "
        "load, every parameter of the loading model is NaN.",
        [
            (
                "checkpoint.test_moves",
                "test_a_checkpoint_restores_every_bit_in_another_layout",
            ),
            (
                "checkpoint.test_moves",
                "test_a_checkpoint_of_batched_weights_restores_every_bit_in_another_layout",
            ),
        ],
    ),
]

CLIENTS = """\
## Libraries

`make test-clients` and `make test` run these on the CPU. Sharded models have two ranks. Tests that
train compare the losses with bf16's or with the unconverted model's, and check that every parameter
changes. axolotl needs a GPU, so its hooks are called without a training run.
"""

PARTIES = "convert/test_third_parties"
PARAMETERS = "convert/test_parameters"
#: Clients, and their tests: files, and prefixes of names. All tests of a file without prefixes.
OF_CLIENTS: list[tuple[str, dict[str, tuple[str, ...]]]] = [
    ("accelerate", {"clients/test_accelerate": ()}),
    (
        "transformers",
        {
            "clients/test_transformers": (),
            "clients/test_experts": (),
            PARTIES: ("test_save_pretrained", "test_generate", "test_a_mixture_of_experts"),
            "convert/test_experts": ("test_mixtures_train", "test_sharded_mixtures_train"),
            "nn/test_experts": ("test_a_compiled_block", "test_experts_of_other_ranks"),
        },
    ),
    ("peft", {"clients/test_peft": ()}),
    ("torchtitan", {"clients/test_torchtitan": ()}),
    ("Lightning", {"clients/test_lightning": ()}),
    ("axolotl", {"clients/test_axolotl": ()}),
    ("torchao", {"clients/test_torchao_configs": ()}),
    ("optimizers of torchao and schedulefree", {"clients/test_optimizers": ()}),
    (
        "torch",
        {
            PARTIES: (
                "test_ddp",
                "test_zero_1",
                "test_muon",
                "test_an_average",
                "test_an_exported_model",
                "test_a_model_on_meta",
            ),
            PARAMETERS: (
                "test_an_optimizer_created_before",
                "test_optimizers_mapped_by_pointer",
                "test_fsdp1",
                "test_an_average",
            ),
        },
    ),
    (
        "safetensors",
        {
            PARTIES: (
                "test_named_parameters_are_saved",
                "test_shards_are_saved_as_safetensors",
            )
        },
    ),
]


def claim(test: str) -> str:
    """Return the name of a test as words."""
    return test.removeprefix("test_").replace("_", " ")


def value_text(value: Any) -> str:
    """Return a value of a parameter as text."""
    # pytest.param(...) has its values as a tuple.
    values = getattr(value, "values", value)
    if not callable(values) and isinstance(values, (tuple, list)):
        return ", ".join(value_text(part) for part in values)
    return getattr(value, "__name__", str(value))


def parameters_of(module: str, test: str) -> list[str]:
    """Return a line for each parameter of a test, with its values."""
    function = getattr(import_module(module), test)
    lines = []
    for mark in reversed(function.pytestmark):
        if mark.name != "parametrize":
            continue
        names, values = mark.args[:2]
        if isinstance(names, (tuple, list)):
            names = ", ".join(names)
        texts = [value_text(value) for value in values]
        if texts == list(import_module("cases").RECIPES):
            texts = ["all"]
        # The values of several parameters have commas of their own.
        separator = "; " if "," in names else ", "
        lines.append(f"    - {names}: {separator.join(texts)}")
    return lines


def recipes_text() -> str:
    """Return the names of the recipes under test, and the fields of those without a short name."""
    texts = []
    for name, recipe in import_module("cases").RECIPES.items():
        text = f"`{name}`"
        if recipe != name:
            text += f" (`{describe(recipe)}`)"
        texts.append(text)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def tests_of(file: str, prefixes: tuple[str, ...]) -> list[str]:
    """Return the names of a file's tests. ValueError if a prefix has none."""
    tests = []
    for node in ast.parse((TESTS / f"{file}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tests.append(node.name)
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in tests):
            raise ValueError(f"tests/{file}.py has no test whose name begins with {prefix}")

    if not prefixes:
        return tests
    return [name for name in tests if name.startswith(prefixes)]


def text() -> str:
    """Return the page."""
    lines = [INTRODUCTION, f"The recipes are {recipes_text()}.", ""]
    for title, result, tests in COMBINATIONS:
        lines += [f"## {title}", "", result, ""]
        for module, test in tests:
            file = module.replace(".", "/")
            lines.append(f"- {claim(test)} (`tests/{file}.py`)")
            lines += parameters_of(module, test)
        lines.append("")
    lines.append(CLIENTS)
    for client, files in OF_CLIENTS:
        lines.append(f"- {client}")
        for file, prefixes in files.items():
            for test in tests_of(file, prefixes):
                lines.append(f"    - {claim(test)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    sys.path.insert(0, str(TESTS))
    PAGE.write_text(text())


if __name__ == "__main__":
    main()
