"""Tests of the tensor-parallel styles that gather in FP8."""
