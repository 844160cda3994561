"""Selective checkpoints of FSDP2's modules give the gradients of no checkpoint, to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import compiled_models
import fp8rs
from cases import each_recipe
from distributed import ranks
from distributed.batched import SHARDINGS
from distributed.batched import build as build_experts
from distributed.batched import shard as shard_experts
from distributed.models import RECIPES, WIDTH, batch, same_bytes
from fp8rs.gemm.kernels import padded
from internals import outside_selective_checkpoints

every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


def mix(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Run operators that all-gather hooks run too, so that an output of another call is noticed.

    Operators that FSDP2 itself runs, such as ``view``, are missing. FSDP2 does not hide these.
    """
    pair = torch.stack([gate, up])
    pair = torch.where(pair > 0, pair, 0.5 * pair)
    gate, up = pair.unbind()
    largest = gate.abs().amax()
    product = torch.maximum(gate * up, -largest)
    first_column = product.select(1, 0).clone().unsqueeze(1)
    return torch.cat([first_column, product[:, 1:]], 1)


class Block(nn.Module):
    """An MLP with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 50)
        self.up = nn.Linear(WIDTH, 50)
        self.down = nn.Sequential(nn.Linear(50, WIDTH), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(mix(self.gate(h), self.up(h)))


class MixedExperts(nn.Module):
    """Experts, and operators behind them."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mix(self.experts(x), x)


class Model(nn.Module):
    """Blocks, each of which may be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Checkpointed(nn.Module):
    """Runs a module under selective checkpointing."""

    def __init__(self, module: nn.Module, policy) -> None:
        super().__init__()
        self.module = module
        self.contexts = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.module, x, use_reentrant=False, context_fn=self.contexts)


def checkpoint_blocks(model: Model, policy) -> None:
    if policy is not None:
        model.blocks = nn.ModuleList(Checkpointed(block, policy) for block in model.blocks)


def save(*names: str):
    """Return a policy that saves the outputs of operators with one of these names."""

    def policy(context, op, *args, **kwargs):
        saved = any(name in str(op) for name in names)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def recompute(*names: str):
    """Return a policy that saves the outputs of all other operators."""

    def policy(context, op, *args, **kwargs):
        recomputed = any(name in str(op) for name in names)
        return CheckpointPolicy.PREFER_RECOMPUTE if recomputed else CheckpointPolicy.MUST_SAVE

    return policy


def save_nothing(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


POLICIES = {
    "cheap operators are recomputed": recompute("gelu", "native_layer_norm", "aten.add"),
    "aten.mul is saved": save("aten.mul"),
    "GEMMs are saved": save("mm"),
    "operators of fp8rs are saved": save("fp8rs."),
    "nothing is saved": save_nothing,
    "recomputation is preferred": save(),
}

#: Calls fully_shard, and checkpoints blocks before, between or after.
PLACES = ("around FSDP's modules", "around nested modules", "within FSDP's modules", "without FSDP")


def train(rig, recipe, fp8_weights, policy, where):
    """Return the gradients of two steps, and the weights and buffers behind them."""
    torch.manual_seed(0)
    model = Model().to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    sharded = where != "without FSDP"
    mesh = rig.mesh()

    if where == "within FSDP's modules":
        checkpoint_blocks(model, policy)
    if sharded:
        for block in model.blocks:
            if where == "around nested modules":
                fully_shard(block.down, mesh=mesh)
            fully_shard(block, mesh=mesh)
    if where != "within FSDP's modules":
        checkpoint_blocks(model, policy)
    if sharded:
        fully_shard(model, mesh=mesh)

    optimizer = fp8rs.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for step in range(3):  # With delayed scaling, layers know in the third that they have scales.
        model(batch(rig, step)).square().mean().backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            results.append(gradient.full_tensor() if sharded else gradient.clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *model.buffers()]


@ranks(1, 2)
@every_recipe
@both_weights
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("where", PLACES)
def test_gradients_are_those_without_checkpoints(rig, recipe, fp8_weights, policy, where):
    expected = train(rig, recipe, fp8_weights, None, where)
    results = train(rig, recipe, fp8_weights, POLICIES[policy], where)
    assert all(map(same_bytes, results, expected))


@ranks(2)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
@both_weights
@pytest.mark.parametrize("policy", list(POLICIES))
def test_gradients_of_batched_weights_are_those_without_checkpoints(
    rig, recipe, dim, fp8_weights, policy
):
    gradients = []
    for selective in (False, True):
        model = build_experts(rig.device, recipe, 4, fp8_weights=fp8_weights)
        model.experts = MixedExperts(model.experts)
        shard_experts(model, rig, dim)
        if selective:
            model.experts = Checkpointed(model.experts, POLICIES[policy])
        for step in range(2):
            model(batch(rig, step, width=96)).square().mean().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    assert all(map(same_bytes, *gradients))


# --- compiled blocks and models -------------------------------------------------------------------


def train_compiled(rig, recipe, sharded, selective, compiled):
    """Return outputs and gradients of some steps."""
    wrap = compiled_models.selective if selective else None
    model = compiled_models.build(recipe, rig.device, wrap)
    if compiled == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    if sharded:
        for block in model.blocks:
            fully_shard(block, mesh=rig.mesh())
        fully_shard(model, mesh=rig.mesh())
    run = torch.compile(model, backend="aot_eager") if compiled == "model" else model

    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    results = []
    for step in range(3):
        y = run(compiled_models.batch(rig.device, 10 * step + rig.rank))
        y.square().mean().backward()
        results.append(y.detach().clone())
        for parameter in model.parameters():
            gradient = parameter.grad
            results.append(gradient.full_tensor() if sharded else gradient.clone())
        optimizer.step()
        optimizer.zero_grad()
    return results


@ranks(2)
@each_recipe("delayed", "mxfp8")
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "unsharded"])
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_blocks_and_models_with_checkpoints(rig, recipe, sharded, compiled):
    """The blocks inside of the checkpoints are compiled, or the model with its checkpoints."""
    torch._dynamo.reset()
    expected = train_compiled(rig, recipe, sharded, selective=False, compiled=None)
    results = train_compiled(rig, recipe, sharded, selective=True, compiled=compiled)
    torch._dynamo.reset()
    assert all(map(same_bytes, results, expected))


# --- other dispatch modes -------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def mesh():
    """A mesh of ranks that are not there: every collective returns at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


#: An operator of the all-gather hooks of master weights that no layer runs.
HOOK_OPERATORS = {
    "current": "fp8rs::multi_quantize",
    "delayed": "fp8rs::multi_quantize_delayed",
    "block": "fp8rs::block_amax",
}


@pytest.mark.parametrize("recipe", list(HOOK_OPERATORS))
def test_other_modes_see_the_operators_of_all_gather_hooks(mesh, recipe):
    policy_names = []

    def policy(context, op, *args, **kwargs):
        policy_names.append(op.name())
        return CheckpointPolicy.PREFER_RECOMPUTE

    outer = Operators()
    inner = Operators()
    with FakeTensorMode():
        model = Model()
        fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def call(x):
            with inner:
                return model.blocks[0](x)

        contexts = partial(create_selective_checkpoint_contexts, policy)
        with outer:
            x = torch.randn(16, WIDTH)
            checkpoint(call, x, use_reentrant=False, context_fn=contexts).sum().backward()

    operator = HOOK_OPERATORS[recipe]
    assert operator in outer.names
    assert operator in inner.names
    assert operator not in policy_names
    assert any(name.startswith("fp8rs::") for name in policy_names)
    gradient = model.blocks[0].up.weight.grad.to_local()
    assert isinstance(gradient, FakeTensor)


def test_padding_of_codes_is_hidden_from_policies():
    policy_names = []

    def policy(context, op, *args, **kwargs):
        policy_names.append(op.name())
        return CheckpointPolicy.MUST_SAVE

    codes = torch.ones(5, 3).to(torch.float8_e4m3fn)
    selective, _ = create_selective_checkpoint_contexts(policy)
    with selective:
        result = padded(codes, 16, 8)
    assert result.shape == (16, 8)
    assert result.float().sum() == 15
    assert not policy_names


def test_modes_are_in_their_order_again_after_an_exception():
    @outside_selective_checkpoints
    def fail(depth):
        assert torch._C._len_torch_dispatch_stack() == depth
        raise ZeroDivisionError

    selective, _ = create_selective_checkpoint_contexts(save())
    outer = Operators()
    inner = Operators()
    with outer, selective, inner:
        with pytest.raises(ZeroDivisionError):
            fail(depth=2)
        stack = [torch._C._get_dispatch_stack_at(index) for index in range(3)]
    assert stack == [outer, selective, inner]
