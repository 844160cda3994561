"""Check a release wheel, and its extension as the dynamic loader sees it.

    python tools/check_wheel.py dist/*.whl

The extension must not contain an unwinder (see tools/build_wheel.py), must require only libraries
and symbol versions that every supported Linux has, and must export one symbol. The wheel must
contain only the package and be small.
"""

from __future__ import annotations

import argparse
import io
import re
import zipfile
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

PACKAGE = Path(__file__).resolve().parent.parent / "python" / "fp8rs"
EXTENSION = "fp8rs/_core.abi3.so"
NAME = re.compile(r"fp8rs-[\d.]+-cp310-abi3-manylinux2014_(\w+)\.manylinux_2_17_\1\.whl")
MAX_BYTES = 6_000_000
#: Libraries of glibc, including the loader, and libgcc. Every Linux that runs torch has them.
LIBRARIES = re.compile(r"lib(c|m|dl|pthread|rt|gcc_s)\.so\.\d|ld-linux-\S+")
NEWEST = {"GLIBC": (2, 17), "GCC": (4, 8, 0)}


def check(wheel: Path) -> list[str]:
    """Return the problems of a wheel."""
    wrong = []
    if not NAME.fullmatch(wheel.name):
        wrong.append(f"the name is not {NAME.pattern}")
    if (size := wheel.stat().st_size) > MAX_BYTES:
        wrong.append(f"it has {size} bytes; the limit is {MAX_BYTES}")
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        extension = ELFFile(io.BytesIO(archive.read(EXTENSION)))
    source = {
        f"fp8rs/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".pyi") or path.name == "py.typed"
    }
    if differ := names ^ (source | {EXTENSION}):
        wrong.append(f"its files differ from the package: {sorted(differ)}")
    return wrong + [f"{EXTENSION} {words}" for words in loading(extension)]


def loading(extension: ELFFile) -> list[str]:
    """Return the problems of an extension that affect loading."""
    wrong = []
    sections = list(extension.iter_sections())
    (dynamic,) = (s for s in sections if isinstance(s, DynamicSection))
    needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    if others := [name for name in needed if not LIBRARIES.fullmatch(name)]:
        wrong.append(f"needs {others}")
    if list(dynamic.iter_tags("DT_RUNPATH")) or list(dynamic.iter_tags("DT_RPATH")):
        wrong.append("has a path to search for libraries")

    versions = {}
    for section in sections:
        if isinstance(section, GNUVerNeedSection):
            for library, symbols in section.iter_versions():
                for symbol in symbols:
                    versions[symbol["vna_other"]] = library.name, symbol.name
    for _, version in versions.values():
        family, _, number = version.partition("_")
        if family not in NEWEST or tuple(map(int, number.split("."))) > NEWEST[family]:
            wrong.append(f"needs {version}")

    (table,) = (s for s in sections if isinstance(s, SymbolTableSection) and s.name == ".dynsym")
    (numbers,) = (s for s in sections if isinstance(s, GNUVerSymSection))
    exported = []
    for i, symbol in enumerate(table.iter_symbols()):
        defined = symbol["st_shndx"] != "SHN_UNDEF"
        if defined and symbol["st_info"]["bind"] != "STB_LOCAL":
            exported.append(symbol.name)
        library, _ = versions.get(numbers.get_symbol(i)["ndx"], (None, None))
        if symbol.name.startswith("_Unwind_") and library != "libgcc_s.so.1":
            wrong.append(f"has {symbol.name} from {library}, not from libgcc_s.so.1")
    if exported != ["PyInit__core"]:
        wrong.append(f"exports {exported}, not only PyInit__core")
    # Every Rust panic raises. If the symbol is not undefined, an unwinder is linked in.
    if not any(symbol.name == "_Unwind_RaiseException" for symbol in table.iter_symbols()):
        wrong.append("contains an unwinder, but must use libgcc_s.so.1")
    return wrong


def main() -> None:
    """Check the wheels that the command line names. Exit with the problems of the first bad one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    for wheel in parser.parse_args().wheels:
        if wrong := check(wheel):
            raise SystemExit("\n".join(f"{wheel.name}: {words}" for words in wrong))
        print(f"{wheel.name}: {wheel.stat().st_size} bytes, no problems")


if __name__ == "__main__":
    main()
