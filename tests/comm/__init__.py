"""Tests of the collectives that `fp8rs.comm` sets."""
