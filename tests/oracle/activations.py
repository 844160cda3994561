"""Gated activations in float32, one rounded operation at a time."""

import math

import torch


def fma(a, b, c):
    """a * b + c of float32 values, rounded once."""
    product = a.double() * b.double()  # exact, with 48 bits
    total = product + c
    # Round the float64 sum to odd, so that rounding it to float32 rounds the exact sum.
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    toward_error = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = error.isfinite() & (error != 0)
    bits = torch.where(inexact & (bits % 2 == 0), bits + toward_error, bits)
    return bits.view(torch.float64).float()


def exp(x):
    """e^x by 2^k times a polynomial of degree 5, with x clamped to [-87, 87]."""
    x = torch.where(x > 87, torch.full_like(x, 87.0), x)
    x = torch.where(x < -87, torch.full_like(x, -87.0), x)
    log2_e = torch.tensor(math.log2(math.e))
    rounded = fma(x, log2_e, torch.tensor(12582912.0))
    k = rounded - 12582912.0
    r = fma(x, log2_e, -k)
    p = torch.full_like(r, 0.00132647)
    for coefficient in (0.009671534, 0.05550734, 0.24022242, 0.693147, 1.0):
        p = fma(p, r, torch.tensor(coefficient))
    return (p.view(torch.int32) + (rounded.view(torch.int32) << 23)).view(torch.float32)


def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


def with_derivative(activation, x):
    one = torch.tensor(1.0)
    if activation == "silu":
        s = sigmoid(x)
        return x * s, s * fma(x, 1.0 - s, one)
    twice_root = torch.tensor(2 * math.sqrt(2 / math.pi))
    cubic = torch.tensor(0.044715)
    square = x * x
    s = sigmoid(twice_root * x * fma(square, cubic, one))
    slope = twice_root * fma(square, 3.0 * cubic, one)
    return x * s, fma(x, s * (1.0 - s) * slope, s)


def gated(activation, h, dy=None):
    """activation(gate) * up for h = (gate, up), or the gradient of h. In the dtype of h."""
    gate, up = h.float().chunk(2, 1)
    value, derivative = with_derivative(activation, gate)
    if dy is None:
        return (value * up).to(h.dtype)
    dy = dy.float()
    return torch.cat([dy * up * derivative, dy * value], 1).to(h.dtype)
