"""Tests of FP8 weights."""
