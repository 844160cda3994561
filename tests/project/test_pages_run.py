"""Pages' blocks of code and the examples run as they stand, on two ranks."""

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

from fp8rs.demo.launch import Job, launch

ROOT = Path(__file__).parents[2]
PAGES = ["docs/fp8-weights.md", "docs/checkpoints.md"]
RANKS = 2

pytestmark = [pytest.mark.timeout(900), pytest.mark.newest_torch]


@pytest.fixture
def device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs: FSDP2 shards over the GPUs where there are some")
    return "cuda"


def blocks_of_fp8_weights(page: Path) -> list[str]:
    if page.relative_to(ROOT).as_posix() not in PAGES:
        return []
    return [code for code in scripts(page) if "in the place of its part 2" in code]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_code_run(page: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    code = blocks_of_fp8_weights(ROOT / page)
    assert code
    job = Job("demo_jobs:page", {"blocks": code, "device": device}, device)
    for run in launch(job, RANKS, lambda _: None):
        # What a block leaves behind: the bytes a parameter at rest of each FP8 weight.
        assert len(run) == len(code)
        for at_rest in run:
            assert at_rest
            assert all(1 <= each < 1.07 for each in at_rest)


#: How a block begins that is no script of its own: with what it goes on from.
GOES_ON = re.compile(
    r"# Goes on from (?:(this page)'s first block|(\S+?)(?:'s train\.py)?)(?:, (.+))?$"
)

#: Clients' blocks are run by tests/clients, in the scripts that they are parts of.
ALL_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def scripts(page: Path) -> list[str]:
    text = page.read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL) if page.suffix == ".md" else [text]


def names_of(code: str) -> tuple[set[str], set[str]]:
    """What a text binds, and what it reads that it does not bind."""
    bound, read = set(), set()
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


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_block_stands_alone_or_says_what_it_goes_on_from(page: Path) -> None:
    for code in scripts(page):
        line, (_, missing) = code.split("\n", 1)[0], names_of(code)
        said = GOES_ON.fullmatch(line)
        if not said:
            assert not missing, (line, missing)
            continue
        source = page if said[1] else ROOT / said[2]
        bound, lacking = names_of(scripts(source)[0])
        assert not lacking
        assert missing <= bound, (line, missing - bound)


def going_on() -> list[list[str]]:
    """Blocks of pages after the parts of the README's script that they go on from."""
    head, *parts = re.split(r"(?m)^(?=# \d\. )", scripts(ROOT / "README.md")[0])
    first, second, third = parts
    third = third.replace("enumerate(batches, 1)", "enumerate(batches[:2], 1)")
    third = third.replace("dist.destroy_process_group()", "")
    unsharded = re.sub(r"(?m)^ *(fully_shard\(.*|for block in .*)\n", "", second)
    before = {
        "in the place of its part 2": (),
        "in the place of its part 2, with tokens = batches[0]": ("tokens = batches[0]",),
        "after its part 2": (second,),
        "after its part 2, without fully_shard": (unsharded,),
        "before its last line": (second, third),
    }
    found = []
    for page in ALL_PAGES:
        for code in scripts(page):
            said = GOES_ON.fullmatch(code.split("\n", 1)[0])
            # What some leave is looked at above; torchao need not be here.
            elsewhere = code in blocks_of_fp8_weights(page) or "torchao" in code
            if said and said[2] == "README.md" and not elsewhere:
                policy = "policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
                found.append([head + first, policy, *before[said[3]], code])
    return found


def test_blocks_that_go_on_from_the_readmes_script_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = going_on()
    assert len(code) > 10
    job = Job("demo_jobs:goes_on", {"blocks": code, "folder": str(tmp_path)}, "cpu")
    for failed in launch(job, RANKS, lambda _: None):
        assert not failed, "\n".join(failed)


@pytest.mark.long
def test_the_example_of_fp8_weights_trains(device: str) -> None:
    script = ROOT / "examples" / "fp8_weights.py"
    assert len(script.read_text().splitlines()) <= 60
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
def test_the_gallery_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "tools")
    import gallery

    gallery.main(["--steps", "2", "--out", str(tmp_path)])
    runs = json.loads((tmp_path / "gallery.json").read_text())["runs"]
    assert list(runs) == ["bf16", "current", "delayed", "mxfp8"]
    assert (tmp_path / "gallery.svg").read_text().startswith("<?xml")
    for name in ("current", "delayed"):
        assert runs[name]["weight_bytes"] == runs["bf16"]["weight_bytes"] / 2


def test_the_gallery_tells_of_the_runs_that_it_shows() -> None:
    figures = ROOT / "docs" / "figures"
    text = (ROOT / "docs" / "gallery.md").read_text()
    for name, run in json.loads((figures / "gallery.json").read_text())["runs"].items():
        assert f"{run['held_out'][-1][1]:.3f}" in text, name
