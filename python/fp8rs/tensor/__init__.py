"""Quantized tensors: formats, planes, the tensor classes, what operators do to them, views."""

from fp8rs.tensor import aten as aten
from fp8rs.tensor import collectives as collectives
