"""Build the checked-in PTX and machine code from src/cuda/kernels/*.cu, or check them.

    python tools/build_ptx.py            # rebuild src/cuda/ptx/*.lzma and src/cuda/cubin/*/*.lzma
    python tools/build_ptx.py --check    # compile, compare the PTX, assemble what the record lacks
    python tools/build_ptx.py --check --all  # assemble every module for every target

The compiler (NVRTC 12.4, whose PTX 8.4 requires driver 550) and the assemblers are wheels from
PyPI, pinned below and stored in target/ptx-tools. No CUDA toolkit is required. The output depends
only on the sources and the pinned versions, so a second build produces the same bytes.

With machine code, the driver does not compile at first use. PTX covers other devices and drivers.
Machine code comes from the oldest assembler that supports all targets, because drivers of CUDA 12
reject code from CUDA 13. Both are stored compressed, 1 MB instead of 17, and compared after
decompression, because compressors differ. target/ptx/ has the PTX as text.

Assembling takes most of the time of a check, and its result depends on the PTX and the assemblers
alone. src/cuda/cubin/assembled.json has the digests of each module's PTX and machine code, which
were assembled for all targets without spills. A check without --all assembles only modules whose
digests differ from these.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "src" / "cuda" / "kernels"
PTX = ROOT / "src" / "cuda" / "ptx"
PTX_TEXT = ROOT / "target" / "ptx"
CUBIN = ROOT / "src" / "cuda" / "cubin"
RECORD = CUBIN / "assembled.json"
TOOLS = ROOT / "target" / "ptx-tools"

COMPILER = ["nvidia-cuda-nvrtc-cu12==12.4.127"]
#: Creates the machine code.
ASSEMBLER = ["nvidia-cuda-nvcc-cu12==12.8.93"]
#: Also runs in the check, like the compiler of a new driver.
NEWEST_ASSEMBLER = ["nvidia-cuda-nvcc==13.0.88"]

TARGET = "compute_89"
#: Devices with machine code (`Target` in src/cuda/image.rs).
MACHINE_CODE_FOR = ("sm_89", "sm_90", "sm_100")
#: Devices for which the newest ptxas must assemble without spills.
ASSEMBLE_FOR = ("sm_90", "sm_120")


def fetch(name: str, packages: list[str]) -> Path:
    """Return the folder with these wheels unpacked. Download them from PyPI the first time."""
    folder = TOOLS / name
    stamp = folder / ".fetched"
    names = " ".join(packages)
    if not stamp.exists() or stamp.read_text() != names:
        print(f"fetching {names}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), *packages], check=True)
        stamp.write_text(names)
    return folder


def find(folder: Path, pattern: str) -> Path:
    """Return the file with that name below a folder."""
    paths = sorted(folder.rglob(pattern))
    if not paths:
        raise SystemExit(f"{folder} has no {pattern}")
    return paths[0]


class Compiler:
    """NVRTC through ctypes."""

    def __init__(self, folder: Path) -> None:
        ctypes.CDLL(str(find(folder, "libnvrtc-builtins.so.*")), mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(find(folder, "libnvrtc.so.*")))
        headers = sorted(KERNELS.glob("*.cuh"))
        self.header_names = [header.name.encode() for header in headers]
        self.header_texts = [header.read_bytes() for header in headers]

    def compile(self, source: Path) -> bytes:
        """Compile a source to PTX. Raise SystemExit with the compiler's message if it fails."""
        lib = self.lib
        program = ctypes.c_void_p()
        count = len(self.header_names)
        self._check(
            lib.nvrtcCreateProgram(
                ctypes.byref(program),
                source.read_bytes(),
                source.name.encode(),  # without a path, which PTX would contain
                count,
                (ctypes.c_char_p * count)(*self.header_texts),
                (ctypes.c_char_p * count)(*self.header_names),
            )
        )
        options = [
            f"--gpu-architecture={TARGET}".encode(),
            b"--std=c++17",
            b"-default-device",
            # Required for equal bytes: IEEE division, subnormals, no contraction.
            b"--ftz=false",
            b"--prec-div=true",
            b"--fmad=false",
        ]
        status = lib.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = self._text(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog)
        if log.strip(b"\0\n "):
            print(f"{source.name}:\n{log.decode()}", file=sys.stderr)
        if status != 0:
            raise SystemExit(f"{source.name} does not compile")
        ptx = self._text(program, lib.nvrtcGetPTXSize, lib.nvrtcGetPTX)
        lib.nvrtcDestroyProgram(ctypes.byref(program))

        # Remove the NUL and the compiler's comments, which the driver does not read.
        lines = []
        for line in ptx.rstrip(b"\0").split(b"\n"):
            if not line.startswith(b"//"):
                lines.append(line.rstrip())
        return b"\n".join(lines).strip(b"\n") + b"\n"

    def _text(
        self, program: ctypes.c_void_p, size_of: Callable[..., int], get: Callable[..., int]
    ) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_of(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(get(program, buffer))
        return buffer.raw[: size.value]

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise SystemExit(f"NVRTC failed with code {code}")


def assemble(ptxas: Path, ptx: Path, target: str, verbose: bool) -> tuple[bytes, list[str]]:
    """Return a module's machine code, and its problems: errors, spills, local memory."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        result = subprocess.run(
            [str(ptxas), "-v", f"-arch={target}", str(ptx), "-o", str(cubin)],
            capture_output=True,
            text=True,
        )
        report = result.stdout + result.stderr
        if result.returncode:
            return b"", [f"{ptx.name} on {target}: {report}"]
        code = cubin.read_bytes()

    problems = []
    entry = "?"
    report_count = 0
    for line in report.splitlines():
        begins_entry = re.search(r"Compiling entry function '(\w+)'", line)
        if begins_entry:
            entry = begins_entry[1]
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", line)
        if memory:
            report_count += 1
            if memory.groups() != ("0", "0"):
                problems.append(f"{entry} on {target}: {line.strip()}")
        registers = re.search(r"Used (\d+) registers.*", line)
        if registers and verbose:
            print(f"{target} {entry}: {registers[0]}")

    # Another ptxas may word its reports differently. A missing report must not pass as no spills.
    entry_count = len(re.findall(r"\.entry\s", ptx.read_text()))
    if report_count != entry_count:
        problems.append(
            f"{ptx.name} on {target}: {report_count} reports of spills for {entry_count} entries"
        )
    return code, problems


@dataclass(frozen=True)
class Job:
    """A module to assemble for a device, and whether its machine code is stored."""

    ptxas: Path
    ptx: Path
    target: str
    is_stored: bool


def compress(code: bytes) -> bytes:
    """Compress code with LZMA, which finds similar code far apart. A third of deflate's size."""
    return lzma.compress(code, format=lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME)


def keep(path: Path, code: bytes, check: bool) -> list[str]:
    """Compare the file at ``path`` with ``code``. If they differ, write it, or report it."""
    if path.exists() and lzma.decompress(path.read_bytes()) == code:
        return []
    if check:
        return [f"{path.relative_to(ROOT)} differs from its source: rebuild it"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress(code))
    return []


def digest(code: bytes) -> str:
    """Return the SHA-256 digest of code."""
    return hashlib.sha256(code).hexdigest()


def digests(module: str, ptx: bytes) -> dict[str, str]:
    """Return the record of a module, with the digests of its PTX and of its stored machine code."""
    record = {
        "assemblers": " ".join([*ASSEMBLER, *NEWEST_ASSEMBLER, *ASSEMBLE_FOR]),
        "ptx": digest(ptx),
    }
    for target in MACHINE_CODE_FOR:
        path = CUBIN / target / f"{module}.lzma"
        record[target] = digest(lzma.decompress(path.read_bytes())) if path.exists() else ""
    return record


def main() -> None:
    """Build or check the modules that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--all", action="store_true", help="with --check, assemble every module")
    parser.add_argument("--verbose", action="store_true", help="show each kernel's registers")
    parser.add_argument("modules", nargs="*", help="names of sources; all by default")
    arguments = parser.parse_args()

    compiler = Compiler(fetch("nvrtc", COMPILER))
    ptxas = find(fetch("nvcc-12", ASSEMBLER), "ptxas")
    newest_ptxas = find(fetch("nvcc", NEWEST_ASSEMBLER), "ptxas")
    ptxas.chmod(0o755)
    newest_ptxas.chmod(0o755)
    PTX_TEXT.mkdir(parents=True, exist_ok=True)

    sources = sorted(KERNELS.glob("*.cu"))
    if arguments.modules:
        sources = [source for source in sources if source.stem in arguments.modules]
    else:
        built_modules = {path.stem for path in [*PTX.glob("*.lzma"), *CUBIN.glob("*/*.lzma")]}
        without_source = built_modules - {source.stem for source in sources}
        if without_source:
            raise SystemExit(f"these modules have no source: {sorted(without_source)}")

    # Compile all modules, and assemble those that the record does not have.
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    problems: list[str] = []
    jobs: list[Job] = []
    compiled: dict[str, bytes] = {}
    for source in sources:
        module = source.stem
        ptx = compiler.compile(source)
        path = PTX_TEXT / f"{module}.ptx"
        path.write_bytes(ptx)
        ptx_problems = keep(PTX / f"{module}.lzma", ptx, arguments.check)
        if ptx_problems:
            problems += ptx_problems
            continue
        if arguments.check and not arguments.all and record.get(module) == digests(module, ptx):
            continue
        compiled[module] = ptx
        for target in MACHINE_CODE_FOR:
            jobs.append(Job(ptxas, path, target, is_stored=True))
        for target in ASSEMBLE_FOR:
            jobs.append(Job(newest_ptxas, path, target, is_stored=False))

    def run(job: Job) -> tuple[bytes, list[str]]:
        return assemble(job.ptxas, job.ptx, job.target, arguments.verbose)

    with ThreadPoolExecutor(2) as pool:
        for job, (code, job_problems) in zip(jobs, pool.map(run, jobs), strict=True):
            problems += job_problems
            if job.is_stored and not job_problems:
                stored = CUBIN / job.target / f"{job.ptx.stem}.lzma"
                problems += keep(stored, code, arguments.check)
    if problems:
        raise SystemExit("\n".join(problems))

    updated = dict(record)
    for module, ptx in compiled.items():
        updated[module] = digests(module, ptx)
    new_record = {}
    for module in sorted(updated):
        if (KERNELS / f"{module}.cu").exists():
            new_record[module] = updated[module]
    if arguments.check and new_record != record:
        raise SystemExit(f"{RECORD.relative_to(ROOT)} is outdated: run tools/build_ptx.py")
    RECORD.write_text(json.dumps(new_record, indent=1) + "\n")
    verb = "compared" if arguments.check else "built"
    targets = ", ".join(dict.fromkeys([*MACHINE_CODE_FOR, *ASSEMBLE_FOR]))
    print(f"{verb} {len(sources)} modules; assembled {len(compiled)} for {targets} without spills")


if __name__ == "__main__":
    main()
