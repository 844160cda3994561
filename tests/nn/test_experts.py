"""Modules of experts whose grouped GEMMs are replaced, and the experts of transformers."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8rs
from cases import pad_tokens
from fp8rs.gemm import estimates
from fp8rs.nn import grouped_function
from fp8rs.nn.functional import grouped_linear
from language_models import mixture
from saved_tensors import saved_tensors

E, HIDDEN, WIDTH = 4, 64, 48


class Experts(nn.Module):
    """Experts as many libraries compute them, with weights (E, out, in)."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)

        def weight(*shape):
            values = torch.randn(*shape, device="cpu") * shape[-1] ** -0.5
            return nn.Parameter(values.to(device, torch.bfloat16))

        self.w1 = weight(E, WIDTH, HIDDEN)
        self.w3 = weight(E, WIDTH, HIDDEN)
        self.w2 = weight(E, HIDDEN, WIDTH)

    def forward(self, x, offs):
        gate = F.silu(F.grouped_mm(x, self.w1.transpose(-2, -1), offs=offs))
        up = F.grouped_mm(x, self.w3.transpose(-2, -1), offs=offs)
        return torch._grouped_mm(gate * up, self.w2.transpose(-2, -1), offs=offs)

    def expected(self, x, offs):
        """The result with the function of fp8rs."""
        gate = F.silu(grouped_linear(x, self.w1, offs))
        return grouped_linear(gate * grouped_linear(x, self.w3, offs), self.w2, offs)


class Transposed(Experts):
    """Experts with weights (E, in, out)."""

    def __init__(self, device):
        super().__init__(device)
        for name in ("w1", "w2", "w3"):
            values = getattr(self, name).detach().transpose(-2, -1).contiguous()
            setattr(self, name, nn.Parameter(values))

    def forward(self, x, offs):
        gate = F.silu(F.grouped_mm(x, self.w1, offs=offs))
        up = F.grouped_mm(x, self.w3, offs=offs)
        return torch._grouped_mm(gate * up, self.w2, offs=offs)

    def expected(self, x, offs):
        w1, w2, w3 = (w.transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        gate = F.silu(grouped_linear(x, w1, offs))
        return grouped_linear(gate * grouped_linear(x, w3, offs), w2, offs)


class Titan(Experts):
    """Experts as torchtitan computes them: one method for all grouped GEMMs."""

    def forward(self, x, offs):
        gate = F.silu(self._grouped_mm(A=x, B_t=self.w1.bfloat16().transpose(-2, -1), offs=offs))
        up = self._grouped_mm(A=x, B_t=self.w3.bfloat16().transpose(-2, -1), offs=offs)
        h = gate * up
        return self._grouped_mm(A=h, B_t=self.w2.bfloat16().transpose(-2, -1), offs=offs)

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)


CLIENTS = [Experts, Transposed, Titan]


def rows(device, count=40, seed=0):
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    offs = torch.tensor([7, 7, count - 9, count], dtype=torch.int32, device=device)
    return x.to(device, torch.bfloat16), offs


def gradients(function, module, x, *arguments):
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = function(leaf, *arguments)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("client", CLIENTS)
def test_grouped_gemms_of_a_module_run_on_fp8_operands(device, client):
    module = fp8rs.convert_to_float8_training(client(device), experts="fp8")
    inputs = rows(device)
    actual = gradients(module, module, *inputs)
    expected = gradients(module.expected, module, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not torch.equal(actual[0], client(device)(*inputs))


@pytest.mark.parametrize("client", CLIENTS)
def test_gathers_in_fp8_leave_the_gemms_of_unsharded_weights_alone(device, client):
    module = fp8rs.convert_to_float8_training(client(device), experts="gather")
    inputs = rows(device)
    expected = client(device)
    actual = gradients(module, module, *inputs)
    expected = gradients(expected, expected, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class GateAndUp(nn.Module):
    """Experts with gate and up in one parameter (E, 2, F, D)."""

    def __init__(self, device, width):
        super().__init__()
        values = torch.randn(E, 2, width, HIDDEN, generator=torch.Generator().manual_seed(0))
        self.w13 = nn.Parameter(values.to(device, torch.bfloat16))

    def forward(self, x, offs):
        gate, up = self.w13.unbind(1)
        first, _ = self.w13.flatten(1, 2).chunk(2, dim=1)
        weights = (w.transpose(-2, -1) for w in (gate, up, first))
        return torch.cat([F.grouped_mm(x, w, offs=offs) for w in weights], 1)


@pytest.mark.parametrize("width", [48, 40])
@pytest.mark.parametrize("mode", ["gather", "fp8"])
def test_views_that_split_matrices_are_multiplied_in_high_precision(device, mode, width):
    """They have no codes of their own, and sizes that FP8 GEMMs may not support."""
    module = GateAndUp(device, width)
    plain = GateAndUp(device, width)
    fp8rs.convert_to_float8_training(module, experts=mode, fp8_weights=True)
    with torch.no_grad():
        plain.w13.copy_(module.w13.dequantize())
    x, offs = rows(device)
    leaf = x.clone().requires_grad_()
    plain_leaf = x.clone().requires_grad_()
    y = module(leaf, offs)
    wanted = plain(plain_leaf, offs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    y.backward(dy)
    wanted.backward(dy)
    assert torch.equal(y, wanted)
    assert torch.equal(leaf.grad, plain_leaf.grad)
    assert torch.equal(module.w13.grad, plain.w13.grad)


def test_other_grouped_gemms_stay_in_high_precision(device):
    class Other(Experts):
        def forward(self, x, offs):
            y = super().forward(x, offs)
            return y, torch._grouped_mm(x.t(), y, offs=offs)

    module = fp8rs.convert_to_float8_training(Other(device), experts="fp8")
    x, offs = rows(device)
    y, product = module(x, offs)
    assert torch.equal(product, torch._grouped_mm(x.t(), y, offs=offs))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_compiled_module_is_one_graph_for_any_number_of_rows(device, client):
    torch._dynamo.reset()
    module = fp8rs.convert_to_float8_training(client(device), experts="fp8")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for count in (40, 64, 200):
        inputs = rows(device, count, seed=count)
        actual = gradients(compiled, module, *inputs)
        expected = gradients(module, module, *inputs)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def block_of(kind, device, mode="fp8", recipe="current", **options):
    """The feed-forward part of a mixture's last layer, with its experts, in bf16."""
    model = mixture(kind, device, **options).to(torch.bfloat16)
    block = model.model.layers[-1].mlp
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 0.02)
    if mode is not None:
        fp8rs.convert_to_float8_training(block, recipe=recipe, experts=mode)
    return block


KINDS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


def tokens(device, count=24, seed=0):
    x = torch.randn(2, count, 64, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16)


def output(block):
    """The block as a function with one result."""

    def run(*arguments):
        y = block(*arguments)
        return y[0] if isinstance(y, tuple) else y

    return run


def error(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "mode, recipe", [("fp8", "current"), ("fp8", "rowwise"), ("gather", "mxfp8")]
)
def test_experts_of_transformers_compute_what_they_do_unconverted(device, kind, mode, recipe):
    """Only the weights of experts are compared, because the router's input is the same."""
    expected = block_of(kind, device, mode=None)
    block = block_of(kind, device, mode, recipe)
    assert block.experts.config._experts_implementation == "fp8rs"
    x = tokens(device)
    results = [output(b.experts)(*routed(expected, x)) for b in (block, expected)]
    # E4M3 rounds each of four operands by 2.6% of its norm. The gate multiplies two results.
    assert error(*results) < (0.07 if mode == "fp8" else 0.01)
    for y in results:
        y.float().square().sum().backward()
    for (name, p), q in zip(
        block.experts.named_parameters(), expected.experts.parameters(), strict=True
    ):
        assert error(p.grad, q.grad) < (0.1 if mode == "fp8" else 0.02), name


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("fused", [False, True])
def test_auto_computes_what_it_chooses(device, kind, fused, monkeypatch):
    """A gated MLP, or what the functions choose for each weight."""
    monkeypatch.setattr(estimates, "gated_mlp_is_faster", lambda *sizes: fused)
    monkeypatch.setattr(estimates, "choose", lambda *sizes: estimates.HIGH_PRECISION)
    results = {}
    for mode in ("auto", "fp8", "gather"):
        experts = block_of(kind, device, mode).experts
        x, index, weights = routed(experts, tokens(device))
        results[mode] = gradients(lambda x, e=experts, a=(index, weights): e(x, *a), experts, x)
    chosen = "fp8" if fused and kind == "mixtral" else "gather"
    for mode in ("fp8", "gather"):
        equal = all(torch.equal(a, b) for a, b in zip(results["auto"], results[mode], strict=True))
        assert equal == (mode == chosen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [False, True])
def test_devices_without_fp8_gemms_compute_in_high_precision(device, kind, parallel, monkeypatch):
    monkeypatch.setattr(grouped_function, "has_grouped_gemm", lambda device: False)
    results = []
    for mode in (None, "fp8"):
        experts = block_of(kind, device, mode).experts
        x, index, weights = routed(experts, tokens(device))
        if parallel:
            experts._is_expert_parallel = True
            weights = weights.masked_fill(index == 0, 0)
            index = torch.where(index == 0, experts.num_experts, index)
        results.append(gradients(lambda x, e=experts, a=(index, weights): e(x, *a), experts, x))
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 0.01


def routed(block, x):
    """The arguments of a block's experts: tokens, and each token's experts and their weights."""
    count = x.shape[0] * x.shape[1]
    k = 2
    experts = getattr(block, "experts", block).num_experts
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(count, experts, generator=generator).argsort(1)[:, :k].to(x.device)
    weights = torch.rand(count, k, generator=generator).to(x.device, x.dtype)
    return x.flatten(0, 1), index, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_experts_of_other_ranks_contribute_nothing(device, kind, recipe):
    """With expert parallelism, their ids are the number of local experts."""
    block = block_of(kind, device, recipe=recipe)
    experts = block.experts
    x, index, weights = routed(block, tokens(device))
    weights = weights.masked_fill(index == 0, 0)
    expected = gradients(lambda x: experts(x, index, weights), experts, x)
    experts._is_expert_parallel = True
    away = torch.where(index == 0, experts.num_experts, index)
    actual = gradients(lambda x: experts(x, away, weights), experts, x)
    for a, b, name in zip(
        actual, expected, ["y", "dx", *dict(experts.named_parameters())], strict=True
    ):
        if a.shape[:1] == (experts.num_experts,) and name != "y":
            assert not a[0].any(), name
            a = a[1:]
            b = b[1:]
        # Rows of other experts move, which changes the order of sums.
        torch.testing.assert_close(a, b, msg=name)


def test_a_rank_with_one_expert_computes_its_pairs_only(device):
    all_experts, local_expert = (
        block_of("mixtral", device, num_local_experts=count).experts for count in (4, 1)
    )
    with torch.no_grad():
        for p, of_many in zip(local_expert.parameters(), all_experts.parameters(), strict=True):
            p.copy_(of_many[:1])
    x, index, weights = routed(all_experts, tokens(device))
    results = []
    for experts in (all_experts, local_expert):
        experts._is_expert_parallel = True
        away = index.masked_fill(index != 0, experts.num_experts)
        results.append(experts(x, away, weights))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "recipe, mode", [("current", "fp8"), ("rowwise", "fp8"), ("current", "auto")]
)
def test_a_compiled_block_does_not_recompile_for_another_number_of_tokens(
    device, kind, recipe, mode, monkeypatch
):
    torch._dynamo.reset()
    pad_tokens(monkeypatch, "cuda")
    block = block_of(kind, device, mode, recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for count in (24, 40, 100):
        x = tokens(device, count, seed=count)
        actual = gradients(output(compiled), block, x)
        if mode != "auto":  # eager code chooses by the number of rows
            expected = gradients(output(block), block, x)
            for a, b in zip(actual, expected, strict=True):
                assert a is b is None or torch.equal(a, b)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1
    torch._dynamo.reset()


def selective(ctx, op, *args, **kwargs):
    policy = torch.utils.checkpoint.CheckpointPolicy
    saves = op in (torch.ops.fp8rs.grouped_mm.default, torch.ops.aten.mm.default)
    return policy.MUST_SAVE if saves else policy.PREFER_RECOMPUTE


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("method", ["whole", "selective"])
def test_checkpointed_gradients_are_the_same(device, kind, method):
    block = block_of(kind, device)
    x = tokens(device)
    options = {"use_reentrant": False}
    if method == "selective":
        contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts
        options["context_fn"] = lambda: contexts(selective)
    expected = gradients(output(block), block, x)
    actual = gradients(lambda x: checkpoint(output(block), x, **options), block, x)
    for a, b in zip(actual, expected, strict=True):
        assert a is b is None or torch.equal(a, b)


class Operators(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode, supported", [("fp8", True), ("gather", True), ("fp8", False)])
def test_rows_of_a_token_are_summed_by_one_operator_each_way(device, mode, supported, monkeypatch):
    """torch accumulates them by a sorted index, which takes longer than some of the GEMMs.

    Or it adds them in any order, so that gradients differ from run to run.
    """
    if not supported:
        monkeypatch.setattr(grouped_function, "has_grouped_gemm", lambda device: False)
    block = block_of("qwen3_moe", device, mode)
    x, index, weights = routed(block, tokens(device))
    with Operators() as operators:
        block.experts(x.requires_grad_(), index, weights.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert {"fp8rs::combine_rows", "fp8rs::combine_rows_backward"} <= operators.names
    assert not {name for name in operators.names if "index_put" in name or "index_add" in name}


@pytest.mark.parametrize("mode", ["fp8", "gather"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_scores_of_any_dtype_weigh_the_rows(device, mode, dtype):
    experts = block_of("mixtral", device, mode).experts
    x, index, scores = routed(experts, tokens(device))
    scores = scores.to(dtype).requires_grad_()
    y = experts(x, index, scores)
    y.backward(torch.ones_like(y))
    assert (y.dtype, scores.grad.dtype) == (x.dtype, dtype)
    with torch.no_grad():
        ones = torch.ones(len(x), 1, device=device)
        rows = torch.stack([experts(x, index[:, j : j + 1], ones) for j in range(2)], 1).double()
    assert error(y, (rows * scores.unsqueeze(-1)).sum(1)) < 2**-8
    sums = rows.sum(-1)
    assert error(scores.grad, sums) < max(torch.finfo(dtype).eps, 1e-3)


class ColumnwiseCodes(TorchDispatchMode):
    """Counts the columnwise codes that operators write."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("fp8rs::quantize_groups", "fp8rs::quantize_gated"):
            self.count += out[2].numel()
        return out


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_without_gradients_nothing_is_quantized_for_wgrad(device, kind):
    experts = block_of(kind, device).experts
    arguments = routed(experts, tokens(device))
    with ColumnwiseCodes() as training:
        expected = experts(*arguments)
    with torch.no_grad(), ColumnwiseCodes() as evaluation:
        actual = experts(*arguments)
    assert training.count > evaluation.count == 0
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("mode", ["fp8", "gather"])
def test_sums_have_the_precision_of_tokens_under_autocast(device, mode):
    experts = block_of("mixtral", device, mode).experts
    x, index, scores = routed(experts, tokens(device))
    x = x.float()
    scores = scores.float().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        y = experts(x, index, scores)
        with torch.no_grad():
            ones = torch.ones(len(x), 1, device=device)
            rows = torch.stack([experts(x, index[:, j : j + 1], ones) for j in range(2)], 1)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (gradient,) = torch.autograd.grad(y, scores, dy)
    assert y.dtype == torch.float32
    assert error(y, (rows.double() * scores.detach().unsqueeze(-1)).sum(1)) < 1e-6
    assert error(gradient, (rows.double() * dy.unsqueeze(1)).sum(-1)) < 1e-6


@pytest.mark.parametrize("gemms", ["gather", "fp8"])
def test_experts_refuse_double_backward(device, gemms):
    experts = block_of("mixtral", device, gemms).experts
    x, index, scores = routed(experts, tokens(device))
    y = experts(x, index, scores.requires_grad_())
    with pytest.raises(RuntimeError, match="experts do not support double backward"):
        torch.autograd.grad(y.sum(), scores, create_graph=True)


WRONG_CALLS = {
    "tokens of integers": ({"x": lambda x: x.int()}, TypeError, "hidden_states is torch.int32"),
    "tokens of float64": ({"x": lambda x: x.double()}, TypeError, "hidden_states is torch.float64"),
    "narrow tokens": ({"x": lambda x: x[:, :32]}, ValueError, r"\(48, 32\); it must be .*, 64\)"),
    "batches of tokens": ({"x": lambda x: x[None]}, ValueError, r"hidden_states has shape \(1, 48"),
    "fewer tokens": ({"x": lambda x: x[:40]}, ValueError, r"top_k_index .* must be \(40, k\)"),
    "more tokens": ({"x": lambda x: x.repeat(2, 1)}, ValueError, r"top_k_index .* \(96, k\)"),
    "ids of one dimension": ({"index": lambda i: i[:, 0]}, ValueError, r"top_k_index .* \(48,\)"),
    "ids of floats": ({"index": lambda i: i.float()}, TypeError, "top_k_index is torch.float32"),
    "one score": ({"scores": lambda s: s[:, :1]}, ValueError, r"top_k_weights .* be \(48, 2\)"),
    "more scores": ({"scores": lambda s: s.repeat(2, 1)}, ValueError, r"top_k_weights .*\(96, 2"),
    "tokens elsewhere": ({"x": lambda x: x.to("meta")}, ValueError, "hidden_states is on meta"),
}


@pytest.mark.parametrize("kind, mode", [("mixtral", "fp8"), ("gpt_oss", "gather")])
@pytest.mark.parametrize("call", list(WRONG_CALLS))
def test_wrong_calls_of_experts_are_named(device, kind, mode, call):
    changes, exception, message = WRONG_CALLS[call]
    experts = block_of(kind, device, mode).experts
    arguments = dict(zip(("x", "index", "scores"), routed(experts, tokens(device)), strict=True))
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(exception, match=message):
        experts(*arguments.values())


@pytest.mark.parametrize("kind, mode", [("mixtral", "fp8"), ("gpt_oss", "gather")])
@pytest.mark.parametrize("parallel", [False, True])
def test_unknown_experts_are_errors_on_the_cpu(kind, mode, parallel):
    """Their rows would be read before they are written, or count for the first expert."""
    experts = block_of(kind, "cpu", mode).experts
    experts._is_expert_parallel = parallel
    x, index, scores = routed(experts, tokens("cpu"))
    message = "top_k_index has the expert -1; ids must be at least 0 and less than 4"
    with pytest.raises(ValueError, match=message):
        experts(x, index - 1, scores)
    if parallel:  # ids of other ranks
        assert experts(x, index + 1, scores).isfinite().all()
    else:
        with pytest.raises(ValueError, match="top_k_index has the expert 4"):
            experts(x, index + 1, scores)


def test_frozen_gate_and_up_save_no_activations(device):
    experts = block_of("mixtral", device).experts
    experts.gate_up_proj.requires_grad_(False)
    x, index, scores = routed(experts, tokens(device))
    with saved_tensors() as saved:
        y = experts(x, index, scores)
    shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in saved]
    y.sum().backward()
    assert experts.down_proj.grad.any()
    assert (x.dtype, (index.numel(), 2 * 48)) not in shapes


@pytest.mark.parametrize("wanted", ["tokens", "scores", "weights"])
def test_one_gradient_of_experts_is_what_it_is_with_all(device, wanted):
    experts = block_of("mixtral", device).experts
    x, index, scores = routed(experts, tokens(device))
    inputs = {"tokens": x, "scores": scores, "weights": experts.down_proj}
    for t in (x, scores):
        t.requires_grad_()
    y = experts(x, index, scores)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, list(inputs.values()), dy, retain_graph=True)
    (actual,) = torch.autograd.grad(y, inputs[wanted], dy, retain_graph=True)
    assert torch.equal(actual, expected[list(inputs).index(wanted)])
    for name, t in inputs.items():
        t.requires_grad_(name == wanted)
    experts.gate_up_proj.requires_grad_(False)
    (actual,) = torch.autograd.grad(experts(x, index, scores), inputs[wanted], dy)
    assert torch.equal(actual, expected[list(inputs).index(wanted)])


def test_experts_without_tokens_have_gradients(device):
    experts = block_of("mixtral", device).experts
    x = torch.zeros(0, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    index = torch.zeros(0, 2, dtype=torch.int64, device=device)
    scores = torch.zeros(0, 2, device=device, requires_grad=True)
    y = experts(x, index, scores)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 64)
    assert scores.grad.shape == (0, 2)
    assert not any(p.grad.any() for p in experts.parameters())


def test_no_permuted_tokens_are_saved(device):
    """A gated MLP saves its inputs as codes, and one high-precision tensor of all rows."""
    block = block_of("mixtral", device)
    x, index, weights = routed(block, tokens(device))
    count = index.numel()

    def shapes_of_rows(saved):
        rows = [t for t in saved if t.dtype == torch.bfloat16 and t.shape[:1] == (count,)]
        return [tuple(t.shape) for t in rows]

    with saved_tensors() as saved:
        block.experts(x.requires_grad_(), index, weights)
    assert shapes_of_rows(saved) == [(count, 2 * 48)]
    with saved_tensors() as saved:
        block.experts(x, index, weights.requires_grad_())
    # The gradient of scores needs the output's rows.
    assert shapes_of_rows(saved) == [(count, 2 * 48), (count, 64)]
