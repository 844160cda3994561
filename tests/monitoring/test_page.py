"""The script in docs/monitor.md runs, and its other code blocks continue it."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fp8rs
from internals import debug_of

PAGE = Path(__file__).parents[2] / "docs" / "monitor.md"
#: Enough steps for each branch of the page. The whole run takes half a minute.
STEPS = 6


class Logger:
    """Stands for the loggers that the page calls."""

    def __init__(self):
        self.values = {}

    def add_scalar(self, name, value, step):
        self.values[name, step] = value

    def log(self, values, step):
        self.values.update({(name, step): value for name, value in values.items()})


@pytest.mark.newest_torch
def test_code_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "range(101)" in script
    names = {"__name__": "__main__"}
    exec(script.replace("range(101)", f"range({STEPS})"), names)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in printed] == [
        list(record[:2]) for record in names["monitor"].worst(3)
    ]
    assert len(names["statistics"]) == 4 * 7 * 18
    for code in others:
        assert code.startswith("# Continues this page's first block")
        names["monitor"] = fp8rs.monitor(names["model"], every=1)
        names["model"].loss(names["text"][:65].view(1, -1)).backward()
        logger = Logger()
        tensorboard = SimpleNamespace(SummaryWriter=lambda logger=logger: logger)
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
        wandb = SimpleNamespace(init=lambda logger=logger: logger)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        names["monitor"].latest = names["statistics"]
        exec(code, names)
        if "plot" in code:
            assert Path("run.png").read_bytes().startswith(b"\x89PNG")
        elif "high_precision" not in code:
            assert len(logger.values) == 4 * 7 * 18
            assert all(math.isfinite(value) for value in logger.values.values())
    assert all(
        debug_of(m).high_precision == (False,) * 3
        for m in names["model"].modules()
        if isinstance(m, fp8rs.Float8Linear)
    )
