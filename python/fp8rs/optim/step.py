"""Groups the parameters of an AdamW step into calls of ``adamw_``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8rs.optim import fp8_weights
from fp8rs.optim.optim_param import OptimParam, UpdateKind
from fp8rs.quantize.spec import QuantSpec

_adamw = torch.ops.fp8rs.adamw_.default

#: The operator's list arguments, up to ``streams``.
_argument_names = [argument.name for argument in _adamw._schema.arguments]
LISTS = _argument_names[: _argument_names.index("streams") + 1]

#: The operator's keyword arguments, shared by the parameters of a group on one device.
Options = dict[str, Any]


@dataclass(slots=True)
class ParamUpdate:
    """A parameter in a step, with local tensors.

    Attributes:
        param: the parameter.
        grad, exp_avg, exp_avg_sq, step, master: its gradient and state.
        exp_avg_range, exp_avg_sq_range: the ranges of moments that are 8-bit codes, else None.
        is_new_master: whether it had no master before this step.
        index: its index in the optimizer, which selects its random numbers.
        options: the operator's keyword arguments for its group and device.
    """

    param: OptimParam
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    master: Tensor | None
    is_new_master: bool
    index: int
    options: Options
    exp_avg_range: Tensor | None = None
    exp_avg_sq_range: Tensor | None = None

    @property
    def has_8bit_moments(self) -> bool:
        """Whether the moments are stored in 8 bits."""
        return self.exp_avg_range is not None

    @property
    def kind(self) -> UpdateKind:
        """How the step writes the parameter."""
        kind = self.param.kind
        stochastic = self.master is not None and self.options["seed"] is not None
        # The cast of masters with one current scale rounds to nearest.
        if kind is UpdateKind.CURRENT_SCALE and stochastic:
            return UpdateKind.SEPARATE
        return kind

    @property
    def keeps_codes(self) -> bool:
        """Whether only the moments change, and the codes and scales of an FP8 weight do not.

        torch takes a step with a learning rate of 0 to create the state of a fresh optimizer.
        """
        is_zero_step = self.options["lr"] == 0 and self.options["lr_tensor"] is None
        return self.param.weight is not None and self.is_new_master and is_zero_step

    def of_matrices(self) -> list[ParamUpdate]:
        """Return an update for each matrix of a batch. They have the whole master."""
        shape = self.param.matrix_shape
        grads = self.grad.reshape(shape)
        exp_avgs = self.exp_avg.view(shape)
        exp_avg_sqs = self.exp_avg_sq.view(shape)
        updates = []
        for i in range(shape[0]):
            update = replace(self, grad=grads[i], exp_avg=exp_avgs[i], exp_avg_sq=exp_avg_sqs[i])
            if self.exp_avg_range is not None and self.exp_avg_sq_range is not None:
                update.exp_avg_range = self.exp_avg_range[i]
                update.exp_avg_sq_range = self.exp_avg_sq_range[i]
            updates.append(update)
        return updates


@dataclass(eq=False, slots=True)
class CopyBack:
    """A copy to make after the operator has written to ``source``."""

    destination: Tensor
    source: Tensor


class AdamWCall:
    """One call of the operator.

    Args:
        options: the keyword arguments, shared by all parameters of the call.
        spec: how scales are computed, if the operator computes them.
    """

    def __init__(self, options: Options, spec: QuantSpec | None = None) -> None:
        self.lists: dict[str, list[Any]] = {name: [] for name in LISTS}
        self._options: Options = {**options, "block": []}
        if spec is not None:
            self._options.update(
                block=list(spec.format.block),
                rounding=spec.scale_rounding,
                power_2_scale=spec.power_2_scale,
                amax_epsilon=spec.amax_epsilon,
                batched=spec.batched,
            )
        self._copies_back: list[CopyBack] = []

    def add(
        self,
        update: ParamUpdate,
        values: Tensor,
        master: Tensor | None = None,
        offset: int = 0,
        **scales: Tensor,
    ) -> None:
        """Append one parameter to the lists.

        Args:
            update: the gradient and state of the parameter.
            values: the values or codes to update. If needed, they are made contiguous.
            master: the master, in the shape of ``values``, or None.
            offset: the number of the first element (`OptimParam.element_offsets`).
            scales: tensors to append to other lists, by the name of the list.
        """
        # The tensors that the operator writes, by the name of their list.
        outputs = {
            "params": values,
            "exp_avgs": update.exp_avg,
            "exp_avg_sqs": update.exp_avg_sq,
        }
        if master is not None:
            outputs["masters"] = master

        lists = self.lists
        if update.exp_avg_range is not None and update.exp_avg_sq_range is not None:
            # Blocks of codes are parts of rows, so rows cannot be permuted.
            contiguous, copies_back = copy_contiguous(list(outputs.values()))
            grad = update.grad.contiguous()
            lists["exp_avg_ranges"].append(merge_ends(update.exp_avg_range))
            lists["exp_avg_sq_ranges"].append(merge_ends(update.exp_avg_sq_range))
        else:
            contiguous, grad, copies_back = make_contiguous(list(outputs.values()), update.grad)
        self._copies_back += copies_back

        for name, tensor in zip(outputs, contiguous, strict=True):
            lists[name].append(tensor)
        lists["grads"].append(grad)
        lists["steps"].append(update.step)
        lists["offsets"].append(offset)
        lists["streams"].append(update.index)
        for name, scale in scales.items():
            lists[name].append(scale)

    def add_codes(self, update: ParamUpdate, master: Tensor | None, **scales: Tensor) -> None:
        """Append the codes of an FP8 weight with one plane.

        A shard may have some rows of each matrix of a batch. With stochastic rounding, its matrices
        are appended one by one, because the random numbers depend on the position of each matrix in
        the whole weight.
        """
        plane = update.param.plane
        offsets = update.param.element_offsets
        if self._options["seed"] is None or len(offsets) == 1:
            self.add(update, plane.data, master, offsets[0], scales=plane.scale, **scales)
            return

        masters = None if master is None else master.view(update.param.matrix_shape)
        for i, matrix_update in enumerate(update.of_matrices()):
            codes = plane.matrix[i]
            matrix_master = None if masters is None else masters[i]
            self.add(matrix_update, codes, matrix_master, offsets[i], scales=plane.scale[i])

    def run(self) -> None:
        """Call the operator."""
        _adamw(**self.lists, **self._options)
        for copy in self._copies_back:
            copy.destination.copy_(copy.source)


def make_contiguous(
    tensors: list[Tensor], grad: Tensor
) -> tuple[list[Tensor], Tensor, list[CopyBack]]:
    """Return contiguous tensors, and the copies to make after they are written.

    If all tensors have the same permuted layout, permuting them back needs no copy.

    Args:
        tensors: tensors of one shape that are written.
        grad: a tensor of this shape that is only read.

    Returns:
        The contiguous ``tensors`` and ``grad``, and the copies to make afterwards.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return tensors, grad.contiguous(), []

    # Order the dimensions as the first tensor has them in memory.
    strides = tensors[0].stride()
    sizes = tensors[0].shape
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], -sizes[dim]))

    permuted = [tensor.permute(order) for tensor in tensors]
    contiguous, copies_back = copy_contiguous(permuted)
    return contiguous, grad.permute(order).contiguous(), copies_back


def copy_contiguous(tensors: list[Tensor]) -> tuple[list[Tensor], list[CopyBack]]:
    """Return row-major tensors, and the copies to make after they are written."""
    contiguous = []
    copies_back = []
    for tensor in tensors:
        contiguous.append(tensor.contiguous())
        if not tensor.is_contiguous():
            copies_back.append(CopyBack(tensor, contiguous[-1]))
    return contiguous, copies_back


def merge_ends(ranges: Tensor) -> Tensor:
    """View ranges (..., blocks, 2) as (..., 2 * blocks), without a copy."""
    *rows, blocks, ends = ranges.shape
    return ranges.view(*rows, blocks * ends)


@dataclass(eq=False, slots=True)
class SeparateWrite:
    """An FP8 weight that is quantized after the step.

    Attributes:
        update: the update of the weight.
        values: the values of its local part, fp32, which the step updates.
    """

    update: ParamUpdate
    values: Tensor


@dataclass(eq=False, slots=True)
class Backup:
    """A copy of codes or scales, which are restored if the step is skipped.

    Attributes:
        tensor: the codes or scales.
        before: their copy from before the step.
        found_inf: if it is not 0, the step is skipped.
    """

    tensor: Tensor
    before: Tensor
    found_inf: Tensor


class Step:
    """One step of all parameters on one device."""

    def __init__(self, updates: Sequence[ParamUpdate]) -> None:
        self._calls: dict[Any, AdamWCall] = {}
        self._current_scale: list[ParamUpdate] = []
        self._delayed_scale: list[ParamUpdate] = []
        self._separate: list[SeparateWrite] = []
        for update in updates:
            self._add(update)

    def _add(self, update: ParamUpdate) -> None:
        kind = update.kind
        master = update.master
        if kind is UpdateKind.PLAIN:
            self._call(kind, update, master).add(update, update.param.local, master)
        elif kind is UpdateKind.SEPARATE or update.keeps_codes:
            # Step the values like those of a plain parameter.
            values = master
            if values is None:
                values = update.param.fp8_weight.dequantize(torch.float32)
            self._call(UpdateKind.PLAIN, update, None).add(update, values)
            if not update.keeps_codes:
                self._separate.append(SeparateWrite(update, values))
        elif kind is UpdateKind.CURRENT_SCALE:
            self._current_scale.append(update)  # `_add_current_scale` adds all at once
        elif kind is UpdateKind.DELAYED_SCALE:
            self._delayed_scale.append(update)  # `run` adds all at once
        else:
            spec = update.param.fp8_weight.spec
            self._call(kind, update, master, spec).add_codes(update, master)

    def _call(
        self,
        kind: UpdateKind,
        update: ParamUpdate,
        master: Tensor | None,
        spec: QuantSpec | None = None,
    ) -> AdamWCall:
        """Return the call that `update` shares with updates of the same kind and arguments.

        Args:
            kind: how the operator writes the parameter.
            update: the options, and whether the moments are stored in 8 bits.
            master: the master that is passed to the operator, or None.
            spec: how scales are computed, if the operator computes them.
        """
        key = (kind, id(update.options), master is None, spec, update.has_8bit_moments)
        if key not in self._calls:
            self._calls[key] = AdamWCall(update.options, spec)
        return self._calls[key]

    def run(self) -> None:
        """Update all parameters, and write all codes."""
        amaxes = self._add_current_scale()
        delayed_scales = fp8_weights.delayed_scales(
            [update.param for update in self._delayed_scale]
        )
        for update, delayed in zip(self._delayed_scale, delayed_scales, strict=True):
            call = self._call(UpdateKind.DELAYED_SCALE, update, update.master)
            call.add_codes(update, update.master, new_scales=delayed.scale, amaxes=delayed.amax)

        for call in self._calls.values():
            call.run()

        fp8_weights.update_remote_amaxes(delayed_scales)
        if self._separate:
            self._write_separate()
        if amaxes is not None:
            params = [update.param for update in self._current_scale]
            fp8_weights.reduce_amaxes_(params, amaxes)
            self._write_current_scale(amaxes)

    def _add_current_scale(self) -> Tensor | None:
        """Append weights with one current scale to the calls, which compute their amaxes.

        Returns:
            The amaxes (n,), fp32, which the calls write. None without such weights.
        """
        if not self._current_scale:
            return None

        # `_write_current_scale` writes weights with masters first, in one launch, and computes the
        # scales of consecutive weights with equal specs in one launch. Number the specs in the
        # order of the parameters, which is the same on all ranks.
        spec_numbers: dict[QuantSpec, int] = {}
        for update in self._current_scale:
            spec_numbers.setdefault(update.param.fp8_weight.spec, len(spec_numbers))

        def masters_first_then_spec(update: ParamUpdate) -> tuple[bool, int]:
            return update.master is None, spec_numbers[update.param.fp8_weight.spec]

        self._current_scale.sort(key=masters_first_then_spec)

        device = self._current_scale[0].param.local.device
        amaxes = torch.zeros(len(self._current_scale), dtype=torch.float32, device=device)
        for update, amax in zip(self._current_scale, amaxes.unbind(), strict=True):
            master = update.master
            call = self._call(UpdateKind.CURRENT_SCALE, update, master)
            if master is None:
                # The operator only computes the amax, because the scale of codes depends on it.
                call.add_codes(update, None, amaxes=amax)
            else:
                # The operator steps the master like a plain parameter. Its codes are cast later.
                call.add(update, master, amaxes=amax)
        return amaxes

    def _write_separate(self) -> None:
        params = [write.update.param for write in self._separate]
        values = [write.values for write in self._separate]
        backups = self._back_up_separate()

        fp8_weights.write_values_(params, values)
        for write in self._separate:
            update = write.update
            seed = update.options["seed"]
            if seed is not None:
                update.param.round_(write.values, seed, update.index, update.step)

        # A skipped step quantized the unchanged values again, which may change codes and scales.
        for backup in backups:
            is_skipped = backup.found_inf.view(()) != 0
            backup.tensor.copy_(torch.where(is_skipped, backup.before, backup.tensor))

    def _back_up_separate(self) -> list[Backup]:
        """Copy the codes and scales of weights that are quantized after a step that may be skipped.

        Only steps of a gradient scaler may be skipped.
        """
        backups = []
        for write in self._separate:
            found_inf = write.update.options["found_inf"]
            if found_inf is not None:
                for tensor in fp8_weights.codes_and_scales(write.update.param):
                    backups.append(Backup(tensor, tensor.clone(), found_inf))
        return backups

    def _write_current_scale(self, amaxes: Tensor) -> None:
        """Write the codes of weights with one current scale, with the scales of these amaxes."""
        masters = [update.master for update in self._current_scale if update.master is not None]
        # `_add_current_scale` has put the weights with masters first.
        with_master = self._current_scale[: len(masters)]
        without_master = self._current_scale[len(masters) :]
        if with_master:
            found_inf = with_master[0].options["found_inf"]
            params = [update.param for update in with_master]
            fp8_weights.cast_with_amaxes(params, masters, amaxes[: len(masters)], found_inf)
        if without_master:
            specs = [update.param.fp8_weight.spec for update in without_master]
            scales = fp8_weights.scales_from(amaxes[len(masters) :], specs)
            self._write_without_masters(without_master, scales)

    def _write_without_masters(self, updates: Sequence[ParamUpdate], scales: Tensor) -> None:
        """Run the update of weights without masters a second time, with their new scales.

        The first run computed only amaxes.
        """
        # The parameters were appended to the calls in the order of the updates, and so are scales.
        calls: list[AdamWCall] = []
        for update, scale in zip(updates, scales.unbind(), strict=True):
            call = self._call(UpdateKind.CURRENT_SCALE, update, None)
            call.lists["new_scales"].append(scale)
            if call not in calls:
                calls.append(call)

        for call in calls:
            call.lists["amaxes"] = []  # the codes are written this time
            call.run()
