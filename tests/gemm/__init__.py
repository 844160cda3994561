"""Tests of what GEMMs are given."""
