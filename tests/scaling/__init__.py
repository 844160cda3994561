"""Tests of the step tracker, histories and reductions."""
