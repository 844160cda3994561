"""Build the release wheel into dist/: abi3 (Python 3.10 and newer), manylinux2014, and check it.

    python tools/build_wheel.py                    # for this machine's processor
    python tools/build_wheel.py aarch64            # for another one: rustup has its target

Needs maturin and ziglang (both from PyPI) in the environment that runs this. zig links against the
old glibc that manylinux2014 promises.

zig would link its own unwinder (LLVM's) into the wheel. Errors of our operators pass through our
frames as C++ exceptions of torch's, which are libgcc's: with two unwinders in one process the first
error ends it. So the linker is given a libgcc_s.so.1 before. It is an empty one, made here: all
that a linker reads of a shared library is its name and the names and versions of its symbols.
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

#: What Rust's standard library takes of libgcc_s.so.1, by the version that brought it (the same for
#: x86_64 and aarch64: libgcc's libgcc-std.ver).
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
    """An empty libgcc_s.so.1 to link against."""
    folder = ROOT / "target" / "unwinder" / machine
    folder.mkdir(parents=True, exist_ok=True)
    source, versions, library = (folder / name for name in ("u.c", "u.map", "libgcc_s.so.1"))
    names = [name for symbols in UNWINDER.values() for name in symbols]
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    versions.write_text(
        "".join(f"{version} {{ {'; '.join(names)}; }};\n" for version, names in UNWINDER.items())
    )
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.17"]
    link = ["-shared", "-nostdlib", f"-Wl,-soname,{library.name},--version-script,{versions}"]
    subprocess.run([*zig, *link, str(source), "-o", str(library)], check=True)
    return library


def build(machine: str) -> Path:
    """Builds the wheel for a processor, and gives its path."""
    target = f"{machine}-unknown-linux-gnu"
    for old in DIST.glob(f"*{machine}.whl"):
        old.unlink()
    maturin = [str(Path(sys.executable).with_name("maturin")), "build", "--release", "--locked"]
    how = ["--zig", "--compatibility", "manylinux2014", "--target", target, "--out", str(DIST)]
    # maturin looks for ziglang in the first python3 on PATH.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    rustc = ["--", "-C", f"link-arg={unwinder(machine)}"]
    subprocess.run([*maturin, *how, *rustc], check=True, cwd=ROOT, env={**os.environ, "PATH": path})
    (wheel,) = DIST.glob(f"*{machine}.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "machine", nargs="?", default=platform.machine(), choices=["x86_64", "aarch64"]
    )
    wheel = build(parser.parse_args().machine)
    subprocess.run([sys.executable, str(ROOT / "tools" / "check_wheel.py"), str(wheel)], check=True)


if __name__ == "__main__":
    main()
