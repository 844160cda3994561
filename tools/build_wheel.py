"""Build the release wheel into dist/: abi3 (Python 3.10 and newer), manylinux2014, and check it.

    python tools/build_wheel.py                    # for this machine's processor
    python tools/build_wheel.py aarch64            # requires rustup's target

Requires maturin and ziglang from PyPI in the same environment. zig links against the glibc version
of manylinux2014.

By default, zig links its own unwinder (LLVM's) into the wheel. Errors of our operators pass through
our frames as C++ exceptions of torch, which use libgcc's unwinder. With two unwinders, the first
error ends the process. The linker therefore gets a libgcc_s.so.1. An empty library suffices,
because a linker reads only its name and the names and versions of its symbols.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

#: Symbols of libgcc_s.so.1 that Rust's standard library uses, by the version that added them.
#: x86_64 and aarch64 have equal versions (libgcc's libgcc-std.ver).
UNWINDER = {
    "GCC_3.0": (
        *("_Unwind_DeleteException", "_Unwind_GetDataRelBase", "_Unwind_GetIP"),
        *("_Unwind_GetLanguageSpecificData", "_Unwind_GetRegionStart", "_Unwind_GetTextRelBase"),
        *("_Unwind_RaiseException", "_Unwind_Resume", "_Unwind_SetGR", "_Unwind_SetIP"),
    ),
    "GCC_3.3": ("_Unwind_Backtrace", "_Unwind_FindEnclosingFunction", "_Unwind_GetCFA"),
    "GCC_4.2.0": ("_Unwind_GetIPInfo",),
}


def unwinder(machine: str) -> Path:
    """Build an empty libgcc_s.so.1 to link against."""
    folder = ROOT / "target" / "unwinder" / machine
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "u.c"
    versions = folder / "u.map"
    library = folder / "libgcc_s.so.1"

    functions = ""
    version_script = ""
    for version, symbols in UNWINDER.items():
        for symbol in symbols:
            functions += f"void {symbol}(void) {{}}\n"
        version_script += f"{version} {{ {'; '.join(symbols)}; }};\n"
    source.write_text(functions)
    versions.write_text(version_script)

    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.17"]
    link = ["-shared", "-nostdlib", f"-Wl,-soname,{library.name},--version-script,{versions}"]
    subprocess.run([*zig, *link, str(source), "-o", str(library)], check=True)
    return library


def build(machine: str) -> Path:
    """Build the wheel for a processor, and return its path."""
    target = f"{machine}-unknown-linux-gnu"
    for old_wheel in DIST.glob(f"*{machine}.whl"):
        old_wheel.unlink()

    maturin = [str(Path(sys.executable).with_name("maturin")), "build", "--release", "--locked"]
    maturin += ["--zig", "--compatibility", "manylinux2014"]
    maturin += ["--target", target, "--out", str(DIST)]
    rustc = ["--", "-C", f"link-arg={unwinder(machine)}"]
    # maturin runs ziglang with the first python3 on PATH.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    subprocess.run([*maturin, *rustc], check=True, cwd=ROOT, env={**os.environ, "PATH": path})
    (wheel,) = DIST.glob(f"*{machine}.whl")
    return wheel


def main() -> None:
    """Build the wheel for the machine that the command line names, and check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "machine", nargs="?", default=platform.machine(), choices=["x86_64", "aarch64"]
    )
    wheel = build(parser.parse_args().machine)
    subprocess.run([sys.executable, str(ROOT / "tools" / "check_wheel.py"), str(wheel)], check=True)


if __name__ == "__main__":
    main()
