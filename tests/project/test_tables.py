"""The page of tested combinations, which tools/tested.py writes."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.newest_torch


def test_the_page_of_tested_combinations_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import tested

    assert tested.PAGE.read_text() == tested.text(), "run python tools/tested.py"


def test_a_renamed_test_of_a_client_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import tested

    with pytest.raises(ValueError, match="no test whose name begins with test_gone"):
        tested.tests_of(tested.PARTIES, ("test_ddp", "test_gone"))
