"""Delayed scaling on ranks that do different things, and with foreign optimizers.

No rank waits for a collective that another one does not join, and histories roll at each step.
"""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EMPTY, EVEN, UNEVEN, batch, linears, make, reduces, shard
from internals import state_of

SHARDED = pytest.mark.parametrize("hidden", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "empty"])


def delayed(rig, hidden=UNEVEN, **options):
    return make(hidden, recipe="delayed", device=rig.device, **options)


def step(model, x, optimizer):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def rolls(model):
    return state_of(next(iter(linears(model).values()))).delayed.rolls


def histories(model):
    return {n: layer.fp8_amax_history[:, :].clone() for n, layer in linears(model).items()}


def different(rig, n=0):
    """Return a batch whose values have a different range on each rank."""
    return batch(rig, n) * 10**rig.rank


@ranks(2)
def test_sharded_histories_do_not_depend_on_fp8_gathers(rig):
    """Training is equal with and without FP8 all-gathers."""
    results = []
    for gather in (True, False):
        model = delayed(rig, enable_fsdp_float8_all_gather=gather)
        shard(model, rig)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses = [step(model, different(rig, n), optimizer) for n in range(4)]
        scales = torch.stack([layer.fp8_scale[:, 0] for layer in linears(model).values()])
        # Histories are equal on all ranks.
        mine = scales.clone()
        largest = scales.clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        assert torch.equal(mine, largest)
        results.append((torch.stack(losses), scales))
    for with_gather, without in zip(*results, strict=True):
        assert torch.equal(with_gather, without)


@ranks(2)
def test_each_rank_of_ddp_has_its_own_scales(rig):
    """DDP broadcasts the first rank's buffers before each forward, but not these."""
    model = delayed(rig)
    layer = linears(model)["blocks.0.up"]
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.0)
    for n in range(3):
        x = different(rig, n)
        step(wrapped, x, optimizer)
    wrapped(different(rig, 3))  # DDP has broadcast its buffers
    scales = layer.fp8_amax_history[:, 1].clone()
    gathered = [torch.empty_like(scales) for _ in range(2)]
    torch.distributed.all_gather(gathered, scales)
    assert not torch.equal(*gathered)


# --- ranks that do different things --------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("sharded", [True, False])
def test_forward_in_no_grad_on_one_rank(rig, sharded):
    """A forward of a sharded model counts on all ranks, with or without gradients."""
    model = shard(delayed(rig), rig) if sharded else delayed(rig)
    with torch.set_grad_enabled(rig.rank == 0):
        y = model(batch(rig))
    if not sharded and rig.rank == 0:
        y.sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for n in range(4):
        assert step(model, batch(rig, n), optimizer).isfinite()
    assert rolls(model) == 4


@ranks(2)
@pytest.mark.parametrize("sharded", [True, False])
def test_one_rank_steps_another_optimizer_between_micro_batches(rig, sharded):
    """One rank also trains a separate head. Its steps do not count for this model."""
    model = shard(delayed(rig), rig) if sharded else delayed(rig)
    other = nn.Linear(4, 4).to(rig.device)
    beside = torch.optim.SGD(other.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for n in range(4):
        for micro in range(2):
            model(batch(rig, 2 * n + micro)).square().mean().backward()
            if rig.rank == 0:
                other(torch.ones(2, 4, device=rig.device)).sum().backward()
                beside.step()
        optimizer.step()
        optimizer.zero_grad()
    assert rolls(model) == 4


class Experts(nn.Module):
    """Two experts. Each rank runs one of them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x, which):
        return self.experts[which](self.router(x))


@ranks(2)
@pytest.mark.parametrize("named", [True, False])
def test_ranks_take_different_experts(rig, named):
    torch.manual_seed(0)
    group = torch.distributed.group.WORLD if named else None
    model = fp8rs.convert_to_float8_training(
        Experts().to(rig.device), recipe="delayed", amax_reduction_group=group
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for n in range(4):
        # The ranks swap experts before the third step.
        which = rig.rank if n < 2 else 1 - rig.rank
        x = (1.0 + rig.rank) * torch.ones(4, 32, device=rig.device)
        model(x, which).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert rolls(model) == 4
    inputs = model.router.fp8_amax_history[:4, 1]
    assert inputs.tolist() == [2.0 if named else 1.0 + rig.rank] * 4
    used = model.experts[rig.rank].fp8_amax_history[:4, 1] > 0
    assert used.tolist() == ([True] * 4 if named else [False, False, True, True])


@ranks(2)
@pytest.mark.parametrize("named", [True, False])
def test_uneven_inputs_under_join(rig, named):
    torch.manual_seed(0)
    # Ranks without inputs still step. With a group, their amaxes are reduced too.
    group = torch.distributed.group.WORLD if named else None
    model = make(UNEVEN, recipe="delayed", device=rig.device, amax_reduction_group=group)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    steps = 3 if named else 3 + 2 * rig.rank
    with Join([parallel]):
        for n in range(steps):
            assert step(parallel, batch(rig, n), optimizer).isfinite()
    assert rolls(model) == steps


@ranks(2)
def test_pipeline_stages_are_separate_models(rig):
    """Rank 0 has three layers and rank 1 has one. They send activations and gradients."""
    torch.manual_seed(rig.rank)
    layers = [nn.Linear(32, 32) for _ in range(3 if rig.rank == 0 else 1)]
    stage = nn.Sequential(*layers).to(rig.device)
    fp8rs.convert_to_float8_training(stage, recipe="delayed")
    optimizer = torch.optim.SGD(stage.parameters(), 0.01)
    for _ in range(4):
        for _micro in range(2):
            if rig.rank == 0:
                y = stage(torch.ones(4, 32, device=rig.device))
                torch.distributed.send(y.detach(), 1)
                gradient = torch.empty_like(y)
                torch.distributed.recv(gradient, 1)
                y.backward(gradient)
            else:
                x = torch.empty(4, 32, device=rig.device)
                torch.distributed.recv(x, 0)
                stage(x.requires_grad_()).square().mean().backward()
                torch.distributed.send(x.grad, 0)
        with Collectives() as collectives:
            optimizer.step()
        assert reduces(collectives) == []
        optimizer.zero_grad()
    assert rolls(stage) == 4
    assert all(all(layer.fp8_ready) for layer in stage)


# --- fp8rs.optimizer_stepped ---------------------------------------------------------------------


class Foreign:
    """An optimizer that is not a torch.optim.Optimizer."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class Foreach(Foreign):
    """A foreign optimizer that steps with one operator on lists."""

    @torch.no_grad()
    def step(self):
        grads = [p.grad for p in self.parameters]
        torch._foreach_add_(self.parameters, grads, alpha=-0.01)


def run(model, x, optimizer, micro_batches=2):
    """Run four steps and return the number of reductions of each forward and step."""
    counts = []
    for _ in range(4):
        for _ in range(micro_batches):
            with Collectives() as collectives:
                loss = model(x).square().mean()
            counts.append(len(reduces(collectives)))
            loss.backward()
        with Collectives() as collectives:
            optimizer.step()
            if isinstance(optimizer, Foreign):
                fp8rs.optimizer_stepped(model)
        counts.append(len(reduces(collectives)))
        optimizer.zero_grad()
    return counts


@ranks(2)
@pytest.mark.parametrize("kind", ["Foreign", "Foreach"])
@SHARDED
def test_foreign_optimizer_rolls_sharded_histories(rig, hidden, kind):
    model = shard(delayed(rig, hidden), rig)
    counts = run(model, batch(rig), globals()[kind](model.parameters()))
    assert rolls(model) == 4
    assert all(layer.fp8_ready[0] for layer in linears(model).values())
    # Each step has one, for the roll. The first forwards compute scales from data.
    assert counts == [1, 1, 1] * 2 + [0, 0, 1] * 2


@ranks(2)
@SHARDED
def test_foreign_optimizer_histories_equal_torchs(rig, hidden):
    results = []
    for kind in (Foreign, lambda p: torch.optim.SGD(p, 0.01)):
        model = shard(delayed(rig, hidden), rig)
        run(model, batch(rig), kind(model.parameters()))
        results.append(histories(model))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])
    assert all(h.any() for h in results[0].values())


@pytest.mark.parametrize("kind", [Foreign, Foreach])
def test_foreign_optimizer_rolls_histories(device, kind):
    model = make(recipe="delayed", device=device)
    x = torch.randn(8, 32, device=device)
    optimizer = kind(model.parameters())
    for _ in range(4):
        for _ in range(2):
            model(x).square().mean().backward()
        optimizer.step()
        fp8rs.optimizer_stepped(model)
        optimizer.zero_grad()
    assert rolls(model) == 4
    assert all(all(layer.fp8_ready) for layer in linears(model).values())


@ranks(2)
@SHARDED
def test_hand_written_updates_roll_sharded_histories(rig, hidden):
    model = shard(delayed(rig, hidden), rig)
    for n in range(4):
        model(batch(rig, n)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        fp8rs.optimizer_stepped(model)
        model.zero_grad()
    assert rolls(model) == 4


def test_updates_through_data_roll_after_optimizer_stepped(device):
    model = make(recipe="delayed", device=device)
    x = torch.randn(8, 32, device=device)
    for _ in range(4):
        model(x).square().mean().backward()
        for p in model.parameters():
            p.data -= 0.01 * p.grad
        fp8rs.optimizer_stepped(model)
        model.zero_grad()
    assert rolls(model) == 4


# --- recomputation -------------------------------------------------------------------------------


class Nested(nn.Module):
    """Checkpoints inside a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.reentrant = reentrant

    def inner(self, x):
        return self.b(x).relu()

    def outer(self, x):
        x = self.a(x).relu()
        return self.c(self.run(self.inner, x))

    def run(self, part, x):
        if self.reentrant is None:
            return part(x)
        return checkpoint(part, x, use_reentrant=self.reentrant)

    def forward(self, x):
        return self.run(self.outer, x)


def nested(device, reentrant):
    torch.manual_seed(0)
    return fp8rs.convert_to_float8_training(Nested(reentrant).to(device), recipe="delayed")


@ranks(2)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints_change_nothing(rig, reentrant, sharded):
    from torch.distributed.fsdp import fully_shard

    results = []
    for kind in (None, reentrant):
        model = nested(rig.device, kind)
        if sharded:
            for layer in (model.a, model.b, model.c):
                fully_shard(layer, mesh=rig.mesh())
            fully_shard(model, mesh=rig.mesh())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses = []
        for n in range(4):
            x = batch(rig, n).requires_grad_()
            losses.append(step(model, x, optimizer).item())
        assert rolls(model) == 4
        results.append((losses, histories(model)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][n], results[1][1][n]) for n in results[0][1])


# --- several devices -----------------------------------------------------------------------------


def test_one_model_over_two_kinds_of_device():
    """Histories stay on the devices of their layers.

    The layer on meta is not called.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32, device="meta"))
    fp8rs.convert_to_float8_training(model, recipe="delayed")
    optimizer = torch.optim.SGD(model[:2].parameters(), 0.01)
    packs = None
    for _ in range(4):
        x = torch.ones(4, 32)
        model[:2](x).sum().backward()
        now = state_of(model[0]).delayed.packs()
        assert sorted(p.scale.device.type for p in now) == ["cpu", "meta"]
        assert packs is None or all(a is b for a, b in zip(now, packs, strict=True))
        packs = now
    optimizer.step()
    assert model[0].fp8_amax_history[0].all()


@pytest.mark.gpu
def test_one_model_over_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, device="cuda:0"), nn.Linear(32, 32, device="cuda:1"))
    fp8rs.convert_to_float8_training(model, recipe="delayed")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    packs = None
    for _ in range(4):
        x = model[0](torch.ones(4, 32, device="cuda:0"))
        model[1](x.to("cuda:1")).sum().backward()
        now = state_of(model[0]).delayed.packs()
        assert packs is None or all(a is b for a, b in zip(now, packs, strict=True))
        packs = now
        optimizer.step()
        optimizer.zero_grad()
    assert all(all(layer.fp8_ready) for layer in model)


class OwnExperts(nn.Module):
    """A layer that all ranks have, and a number of experts that differs between ranks."""

    def __init__(self, count):
        super().__init__()
        self.shared = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(count))

    def forward(self, x):
        x = self.shared(x)
        return sum((expert(x) for expert in self.experts), x)


def of_own_experts(rig, **options):
    torch.manual_seed(0)
    model = OwnExperts(1 + rig.rank).to(rig.device)
    return fp8rs.convert_to_float8_training(model, recipe="delayed", **options)


def train_a_step(model, rig):
    model(torch.full((8, 32), 1.0 + rig.rank, device=rig.device)).square().mean().backward()
    # foreach kernels of torch 2.11 cannot mix DTensors with plain parameters.
    torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False).step()
    with torch.no_grad():
        model(torch.ones(8, 32, device=rig.device))


@ranks(2)
@pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])
def test_histories_are_reduced_over_the_ranks_that_share_a_layer(rig, fp8_weights):
    """Experts that only one rank has are not reduced."""
    model = of_own_experts(rig, fp8_weights=fp8_weights)
    ignored = set(model.experts.parameters())
    fully_shard(model, mesh=rig.mesh(), ignored_params=ignored)
    train_a_step(model, rig)
    amaxes = [layer.fp8_amax_history[0, 1] for layer in (model.shared, model.experts[0])]
    every = [torch.empty(2, device=rig.device) for _ in range(2)]
    torch.distributed.all_gather(every, torch.stack(amaxes))
    (shared, unshared), (others_shared, others) = every
    assert shared == others_shared == 2 and unshared != others


@ranks(2)
def test_group_with_different_layers_raises(rig):
    model = of_own_experts(rig, amax_reduction_group=torch.distributed.group.WORLD)
    with pytest.raises(ValueError, match=r"amax_reduction_group has ranks .* 2 to 3"):
        train_a_step(model, rig)


#: Writes to an FP8 weight that leave its values as they are.
RESTORING = {
    "clamp_": lambda model, weight: weight.clamp_(-100, 100),
    "swap": lambda model, weight: weight.copy_(weight.detach().clone().copy_(weight)),
    "load": lambda model, weight: model.load_state_dict(model.state_dict()),
}


@ranks(2)
@pytest.mark.parametrize("write", list(RESTORING))
def test_a_write_in_every_step_does_not_freeze_the_range_of_shards(rig, write):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False, device=rig.device))
    target = 8 * model[0].weight.detach()
    fp8rs.convert_to_float8_training(model, recipe="delayed", fp8_weights=True)
    fully_shard(model, mesh=rig.mesh())
    optimizer = fp8rs.optim.AdamW(model.parameters(), lr=6e-2, weight_decay=0.0)
    for _ in range(40):
        loss = (model(torch.eye(16, device=rig.device)).t() - target).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.reshard()
        with torch.no_grad():
            RESTORING[write](model, model[0].weight)
    assert loss < 0.1 * target.square().sum()
