"""Tests of GEMM operands."""
