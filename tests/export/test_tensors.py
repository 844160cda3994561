"""`fp8rs.export` gives the same tensors for a sharded model as for the unsharded one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8rs
from cases import each_kind_of_recipe
from distributed import ranks
from distributed.collectives import Collectives
from distributed.folders import shared_folder
from distributed.models import (
    HIDDEN,
    RECIPES,
    assert_same_bytes,
    batch,
    linears,
    make,
    on_all_ranks,
    same_bytes,
    shard,
    shardings,
    train,
    whole_planes,
)
from export.own_formats import OWN, with_own_format
from fp8rs.export import load, save_pretrained, tensors
from fp8rs.export.formats import FORMATS, serving_format

pytestmark = pytest.mark.newest_torch

#: Sizes for "mxfp8", which stores only full blocks of inputs.
OF_32 = {"even": (64, 128), "uneven": (96, 32), "empty": (32, 32)}
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
every_format = pytest.mark.parametrize("format", list(FORMATS))
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


class Odd(nn.Module):
    """A model with sizes that few blocks divide, a buffer, a tied weight and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.up = nn.Linear(32, 150)
        self.norm = nn.BatchNorm1d(150)
        self.down = nn.Linear(150, 32, bias=False)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.up.weight.requires_grad_(False)


def odd():
    model = Odd()
    with pytest.warns(UserWarning, match="head is not converted"):
        fp8rs.convert_to_float8_training(model, recipe="current")
    return model


def exported(model, format, **options):
    """Return copies of all tensors by name."""
    return {n: t.cpu().clone() for n, t in tensors(model, format, **options)}


def expand_scale(scale, rows, cols):
    """Return the scales that multiply codes, by the format's conventions."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    if scale.shape in ((1,), (rows, 1)):
        return scale
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]


# --- one process ---------------------------------------------------------------------------------


@with_own_format
@both_weights
def test_the_codes_of_the_recipe_are_stored_unchanged(recipe, fp8_weights):
    model = make((64,), recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    values = make((64,), recipe=None)
    exported_tensors = exported(model, OWN[recipe])
    for name, layer in linears(values).items():
        codes, scale, *_ = whole_planes(layer.weight.detach(), recipe)
        assert same_bytes(exported_tensors[f"{name}.weight"], codes)
        if recipe.startswith("mxfp8"):
            scale = scale.view(torch.uint8)
            if recipe == "mxfp8":
                scale = scale.repeat_interleave(32, 0)
        elif not scale.dim():
            scale = scale.view(1)
        suffix = serving_format(OWN[recipe]).scale_name
        assert same_bytes(exported_tensors[f"{name}.{suffix}"], scale)
        assert same_bytes(exported_tensors[f"{name}.bias"], layer.bias.detach().bfloat16())


@every_recipe
@every_format
def test_names_shapes_and_dtypes_follow_the_convention(recipe, format):
    model = make((64,), recipe=RECIPES[recipe])
    exported_tensors = exported(model, format)
    plain = make((64,), recipe=None).state_dict()
    scales = {
        "fp8-block": lambda n, k: (torch.float32, (-(-n // 128), -(-k // 128))),
        "fp8-row": lambda n, k: (torch.float32, (n, 1)),
        "fp8-tensor": lambda n, k: (torch.float32, (1,)),
        "mxfp8": lambda n, k: (torch.uint8, (n, k // 32)),
    }
    wanted = {}
    for name, value in plain.items():
        quantized = format != "bf16" and value.dim() == 2
        kind = torch.float8_e4m3fn if quantized else torch.bfloat16
        wanted[name] = kind, tuple(value.shape)
        if quantized:
            scale_name = name.removesuffix("weight") + serving_format(format).scale_name
            wanted[scale_name] = scales[format](*value.shape)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in exported_tensors.items()} == wanted


@every_recipe
@every_format
def test_stored_values_are_within_a_rounding_of_the_weights(recipe, format):
    model = make((64,), recipe=RECIPES[recipe])
    exported_tensors = exported(model, format)
    for name, layer in linears(make((64,), recipe=None)).items():
        values = exported_tensors[f"{name}.weight"].float()
        if format != "bf16":
            scale = exported_tensors[f"{name}.{serving_format(format).scale_name}"]
            values = values * expand_scale(scale, *values.shape)
        weight = layer.weight.detach()
        # E4M3 has three mantissa bits, so half a step is 1/16. For subnormals it is 2^-10 of the
        # scale.
        assert ((values - weight).abs() <= weight.abs() / 16 + weight.abs().max() * 2**-10).all()


def test_scales_are_powers_of_two_if_requested():
    model = make((64,), recipe="current")
    scale = exported(model, "fp8-block", scale_fmt="ue8m0")["blocks.0.up.weight_scale_inv"]
    assert (torch.frexp(scale)[0] == 0.5).all()
    values = exported(model, "fp8-block")["blocks.0.up.weight_scale_inv"]
    assert ((scale >= values) & (scale < 2 * values)).all()


def test_a_recipe_with_powers_of_two_keeps_its_codes_in_both_variants_of_the_format():
    model = make((64,), recipe=fp8rs.Float8BlockScaling(power_2_scale=True))
    # The scale of this value would not be a power of two.
    model.head.weight.data[0, 0] = 3.0
    wanted = fp8rs.Quantizer(fp8rs.Float8BlockScaling(power_2_scale=True))
    row = wanted(model.head.weight.detach()).rowwise
    for options in ({}, {"scale_fmt": "ue8m0"}):
        exported_tensors = exported(model, "fp8-block", **options)
        assert same_bytes(exported_tensors["head.weight"], row.data)
        assert same_bytes(exported_tensors["head.weight_scale_inv"], row.scale)


def test_tied_frozen_and_plain_parameters_and_buffers_appear_once_under_their_names():
    model = odd()
    exported_tensors = exported(model, "fp8-tensor")
    scales = {"up.weight_scale", "down.weight_scale"}
    assert exported_tensors.keys() == (model.state_dict().keys() | scales) - {"head.weight"}
    assert exported_tensors["norm.num_batches_tracked"].dtype == torch.int64
    assert exported_tensors["embedding.weight"].dtype == torch.bfloat16


class Pinned(nn.Module):
    """A model in bf16 with a bias that it keeps in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32, dtype=torch.bfloat16)
        # An offset of about 7, of which bf16 keeps steps of 1/32.
        self.correction_bias = nn.Parameter(7 + torch.arange(32) / 1000)
        self.register_buffer("average", self.correction_bias.detach() / 3)


def as_pinned(model):
    """Return a model in fp32 whose architecture keeps two tensors in fp32, as transformers' do."""
    model._keep_in_fp32_modules = ["average"]
    model._keep_in_fp32_modules_strict = {"correction*"}
    return model.float()


@ranks(1, 2)
@pytest.mark.parametrize("format", ["bf16", "fp8-row"])
@pytest.mark.parametrize("kind", ["wider than the model", "pinned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_that_a_model_keeps_in_fp32_are_exported_in_fp32(rig, format, kind, dtype):
    model = Pinned() if kind == "wider than the model" else as_pinned(Pinned())
    model = fp8rs.convert_to_float8_training(model, recipe="rowwise").to(rig.device)
    expected = {n: t.detach().clone() for n, t in model.state_dict().items()}
    fully_shard(model.layer)  # FSDP2 requires one dtype of the parameters that it gathers together
    fully_shard(model)
    exported_tensors = exported(model, format, dtype=dtype)
    for name in ("correction_bias", "average"):
        assert exported_tensors[name].dtype == torch.float32
        assert torch.equal(exported_tensors[name], expected[name].cpu())
    assert exported_tensors["layer.bias"].dtype == dtype
    assert exported_tensors["layer.weight"].dtype == (
        dtype if format == "bf16" else torch.float8_e4m3fn
    )


def test_a_compiled_or_checkpointed_block_keeps_its_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = make((64, 48), recipe="current")
    wanted = exported(model, "fp8-tensor")
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1])
    assert_same_bytes(exported(model, "fp8-tensor"), wanted)


@ranks(1)
def test_models_in_ddp_and_torch_compile_are_exported_and_loaded_by_their_names(rig):
    pytest.importorskip("safetensors")
    model = make((64, 48), recipe="current", device=rig.device)
    wanted = exported(model, "fp8-tensor")
    wrapped = torch.compile(DistributedDataParallel(model))
    assert_same_bytes(exported(wrapped, "fp8-tensor"), wanted)
    folder = shared_folder(rig)
    save_pretrained(wrapped, folder, "fp8-tensor", dtype=torch.float32)
    loaded = load(wrapped, folder)
    assert loaded.missing_keys == loaded.unexpected_keys == []


@ranks(1)
def test_a_compiled_root_that_is_sharded_is_exported_and_loaded_in_its_shards(rig):
    pytest.importorskip("safetensors")
    model = make((64, 48), recipe="current", device=rig.device)
    wanted = exported(model, "bf16", dtype=torch.float32)
    folder = shared_folder(rig)
    root = fully_shard(torch.compile(model, backend="eager"))
    for name in ("first", "loaded"):
        with torch.no_grad():
            root(batch(rig))  # leaves the root's weights unsharded
        assert_same_bytes(exported(root, "bf16", dtype=torch.float32), wanted)
        save_pretrained(root, f"{folder}/{name}", "bf16", dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            root(batch(rig))
        load(root, f"{folder}/{name}")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"format": "fp4"}, ValueError, "format is 'fp4'; it must be one of 'bf16', 'fp8-block'"),
        ({"format": "fp8-row", "scale_fmt": "ue8m0"}, ValueError, "scale_fmt is 'ue8m0' with"),
        ({"dtype": torch.int8}, TypeError, "dtype is torch.int8; it must be float32"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        tensors(make((64,)), **arguments)


def test_a_layer_that_does_not_fit_is_refused_before_anything_is_returned():
    model = odd()
    with pytest.raises(ValueError, match="down has 150 input features, but format 'mxfp8'"):
        tensors(model, "mxfp8")


@pytest.mark.parametrize("format", ["fp8-tensor", "bf16"])
def test_a_model_without_values_is_refused(format):
    model = make((64,), device="meta")
    with pytest.raises(ValueError, match=r"blocks\.0\.norm\.weight is on the meta device"):
        tensors(model, format)


def test_a_model_that_is_not_converted_is_exported_as_bf16_only():
    model = make((64,), recipe=None)
    assert exported(model, "bf16").keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="model has no converted layers"):
        tensors(model, "fp8-row")


# --- sharded -------------------------------------------------------------------------------------


@ranks(1, 2, 4)
@shardings
@every_recipe
@every_format
@both_weights
def test_a_sharded_model_gives_the_bytes_of_the_unsharded_one(
    rig, hidden, recipe, format, fp8_weights
):
    options = {"recipe": RECIPES[recipe], "device": rig.device, "fp8_weights": fp8_weights}
    sizes = (OF_32 if format == "mxfp8" else HIDDEN)[hidden]
    wanted = exported(make(sizes, **options), format)
    model = shard(make(sizes, **options), rig)
    assert_same_bytes(exported(model, format), wanted)
    train(model, torch.optim.SGD(model.parameters(), 0.0), [batch(rig)])
    # The bytes are equal after a step, too.
    assert_same_bytes(exported(model, format), wanted)


@ranks(2)
@each_kind_of_recipe
def test_an_export_between_steps_does_not_change_training(rig, recipe):
    def losses(exports):
        model = shard(make((64, 32), recipe=RECIPES[recipe], device=rig.device), rig)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        results = []
        for n in range(4):
            results += train(model, optimizer, [batch(rig, n)])
            if exports:
                exported(model, OWN.get(recipe, "bf16"))
        return results

    assert losses(True) == losses(False)


@ranks(2)
@with_own_format
@both_weights
def test_at_most_one_unit_is_unsharded_and_none_afterwards(rig, recipe, fp8_weights):
    model = make((64, 32), recipe=RECIPES[recipe], device=rig.device, fp8_weights=fp8_weights)
    shard(model, rig, reshard_after_forward=False)
    # This leaves all units unsharded.
    model(batch(rig))

    def unsharded_units():
        return {
            ".".join(name.split(".")[:2]) if name.startswith("blocks") else "root"
            for name, p in model.named_parameters()
            if not isinstance(p, DTensor)
        }

    assert unsharded_units() == {"blocks.0", "blocks.1", "root"}
    for name, _ in tensors(model, OWN[recipe]):
        assert unsharded_units() == {
            ".".join(name.split(".")[:2]) if name.startswith("blocks") else "root"
        }
    assert unsharded_units() == set()
    for _ in tensors(model, "bf16"):
        assert unsharded_units() == set()


@ranks(2)
@both_weights
def test_codes_are_gathered_if_the_format_stores_them(rig, fp8_weights):
    """The gathers send half the bytes of bf16, and no weight in high precision."""
    model = make((64, 64), recipe="current", device=rig.device, fp8_weights=fp8_weights)
    shard(model, rig)
    exported(model, "fp8-tensor")
    with Collectives() as collectives:
        exported(model, "fp8-tensor")
    weights = sum(m.weight.numel() for m in linears(model).values())
    others = sum(p.numel() * 4 for n, p in model.named_parameters() if p.dim() == 1)
    assert collectives.nbytes("gather") == weights + others


@ranks(4)
@pytest.mark.parametrize("format", ["fp8-tensor", "fp8-row", "fp8-block", "mxfp8", "bf16"])
@both_weights
def test_tensor_parallel_weights_are_exported_in_full(rig, format, fp8_weights):
    recipe = {own_format: r for r, own_format in OWN.items() if r != "delayed"}.get(
        format, "current"
    )
    recipe = "mxfp8" if format == "mxfp8" else recipe
    options = {"recipe": RECIPES[recipe], "device": rig.device, "fp8_weights": fp8_weights}
    wanted = exported(make((128,), **options), format)
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    model = make((128,), **options)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    exported_tensors = exported(model, format)
    assert exported_tensors.keys() == wanted.keys()
    for name, tensor in exported_tensors.items():
        if fp8_weights and format in ("fp8-row", "fp8-block"):
            # Blocks and rows that tensor parallelism splits have scales of their own. See recipes.
            assert tensor.shape == wanted[name].shape
            continue
        assert same_bytes(tensor, wanted[name]), name


@ranks(2)
@with_own_format
@both_weights
@pytest.mark.parametrize("hidden", [128, 96])
def test_scales_of_tensor_parallel_shards_are_not_exported(rig, recipe, fp8_weights, hidden):
    """Scales of a shard do not apply to the full weight.

    All ranks get equal scales of the full weight.
    """
    model = make((hidden,), recipe=RECIPES[recipe], device=rig.device, fp8_weights=fp8_weights)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.blocks[0], rig.mesh(names=("tp",)), plan)
    # Give the shards different maxima.
    with torch.no_grad():
        for layer in (model.blocks[0].up, model.blocks[0].down):
            layer.weight.mul_(rig.rank + 1)
    for format in {OWN[recipe], "fp8-row"}:
        exported_tensors = exported(model, format)
        for name, layer in linears(model).items():
            values = layer.weight.detach()
            values = values.full_tensor() if isinstance(values, DTensor) else values
            values = values.dequantize() if fp8_weights and name == "head" else values
            codes = exported_tensors[f"{name}.weight"]
            scale = exported_tensors[f"{name}.{serving_format(format).scale_name}"]
            assert on_all_ranks(codes.view(torch.uint8)) and on_all_ranks(scale)
            got = (codes.float() * expand_scale(scale, *codes.shape)).to(values.device)
            assert ((got - values).abs() <= values.abs() / 16 + values.abs().max() / 2**10).all()


@ranks(2)
def test_values_are_exact_in_a_dtype_wider_than_the_gathered_dtype(rig):
    model = make((64,), recipe="current", device=rig.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard(model, rig, mp_policy=policy)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = exported(make((64,), recipe="current"), "fp8-tensor", dtype=dtype)
        assert_same_bytes(exported(model, "fp8-tensor", dtype=dtype), wanted)


@ranks(2)
def test_a_consumer_that_stops_early_leaves_nothing_unsharded(rig):
    model = shard(make((64, 48), recipe="current", device=rig.device), rig)
    iterator = tensors(model, "fp8-tensor")
    next(iterator)
    iterator.close()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert copy.deepcopy(list(model.state_dict()))
