"""The benchmarks of experts, with small sizes on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.newest_torch


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benches")


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the benchmark of steps, which trains in this process."""
    pytest.importorskip("transformers", minversion="5.0")
    import experts

    def launch(function: Callable[..., Any], *arguments: Any, on_event: Any, **_: Any) -> None:
        function(*arguments, on_event)

    monkeypatch.setattr(experts, "launch", launch)
    monkeypatch.setattr(experts, "has_torchao", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield experts
    dist.destroy_process_group()


def test_routing_gives_each_expert_its_rows_and_each_token_distinct_experts() -> None:
    from routing import rows_per_expert, top_k_index

    for tokens, top_k, count in ((8192, 2, 8), (1024, 8, 128)):
        even = rows_per_expert(tokens * top_k, count, "balanced")
        assert set(even) == {tokens * top_k // count}
        skewed = rows_per_expert(tokens * top_k, count, "skewed")
        assert sum(skewed) == tokens * top_k
        assert max(skewed) > 2 * even[0]
        for rows in (even, skewed):
            assert all(n % 16 == 0 for n in rows)
            index = top_k_index(tokens, top_k, rows)
            assert torch.bincount(index.flatten()).tolist() == rows
            assert (index.sort(1).values.diff(dim=1) > 0).all()
    with pytest.raises(ValueError, match="cannot give 48 rows to one expert"):
        top_k_index(32, 2, [48, 16])


def test_steps_of_all_variants_are_measured_with_the_same_routing(
    experts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    sizes = ["--tiny", "--device", "cpu", "--rank-of", "2", "--tokens", "32", "--steps", "1"]
    variants = "bf16,bf16+comm,fp8+comm,gather,torchao"
    more = ["--routing", "skewed", "--warm-up", "1", "--model", "mixtral", "--json", str(out)]
    assert experts.main([*sizes, "--variants", variants, *more]) == 0
    report = json.loads(out.read_text())
    results = {r["variant"]: r for r in report["results"]}
    bf16 = results["bf16"]
    assert set(results) == set(variants.split(",")) - {"torchao"}
    assert [e["variant"] for e in report["errors"]] == ["torchao"]
    assert "torchao cannot be imported" in report["errors"][0]["error"]
    assert len({r["largest_expert"] for r in results.values()}) == 1
    for name in ("fp8+comm", "gather"):
        assert results[name]["loss"] == pytest.approx(bf16["loss"], rel=1e-3)
        assert 0.5 < results[name]["gathered_bytes"] / bf16["gathered_bytes"] < 0.8
    assert results["gather"]["reduced_bytes"] == bf16["reduced_bytes"]
    assert results["bf16+comm"]["reduced_bytes"] == bf16["reduced_bytes"] / 2
    assert "torchao cannot be imported" in capsys.readouterr().out.splitlines()[0]


def test_variants_after_a_failed_one_run(
    experts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched = []

    def launch(function: Any, arguments: Any, *, on_event: Any, **_: Any) -> None:
        launched.append(arguments["jobs"])
        if len(launched) == 1:
            for model, variant in arguments["jobs"][:2]:
                on_event({"begins": (model, variant), "what": ""})
            raise experts.RankFailed(1, "no memory")

    monkeypatch.setattr(experts, "launch", launch)
    out = tmp_path / "out.json"
    arguments = ["--tiny", "--device", "cpu", "--variants", "bf16,auto,bf16,auto"]
    assert experts.main([*arguments, "--json", str(out)]) == 1  # Nothing was measured.
    jobs = [(m, v) for m in ("mixtral", "qwen3") for v in ("bf16", "auto", "bf16", "auto")]
    assert launched == [jobs, jobs[2:]]
    (error,) = json.loads(out.read_text())["errors"]
    assert (error["model"], error["variant"]) == ("mixtral", "auto")
    assert "no memory" in error["error"]


def test_tables_compare_with_bf16_of_the_same_collectives() -> None:
    import experts

    case = {"model": "qwen3", "tokens": 8192, "routing": "balanced", "gathered_bytes": 0}
    case |= {"reduced_bytes": 0, "host_ms": 1.0, "loss": 1.0}
    times = {"bf16": 190, "bf16+comm": 180, "gather": 185, "gather+comm": 160, "fp8+comm": 181}
    memory = {"bf16": 50, "bf16+comm": 50, "gather": 45, "gather+comm": 51, "fp8+comm": 40}
    results = [
        {**case, "variant": name, "ms": [ms - 1, ms], "peak_memory": memory[name] * 1e9}
        for name, ms in times.items()
    ]
    # Another run of each variant.
    results += [{**result, "ms": [result["ms"][1] + 5]} for result in results]
    errors = [{"model": "qwen3", "variant": "torchao", "error": "a trace\nno triton"}]
    options = {"ranks": 2, "tiny": False}
    text = experts.tables({"results": results, "errors": errors, "options": options})
    assert "| gather+comm | 160.0 | 159.0 to 165.0 | 51,200 | 1.188 | 1.125 | 51.0 |" in text
    assert "| torchao | no triton |" in text
    assert "goal 165 ms: reached, gather+comm takes 160.0 ms" in text
    assert "slower than bf16 with the same comm: fp8+comm (0.994)\n" in text
    assert text.endswith("peak memory not below bf16's with the same comm: gather+comm")


def test_shapes_are_measured_and_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    import grouped_shapes

    out = tmp_path / "out.json"
    arguments = ["--tiny", "--device", "cpu", "--models", "qwen3", "--json", str(out)]
    assert grouped_shapes.main(arguments) == 0
    report = json.loads(out.read_text())
    assert not report["skipped"]
    size = grouped_shapes.TINY["qwen3"]
    measured = {(g["weight"], g["gemm"], g["routing"]): (g["n"], g["k"]) for g in report["gemms"]}
    assert len(measured) == 2 * 3 * 2
    assert measured["gate_up", "wgrad", "skewed"] == (2 * size.width, size.hidden)
    assert measured["down", "dgrad", "balanced"] == (size.hidden, size.width)
    times = [g[k] for g in report["gemms"] for k in ("bf16", "fp8", "quantize")]
    times += [q[k] for q in report["quantize"] for k in ("rowwise", "columnwise", "both")]
    assert min(times) > 0
    assert {m["kind"] for m in report["mlp"]} == {"mlp", "experts"}
    assert len({k["name"] for k in report["kernels"]}) == 11


def test_both_sides_of_a_measured_mlp_compute_the_same() -> None:
    import grouped_shapes as bench

    from fp8rs.quantize.recipes import quant_spec, resolve_recipe
    from fp8rs.tensor.quantizer import Quantizer

    torch.manual_seed(0)
    case = bench.case_of("qwen3", bench.TINY["qwen3"], 128, "skewed", "cpu")
    shapes = (4, 64, 64), (4, 64, 32)
    plain = [(torch.randn(shape).bfloat16() * 0.1).requires_grad_() for shape in shapes]
    quantizer = Quantizer(quant_spec(resolve_recipe("current"), "weight"), columnwise=False)
    gathered = [quantizer(weight.detach()).requires_grad_() for weight in plain]
    calls: Any = bench._mlp(case, "cpu", plain, gathered)
    for bf16, fp8 in zip(calls["bf16"](), calls["fp8"](), strict=True):
        assert (fp8 - bf16).norm() < 0.1 * bf16.norm()
