"""Delayed scaling: first scales from data, one roll per step, histories shared by ranks."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fp8rs
from distributed import ranks
from fp8rs.convert.convert import convert_to_float8_training
from fp8rs.optim import AdamW
from fp8rs.quantize.recipes import DelayedScaling
from fp8rs.scaling import steps
from fp8rs.scaling.delayed import DelayedScalingState, note_compiled
from internals import handle_of, state_of
from oracle.elements import E4M3, E5M2, MAX
from oracle.tensorwise import scale_from_amax
from saving import reloaded


class Scales(TorchDispatchMode):
    """Records (operator, scale) of every quantization."""

    def __init__(self):
        super().__init__()
        self.used = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fp8rs" and "quantize_delayed" in func._schema.name:
            self.used.append(args[1].reshape(()).clone())
        return func(*args, **(kwargs or {}))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32, bias=False)
        self.b = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


def weights_of(state_dict):
    """The names and values of a state dict without its histories."""
    return [(name, value) for name, value in state_dict.items() if ".fp8_" not in name]


def build(device, group=None, fp8_weights=False, **recipe):
    torch.manual_seed(0)
    model = convert_to_float8_training(
        Two().to(device),
        recipe=DelayedScaling(**recipe),
        enable_fsdp_float8_all_gather=fp8_weights,
        fp8_weights=fp8_weights,
        amax_reduction_group=group,
    )
    return model, Slots(model)


class Slots:
    """The buffers of a model's layers, by slot: weights, inputs, gradients."""

    def __init__(self, model):
        self.layers = [m for m in model.modules() if hasattr(m, "fp8_amax")]

    @property
    def amax(self):
        return torch.stack([m.fp8_amax[:3, 0] for m in self.layers], 1).view(-1)

    @property
    def scale(self):
        return torch.stack([m.fp8_scale[:, 0] for m in self.layers], 1).view(-1)

    @property
    def history(self):
        parts = [m.fp8_amax_history for m in self.layers]
        return torch.stack(parts, 2).flatten(1)

    @property
    def valid(self):
        return self.scale > 0

    @property
    def ready(self):
        return [
            ready
            for role in zip(*(m.fp8_ready for m in self.layers), strict=True)
            for ready in role
        ]


def batch(device, scale=1.0, seed=1):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(device) * scale


def amax(t):
    return t.detach().float().abs().max()


def step(model):
    """Run an optimizer step that does not change weights."""
    torch.optim.SGD(model.parameters(), 0.0).step()


# Slots of the model `Two`: weights a, b; inputs of a, b; gradients of a, b.
W_A, W_B, X_A, X_B, G_A, G_B = range(6)


def test_first_scales_come_from_the_data(device):
    model, state = build(device)
    x = batch(device, 1e-4)
    with Scales() as scales:
        model(x)
    assert torch.equal(scales.used[0], scale_from_amax(amax(x), E4M3))
    assert torch.equal(scales.used[1], scale_from_amax(amax(model.a.weight), E4M3))
    assert torch.equal(state.amax[X_A], amax(x))
    assert torch.equal(state.amax[W_A], amax(model.a.weight))


def test_first_gradients_do_not_underflow(device):
    model, state = build(device)
    (model(batch(device)).sum() * 1e-9).backward()
    assert state.amax[G_B].item() == pytest.approx(1e-9)
    assert amax(model.b.weight.grad) > 0
    assert amax(model.a.weight.grad) > 0


def test_history_scales_apply_from_the_second_step(device):
    model, state = build(device)
    first = batch(device)
    model(first).sum().backward()
    step(model)
    with Scales() as scales:
        model(first * 3)
    assert torch.equal(scales.used[0], scale_from_amax(amax(first), E4M3)), "3x saturates"
    assert torch.equal(state.amax[X_A], amax(first * 3)), "and is recorded"
    assert torch.equal(state.scale[G_B], scale_from_amax(torch.ones((), device=device), E5M2))


def test_one_roll_per_step_with_micro_batches(device):
    model, state = build(device)
    for scale in (1.0, 4.0, 2.0):
        model(batch(device, scale)).sum().backward()
    assert not state.history.any(), "nothing rolls before the optimizer steps"
    step(model)
    assert torch.equal(state.history[0, X_A], amax(batch(device, 4.0)))
    model(batch(device))
    model(batch(device))
    assert not state.history[1:].any()


def test_two_optimizers_record_once(device):
    model, state = build(device)
    model(batch(device)).sum().backward()
    for parameter in model.parameters():
        torch.optim.SGD([parameter], 0.0).step()
    model(batch(device))
    assert (state.history[:, X_A] > 0).sum().item() == 1


@pytest.fixture
def rolls(monkeypatch):
    """Return a list that gets an item for each roll."""
    results = []
    roll = DelayedScalingState.roll

    def recording_roll(*args, **options):
        results.append(options)
        return roll(*args, **options)

    monkeypatch.setattr(DelayedScalingState, "roll", recording_roll)
    return results


def test_two_optimizers_are_one_roll(device, rolls):
    model, _ = build(device)
    optimizers = [torch.optim.SGD([parameter], 0.0) for parameter in model.parameters()]
    for _ in range(3):
        model(batch(device)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert len(rolls) == 3


def test_steps_of_a_wholly_compiled_model(device, rolls):
    compiled, _ = build(device)
    torch.compile(compiled, backend="aot_eager")(batch(device)).sum().backward()
    model, _ = build(device)
    model(batch(device)).sum().backward()
    for _ in range(3):
        step(model)
    assert len(rolls) == 1, "an announced forward, and two steps without one"
    for _ in range(3):
        step(compiled)
    assert len(rolls) == 4, "a compiled forward could have run"


@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("method", ["load_state_dict", "reset_parameters"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_replaced_weights_reset_histories(device, fp8_weights, method, steps):
    """With the scales of the old weights, every evaluation would saturate."""

    def replaced(model):
        if method == "load_state_dict":
            model.load_state_dict({k: v * 100 for k, v in Two().to(device).state_dict().items()})
        else:
            torch.manual_seed(1)
            model.a.reset_parameters(), model.b.reset_parameters()
        return model.eval()

    torch.manual_seed(0)
    model, state = build(device, fp8_weights=fp8_weights)
    for n in range(steps):
        model(batch(device, 1e-2, seed=n)).sum().backward()
        step(model)
    fresh, _ = build(device, fp8_weights=fp8_weights)
    torch.manual_seed(2)
    replaced(model)
    torch.manual_seed(2)
    replaced(fresh)
    for _ in range(2):
        assert torch.equal(model(batch(device)), fresh(batch(device)))
    model.train()
    for n in range(4):  # the host knows the scales again
        model(batch(device, 10.0**n)).sum().backward()
        step(model)
    assert torch.equal(
        state.history[:4, X_A].flip(0),
        torch.stack([amax(batch(device, 10.0**n)) for n in range(4)]),
    )
    assert all(model.a.fp8_ready)


def swap(weight):
    codes = weight.detach().clone()
    weight.zero_()
    weight.copy_(codes)


def swap_values(weight):
    values = weight.dequantize()
    weight.copy_(0.5 * values)
    weight.copy_(values)


def swap_loads(model):
    codes = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: 0.5 * value.dequantize() for name, value in weights_of(codes)})
    model.load_state_dict(codes)


def load_values(model):
    state = model.state_dict()
    model.load_state_dict({name: value.dequantize() for name, value in weights_of(state)})


#: Writes that leave the weights as they are, or almost.
RESTORING = {
    "clamp_": lambda model: model.a.weight.clamp_(-100, 100),
    "clamp_ of a view": lambda model: model.a.weight.view(-1).clamp_(-100, 100),
    "rows": lambda model: model.a.weight[:8].copy_(model.a.weight[:8].dequantize()),
    "sharpness": lambda model: model.a.weight.add_(0.01).sub_(0.01),
    "decay": lambda model: model.a.weight.mul_(0.9999),
    "swap": lambda model: swap(model.a.weight),
    "swap of values": lambda model: swap_values(model.a.weight),
    "swap by loads": swap_loads,
    "load": lambda model: model.load_state_dict(model.state_dict()),
    "load of a copy": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "load of values": load_values,
}


@pytest.mark.filterwarnings("ignore:in-place arithmetic on the FP8 weight")
@pytest.mark.parametrize("write", list(RESTORING))
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_write_in_every_step_does_not_freeze_the_range_of_an_fp8_weight(
    device, write, masters, algo
):
    """Codes saturate, so their scale says nothing about how large the values are."""
    model, _ = build(device, fp8_weights=True, amax_compute_algo=algo)
    target = 8 * model.a.weight.dequantize()
    options = {"lr": 6e-2, "weight_decay": 0.0, "master_weights": masters}
    optimizer = fp8rs.optim.AdamW(model.parameters(), **options)
    for _ in range(40):
        loss = (model.a(torch.eye(16, device=device)).t() - target).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            RESTORING[write](model)
    # Without writes, it is 0.01 with masters and 0.05 without. Frozen weights stay above 0.7.
    assert loss < 0.1 * target.square().sum()


def test_zeros_that_are_written_leave_the_history(device):
    model, state = build(device, fp8_weights=True)
    model(batch(device)).sum().backward()
    step(model)
    scale = state.scale.clone()
    history = state.history.clone()
    with torch.no_grad():
        model.a.weight.zero_()
    assert torch.equal(state.scale, scale)
    assert torch.equal(state.history, history)
    assert not state.amax.any()


def train_two(model, optimizer, device, first, steps=2):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        model(torch.randn(8, 16, device=device) * (step + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", ["load_state_dict", "in place", "torch.save", "assign"])
def test_state_dicts_of_fp8_weights_resume_to_the_bit(device, method):
    """They contain the histories, as copies that later steps do not change."""
    model, other = (build(device, fp8_weights=True, amax_history_len=4)[0] for _ in range(2))
    optimizer, resumed = (AdamW(m.parameters(), lr=0.1) for m in (model, other))
    train_two(model, optimizer, device, 0)
    train_two(other, resumed, device, 7)
    state = model.state_dict()
    moments = copy.deepcopy(optimizer.state_dict())
    if method == "torch.save":
        state = reloaded(state)
    else:
        state = copy.deepcopy(state)
    expected = {name: state[name].clone() for name in state if "fp8_" in name}
    assert len(expected) == 6
    train_two(model, optimizer, device, 2)

    if method == "in place":  # as `dcp.load` fills a state dict
        filled = other.state_dict()
        with torch.no_grad():
            for name, value in filled.items():
                value.copy_(state[name])
        state = filled
    other.load_state_dict(state, assign=method == "assign")
    for name, value in expected.items():
        assert torch.equal(dict(other.named_buffers())[name], value), name
    resumed.load_state_dict(moments)
    train_two(other, resumed, device, 2)
    for (name, value), actual in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        value, actual = (
            t.dequantize() if isinstance(t, fp8rs.QuantizedTensor) else t for t in (value, actual)
        )
        assert torch.equal(value, actual), name


def test_state_dicts_of_master_weights_have_no_histories(device):
    assert set(build(device)[0].state_dict()) == {"a.weight", "b.weight"}


def test_a_history_of_another_length_is_refused(device):
    state = build(device, fp8_weights=True, amax_history_len=4)[0].state_dict()
    model, _ = build(device, fp8_weights=True, amax_history_len=8)
    with pytest.raises(RuntimeError, match=r"a\.fp8_amax_history.*\(4, 3\).*\(8, 3\)"):
        model.load_state_dict(state)


def test_a_state_dict_without_histories_resets_them(device):
    model, _ = build(device, fp8_weights=True)
    train_two(model, AdamW(model.parameters(), lr=0.1), device, 0)
    model.load_state_dict({n: v * 100 for n, v in Two().to(device).state_dict().items()})
    assert model.a.fp8_ready == (False, False, False)
    assert not model.a.fp8_amax_history[:, 1:].any()


@pytest.mark.parametrize("method", ["load_state_dict", "load of codes", "copy_"])
def test_a_history_of_replaced_values_does_not_flush_smaller_ones(device, method):
    """A checkpoint is loaded after the weights diverged."""
    model, _ = build(device, fp8_weights=True)
    saved = copy.deepcopy(model.state_dict())
    values = {name: value.dequantize() for name, value in saved.items()}
    optimizer = fp8rs.optim.AdamW(model.parameters(), lr=1e-6)

    def train():
        model(batch(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        model.a.weight.copy_(1e6 * values["a.weight"])
    for _ in range(3):
        train()
    if method == "copy_":
        with torch.no_grad():
            model.a.weight.copy_(values["a.weight"])
    else:
        model.load_state_dict(saved if method == "load of codes" else values)
    for _ in range(3):
        train()
        actual = model.a.weight.dequantize()
        assert (actual - values["a.weight"]).norm() < 0.05 * values["a.weight"].norm()


def test_cast_buffers_become_fp32_again(device):
    """FullyShardedDataParallel casts all buffers to its ``buffer_dtype``."""
    model, state = build(device)
    for n in range(3):
        for buffer in model.buffers():
            buffer.data = buffer.data.bfloat16()
        model(batch(device, 10.0**n)).sum().backward()
        step(model)
        assert state.history.dtype == torch.float32
        assert torch.equal(state.history[0, X_A], amax(batch(device, 10.0**n)))
    assert (state.history[:3, X_A] > 0).all()


#: From Dynamo, when it reads the outputs of one graph for the next.
compiled_in_part = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


class Parts(nn.Module):
    """A model that is called through a method other than forward."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def features(self, x):
        return self.b(self.a(x))


def compiled_features(kind, device, way):
    """Build a model and return its ``features``: eager, compiled, or with compiled layers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fp8rs.convert_to_float8_training(kind().to(device), recipe="delayed")
    if way == "layers":
        model.a.compile(backend="aot_eager"), model.b.compile(backend="aot_eager")
    if way == "a method":
        return model, torch.compile(model.features, backend="aot_eager")
    return model, model.features


class Called(Parts):
    def forward(self, x):
        return self.features(x)


@compiled_in_part
@pytest.mark.parametrize("way", ["layers", "whole"])
@pytest.mark.parametrize("length", [1, 1024])
def test_two_optimizers_of_compiled_code_record_once(device, rolls, way, length):
    torch._dynamo.reset()
    model, state = build(device, amax_history_len=length)
    called = model
    if way == "layers":
        model.a.compile(backend="aot_eager"), model.b.compile(backend="aot_eager")
    else:
        called = torch.compile(model, backend="aot_eager")
    optimizers = [torch.optim.SGD([parameter], 0.0) for parameter in model.parameters()]
    for n in range(3):
        called(batch(device, 10.0**n)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert len(rolls) == (3 if way == "layers" else 6), "only compiled layers show what ran"
    recorded = [amax(batch(device, 10.0**n)) for n in (2, 1, 0)][:length]
    assert torch.equal(state.history[: len(recorded), X_A], torch.stack(recorded))
    assert not state.history[len(recorded) :, X_A].any()


@compiled_in_part
@pytest.mark.parametrize("way", ["a method", "layers"])
def test_evaluations_between_compiled_steps_change_nothing(device, way):
    model, features = compiled_features(Called, device, way)
    for n in range(4):
        model.train()
        features(batch(device, 10.0**n)).sum().backward()
        model.eval()(batch(device))
        step(model)
        assert torch.equal(model.a.fp8_amax_history[0, 1], amax(batch(device, 10.0**n)))


@compiled_in_part
@pytest.mark.parametrize("way", ["eager", "a method", "layers"])
def test_compiled_layers_roll_without_a_call_of_the_model(device, way):
    model, features = compiled_features(Parts, device, way)
    for n in range(4):
        features(batch(device, 10.0**n)).sum().backward()
        step(model)
    assert (model.a.fp8_amax_history[:4] > 0).all()
    expected = scale_from_amax(amax(batch(device, 10.0**3)), E4M3)
    assert torch.equal(model.a.fp8_scale[1, 0], expected)


def test_a_compiled_step_is_one_graph(device):
    torch._dynamo.reset()
    model, state = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(optimizer.step, backend=backend)
    for _ in range(8):
        model(batch(device)).sum().backward()
        compiled()
    assert backend.frame_count == 1
    assert (state.history[:8, X_A] > 0).all()


def test_steps_notify_models_in_subscription_order():
    """The order of their collectives must be equal on all ranks."""

    class Told:
        def __init__(self, name):
            self.name = name

        def owns(self, parameters):
            return True

        def stepped(self):
            told.append(self.name)

    told = []
    models = [Told(n) for n in range(50)]
    for model in models:
        steps.subscribe(model)
    steps.subscribe(models[0])  # a second time
    del models[10:20]
    step(nn.Linear(2, 2))
    assert told == [*range(10), *range(20, 50)]


def test_assigning_load_onto_meta_allocates_histories(device):
    state = nn.Linear(16, 16).to(device).state_dict()
    with torch.device("meta"):
        model = fp8rs.convert_to_float8_training(nn.Linear(16, 16), recipe="delayed")
    model.load_state_dict(state, assign=True)
    assert {b.device.type for b in model.buffers()} == {device.type}
    for _ in range(2):
        model(batch(device)).sum().backward()
        step(model)
    assert torch.equal(model.fp8_scale[1, 0], scale_from_amax(amax(batch(device)), E4M3))


def test_optimizer_steps_without_a_forward_roll_nothing(device, rolls):
    model, _ = build(device)
    model(batch(device)).sum().backward()
    for _ in range(3):
        step(model)
    assert len(rolls) == 1


def test_optimizer_steps_without_a_forward_leave_the_scales(device):
    model, state = build(device, amax_compute_algo="most_recent")
    model(batch(device)).sum().backward()
    step(model)
    assert torch.equal(state.scale[X_A], scale_from_amax(amax(batch(device)), E4M3))
    scale = state.scale.clone()
    for _ in range(3):
        step(model)
    model(batch(device))
    assert torch.equal(state.scale, scale)


def test_a_step_after_an_evaluation_rolls_nothing(device, rolls):
    model, _ = build(device)
    model(batch(device)).sum().backward()
    step(model)
    with torch.no_grad():
        model.eval()(batch(device, 100.0))
    step(model)
    assert len(rolls) == 1


def test_the_history_forgets_after_its_length(device):
    model, state = build(device, amax_history_len=2)
    amaxes = []
    for scale in (8.0, 1.0, 1.0, 1.0):
        x = batch(device, scale)
        model(x).sum().backward()
        step(model)
        amaxes.append(amax(x))
    model(batch(device))
    assert torch.equal(state.scale[X_A], scale_from_amax(amaxes[-1], E4M3))


@pytest.mark.parametrize(("algo", "expected"), [("max", 8.0), ("most_recent", 1.0)])
def test_amax_compute_algo(device, algo, expected):
    model, state = build(device, amax_compute_algo=algo)
    for scale in (8.0, 1.0):
        model(batch(device, scale)).sum().backward()
        step(model)
    model(batch(device))
    assert torch.equal(state.scale[X_A], scale_from_amax(amax(batch(device, expected)), E4M3))


def test_margin_leaves_headroom(device):
    scales = []
    for margin in (0, 2):
        model, state = build(device, margin=margin)
        model(batch(device)).sum().backward()
        step(model)
        model(batch(device))
        scales.append(state.scale[W_A])
    torch.testing.assert_close(scales[1], scales[0] * 4)


def test_evaluations_are_not_recorded(device):
    model, state = build(device)
    with torch.no_grad():
        model.eval()(batch(device, 100.0))
    assert not state.amax.any()
    model.train()(batch(device)).sum().backward()
    before = state.amax.clone()
    with torch.no_grad(), Scales() as scales:
        model.eval()(batch(device, 100.0))
    assert torch.equal(state.amax, before)
    assert not state.history.any(), "an evaluation does not roll"
    assert len(scales.used) == 4
    step(model)
    model.train()(batch(device))
    with torch.inference_mode(), Scales() as scales:
        model.eval()(batch(device, 100.0))
    expected = scale_from_amax(amax(batch(device)), E4M3)
    assert torch.equal(scales.used[0], expected), "the history's scale"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_training(device, mode):
    model, state = build(device)
    with mode():
        first = model.eval()(batch(device))
    model.train()
    for _ in range(3):
        y = model(batch(device))
        y.sum().backward()
        step(model)
        assert torch.equal(y, first)
    assert all(state.ready)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_amaxes_never_enter_the_history(device, bad):
    model, state = build(device)
    for _ in range(3):
        model(batch(device)).sum().backward()
        step(model)
    x = batch(device)
    x[0, 0] = bad
    model.zero_grad()
    y = model(x)
    assert y.isnan().all(), "the blow-up is visible"
    y.sum().backward()
    model.zero_grad()  # a trainer would skip this step
    step(model)
    y = model(batch(device))
    assert y.isfinite().all(), "and gone with its cause"
    y.sum().backward()
    assert state.history.isfinite().all()
    assert state.scale.isfinite().all()
    assert model.a.weight.grad.isfinite().all()


def test_non_finite_first_data_is_visible_and_leaves_no_scale(device):
    model, state = build(device)
    x = batch(device)
    x[0, 0] = float("nan")
    assert model(x).isnan().all()
    step(model)
    assert model(batch(device)).isfinite().all()
    assert state.scale.isfinite().all()


def test_zeros_do_not_set_a_scale(device):
    # The second factor of a LoRA adapter starts at zero, so the gradient of the first is zero.
    model, _ = build(device)
    with torch.no_grad():
        model.b.weight.zero_()
    model(batch(device)).sum().backward()
    assert not model.a.weight.grad.any()
    step(model)
    with torch.no_grad():
        model.b.weight.fill_(1e-6)
    with Scales() as scales:
        y = model(batch(device))
        model.zero_grad()
        (y.sum() * 1e-6).backward()
    assert amax(model.a.weight.grad) > 0
    assert all(scale != 1.0 for scale in scales.used)


def test_known_scales_skip_reading_the_data(device):
    model, state = build(device)
    for _ in range(3):
        model(batch(device)).sum().backward()
        step(model)
    assert all(state.ready)

    class NoAmax(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert not func._schema.name.startswith("fp8rs::amax")
            return func(*args, **(kwargs or {}))

    state_of(model.a).begin_forward(model, (), {})
    with NoAmax():
        model.forward(batch(device)).sum().backward()


def test_slots_follow_buffers_that_are_moved_in_place():
    model, _ = build("cpu", fp8_weights=True)
    model(batch("cpu"))
    assert all(slot > 0 for slot in handle_of(model.a).slots)
    for buffer in model.a.buffers():  # as `fully_shard` does
        buffer.data = torch.zeros_like(buffer)
    assert not any(handle_of(model.a).slots)


def test_buffers_that_are_moved_in_place_still_roll(device):
    model, state = build(device)
    model(batch(device)).sum().backward()
    step(model)
    for buffer in model.buffers():  # as `fully_shard` does
        buffer.data = buffer.data.clone()
    model(batch(device, 10.0)).sum().backward()
    recorded = state.amax.clone()
    step(model)
    assert torch.equal(state.history[0], recorded)
    assert torch.equal(state.history[1, X_A], amax(batch(device)))
    assert not state.amax.any()


def test_buffers_at_another_layers_place_are_packed_again(device):
    model, _ = build(device)
    model(batch(device)).sum().backward()
    for name in ("fp8_scale", "fp8_amax", "fp8_amax_history"):
        a = model.a._buffers
        b = model.b._buffers
        a[name], b[name] = b[name], a[name]
    (pack,) = state_of(model.a).delayed.packs()
    assert torch.equal(pack.amax[0], model.a.fp8_amax)
    assert torch.equal(pack.amax[1], model.b.fp8_amax)


def through_meta(model):
    """Materialize a model as deferred initialization does."""
    weights = copy.deepcopy(model.state_dict())
    model = model.to("meta").to_empty(device=next(iter(weights.values())).device)
    model.load_state_dict(weights)
    return model


def assigned(model):
    weights = copy.deepcopy(model.state_dict())
    model.to("meta").load_state_dict(weights, assign=True)
    return model


def moved_in_place(model):
    model(batch(model.a.weight.device)).sum().backward()
    step(model)
    for buffer in model.buffers():  # as `fully_shard` does
        buffer.data = buffer.data.clone()
    model.zero_grad()
    return model


def used_in_inference_mode(model):
    """The buffers are inference tensors, as after a move in inference mode."""
    with torch.inference_mode():
        for layer in (model.a, model.b):
            for name, buffer in layer.named_buffers():
                layer._buffers[name] = buffer.clone()
        model(batch(model.a.weight.device))
    return model


#: What is done to a model before other code holds its buffers.
BEFORE = {
    "as converted": lambda model: model,
    "copied": copy.deepcopy,
    "pickled": lambda model: reloaded(model, weights_only=False),
    "materialized": through_meta,
    "assigned": assigned,
    "cast": lambda model: model.bfloat16().float(),
    "in shared memory": lambda model: model.share_memory(),
    "moved in place": moved_in_place,
    "used in inference mode": used_in_inference_mode,
}


@pytest.mark.parametrize("call", ["model", "layer"])
@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("before", list(BEFORE))
def test_restored_buffers_undo_a_trial_forward(device, before, fp8_weights, call):
    """PipelineStage infers shapes by a forward and a backward on uninitialized memory. It then
    restores the buffers that it held before."""
    model, _ = build(device, fp8_weights=fp8_weights)
    model = BEFORE[before](model)
    untouched = copy.deepcopy(model)
    if before == "used in inference mode":  # nothing can write to inference tensors
        model(batch(device))
        untouched(batch(device))
    saved_buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    (model if call == "model" else model.a)(batch(device, 1e6)).sum().backward()
    with torch.no_grad():
        for buffer, value in saved_buffers:
            buffer.copy_(value)
    model.zero_grad()

    for number in range(3):
        for module in (model, untouched):
            module(batch(device, seed=number)).square().mean().backward()
            AdamW(module.parameters(), 0.1).step()
            module.zero_grad()
        histories = zip(model.buffers(), untouched.buffers(), saved_buffers, strict=True)
        for buffer, expected, (held_buffer, _) in histories:
            assert buffer is held_buffer
            assert torch.equal(buffer, expected)


def test_to_empty_keeps_scales_finite(device):
    model, state = build(device)
    for _ in range(3):
        model(batch(device)).sum().backward()
        step(model)
    before = state.scale.clone(), state.history.clone()
    junk = [torch.full((size,), float("nan"), device=device) for size in [12, 16, 48] * 50]
    del junk  # memory that to_empty may return
    model.to_empty(device=device)
    assert torch.equal(state.scale, before[0])
    assert torch.equal(state.history, before[1])


def test_scales_are_lost_on_the_meta_device(device):
    """The host must not take scales for known that are 0."""
    model, state = build(device)
    for _ in range(3):
        model(batch(device)).sum().backward()
        step(model)
    assert all(state.ready)
    model.to("meta")
    model.to_empty(device=device)
    assert not any(state.ready)
    for layer in (model.a, model.b):
        nn.init.normal_(layer.weight)
    assert model(batch(device)).isfinite().all()


def test_a_cast_on_the_meta_device_leaves_the_buffers_in_fp32():
    model, _ = build("cpu")
    model.to("meta").bfloat16()
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_directly_called_submodule_rolls(device):
    model, state = build(device)
    for _ in range(2):
        model.a(batch(device)).sum().backward()
        step(model)
    model.a(batch(device))
    assert torch.equal(state.history[:2, X_A], amax(batch(device)).expand(2))
    assert state.valid.tolist() == [True, False, True, False, True, False]


def test_siblings_share_codes_and_keep_their_histories(device):
    class Siblings(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(16, 16)
            self.k = nn.Linear(16, 16)

        def forward(self, x):
            return self.q(x) + self.k(x)

    torch.manual_seed(0)
    model = convert_to_float8_training(
        Siblings().to(device), recipe="delayed", enable_fsdp_float8_all_gather=False
    )
    with Scales() as scales:
        model(batch(device))
    assert len(scales.used) == 3, "two weights and one input"
    history = Slots(model)
    assert history.amax[2].item() == history.amax[3].item() == amax(batch(device)).item()
    model.k(batch(device, 2.0))
    assert history.amax[3].item() == amax(batch(device, 2.0)).item()
    assert history.amax[2].item() == amax(batch(device)).item(), "k's history is its own"


class Block(nn.Module):
    """Two layers with one input, an unused layer, and a frozen layer that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.unused = nn.Linear(16, 16)

    def forward(self, x):
        x = self.frozen(x)
        return self.o(self.q(x) + self.k(x) + self.v(x))


@pytest.mark.parametrize("first", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_unused_scales_are_read_less_and_less_often(device, monkeypatch, first):
    """An unused layer never has a scale, so reads of the scales must become rarer."""
    torch.manual_seed(0)
    model = convert_to_float8_training(
        Block().to(device), recipe="delayed", enable_fsdp_float8_all_gather=False
    )
    reads = []
    roll = DelayedScalingState.roll

    def recording_roll(self, **options):
        reads.extend(self.copies)
        return roll(self, **options)

    monkeypatch.setattr(DelayedScalingState, "roll", recording_roll)
    with first():
        model(batch(device))
    for _ in range(26):
        model(batch(device)).sum().backward()
        step(model)
    assert len(reads) == 6, "after rolls 1, 2, 3, 6, 12 and 24"
    state = Slots(model)
    assert state.valid.sum() == 5 + 5 + 4, (
        "weights, inputs, gradients, without unused and frozen ones"
    )
    assert [m.fp8_ready for m in state.layers[-2:]] == [(True,) * 3, (False,) * 3]
    for _ in range(24):
        (model(batch(device)) + model.unused(batch(device))).sum().backward()
        step(model)
    assert model.unused.fp8_ready == (True,) * 3, "its scales are read after it was used"


def test_checkpointed_blocks_record_once_with_one_scale(device):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Two):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    torch.manual_seed(0)
    model = convert_to_float8_training(
        Checkpointed().to(device), recipe="delayed", enable_fsdp_float8_all_gather=False
    )
    state = Slots(model)
    for _ in range(3):
        with Scales() as scales:
            model(batch(device).requires_grad_()).sum().backward()
        forward = scales.used[:4]
        recomputed = scales.used[4:8]
        assert all(torch.equal(a, b) for a, b in zip(forward, recomputed, strict=True))
        assert torch.equal(state.amax[X_A], amax(batch(device)))
        step(model)


def test_the_buffers_move_with_the_model(device):
    model, state = build(torch.device("cpu"))
    model(batch(torch.device("cpu"))).sum().backward()
    before = state.amax.clone()
    model.to(device)
    step(model)
    model(batch(device)).sum().backward()
    assert state.amax.device.type == device.type
    assert torch.equal(state.history[0].cpu(), before)


@pytest.mark.parametrize("part", ["model", "layer"])
def test_steps_roll_after_forwards_that_are_not_announced(device, rolls, part):
    """A compiled model announces no forward. Its own forward does if only its layers are."""
    model, _ = build(device)
    note_compiled(state_of(model.a).delayed.mark, part)
    fp8rs.optimizer_stepped(model)
    assert rolls.pop() == {"maybe_no_forward": True}
    model(batch(device))
    fp8rs.optimizer_stepped(model)
    assert rolls.pop() == {"maybe_no_forward": False}
    fp8rs.optimizer_stepped(model)
    assert rolls == ([{"maybe_no_forward": True}] if part == "model" else [])


def test_training_converges(device):
    model, _ = build(device)
    torch.manual_seed(1)
    x = torch.randn(64, 16, device=device)
    target = torch.randn(64, 16, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-2)
    losses = []
    for _ in range(40):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]


def test_a_roll_updates_recorded_scales(device):
    model, state = build(device, amax_history_len=3)
    delayed = state_of(model.a).delayed
    with torch.no_grad():
        model.a.fp8_amax[:3, 0] = torch.tensor([2.0, 0.0, 5.0], device=device)
    delayed.roll()
    expected = torch.tensor([2.0 / MAX[E4M3], 0, 0, 0, 5.0 / MAX[E5M2], 0])
    torch.testing.assert_close(state.scale.cpu(), expected, rtol=1e-7, atol=0)
    assert state.valid.tolist() == [True, False, False, False, True, False]
    assert not state.amax.any()
    delayed.roll()
    assert state.ready == [True, False, False, False, True, False]
    torch.testing.assert_close(state.scale.cpu(), expected, rtol=1e-7, atol=0)


def test_a_cast_of_the_model_leaves_the_buffers_in_fp32(device):
    model, state = build(device)
    for _ in range(3):
        model(batch(device)).sum().backward()
        step(model)
    before = state.scale.clone()
    model.to(torch.bfloat16)
    assert torch.equal(state.scale, before)
    model(batch(device).bfloat16()).sum().backward()
    assert model.a.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("method", ["in place", "by data"])
def test_optimizer_stepped_rolls_after_manual_updates(device, method, fp8_weights):
    model, state = build(device, fp8_weights=fp8_weights)
    for n in range(3):
        model(batch(device)).sum().backward()
        for p in model.parameters():
            with torch.no_grad():
                if method == "in place" or fp8_weights:
                    p -= 0.0 * p.grad
                else:
                    p.data.sub_(0.0 * p.grad)
        model(batch(device))
        assert (state.history[:, X_A] > 0).sum() == n, "optimizer_stepped was not called"
        fp8rs.optimizer_stepped(model)
        assert (state.history[:, X_A] > 0).sum() == n + 1


class Mine(torch.optim.Optimizer):
    """A third party's subclass with its own step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        pass


def test_steps_of_optimizer_subclasses_are_detected(device, rolls):
    model, _ = build(device)
    optimizer = Mine(model.parameters())
    for n in range(2):
        model(batch(device)).sum().backward()
        optimizer.step()
        assert len(rolls) == n + 1


def test_missing_optimizer_steps_warn_once(device, monkeypatch):
    monkeypatch.setattr(fp8rs.scaling.delayed, "WARN_AFTER", 3)
    model, _ = build(device)
    told, _ = build(device)
    model.eval()
    for _ in range(4):
        model(batch(device))
    model.train()
    for _ in range(2):
        model(batch(device))
    with pytest.warns(UserWarning, match=r"fp8rs\.optimizer_stepped\(model\)"):
        model(batch(device))
    model(batch(device))
    told(batch(device))
    fp8rs.optimizer_stepped(told)
    for _ in range(4):
        told(batch(device))


@ranks(2)
def test_ranks_of_a_group_share_histories(rig):
    """First scales are local: a rank does not know which ranks quantize a tensor now."""
    import torch.distributed as dist

    model, state = build(rig.device, group=dist.group.WORLD)
    x = batch(rig.device, 1.0 + rig.rank)
    largest = amax(batch(rig.device, 2.0))
    for i in range(3):
        with Scales() as scales:
            model(x).sum().backward()
        assert torch.equal(scales.used[0], scale_from_amax(largest if i else amax(x), E4M3)), i
        assert torch.equal(state.amax[X_A], amax(x)), "local until the roll"
        step(model)
    assert all(state.ready)


@ranks(2)
@pytest.mark.parametrize("with_group", [True, False])
def test_unsharded_models_are_not_reduced(rig, with_group):
    """Ranks with an unsharded model may have other inputs, other layers or no layers."""
    import torch.distributed as dist

    groups = [dist.new_group([r]) for r in range(2)]
    model, _ = build(rig.device, group=groups[rig.rank] if with_group else None)
    x = batch(rig.device, 1.0 + rig.rank)
    for _ in range(3 + rig.rank):
        with Scales() as scales:
            model(x).sum().backward()
        step(model)
        assert torch.equal(scales.used[0], scale_from_amax(amax(x), E4M3))


@ranks(2)
def test_an_evaluation_on_one_rank_does_not_hang(rig):
    model, _ = build(rig.device)
    if rig.rank == 0:
        with torch.no_grad():
            assert model(batch(rig.device)).isfinite().all()


@ranks(2)
def test_amaxes_of_sharded_weights_are_reduced_over_shards(rig):
    import torch.distributed as dist

    groups = [dist.new_group([r]) for r in range(2)]
    torch.manual_seed(0)
    model = convert_to_float8_training(
        Two().to(rig.device),
        recipe="delayed",
        enable_fsdp_float8_all_gather=False,
        amax_reduction_group=groups[rig.rank],
    )
    state = Slots(model)
    state_of(model.a).delayed.add_mesh(rig.mesh(), 1)
    model(batch(rig.device))
    with torch.no_grad():
        for layer in (model.a, model.b):
            layer.fp8_amax.fill_(1.0 + rig.rank)
    step(model)
    model(batch(rig.device))
    rolled = state.history[0].tolist()
    assert rolled[W_B] == 2.0
    assert rolled[W_A] == rolled[X_A] == 1.0 + rig.rank


def test_reset_layer_that_is_unused_in_the_next_step(device):
    """An expert, for example, has no scale until its next use, even if steps come between."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(32, 32), "anew": nn.Linear(32, 32)}).to(device)
    fp8rs.convert_to_float8_training(model, recipe="delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(device)
    for names in (("used", "anew"), ("used",)):
        sum(model[name](x).square().mean() for name in names).backward()
        optimizer.step()
        optimizer.zero_grad()
        if "anew" in names:
            model["anew"].reset_parameters()
    plain = nn.functional.linear(x, model["anew"].weight, model["anew"].bias)
    assert (model["anew"](x) - plain).norm() < 0.1 * plain.norm()


def test_step_between_forward_and_backward_keeps_amaxes(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32)).to(device)
    fp8rs.convert_to_float8_training(model, recipe="delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    y = model(torch.ones(8, 32, device=device))
    optimizer.step()
    y.sum().backward()
    assert model[0].fp8_amax[2, 0] > 0


def pickled(model):
    new = reloaded(model, weights_only=False)
    for parameter, other in zip(new.parameters(), model.parameters(), strict=True):
        parameter.grad = other.grad
    return new


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copy_between_backward_and_step_rolls_at_its_step(device, copied):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32)).to(device)
    fp8rs.convert_to_float8_training(model, recipe="delayed")
    model(torch.ones(8, 32, device=device)).sum().backward()
    model = copied(model)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert (model[0].fp8_scale[:, 0] > 0).all()
    assert (model[0].fp8_amax_history[0] > 0).all()


@pytest.mark.parametrize("part", ["model", "layer"])
def test_selective_checkpoints_do_not_see_the_setup_in_the_first_forward(device, part):
    """The recomputation does not repeat it, and operators are replayed by their number."""
    model, _ = build(device)
    operators = []

    def policy(context, op, *args, **kwargs):
        if not context.is_recompute:
            operators[-1].append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    function = model if part == "model" else model.a
    for _ in range(2):
        operators.append([])
        checkpoint(function, batch(device), use_reentrant=False, context_fn=contexts)
    first, second = operators
    assert first == second
