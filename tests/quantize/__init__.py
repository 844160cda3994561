"""Tests of recipes and quantizers."""
