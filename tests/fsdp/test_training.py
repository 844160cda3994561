"""Training with FP8 gathers: the losses of one process, any optimizer, any FSDP2 setting."""

import copy
import itertools

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fp8rs
from cases import each_kind_of_recipe
from distributed import ranks
from distributed.models import (
    HIDDEN,
    RECIPES,
    UNEVEN,
    batch,
    full_weights,
    linears,
    make,
    same_bytes,
    shard,
    train,
    watch_weights,
    whole_planes,
)
from fp8rs.fsdp import MasterWeight
from internals import local_of, state_of

WHOLE = type("Whole", (), {"world_size": 1, "rank": 0})
STEPS = 20

every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))


def adamw(model):
    # Where a gradient cancels to rounding noise, an epsilon of 1e-8 would turn the noise's sign
    # into a full step, and the order in which ranks are summed into a difference of 1e-3.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def whole_batches(rig, steps=STEPS):
    """The global batches, on every rank."""
    one_rank = WHOLE()
    one_rank.device = rig.device
    return [batch(one_rank, n) for n in range(steps)]


def tolerance(rig):
    """Return the tolerance of losses.

    A rank computes scales from its own part of the batch, also the first ones of delayed scaling.
    On CUDA, other batch sizes use other GEMM kernels, which sum in another order.
    """
    return 1e-2 if rig.device_type == "cpu" else 2e-2


def mean_over_ranks(losses, rig):
    t = torch.tensor(losses, device=rig.device)
    dist.all_reduce(t)
    return t / rig.world_size


@ranks(1, 2, 4)
@every_recipe
@pytest.mark.parametrize("hidden", list(HIDDEN))
def test_losses_are_those_of_one_process(rig, recipe, hidden):
    reference = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
    expected = train(reference, adamw(reference), whole_batches(rig))
    model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    losses = train(model, adamw(model), [batch(rig, n) for n in range(STEPS)])
    got = mean_over_ranks(losses, rig)
    want = torch.tensor(expected, device=rig.device)
    assert want[-1] < 0.9 * want[0]  # it does learn
    error = ((got - want) / want).abs().max().item()
    assert error < tolerance(rig), error


@ranks(4)
@every_recipe
def test_hybrid_sharding_gives_the_losses_of_one_process(rig, recipe):
    reference = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    expected = train(reference, adamw(reference), whole_batches(rig))
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    shard(model, mesh=rig.mesh(2, 2))
    losses = train(model, adamw(model), [batch(rig, n) for n in range(STEPS)])
    want = torch.tensor(expected, device=rig.device)
    error = ((mean_over_ranks(losses, rig) - want) / want).abs().max().item()
    assert error < tolerance(rig), error


@ranks(2)
@each_kind_of_recipe
def test_two_runs_give_the_same_bytes(rig, recipe):
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
            shard(model, rig)
            tensors = []
            watch_weights(
                model,
                lambda name, w, tensors=tensors: tensors.extend(
                    [w.rowwise.data.clone(), w.rowwise.scale.clone()]
                ),
            )
            tensors += [torch.tensor(train(model, adamw(model), [batch(rig, n) for n in range(5)]))]
            runs.append(tensors)
        assert len(runs[0]) == len(runs[1]) > 40
        assert all(itertools.starmap(same_bytes, zip(*runs, strict=True)))
    finally:
        torch.use_deterministic_algorithms(False)


OPTIMIZERS = {
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


@ranks(2)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_any_optimizer(rig, name):
    """One step with given gradients moves sharded masters as it moves plain parameters."""
    converted = make(UNEVEN, device=rig.device)
    shard(converted, rig)
    plain = make(UNEVEN, recipe=None, device=rig.device)
    converted(batch(rig))
    converted.reshard()  # FSDP2 leaves the root's own parameters gathered after a forward
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (converted, plain)]
    for n in range(2):
        generator = torch.Generator(rig.device).manual_seed(n)
        for p, q in zip(converted.parameters(), plain.parameters(), strict=True):
            q.grad = torch.randn(q.shape, generator=generator, device=rig.device)
            local = p.to_local().shape[0]
            start = rig.rank * -(-q.shape[0] // rig.world_size)
            p.grad = DTensor.from_local(
                q.grad[start : start + local].clone(),
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(converted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-6, atol=1e-7)
    assert isinstance(local_of(converted.head.weight), MasterWeight)
    for state in optimizers[0].state.values():
        for value in state.values():
            if isinstance(value, DTensor):
                assert type(local_of(value)) is torch.Tensor
    # And the next forward sees the new values.
    weights = full_weights(converted)
    gathered_weights = {}
    watch_weights(
        converted, lambda name, w: gathered_weights.update({name: w.rowwise.data.clone()})
    )
    converted(batch(rig))
    for name, weight in weights.items():
        codes = torch.ops.fp8rs.quantize_current(weight, torch.float8_e4m3fn, True, False)[0]
        assert same_bytes(gathered_weights[name], codes)


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@every_recipe
def test_micro_batches(rig, reshard, recipe):
    """Accumulating without gradient sync gives the gradients of syncing each micro-batch."""
    gradients = []
    for sync in (True, False):
        model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
        shard(model, rig, reshard_after_forward=reshard)
        for n in range(3):
            last = n == 2
            model.set_requires_gradient_sync(sync or last)
            model.set_is_last_backward(last)
            if not sync and not reshard:
                model.set_reshard_after_backward(last)
            model(batch(rig, n)).square().mean().backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    for synced, late in zip(*gradients, strict=True):
        torch.testing.assert_close(late, synced, rtol=1e-4, atol=1e-6)


@ranks(2)
@each_kind_of_recipe
def test_bf16_compute_on_fp32_masters(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, rig, mp_policy=policy)
    batches = [batch(rig, n) for n in range(STEPS)]
    losses = mean_over_ranks(train(model, adamw(model), batches), rig)
    assert losses[-1] < 0.9 * losses[0]
    for p in model.parameters():
        assert p.dtype == torch.float32
    y = model(batches[0])
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model.head.weight.grad.dtype == torch.float32


@ranks(2)
@each_kind_of_recipe
def test_frozen_layers(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    shard(model, rig)
    before = full_weights(model)
    batches = [batch(rig, n) for n in range(STEPS)]
    losses = mean_over_ranks(train(model, adamw(model), batches), rig)
    assert losses[-1] < losses[0]
    after = full_weights(model)
    for name in before:
        frozen = name.startswith("blocks.0") or name == "blocks.1.up"
        assert torch.equal(before[name], after[name]) == frozen, name


@ranks(2)
@pytest.mark.parametrize("hidden", ["uneven", "empty"])
@each_kind_of_recipe
def test_cpu_offload(rig, recipe, hidden):
    losses = []
    for offload in (False, True):
        model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
        options = {}
        if offload:
            pin = rig.device_type == "cuda"
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
        shard(model, rig, **options)
        losses.append(train(model, adamw(model), [batch(rig, n) for n in range(5)]))
    rtol = 1e-4 if rig.device_type == "cpu" else 2e-2  # with offload the optimizer runs on the CPU
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=rtol, atol=0)


@ranks(2)
@pytest.mark.parametrize("policy", ["none", "bf16", "bf16, reduced in fp32"])
@pytest.mark.parametrize("reentrant", [True, False])
@every_recipe
def test_activation_checkpointing(rig, recipe, reentrant, policy):
    """The gradients are those without it: also their precision, which FSDP2's policy names."""
    mp_policy = {
        "none": MixedPrecisionPolicy(),
        "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "bf16, reduced in fp32": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
    }[policy]

    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    gradients = []
    for where in ("nowhere", "around FSDP's module", "within FSDP's module"):
        model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
        if where == "within FSDP's module":
            model.blocks = nn.ModuleList(Checkpointed(b) for b in model.blocks)
        for block in model.blocks:
            fully_shard(block, mesh=rig.mesh(), mp_policy=mp_policy)
        if where == "around FSDP's module":
            model.blocks = nn.ModuleList(Checkpointed(b) for b in model.blocks)
        fully_shard(model, mesh=rig.mesh(), mp_policy=mp_policy)
        for n in range(2):
            x = batch(rig, n).requires_grad_()
            model(x).square().mean().backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    for plain, *checkpointed in zip(*gradients, strict=True):
        for gradient in checkpointed:
            torch.testing.assert_close(plain, gradient, rtol=1e-5, atol=1e-7)


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fp8_gather", [True, False])
def test_checkpointing_the_converted_root_rolls_the_histories(rig, reentrant, fp8_gather):
    """A reentrant checkpoint runs its forward without gradients, like an evaluation."""
    torch.manual_seed(0)
    options = {"recipe": "delayed", "enable_fsdp_float8_all_gather": fp8_gather}
    models = [make(UNEVEN, recipe=None, device=rig.device) for _ in range(2)]
    losses = []
    for model, wrap in zip(models, (False, True), strict=True):
        for block in model.blocks:
            fp8rs.convert_to_float8_training(block, **options)
            fully_shard(block, mesh=rig.mesh())
        losses.append([])
        optimizer = adamw(model)
        for n in range(5):
            x = batch(rig, n).requires_grad_()
            y = x
            for block in model.blocks:
                y = checkpoint(block, y, use_reentrant=reentrant) if wrap else block(y)
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        for block in model.blocks:
            assert all(block.up.fp8_ready), (wrap, block.up.fp8_ready)
            rows = (block.up.fp8_amax_history > 0).any(1).sum()
            assert rows == 5, "one a step"
            # A module in eval mode records nothing.
            with torch.no_grad():
                block.eval()(x)
            assert (block.up.fp8_amax_history > 0).any(1).sum() == rows
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-2, atol=0)


@ranks(2)
def test_gradient_clipping(rig):
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    model(batch(rig)).square().mean().backward()
    squares = [p.grad.full_tensor().double().square().sum() for p in model.parameters()]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    full_norm = torch.stack(squares).sum().sqrt()
    assert full_norm > 0.1
    torch.testing.assert_close(norm.full_tensor().double(), full_norm, rtol=1e-5, atol=0)
    clipped = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(clipped.full_tensor().item(), 0.1, rtol=1e-3, atol=0)


@ranks(2)
@each_kind_of_recipe
def test_a_copy_of_a_converted_model_trains_by_itself(rig, recipe):
    original = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    model = copy.deepcopy(original)
    assert state_of(model.head) is not state_of(original.head)
    before = full_weights(original)
    shard(model, rig)
    batches = [batch(rig, n) for n in range(3)]
    losses = train(model, adamw(model), batches)
    for name, weight in full_weights(original).items():
        assert torch.equal(weight, before[name])
    shard(original, rig)
    assert train(original, adamw(original), batches) == losses


@ranks(2)
def test_evaluation_between_steps_changes_nothing(rig):
    for recipe in ("current", "delayed"):
        losses = []
        for evaluate in (False, True):
            model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
            shard(model, rig)
            optimizer = adamw(model)
            run = []
            for n in range(5):
                run += train(model, optimizer, [batch(rig, n)])
                if evaluate:
                    with torch.no_grad():
                        model.eval()
                        model(100 * batch(rig, 77))
                        model.train()
                    # FSDP2 leaves the root's own parameters gathered for the next forward.
            losses.append(run)
        assert losses[0] == losses[1], recipe


@ranks(2)
def test_inference_mode(rig):
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    x = batch(rig)
    first = model(x)
    first.sum().backward()
    with torch.inference_mode():
        assert torch.equal(model(x), first)
    second = model(x)
    assert torch.equal(second, first)
    second.sum().backward()


@ranks(2)
def test_tied_weights_stay_in_high_precision(rig):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 32)
            self.mid = nn.Linear(32, 32)
            self.out = nn.Linear(32, 40, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids):
            return self.out(self.mid(self.embed(ids)))

    torch.manual_seed(0)
    model = Tied().to(rig.device)
    with pytest.warns(UserWarning, match="tied"):
        fp8rs.convert_to_float8_training(model, recipe="current")
    fully_shard(model, mesh=rig.mesh())
    assert isinstance(local_of(model.mid.weight), MasterWeight)
    assert not isinstance(local_of(model.out.weight), MasterWeight)
    model(torch.arange(40, device=rig.device)).sum().backward()
    assert model.out.weight is model.embed.weight


@ranks(2)
def test_only_a_part_of_the_model_is_converted(rig):
    """The converted root need not be FSDP2's root, and there may be several."""
    torch.manual_seed(0)
    model = make(UNEVEN, recipe=None, device=rig.device)
    for block in model.blocks:
        fp8rs.convert_to_float8_training(block, recipe="current")
    shard(model, rig)
    assert not isinstance(local_of(model.head.weight), MasterWeight)
    count = sum(isinstance(m, fp8rs.nn.Linear) for m in linears(model).values())
    assert count == 4
    batches = [batch(rig, n) for n in range(STEPS)]
    losses = mean_over_ranks(train(model, adamw(model), batches), rig)
    assert losses[-1] < 0.9 * losses[0]


@ranks(2)
@every_recipe
def test_weights_of_several_dtypes(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    model.blocks[1].to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard(model, rig, mp_policy=policy)
    weights = full_weights(model)
    gathered_weights = {}
    watch_weights(
        model, lambda name, w: gathered_weights.update({name: (w.rowwise.data.clone(), w.dtype)})
    )
    model(batch(rig)).float().sum().backward()
    for name, weight in weights.items():
        assert weight.dtype == (torch.bfloat16 if "blocks.1" in name else torch.float32)
        assert same_bytes(gathered_weights[name][0], whole_planes(weight, recipe)[0])
        assert gathered_weights[name][1] == torch.bfloat16


@ranks(2)
@every_recipe
def test_some_weights_stay_gathered_between_forwards(rig, recipe):
    """Forwards without backwards, blocks that do not reshard, and a reshard in between."""
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    fully_shard(model.blocks[0], mesh=rig.mesh(), reshard_after_forward=False)
    fully_shard(model.blocks[1], mesh=rig.mesh())
    fully_shard(model, mesh=rig.mesh())
    outputs = []
    for n in range(5):
        outputs.append(model(batch(rig)))
        if n == 2:
            model.blocks[0].reshard()
    for y in outputs[1:]:
        assert torch.equal(y, outputs[0])
    for y in reversed(outputs):
        y.sum().backward()
    assert model.blocks[0].up.weight.grad is not None


@ranks(2)
@every_recipe
def test_data_parallel_without_sharding(rig, recipe):
    """DistributedDataParallel takes a converted model as it is."""
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device, seed=rig.rank)
    ddp = nn.parallel.DistributedDataParallel(model)
    losses = train(ddp, adamw(ddp), [batch(rig, n) for n in range(5)])
    reference = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    expected = train(reference, adamw(reference), whole_batches(rig, 5))
    torch.testing.assert_close(
        mean_over_ranks(losses, rig).cpu(), torch.tensor(expected), rtol=1e-2, atol=0
    )
    for p in model.parameters():
        values = [torch.empty_like(p.detach() + 0) for _ in range(2)]
        dist.all_gather(values, p.detach() + 0)
        assert torch.equal(*values)
