"""fp8rs.nn.Linear: shapes, dtypes, saved tensors, number of quantizations, contexts."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from calls import Calls
from cases import pad_tokens, skip_without_block_gemms
from fp8rs import UnsupportedError, convert_to_float8_training
from fp8rs import nn as fp8nn
from fp8rs.gemm.devices import capability as capability_of
from fp8rs.gemm.devices import check_cuda
from fp8rs.gemm.table import scaled_mm
from fp8rs.model.input_cache import this_thread
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    quant_spec,
    resolve_recipe,
)
from fp8rs.tensor.quantized import Plane
from fp8rs.tensor.quantizer import Quantizer
from internals import state_of
from oracle.compare import relative
from oracle.elements import E4M3
from oracle.linear import linear, tensor_core_error
from saved_tensors import saved_tensors
from saving import reloaded
from tensor_formats import quantizer_of


def layer(device, in_features=16, out_features=32, dtype=torch.float32, seed=0, **kwargs):
    torch.manual_seed(seed)
    new = fp8nn.Linear(in_features, out_features, dtype=dtype, **kwargs).to(device)
    if new.bias is not None:
        nn.init.normal_(new.bias)
    return new


def data(device, *shape, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def gradients(module, x, dy, **call):
    """Return the output and the gradients of x, weight and bias."""
    x = x.detach().clone().requires_grad_()
    y = module(x, **call)
    inputs = [x, module.weight] + ([] if module.bias is None else [module.bias])
    return [y, *torch.autograd.grad(y, inputs, dy)]


# Multiples of 16 and other sizes, 1-D to 4-D, and an empty batch.
SHAPES = [
    (32, 16),
    (7, 16),
    (5, 3),
    (16,),
    (3,),
    (2, 3, 16),
    (2, 5, 3, 17),
    (1, 1),
    (0, 16),
    (2, 0, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out_features", [32, 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape(device, shape, out_features, bias, dtype):
    module = layer(device, shape[-1], out_features, dtype=dtype, bias=bias)
    x = data(device, *shape, dtype=dtype)
    dy = data(device, *shape[:-1], out_features, dtype=dtype)
    results = gradients(module, x, dy)

    w = module.weight
    b = module.bias
    x2 = x.clone().requires_grad_()
    y2 = linear(x2, w, b)
    expected = [y2, *torch.autograd.grad(y2, [x2, w] + ([] if b is None else [b]), dy)]
    # The contracted sizes of y, dx and dw, and the size of the sum db.
    lengths = (shape[-1], out_features, x.numel() // shape[-1], 1)
    for result, value, k in zip(results, expected, lengths, strict=False):
        assert (result.shape, result.dtype) == (value.shape, value.dtype)
        assert result.is_contiguous()
        close = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
        if device.type == "cuda" and dtype == torch.float32 and value.numel():
            close = {"rtol": 1e-5, "atol": tensor_core_error(k) * value.abs().max().item()}
        torch.testing.assert_close(result, value, **close)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
def test_recipes_approximate_high_precision(device, recipe, fp8_format):
    kinds = {"current": Float8CurrentScaling, "delayed": DelayedScaling}
    module = layer(device, 64, 48, recipe=kinds[recipe](fp8_format=fp8_format))
    x = data(device, 128, 64)
    dy = data(device, 128, 48, seed=2)
    plain = nn.Linear(64, 48, device=device)
    plain.load_state_dict(module.state_dict())
    for result, value in zip(gradients(module, x, dy), gradients(plain, x, dy), strict=True):
        assert relative(result, value) < (0.08 if fp8_format == "hybrid" else 0.05)


def test_is_an_nn_linear_with_equal_parameters(device):
    module = layer(device)
    assert isinstance(module, nn.Linear)
    assert list(module.state_dict()) == ["weight", "bias"]
    assert type(module.weight) is nn.Parameter
    assert "recipe=current" in repr(module)
    assert "in_features=16, out_features=32, bias=True" in repr(module)


def test_from_linear_shares_parameters_hooks_and_mode(device):
    plain = nn.Linear(16, 32, device=device).eval()
    calls = []
    plain.register_forward_hook(lambda *_: calls.append(1))
    module = fp8nn.Linear.from_linear(plain, recipe="delayed")
    assert module.weight is plain.weight
    assert module.bias is plain.bias
    assert not module.training
    assert type(plain) is nn.Linear
    module(data(device, 4, 16))
    assert calls == [1]
    plain(data(device, 4, 16))
    assert calls == [1, 1]
    with pytest.raises(TypeError, match="linear"):
        fp8nn.Linear.from_linear(nn.GELU())


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_mixed_dtypes_require_autocast(device, x_dtype, w_dtype, fp8_weights):
    """nn.Linear raises too."""
    plain = nn.Sequential(nn.Linear(16, 32, dtype=w_dtype, device=device))
    module = convert_to_float8_training(copy.deepcopy(plain), fp8_weights=fp8_weights)
    x = data(device, 8, 16, dtype=x_dtype)
    dy = data(device, 8, 32, dtype=torch.bfloat16)
    if x_dtype == w_dtype:
        assert module(x).dtype == plain(x).dtype == x_dtype
    else:
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            plain(x)
        with pytest.raises(RuntimeError, match=f"must have the same dtype.*{x_dtype}.*{w_dtype}"):
            module(x)
    with torch.autocast(device.type, torch.bfloat16):
        y = module(x.requires_grad_())
    y.backward(dy)
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == x_dtype
    assert module[0].weight.grad.dtype == w_dtype


def test_meta_inputs_of_another_dtype_are_accepted_as_by_torch():
    model = nn.Sequential(nn.Linear(32, 16, device="meta", dtype=torch.bfloat16))
    x = torch.ones(4, 32, device="meta")
    assert model(x).shape == (4, 16)
    convert_to_float8_training(model, recipe="current")
    assert model(x).shape == (4, 16)


def test_autocast_sets_the_output_dtype(device):
    module = layer(device)
    x = data(device, 8, 16).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        y = module(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()  # a backward inside the context
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32
    # Autocast quantizes the fp32 input, without rounding it to bf16 first. On a GPU, the two GEMMs
    # are different kernels, and FP8 tensor cores round partial sums.
    close = {} if device.type == "cpu" else {"rtol": 2**-7, "atol": 2**-8}
    torch.testing.assert_close(y, module(x).to(torch.bfloat16), **close)


def test_fp8_plane_is_saved_instead_of_the_input(device):
    module = layer(device, 256, 128, dtype=torch.bfloat16)
    x = data(device, 512, 256, dtype=torch.bfloat16).requires_grad_()
    with saved_tensors() as saved:
        module(x)
    # The input's columnwise plane, the weight itself (not a copy), and their scales.
    assert [(tuple(t.shape), t.dtype) for t in saved] == [
        ((256, 512), E4M3),
        ((), torch.float32),
        ((128, 256), torch.bfloat16),
        ((), torch.float32),
    ]
    assert saved[2].data_ptr() == module.weight.data_ptr()


def test_a_frozen_weight_saves_no_input(device):
    module = layer(device)
    module.weight.requires_grad_(False)
    x = data(device, 8, 16).requires_grad_()
    with saved_tensors() as saved, Calls() as calls:
        y = module(x)
    assert sorted(t.shape for t in saved) == [(), (32, 16)], "the weight and its scale"
    y.sum().backward()
    assert module.weight.grad is None
    assert x.grad is not None
    assert module.bias.grad is not None
    assert calls.counts["transpose"] == 0


def test_dgrad_is_skipped_if_the_input_needs_no_gradient(device):
    module = layer(device)
    with saved_tensors() as saved:
        y = module(data(device, 48, 16))
    assert sorted(t.shape for t in saved) == [(), (16, 48)]
    y.sum().backward()
    assert module.weight.grad is not None


def test_only_the_bias_needs_gradients(device):
    module = layer(device)
    module.weight.requires_grad_(False)
    dy = data(device, 8, 32)
    with Calls() as calls:
        module(data(device, 8, 16)).backward(dy)
    assert calls.quantizations == 2, "input and weight; no gradient"
    torch.testing.assert_close(module.bias.grad, dy.sum(0))


def test_no_grad_computes_no_columnwise_plane(device):
    module = layer(device)
    with torch.no_grad(), Calls() as calls:
        y = module(data(device, 8, 16))
    assert not y.requires_grad
    assert calls.quantizations == 2
    with torch.inference_mode():
        assert torch.equal(module(data(device, 8, 16)), y)


def test_the_gradient_is_quantized_once_for_both_directions(device):
    module = layer(device)
    y = module(data(device, 8, 16).requires_grad_())
    with Calls() as calls:
        y.backward(data(device, 8, 32))
    # The other operator computes the weight's columnwise plane with the forward's scale.
    assert calls.counts == {"quantize_current": 1, "quantize": 1, **calls.gemms}


class Attention(nn.Module):
    """Three layers that share an input, and a fourth with another input."""

    def __init__(self, frozen_q=False):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.q.weight.requires_grad_(not frozen_q)

    def forward(self, x):
        return self.o(self.q(x) * self.k(x) + self.v(x))


def attention(device, recipe="current", **kwargs):
    from fp8rs.convert.convert import convert_to_float8_training

    torch.manual_seed(0)
    return convert_to_float8_training(
        Attention(**kwargs).to(device), recipe=recipe, enable_fsdp_float8_all_gather=False
    )


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_siblings_share_one_quantization(device, recipe):
    model = attention(device, recipe)
    with Calls() as calls:
        y = model(data(device, 48, 16))
    assert calls.quantizations == 4 + 2, "four weights, the shared input and the input of o"
    y.sum().backward()
    copied = copy.deepcopy(model)
    with saved_tensors() as saved:
        copied(data(device, 48, 16))
    columnwise = [t.data_ptr() for t in saved if t.shape == (16, 48) and t.dtype == E4M3]
    assert len(columnwise) == 4
    assert len(set(columnwise)) == 2, "q, k and v save the same plane"


@pytest.mark.parametrize("save_input", [False, True])
@pytest.mark.parametrize(
    "recipe, quantized",
    [(recipe, False) for recipe in ("current", "delayed", "rowwise", "block", "mxfp8")]
    + [(recipe, True) for recipe in ("current", "rowwise", "block")],
)
def test_padding_tokens_does_not_change_results(device, recipe, quantized, save_input, monkeypatch):
    """Pad the operands of wgrad on the CPU too. An input that came quantized is not padded."""
    if recipe == "block":
        skip_without_block_gemms(device)
    recipe = dataclasses.replace(resolve_recipe(recipe), save_input=save_input)
    module = layer(device, 64, 48, recipe=recipe)
    x = data(device, 5, 27, 64)
    dy = data(device, 5, 27, 48)
    quantizer = Quantizer(quant_spec(recipe, "input"))

    def run(as_on):
        pad_tokens(monkeypatch, as_on)
        copied = copy.deepcopy(module)
        leaf = x.clone().requires_grad_(not quantized)
        with saved_tensors() as saved:
            y = copied(quantizer(leaf) if quantized else leaf)
        y.backward(dy)
        return y, leaf.grad, copied.weight.grad, copied.bias.grad, [t.shape for t in saved]

    y, dx, dw, db, saved = run("cuda")
    y_plain, dx_plain, dw_plain, db_plain, saved_plain = run("cpu")
    assert (saved == saved_plain) == (save_input or quantized)
    assert torch.equal(y, y_plain) and torch.equal(db, db_plain)
    assert dx is None or torch.equal(dx, dx_plain)
    # The products are equal. The CPU adds them in another order.
    torch.testing.assert_close(dw, dw_plain, rtol=1e-5, atol=1e-5 * dw.abs().max().item())


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "mxfp8"])
def test_siblings_quantize_a_saved_input_once(device, recipe):
    model = attention(device, dataclasses.replace(resolve_recipe(recipe), save_input=True))
    y = model(data(device, 8, 16).requires_grad_())
    with Calls() as calls:
        y.sum().backward()
    assert calls.quantizations == 4 + 4 + 2, (
        "gradients, weights, the shared input and the input of o"
    )


def test_shared_input_of_a_frozen_layer_gets_a_columnwise_plane(device):
    model = attention(device, frozen_q=True)
    with Calls() as calls:
        y = model(data(device, 8, 16))
    assert calls.quantizations == 4 + 2
    y.sum().backward()
    reference = attention(device, frozen_q=False)
    reference(data(device, 8, 16)).sum().backward()
    assert torch.equal(model.k.weight.grad, reference.k.weight.grad)
    assert torch.equal(model.v.weight.grad, reference.v.weight.grad)


def test_in_place_changes_invalidate_the_shared_input(device):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.b = nn.Linear(16, 16)

        def forward(self, x):
            first = self.a(x)
            x.mul_(2)
            return first, self.b(x)

    from fp8rs.convert.convert import convert_to_float8_training

    model = convert_to_float8_training(
        Changes().to(device), recipe="current", enable_fsdp_float8_all_gather=False
    )
    with torch.no_grad():
        _, second = model(data(device, 8, 16))
        assert torch.equal(second, model.b(data(device, 8, 16) * 2))


def test_layer_called_again_quantizes_again(device):
    model = attention(device)
    x = data(device, 8, 16)
    with torch.no_grad():
        first = model.q(x)
        x.data.mul_(-3)  # does not change the version
        torch.testing.assert_close(model.q(x) - model.q.bias, -3 * (first - model.q.bias))
        x.data.mul_(-1)
        assert torch.equal(model.q(x), model.q(x.clone()))


def test_planes_of_old_inputs_are_freed(device):
    import weakref

    model = attention(device)
    x = data(device, 8, 16)
    other = data(device, 8, 16)
    model.q(x)
    alive = weakref.ref(this_thread.input_cache.entry.planes[0].data)
    assert alive() is not None
    model.q(other)  # x is alive, but its planes are freed
    assert alive() is None
    alive = weakref.ref(this_thread.input_cache.entry.planes[0].data)
    del other
    assert alive() is None


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_nothing(device, recipe, use_reentrant):
    results = []
    for checkpointed in (False, True):
        model = attention(device, recipe)
        x = data(device, 8, 16).requires_grad_()
        for _ in range(2):  # with delayed scaling, the second has a history
            if checkpointed:
                y = checkpoint(model.forward, x, use_reentrant=use_reentrant)
                state_of(model.q).end_forward(model, (), None)
            else:
                y = model(x)
            y.square().sum().backward()
        results.append([y, x.grad] + [p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_gradients_accumulate(device):
    module = layer(device)
    batches = [data(device, 8, 16, seed=s) for s in range(3)]
    total = torch.zeros_like(module.weight)
    for x in batches:
        total += gradients(module, x, torch.ones(8, 32, device=device))[2]
    for x in batches:
        module(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, total)


def test_deterministic_algorithms_give_the_same_bytes(device):
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            gradients(layer(device), data(device, 64, 16), data(device, 64, 32)) for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_strided_and_expanded_operands(device):
    module = layer(device)
    x = data(device, 16, 6, 5).transpose(0, 2)  # (5, 6, 16), no 2-D view without a copy
    dy = torch.ones((), device=device).expand(5, 6, 32)
    for a, b in zip(
        gradients(module, x, dy), gradients(module, x.contiguous(), dy.contiguous()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_quantized_weight_is_not_quantized_again(device):
    plain = layer(device)
    x = data(device, 8, 16)
    dy = data(device, 8, 32)
    expected = gradients(plain, x, dy)
    for columnwise in (False, True):
        module = layer(device)
        weight = quantizer_of("tensor", E4M3, columnwise=columnwise)(plain.weight)
        module.weight = nn.Parameter(weight)
        for a, b in zip(gradients(module, x, dy), expected, strict=True):
            assert torch.equal(a, b)


def test_missing_plane_of_a_weight_is_named(device):
    module = layer(device)
    weight = quantizer_of("tensor", E4M3, rowwise=False)(module.weight)
    module.weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match="rowwise"):
        module(data(device, 8, 16))


@pytest.mark.parametrize("recipe", ["current", "rowwise", "block"])
def test_quantized_input_in_the_recipes_format_is_not_quantized_again(device, recipe):
    if recipe == "block":
        skip_without_block_gemms(device)
    module = layer(device, 128, 128, recipe=recipe)
    x = data(device, 256, 128)
    quantized_x = Quantizer(quant_spec(module.recipe, "input"))(x)
    assert torch.equal(module(quantized_x), module(x))


@pytest.mark.parametrize(
    "recipe, quantize, why",
    [
        ("current", quantizer_of("tensor", torch.float8_e5m2), "float8_e5m2"),
        ("current", Quantizer(quant_spec(resolve_recipe("rowwise"), "input")), "'row'"),
        ("rowwise", quantizer_of("tensor", E4M3), "'tensor'"),
        ("delayed", quantizer_of("tensor", E4M3), "history"),
        (
            Float8BlockScaling(wgrad_input_block=(128, 128)),
            Quantizer(quant_spec(Float8BlockScaling(), "input")),
            "wgrad",
        ),
    ],
)
def test_quantized_input_in_another_format_is_refused(device, recipe, quantize, why):
    module = layer(device, 128, 128, recipe=recipe)
    with pytest.raises(ValueError, match=f"input is a quantized tensor.*{why}.*dequantize"):
        module(quantize(data(device, 256, 128)))


@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8"])
def test_resharded_weight_raises(device, recipe):
    module = layer(device, recipe=recipe)
    quantizer = Quantizer(quant_spec(module.recipe, "weight"), columnwise=False)
    module.weight = nn.Parameter(quantizer(module.weight))
    y = module(data(device, 8, 16).requires_grad_())
    # FSDP frees the gathered codes, and the gathered scales if they are not one per tensor.
    plane = module.weight.rowwise
    for gathered in (plane.data, plane.scale):
        gathered.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="reshard"):
        module(data(device, 8, 16))
    with pytest.raises(RuntimeError, match="reshard"):
        y.sum().backward()


def test_write_to_fp8_weight_before_backward_raises(device):
    module = layer(device)
    y = module(data(device, 8, 16).requires_grad_())
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_double_backward_raises(device):
    x = data(device, 8, 16).requires_grad_()
    y = layer(device)(x)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(y.sum(), [x], create_graph=True)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.ones(4, 15), ValueError),
        (torch.ones(()), ValueError),
        (torch.ones(4, 16, dtype=torch.float64), TypeError),
        (torch.ones(4, 16, dtype=torch.int32), TypeError),
    ],
)
def test_bad_inputs_name_the_argument(device, x, error):
    with pytest.raises(error, match="input"):
        layer(device)(x.to(device))


def test_non_finite_inputs_stay_visible(device):
    module = layer(device)
    x = data(device, 8, 16)
    x[3, 3] = float("inf")
    y = module(x.requires_grad_())
    assert y.isnan().all()
    y.sum().backward()
    assert module.weight.grad.isnan().all()
    assert x.grad.isfinite().all(), "of finite operands"


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_deepcopy_and_pickle(device, recipe):
    model = attention(device, recipe)
    x = data(device, 8, 16)
    model(x).sum().backward()
    for copied in (copy.deepcopy(model), reloaded(model, weights_only=False)):
        assert state_of(copied.q) is state_of(copied.o)
        assert state_of(copied.q) is not state_of(model.q)
        with torch.no_grad():
            assert torch.equal(copied(x), model(x))
        assert [ref() for ref in state_of(copied.q).layer_refs] == [
            copied.q,
            copied.k,
            copied.v,
            copied.o,
        ]
        copied(x).sum().backward()


def test_copy_without_one_of_the_layers(device):
    model = copy.deepcopy(attention(device))
    model.k = nn.Identity()
    model(data(device, 8, 16))
    linears = [ref() for ref in state_of(model.q).layer_refs]
    assert linears == [model.q, None, model.v, model.o], "indices stay"


def test_a_layer_is_freed_without_the_garbage_collector(device):
    import gc
    import weakref

    gc.disable()
    try:
        module = layer(device)
        module(data(device, 4, 16)).sum().backward()
        alive = weakref.ref(module)
        del module
        assert alive() is None
    finally:
        gc.enable()


def test_emulation_gives_the_same_training(device):
    x = data(device, 24, 16)
    dy = data(device, 24, 32)
    native = gradients(layer(device), x, dy)
    emulated = gradients(layer(device, recipe=Float8CurrentScaling(emulate=True)), x, dy)
    for a, b, k in zip(native, emulated, (16, 32, 24, 1), strict=True):
        close = {}
        if device.type == "cuda":
            close = {"rtol": 1e-5, "atol": tensor_core_error(k) * b.abs().max().item()}
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize(
    ("recipe", "hip", "capability", "reason"),
    [
        ("current", None, (8, 0), r"a GPU.*needs .*8\.9, this is 8\.0; the recipe runs on the CPU"),
        ("block", None, (8, 0), r"needs .*8\.9, this is 8\.0; the recipe runs on the CPU"),
        ("block", None, (8, 9), r"recipe mxfp8 runs here, or emulate=True"),
        ("block", None, (10, 0), r"recipe mxfp8 runs here"),
        ("current", "6.2", (9, 4), r"NVIDIA GPUs; on the CPU"),
    ],
)
def test_gpus_without_fp8_gemms_get_an_error_with_alternatives(
    monkeypatch, recipe, hip, capability, reason
):
    """GPUs that cannot quantize cannot use emulation either."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    capability_of.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=reason):
            check_cuda.__wrapped__(0, recipe)
    finally:
        capability_of.cache_clear()


def test_scaled_mm_names_mismatched_sizes(device):
    a = quantizer_of("tensor", E4M3)(data(device, 4, 16)).rowwise
    b = quantizer_of("tensor", E4M3)(data(device, 4, 17)).rowwise
    with pytest.raises(ValueError, match=r"\(4, 16\).*\(4, 17\)"):
        scaled_mm(a, b, out_dtype=torch.float32)


@pytest.mark.gpu
def test_missing_gemm_error_names_the_formats():
    plane = quantizer_of("tensor", E4M3)(data("cuda", 16, 16)).rowwise
    other = Plane(plane.data, plane.scale.view(1, 1), BlockFormat("odd", (7, -1), torch.float32))
    with pytest.raises(UnsupportedError, match=r"'tensor' and 'odd'.*emulate=True"):
        scaled_mm(plane, other, out_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_step_never_waits_for_the_device(recipe):
    model = attention(torch.device("cuda"), recipe)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = data("cuda", 32, 16)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):  # delayed scaling learns which scales are nonzero
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# torch warns about parameters that are created on one stream and captured on another.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.gpu
def test_a_step_is_captured_in_a_cuda_graph():
    model = attention(torch.device("cuda"))
    x = data("cuda", 32, 16)
    fresh = data("cuda", 32, 16, seed=9)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
        y.sum().backward()
    x.copy_(fresh)
    graph.replay()
    captured = [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    y = model(fresh)
    y.sum().backward()
    for a, b in zip(captured, [y, *(p.grad for p in model.parameters())], strict=True):
        assert torch.equal(a, b)


def test_no_warnings(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(layer(device), data(device, 8, 16), data(device, 8, 32))


SQUARES = Float8BlockScaling(wgrad_input_block=(128, 128))


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", SQUARES, "mxfp8"])
def test_a_saved_input_gives_the_gradients_of_saved_codes(device, recipe):
    """Quantizing the saved input in the backward gives the codes of the forward."""
    if recipe in ("block", SQUARES):
        skip_without_block_gemms(device)
    results = []
    for save_input in (False, True):
        kind = dataclasses.replace(resolve_recipe(recipe), save_input=save_input)
        module = layer(device, 64, 48, recipe=kind)
        with saved_tensors() as saved:
            results.append(gradients(module, data(device, 32, 64), data(device, 32, 48)))
        assert any(t.shape == (32, 64) and t.dtype == torch.float32 for t in saved) == save_input
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(4,), (2, 3), ()])
@pytest.mark.parametrize("sizes", [(16, 0), (0, 16)], ids=["none out", "none in"])
@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "mxfp8"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_zero_features(recipe, sizes, lead, bias):
    plain = nn.Linear(*sizes, bias=bias)
    tested = fp8nn.Linear.from_linear(copy.deepcopy(plain), recipe=recipe)
    x = torch.ones(*lead, sizes[0])
    for module in (plain, tested):
        y = module(x.requires_grad_())
        y.sum().backward()
        assert y.shape == (*lead, sizes[1])
    for a, b in zip(plain.parameters(), tested.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_input_that_is_not_a_tensor_is_refused(device):
    layer = fp8nn.Linear(16, 16, device=device)
    for wrong in (None, [[0.0] * 16]):
        with pytest.raises(TypeError, match=f"input must be a Tensor, not {type(wrong).__name__}"):
            layer(wrong)
    with pytest.raises(ValueError, match=r"shape \(\), but it must have a dim"):
        layer(torch.tensor(1.0, device=device))


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype(device, recipe, dtype):
    results = []
    values = data(device, 8, 16)
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            torch.manual_seed(0)
            options = {"dtype": torch.float32, "device": device}
            layer = fp8nn.Linear(16, 16, **options, recipe=recipe)
            x = values.clone().requires_grad_()
            for _ in range(2):
                layer(x).sum().backward()
                torch.optim.SGD(layer.parameters(), 0.1).step()
            results.append([x.grad, layer.weight.detach()])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, *results))


def test_export_with_gradients_warns(device):
    layer = fp8nn.Linear(16, 16, device=device)
    x = data(device, 8, 16)
    with pytest.warns(UserWarning, match="no gradient reaches its weight"):
        torch.export.export(layer, (x,))
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        assert torch.equal(program.module()(x), layer(x))


def test_torch_fx_tracing_raises():
    layer = nn.Sequential(fp8nn.Linear(16, 16))
    with pytest.raises(TypeError, match="input must be a Tensor, not Proxy"):
        torch.fx.symbolic_trace(layer)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs_are_refused(device, layout):
    x = torch.nested.nested_tensor([data(device, n, 16) for n in (3, 5)], layout=layout)
    with pytest.raises(TypeError, match=r"not a nested tensor: .*enable_nested_tensor=False"):
        layer(device)(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_without_nested_tensors_evaluates_padded_batches(device):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    x = data(device, 2, 6, 32)
    mask = torch.zeros(2, 6, dtype=torch.bool, device=device)
    mask[1, 4:] = True
    for nested in (False, True):
        model = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=nested).to(device).eval()
        with torch.no_grad():
            expected = model(x, src_key_padding_mask=mask)
        convert_to_float8_training(model)
        for (
            part
        ) in model.layers:  # a hook disables torch's fused path, which bypasses converted layers
            part.linear1.register_forward_pre_hook(lambda *args: None)
        with torch.no_grad():
            if nested:
                with pytest.raises(TypeError, match="enable_nested_tensor=False"):
                    model(x, src_key_padding_mask=mask)
            else:
                assert (
                    0 < relative(model(x, src_key_padding_mask=mask)[~mask], expected[~mask]) < 0.05
                )


def selective_contexts():
    """Return the contexts of a selective checkpoint that saves what torch allocates as zeros."""

    def policy(context, operator, *args, **kwargs):
        if operator is torch.ops.aten.new_zeros.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def test_a_checkpoint_may_save_the_zeros_that_tokens_are_padded_with(device, monkeypatch):
    pad_tokens(monkeypatch, "cuda")
    linear_layer = layer(device)
    x = data(device, 5, 16).requires_grad_()
    linear_layer(x).sum().backward()
    expected = [x.grad.clone(), linear_layer.weight.grad.clone()]

    x.grad = linear_layer.weight.grad = None
    output = checkpoint(linear_layer, x, use_reentrant=False, context_fn=selective_contexts)
    output.sum().backward()
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(linear_layer.weight.grad, expected[1])
