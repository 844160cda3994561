"""Uses of sharded FP8 weights under FSDP2, compared with the unsharded model.

All ranks have the same batch, so that gradients, their mean over ranks and steps equal one
process's in every bit.
"""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fp8rs
from cases import each_kind_of_recipe
from distributed import ranks
from distributed.models import (
    RECIPES,
    UNEVEN,
    WIDTH,
    linears,
    make,
    recipes,
    same_bytes,
    shard,
    train,
    watch_weights,
)
from distributed.sharded_pairs import (
    WEIGHTS,
    assert_equal,
    assert_fp8,
    assert_same_training,
    batch,
    contents,
    each_weights,
    full,
    loss_of,
    optimizers,
    pair,
    quantized,
    same,
    shards,
)
from fp8rs.fsdp import MasterWeight
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.optim import AdamW
from internals import handle_of, local_of, storage_of
from saving import reloaded

# --- ways to train -------------------------------------------------------------------------------


@ranks(2)
@recipes
@pytest.mark.parametrize("reshard", [True, False])
def test_micro_batches(rig, recipe, reshard):
    reference, model = pair(rig, recipe, reshard_after_forward=reshard)
    optimizer_pair = optimizers(reference, model)
    for n in range(2):
        before = contents(model)
        for part in range(3):
            x = batch(rig, 10 * n + part)
            loss_of(reference, x).backward()
            model.set_requires_gradient_sync(part == 2)
            loss_of(model, x).backward()
        model.reshard()
        assert same(contents(model), before)
        for name, parameter in model.named_parameters():
            wanted = dict(reference.named_parameters())[name].grad
            assert torch.equal(parameter.grad.full_tensor(), wanted), name
        for optimizer in optimizer_pair:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(model, reference)


def save_products(context, op, *args, **kwargs):
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@ranks(2)
@recipes
@pytest.mark.parametrize("kind", ["plain", "selective", "reentrant"])
def test_activation_checkpointing(rig, recipe, kind):
    reference, model = pair(rig, recipe)
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(save_products)

    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, **options)

    names = [name for name, _ in model.named_parameters()]
    model.blocks = nn.ModuleList(Checkpointed(b) for b in model.blocks)
    optimizer_pair = optimizers(reference, model)
    for n in range(3):
        for m, optimizer in zip((reference, model), optimizer_pair, strict=True):
            loss_of(m, batch(rig, n).requires_grad_()).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted = dict(reference.named_parameters())
        for name, parameter in zip(names, model.parameters(), strict=True):
            assert same_bytes(full(parameter), full(wanted[name])), (name, n)


@ranks(2)
@recipes
def test_evaluation_between_steps_changes_nothing(rig, recipe):
    reference, model = pair(rig, recipe)

    def evaluate(model, x):
        model.eval()
        with torch.no_grad():
            model(batch(rig, 77))
        model.train()
        return loss_of(model, x)

    assert_same_training(rig, model, reference, forward=evaluate)


@ranks(2)
@recipes
@pytest.mark.parametrize("assign", [True, False])
def test_a_state_dict_before_the_first_forward(rig, recipe, assign):
    reference, _ = pair(rig, recipe)
    trained, _ = pair(rig, recipe)
    train(trained, AdamW(trained.parameters(), lr=1e-2), [batch(rig)])
    model = shard(copy.deepcopy(reference), rig)
    # Codes of an unsharded model are loaded as what they stand for.
    plain = make(UNEVEN, recipe=None, device=rig.device)
    plain.load_state_dict({n: full(p) for n, p in trained.named_parameters()})
    state = shard(plain, rig).state_dict()
    model.load_state_dict(state, assign=assign)
    assert_fp8(model)
    reference.load_state_dict({n: full(p) for n, p in trained.named_parameters()}, assign=assign)
    assert all(quantized(layer.weight) for layer in linears(reference).values())
    assert_equal(model, reference)
    assert_same_training(rig, model, reference)


@ranks(2)
def test_two_models_in_one_process(rig):
    pairs = [pair(rig, name) for name in ("current", "mxfp8")]
    steppers = [optimizers(*models) for models in pairs]
    for n in range(3):
        losses = [[loss_of(m, batch(rig, n)) for m in models] for models in pairs]
        for models, pair_losses, pair_steppers in zip(pairs, losses, steppers, strict=True):
            assert same_bytes(pair_losses[0].detach(), pair_losses[1].detach())
            for loss, stepper in zip(pair_losses, pair_steppers, strict=True):
                loss.backward()
                stepper.step()
                stepper.zero_grad()
            assert_equal(models[1], models[0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


@ranks(2)
@pytest.mark.parametrize("method", ["convert", "quantized_init"])
def test_a_tied_head_stays_in_high_precision(rig, method):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tied to")
        if method == "convert":
            model = Tied().to(rig.device)
            fp8rs.convert_to_float8_training(model, fp8_weights=True)
        else:
            with fp8rs.quantized_init("current"), torch.device(rig.device):
                model = Tied()
    assert model.head.weight is model.embedding.weight
    assert type(model.head.weight) is nn.Parameter
    assert quantized(model.body.weight)
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rig.mesh())
    assert model.head.weight is model.embedding.weight
    tokens = torch.arange(16, device=rig.device) % 20
    optimizer_pair = optimizers(reference, model)
    for _ in range(2):
        for m, optimizer in zip((reference, model), optimizer_pair, strict=True):
            m(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, reference)


@ranks(1)
def test_a_step_after_the_model_was_deleted_names_the_reason(rig):
    model = shard(make((64,), recipe="current", device=rig.device, fp8_weights=True), rig)
    optimizer = AdamW(model.parameters())
    loss_of(model, batch(rig)).backward()
    optimizer.step()
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="the module that this weight belongs to no longer"):
        optimizer.step()


@ranks(2)
@recipes
@each_weights
def test_cpu_offload(rig, recipe, weights):
    policy = CPUOffloadPolicy(pin_memory=rig.device_type == "cuda")
    reference, model = pair(rig, recipe, WEIGHTS[weights], offload_policy=policy)
    assert all(local.device.type == "cpu" for local in shards(model).values())
    assert_same_training(rig, model, reference)
    assert_fp8(model)
    assert all(local.device.type == "cpu" for local in shards(model).values())


@ranks(2)
@recipes
def test_shards_of_columns(rig, recipe):
    """With one scale a tensor any cut will do; other formats refuse it at `fully_shard`."""
    reference = make((64, 48), recipe=RECIPES[recipe], device=rig.device, fp8_weights=True)
    model = copy.deepcopy(reference)
    options = {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}
    if recipe in ("current", "delayed"):
        shard(model, rig, **options)
        assert model.head.weight.placements == (Shard(1),)
        assert_same_training(rig, model, reference)
    else:
        with pytest.raises(ValueError, match=r"sharded by rows only: return Shard\(0\)"):
            shard(model, rig, **options)


@ranks(2)
@recipes
def test_clipping(rig, recipe):
    reference, model = pair(rig, recipe)
    optimizer_pair = optimizers(reference, model)
    for m in (reference, model):
        loss_of(m, batch(rig)).backward()
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (reference, model)]
    # Sums of the same squares in another order.
    torch.testing.assert_close(norms[1].full_tensor(), norms[0], rtol=1e-5, atol=0)
    assert norms[0] > 0.01
    before = contents(model)
    for m, optimizer in zip((reference, model), optimizer_pair, strict=True):
        after = torch.nn.utils.get_total_norm(p.grad for p in m.parameters())
        after = after.full_tensor() if isinstance(after, DTensor) else after
        assert abs(after - 0.01) < 1e-5
        optimizer.step()
    assert not same(contents(model), before)


@ranks(2)
@each_kind_of_recipe
def test_gathers_that_the_user_orders(rig, recipe):
    for order in ("unshard", "unshard async", "prefetch", "async op"):
        check_ordered(rig, recipe, order)


def check_ordered(rig, recipe, order):
    reference, model = pair(rig, recipe)
    first, second = model.blocks
    if order == "prefetch":
        model.set_modules_to_forward_prefetch([first])
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    elif order == "async op":
        model._set_unshard_async_op(True)

    def forward(model, x):
        before = contents(model) if order.startswith("unshard") else None
        if order == "unshard":
            model.unshard()
            for block in model.blocks:
                block.unshard()
                block.reshard()
                block.unshard()
        elif order == "unshard async":
            handles = [part.unshard(async_op=True) for part in (model, *model.blocks)]
            for handle in handles:
                handle.wait()
        loss = loss_of(model, x)
        if before is not None:
            model.reshard()
            for block in model.blocks:
                block.reshard()
            assert same(contents(model), before)
        return loss

    assert_same_training(rig, model, reference, forward=forward)


@ranks(2)
@recipes
def test_some_layers_fp8_weights_and_some_masters(rig, recipe):
    reference = make(UNEVEN, recipe=None, device=rig.device)
    fp8rs.convert_to_float8_training(
        reference, recipe=RECIPES[recipe], filter_fqns=["down"], fp8_weights=True
    )
    fp8rs.convert_to_float8_training(
        reference,
        recipe="rowwise" if recipe == "current" else "current",
        filter_fqns=["up", "head"],
    )
    model = shard(copy.deepcopy(reference), rig)
    for name, local in shards(model).items():
        assert isinstance(local, MasterWeight) if "down" in name else quantized(local), name
    assert_same_training(rig, model, reference)


# --- what is seen of a shard ---------------------------------------------------------------------


@ranks(1, 2, 4)
@recipes
def test_unshard_gathers_what_the_shards_dequantize_to(rig, recipe):
    _, model = pair(rig, recipe)
    before = contents(model)
    wanted = {n: full(m.weight) for n, m in linears(model).items()}
    for part in (*model.blocks, model):
        part.unshard()
    for name, layer in linears(model).items():
        assert type(layer.weight).__name__ in ("Float8Tensor", "MXFP8Tensor")
        assert same_bytes(layer.weight.dequantize(), wanted[name]), name
    for part in (*model.blocks, model):
        part.reshard()
    assert same(contents(model), before)


@ranks(2)
@recipes
@pytest.mark.parametrize("meta", [True, False])
def test_marks_on_a_parameter_stay(rig, recipe, meta):
    model = make(
        UNEVEN, recipe=RECIPES[recipe], device="meta" if meta else rig.device, fp8_weights=True
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.of_the_user = name
    shard(model, rig)
    if meta:
        model.to_empty(device=rig.device)
        for layer in linears(model).values():
            layer.reset_parameters()
    loss_of(model, batch(rig)).backward()
    model.load_state_dict(model.state_dict())
    model.reshard()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.of_the_user == name
    assert copy.deepcopy(model.head.weight).of_the_user == "head.weight"


#: Views that FSDP2, DCP and users take of a shard of 14 rows or more and 32 columns.
VIEWS = {
    "view(-1)": lambda t: t.view(-1),
    "part of view(-1)": lambda t: t.view(-1)[37:101],
    "rows": lambda t: t[3:9],
    "narrow": lambda t: t.narrow(0, 2, 5).detach(),
    "split": lambda t: t.split(4)[1],
    "chunk": lambda t: t.chunk(3)[2],
    "as_strided": lambda t: torch.as_strided(t[1:], (4, 32), (32, 1), 32),
    "a row": lambda t: t[4],
    "a part of a row": lambda t: t[4, 3:20],
}
#: Views that can be read only.
READ_ONLY = {
    "columns": lambda t: t[:, 5:19],
    "narrow of columns": lambda t: t.narrow(1, 8, 16),
    "a column": lambda t: t[:, 7],
    "rows of columns": lambda t: t[2:6].narrow(1, 3, 20),
    "transpose": lambda t: t.t(),
}


@ranks(2)
@recipes
def test_views_of_a_shard_are_views(rig, recipe):
    """Writes through them reach the shard, and other elements move by at most a rounding."""
    _, model = pair(rig, recipe)
    name, local = next((n, t) for n, t in shards(model).items() if len(t) >= 14)
    name = name.removesuffix(".weight")
    for view, take in VIEWS.items():
        part = take(local)
        wanted = local.dequantize()
        assert quantized(part) and storage_of(part) is storage_of(local), view
        new = torch.randn(part.shape, device=rig.device) * 0.1
        with torch.no_grad():
            part.copy_(new)
        take(wanted).copy_(new)
        actual = local.dequantize()
        assert same_bytes(take(actual).contiguous(), part.dequantize()), view
        # A step of 3 bits of mantissa, of a code that is rounded again because a neighbour's scale
        # has changed, or of the smallest code of the largest scale.
        allowed = wanted.abs() * 2.0**-4 * 1.07 + wanted.abs().amax() / 448 * 2.0**-10
        assert torch.all((actual - wanted).abs() <= allowed), view
    for view, take in READ_ONLY.items():
        part = take(local)
        before = local.dequantize()
        assert same_bytes(part.dequantize(), take(before).contiguous()), view
        with torch.no_grad(), pytest.raises(NotImplementedError, match="consecutive elements"):
            part.copy_(torch.ones(part.shape, device=rig.device))
        assert same_bytes(local.dequantize(), before), view
    model.state_dict()  # whoever writes to a part has it from here
    gathered_weights = {}
    watch_weights(model, lambda name, weight: gathered_weights.update({name: weight.dequantize()}))
    model(batch(rig))  # which brings the ranks' scales together
    model.reshard()
    start = ShardSpec.from_dtensor(linears(model)[name].weight).shard_offset
    gathered = gathered_weights[name][start : start + len(local)]
    assert gathered.isfinite().all() and gathered.any()
    assert same_bytes(gathered, local.dequantize())


# --- copies, inference ---------------------------------------------------------------------------


@ranks(2)
@recipes
def test_copies_of_parameters(rig, recipe):
    """Torch cannot copy a whole sharded model."""
    _, model = pair(rig, recipe)
    before = contents(model)
    for layer in linears(model).values():
        twin = copy.deepcopy(layer.weight)
        assert type(twin) is type(layer.weight) and quantized(local_of(twin))
        with torch.no_grad():
            local_of(twin).zero_()
        assert not full(twin).any()
    assert same(contents(model), before)
    model(batch(rig)).sum().backward()
    model.reshard()
    assert same(contents(model), before)


@ranks(2)
@recipes
@pytest.mark.parametrize("masters", [True, False])
def test_steps_of_copies_leave_the_model(rig, recipe, masters):
    _, model = pair(rig, recipe)
    model(batch(rig)).sum().backward()
    model.zero_grad()
    handles = [handle_of(layer) for layer in linears(model).values()]
    before = contents(model)
    writes = [handle.writes for handle in handles]
    histories = [t.clone() for t in model.buffers()]
    twins = [copy.deepcopy(layer.weight) for layer in linears(model).values()]
    for twin in twins:
        twin.grad = torch.full_like(twin, 100.0)
    AdamW(twins, lr=0.5, master_weights=masters).step()
    for twin, layer in zip(twins, linears(model).values(), strict=True):
        assert not torch.equal(full(twin), full(layer.weight))
    assert same(contents(model), before) and same(model.buffers(), histories)
    assert [handle.writes for handle in handles] == writes


@ranks(2)
@recipes
def test_pickles_of_shards(rig, recipe):
    _, model = pair(rig, recipe)
    state = reloaded(model.state_dict())
    before = contents(model)
    other = shard(
        make(UNEVEN, recipe=RECIPES[recipe], device=rig.device, seed=3, fp8_weights=True), rig
    )
    assert not same(contents(other), before)
    other.load_state_dict(state)
    assert_fp8(other)
    assert same(contents(other), before)


@ranks(1, 2)
@recipes
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_inference(rig, recipe, mode):
    reference, model = pair(rig, recipe)
    before = contents(model)
    for m in (reference.eval(), model.eval()):
        m.requires_grad_(False)
    with torch.no_grad():
        # The unsharded plain parameters of a first all-gather in inference mode cannot be reused.
        model(batch(rig))
    for n in range(2):
        with getattr(torch, mode)():
            assert same_bytes(reference(batch(rig, n)), model(batch(rig, n)))
    model.reshard()
    assert same(contents(model), before)
    for m in (reference.train(), model.train()):
        m.requires_grad_(True)
    assert_same_training(rig, model, reference)


@ranks(2)
@recipes
@pytest.mark.parametrize("offload", [False, True])
def test_the_first_forward_in_inference_mode(rig, recipe, offload):
    """FSDP2 pads the shards in it."""
    policy = CPUOffloadPolicy(pin_memory=rig.device_type == "cuda")
    reference, model = pair(rig, recipe, **({"offload_policy": policy} if offload else {}))
    with torch.inference_mode():
        for n in range(2):
            assert same_bytes(reference(batch(rig, n)), model(batch(rig, n)))


# --- adapters over a frozen base -----------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer plus the product of two small layers (Hu et al., LoRA, 2021)."""

    def __init__(self, base, rank=4):
        super().__init__()
        rows, cols = base.weight.shape
        options = {"bias": False, "dtype": torch.bfloat16, "device": base.weight.device}
        self.base = base
        self.a = nn.Linear(cols, rank, **options)
        self.b = nn.Linear(rank, rows, **options)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@ranks(1, 2)
@recipes
def test_adapters_over_a_frozen_base(rig, recipe):
    torch.manual_seed(0)
    kinds = {"bias": False, "dtype": torch.bfloat16}
    layers = [nn.Linear(WIDTH, 96, **kinds), nn.Linear(96, WIDTH, **kinds)]
    reference = nn.Sequential(*layers).to(rig.device)
    fp8rs.convert_to_float8_training(reference, recipe=RECIPES[recipe], fp8_weights=True)
    reference.requires_grad_(False)
    reference = nn.Sequential(*(Adapted(base) for base in reference))
    model = copy.deepcopy(reference)
    for part in model:
        fully_shard(part, mesh=rig.mesh())
    fully_shard(model, mesh=rig.mesh())
    bases = [part.base.weight for part in model]
    before = [[t.clone() for t in storage_of(b).tensors()] for b in bases]
    for base in bases:
        assert not base.requires_grad and quantized(local_of(base))
        codes = storage_of(base).rowwise.data
        assert codes.untyped_storage().nbytes() == codes.numel() == base.numel() // rig.world_size
    optimizer_pair = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.5)
        for m in (reference, model)
    ]
    losses = []
    for n in range(4):
        x = batch(rig, 0).bfloat16()
        for m, optimizer in zip((reference, model), optimizer_pair, strict=True):
            loss = (m(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] == losses[-2], n
    assert losses[-1] < losses[0]
    assert all(p.base.weight.grad is None for p in model)
    model.reshard()
    for part, bytes_before in zip(model, before, strict=True):
        after = storage_of(part.base.weight).tensors()
        assert same(after, bytes_before)


# --- what cannot be ------------------------------------------------------------------------------


@ranks(1, 2)
@recipes
def test_a_quantized_parameter_that_is_no_layers_is_refused(rig, recipe):
    """Its shards would be plain codes without scales."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            layer = make(recipe=RECIPES[recipe], device=rig.device, fp8_weights=True).head
            row, col = layer.weight.planes
            spec = layer.weight.spec
            self.weight = nn.Parameter(
                type(layer.weight)(
                    row, col, shape=layer.weight.shape, dtype=torch.float32, spec=spec
                )
            )

    model = Other()
    with pytest.raises(TypeError, match="only weights of layers that fp8rs has"):
        fully_shard(model, mesh=rig.mesh())
    # A tensor of other values is made of it all the same.
    assert type(model.weight.new_zeros(3, 4)) is torch.Tensor
