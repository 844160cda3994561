"""Tests of quantized tensors: planes, operations, views."""
