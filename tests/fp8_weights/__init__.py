"""Tests of weights that are FP8 at rest."""
