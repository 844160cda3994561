"""Norms and gated activations that return their result quantized, for modules in eager mode.

A norm or an activation in front of FP8 linear layers would write its result in high precision, and
the layers would read it twice: for its amax, and to quantize it. Here one operator returns the FP8
planes, which the layers take as their quantized input. It finds the amax while it computes:

    norm(x)              -> _quantize_norm         -> q, k and v; gate and up
    activation(gate)*up  -> _quantize_glu          -> down
    its gradient         -> _quantize_glu_backward -> the backwards of gate and up

Numbers are those of the composition up to the rounding of the norm and the activation, which the
operators compute in fp32.

Compiled code is fused by the compiler and stays a composition. So does every call whose layers do
not quantize their input with one scale per tensor (`_input_quantization`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8rs._torch import autocast_dtype, gradients_needed, has_tangent
from fp8rs.model.linear_spec import GRAD, INPUT, LinearSpec, spec_for
from fp8rs.quantize.formats import INPUT_DTYPES
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.plane_storage import Delayed, PlaneStorage
from fp8rs.tensor.quantized import QuantizedTensor, wrap

from .backward import refuse_double_backward
from .function import prefers_high_precision
from .linear import Float8Linear

_quantize_norm = torch.ops.fp8rs._quantize_norm.default
_quantize_glu = torch.ops.fp8rs._quantize_glu.default
_quantize_glu_backward = torch.ops.fp8rs._quantize_glu_backward.default
_rms_norm_backward = torch.ops.aten._fused_rms_norm_backward.default
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default

#: The operators' names of the gated activations.
GLU = {"swiglu": "silu", "geglu": "gelu_tanh"}


# --- when to fuse ---------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Quantization:
    """How one operand of a layer is quantized in one call.

    Attributes:
        spec: the format, with one scale per tensor.
        delayed: with delayed scaling, the scale, and the slot that is raised to the amax.
        columnwise: whether wgrad needs the columnwise plane.
    """

    spec: QuantSpec
    delayed: Delayed | None
    columnwise: bool

    @property
    def scale(self) -> Tensor | None:
        """With delayed scaling, the scale."""
        return None if self.delayed is None else self.delayed[0]

    @property
    def amax(self) -> Tensor | None:
        """With delayed scaling, the slot for the amax."""
        return None if self.delayed is None else self.delayed[1]

    def wrap(self, row: Tensor, col: Tensor, scale: Tensor, like: Tensor) -> QuantizedTensor:
        """Return codes as a tensor with the shape and dtype of ``like``."""
        format = self.spec.format
        columnwise = Plane(col, scale, format) if self.columnwise else None
        # A delayed scale is NaN if the values are not finite, so layers use the scale of the codes.
        slots = None if self.delayed is None else (scale, self.delayed[1])
        storage = PlaneStorage(Plane(row, scale, format), columnwise, self.spec, slots)
        return wrap(storage, like.shape, like.dtype)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a hook could see or replace a module's input, output or gradients."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_plain(x: Any) -> bool:
    """Return whether an activation is a plain tensor of a supported dtype, outside autocast."""
    return (
        type(x) is Tensor
        and x.dim() > 0
        and x.dtype in INPUT_DTYPES
        and not x.is_nested
        and (x.is_cuda or x.device.type == "cpu")
        and autocast_dtype(x.device.type) is None
        and not has_tangent(x)
    )


def _fp8_spec(layer: nn.Module, x: Tensor) -> LinearSpec | None:
    """Return the spec of a layer that could take a quantized ``x``, or None.

    Such a layer computes all its GEMMs on FP8 operands with one scale per tensor, on the weight
    that it has now: nothing gathers, replaces or observes it.
    """
    if not isinstance(layer, Float8Linear) or type(layer).forward is not Float8Linear.forward:
        return None
    if layer._fp8_debug is not None or layer._fp8_reduce is not None or _has_hooks(layer):
        return None
    weight = layer._parameters.get("weight")
    plain_weight = type(weight) is nn.Parameter or isinstance(weight, QuantizedTensor)
    if not plain_weight or cast(Tensor, weight).dtype != x.dtype:
        return None

    spec = spec_for(layer._fp8_state.key, x.device)
    if any(spec.high_precision) or prefers_high_precision(spec, x):
        return None
    for operand in (spec.input, spec.grad):
        if not operand.format.per_tensor or operand.group is not None:
            return None
    if spec.wgrad_input is not None or spec.save_input:
        return None
    return spec


def _quantization(
    layer: Float8Linear, role: int, spec: QuantSpec, columnwise: bool
) -> _Quantization | None:
    """Return how a layer quantizes an operand. None if delayed scaling has no scale for it yet."""
    state = layer._fp8_state.delayed
    if state is None:
        return _Quantization(spec, None, columnwise)
    slots = layer._begin_delayed(state)
    if not slots.ready[role]:
        return None
    return _Quantization(spec, (slots.scales[role], slots.amax_of(role)), columnwise)


def _input_quantization(x: Any, layers: Sequence[nn.Module]) -> _Quantization | None:
    """Return how to quantize the input of layers, or None if they compose it in high precision.

    This is where every condition for fused operators is.

    Args:
        x: the tensor that the input is computed from, in the dtype of the input.
        layers: the layers that the input is passed to, unchanged.
    """
    if not is_plain(x) or nn.modules.module._has_any_global_hook():
        return None
    spec = None
    for layer in layers:
        layer_spec = _fp8_spec(layer, x)
        # Equal specs are one object. Comparing two by value takes several microseconds.
        if layer_spec is None or (spec is not None and layer_spec is not spec):
            return None
        spec = layer_spec
    assert spec is not None

    needs_wgrad = any(cast(Float8Linear, layer).weight.requires_grad for layer in layers)
    columnwise = needs_wgrad and torch.is_grad_enabled()
    # The first layer's scale is used, as if it had quantized the input for the others.
    first = cast(Float8Linear, layers[0])
    return _quantization(first, INPUT, spec.input, columnwise)


# --- norms ----------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _NormCall:
    """The arguments of a norm that are not tensors to differentiate.

    Attributes:
        centered: whether it is a LayerNorm.
        eps: the epsilon.
        quantization: how the result is quantized.
    """

    centered: bool
    eps: float
    quantization: _Quantization


def norm_for(
    norm: nn.Module, x: Tensor, layers: Sequence[nn.Module], *, within: nn.Module | None = None
) -> Tensor:
    """Compute ``norm(x)`` for layers that it is passed to, quantized if they would quantize it.

    Args:
        norm: an RMSNorm or LayerNorm over the last dim.
        x: (..., features).
        layers: the linear layers that the result is passed to, and nothing else.
        within: the module that passes the result to the layers, if it is called in between.
    """
    call = None
    if not torch.compiler.is_compiling() and (within is None or not _has_hooks(within)):
        call = _norm_call(norm, x, layers)
    if call is None:
        y: Tensor = norm(x)
        return y
    weight = norm._parameters["weight"]
    bias = norm._parameters.get("bias")
    out: Tensor = _Norm.apply(x, weight, bias, call)
    return out


def _norm_call(norm: nn.Module, x: Tensor, layers: Sequence[nn.Module]) -> _NormCall | None:
    """Return the arguments of a fused norm, or None if the norm is called by itself."""
    if type(norm) not in (nn.RMSNorm, nn.LayerNorm) or _has_hooks(norm):
        return None
    quantization = _input_quantization(x, layers)
    if quantization is None or norm.eps is None:
        return None
    if norm.normalized_shape != (x.shape[-1],):
        return None
    for parameter in norm._parameters.values():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or parameter.dtype != x.dtype:
            return None
    centered = type(norm) is nn.LayerNorm
    return _NormCall(centered, cast(float, norm.eps), quantization)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _NormCall
    ) -> QuantizedTensor:
        quantization = call.quantization
        spec = quantization.spec
        row, col, scale, mean, rstd = _quantize_norm(
            x,
            weight,
            bias,
            call.centered,
            call.eps,
            spec.fp8_dtype,
            True,
            quantization.columnwise,
            spec.power_2_scale,
            spec.amax_epsilon,
            quantization.scale,
            quantization.amax,
        )
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.call = call
        return quantization.wrap(row, col, scale, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("fused norms")
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs = gradients_needed(ctx)[:3]
        shape = x.shape[-1:]
        if not x.is_cuda:
            # torch has no backward of RMSNorm by itself on the CPU, and that of LayerNorm needs
            # statistics in the dtype of the input.
            norm = partial(_high_precision_norm, ctx.call)
            return *_recomputed_gradients(norm, (x, weight, bias), needs, dy), None
        if ctx.call.centered:
            gradients = _layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, needs)
        else:
            gradients = *_rms_norm_backward(dy, x, shape, rstd, weight, needs[:2]), None
        dx, dw, db = (
            gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)
        )
        return dx, dw, db, None


def _high_precision_norm(
    call: _NormCall, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Compute a norm that is not quantized."""
    if call.centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, call.eps)
    return F.rms_norm(x, x.shape[-1:], weight, call.eps)


# --- gated activations ----------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _GluCall:
    """The arguments of a gated activation that are not tensors to differentiate.

    Attributes:
        activation: the operator's name of the activation.
        quantization: how the result is quantized.
        gradients: how the gradients of gate and up are quantized. None if they are in high
            precision.
    """

    activation: str
    quantization: _Quantization
    gradients: tuple[_Quantization, _Quantization] | None


def glu_for(
    activation: str,
    gate: Tensor,
    up: Tensor,
    gate_layer: nn.Module,
    up_layer: nn.Module,
    layer: nn.Module,
) -> Tensor | None:
    """Compute a gated activation for a layer, quantized, or return None if it is to be composed.

    Args:
        activation: the name of the activation, a key of `GLU`.
        gate: (..., features), the output of ``gate_layer``.
        up: (..., features), the output of ``up_layer``.
        gate_layer: the layer that computed the gate. Nothing else uses its output.
        up_layer: the layer that computed ``up``. Nothing else uses its output.
        layer: the layer that the result is passed to.
    """
    if torch.compiler.is_compiling() or not is_plain(up) or gate.dtype != up.dtype:
        return None
    quantization = _input_quantization(gate, [layer])
    if quantization is None:
        return None
    gradients = None
    if gate.requires_grad and up.requires_grad:
        gradients = _gradient_quantizations(gate, (gate_layer, up_layer))
    out: Tensor = _Glu.apply(gate, up, _GluCall(GLU[activation], quantization, gradients))
    return out


def _gradient_quantizations(
    dy: Tensor, layers: tuple[nn.Module, nn.Module]
) -> tuple[_Quantization, _Quantization] | None:
    """Return how gate and up quantize the gradients of their outputs, or None.

    None if a layer does not read a quantized gradient: it has a bias, whose gradient is a sum of
    the values, or would not quantize the gradient with one scale. Also None if the layers differ.
    """
    quantizations: list[_Quantization] = []
    for layer in layers:
        spec = _fp8_spec(layer, dy)
        if spec is None or getattr(layer, "bias", None) is not None:
            return None
        assert isinstance(layer, Float8Linear)
        quantization = _quantization(layer, GRAD, spec.grad, layer.weight.requires_grad)
        if quantization is None:
            return None
        quantizations.append(quantization)

    # One operator quantizes both gradients, with the same options.
    gate, up = quantizations
    if gate.spec is not up.spec or gate.columnwise != up.columnwise:
        return None
    return gate, up


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, call: _GluCall) -> QuantizedTensor:
        quantization = call.quantization
        spec = quantization.spec
        row, col, scale = _quantize_glu(
            gate,
            up,
            call.activation,
            spec.fp8_dtype,
            True,
            quantization.columnwise,
            spec.power_2_scale,
            spec.amax_epsilon,
            quantization.scale,
            quantization.amax,
        )
        ctx.save_for_backward(gate, up)
        ctx.call = call
        return quantization.wrap(row, col, scale, gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("fused activations")
        gate, up = ctx.saved_tensors
        call: _GluCall = ctx.call
        needs = gradients_needed(ctx)[:2]
        if call.gradients is None or not all(needs):
            glu = partial(_high_precision_glu, call.activation)
            return *_recomputed_gradients(glu, (gate, up), needs, dy), None

        to_gate, to_up = call.gradients
        spec = to_gate.spec
        gate_row, gate_col, gate_scale, up_row, up_col, up_scale = _quantize_glu_backward(
            gate,
            up,
            dy,
            call.activation,
            spec.fp8_dtype,
            True,  # the rowwise planes, for dgrad
            to_gate.columnwise,
            spec.power_2_scale,
            spec.amax_epsilon,
            to_gate.scale,
            to_gate.amax,
            to_up.scale,
            to_up.amax,
        )
        d_gate = to_gate.wrap(gate_row, gate_col, gate_scale, gate)
        d_up = to_up.wrap(up_row, up_col, up_scale, up)
        return d_gate, d_up, None


def _high_precision_glu(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Compute a gated activation that is not quantized."""
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated * up


# --- backwards in high precision ------------------------------------------------------------------


def _recomputed_gradients(
    compute: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    dy: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of a function's inputs by autograd, which computes its output again.

    Args:
        compute: the function, in high precision.
        inputs: its arguments. An argument without a value needs no gradient.
        needs: whether each input needs a gradient. The result is None for those that do not.
        dy: the gradient of the output.
    """
    leaves: list[Tensor | None] = []
    differentiated: dict[int, Tensor] = {}  # by index
    for index, tensor in enumerate(inputs):
        leaf = None if tensor is None else tensor.detach()
        if leaf is not None and needs[index]:
            differentiated[index] = leaf.requires_grad_()
        leaves.append(leaf)
    with torch.enable_grad():
        y = compute(*leaves)

    gradients: list[Tensor | None] = [None] * len(leaves)
    computed = torch.autograd.grad(y, list(differentiated.values()), dy)
    for index, gradient in zip(differentiated, computed, strict=True):
        gradients[index] = gradient
    return gradients
