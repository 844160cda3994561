"""A master weight behaves like the high-precision tensor in it, and stays one where it must."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from distributed.models import EVEN, RECIPES, batch, make
from fp8rs.fsdp import MasterWeight


class Whole:
    world_size, rank, device = 1, 0, torch.device("cpu")


@pytest.fixture
def layer():
    return make(EVEN).head


@pytest.fixture
def weight(layer):
    return layer.weight


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
    assert view._slot is weight._slot
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
    assert new._slot is weight._slot
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


def test_the_data_setter_replaces_the_values(layer):
    weight = layer.weight
    new = torch.randn(32, 32)
    weight.data = new
    assert weight.high_precision.data_ptr() == new.data_ptr()
    assert layer.weight is weight
    weight.data.add_(1)
    assert torch.equal(weight.high_precision, new)
    weight.data = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert (weight.shape, weight.dtype) == ((4, 8), torch.bfloat16)


def test_parameters_stay_parameters(weight):
    again = nn.Parameter(weight.detach(), requires_grad=False)
    assert isinstance(again, nn.Parameter)
    assert isinstance(again, MasterWeight)
    assert not again.requires_grad
    assert weight.requires_grad
    assert weight.is_leaf


def test_a_copied_tensor_alone_keeps_its_slot(weight):
    again = copy.deepcopy(weight)
    assert isinstance(again, nn.Parameter)
    assert again._slot is weight._slot
    assert again.high_precision.data_ptr() != weight.high_precision.data_ptr()
    assert torch.equal(again.high_precision, weight.high_precision)


def test_a_copied_model_has_slots_of_its_own():
    model = make(EVEN)
    again = copy.deepcopy(model)
    for old, new in zip(model.modules(), again.modules(), strict=True):
        if isinstance(old, nn.Linear):
            assert old.weight._slot.module is old
            assert new.weight._slot.module is new
            assert new.weight._slot.state is again.head._fp8_state
    assert again.head._fp8_state is not model.head._fp8_state


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_pickles_hold_plain_tensors(weight, save):
    buffer = io.BytesIO()
    save({"p": weight, "t": weight.detach()}, buffer)
    buffer.seek(0)
    assert b"fp8rs" not in buffer.getvalue()
    loaded = torch.load(buffer) if save is torch.save else pickle.load(buffer)
    assert type(loaded["p"]) is nn.Parameter
    assert type(loaded["t"]) is torch.Tensor
    assert torch.equal(loaded["p"], weight.high_precision)


def reload(model, save):
    """A model after a round trip through bytes."""
    buffer = io.BytesIO()
    save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False) if save is torch.save else pickle.load(buffer)


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_a_pickled_model_still_gathers_fp8(save, recipe):
    model = make(EVEN, recipe=RECIPES[recipe])
    model(batch(Whole)).sum().backward()
    again = reload(model, save)
    for old, new in zip(model.modules(), again.modules(), strict=True):
        if isinstance(old, nn.Linear):
            assert isinstance(new.weight, MasterWeight)
            assert isinstance(new.weight, nn.Parameter)
            assert new.weight._slot.module is new
            assert torch.equal(new.weight.high_precision, old.weight.high_precision)
    assert again.head._fp8_state.root is again
    assert torch.equal(again(batch(Whole)), model(batch(Whole)))


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_a_pickled_layer_takes_no_model_along(save):
    model = make(EVEN)
    layer = reload(model.head, save)
    assert isinstance(layer.weight, MasterWeight)
    assert layer._fp8_state.root is None
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), model.head(x))


def test_a_pickled_model_without_fp8_gather_stays_so():
    model = reload(make(EVEN, enable_fsdp_float8_all_gather=False), pickle.dump)
    assert type(model.head.weight) is nn.Parameter


def test_a_pickled_model_rolls_when_it_would_have():
    """Optimizer steps are counted by process; a loaded model's last roll is in another's count."""
    model = make(EVEN, recipe="delayed")
    model(batch(Whole)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    for stepped in (True, False):
        again = reload(model, pickle.dump)
        history = again.head._fp8_state.history
        rows = (history.history > 0).any(1).sum()
        again(batch(Whole))
        assert (history.history > 0).any(1).sum() == rows + stepped
        model(batch(Whole)).sum().backward()


def test_a_state_dict_is_plain_and_loads_back():
    model = make(EVEN)
    state = model.state_dict()
    assert all(type(v) is torch.Tensor for v in state.values())
    assert state["head.weight"].data_ptr() == model.head.weight.high_precision.data_ptr()
    unconverted = make(EVEN, recipe=None, seed=1)
    unconverted.load_state_dict(state)
    other = make(EVEN, seed=2)
    other.load_state_dict(unconverted.state_dict())
    assert torch.equal(other.head.weight.high_precision, model.head.weight.high_precision)


def test_assign_wraps_what_it_assigns():
    model = make(EVEN)
    state = make(EVEN, recipe=None, seed=1).state_dict()
    model.load_state_dict(state, assign=True)
    weight = model.head.weight
    assert isinstance(weight, MasterWeight)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.high_precision.data_ptr() == state["head.weight"].data_ptr()


def test_assign_onto_a_meta_model():
    with torch.device("meta"):
        model = make(EVEN, device="meta")
    state = make(EVEN, recipe=None, seed=1).state_dict()
    model.load_state_dict(state, assign=True)
    assert isinstance(model.head.weight, MasterWeight)
    model(batch(Whole)).sum().backward()


def test_moving_a_model():
    model = make(EVEN)
    model.to(torch.bfloat16)
    assert isinstance(model.head.weight, MasterWeight)
    assert model.head.weight.dtype == torch.bfloat16
    model.to("meta").to_empty(device="cpu")
    assert isinstance(model.head.weight, MasterWeight)
    model.float()
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model(batch(Whole)).sum().backward()
    assert type(model.head.weight.grad) is torch.Tensor


def test_padding_is_read_off_the_storage(weight):
    whole = weight.detach().new_zeros(10, 8)
    assert whole.narrow(0, 0, 7).padded_numel == 80
    assert whole.narrow(0, 0, 0).padded_numel == 80
    moved = whole.narrow(0, 0, 7).to(torch.bfloat16)
    assert moved.high_precision.untyped_storage().nbytes() < 80 * 2
    assert moved.padded_numel == 80


def test_what_it_says_of_itself(weight):
    text = repr(weight)
    assert text.startswith("MasterWeight(")
    assert "requires_grad=True" in text
