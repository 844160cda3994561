"""Code blocks of documentation pages, and the examples, run on two ranks."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import demo_jobs

sys.path.append(str(Path(__file__).parents[2] / "benches"))
from launch import launch

ROOT = Path(__file__).parents[2]
RANKS = 2

pytestmark = [pytest.mark.timeout(900), pytest.mark.newest_torch]


@pytest.fixture
def device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs: FSDP2 shards over GPUs where there are any")
    return "cuda"


#: First line of a block that continues a script.
CONTINUES = re.compile(
    r"# Continues (?:(this page)'s first block|train\.py of (\S+?)|(\S+?))(?:, (.+))?$"
)
GETTING_STARTED = ROOT / "docs" / "getting-started.md"

#: tests/clients runs the blocks of docs/clients as parts of complete scripts.
ALL_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Sizes for two CPU cores, meshes of two ranks, and a small model for one on a hub.
SMALLER = {
    "docs/hub.md": {
        '"meta-llama/Meta-Llama-3-8B"': '"base"',
        'snapshot_download("base")': '"base"',
        "2048": "16",
    },
    "docs/modules.md": {
        "8192, 128": "16, 8",
        "8192": "16",
        "14336": "128",
        "4096": "64",
        " 32,": " 8,",
        '"cuda", (4, 2)': '"DEVICE", (1, 2)',
    },
    "docs/serving.md": {'"cuda"': '"DEVICE"'},
    "docs/tensor-parallel.md": {
        "1024, 2816, 16": "64, 128, 4",
        '"cuda", (2, 4)': '"DEVICE", (1, 2)',
    },
}

#: Blocks that do not run here, with the reason.
ELSEWHERE = {
    "docs/clients/": "tests/clients runs them",
    "docs/clients.md": "tests/clients runs them",
    "docs/getting-started.md#0": "tests/project/test_getting_started.py runs it",
    "docs/monitor.md": "tests/monitoring/test_page.py runs them",
    "docs/optim.md#5": "imports torchtitan, tests/clients runs the example with it",
    "docs/modules.md#1": "reads a checkpoint of Llama",
    "docs/serving.md#7": "tests/export/test_rl_libraries.py runs it",
    "docs/serving.md#8": "tests/export/test_rl_libraries.py runs it",
    "docs/serving.md#9": "tests/export/test_rl_libraries.py runs it",
    "docs/migrate-from-torchao.md": "imports torchao",
}


def scripts(page: Path) -> list[str]:
    text = page.read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL) if page.suffix == ".md" else [text]


def names_of(code: str) -> tuple[set[str], set[str]]:
    """Return the names that a text binds, and those that it reads without binding them."""
    bound = set()
    read = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return bound, read - bound - set(dir(builtins))


def first_script_around(place: str) -> tuple[str, str]:
    """Return the code of the first script before a block and after it.

    The script has fewer and smaller batches, so that training takes eight short steps.

    Args:
        place: Where the block goes, such as "in place of part 2".
    """
    script = scripts(GETTING_STARTED)[0].replace("(100, 512)", "(8, 64)")
    head, first, second, third = re.split(r"(?m)^(?=# \d\. )", script)
    before_call, after_call = re.split(r"(?m)^convert_to_float8_training\(.*\n", second)
    training, last_lines = re.split(r"(?m)^(?=time\.sleep)", third)
    assert len(last_lines.splitlines()) == 2
    start = head + first
    unsharded = re.sub(r"(?m)^ *(fully_shard\(.*|for block in .*)\n", "", second)
    return {
        "in place of the conversion": (start + before_call, after_call + third),
        "in place of part 2": (start, third),
        "after part 2": (start + second, third),
        "after part 2, without fully_shard": (start + unsharded, third),
        "in place of part 3": (start + second, last_lines),
        "before the last two lines": (start + second + training, last_lines),
        "in place of the last two lines": (start + second + training, ""),
    }[place]


def context(page: Path, code: str) -> tuple[str, str]:
    """Return the code before a block and after it, as the block's first line says."""
    match = CONTINUES.fullmatch(code.split("\n", 1)[0])
    if not match:
        return "", ""
    standalone, script_of, file, place = match.groups()
    if standalone:
        return scripts(page)[0], ""
    path = ROOT / (script_of or file)
    return first_script_around(place) if path == GETTING_STARTED else (scripts(path)[0], "")


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_name_in_a_block_comes_from_its_stated_context(page: Path) -> None:
    for code in scripts(page):
        before, after = context(page, code)
        _, missing = names_of(before)
        assert not missing
        _, missing = names_of(before + code)
        assert not missing, (code.split("\n", 1)[0], missing)
        _, missing = names_of(before + code + after)
        assert not missing, (code.split("\n", 1)[0], missing)


def blocks_to_run(device: str) -> dict[str, list[str]]:
    """Return each page's blocks, each between the code before it and the code after it."""
    blocks = {}
    for page in ALL_PAGES:
        name = page.relative_to(ROOT).as_posix()
        for index, code in enumerate(scripts(page)):
            block = f"{name}#{index}"
            if not block.startswith(tuple(ELSEWHERE)):
                before, after = context(page, code)
                texts = [before, code, after]
                for size, smaller in SMALLER.get(name, {}).items():
                    smaller = smaller.replace("DEVICE", device)
                    texts = [text.replace(size, smaller) for text in texts]
                blocks[block] = texts
    return blocks


def write_hub_model(folder: Path) -> None:
    """Write a small Llama in the files of transformers, which stands for a model on a hub."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "base")


def test_every_block_runs_in_its_stated_context(tmp_path: Path, device: str) -> None:
    pytest.importorskip("safetensors")
    pytest.importorskip("transformers")
    write_hub_model(tmp_path)
    blocks = blocks_to_run(device)
    arguments = {"blocks": blocks, "folder": str(tmp_path)}
    for results in launch(demo_jobs.pages, arguments, ranks=RANKS, device=device):
        errors = [
            f"{name}: {result}" for name, result in results.items() if isinstance(result, str)
        ]
        assert not errors, "\n".join(errors)
        for name, texts in blocks.items():
            _, block, _ = texts
            fp8 = "fp8_weights=True" in block or "quantized_init(" in block
            assert bool(results[name]) == fp8, name
            assert all(1 <= nbytes < 1.07 for nbytes in results[name]), name


@pytest.mark.parametrize(
    "script",
    [
        "docs/getting-started.md",
        *(f"examples/{name}.py" for name in ("fp8_weights", "lora", "resume", "rl_weight_stream")),
    ],
)
def test_scripts_pause_before_they_destroy_the_process_group(script: str) -> None:
    """Without the pause, a thread of gloo sometimes aborts a run that has succeeded."""
    code = scripts(ROOT / script)[0]
    assert re.search(r"^ *time\.sleep\(0\.1\).*\n *dist\.destroy_process_group\(\)$", code, re.M)


@pytest.mark.newest_torch
def test_git_ignores_the_folders_that_examples_write() -> None:
    option = re.compile(r'"--(?:folder|checkpoint|output)"[^()]*default="([\w-]+)"')
    folders = set()
    for path in (ROOT / "examples").glob("*.py"):
        folders.update(option.findall(path.read_text()))
    assert folders == {"checkpoint", "checkpoints", "outputs", "trainer-output"}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {f"/{folder}" for folder in folders} <= set(ignored)


@pytest.mark.second_tier
def test_the_examples_of_lora_weight_streams_and_resumption_train(
    tmp_path: Path, device: str
) -> None:
    arguments = {"examples": str(ROOT / "examples"), "folder": str(tmp_path)}
    runs, _ = launch(demo_jobs.examples, arguments, ranks=RANKS, device=device)
    losses = runs["lora"]["losses"]
    assert losses[-1] < 0.9 * losses[0]
    assert runs["lora"]["bytes"] == [pytest.approx(1, abs=0.01)] * (2 * 7)
    saved = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert list(saved) == runs["lora"]["saved"]
    assert len(saved) == 2 * 7 * 2
    assert all(name.endswith(("up.weight", "down.weight")) for name in saved)
    rewards = runs["stream"]["rewards"]
    assert rewards[-1] > rewards[0] + 0.15
    # The engine has the policy's codes, and sums in another order.
    assert runs["stream"]["error"] < 0.1
    assert runs["stream"]["different_codes"] == 0
    divergence = sum(runs["stream"]["divergences"])
    assert 0 <= divergence < sum(runs["stream"]["bf16_divergences"]) / 5
    assert list(runs["resumed"]) == [2, 3]
    assert runs["resumed"].items() <= runs["first"].items()


@pytest.mark.long
def test_the_example_of_fp8_weights_trains(device: str) -> None:
    script = ROOT / "examples" / "fp8_weights.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(RANKS), str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={"GLOO_SOCKET_IFNAME": "lo", **os.environ},
    )
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", done.stdout))
    assert last < 0.3 * first


@pytest.mark.long
def test_the_gallery_can_be_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "tools")
    import gallery

    gallery.main(["--steps", "2", "--out", str(tmp_path)])
    runs = json.loads((tmp_path / "gallery.json").read_text())["runs"]
    assert list(runs) == ["bf16", "current", "delayed", "mxfp8"]
    assert (tmp_path / "gallery.svg").read_text().startswith("<?xml")
    for name in ("current", "delayed"):
        assert runs[name]["weight_bytes"] == runs["bf16"]["weight_bytes"] / 2


def test_the_gallery_describes_the_runs_that_it_shows() -> None:
    figures = ROOT / "docs" / "figures"
    text = (ROOT / "docs" / "gallery.md").read_text()
    for name, run in json.loads((figures / "gallery.json").read_text())["runs"].items():
        assert f"{run['held_out'][-1][1]:.3f}" in text, name
