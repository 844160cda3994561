"""Which experts a conversion converts, with which GEMMs, and their training under FSDP2."""

import copy
import inspect
import logging
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import fp8rs
import fp8rs.optim
from cases import TWO_PLANES
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import RECIPES, same_bytes
from fp8rs.fsdp.master_weight import MasterWeight
from fp8rs.model.handle import local_of
from fp8rs.tensor.quantized import QuantizedTensor
from internals import gemms_of, handle_of, handles_of, run_in_high_precision
from internals import local_of as local_tensor
from language_models import mixture, tiny_mixture, train_on
from saved_tensors import saved_tensors

KINDS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]
FP8_RECIPES = ["current", "delayed", "rowwise", "rowwise_with_gw_hp"]


class Titan(nn.Module):
    """Experts with the names and the method of torchtitan."""

    def __init__(self, experts=4, hidden=64, width=48, dtype=None):
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(experts, width, hidden, dtype=dtype) / 8)
        self.w2_EDF = nn.Parameter(torch.randn(experts, hidden, width, dtype=dtype) / 8)
        self.w3_EFD = nn.Parameter(torch.randn(experts, width, hidden, dtype=dtype) / 8)

    def forward(self, x, counts):
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        w1, w2, w3 = (
            (w.to_local() if hasattr(w, "to_local") else w).bfloat16().transpose(-2, -1)
            for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        h = F.silu(self._grouped_mm(A=x.bfloat16(), B_t=w1, offs=offs))
        h = h * self._grouped_mm(A=x.bfloat16(), B_t=w3, offs=offs)
        return self._grouped_mm(A=h, B_t=w2, offs=offs).type_as(x)

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)


class Unknown(nn.Module):
    """A module with a batch of matrices that is not known to have experts."""

    def __init__(self, *shape):
        super().__init__()
        self.batch = nn.Parameter(torch.randn(*(shape or (4, 32, 64))))
        self.convolution = nn.Conv1d(32, 32, 16)
        self.head = nn.Linear(32, 32)


def convert(model, **options):
    return fp8rs.convert_to_float8_training(model, **options)


def converted(model):
    """The converted weights of experts, and which of their GEMMs are FP8."""
    return {
        f"{n}.{name}".lstrip("."): gemms_of(m)
        for n, m in model.named_modules()
        if gemms_of(m) is not None
        for name in handles_of(m)
    }


@pytest.mark.parametrize("mode", ["fp8", "gather", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_transformers_are_converted(kind, mode):
    model = convert(mixture(kind), experts=mode)
    batches = [n for n, p in model.named_parameters() if p.dim() == 3]
    assert batches
    assert converted(model) == ({} if mode == "off" else dict.fromkeys(batches, mode))
    layer = model.model.layers[-1].mlp.experts
    used = layer.config._experts_implementation
    assert used == ("grouped_mm" if mode == "off" else "fp8rs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"experts": "fp8"}, {"recipe": "mxfp8", "fp8_weights": True}])
def test_a_conversion_leaves_the_model_config_alone(kind, options):
    """It is the user's object, from which other models and processes build models."""
    model = mixture(kind)
    before = copy.deepcopy(vars(model.config))
    convert(model, **options)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    tokens = torch.arange(64).view(2, 32)
    for module in (model, *copies):
        assert vars(module.config) == before
        experts = module.model.layers[-1].mlp.experts
        assert experts.config.config is module.config
        assert experts.config.hidden_size == module.config.hidden_size
        assert torch.equal(module(tokens).logits, model(tokens).logits)
    copies[0].set_experts_implementation("eager")
    assert model.model.layers[-1].mlp.experts.config._experts_implementation == "fp8rs"
    assert copies[0].model.layers[-1].mlp.experts.config._experts_implementation == "eager"


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("mode", ["auto", "gather", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_of_a_model_is_that_of_its_conversion(kind, mode, recipe):
    """Both have the same modules, bytes, GEMMs and reasons."""
    model = mixture(kind)
    options = {
        "recipe": recipe,
        "filter_fqns": ["lm_head", "layers.1.mlp.experts.down_proj"],
        "module_filter_fn": lambda m, name: "k_proj" not in name,
        "experts": mode,
    }
    planned = fp8rs.report(model, world_size=2, **options)
    experts = sum(
        p.numel()
        for n, p in model.named_parameters()
        if p.dim() == 3 and "1.mlp.experts.d" not in n
    )
    without_experts = fp8rs.report(model, world_size=2, **{**options, "experts": "off"})
    difference = planned.converted_parameters - without_experts.converted_parameters
    assert difference == experts * (mode != "off")
    convert(model, **options)
    assert fp8rs.report(model, world_size=2) == planned


@ranks(2)
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_the_report_of_a_sharded_model_is_that_of_its_conversion(rig, mode):
    model = mixture("qwen3_moe", rig.device)
    options = {"filter_fqns": ["lm_head", "up_proj"], "experts": mode}
    planned = fp8rs.report(model, **options)
    convert(model, **options)
    assert fp8rs.report(shard(model, rig)) == planned


@ranks(1)
def test_a_sharded_model_that_is_not_converted_has_a_report(rig):
    model = Titan().to(rig.device)
    fully_shard(model, mesh=rig.mesh())
    (group,) = fp8rs.report(model).left
    assert group.reason == "it is sharded already" and len(group.names) == 3


class Mlp(nn.Module):
    """A feed-forward network without norms, as lists of experts have them."""

    def __init__(self, hidden=64, width=48):
        super().__init__()
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)


def block_with(**modules):
    """Return a layer of attention and a mixture of 24 experts, with more modules in the mixture."""
    attention = nn.ModuleDict({"k": nn.Linear(64, 24), "o": nn.Linear(24, 64)})
    return nn.ModuleDict({"attention": attention, "moe": nn.ModuleDict(modules)})


def in_high_precision(model):
    """Return the reasons of layers, by name."""
    groups = fp8rs.report(model).left
    return {name: group.reason for group in groups for name in group.names}


ROUTER = "it is a router: its outputs select experts"
GATE = "it is a gate next to experts, with fewer than 16 outputs"


@pytest.mark.parametrize(
    "build, reasons",
    [
        (lambda: tiny_mixture("hunyuan_v1_moe"), {"mlp.gate.wg": ROUTER}),
        (lambda: tiny_mixture("afmoe"), {"mlp.router.gate": ROUTER}),
        (
            lambda: tiny_mixture("jetmoe"),
            {"mlp.router.layer": ROUTER, "self_attention.experts.router.layer": ROUTER},
        ),
        (lambda: tiny_mixture("longcat_flash"), {"mlp.router.classifier": ROUTER}),
        (lambda: tiny_mixture("zaya"), {"mlp.gate.router_mlp.out_proj": ROUTER}),
        (lambda: tiny_mixture("qwen2_moe"), {"mlp.shared_expert_gate": GATE}),
        (
            lambda: block_with(experts=Titan(24), router=nn.Linear(64, 24), gate=nn.Linear(64, 1)),
            {"moe.router": ROUTER, "moe.gate": GATE},
        ),
        (
            lambda: block_with(
                experts=nn.ModuleList(Mlp() for _ in range(24)),
                router=nn.Linear(64, 24),
                gate=nn.Linear(64, 1),
            ),
            {"moe.router": ROUTER, "moe.gate": GATE},
        ),
        (
            lambda: block_with(
                experts=nn.ModuleDict(
                    {
                        name: fp8rs.nn.GroupedLinear(24, 64, 64, bias=False, recipe="current")
                        for name in ("up", "down")
                    }
                ),
                router=nn.Sequential(nn.Linear(64, 24)),
            ),
            {"moe.router.0": ROUTER},
        ),
    ],
    ids=["hunyuan", "afmoe", "jetmoe", "longcat", "zaya", "qwen2_moe", "titan", "list", "grouped"],
)
@pytest.mark.filterwarnings("ignore:lm_head is not converted")
def test_routers_and_gates_next_to_experts_stay_in_high_precision(build, reasons):
    planned = in_high_precision(build())
    model = convert(build())
    assert in_high_precision(model) == planned
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    others = [n for n in layers if not n.endswith((*reasons, "lm_head"))]
    assert others and all(isinstance(layers[name], fp8rs.nn.Linear) for name in others)
    for ending, reason in reasons.items():
        names = [name for name in layers if name.endswith(ending)]
        assert names and {planned[name] for name in names} == {reason}


@pytest.mark.parametrize(
    "build",
    [
        # A key projection outside of the mixture, and the first layer of a shared expert.
        lambda: block_with(experts=Titan(24), shared_expert=Mlp(width=24)),
        lambda: block_with(experts=nn.ModuleList(Mlp() for _ in range(24)), shared=Mlp(width=24)),
        # A list of MLPs that run one after the other, and a small head.
        lambda: nn.ModuleDict(
            {"layers": nn.ModuleList(Mlp() for _ in range(24)), "head": nn.Linear(64, 8)}
        ),
        # A list of layers with norms, and a head with as many outputs as layers.
        lambda: nn.ModuleDict(
            {
                "layers": nn.ModuleList(nn.Sequential(nn.LayerNorm(64), Mlp()) for _ in range(24)),
                "head": nn.Linear(64, 24),
            }
        ),
        # A convolution has as many channels as the layer next to it has outputs.
        lambda: block_with(convolution=nn.Conv1d(24, 24, 4), out=nn.Linear(64, 24)),
    ],
    ids=["stack", "list", "mlps", "layers", "convolution"],
)
def test_layers_with_as_many_outputs_as_experts_are_converted(build):
    model = convert(build())
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert layers and all(isinstance(layer, fp8rs.nn.Linear) for layer in layers)


def test_a_router_is_converted_by_itself():
    router = nn.Linear(64, 24)
    assert isinstance(convert(router), fp8rs.nn.Linear)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"experts": "off"}, "experts='off'"),
        ({"filter_fqns": ["experts"]}, "named by filter_fqns"),
    ],
)
def test_excluded_experts_are_reported_with_the_reason(options, reason):
    with torch.device("meta"):
        router = nn.Linear(1024, 16, bias=False)
        model = nn.ModuleDict({"experts": Titan(4, 1024, 1024), "router": router})
    planned = fp8rs.report(model, **options)
    (group,) = planned.left
    assert group.reason == reason
    assert group.names == tuple(n for n, _ in model.named_parameters() if "experts" in n)
    convert(model, **options)
    assert fp8rs.report(model) == planned
    assert ("experts='off'; " in str(planned)) == (options == {"experts": "off"})


def test_the_log_and_the_report_count_alike(caplog):
    for name, count in (("w3_EFD", "2 weights of experts"), ("w2_EDF", "1 weight of experts")):
        model = nn.ModuleDict({"experts": Titan(), "head": nn.Linear(32, 32)})
        filters = [name, "w3_EFD"]
        caplog.clear()
        with caplog.at_level(logging.INFO, "fp8rs"):
            convert(model, filter_fqns=filters)
        report = fp8rs.report(model)
        assert f"1 linear layer and {count} converted" in caplog.text
        assert f"converted: 1 linear layer and {count} " in str(report)
        names = [name for group in report.left if "filter" in group.reason for name in group.names]
        assert f"; {len(names)} left in high precision" in caplog.text


def test_the_report_names_experts_that_a_filter_excludes():
    report = fp8rs.report(mixture("mixtral"), filter_fqns=["down_proj"])
    (excluded,) = [group for group in report.left if group.reason == "named by filter_fqns"]
    assert excluded.names and all(name.endswith("down_proj") for name in excluded.names)


def test_auto_converts_known_experts_only():
    model = nn.ModuleDict({"titan": Titan(), "unknown": Unknown()})
    model["grouped"] = fp8rs.nn.GroupedLinear(4, 32, 32)
    convert(model)
    names = [f"titan.{n}" for n in ("w1_EFD", "w2_EDF", "w3_EFD")]
    assert converted(model) == dict.fromkeys([*names, "grouped.weight"], "auto")
    model = convert(nn.ModuleDict({"unknown": Unknown()}), experts="fp8")
    assert converted(model) == {"unknown.batch": "fp8"}


def test_auto_chooses_gemms_by_size_and_rows():
    """The report names them. Recipes without FP8 GEMMs have no choice."""
    columns = (128, 1024, 8192)
    for recipe in ("current", "rowwise", "rowwise_with_gw_hp", "block", "mxfp8"):
        with torch.device("meta"):
            model = nn.ModuleDict({"large": Titan(2, 4096, 14336), "small": Titan(8, 512, 768)})
        planned = fp8rs.report(model, recipe=recipe)
        fp8 = recipe in ("current", "rowwise", "rowwise_with_gw_hp")
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
            large, small = (planned.gemms[f"{size}.{name}"] for size in ("large", "small"))
            assert tuple(large) == tuple(small) == columns
            assert small[8192] == "high precision"
            if recipe == "rowwise_with_gw_hp":
                assert "FP8" not in large.values()
                if name == "w2_EDF":
                    assert large[8192] == "FP8, high-precision wgrad"
            elif recipe != "rowwise" or name == "w2_EDF":
                # Multiplying row scales into the wide gradients of the others takes long.
                assert large[8192] == ("FP8" if fp8 else "high precision")
        reason = "" if fp8 else f"recipe '{recipe}' has no grouped FP8 GEMMs"
        assert set(planned.gemm_reasons.values()) == ({reason} if reason else set())
        assert ("FP8 is chosen where it is estimated to be 10% faster" in str(planned)) == fp8
        assert fp8rs.report(convert(model, recipe=recipe)) == planned


@pytest.mark.parametrize("mode", ["fp8", "gather"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_names_the_gemms_of_each_weight(kind, mode):
    model = mixture(kind)
    named = {n for n, p in model.named_parameters() if p.dim() == 3}
    text = "FP8" if mode == "fp8" else "high precision"
    reason = "" if mode == "fp8" else "experts='gather'"
    report = fp8rs.report(model, experts=mode)
    assert report.gemms == dict.fromkeys(named, dict.fromkeys((128, 1024, 8192), text))
    line = rf"\n  {3 * f'{text:<27}'}model\.layers\..*{f': {reason}' if reason else ''}\n"
    assert re.search(line, str(report))
    assert report.gemm_reasons == (dict.fromkeys(named, reason) if reason else {})
    assert f"; experts='{mode}'; " in str(report)
    assert not fp8rs.report(model, experts="off").gemms


def test_the_report_names_the_options_of_a_recipe_that_do_not_apply_to_experts():
    recipe = fp8rs.Float8RowwiseScaling.for_serving()
    report = fp8rs.report(mixture("mixtral"), recipe=recipe)
    reason = "input_amax_epsilon and divide_input of the recipe do not apply to experts"
    assert set(report.gemm_reasons.values()) == {reason}
    for gemms in report.gemms.values():
        assert set(gemms.values()) == {"high precision"}


def test_the_report_names_fused_gemms():
    """transformers' gated experts with one scale per expert also fuse quantization."""
    with torch.device("meta"):
        model = mixture(
            "qwen3_moe", hidden_size=2048, moe_intermediate_size=768, num_experts=128,
            num_hidden_layers=1, device="meta",
        )  # fmt: skip
    down = {}
    for recipe in ("current", "rowwise"):
        gemms = fp8rs.report(model, recipe=recipe).gemms
        down[recipe] = next(by for name, by in gemms.items() if name.endswith("down_proj"))[8192]
    assert down == {"current": "FP8", "rowwise": "high precision"}


def test_filter_fqns_match_names_of_parameters(caplog):
    model = mixture("mixtral")
    with caplog.at_level(logging.INFO, "fp8rs"):
        convert(model, filter_fqns=["layers.0.mlp.experts.down_proj", "lm_head"], experts="fp8")
    layers = [f"model.layers.{i}.mlp.experts." for i in range(2)]
    # A module with a weight in high precision has all GEMMs in high precision.
    assert converted(model) == {
        layers[0] + "gate_up_proj": "gather",
        layers[1] + "gate_up_proj": "fp8",
        layers[1] + "down_proj": "fp8",
    }
    text = caplog.text
    assert "and 3 weights of experts converted" in text
    assert (
        "experts with grouped GEMMs in high precision (another weight of the module is in high "
        f"precision): {layers[0]}gate_up_proj"
    ) in text
    assert f"(named by filter_fqns): {layers[0]}down_proj, lm_head" in text
    assert train_on(torch.arange(64).view(2, 32), model, 1)


def test_a_name_that_matches_nothing_is_a_warning():
    with pytest.warns(
        UserWarning, match=r"'none', but no linear layer and no parameter of experts"
    ):
        convert(mixture("mixtral"), filter_fqns=["down_proj", "none"])


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Titan, {"experts": "some"}, r"experts must be one of 'auto', .*, not 'some'"),
        (Titan, {"experts": "fp8", "recipe": "mxfp8"}, "experts='fp8' requires a recipe .*'mxfp8'"),
        (
            Titan,
            {
                "experts": "fp8",
                "recipe": fp8rs.Float8RowwiseScaling(high_precision_gemms=("dgrad",)),
            },
            r"experts='fp8' contradicts high_precision_gemms=\('dgrad',\)",
        ),
        (
            Titan,
            {"experts": "fp8", "recipe": fp8rs.Float8RowwiseScaling.for_serving()},
            "experts='fp8' contradicts input_amax_epsilon and divide_input of the recipe: grouped",
        ),
        (
            lambda: Unknown(4, 40, 64),
            {"experts": "fp8"},
            r"the root: batch has matrices of 40 x 64",
        ),
        (lambda: Unknown(1024, 16, 16), {"experts": "fp8"}, r"batch has 1024 experts"),
        (
            lambda: fp8rs.nn.GroupedLinear(2, 16, 16, recipe="rowwise"),
            {},
            "the root is a GroupedLinear with recipe 'rowwise', not 'current'. Build",
        ),
    ],
)
def test_what_cannot_be_converted_is_named(model, options, message):
    model = model()
    before = type(model)
    with pytest.raises(ValueError, match=message):
        convert(model, **options)
    assert type(model) is before


def test_a_second_conversion_changes_nothing():
    model = convert(nn.ModuleDict({"titan": Titan(), "head": nn.Linear(32, 32)}), experts="fp8")
    before = handle_of(model["titan"], "w1_EFD"), len(model._forward_pre_hooks)
    assert convert(model, experts="fp8") is model
    assert (handle_of(model["titan"], "w1_EFD"), len(model._forward_pre_hooks)) == before


@pytest.mark.parametrize(
    "option, value",
    [
        ("recipe", "rowwise"),
        ("experts", "fp8"),
        ("experts", "gather"),
        ("experts", "off"),
        ("enable_fsdp_float8_all_gather", False),
        ("fp8_weights", True),
    ],
)
@pytest.mark.parametrize("build", [Titan, lambda: nn.Linear(32, 32)])
def test_a_second_conversion_with_other_arguments_is_refused(build, option, value):
    """Modules that filter_fqns names keep their conversion."""
    model = convert(nn.ModuleDict({"part": build()}))
    other = {option: value}
    if option == "experts" and isinstance(model["part"], nn.Linear):
        if value == "off":
            assert convert(model, **other) is model
        else:
            with pytest.warns(UserWarning, match="has no effect"):
                assert convert(model, **other) is model
        return
    with pytest.raises(ValueError, match=f"part is already in FP8, with {option}=.*, not "):
        convert(model, **other)
    model["other"] = nn.Linear(32, 32)
    before = type(model["part"])
    convert(model, filter_fqns=["part"], **other)
    assert type(model["part"]) is before
    assert isinstance(model["other"], fp8rs.nn.Linear)


@pytest.mark.parametrize("mode", ["auto", "fp8", "gather"])
@pytest.mark.parametrize("lone", [True, False])
def test_quantized_init_converts_experts_in_the_given_mode(lone, mode):
    """Also if the model has no linear layer. A later conversion in the same mode has no effect."""
    with fp8rs.quantized_init("current", experts=mode):
        layer = fp8rs.nn.GroupedLinear(4, 32, 32)
        model = layer if lone else nn.ModuleDict({"experts": layer, "head": nn.Linear(32, 32)})
    assert isinstance(layer.weight, QuantizedTensor)
    assert gemms_of(layer) == mode
    assert convert(model, experts=mode, fp8_weights=True) is model
    other = "gather" if mode == "fp8" else "fp8"
    with pytest.raises(ValueError, match=f"with experts='{mode}', not '{other}'"):
        convert(model, experts=other, fp8_weights=True)


def test_quantized_init_can_leave_experts_in_high_precision():
    with fp8rs.quantized_init("current", experts="off"):
        model = nn.ModuleDict({"experts": Titan(), "head": nn.Linear(32, 32)})
    assert converted(model) == {}
    assert isinstance(model["head"].weight, QuantizedTensor)


def test_quantized_init_leaves_modules_alone_that_were_built_before():
    layer = fp8rs.nn.GroupedLinear(4, 32, 32)
    delayed = convert(nn.Sequential(nn.Linear(32, 32)), recipe="delayed", fp8_weights=True)
    with fp8rs.quantized_init("current"):
        nn.Sequential(layer, nn.LayerNorm(32))
        nn.Sequential(delayed, nn.LayerNorm(32))
    assert not isinstance(layer.weight, QuantizedTensor)
    assert convert(delayed, recipe="delayed", fp8_weights=True) is delayed


def test_quantized_init_refuses_a_mode_that_its_recipe_lacks_before_anything_is_built():
    says = "experts='fp8' requires a recipe with grouped FP8 GEMMs"
    with pytest.raises(ValueError, match=says), fp8rs.quantized_init("mxfp8", experts="fp8"):
        pytest.fail("the body runs")


def test_a_weight_that_a_conversion_left_out_stays_with_a_reason():
    model = convert(nn.ModuleDict({"titan": Titan()}), filter_fqns=["w1_EFD"])
    model["head"] = nn.Linear(32, 32)
    convert(model)
    reasons = {name: group.reason for group in fp8rs.report(model).left for name in group.names}
    assert reasons["titan.w1_EFD"] == "its module is converted already"


def test_a_module_filter_does_not_select_experts(caplog):
    for filtered in (False, True):
        caplog.clear()
        model = nn.ModuleDict({"experts": Titan(), "head": nn.Linear(32, 32)})
        with caplog.at_level(logging.INFO, "fp8rs"):
            convert(model, module_filter_fn=lambda m, name, out=filtered: not out)
        assert len(converted(model)) == 3
        note = "module_filter_fn does not select experts: experts= and filter_fqns do"
        assert (note in caplog.text) == filtered


def test_tied_and_integer_parameters_stay_as_they_are():
    model = nn.ModuleDict({"a": Titan(), "b": Titan()})
    model["b"].w1_EFD = model["a"].w1_EFD
    model["b"].w3_EFD = nn.Parameter(torch.zeros(2, 2, 2, dtype=torch.int8), requires_grad=False)
    convert(model)
    assert list(converted(model)) == ["a.w2_EDF", "a.w3_EFD", "b.w2_EDF"]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("build", [Titan, lambda: mixture("mixtral").model.layers[0].mlp])
def test_copies_are_converted(build, way):
    model = convert(build(), experts="fp8")
    copied = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert converted(copied) == converted(model)
    for module, other in zip(copied.modules(), model.modules(), strict=True):
        assert type(module) is type(other)
        for name in handles_of(module):
            assert handle_of(module, name).module is module


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_train(device, kind, recipe):
    tokens = torch.arange(64, device=device).view(2, 32)
    losses = []
    for mode in ("off", "fp8" if recipe in FP8_RECIPES else "gather"):
        model = mixture(kind, device)
        convert(model, recipe=RECIPES[recipe], filter_fqns=["lm_head"], experts=mode)
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dim() == 3}
        losses.append(train_on(tokens, model, 3))
        after = dict(model.named_parameters())
        assert all(not torch.equal(after[n], p) for n, p in before.items())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


# --- FSDP2 ---------------------------------------------------------------------------------------


def experts_of(model):
    return [m for m in model.modules() if gemms_of(m) is not None]


def shard(model, rig, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=rig.mesh(), **options)
    fully_shard(model, mesh=rig.mesh(), **options)
    return model


def loss_of(model, rig, step=0):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (2, 32), generator=generator).to(rig.device)
    return model(input_ids=tokens, labels=tokens).loss


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_sharded_mixtures_train_as_unsharded_ones(rig, kind, recipe):
    """Gathered codes equal the codes of the unsharded weight."""
    mode = "fp8" if recipe in FP8_RECIPES else "gather"
    losses = []
    for sharded in (False, True):
        model = mixture(kind, rig.device)
        convert(model, recipe=RECIPES[recipe], filter_fqns=["lm_head"], experts=mode)
        if sharded:
            shard(model, rig)
            for module in experts_of(model):
                for name in handles_of(module):
                    assert isinstance(local_of(module._parameters[name]), MasterWeight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(3):
            loss = loss_of(model, rig, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    # In recipes with GEMMs in high precision, unsharded weights are not rounded.
    exact = recipe in ("current", "rowwise", "rowwise_with_gw_hp")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if exact else 0.02)


@ranks(2)
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r not in TWO_PLANES])
@pytest.mark.parametrize("dim", [0, 1])
def test_experts_are_gathered_at_half_of_the_bytes_of_bf16(rig, recipe, dim):
    """Blocks along the rows gather two planes."""
    model = mixture("mixtral", rig.device, hidden_size=256, intermediate_size=256)
    convert(model, recipe=RECIPES[recipe], filter_fqns=["lm_head"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    numel = 0
    for module in experts_of(model):
        numel += sum(p.numel() for p in module.parameters())
        fully_shard(
            module, mesh=rig.mesh(), mp_policy=policy, shard_placement_fn=lambda p: Shard(dim)
        )
    with Collectives() as collectives:
        for module in experts_of(model):
            module.unshard()
    for module in experts_of(model):
        assert all(isinstance(p, QuantizedTensor) for p in module.parameters())
    # An all-reduce of scales sends and receives as much as two gathers of its size.
    nbytes = collectives.nbytes("gather") + 2 * collectives.nbytes("reduce")
    assert 0.5 <= nbytes / (2 * numel) <= 0.52


@ranks(2)
@pytest.mark.parametrize("mode", ["fp8", "gather"])
def test_mixed_precision_and_checkpointing(rig, mode):
    """Two gathers of the backward, the recomputation's and FSDP2's own, give the same gradients."""
    gradients = []
    for checkpointed in (False, True):
        model = convert(mixture("qwen3_moe", rig.device), filter_fqns=["lm_head"], experts=mode)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, rig, mp_policy=policy).train()
        loss_of(model, rig).backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def train_fp8_weights(model, rig):
    optimizer = fp8rs.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        loss = loss_of(model, rig)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert step < 2 or losses[-1] < losses[0]
    return losses


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_fp8_weights_of_experts_train_sharded_as_unsharded(rig, kind, recipe):
    mode = "fp8" if recipe in FP8_RECIPES else "gather"
    losses = []
    for sharded in (False, True):
        model = mixture(kind, rig.device)
        options = {"fp8_weights": True, "filter_fqns": ["lm_head"], "experts": mode}
        convert(model, recipe=RECIPES[recipe], **options)
        for module in experts_of(model):
            for name in handles_of(module):
                assert isinstance(module._parameters[name], QuantizedTensor)
        if sharded:
            shard(model, rig)
        losses.append(train_fp8_weights(model, rig))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@ranks(2)
@pytest.mark.parametrize(
    "kind, mode, recipe",
    [
        ("mixtral", "fp8", "current"),
        # Compiled unsharded, and sharded uncompiled, in the first tier.
        pytest.param("gpt_oss", "fp8", "rowwise", marks=pytest.mark.second_tier),
        ("qwen3_moe", "gather", "mxfp8"),
    ],
)
def test_compiled_blocks_read_gathered_weights(rig, kind, mode, recipe):
    """Nothing is compiled again after an optimizer step or for another number of tokens."""
    results = []
    frames = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = mixture(kind, rig.device)
        convert(model, recipe=recipe, experts=mode, filter_fqns=["lm_head"])
        shard(model, rig, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        counter = CompileCounterWithBackend("aot_eager")
        for layer in model.model.layers if compiled else ():
            layer.mlp.compile(backend=counter, fullgraph=True, dynamic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results.append([])
        for length in (32, 48, 16):
            tokens = torch.arange(2 * length, device=rig.device).view(2, length) % 64
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results[-1].append(loss.item())
            frames.append(counter.frame_count)
    assert results[0] == results[1]
    assert 1 <= frames[3] <= len(model.model.layers) and len(set(frames[3:])) == 1
    torch._dynamo.reset()


@ranks(2)
@pytest.mark.parametrize("client", ["titan", "grouped"])
@pytest.mark.parametrize("mode", ["fp8", "gather"])
def test_other_clients_use_gathered_codes(rig, client, mode):
    """Compare with an unsharded module, converted or with dequantized weights."""
    torch.manual_seed(0)
    rows = torch.randn(40, 64, device=rig.device, dtype=torch.bfloat16)
    counts = torch.tensor([7, 0, 20, 13], device=rig.device)
    if client == "titan":
        model = Titan(dtype=torch.bfloat16)
        routing = counts
    else:
        model = fp8rs.nn.GroupedLinear(4, 64, 32, dtype=torch.bfloat16)
        routing = counts.cumsum(0).int()
    model.to(rig.device)
    reference = copy.deepcopy(model)
    if mode == "fp8":
        convert(reference, experts="fp8")
    else:
        with torch.no_grad():
            for p in reference.parameters():
                if p.dim() == 3:
                    codes, _, scale = torch.ops.fp8rs.quantize_current(
                        p, torch.float8_e4m3fn, True, False, batched=True
                    )
                    p.copy_(codes.float() * scale.view(-1, 1, 1))
        if client == "grouped":
            run_in_high_precision(reference)
    fully_shard(convert(model, experts=mode), mesh=rig.mesh())
    results = []
    for module in (model, reference):
        x = rows.clone().requires_grad_()
        y = module(x, routing)
        y.float().square().sum().backward()
        grads = [p.grad for p in module.parameters()]
        results.append(
            [
                y.detach(),
                x.grad,
                *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads),
            ]
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@ranks(2)
@pytest.mark.parametrize("mode, recipe", [("fp8", "rowwise"), ("gather", "block")])
def test_no_values_of_gathered_weights_are_saved_for_the_backward(rig, mode, recipe):
    model = Titan(dtype=torch.bfloat16).to(rig.device)
    fully_shard(convert(model, recipe=recipe, experts=mode), mesh=rig.mesh())
    x = torch.randn(40, 64, device=rig.device, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved:
        model(x, torch.tensor([7, 0, 20, 13], device=rig.device)).sum().backward()
    assert saved and all(t.dim() < 3 for t in saved)
    assert x.grad.any()


@ranks(2)
def test_fp8_weights_do_not_depend_on_whether_expert_parallelism_came_first(rig):
    """Each rank quantizes its own experts, of which the second rank has fewer."""
    mesh = rig.mesh(1, 2, names=("efsdp", "ep"))
    for recipe in ("current", "delayed", "rowwise", "block", "mxfp8"):
        options = {"recipe": recipe, "experts": "gather", "fp8_weights": True}
        models = []
        for first in ("conversion", "expert parallelism"):
            torch.manual_seed(0)
            model = Titan(experts=3).to(rig.device)
            if first == "conversion":
                convert(model, preserve_high_precision_init_val=True, **options)
            for name, p in list(model.named_parameters()):
                part = distribute_tensor(p.detach(), mesh["ep"], [Shard(0)])
                model.register_parameter(name, nn.Parameter(part))
            weights = dict(model.named_parameters())
            if first != "conversion":
                convert(model, preserve_high_precision_init_val=True, **options)
            assert all(p is weights[name] for name, p in model.named_parameters())
            models.append(model)

        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert b.shape == (3, *a.shape[1:]) and b.placements == a.placements
            assert same_bytes(local_tensor(a).dequantize(), local_tensor(b).dequantize())
            if recipe == "mxfp8":
                # The largest value of a block may have been rounded to the end of its binade. Parts
                # are distributed as values, so the block's exponent may then be one smaller.
                continue
            for plane, other in zip(planes_of(a), planes_of(b), strict=True):
                assert same_bytes(plane.data, other.data), (recipe, name)
                assert same_bytes(plane.scale, other.scale), (recipe, name)

        results = []
        for model in models:
            fully_shard(model, mesh=mesh["efsdp"])
            optimizer = fp8rs.optim.AdamW(model.parameters(), lr=1e-2)
            x = torch.randn(40, 64, generator=torch.Generator().manual_seed(rig.rank))
            counts = torch.tensor([30, 10] if rig.rank == 0 else [40], device=rig.device)
            for _ in range(2):
                y = model(x.to(rig.device), counts)
                y.square().sum().backward()
                optimizer.step()
            results.append(y)
        assert torch.equal(*results), recipe


def planes_of(parameter):
    return [plane for plane in local_tensor(parameter).planes if plane is not None]


@ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("mode", ["fp8", "gather"])
@pytest.mark.parametrize("first", ["conversion", "expert parallelism"])
def test_ranks_of_expert_parallelism_compute_their_own_experts(rig, mode, dim, first):
    """The weights are DTensors over the ranks that have other experts, as in torchtitan."""
    torch.manual_seed(0)
    reference = Titan(experts=6, dtype=torch.bfloat16).to(rig.device)
    mesh = init_device_mesh(rig.device.type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = copy.deepcopy(reference)
    if first == "conversion":
        convert(model, experts=mode)
    for name, p in reference.named_parameters():
        part = distribute_tensor(p.detach(), mesh["ep"], [Shard(0)])
        model.register_parameter(name, nn.Parameter(part))
    convert(model, experts=mode)
    fully_shard(model, mesh=mesh["efsdp"], shard_placement_fn=lambda p: Shard(dim))
    local_experts = Titan(experts=3, dtype=torch.bfloat16).to(rig.device)
    with torch.no_grad():
        for p, values in zip(local_experts.parameters(), reference.parameters(), strict=True):
            p.copy_(values.chunk(2)[mesh["ep"].get_local_rank()])
            if mode == "gather":
                codes, _, scale = torch.ops.fp8rs.quantize_current(
                    p, torch.float8_e4m3fn, True, False, batched=True
                )
                p.copy_(codes.float() * scale.view(-1, 1, 1))
    convert(local_experts, experts=mode)
    x = torch.randn(40, 64, device=rig.device, dtype=torch.bfloat16)
    x[33:] = torch.nan  # rows without an expert
    counts = torch.tensor([7, 0, 26], device=rig.device)
    results = []
    for module in (model, local_experts):
        y = module(x, counts)[:33]
        y.float().square().sum().backward()
        grads = [p.grad for p in module.parameters()]
        results.append([y.detach(), *(local_of_grad(g) for g in grads)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def local_of_grad(grad):
    """A gradient of all of this rank's experts."""
    if not hasattr(grad, "device_mesh"):
        return grad
    return grad.redistribute(placements=[Replicate(), Shard(0)]).to_local()


@ranks(2)
def test_sharded_experts_are_refused(rig):
    model = Titan().to(rig.device)
    fully_shard(model, mesh=rig.mesh())
    with pytest.raises(ValueError, match="w1_EFD is sharded already: convert before fully_shard"):
        convert(model)


# --- what the report and other processes say -----------------------------------------------------


def test_gemms_that_depend_on_the_forward_are_reported_with_the_condition(caplog):
    """Llama 4 calls torch.bmm, so that only its all-gathers are in FP8."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=48, num_local_experts=4
    )
    experts = transformers.models.llama4.modeling_llama4.Llama4TextExperts(config)
    nn.init.normal_(experts.gate_up_proj)
    nn.init.normal_(experts.down_proj)
    condition = "if the module's forward calls torch's grouped GEMMs"
    model = nn.ModuleDict({"llama": experts, "titan": Titan()})
    planned = fp8rs.report(model)
    assert planned.gemm_reasons == dict.fromkeys(
        ["llama.gate_up_proj", "llama.down_proj"], condition
    )
    assert f"  llama.gate_up_proj, llama.down_proj: {condition}\n" in str(planned)
    x = torch.randn(40, 64)
    expected = experts(x)
    with caplog.at_level(logging.INFO, "fp8rs"):
        convert(model)
    assert f"FP8 where it is faster ({condition}): llama.gate_up_proj" in caplog.text
    assert fp8rs.report(model) == planned
    assert torch.equal(model["llama"](x), expected)
    alone = fp8rs.report(Unknown(), experts="fp8")
    assert alone.gemm_reasons == {"batch": condition}
    assert "FP8 is chosen where" in str(fp8rs.report(nn.ModuleDict({"llama": experts})))


@ranks(2)
@pytest.mark.parametrize("other", ["batched_mm", "eager"])
def test_another_experts_implementation_multiplies_dequantized_weights(rig, other):
    """The report says so, and the implementation can be selected again by either name."""
    model = convert(mixture("mixtral", rig.device), experts="fp8", filter_fqns=["lm_head"])
    gather = convert(mixture("mixtral", rig.device), experts="gather", filter_fqns=["lm_head"])
    shard(model, rig), shard(gather, rig)
    before = loss_of(model, rig)
    planned = fp8rs.report(model)
    model.set_experts_implementation(other)
    loss = loss_of(model, rig)
    expected = loss_of(gather, rig)
    torch.testing.assert_close(loss, expected)
    assert loss != before
    loss.backward()
    report = fp8rs.report(model)
    reason = f"the experts implementation '{other}' was selected after the conversion"
    assert set(report.gemm_reasons.values()) == {reason}
    assert {text for by in report.gemms.values() for text in by.values()} == {"high precision"}
    for name in ("grouped_mm", "fp8rs"):
        model.set_experts_implementation(name)
        assert fp8rs.report(model) == planned
        assert torch.equal(loss_of(model, rig), before)


@pytest.fixture
def ep_size():
    """Skip the test if the DistributedConfig of this release of transformers has no ``ep_size``."""
    distributed = pytest.importorskip("transformers.distributed")
    if "ep_size" not in inspect.signature(distributed.DistributedConfig).parameters:
        pytest.skip("transformers has no DistributedConfig(ep_size=...)")


def distribute(model, **sizes):
    """Shard a model as transformers does when it loads one with a DistributedConfig."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**sizes)
    config, _, mesh = model.prepare_distribute_model(config)
    return model.maybe_distribute_model(model, config, mesh)


@pytest.mark.usefixtures("ep_size")
@ranks(2)
@pytest.mark.parametrize("recipe, mode", [("current", "fp8"), ("mxfp8", "gather")])
def test_a_converted_model_trains_under_expert_parallelism_of_transformers(rig, recipe, mode):
    model = mixture("qwen3_moe", rig.device)
    options = {"recipe": recipe, "experts": mode, "filter_fqns": ["lm_head"]}
    reference, parallel = (convert(copy.deepcopy(model), **options) for _ in range(2))
    distribute(parallel, fsdp_size=2, ep_size=2)
    results = []
    for module in (shard(reference, rig), parallel):
        loss = loss_of(module, rig)
        loss.backward()
        gradients = {n: p.grad.full_tensor() for n, p in module.named_parameters()}
        results.append((loss.detach(), gradients))
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("ep_size")
@ranks(2)
def test_a_model_that_transformers_has_sharded_is_refused(rig):
    model = distribute(mixture("qwen3_moe", rig.device), fsdp_size=2, ep_size=2)
    with pytest.raises(ValueError, match="q_proj is sharded already: convert before fully_shard"):
        convert(model)


@pytest.mark.usefixtures("ep_size")
@ranks(2)
def test_experts_are_converted_after_tensor_parallelism_of_transformers(rig):
    """It replaces the forwards of linear layers, which stay in high precision with a warning."""
    model = mixture("qwen3_moe", rig.device)
    reference = convert(copy.deepcopy(model), experts="fp8", filter_fqns=["lm_head", "attn"])
    distribute(model, tp_size=2, ep_size=2)
    with pytest.warns(UserWarning, match="for example tensor parallelism of transformers"):
        convert(model, experts="fp8", filter_fqns=["lm_head"])
    assert converted(model) == converted(reference)
    torch.testing.assert_close(loss_of(model, rig), loss_of(reference, rig))


def test_a_saved_model_computes_in_another_process(tmp_path):
    """The process must register the experts implementation, which no conversion has done there."""
    model = convert(mixture("mixtral"), experts="fp8")
    tokens = torch.arange(64).view(2, 32)
    torch.save((model, tokens, model(tokens).logits), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, tokens, logits = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(model(tokens).logits, logits)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@ranks(1)
def test_sharded_modules_are_recognized_by_their_own_class(rig):
    """FSDP2 gives them a class of torch."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Unknown(4, 512, 512)

        def forward(self):
            raise NotImplementedError

    for sharded in (False, True):
        model = Model()
        if sharded:
            fully_shard(model.part, mesh=rig.mesh())
        reasons = {name: group.reason for group in fp8rs.report(model).left for name in group.names}
        assert reasons["part.batch"] == "not known as experts, see experts='gather'"
    with pytest.raises(ValueError, match=r"part\.batch is sharded already: convert before"):
        convert(model, experts="gather", filter_fqns=["head"])


def test_quantized_init_leaves_experts_alone_that_were_built_before():
    layer = fp8rs.nn.GroupedLinear(4, 32, 32)
    with fp8rs.quantized_init("current"):
        model = nn.Sequential(layer, nn.Linear(32, 32))
    assert not isinstance(layer.weight, QuantizedTensor)
    assert isinstance(model[1].weight, QuantizedTensor)


def test_quantized_init_converts_a_module_at_the_address_of_a_former_child():
    with fp8rs.quantized_init("current"):
        parent = nn.Sequential(nn.ReLU())
        parent[0] = nn.Tanh()
        layers = [nn.Linear(32, 32) for _ in range(4)]
    assert all(isinstance(layer.weight, QuantizedTensor) for layer in layers)
