"""Tests of the linear layer: results, gradients, compilation."""
