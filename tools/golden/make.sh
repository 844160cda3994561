#!/bin/sh
# Makes tests/golden/*.bin anew, byte for byte. Needs g++ and a Python with pip; everything else comes pinned
# from PyPI into a temporary folder. No GPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../../tests/golden}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Only the headers: cuda_fp8.h, and what it includes.
python3 -m pip install --quiet --no-deps --target "$work/cuda" \
    nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-cccl-cu12==12.9.27
include=$work/cuda/nvidia
g++ -O1 -I "$include/cuda_runtime/include" -I "$include/cuda_nvcc/include" -I "$include/cuda_cccl/include" \
    -o "$work/cuda_fp8" "$here/cuda_fp8.cpp"
"$work/cuda_fp8" >"$out/cuda_fp8.bin"

python3 -m pip install --quiet --target "$work/python" numpy==2.2.6 ml_dtypes==0.5.4
PYTHONPATH=$work/python python3 "$here/ml_dtypes_codes.py" >"$out/ml_dtypes.bin"
