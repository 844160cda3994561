"""RMSNorm and LayerNorm in float32, one rounded operation at a time."""

import torch
from torch.nn.functional import pad

LANES, PER_THREAD = 256, 8


def row_sums(terms):
    """Sum each row in 256 lanes, then over 8 lanes of each thread, then over 32 threads.

    Each step adds the upper half of the numbers to the lower half.
    """
    rows, cols = terms.shape
    padded = pad(terms, (0, -cols % LANES))
    lanes = torch.zeros(rows, LANES)
    for chunk in padded.split(LANES, 1):
        lanes = lanes + chunk
    sums = lanes.view(rows, LANES // PER_THREAD, PER_THREAD)
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[:, :, :half] + sums[:, :, half:]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, :, 0]


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
