"""Gated activations in float32, one rounded operation at a time."""

import math

import torch


def exp(x):
    """e^x by 2^k times a polynomial of degree 7, with x clamped to [-87, 87]."""
    x = torch.where(x > 87, torch.full_like(x, 87.0), x)
    x = torch.where(x < -87, torch.full_like(x, -87.0), x)
    rounded = x * torch.tensor(math.log2(math.e)) + 12582912.0
    k = rounded - 12582912.0
    r = x - k * torch.tensor(0.693359375)
    r = r - k * torch.tensor(-2.12194440e-4)
    p = torch.full_like(r, 1 / 5040)
    for n in (720, 120, 24, 6, 2, 1, 1):
        p = p * r + torch.tensor(1 / n)
    return (p.view(torch.int32) + (rounded.view(torch.int32) << 23)).view(torch.float32)


def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


def with_derivative(activation, x):
    if activation == "silu":
        s = sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    twice_root = torch.tensor(2 * math.sqrt(2 / math.pi))
    cubic = torch.tensor(0.044715)
    square = x * x
    s = sigmoid(twice_root * (x + cubic * (square * x)))
    slope = twice_root * (1.0 + (3.0 * cubic) * square)
    return x * s, s + x * (s * (1.0 - s) * slope)


def gated(activation, h, dy=None):
    """activation(gate) * up for h = (gate, up), or the gradient of h. In the dtype of h."""
    gate, up = h.float().chunk(2, 1)
    value, derivative = with_derivative(activation, gate)
    if dy is None:
        return (value * up).to(h.dtype)
    dy = dy.float()
    return torch.cat([dy * up * derivative, dy * value], 1).to(h.dtype)
