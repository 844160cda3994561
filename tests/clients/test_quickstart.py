"""The script of docs/clients/accelerate.md, started as documented."""

from __future__ import annotations

import re

from harness import ROOT, need, torchrun

need("accelerate", "1.15")
need("transformers", "5.0")


def test_the_quickstarts_script_trains(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "clients" / "accelerate.md").read_text()
    script, *_ = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    code, output = torchrun([str(tmp_path / "train.py")])
    assert code == 0, output
    assert "14 linear layers converted" in output
    assert "14 linear layers converted" in page
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) > 3
    assert losses[-1] < 0.85 * losses[0]
    assert list((tmp_path / "state").iterdir())
