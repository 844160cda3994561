#!/usr/bin/env python3
"""Check that modules of the crate use only modules in lower layers.

    python tools/check_arrows.py [SRC]

The drawing in src/lib.rs has the layers. Reads the paths `crate::MODULE`, and `super::` if it
leaves a top-level module. Comments and tests (`#[cfg(test)]` modules at the end of a file) are
ignored, and so is src/tests.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: Layers from the top. Modules in one layer do not use each other.
ORDER = [
    ["python"],
    ["dlpack", "ops"],
    ["cpu", "cuda"],
    ["spec"],
    ["layout"],
    ["error"],
    ["format"],
]
LEVEL = {}
for _level, _names in enumerate(ORDER):
    for _name in _names:
        LEVEL[_name] = _level
#: Names that lib.rs exports, and their modules.
PUBLIC = {
    **dict.fromkeys(("Arg", "Error"), "error"),
    **dict.fromkeys(("Fp8Format", "Wide"), "format"),
    **dict.fromkeys(
        ("Block", "BlockFormat", "DType", "Device", "FORMATS", "View", "ViewMut", "packed"),
        "layout",
    ),
    **dict.fromkeys(("ScaleRule", "Stream"), "ops"),
}


def used(text: str, depth: int) -> set[str]:
    """Return the top-level modules that a file uses.

    Args:
        text: the source.
        depth: the number of modules that contain the file.
    """
    text = re.sub(r"//.*", "", text.partition("#[cfg(test)]\nmod tests")[0])
    above = f"(?:super::){{{depth}}}"
    modules: set[str] = set()
    for match in re.finditer(rf"\b(?:crate::|{above})(\{{[^;]*?\}}|\w+)", text):
        names = match[1]
        if names.startswith("{"):
            # Keep only names at the first level of the braces.
            flat = re.sub(r"::\{[^{}]*\}", "", names[1:-1])
            for name in flat.split(","):
                if name.strip():
                    modules.add(name.strip().split("::")[0])
        else:
            modules.add(names)
    return {PUBLIC.get(name, name) for name in modules}


def violations(source: Path) -> list[str]:
    """Return a line for each use of a module that is not in a lower layer."""
    lines = []
    for path in sorted(source.rglob("*.rs")):
        parts = path.relative_to(source).with_suffix("").parts
        module = parts[0]
        if module in ("lib", "tests"):
            continue
        depth = len(parts) - (parts[-1] == "mod")
        for name in sorted(used(path.read_text(), depth) & LEVEL.keys()):
            if name != module and LEVEL[name] <= LEVEL[module]:
                lines.append(f"{path}: {module} uses {name}, which is not below it")

    modules = {path.stem for path in source.iterdir()} - {"lib", "tests"}
    for name in sorted(modules - LEVEL.keys()):
        lines.append(f"{source / name}: not in the order")
    return lines


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    lines = violations(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "src")
    print("\n".join(lines) or "all arrows point down")
    sys.exit(1 if lines else 0)
