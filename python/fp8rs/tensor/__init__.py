"""Quantized tensors: formats, planes, tensor classes, operators and views."""

from fp8rs.tensor import aten as aten
from fp8rs.tensor import collectives as collectives
