"""What the site has beside docs/: a hook of mkdocs (`hooks` in mkdocs.yml).

Pages of the repository (README and others) are pages of the site, and links from page to page lead
there in both places. A link from a page to any other file of the repository leads to a copy of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

#: Pages of the repository, and what they are called in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benches/RESULTS.md": "results.md",
}

#: Where copies of other files are.
SOURCES = "source"

LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?\)")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
FENCE = re.compile(r"\s*(```|~~~)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages, and the files that pages lead to."""
    pages = {page: page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    for source, name in PAGES.items():
        pages[ROOT / source] = name
        text = (ROOT / source).read_text()
        files.append(File.generated(config, name, content=adapted(text, ROOT / source, name)))
    for page in pages:
        for match in LINK.finditer(page.read_text()):
            target = (page.parent / match[2]).resolve()
            if (
                target.is_file()
                and target not in pages
                and (ROOT in target.parents and DOCS not in target.parents)
            ):
                name = f"{SOURCES}/{target.relative_to(ROOT).as_posix()}.txt"
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, abs_src_path=str(target)))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    """Adapt the pages of docs/; those of the repository are already."""
    name = page.file.src_uri
    return markdown if name in PAGES.values() else adapted(markdown, DOCS / name, name)


def adapted(text: str, source: Path, name: str) -> str:
    """A page as the site has it.

    Args:
        text: of the page, as it is written for the repository.
        source: where it is there.
        name: where it is in the site.
    """
    up = "../" * name.count("/")

    def lead(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.is_file() or ROOT not in target.parents:
            return match[0]  # which mkdocs reports
        path = target.relative_to(ROOT).as_posix()
        if path in PAGES:
            path = PAGES[path]
        elif DOCS in target.parents:
            path = target.relative_to(DOCS).as_posix()
        else:
            path = f"{SOURCES}/{path}.txt"
        return f"{match[1]}{up}{path}{match[3] or ''})"

    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            line = LINK.sub(lead, line)
            # A list may follow a line of text, as everywhere but in Python-Markdown.
            if ITEM.match(line) and lines and lines[-1].strip() and not in_list(lines):
                lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def in_list(lines: list[str]) -> bool:
    """Whether the last of these lines belongs to a list's item."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
    return False
