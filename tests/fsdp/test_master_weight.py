"""Unsharded weights are the parameters that they were; a shard behaves like the plain tensor."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8rs
from distributed import ranks
from distributed.models import EVEN, RECIPES, batch, make
from fp8rs.fsdp import MasterWeight
from fp8rs.model.handle import ParamHandle
from internals import handle_of_tensor, local_of, state_of
from saving import reloaded


class Whole:
    world_size, rank, device = 1, 0, torch.device("cpu")


@pytest.fixture
def weight():
    """A shard as FSDP2 has it, by itself."""
    layer = make(EVEN).head
    master = MasterWeight(layer.weight, ParamHandle(layer, "weight"), requires_grad=True)
    master.layer = layer  # a `ParamHandle` does not keep its module alive
    return master


def plain(t):
    return t.high_precision if isinstance(t, MasterWeight) else t


KEEPING = {
    "detach": lambda w: w.detach(),
    "alias": torch.ops.aten.alias,
    "view": lambda w: w.view(-1),
    "view back": lambda w: w.view(-1).view(w.shape),
    "slice": lambda w: w[2:5],
    "narrow": lambda w: w.narrow(0, 1, 3),
    "narrow columns": lambda w: w.narrow(1, 4, 8),
    "split": lambda w: w.split(5)[1],
    "chunk": lambda w: w.chunk(3)[2],
    "split_with_sizes": lambda w: w.split([10, 22])[1],
    "as_strided": lambda w: w.as_strided((4, 4), (8, 1), 3),
}
NEW = {
    "clone": lambda w: w.clone(),
    "empty_like": torch.empty_like,
    "new_zeros": lambda w: w.new_zeros(3, 5),
    "new_empty": lambda w: w.new_empty(3, 5),
    "to bfloat16": lambda w: w.to(torch.bfloat16),
    "double": lambda w: w.double(),
    "to meta": lambda w: w.to("meta"),
}


@pytest.mark.parametrize("name", list(KEEPING))
def test_views_are_master_weights_that_share_memory(weight, name):
    take = KEEPING[name]
    with torch.no_grad():
        view = take(weight)
        expected = take(weight.high_precision)
    assert isinstance(view, MasterWeight)
    assert handle_of_tensor(view) is handle_of_tensor(weight)
    assert (view.shape, view.stride(), view.storage_offset()) == (
        expected.shape,
        expected.stride(),
        expected.storage_offset(),
    )
    with torch.no_grad():
        view.fill_(7.0)
    assert torch.all(take(weight.high_precision) == 7.0)


@pytest.mark.parametrize("name", list(NEW))
def test_new_tensors_stand_for_the_same_weight(weight, name):
    new = NEW[name](weight.detach())
    expected = NEW[name](weight.high_precision)
    assert isinstance(new, MasterWeight)
    assert handle_of_tensor(new) is handle_of_tensor(weight)
    assert (new.shape, new.dtype, new.device) == (expected.shape, expected.dtype, expected.device)
    if name != "to meta" and "empty" not in name:
        assert torch.equal(new.high_precision, expected)


@pytest.mark.parametrize(
    "make_state",
    [torch.zeros_like, torch.ones_like, torch.randn_like, lambda w: w + 0, lambda w: w.long()],
)
def test_optimizer_states_and_results_are_plain(weight, make_state):
    assert type(make_state(weight.detach())) is torch.Tensor


def test_arithmetic_is_that_of_the_tensor_inside(weight):
    inner = weight.high_precision
    x = torch.randn(3, 32)
    assert torch.equal(weight.detach().sum(), inner.sum())
    assert torch.equal(nn.functional.linear(x, weight.detach()), nn.functional.linear(x, inner))
    assert torch.equal(torch.cat([weight.detach(), inner]), torch.cat([inner, inner]))
    assert torch.equal(inner @ weight.detach().t(), inner @ inner.t())


def test_in_place_operations_return_the_master(weight):
    detached = weight.detach()
    assert detached.mul_(2) is detached
    assert detached.copy_(torch.ones(32, 32)) is detached
    assert torch.all(weight.high_precision == 1)
    torch._foreach_add_([detached], 1.0)
    assert torch.all(weight.high_precision == 2)
    out = torch.add(weight.high_precision, 1.0, out=detached)
    assert out is detached
    assert torch.all(weight.high_precision == 3)


def test_copying_out_of_a_master_gives_values(weight):
    out = torch.empty(32, 32)
    out.copy_(weight.detach())
    assert torch.equal(out, weight.high_precision)


def test_the_data_setter_replaces_the_values(weight):
    new = torch.randn(32, 32)
    weight.data = new
    assert weight.high_precision.data_ptr() == weight.data_ptr() == new.data_ptr()
    weight.data.add_(1)
    assert torch.equal(weight.high_precision, new)
    assert torch.equal(torch.as_tensor(weight.detach().numpy()), new)
    weight.data = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert (weight.shape, weight.dtype) == ((4, 8), torch.bfloat16)


def test_the_memory_is_real(weight):
    """Pointers, storage and what leaves torch: as of the plain tensor."""
    plain = weight.high_precision
    assert weight.data_ptr() == plain.data_ptr() != 0
    assert weight.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr()
    assert weight.untyped_storage().nbytes() == plain.numel() * 4
    assert weight.detach().tolist() == plain.tolist()
    assert (weight.detach().numpy() == plain.numpy()).all()
    weight.share_memory_()
    assert weight.is_shared()


WRITES = {
    "mul_": lambda w: w.mul_(2),
    "through a view": lambda w: w.view(-1)[3:5].fill_(1),
    "an element": lambda w: w.__setitem__((0, 0), 1.0),
    "through data": lambda w: w.data.add_(1),
    "the data setter": lambda w: setattr(w, "data", torch.zeros(32, 32)),
    "a list": lambda w: torch._foreach_mul_([w], 2.0),
    "out": lambda w: torch.add(w.high_precision, 1.0, out=w.detach()),
    "an empty part": lambda w: w[:0].zero_(),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_writes_are_seen(weight, name):
    handle = handle_of_tensor(weight)
    with torch.no_grad():
        weight.detach().sum()
        torch.empty(32, 32).copy_(weight)
        assert handle.writes == 0, "reads are not writes"
        WRITES[name](weight.detach() if name != "the data setter" else weight)
    assert handle.writes > 0


def test_a_copied_tensor_alone_keeps_its_weight(weight):
    copied = copy.deepcopy(weight.detach())
    assert handle_of_tensor(copied) is handle_of_tensor(weight)
    assert copied.high_precision.data_ptr() != weight.high_precision.data_ptr()
    assert torch.equal(copied.high_precision, weight.high_precision)


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_pickles_hold_plain_tensors(weight, save):
    buffer = io.BytesIO()
    save({"t": weight.detach()}, buffer)
    buffer.seek(0)
    assert b"fp8rs" not in buffer.getvalue()
    loaded = torch.load(buffer) if save is torch.save else pickle.load(buffer)
    assert type(loaded["t"]) is torch.Tensor
    assert torch.equal(loaded["t"], weight.high_precision)


# --- what is not sharded -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_converting_keeps_the_parameters(recipe):
    """They stay the same objects, with their optimizers, ties, hooks, gradients and attributes."""
    model = make(EVEN, recipe=None)
    model(batch(Whole)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in before.items()}
    before["head.weight"].mark = "mine"
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe])
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    pointers = set()
    for name, p in after.items():
        assert p is before[name]
        assert type(p) is nn.Parameter
        assert p.grad is gradients[name]
        pointers.add(p.data_ptr())
    assert len(pointers) == len(after)
    assert 0 not in pointers
    assert after["head.weight"].mark == "mine"
    values = {name: p.detach().clone() for name, p in after.items()}
    optimizer.step()
    assert all(not torch.equal(p, values[name]) for name, p in model.named_parameters())


def test_a_converted_model_does_what_a_plain_one_does(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make(EVEN)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[n], p) for n, p in weights.items())
    assert (model.head.weight.detach().numpy() == loaded["head.weight"].numpy()).all()
    assert model.head.weight.tolist() == loaded["head.weight"].tolist()
    with torch.inference_mode():
        state = model.state_dict()
        model.load_state_dict(state)
        model(batch(Whole))
    model.share_memory()
    assert model.head.weight.is_shared()
    model(batch(Whole)).sum().backward()


def test_a_copied_model_has_a_state_of_its_own():
    model = make(EVEN)
    copied = copy.deepcopy(model)
    assert state_of(copied.head) is not state_of(model.head)
    assert copied.head.weight is not model.head.weight
    copied(batch(Whole)).sum().backward()
    assert model.head.weight.grad is None


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_a_pickled_model_still_gathers_fp8(save, recipe):
    model = make(EVEN, recipe=RECIPES[recipe])
    model(batch(Whole)).sum().backward()
    loaded = reloaded(model, weights_only=False, save=save)
    for old, new in zip(model.modules(), loaded.modules(), strict=True):
        if isinstance(old, nn.Linear):
            assert type(new.weight) is nn.Parameter
            assert torch.equal(new.weight, old.weight)
    state = state_of(loaded.head)
    assert state.root is loaded
    assert state.sharded_model is None
    assert torch.equal(loaded(batch(Whole)), model(batch(Whole)))


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_a_pickled_layer_takes_no_model_along(save):
    model = make(EVEN)
    layer = reloaded(model.head, weights_only=False, save=save)
    assert state_of(layer).root is None
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), model.head(x))


def test_a_pickled_model_without_fp8_gather_stays_so():
    model = reloaded(make(EVEN, enable_fsdp_float8_all_gather=False), save=pickle.dump)
    assert not state_of(model.head).fp8_gather


def test_a_pickled_model_rolls_when_it_would_have():
    """Recorded amaxes roll at a step of an optimizer with the loaded model's parameters."""
    model = make(EVEN, recipe="delayed")
    for recorded in (True, False):
        if recorded:
            model(batch(Whole)).sum().backward()
        loaded = reloaded(model, save=pickle.dump)
        rows = (loaded.head.fp8_amax_history > 0).any(1).sum()
        torch.optim.SGD(loaded.parameters(), 0.0).step()
        assert (loaded.head.fp8_amax_history > 0).any(1).sum() == rows + recorded
        torch.optim.SGD(model.parameters(), 0.0).step()


def test_a_state_dict_is_plain_and_loads_back():
    model = make(EVEN)
    state = model.state_dict()
    assert all(type(v) is torch.Tensor for v in state.values())
    assert state["head.weight"].data_ptr() == model.head.weight.data_ptr()
    unconverted = make(EVEN, recipe=None, seed=1)
    unconverted.load_state_dict(state)
    other = make(EVEN, seed=2)
    other.load_state_dict(unconverted.state_dict())
    assert torch.equal(other.head.weight, model.head.weight)


def test_assign_takes_what_it_is_given():
    model = make(EVEN)
    state = make(EVEN, recipe=None, seed=1).state_dict()
    model.load_state_dict(state, assign=True)
    weight = model.head.weight
    assert type(weight) is nn.Parameter
    assert weight.requires_grad
    assert weight.data_ptr() == state["head.weight"].data_ptr()


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_assign_onto_a_meta_model(recipe):
    with torch.device("meta"):
        model = make(EVEN, device="meta", recipe=recipe)
    model.to_empty(device="cpu")
    state = make(EVEN, recipe=None, seed=1).state_dict()
    model.load_state_dict(state, assign=True)
    assert model(batch(Whole)).isfinite().all()
    reference = make(EVEN, recipe=recipe)
    reference.load_state_dict(state)
    assert torch.equal(model(batch(Whole)), reference(batch(Whole)))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_moving_a_model(recipe):
    model = make(EVEN, recipe=recipe)
    model.to(torch.bfloat16)
    assert model.head.weight.dtype == torch.bfloat16
    model.to("meta").to_empty(device="cpu")
    model.float()
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model(batch(Whole)).sum().backward()
    assert type(model.head.weight.grad) is torch.Tensor


def test_what_it_says_of_itself(weight):
    text = repr(weight)
    assert text.startswith("MasterWeight(")
    assert "requires_grad=True" in text


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.mid = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        self.looked_up = self.embed(tokens)
        return self.head(self.mid(self.looked_up))


@ranks(1, 2)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_weight_that_was_tied_after_the_conversion(rig, recipe):
    """The other module sees its values, and not what they are rounded to for the layer."""
    models = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Tied().to(rig.device)
        fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe])
        model.head.weight = model.embed.weight
        if sharded:
            with pytest.warns(UserWarning, match="head is gathered in high precision.*embed"):
                fully_shard(model, mesh=rig.mesh())
        output = model(torch.arange(64, device=rig.device))
        output.sum().backward()
        models.append((model, output))
    (reference, expected), (model, output) = models
    assert torch.equal(model.looked_up, reference.looked_up)
    assert torch.equal(output, expected)
    assert torch.equal(model.embed.weight.grad.full_tensor(), reference.embed.weight.grad)
    assert isinstance(local_of(model.mid.weight), MasterWeight)


@ranks(1, 2)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_a_cast_after_the_first_gather_is_refused(rig, fp8_weights):
    """As FSDP2 refuses it where nothing is gathered as bytes: it would read the bias as another."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe="current", fp8_weights=fp8_weights)
    fully_shard(model, mesh=rig.mesh())
    x = batch(rig, width=32)
    model.to(torch.bfloat16)
    assert model(x.bfloat16()).isfinite().all()
    model.reshard()
    model.to(torch.float32)
    with pytest.raises(RuntimeError, match=r"is torch\.float32, and was torch\.bfloat16.*cast"):
        model(x)
    # FSDP2 is not in a forward, in which its all-gather streams would not wait for the next cast.
    assert model._get_fsdp_state()._state_ctx.iter_forward_root is None
    model.to(torch.bfloat16)
    assert model(x.bfloat16()).isfinite().all()
