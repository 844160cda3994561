"""Tests of the clock, of histories and of reductions."""
