"""The README's commands exist and its quick start runs as it stands, and pages lead to pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import demo_jobs
from fp8rs.demo.launch import launch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def script() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return code


def quick_start() -> str:
    """The script's second part, which is all that a script of another model needs."""
    head, _, second, _ = re.split(r"(?m)^(?=# \d\. )", script())
    needed = re.findall(
        r"^(?:import torch|from (?:fp8rs|torch\.distributed\.fsdp) .+)$", head, re.M
    )
    return "\n".join([*needed, "", second.strip()])


@pytest.mark.long
def test_the_script_trains_as_the_page_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"^    torchrun (.+) train.py$", README, re.MULTILINE)
    (tmp_path / "train.py").write_text(script())
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split(), "train.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=tmp_path,
        env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[0] > 5
    assert losses[-1] < 1.5
    assert "8 linear layers converted" in done.stderr


def test_figures_are_those_of_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from figures import speeds

    assert len(speeds(README)) == 8
    measured = (ROOT / "benches" / "RESULTS.md").read_text()
    table = README.split("| times bf16 |")[1].split("\n\n")[0]
    numbers = re.findall(r"\b\d\d,\d{3}\b|\b\d\d\.\d GB", table)
    assert len(numbers) > 20
    for number in numbers:
        figure = number.replace("14.5 GB", "14.48").replace(" GB", "")
        assert re.search(rf"(?<![\d.]){re.escape(figure)}", measured), number


def test_quick_start_is_ten_lines() -> None:
    assert len(quick_start().split("\n\n", 1)[1].splitlines()) + 3 <= 10


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_quick_start_trains(ranks: int) -> None:
    device = "cpu"
    if torch.cuda.is_available():
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs: FSDP2 shards over the GPUs where there are some")
        device = "cuda"
    arguments = {"code": quick_start(), "device": device}
    for losses in launch(demo_jobs.quick_start, arguments, ranks=ranks, device=device):
        assert losses[-1] < 0.8 * losses[0]


def test_targets_and_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:`|^    )make ([a-z-]+)", README, re.MULTILINE)
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    scripts = re.findall(r"python (benches/\S+)", README)
    assert targets and links and scripts
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in links:
        assert (ROOT / link).is_file(), link
    for script in scripts:
        assert (ROOT / script).is_file(), script


def anchors(page: Path) -> set[str]:
    """What links may name after a #: the headings, as they are written in addresses."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.newest_torch
@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benches/*.md")],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), (link, anchor)


@pytest.mark.newest_torch
def test_the_compile_tables_have_the_rows_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in their cells takes minutes to find: tools/compile_table.py --check."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import compile_table as tool

    tests = "".join((ROOT / name).read_text() for name in tool.FILES)
    of_recipes = re.findall(r"^def (test_\w+)\(.*\brecipe\b", tests, re.MULTILINE)
    assert {name for _, name, _ in tool.ROWS} == set(of_recipes)
    _, *tables = re.split(r"^### .+$", tool.PAGE.body(), flags=re.MULTILINE)
    assert tables
    for table in tables:
        head, _, *rows = tool.cells(table)
        assert [row[0] for row in rows] == [text for text, _, _ in tool.ROWS]
        assert all(len(row) == len(head) for row in rows)


def test_rows_that_a_machine_skips_stay_as_another_has_measured_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import compile_table as tool

    (first, *_), (last, *_) = tool.ROWS[0], tool.ROWS[-1]
    results = tool.Results(columns={"current": 0})
    for text, _, _ in tool.ROWS:
        results.cells["cuda", text, "current"] = ("yes", "")
    measured = results.table("cuda")
    for text in (first, last):
        results.cells["cuda", text, "current"] = ("skipped", "needs 2 GPUs")
    found = {row[0]: row[1] for row in tool.cells(results.table("cuda", measured))[2:]}
    assert found[first] == found[last] == "yes"
    found = {row[0]: row[1] for row in tool.cells(results.table("cuda", ""))[2:]}
    assert found[first] == found[last] == "skipped"
    results.cells["cuda", last, "current"] = ("**no**", "an error")
    found = {row[0]: row[1] for row in tool.cells(results.table("cuda", measured))[2:]}
    assert found[last] == "**no**"
