"""torch.compile: one graph, the bytes of eager, no needless recompilation.

The backend is aot_eager, whose graphs run the same kernels as eager: results are equal to the bit.
tools/tested.py lists these tests in docs/tested.md.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8rs
from cases import RECIPES, each_kind_of_recipe, each_recipe, pad_tokens, skip_without_block_gemms
from compiled_models import WIDTH, Block, batch, build, counting, graphs, selective
from fp8rs.quantize.recipes import resolve_recipe

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
a_few_recipes = each_recipe("delayed", "mxfp8")


#: A model of one block, unless the claim is about several.
small = partial(build, blocks=1)


def train(model, run, device, steps=4, lengths=(8,)):
    """Train and return the losses and gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    results = []
    for n in range(steps):
        y = run(batch(device, n, lengths[n % len(lengths)]))
        loss = y.float().square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return results


def assert_equal(a, b):
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(x, y), (step, i, (x - y).abs().max())


@pytest.fixture(autouse=True)
def _supported(request, device):
    if request.node.callspec.params.get("recipe") == "block":
        skip_without_block_gemms(device)


@every_recipe
@pytest.mark.parametrize("gather", [True, False])
def test_a_model_is_one_graph(device, recipe, gather):
    eager = build(recipe, device, gather=gather)
    model = build(recipe, device, gather=gather)
    with counting() as backend:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert_equal(train(eager, eager, device), train(model, compiled, device))
        assert backend.frame_count == graphs(recipe, 1)


@a_few_recipes
def test_equal_blocks_are_one_graph(device, recipe):
    eager = build(recipe, device)
    model = build(recipe, device)
    with counting() as backend:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=backend)
        assert_equal(train(eager, eager, device), train(model, model, device))
        assert backend.frame_count == graphs(recipe, 1)


@each_kind_of_recipe
def test_a_layer_is_one_graph(device, recipe):
    eager = small(recipe, device)
    model = small(recipe, device)
    with counting() as backend:
        model.head.compile(fullgraph=True, backend=backend)
        assert_equal(train(eager, eager, device), train(model, model, device))
        assert backend.frame_count == graphs(recipe, 1)


def test_an_input_quantized_in_two_ways_is_one_graph(device):
    skip_without_block_gemms(device)
    recipe = fp8rs.Float8BlockScaling(wgrad_input_block=(128, 128))
    eager = small(recipe, device)
    model = small(recipe, device)
    with counting() as backend:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert_equal(train(eager, eager, device), train(model, compiled, device))
        assert backend.frame_count == 1


def plainly(block, x):
    return checkpoint(block, x, use_reentrant=False)


@a_few_recipes
@pytest.mark.parametrize("wrap", [plainly, selective])
def test_checkpointing_inside(device, recipe, wrap):
    eager = build(recipe, device)
    model = build(recipe, device, wrap)
    checkpointed = build(recipe, device, wrap)
    expected = train(eager, eager, device)
    assert_equal(expected, train(checkpointed, checkpointed, device))
    with counting() as backend:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert_equal(expected, train(model, compiled, device))
        assert backend.frame_count == graphs(recipe, 1)


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_checkpoint_of_the_whole_model_compiles(device, scaling):
    """Histories roll although the root's hooks do not run."""
    eager = build(scaling, device)
    model = build(scaling, device)
    compiled = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    assert_equal(train(eager, eager, device), train(model, compiled, device))


@a_few_recipes
def test_evaluation_and_training(device, recipe):
    """Training and evaluation have one graph each. Neither is compiled again."""
    eager = small(recipe, device)
    model = small(recipe, device)
    train(eager, eager, device, steps=3)
    train(model, model, device, steps=3)  # delayed scaling has scales now
    with counting() as backend:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for n in range(3):
            with torch.no_grad():
                model.eval()
                assert torch.equal(compiled(batch(device, n)), eager.eval()(batch(device, n)))
            model.train(), eager.train()
            assert_equal(
                train(eager, eager, device, steps=1), train(model, compiled, device, steps=1)
            )
        assert backend.frame_count == 2


@a_few_recipes
def test_sequence_lengths_do_not_recompile(device, recipe, monkeypatch):
    pad_tokens(monkeypatch, "cuda")
    # Use at least two blocks of 128 tokens: torch specializes a size of 1.
    lengths = (136, 200, 152, 168, 184)
    eager = small(recipe, device)
    model = small(recipe, device)
    with counting() as backend:
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
        assert_equal(
            train(eager, eager, device, lengths=lengths[:1]),
            train(model, compiled, device, lengths=lengths[:1]),
        )
        # torch compiles twice, because it first makes the norm's epsilon symbolic.
        compilations = backend.frame_count
        assert compilations == graphs(recipe, 1) + 1
        assert_equal(
            train(eager, eager, device, steps=10, lengths=lengths),
            train(model, compiled, device, steps=10, lengths=lengths),
        )
        assert backend.frame_count == compilations


@a_few_recipes
def test_data_dependent_token_counts(device, recipe, monkeypatch):
    """One graph serves any number of tokens, including none, as an expert requires."""
    pad_tokens(monkeypatch, "cuda")
    eager = small(recipe, device)
    model = small(recipe, device)
    train(eager, eager, device, steps=3), train(model, model, device, steps=3)  # scales exist now

    def chosen(model, x, keep):
        return model(x[keep])

    def run(function, model, n, count):
        x = batch(device, n, 80).flatten(0, 1).requires_grad_()
        y = function(model, x, torch.arange(160, device=device) * 7 % 160 < count)
        y.float().square().sum().backward()
        tensors = [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
        return tensors

    with counting() as backend, dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, fullgraph=True, backend=backend)
        for n, count in enumerate((140, 37, 1, 0)):
            want = run(chosen, eager, n, count)
            got = run(compiled, model, n, count)
            assert want[0].shape == (count, 48)
            assert_equal([want], [got])
        assert backend.frame_count == 1


@a_few_recipes
def test_compiled_loss_rolls_histories(device, recipe):
    """The root's hooks are compiled away, so the optimizer step takes over their work."""
    model = small(recipe, device)
    with counting() as backend:

        def loss(x):
            return model(x).float().square().mean()

        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        losses = []
        for n in range(6):
            value = compiled(batch(device, n % 2))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        assert losses[-1] < losses[0]
        assert backend.frame_count == graphs(recipe, 1)
    if recipe == "delayed":
        assert (model.head.fp8_amax_history > 0).all(1).sum() == 6
        assert model.head.fp8_ready == (True, True, True)


class Saved:
    """Records the tensors that autograd saves in a forward."""

    def __init__(self, run, x):
        self.tensors = []
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            self.y = run(x)

    def _pack(self, t):
        self.tensors.append(t)
        return t


@every_recipe  # a high-precision `rowwise` weight is quantized again for dgrad
def test_no_second_plane_of_a_weight_is_saved(device, recipe):
    """Without ``after``, a compiler would compute a weight's second plane in the forward."""
    model = small(recipe, device)
    train(model, model, device, steps=3)
    with counting() as backend:
        compiled = torch.compile(model.blocks[0], fullgraph=True, backend=backend)
        saved = Saved(compiled, batch(device))
    masters = {p.data_ptr() for p in model.parameters()}
    weights = {(2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)}
    assert saved.tensors
    for t in saved.tensors:
        assert tuple(t.shape) not in weights or t.data_ptr() in masters, (t.shape, t.dtype)
    saved.y.sum().backward()


@each_kind_of_recipe
def test_siblings_are_quantized_once(device, recipe):
    model = small(recipe, device)
    train(model, model, device, steps=3)
    graphs_seen = []

    def keep(graph, inputs):
        graphs_seen.append(graph)
        return graph.forward

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(keep(graph, inputs)))
    dynamo.reset()
    x = batch(device).requires_grad_()
    torch.compile(model.blocks[0], fullgraph=True, backend=backend)(x)
    dynamo.reset()
    forward = graphs_seen[0]
    quantized = [
        node
        for node in forward.graph.nodes
        if node.op == "call_function" and "quantize" in str(node.target).replace("dequantize", "")
    ]
    weights = 4
    inputs = [n for n in quantized if n.args[0].op != "placeholder"]
    assert len(quantized) - len(inputs) == weights
    # A compiler merges equal calls. With delayed scaling, layers share planes at trace time.
    different = {(str(n.target), str(n.args), str(n.kwargs)) for n in inputs}
    assert len(different) == 2, "one for q, k and v, and one for o"


class Gated(nn.Module):
    """A norm, two layers that share its output, and a third layer of their product."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(torch.nn.functional.silu(self.w1(h)) * self.w3(h))


def divided(model, x):
    """Return the tensors that Inductor's partitioner saves, and the operators of the backward."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    backward = []

    def keep(graph, inputs):
        backward.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    dynamo.reset()
    saved = Saved(torch.compile(model, fullgraph=True, backend=backend), x)
    saved.y.sum().backward()
    dynamo.reset()
    return saved.tensors, [name for name in backward if name.startswith("fp8rs.")]


@each_kind_of_recipe
def test_inputs_are_recomputed_and_quantized_once(device, recipe):
    """By default, a compiler recomputes inputs, such as a norm's output, and saves no codes."""
    kind = resolve_recipe(RECIPES[recipe])
    tokens = 128
    counts = {}
    results = {}
    exact_wgrad = "wgrad" in kind.high_precision_gemms
    for save_input in (exact_wgrad, None):
        torch.manual_seed(0)
        model = Gated().to(device)
        fp8rs.convert_to_float8_training(
            model, recipe=dataclasses.replace(kind, save_input=save_input)
        )
        if kind.delayed:
            train(model, model, device, steps=3)
        x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))
        x = x.to(device).requires_grad_()
        saved, operators = divided(model, x)
        counts[save_input] = sum("quantize" in n and "dequantize" not in n for n in operators)
        results[save_input] = [x.grad, *(p.grad for p in model.parameters())]
        masters = {p.data_ptr() for p in (*model.parameters(), x)}
        saved_inputs = [
            t for t in saved if t.numel() >= tokens * WIDTH and t.data_ptr() not in masters
        ]
        codes = [t for t in saved_inputs if t.dtype.itemsize == 1]
        if save_input is not False:
            # Saved are the outputs of w1 and w3, but neither codes nor the norm's output.
            assert sorted(tuple(t.shape) for t in saved_inputs) == [(tokens, 2 * WIDTH)] * 2
        else:
            assert sorted(t.numel() for t in codes) == [tokens * WIDTH, tokens * 2 * WIDTH]
    if exact_wgrad:
        assert counts == {True: 6, None: 6}, "three gradients and three weights, but no input"
    else:
        # The norm's output, which two layers share, and the product.
        assert counts[None] == counts[False] + 2
    for a, b in zip(*results.values(), strict=True):
        # fp32 GEMMs on the CPU depend on the alignment of operands by 4e-6. A different code of an
        # input would make a difference of about 1e-2.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@each_recipe("delayed", "mxfp8", of=[name for name in RECIPES if name != "rowwise_with_gw_hp"])
def test_codes_may_be_saved(device, recipe):
    kind = dataclasses.replace(resolve_recipe(RECIPES[recipe]), save_input=False)
    eager = small(kind, device)
    model = small(kind, device)
    with counting() as backend:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert_equal(train(eager, eager, device), train(model, compiled, device))
        assert backend.frame_count == graphs(recipe, 1)


@every_recipe
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # from torch
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of GEMMs in high precision
def test_cuda_graphs_of_a_compiled_model(device, recipe):
    """With `mode="reduce-overhead"`, replays read current parameters and write the amaxes."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    from torch._inductor.cudagraph_trees import get_manager

    eager = small(recipe, device)
    model = small(recipe, device)
    dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")

    def run(x):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    steps = train(eager, eager, device, steps=8), train(model, run, device, steps=8)
    assert get_manager(0, create_if_none_exists=False) is not None, "no graph was captured"
    for (expected, *_), (got, *_) in zip(*steps, strict=True):
        # Inductor's norm rounds differently from eager, so some codes may differ.
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=0)
    if recipe == "delayed":
        for a, b in zip(linear_layers(eager), linear_layers(model), strict=True):
            assert (a.fp8_amax_history > 0).any()
            torch.testing.assert_close(b.fp8_amax_history, a.fp8_amax_history, rtol=2e-2, atol=1e-6)
    dynamo.reset()


def linear_layers(model):
    return [m for m in model.modules() if isinstance(m, fp8rs.nn.Linear)]


@pytest.mark.parametrize("part", [False, True])
def test_equal_models_are_one_graph(device, part):
    """The names of the root's hooks are equal for all models, so a compiled loss serves all."""
    with counting() as backend:
        compiled = torch.compile(lambda model, x: model(x).square().mean(), backend=backend)
        for _ in range(4):
            torch.manual_seed(0)
            block = Block().to(device)
            for root in (block.q, block.o) if part else (block,):
                fp8rs.convert_to_float8_training(root, recipe="current")
            compiled(block, batch(device)).backward()
        assert backend.frame_count == 1
