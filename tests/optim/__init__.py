"""Tests of the optimizers for FP8 weights."""
