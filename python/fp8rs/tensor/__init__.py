"""Quantized tensors: formats, planes, the tensor classes, what aten operators do to them, views."""
