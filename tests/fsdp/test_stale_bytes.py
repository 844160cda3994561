"""No stale bytes from writes inside a forward, forwards inside a backward, or broken forwards.

Every rank makes these writes; each must be in the bytes of the weight's next gather, for one
all-reduce a forward, and one more for writes that are made together after it.
"""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    BLOCKS,
    HIDDEN,
    UNEVEN,
    Block,
    Stack,
    batch,
    full_weights,
    linears,
    make,
    reduces,
    same_bytes,
    shard,
    shardings,
    watch_weights,
    whole_planes,
)
from fp8rs.model.handle import ParamHandle
from fp8rs.scaling import streams
from internals import forget_units, gather_unit_of, units_of

# Recipes whose weights' bytes follow from the weights alone; delayed ones while they have no scale.
recipes = pytest.mark.parametrize("recipe", ["current", "delayed", *BLOCKS])


class Fresh:
    """Asserts that each layer's forward uses the bytes of its current master.

    The whole master is assembled from the optimizer's shards, without FSDP2.
    """

    def __init__(self, model, recipe):
        self.recipe = recipe
        self.checked = 0
        self.masters = {
            n: layer.weight
            for n, layer in linears(model).items()
            if isinstance(layer, fp8rs.nn.Linear)
        }
        watch_weights(model, self.check)

    @torch.no_grad()
    def write(self, factor):
        """Write the masters, also where FSDP2 has left a weight gathered: as optimizers do."""
        for master in self.masters.values():
            master.mul_(factor)

    def check(self, name, weight):
        if name not in self.masters:
            return
        master = self.masters[name]
        local = getattr(master.to_local(), "high_precision", master.to_local()).detach()
        group = master.device_mesh.get_group()
        rows = -(-master.shape[0] // group.size())
        padded = local.new_zeros((rows, local.shape[1]))
        padded[: local.shape[0]] = local
        full_values = local.new_empty((rows * group.size(), local.shape[1]))
        torch.distributed.all_gather_into_tensor(full_values, padded, group=group)
        full_values = full_values[: master.shape[0]]
        if self.recipe == "delayed":  # a write may be a step, which rolls: any scale will do
            scale = weight.rowwise.scale
            codes, _ = torch.ops.fp8rs.quantize(full_values, scale, torch.float8_e4m3fn)
        else:
            codes, scale, *_ = whole_planes(full_values, self.recipe)
        assert same_bytes(weight.rowwise.data, codes), name
        assert same_bytes(weight.rowwise.scale, scale), name
        self.checked += 1


def build(cls, rig, recipe, hidden):
    torch.manual_seed(0)
    model = cls(HIDDEN[hidden]).to(rig.device)
    fp8rs.convert_to_float8_training(
        model, recipe=BLOCKS.get(recipe, recipe), filter_fqns=("predictor",)
    )
    return model


def sharded(model, rig):
    """fully_shard each block and the root."""
    for part in model.modules():
        if isinstance(part, Block):
            fully_shard(part, mesh=rig.mesh())
    return fully_shard(model, mesh=rig.mesh())


# --- writes inside the root's forward, before their own gather -----------------------------------


def delay(module, args):
    """Delay the current stream. FSDP2's streams wait for it before this hook runs.

    In its first forward, a model builds its units before it gathers, which takes the host long.
    """
    if args[0].is_cuda:
        is_first = not hasattr(module, "delayed")
        module.delayed = True
        # Half a second, or some milliseconds.
        torch.cuda._sleep(1_000_000_000 if is_first else 20_000_000)


class Moving(nn.Module):
    """As BYOL and MoCo do: the forward moves the target towards the online encoder, then runs it.

    Both encoders are parts of the converted root. The first forward packs the buffers of delayed
    scaling on the delayed stream.
    """

    before = True

    def __init__(self, hidden):
        super().__init__()
        self.register_forward_pre_hook(delay)
        self.online = Stack(hidden)
        self.target = Stack(hidden)
        self.predictor = nn.Linear(32, 32)
        with torch.no_grad():
            for p in self.target.parameters():
                p.mul_(1.5).requires_grad_(False)

    @torch.no_grad()
    def move(self):
        pairs = zip(self.online.parameters(), self.target.parameters(), strict=True)
        for source, param in pairs:
            param.mul_(0.5).add_(source, alpha=0.5)

    def forward(self, x):
        if self.before:
            self.move()
            y = self.online(x)
        else:
            y = self.online(x)
            self.move()
        with torch.no_grad():
            target = self.target(x)
        return (self.predictor(y) - target).square().mean()


def shard_encoders(model, rig):
    """Encoders that have no parameter in the root's group: MoCo moves them while it is gathered."""
    for encoder in (model.online, model.target):
        shard(encoder, rig)
    return fully_shard(model, mesh=rig.mesh())


@ranks(2)
@recipes
@shardings
@pytest.mark.parametrize("before", [True, False], ids=["before", "between"])
def test_a_target_that_the_forward_moves_is_gathered_as_it_is_then(rig, before, hidden, recipe):
    model = build(Moving, rig, recipe, hidden)
    model.before = before
    shard_encoders(model, rig)
    fresh = Fresh(model, recipe)
    for n in range(3):
        model(batch(rig)).backward()
        assert fresh.checked == (n + 1) * len(fresh.masters)


@ranks(2)
def test_units_wait_for_streams_that_wrote_before_they_were_built(rig):
    model = shard(make(HIDDEN["even"], recipe="current", device=rig.device), rig)
    with (
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch.object(streams, "current_stream_id", return_value=7),
        torch.no_grad(),
    ):
        model.head.weight.mul_(2)
    for unit in units_of(model):
        assert unit.writing_streams == {7}

    forget_units(model)
    assert units_of(model)[0].writing_streams == {7}


@ranks(2)
@shardings
@pytest.mark.parametrize("before", [True, False], ids=["before", "between"])
def test_writes_made_together_cost_one_all_reduce(rig, before, hidden):
    model = build(Moving, rig, "current", hidden)
    model.before = before
    shard_encoders(model, rig)
    for _ in range(3):
        with Collectives() as forward:
            loss = model(batch(rig))
        assert len(reduces(forward)) == (1 if before else 2), forward.calls
        with Collectives() as backward:
            loss.backward()
        assert reduces(backward) == []


@ranks(2)
@shardings
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_forward_has_at_most_one_all_reduce(rig, hidden, recipe):
    model = shard(make(HIDDEN[hidden], recipe=recipe, device=rig.device), rig)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    # From the third forward on, delayed scales come from the histories.
    for expected in (1, 1, 1 if recipe == "current" else 0):
        with Collectives() as forward:
            loss = model(batch(rig)).square().mean()
        assert len(reduces(forward)) == expected, forward.calls
        with Collectives() as backward:
            loss.backward()
        assert reduces(backward) == []
        optimizer.step()


class Clipped(nn.Module):
    """The forward bounds each weight of its blocks before it runs them, as a WGAN's critic does."""

    bound = 0.05

    def __init__(self, hidden):
        super().__init__()
        self.inner = Stack(hidden)

    def forward(self, x):
        with torch.no_grad():
            for p in self.inner.blocks.parameters():
                p.clamp_(-self.bound, self.bound)
        return self.inner(x)


@ranks(2)
@recipes
@shardings
def test_weights_that_the_forward_clips(rig, hidden, recipe):
    model = sharded(build(Clipped, rig, recipe, hidden), rig)
    fresh = Fresh(model, recipe)
    model(batch(rig)).square().mean().backward()
    assert fresh.checked == len(fresh.masters)
    for name, weight in full_weights(model).items():
        if "blocks" in name:
            assert weight.abs().amax() <= Clipped.bound


class Stepping(nn.Module):
    """A wrapper whose forward is a training step, or three."""

    def __init__(self, hidden):
        super().__init__()
        self.inner = Stack(hidden)
        self.optimizer = None

    def forward(self, x, steps=1):
        losses = []
        for _ in range(steps):
            loss = self.inner(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


def step_in_forwards(model, x, forwards, steps):
    model.optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return torch.cat([model(x, steps) for _ in range(forwards)])


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "mxfp8", "mxfp8 of 1x32"])
@shardings
@pytest.mark.parametrize("steps", [1, 3])
def test_steps_in_a_forward_are_those_of_the_unsharded_model(rig, steps, hidden, recipe):
    """Both ranks have the same batch: the mean of their gradients is each one's own."""
    x = batch(rig).new_ones(8, 32) * torch.linspace(-1, 1, 32, device=rig.device)
    expected = step_in_forwards(build(Stepping, rig, recipe, hidden), x, 2, steps)
    model = build(Stepping, rig, recipe, hidden)
    shard(model.inner, rig)
    losses = step_in_forwards(model, x, 2, steps)
    assert len(set(expected.tolist())) == len(expected)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


@ranks(2)
@shardings
def test_delayed_steps_in_a_forward_see_their_own_writes(rig, hidden):
    x = batch(rig).new_ones(8, 32) * torch.linspace(-1, 1, 32, device=rig.device)
    expected = step_in_forwards(build(Stepping, rig, "delayed", hidden), x, 2, 3)
    model = build(Stepping, rig, "delayed", hidden)
    shard(model.inner, rig)
    losses = step_in_forwards(model, x, 2, 3)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


# --- a forward inside another model's backward ---------------------------------------------------


@ranks(2)
@recipes
@pytest.mark.parametrize("root", [True, False], ids=["root", "submodule"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_teacher_in_a_hook_of_its_students_backward(rig, grad, root, recipe):
    options = {"recipe": BLOCKS.get(recipe, recipe), "device": rig.device}
    # By default, FSDP2 leaves a root's own weights unsharded after a forward.
    student, teacher = (
        shard(make(UNEVEN, seed=s, **options), rig, reshard_after_forward=True) for s in (0, 1)
    )
    teacher.requires_grad_(False)
    part = teacher if root else teacher.blocks[1]
    fresh = Fresh(part, recipe)
    x = batch(rig)
    with torch.no_grad():
        teacher(x)  # a forward before, whose bytes must not come back
    runs = 0

    def teach(gradient):
        nonlocal runs
        with torch.set_grad_enabled(grad):
            assert part(x).isfinite().all()
        for module in (teacher, *teacher.blocks):  # FSDP2 does not, inside a backward
            module.reshard()
        runs += 1

    for n in range(3):
        fresh.write(1.25)
        if grad or not root:  # inside a backward, only a new forward of the root updates scales
            fp8rs.precompute_float8_dynamic_scale_for_fsdp(part)
        before = fresh.checked
        y = student(x)
        y.register_hook(teach)
        y.square().mean().backward()
        assert runs == n + 1
        assert fresh.checked > before


# --- a forward that was broken off ---------------------------------------------------------------


@ranks(2)
@recipes
@shardings
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_forward_after_one_that_was_broken_off(rig, error, hidden, recipe):
    model = make(HIDDEN[hidden], recipe=BLOCKS.get(recipe, recipe), device=rig.device)
    shard(model, rig, reshard_after_forward=True)
    x = batch(rig)
    model(x).square().mean().backward()
    fresh = Fresh(model, recipe)

    def interrupt(module, args):
        raise error("stop")

    handle = model.blocks[1].norm.register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        model(x)
    handle.remove()
    fresh.write(2.0)
    for part in (model, *model.blocks):  # plain weights, too, stay gathered then
        part.reshard()
    before = fresh.checked
    model(x).square().mean().backward()
    assert fresh.checked == before + len(fresh.masters)


# --- what models do, mixed -----------------------------------------------------------------------


class Script(nn.Module):
    """A forward that runs and writes its blocks in a given order."""

    def __init__(self, hidden):
        super().__init__()
        self.blocks = nn.ModuleList(Block(h) for h in hidden)
        self.script = ""

    def forward(self, x):
        for action, block in zip(self.script[::2], self.script[1::2], strict=True):
            part = self.blocks[int(block)]
            if action == "r":
                x = part(x)
            else:
                with torch.no_grad():
                    for p in part.parameters():
                        p.mul_(1.5)
        return x


@ranks(2)
@shardings
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize(
    ("script", "all_reduces"),
    [
        ("r0r1", 1),
        ("w0w1r0r1", 1),
        ("r0w1r1", 2),
        ("r0w0r1", 1),
        ("r0w0w1r0r1", 2),
        ("r0r1r0r1", 1),
    ],
)
def test_writes_in_any_order(rig, script, all_reduces, hidden, recipe):
    model = sharded(build(Script, rig, recipe, hidden), rig)
    model.script = script
    for _ in range(2):
        with torch.no_grad(), Collectives() as forward:
            model(batch(rig))
        if recipe == "current":
            assert len(reduces(forward)) == all_reduces, forward.calls
    fresh = Fresh(model, recipe)
    with torch.no_grad():
        model(batch(rig))
    assert fresh.checked == 2 * script.count("r")


@pytest.mark.gpu
@pytest.mark.parametrize("marked", [True, False])
def test_a_gather_waits_for_what_was_written_before_the_forward(marked):
    """And, where that was marked, for nothing that the writer's stream does afterwards."""
    layer = nn.Linear(1, 1)
    weight = ParamHandle(layer, "weight")
    unit = gather_unit_of(weight)
    main = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    written = torch.zeros(1 << 24, device="cuda")
    written.fill_(0).sum()  # a kernel's first use would wait for whatever runs
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # some hundredths of a second
    written.fill_(1)
    weight.mark_written()
    if marked:
        unit.record_write_events({})
    torch.cuda._sleep(2_000_000_000)  # a second, and more
    with torch.cuda.stream(side):
        unit.wait_for_writes()
        read = written.sum()
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert main.query() != marked
    assert read.item() == written.numel()
    written.record_stream(side)
    torch.cuda.synchronize()
