"""Measure the error of FP8 gradients, and check that it only comes from the formats.

Trains the demo's model in fp32. On each of some batches, computes the gradients of all converted
weights with fp32 GEMMs, with fp8rs, and with a simulation in plain torch (tests/oracle: rounded
operands, fp32 accumulation). The relative error is the norm of the difference divided by the norm
of the fp32 gradients, over all weights. The ratio of the errors of fp8rs and of the simulation is
computed for each weight and batch. Its median must be within 2% of 1. A larger difference is a
defect of the kernels.

    python benches/gradient_error.py [--recipes current,delayed] [--dtypes bfloat16] [--json FILE]

With ``--tokens``, it instead measures the weight gradient of an expert by its number of tokens,
over which wgrad sums. The CPU sums exact products in fp32, so its error comes from quantization.
Hopper sums FP8 products with about 14 bits. The ratio of the two errors shows how much accuracy
that costs.

    python benches/gradient_error.py --tokens 256,4096,65536
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from meter import converted_weights
from torch import nn

from fp8rs import convert_to_float8_training
from fp8rs.demo.data import Corpus, load_corpus
from fp8rs.demo.model import Llama
from fp8rs.demo.train import (
    HIGH_PRECISION,
    Settings,
    build_model,
    make_optimizer,
    train_step,
)
from fp8rs.nn.functional import grouped_linear
from fp8rs.quantize.recipes import RECIPES, Float8BlockScaling, Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from oracle import compare, linear

#: Recipes by their short names, and options that affect rounding.
CHOSEN: dict[str, Recipe] = {}
for _name, _recipe_class in RECIPES.items():
    if _name != "tensorwise":  # Another name of current.
        CHOSEN[_name] = _recipe_class()
CHOSEN["block of squares"] = Float8BlockScaling(wgrad_input_block=(128, 128))


@dataclass(frozen=True)
class GradientError:
    """Relative errors of the gradients, and errors of the loss, compared with fp32 GEMMs.

    Attributes:
        recipe: a key of `CHOSEN`.
        dtype: dtype of activations.
        fp8rs: the error of fp8rs over all weights, the mean of the batches.
        simulated: the error of the simulation, likewise.
        ratio: the error of fp8rs divided by the error of the simulation, the median of all weights
            in all batches.
        loss_off_fp8rs: the loss of fp8rs minus the exact loss, the mean of the batches.
        loss_off_simulated: the loss of the simulation minus the exact loss, likewise.
    """

    recipe: str
    dtype: str
    fp8rs: float
    simulated: float
    ratio: float
    loss_off_fp8rs: float
    loss_off_simulated: float


def gradient_error(
    trained: Llama,
    batches: Sequence[torch.Tensor],
    name: str,
    dtype: torch.dtype = torch.float32,
    fast_accumulation: bool = False,
) -> GradientError:
    """Compare fp8rs with the simulation.

    Args:
        trained: an fp32 model. It is not changed.
        batches: int64 (rows, length + 1) on the model's device.
        name: a key of `CHOSEN`.
        dtype: dtype of activations, float32 or bfloat16. The exact gradients use weights rounded to
            it, so that the error excludes this rounding.
        fast_accumulation: let the forward GEMMs on CUDA accumulate with reduced precision, as
            recipes do by default. The simulation does not.
    """
    recipe = replace(CHOSEN[name], fast_accumulation=(fast_accumulation, False, False))
    plain_model = copy.deepcopy(trained).to(dtype)
    exact_model = copy.deepcopy(plain_model).float()
    simulated_model = simulate(plain_model, recipe)

    fp8_errors = []
    simulated_errors = []
    ratios = []
    fp8_losses_off = []
    simulated_losses_off = []
    for batch in batches:
        # Delayed scaling must not use the amaxes of an earlier batch.
        fp8_model = convert_to_float8_training(
            copy.deepcopy(plain_model), recipe=recipe, filter_fqns=HIGH_PRECISION, gemms="fp8"
        )
        exact_loss, exact = _gradients(exact_model, batch)
        fp8_loss, fp8 = _gradients(fp8_model, batch)
        simulated_loss, simulated = _gradients(simulated_model, batch)

        fp8_errors.append(compare.relative(_flat(fp8), _flat(exact)))
        simulated_errors.append(compare.relative(_flat(simulated), _flat(exact)))
        for exact_dw, fp8_dw, simulated_dw in zip(exact, fp8, simulated, strict=True):
            fp8_error = compare.relative(fp8_dw, exact_dw)
            simulated_error = compare.relative(simulated_dw, exact_dw)
            ratios.append(fp8_error / simulated_error)
        fp8_losses_off.append(fp8_loss - exact_loss)
        simulated_losses_off.append(simulated_loss - exact_loss)

    return GradientError(
        recipe=name,
        dtype=str(dtype).removeprefix("torch."),
        fp8rs=statistics.fmean(fp8_errors),
        simulated=statistics.fmean(simulated_errors),
        ratio=statistics.median(ratios),
        loss_off_fp8rs=statistics.fmean(fp8_losses_off),
        loss_off_simulated=statistics.fmean(simulated_losses_off),
    )


def simulate(model: Llama, recipe: Recipe) -> Llama:
    """Return a copy whose linear layers round their operands by a recipe, in plain torch."""
    model = copy.deepcopy(model)
    weight_names = converted_weights(model)
    # In the first batch, delayed scaling computes the same scales as current scaling.
    blocks = linear.blocks_of(recipe)
    for module_name, module in model.named_modules():
        if f"{module_name}.weight" in weight_names:
            assert isinstance(module, nn.Linear)
            forward = _simulated_forward(module, recipe, blocks)
            module.forward = forward  # type: ignore[method-assign]
    return model


def _simulated_forward(
    module: nn.Linear, recipe: Recipe, blocks: linear.Blocks
) -> Callable[[torch.Tensor], torch.Tensor]:
    grad_dtype = recipe.fp8_dtype("grad")

    def forward(x: torch.Tensor) -> torch.Tensor:
        return linear.linear(x, module.weight, module.bias, blocks, grad_dtype)

    return forward


def _gradients(model: nn.Module, batch: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Return the loss, and the gradients of all converted weights in fp32."""
    assert isinstance(model, Llama)
    parameters = dict(model.named_parameters())
    weights = [parameters[name] for name in sorted(converted_weights(model))]
    loss = model.loss(batch)
    gradients = torch.autograd.grad(loss, weights)
    return loss.item(), [gradient.float() for gradient in gradients]


def _flat(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def held_out_batches(settings: Settings, corpus: Corpus) -> list[torch.Tensor]:
    """Return the batches to compare on: one on the CPU, else so many that chance averages out."""
    if settings.device == "cuda":
        count = 16
        rows = settings.rows // 4
    else:
        count = 1
        rows = settings.rows

    batches = []
    for index in range(count):
        batch = corpus.held_out_batch(index, rows, settings.length)
        batches.append(batch.to(settings.device))
    return batches


def trained_model(settings: Settings) -> tuple[Llama, Corpus]:
    """Train the demo's model in fp32 without FSDP2. Return it and its text."""
    corpus = load_corpus()
    model = build_model(settings)
    optimizer = make_optimizer(model, settings)
    for step in range(settings.steps):
        batch = corpus.batch(settings.seed, step, settings.rows, settings.length)
        train_step(model, optimizer, settings, step, batch.to(settings.device))
    return model, corpus


@dataclass(frozen=True)
class WgradError:
    """Relative errors of an expert's weight gradient, compared with products in fp64.

    Attributes:
        tokens: number of tokens of the expert.
        mean: ratio of the means of inputs and gradients to their standard deviations.
        quantized: the error on the CPU, where products are exact and sums are in fp32.
        device: the error on the device that was measured.
    """

    tokens: int
    mean: float
    quantized: float
    device: float


def wgrad_error(tokens: int, mean: float, device: str, features: int = 512) -> WgradError:
    """Measure the gradient of an expert's weight (features, features).

    Columns of inputs and gradients have different magnitudes and, with a ``mean``, different means.
    Partial sums then grow with the number of tokens, instead of with its square root.
    """
    generator = torch.Generator().manual_seed(tokens)

    def values() -> torch.Tensor:
        x = torch.randn(tokens, features, generator=generator)
        x += mean * torch.randn(features, generator=generator)
        return (x * torch.randn(features, generator=generator).exp()).bfloat16()

    x = values()
    dy = values()
    exact = (dy.double().t() @ x.double()).float()

    def error_on(device: str) -> float:
        weight = torch.zeros(1, features, features, device=device, dtype=torch.float32)
        weight.requires_grad_()
        offs = torch.tensor([tokens], device=device, dtype=torch.int32)
        with torch.autocast(device, torch.bfloat16):
            y = grouped_linear(x.to(device), weight, offs, recipe="current")
        (dw,) = torch.autograd.grad(y, weight, dy.to(device))
        return compare.relative(dw[0].float().cpu().flatten(), exact.flatten())

    cpu_error = error_on("cpu")
    device_error = cpu_error if device == "cpu" else error_on(device)
    return WgradError(tokens, mean, quantized=cpu_error, device=device_error)


def measure_wgrad(options: argparse.Namespace) -> list[WgradError]:
    """Print a table of errors by the number of tokens."""
    print(f"| tokens | mean | quantization alone | {options.device} | ratio |")
    print("|---|---|---|---|---|")
    results = []
    for mean in (0.0, 0.1, 0.3, 1.0):
        for tokens in options.tokens:
            error = wgrad_error(tokens, mean, options.device)
            results.append(error)
            print(
                f"| {tokens} | {mean} | {error.quantized:.5f} | {error.device:.5f} "
                f"| {error.device / error.quantized:.3f} |",
                flush=True,
            )
    return results


def measure_gradients(options: argparse.Namespace) -> list[GradientError]:
    """Train the demo's model, and print a table of errors by recipe."""
    settings = Settings.choose(options.device, 1, options.steps)
    trained, corpus = trained_model(settings)
    batches = held_out_batches(settings, corpus)

    print("| recipe | activations | fp8rs | simulation | ratio | loss off | simulated |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for recipe in options.recipes:
        for dtype in options.dtypes:
            error = gradient_error(
                trained, batches, recipe, getattr(torch, dtype), options.fast_accumulation
            )
            results.append(error)
            print(
                f"| {recipe} | {dtype} | {error.fp8rs:.4f} | {error.simulated:.4f} "
                f"| {error.ratio:.4f} | {error.loss_off_fp8rs:+.5f} "
                f"| {error.loss_off_simulated:+.5f} |",
                flush=True,
            )
    return results


def main() -> int:
    """Train, compare and print. Return 1 if an error differs by more than 2%."""
    options = _options()
    results: list[WgradError] | list[GradientError]
    differs = False
    if options.tokens:
        results = measure_wgrad(options)
    else:
        results = measure_gradients(options)
        differs = any(abs(result.ratio - 1) > 0.02 for result in results)

    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    return 1 if differs else 0


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--recipes", type=names, default=list(CHOSEN))
    parser.add_argument("--dtypes", type=names, default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--tokens", type=numbers, help="measure wgrad of an expert instead")
    parser.add_argument("--fast-accumulation", action="store_true", help="in the forward, on CUDA")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    for name in options.recipes:
        if name not in CHOSEN:
            parser.error(f"no recipe {name!r}; there are {', '.join(CHOSEN)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
