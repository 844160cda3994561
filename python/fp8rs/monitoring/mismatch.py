"""The difference between the log-probabilities of a trainer and of an inference engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mismatch:
    """How far an engine's distribution is from the trainer's, estimated on tokens that it sampled.

    All tensors are fp32, on the device of the inputs. Tokens outside of the mask count as equal.

    Attributes:
        kl: the estimate of KL(engine || trainer), (), the mean over tokens.
        max_log_ratio: the largest |log-ratio| of a token, ().
        kl_per_sequence: the mean over each sequence's tokens, (sequences,).
        log_ratio_per_sequence: the sum of each sequence's log-ratios, (sequences,), which is the
            logarithm of its importance weight.
        kl_per_token: the estimate of each token, (sequences, tokens).
    """

    kl: Tensor
    max_log_ratio: Tensor
    kl_per_sequence: Tensor
    log_ratio_per_sequence: Tensor
    kl_per_token: Tensor


@torch.no_grad()
def mismatch(
    logprobs_trainer: Tensor, logprobs_engine: Tensor, mask: Tensor | None = None
) -> Mismatch:
    """Compare the log-probabilities that a trainer and an engine give to sampled tokens.

    With the log-ratio r = trainer - engine of a token that the engine sampled, the estimate of its
    KL divergence is exp(r) - 1 - r, which is not negative and has no bias (Schulman, "Approximating
    KL Divergence", 2020, estimator k3). Libraries for reinforcement learning log the same values.
    Nothing is read on the host.

    Args:
        logprobs_trainer: (sequences, tokens), or (tokens,) for one sequence; floating-point.
        logprobs_engine: the same shape. The engine sampled the tokens.
        mask: bool, the same shape: the tokens that the engine sampled. The default is all tokens.

    Raises:
        ValueError: the shapes differ, or have no or more than two dimensions.
        TypeError: log-probabilities are not floating-point, or ``mask`` is not bool.
    """
    arguments = {"logprobs_trainer": logprobs_trainer, "logprobs_engine": logprobs_engine}
    for name, logprobs in arguments.items():
        if not isinstance(logprobs, Tensor) or not logprobs.is_floating_point():
            kind = logprobs.dtype if isinstance(logprobs, Tensor) else type(logprobs).__name__
            raise TypeError(f"{name} must be a floating-point tensor, not {kind}")
    shape = logprobs_trainer.shape
    if len(shape) not in (1, 2):
        raise ValueError(
            f"logprobs_trainer has shape {tuple(shape)}; it must be (sequences, tokens) or "
            "(tokens,)"
        )
    if logprobs_engine.shape != shape:
        raise ValueError(
            f"logprobs_engine has shape {tuple(logprobs_engine.shape)}, but logprobs_trainer has "
            f"{tuple(shape)}"
        )
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=logprobs_trainer.device)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, but logprobs_trainer has {tuple(shape)}"
        )

    if mask.dim() == 1:
        mask = mask.unsqueeze(0)
    difference = logprobs_trainer.float() - logprobs_engine.float()
    # Padding may be infinite or NaN on either side.
    log_ratio = torch.where(mask, difference.view(mask.shape), 0.0)
    # expm1 keeps the digits of small ratios, which exp(r) - 1 would lose.
    kl_per_token = torch.expm1(log_ratio) - log_ratio

    tokens_per_sequence = mask.sum(-1).clamp(min=1)
    return Mismatch(
        kl=kl_per_token.sum() / mask.sum().clamp(min=1),
        max_log_ratio=log_ratio.abs().amax() if log_ratio.numel() else log_ratio.new_zeros(()),
        kl_per_sequence=kl_per_token.sum(-1) / tokens_per_sequence,
        log_ratio_per_sequence=log_ratio.sum(-1),
        kl_per_token=kl_per_token,
    )
