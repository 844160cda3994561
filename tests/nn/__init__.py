"""Tests of layers and modules: results, gradients, compilation."""
