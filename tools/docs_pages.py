"""Adds the repository's pages to the documentation site. A hook of mkdocs (`hooks` in mkdocs.yml).

README.md, a notebook and other pages of the repository become pages of the site. Links between
pages work in both places. A link from a page to any other file of the repository leads to a copy of
that file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

#: Pages of the repository, and their names in the site.
PAGES = {
    "README.md": "index.md",
    "examples/train.ipynb": "notebook.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benches/RESULTS.md": "results.md",
    "benches/results/2026-11.md": "results-2026-11.md",
}

#: Pages for people who change the code or read measurements. A search lists other pages first.
INTERNALS = {"weight.md", "writes.md", "formats.md", "tested.md", "saving.md", "gallery.md"}
INTERNALS |= set(PAGES.values()) - {"index.md", "notebook.md"}

#: Folder of the copies of other files.
SOURCES = "source"

LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?\)")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
FENCE = re.compile(r"\s*(```|~~~)")
CONTINUES = re.compile(r"^```python\n# Continues train\.py of (\S+\.md)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the version to the site's name."""
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    config.site_name += f" {version}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages, and the files that pages link to."""
    pages = {page: page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    for source, name in PAGES.items():
        path = ROOT / source
        pages[path] = name
        content = adapted(markdown_of(path), path, name)
        files.append(File.generated(config, name, content=content))

    for page in pages:
        for match in LINK.finditer(page.read_text()):
            target = (page.parent / match[2]).resolve()
            is_in_repository = ROOT in target.parents and DOCS not in target.parents
            if target in pages or not is_in_repository or not target.is_file():
                continue
            name = f"{SOURCES}/{target.relative_to(ROOT).as_posix()}.txt"
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(target)))
    return files


def markdown_of(path: Path) -> str:
    """Return the Markdown of a page, or of a notebook with its stored outputs."""
    if path.suffix != ".ipynb":
        return path.read_text()
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![Output of the code above](data:image/png;base64,{image})")
            else:
                text = "".join(data["text/plain"]).rstrip()
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    """Adapt the pages of docs/. Pages of the repository are adapted in `on_files`."""
    name = page.file.src_uri
    if name in INTERNALS:
        page.meta["search"] = {"boost": 0.1}
    if name in PAGES.values():
        return markdown
    return adapted(markdown, DOCS / name, name)


def adapted(text: str, source: Path, name: str) -> str:
    """Return a page's text for the site.

    Args:
        text: text of the page in the repository.
        source: path of the page in the repository.
        name: name of the page in the site.
    """
    to_site_root = "../" * name.count("/")

    def link_script(match: re.Match[str]) -> str:
        script = os.path.relpath(ROOT / match[1], source.parent)
        return f"Continues [`train.py`]({script}):\n\n{match[0]}"

    def site_link(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.is_file() or ROOT not in target.parents:
            return match[0]  # mkdocs reports it
        path = target.relative_to(ROOT).as_posix()
        if path in PAGES:
            path = PAGES[path]
        elif DOCS in target.parents:
            path = target.relative_to(DOCS).as_posix()
        else:
            path = f"{SOURCES}/{path}.txt"
        anchor = match[3] or ""
        return f"{match[1]}{to_site_root}{path}{anchor})"

    lines: list[str] = []
    in_code = False
    for line in CONTINUES.sub(link_script, text).splitlines():
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code:
            line = LINK.sub(site_link, line)
            # Python-Markdown requires an empty line before a list. GitHub does not.
            if ITEM.match(line) and lines and lines[-1].strip() and not in_list(lines):
                lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def in_list(lines: list[str]) -> bool:
    """Return whether the last of these lines belongs to a list item."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
    return False
