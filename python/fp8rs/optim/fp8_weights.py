"""Operations on lists of FP8 weights, with one collective per mesh and one launch per kind.

Casting fp32 masters gives the same bytes as the quantizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rs._torch import increment_version
from fp8rs.optim.optim_param import OptimParam, UpdateKind
from fp8rs.quantize.planes import as_bytes
from fp8rs.quantize.spec import QuantSpec

if TYPE_CHECKING:  # fsdp imports torch.distributed.tensor, which takes seconds
    from fp8rs.fsdp.float8_shard import Float8ParamHandle
    from fp8rs.fsdp.sharded_model import ShardedModel

_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default


def reshard(params: Sequence[OptimParam]) -> None:
    """Reshard models whose FP8 weights are still gathered."""
    for param in params:
        if param.handle is not None and param.param is not param.local:
            param.handle.reshard()


def mark_written(params: Sequence[OptimParam]) -> None:
    """Record that a step has written these parameters without calling their operators.

    With delayed scaling, the scale is NaN only on a rank that found a non-finite value, so scales
    are synchronized. Other kinds of updates write the same scales on all ranks.
    """
    increment_version([param.param for param in params])
    for param in params:
        if param.handle is not None:
            param.handle.mark_written()

    for group in by_model(params):
        if group.sharded_model is None:
            continue
        delayed_handles = []
        for index in group.indices:
            if params[index].kind is UpdateKind.DELAYED_SCALE:
                delayed_handles.append(handle_of(params[index]))
        group.sharded_model.sync_scales(delayed_handles, in_step=True)


def codes_and_scales(param: OptimParam) -> list[Tensor]:
    """Return the codes and scales of a weight's local part, over the same memory."""
    tensors = []
    for plane in param.fp8_weight.planes:
        if plane is not None:
            tensors.append(as_bytes(plane.data))
            tensors.append(as_bytes(plane.scale))
    return tensors


# --- delayed scaling ------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class DelayedScale:
    """The scale to quantize a weight with, and where its amax is recorded.

    Attributes:
        scale: fp32, one element.
        amax: fp32, one element, on the weight's device. A step raises it to the weight's amax.
        remote_amax: the amax of delayed scaling's state if that is on another device, because the
            weight is offloaded. Else None, and ``amax`` is the state's.
    """

    scale: Tensor
    amax: Tensor
    remote_amax: Tensor | None = None


def delayed_scales(params: Sequence[OptimParam]) -> list[DelayedScale]:
    """Return the scale to quantize each weight of delayed scaling with.

    Args:
        params: weights on one device. Their histories are all on this device, or all on another one
            if the weights are offloaded.
    """
    if not params:
        return []
    next_scales: list[Tensor] = []
    amaxes: list[Tensor] = []
    for param in params:
        assert param.delayed is not None
        scale, amax = param.delayed
        next_scales.append(scale)
        amaxes.append(amax)

    is_offloaded = amaxes[0].device != params[0].plane.scale.device
    scales: Sequence[Tensor] = next_scales
    if is_offloaded or not all(param.has_next_scale for param in params):
        # A next scale of 0 means that none was computed yet. Keep the scale of the codes.
        codes_scales = torch.stack([param.plane.scale for param in params])
        stacked = torch.stack([scale.view(()) for scale in next_scales]).to(codes_scales.device)
        scales = torch.where(stacked > 0, stacked, codes_scales).unbind()

    if not is_offloaded:
        return [DelayedScale(scale, amax) for scale, amax in zip(scales, amaxes, strict=True)]
    results = []
    for scale, remote_amax in zip(scales, amaxes, strict=True):
        results.append(DelayedScale(scale, torch.zeros_like(scale), remote_amax))
    return results


def update_remote_amaxes(scales: Sequence[DelayedScale]) -> None:
    """Raise the amaxes of delayed scaling's state on another device to the amaxes of a step."""
    for scale in scales:
        remote_amax = scale.remote_amax
        if remote_amax is not None:
            remote_amax.copy_(remote_amax.maximum(scale.amax.to(remote_amax.device)))


# --- scales of several ranks ----------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class ModelParams:
    """The parameters of a list that belong to one sharded model.

    Attributes:
        sharded_model: the model. None for parameters that are not sharded.
        indices: their indices in the list.
    """

    sharded_model: ShardedModel | None
    indices: list[int]


def by_model(params: Sequence[OptimParam]) -> list[ModelParams]:
    """Group parameters by the sharded model that they belong to."""
    groups: dict[int, ModelParams] = {}
    for index, param in enumerate(params):
        sharded_model = param.sharded_model
        key = id(sharded_model)
        if key not in groups:
            groups[key] = ModelParams(sharded_model, [])
        groups[key].indices.append(index)
    return list(groups.values())


def handle_of(param: OptimParam) -> Float8ParamHandle:
    """Return the handle of a sharded FP8 weight."""
    assert param.handle is not None
    return param.handle


def reduce_amaxes_(params: Sequence[OptimParam], amaxes: Tensor) -> None:
    """Reduce the amaxes of local parts to the amaxes of whole weights, in place.

    There is one all-reduce per mesh.

    Args:
        params: weights with one scale; the same on all ranks.
        amaxes: the amaxes of the local parts, fp32, shape (n,).
    """
    for group in by_model(params):
        if group.sharded_model is None:
            continue
        handles = [handle_of(params[index]) for index in group.indices]
        if len(handles) == len(params):
            group.sharded_model.reduce_amaxes_(handles, amaxes)
        else:
            model_amaxes = [amaxes[index] for index in group.indices]
            reduced = torch.stack(model_amaxes)
            group.sharded_model.reduce_amaxes_(handles, reduced)
            torch._foreach_copy_(model_amaxes, list(reduced.unbind()))


def write_values_(params: Sequence[OptimParam], values: Sequence[Tensor]) -> None:
    """Quantize values of the local parts (fp32) into weights of any format."""
    for group in by_model(params):
        if group.sharded_model is not None:
            handles = [handle_of(params[index]) for index in group.indices]
            group.sharded_model.write_values(handles, [values[index] for index in group.indices])
        else:
            for index in group.indices:
                weight = params[index].fp8_weight
                weight.quantize_(values[index].view(weight.shape))


# --- casts of masters -----------------------------------------------------------------------------


def write_masters(params: Sequence[OptimParam], masters: Sequence[Tensor]) -> None:
    """Write masters into their weights. All ranks write the same weights, in the same order.

    Weights with one scale per tensor are cast in one launch, and their maxima are reduced in one
    collective per mesh. Weights of other formats are quantized one by one.

    Args:
        params: FP8 weights.
        masters: the masters of their local parts, fp32.
    """
    indices_by_kind: dict[tuple[UpdateKind, torch.device], list[int]] = {}
    for index, param in enumerate(params):
        indices_by_kind.setdefault((param.kind, param.local.device), []).append(index)

    for (kind, _), indices in indices_by_kind.items():
        kind_params = [params[index] for index in indices]
        kind_masters = [masters[index] for index in indices]
        if kind is UpdateKind.DELAYED_SCALE:
            cast_with_delayed_scales(kind_params, kind_masters)
        elif kind is UpdateKind.CURRENT_SCALE:
            amaxes = _multi_amax(kind_masters)
            reduce_amaxes_(kind_params, amaxes)
            cast_with_amaxes(kind_params, kind_masters, amaxes)
        else:
            write_values_(kind_params, kind_masters)


def cast_with_amaxes(
    params: Sequence[OptimParam],
    masters: Sequence[Tensor],
    amaxes: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Cast masters with the scales of their amaxes.

    Args:
        params: weights with one current scale.
        masters: the masters of their local parts, fp32.
        amaxes: the amaxes of the whole weights, fp32, shape (n,).
        found_inf: if it is not 0, the step was skipped, and codes and scales stay.
    """
    planes = [param.plane for param in params]
    stored_scales = [plane.scale.view(()) for plane in planes]
    scales = scales_from(amaxes, [param.fp8_weight.spec for param in params])
    if found_inf is not None:
        scales = torch.where(found_inf.view(()) != 0, torch.stack(stored_scales), scales)
    _multi_quantize(masters, scales, [plane.data for plane in planes])
    torch._foreach_copy_(stored_scales, list(scales.unbind()))


def cast_with_delayed_scales(params: Sequence[OptimParam], masters: Sequence[Tensor]) -> None:
    """Cast masters with the next scales of delayed scaling, and record their amaxes."""
    planes = [param.plane for param in params]
    next_scales = delayed_scales(params)
    recorded_amaxes = [next_scale.amax.view(()) for next_scale in next_scales]
    amaxes = torch.stack(recorded_amaxes)
    scales = _multi_quantize_delayed(
        masters,
        torch.stack([next_scale.scale for next_scale in next_scales]),
        amaxes,
        [plane.data for plane in planes],
    )
    torch._foreach_copy_(recorded_amaxes, list(amaxes.unbind()))
    update_remote_amaxes(next_scales)
    torch._foreach_copy_([plane.scale.view(()) for plane in planes], list(scales.unbind()))


def scales_from(amaxes: Tensor, specs: Sequence[QuantSpec]) -> Tensor:
    """Return the scales (n,) of amaxes (n,). Consecutive weights with one spec share a launch."""
    scales = []
    start = 0
    for spec, equal_specs in groupby(specs):
        end = start + len(list(equal_specs))
        scales.append(spec.scale_from_amax(amaxes[start:end]))
        start = end
    return scales[0] if len(scales) == 1 else torch.cat(scales)
