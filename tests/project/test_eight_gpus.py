"""The end-to-end benchmark's layouts, and the script that measures a host of eight GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch.distributed.tensor import DTensor

from distributed import ranks

sys.path.append(str(Path(__file__).parents[2] / "benches"))

import eight_gpus
import end_to_end
import layouts

import fp8rs
from fp8rs.demo.model import Llama, LlamaConfig, parameter_count

SIZES = ["--dim", "256", "--layers", "2", "--sequence", "64", "--vocabulary", "512"]


def run_end_to_end(
    monkeypatch: pytest.MonkeyPatch, out: Path, variants: str, *options: str
) -> dict[str, Any]:
    arguments = ["--device", "cpu", "--ranks", "4", *SIZES, "--steps", "1", "--warm-up", "2"]
    arguments += ["--variants", variants, "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *arguments])
    assert end_to_end.main() == 0
    results: dict[str, Any] = json.loads(out.read_text())["variants"]
    return results


#: The largest relative error of a gradient. With FP8, another order of sums rounds other codes.
GRADIENT_ERRORS = {None: 1e-4, "current": 0.1}


def gradients(rig: Any, recipe: Any, parallel: bool) -> dict[str, torch.Tensor]:
    """Return the gradients of a small Llama. Its blocks are compiled if it is parallel."""
    config = LlamaConfig(vocabulary=64, dim=64, layers=2, heads=4, kv_heads=2, hidden=96)
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(0))
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=recipe, filter_fqns=["head"])
    if parallel:
        layouts.parallelize(model, rig.mesh(names=("tensor",)), fp8=recipe is not None)
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    model.loss(torch.randint(64, (1, 33), generator=torch.Generator().manual_seed(1))).backward()

    gradients_by_name = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        gradients_by_name[name] = gradient
    return gradients_by_name


# Slow, because it compiles.
@pytest.mark.second_tier
@ranks(2, cuda=False)
@pytest.mark.parametrize("recipe", [None, "current"])
def test_compiled_tensor_parallel_blocks_have_the_gradients_of_one_process(
    rig: Any, recipe: Any
) -> None:
    dynamo.reset()
    expected = gradients(rig, recipe, parallel=False)
    for name, gradient in gradients(rig, recipe, parallel=True).items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < GRADIENT_ERRORS[recipe], name
    dynamo.reset()


# Four ranks on two cores.
@pytest.mark.long
def test_layouts_train_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variants = "bf16,bf16+hsdp,bf16+tp,current,current+hsdp,current+tp,current-fp8+tp"
    results = run_end_to_end(monkeypatch, tmp_path / "out.json", variants)
    for name, result in results.items():
        assert len(set(result["losses"])) == 1, name
        base = name.partition("+")[0]
        if base in results:
            assert result["loss"] == pytest.approx(results[base]["loss"], rel=1e-3), name

    # FSDP2's gathers have all shards in each layout. Those of tensor parallelism have half a layer.
    weight_bytes = {name: result["weight_bytes"] for name, result in results.items()}
    assert weight_bytes["bf16+hsdp"] == weight_bytes["bf16"]
    assert weight_bytes["current+hsdp"] == weight_bytes["current"]
    assert weight_bytes["current+tp"] == weight_bytes["current"] / 2
    assert weight_bytes["bf16+tp"] is None


@pytest.mark.parametrize(
    "name", ["torchao+tp", "te-current+tp", "current+modules+tp", "bf16+tp+modules"]
)
def test_tensor_parallelism_is_refused_for_blocks_without_a_plan(name: str) -> None:
    with pytest.raises(ValueError, match="tp requires plain blocks"):
        end_to_end.parsed(name)


def test_settings_choose_a_layout() -> None:
    assert end_to_end.parsed("current-compiled+comm+hsdp")[1] == {"comm": True, "layout": "hsdp"}
    assert end_to_end.parsed("te-current+hsdp")[1] == {"layout": "hsdp"}
    assert end_to_end.parsed("bf16+tp")[1] == {"layout": "tp"}


def test_utilization_counts_flops_as_torchtitan_does() -> None:
    config = LlamaConfig(128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14_336)
    with torch.device("meta"):
        params = parameter_count(Llama(config))
    assert params == 8_030_261_248

    flops = end_to_end.model_flops_per_token(config, params, 8192)
    assert flops == 6 * (params - 128_256 * 4096) + 12 * 32 * 32 * 128 * 8192
    # The tokens per second that torchtitan published for bf16 on eight H100.
    assert end_to_end.mfu(6667, flops, "NVIDIA H200") == pytest.approx(0.3904, abs=1e-4)
    assert end_to_end.mfu(6667, flops, "NVIDIA H100 PCIe") is None
    assert end_to_end.mfu(6667, flops, None) is None


def result(tokens_per_second: float, **changes: Any) -> dict[str, Any]:
    return {
        "tokens_per_second": tokens_per_second,
        "mfu": 0.4,
        "peak_memory": 60e9,
        "at_rest": {"weights": 4.0, "optimizer": 8.0},
        "allgather_bytes": 20e9,
        "weight_bytes": 10e9,
        "reduce_scatter_bytes": 30e9,
        "all_reduces": 1,
        "loss": 11.5,
        "losses": [11.5, 11.5],
        **changes,
    }


def test_tables_compare_with_bf16_in_the_same_layout() -> None:
    variants = {
        "bf16-compiled": result(1000),
        "bf16-compiled+tp": result(500, weight_bytes=None, mfu=None),
        "current-compiled+comm": result(1300),
        "current-compiled+tp": result(600),
        "current-compiled+hsdp": result(1250),
        "te-current": result(900),
        "torchao-compiled": {"error": "a trace\nno torchao"},
    }
    lines = end_to_end.table({"variants": variants}).splitlines()
    cells = {line.split(" | ")[0]: line.split(" | ")[1:4] for line in lines}
    assert cells["| current-compiled+comm"] == ["1,300", "1.300", "40.0%"]
    assert cells["| current-compiled+tp"] == ["600", "1.200", "40.0%"]
    assert cells["| current-compiled+hsdp"] == ["1,250", "", "40.0%"]
    assert cells["| te-current"] == ["900", "0.900", "40.0%"]
    assert "| bf16-compiled+tp | 500 | 1.000 |  | 60.0 | 4.00 + 8.00 | 20.00 |  | 30.00" in lines[3]
    assert {line.count("|") for line in lines} == {12}


def test_variants_of_the_eight_gpus_are_known() -> None:
    for name in eight_gpus.VARIANTS:
        end_to_end.parsed(name)


def test_a_second_call_measures_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def run(command: list[str], timeout: float, check: bool) -> None:
        commands.append(command)
        assert 0 < timeout <= 540
        if "--variants" not in command or "--json" in command:
            return
        # The call is cut off after the second variant, which failed.
        names = command[command.index("--variants") + 1].split(",")
        variants = {names[0]: result(1000.0), names[1]: {"error": "no memory"}}
        out = Path(command[command.index("--out") + 1])
        out.write_text(json.dumps({"variants": variants}))

    monkeypatch.setattr(eight_gpus.subprocess, "run", run)
    arguments = [str(tmp_path), "--ranks", "8", "--variants", "bf16,current,current+hsdp"]
    assert eight_gpus.main([*arguments, "--tests"]) == 0
    end_to_end_command, experts_command, tests_command = commands
    assert end_to_end_command[-2:] == ["--steps", "5"]
    assert "experts.py" in experts_command[1]
    assert tests_command[-4:] == ["-m", "gpu", "-k", "8ranks"]
    assert "| current | no memory |" in capsys.readouterr().out

    commands.clear()
    (tmp_path / "experts.json").write_text(
        json.dumps({"results": [{"variant": name} for name in eight_gpus.EXPERTS_VARIANTS]})
    )
    assert eight_gpus.main(arguments) == 0
    (command,) = commands
    assert command[command.index("--variants") + 1] == "current,current+hsdp"
    output = capsys.readouterr().out
    assert output.count("| 1,000 |") == 2
    assert "losses of bf16: 11.500000, equal on 2 ranks" in output


def test_nothing_is_started_without_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        eight_gpus.subprocess, "run", lambda *_, **__: pytest.fail("a command was started")
    )
    assert eight_gpus.main([str(tmp_path), "--seconds", "5"]) == 1
    assert capsys.readouterr().out.count("not started: the time is over") == 2


@pytest.mark.long
def test_a_smoke_run_of_the_eight_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path), "--device", "cpu", "--ranks", "4", *SIZES, "--steps", "1"]
    assert eight_gpus.main([*arguments, "--variants", "bf16,current+tp"]) == 0
    output = capfd.readouterr().out
    assert "| current+tp |" in output
    assert "equal on 4 ranks" in output
    assert len(json.loads((tmp_path / "experts.json").read_text())["results"]) == 2
