"""Print the changelog's section of the version in Cargo.toml, or the unreleased section.

python tools/release_notes.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def section(changelog: str, version: str) -> str:
    """Return the section with this title, or the section titled Unreleased."""
    _, *sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    by_title = {}
    for text in sections:
        title = text.split()[0].strip("[]")
        by_title[title] = text
    title = version if version in by_title else "Unreleased"
    return f"## {by_title[title]}"


if __name__ == "__main__":
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    print(section((ROOT / "CHANGELOG.md").read_text(), version), end="")
