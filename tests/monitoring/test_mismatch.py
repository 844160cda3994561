"""The KL estimate between a trainer and an inference engine."""

from __future__ import annotations

import pytest
import torch

from fp8rs.monitoring import mismatch


def sampled(device, sequences=256, tokens=64, noise=0.1):
    """Return log-probabilities of sampled tokens, and the KL divergence of the distributions."""
    torch.manual_seed(0)
    engine = torch.randn(tokens, 50, dtype=torch.float64).log_softmax(-1)
    trainer = (engine + noise * torch.randn(tokens, 50, dtype=torch.float64)).log_softmax(-1)
    kl = (engine.exp() * (engine - trainer)).sum(-1).mean()
    drawn = torch.multinomial(engine.exp(), sequences, replacement=True).t()
    positions = torch.arange(tokens)
    return trainer[positions, drawn].to(device), engine[positions, drawn].to(device), kl.item()


def test_the_estimate_is_the_divergence(device):
    trainer, engine, kl = sampled(device, 4096)
    assert mismatch(trainer, engine).kl.item() == pytest.approx(kl, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_equal_their_definition(device, dtype):
    trainer, engine, _ = sampled(device, 5, 7)
    trainer = trainer.to(dtype)
    engine = engine.to(dtype)
    mismatches = mismatch(trainer, engine)
    ratio = trainer.double() - engine.double()
    kl = ratio.exp() - 1 - ratio
    close = {"rtol": 1e-3, "atol": 1e-6}
    torch.testing.assert_close(mismatches.kl_per_token.double(), kl, **close)
    torch.testing.assert_close(mismatches.kl_per_sequence.double(), kl.mean(-1), **close)
    torch.testing.assert_close(mismatches.log_ratio_per_sequence.double(), ratio.sum(-1), **close)
    torch.testing.assert_close(mismatches.kl.double(), kl.mean(), **close)
    torch.testing.assert_close(mismatches.max_log_ratio.double(), ratio.abs().max(), **close)
    assert {value.dtype for value in vars(mismatches).values()} == {torch.float32}


def test_equal_distributions_have_no_mismatch(device):
    logprobs, _, _ = sampled(device, 3, 4)
    mismatches = mismatch(logprobs, logprobs.clone())
    for name, value in vars(mismatches).items():
        assert not value.any(), name


def test_small_differences_keep_their_digits(device):
    engine = torch.full((1000,), -2.0, device=device, dtype=torch.float64)
    mismatches = mismatch(engine + 1e-3, engine)
    assert mismatches.kl.item() == pytest.approx(5e-7, rel=0.1)
    assert mismatches.kl_per_sequence.shape == (1,)


def test_masked_tokens_do_not_count(device):
    trainer, engine, _ = sampled(device, 4, 6)
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    mask[2] = False
    expected = mismatch(trainer[mask], engine[mask])
    trainer[~mask] = float("nan")
    engine[~mask] = float("-inf")
    mismatches = mismatch(trainer, engine, mask)
    torch.testing.assert_close(mismatches.kl, expected.kl)
    torch.testing.assert_close(mismatches.max_log_ratio, expected.max_log_ratio)
    assert mismatches.kl_per_sequence[2] == 0
    assert not mismatches.kl_per_token[~mask].any()


def test_no_tokens_have_no_mismatch(device):
    for shape in ((0,), (0, 4), (3, 0)):
        mismatches = mismatch(torch.zeros(shape, device=device), torch.zeros(shape, device=device))
        assert mismatches.kl.item() == 0 == mismatches.max_log_ratio.item()


def test_arguments_are_checked():
    values = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"logprobs_engine has shape \(3, 2\), but"):
        mismatch(values, values.t())
    with pytest.raises(ValueError, match=r"logprobs_trainer has shape \(1, 2, 3\); it must be"):
        mismatch(values[None], values[None])
    with pytest.raises(ValueError, match=r"mask has shape \(3,\)"):
        mismatch(values, values, torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask must be bool, not torch\.float32"):
        mismatch(values, values, values)
    with pytest.raises(TypeError, match=r"logprobs_engine must be .* not torch\.int64"):
        mismatch(values, values.long())
    with pytest.raises(TypeError, match=r"logprobs_trainer must be .* not list"):
        mismatch([0.0], values)
