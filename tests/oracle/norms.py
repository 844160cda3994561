"""RMSNorm and LayerNorm in float32, one rounded operation at a time."""

import torch
from torch.nn.functional import pad

WARPS, THREADS, PER_THREAD = 8, 32, 8
LANES = WARPS * THREADS * PER_THREAD


def sum_halves(numbers):
    """Add the upper half of the last dimension to the lower half until one number is left."""
    while numbers.shape[-1] > 1:
        half = numbers.shape[-1] // 2
        numbers = numbers[..., :half] + numbers[..., half:]
    return numbers.squeeze(-1)


def row_sums(terms):
    """Sum each row in 2048 lanes, then over 8 lanes of each thread, 32 threads and 8 warps."""
    rows, cols = terms.shape
    padded = pad(terms, (0, -cols % LANES))
    lanes = torch.zeros(rows, LANES)
    for chunk in padded.split(LANES, 1):
        lanes = lanes + chunk
    threads = sum_halves(lanes.view(rows, WARPS, THREADS, PER_THREAD))
    return sum_halves(sum_halves(threads)).unsqueeze(1)


def norm(x, weight, bias, centered, eps):
    """Return the values in the dtype of ``x`` (rows, cols), means and rstds, on the CPU."""
    values = x.cpu().float()
    # Divide by tensors: with a Python number, torch may multiply by the reciprocal.
    cols = torch.tensor(float(x.shape[1]))
    mean = torch.zeros(len(x), 1)
    if centered:
        mean = row_sums(values) / cols
        values = values - mean
    squares = row_sums(values * values)
    # Torch's float32 square root is not always the nearest number. That of a double, rounded, is.
    root = (squares / cols + torch.tensor(eps)).double().sqrt().float()
    rstd = torch.ones(()) / root
    values = values * rstd
    if weight is not None:
        values = values * weight.cpu().float()
    if bias is not None:
        values = values + bias.cpu().float()
    return values.to(x.dtype), mean, rstd
