#!/usr/bin/env bash
# The release wheel, in dist/: abi3 (Python 3.10 and newer) and manylinux2014, under 10 MB.
#
# Needs maturin and ziglang (both from PyPI) on PATH, or in the virtual environment whose bin/ is
# first there. zig links against the old glibc that manylinux2014 promises.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -c 'import ziglang' 2>/dev/null || {
    echo "build_wheel.sh: ziglang is missing: pip install ziglang" >&2
    exit 1
}
rm -rf dist
maturin build --release --locked --strip --zig --compatibility manylinux2014 --out dist

wheel=(dist/*.whl)
name=$(basename "${wheel[0]}")
case $name in
*-cp310-abi3-manylinux2014_*.whl | *-cp310-abi3-manylinux_2_17_*.whl) ;;
*)
    echo "build_wheel.sh: $name is not abi3 and manylinux2014" >&2
    exit 1
    ;;
esac
size=$(stat -c %s "${wheel[0]}")
if ((size >= 10 * 1000 * 1000)); then
    echo "build_wheel.sh: $name has $size bytes; the limit is 10 MB" >&2
    exit 1
fi
echo "$name: $size bytes"
