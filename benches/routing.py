"""Route tokens to experts by a fixed distribution, so that all variants compute the same rows."""

from __future__ import annotations

import torch
from torch import Tensor

#: Each expert gets a share proportional to 1 / n ** SKEW, if it is the n-th largest. The largest of
#: 128 experts gets 14 times the mean, the smallest 0.3 times.
SKEW = 0.8

ROUTINGS = ("balanced", "skewed")


def rows_per_expert(rows: int, experts: int, routing: str) -> list[int]:
    """Divide rows among experts.

    Rows are divided evenly if "balanced". If "skewed", the largest and the smallest experts are at
    random positions. If the rows are a multiple of 16, every part is a multiple of 16, as torchao
    requires.
    """
    unit = 16 if rows % 16 == 0 and rows >= 16 * experts else 1
    units = rows // unit
    weights = torch.ones(experts, dtype=torch.float64)
    if routing == "skewed":
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
        weights = (order + 1).double() ** -SKEW
    ends = (weights.cumsum(0) / weights.sum() * units).round().long()
    ends[-1] = units
    parts: list[int] = (ends.diff(prepend=ends.new_zeros(1)) * unit).tolist()
    return parts


def top_k_index(tokens: int, top_k: int, counts: list[int], seed: int = 0) -> Tensor:
    """Return the experts of each token (tokens, top_k), distinct for each token.

    Args:
        tokens: number of tokens.
        top_k: number of experts for each token.
        counts: the number of tokens for each expert. The sum is ``tokens * top_k``.
        seed: seed of the order of tokens.

    Raises:
        ValueError: an expert would get a token twice.
    """
    if sum(counts) != tokens * top_k or max(counts) > tokens:
        raise ValueError(
            f"{tokens} tokens with {top_k} experts each cannot give {max(counts)} rows to one "
            f"expert, and {sum(counts)} rows in total"
        )
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    return experts.view(top_k, tokens).t()[order].contiguous()
