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
    problems = []
    if not NAME.fullmatch(wheel.name):
        problems.append(f"the name is not {NAME.pattern}")
    nbytes = wheel.stat().st_size
    if nbytes > MAX_BYTES:
        problems.append(f"it has {nbytes} bytes; the limit is {MAX_BYTES}")

    with zipfile.ZipFile(wheel) as archive:
        wheel_files = {name for name in archive.namelist() if ".dist-info/" not in name}
        extension = ELFFile(io.BytesIO(archive.read(EXTENSION)))
    package_files = {EXTENSION}
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".py", ".pyi") or path.name == "py.typed":
            package_files.add(f"fp8rs/{path.relative_to(PACKAGE)}")
    different_files = wheel_files ^ package_files
    if different_files:
        problems.append(f"its files differ from the package: {sorted(different_files)}")

    for problem in loading(extension):
        problems.append(f"{EXTENSION} {problem}")
    return problems


def loading(extension: ELFFile) -> list[str]:
    """Return the problems of an extension that affect loading."""
    problems = []
    sections = list(extension.iter_sections())

    # Libraries that the loader needs.
    (dynamic,) = (section for section in sections if isinstance(section, DynamicSection))
    needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    other_libraries = [name for name in needed if not LIBRARIES.fullmatch(name)]
    if other_libraries:
        problems.append(f"needs {other_libraries}")
    if list(dynamic.iter_tags("DT_RUNPATH")) or list(dynamic.iter_tags("DT_RPATH")):
        problems.append("has a path to search for libraries")

    # Versions of symbols, by the index that the symbol table refers to.
    library_of_version = {}
    for section in sections:
        if not isinstance(section, GNUVerNeedSection):
            continue
        for library, versions in section.iter_versions():
            for version in versions:
                library_of_version[version["vna_other"]] = library.name
                family, _, number = version.name.partition("_")
                if family not in NEWEST or tuple(map(int, number.split("."))) > NEWEST[family]:
                    problems.append(f"needs {version.name}")

    # Symbols that are exported, and those of the unwinder.
    (symbol_table,) = (
        section
        for section in sections
        if isinstance(section, SymbolTableSection) and section.name == ".dynsym"
    )
    (symbol_versions,) = (section for section in sections if isinstance(section, GNUVerSymSection))
    exported = []
    for index, symbol in enumerate(symbol_table.iter_symbols()):
        is_defined = symbol["st_shndx"] != "SHN_UNDEF"
        if is_defined and symbol["st_info"]["bind"] != "STB_LOCAL":
            exported.append(symbol.name)
        library_name = library_of_version.get(symbol_versions.get_symbol(index)["ndx"])
        if symbol.name.startswith("_Unwind_") and library_name != "libgcc_s.so.1":
            problems.append(f"has {symbol.name} from {library_name}, not from libgcc_s.so.1")
    if exported != ["PyInit__core"]:
        problems.append(f"exports {exported}, not only PyInit__core")

    # Every Rust panic raises. If the symbol is not undefined, an unwinder is linked in.
    names = {symbol.name for symbol in symbol_table.iter_symbols()}
    if "_Unwind_RaiseException" not in names:
        problems.append("contains an unwinder, but must use libgcc_s.so.1")
    return problems


def main() -> None:
    """Check the wheels that the command line names. Exit with the problems of the first bad one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    for wheel in parser.parse_args().wheels:
        problems = check(wheel)
        if problems:
            raise SystemExit("\n".join(f"{wheel.name}: {problem}" for problem in problems))
        print(f"{wheel.name}: {wheel.stat().st_size} bytes, no problems")


if __name__ == "__main__":
    main()
