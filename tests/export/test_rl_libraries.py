"""The hooks of docs/serving.md for verl, TRL and prime-rl, with stubs of these libraries.

The stubs have the signatures of verl b178a3c, TRL f2cd577 and prime-rl 559b447.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8rs
from fp8rs import convert_to_float8_training
from fp8rs.export import tensors
from language_models import llama

pytest.importorskip("transformers", "5.0")
pytestmark = pytest.mark.newest_torch

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture
def model():
    recipe = fp8rs.Float8RowwiseScaling.for_serving()
    model = llama("cpu")
    return convert_to_float8_training(model, recipe=recipe, filter_fqns=["lm_head"], gemms="fp8")


@pytest.fixture
def install(monkeypatch):
    """Return a function that makes stubs importable: attributes by the name of a module."""

    def install(modules: dict[str, dict[str, Any]]) -> None:
        for name, attributes in modules.items():
            parts = name.split(".")
            for end in range(1, len(parts)):
                parent = ".".join(parts[:end])
                if parent not in modules:
                    monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
            module = types.ModuleType(name)
            module.__dict__.update(attributes)
            monkeypatch.setitem(sys.modules, name, module)

    return install


def run_block(library: str) -> None:
    """Run the code block of the page that imports a library."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if f"from {library}." in block]
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), {})


def parameters_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def check_received(received: list[tuple[str, torch.Tensor]], model: nn.Module) -> None:
    """Check that an engine received each tensor of the stream once, with its bytes."""
    expected = dict(tensors(model, format="fp8-row"))
    assert len(received) == len(expected)
    names = {name for name, _ in received}
    assert names == expected.keys()
    assert "model.layers.1.mlp.down_proj.weight_scale" in names
    for name, tensor in received:
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == expected[name].shape
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))


@pytest.mark.parametrize("offload", [False, True])
def test_verl(model, install, offload):
    moves = []

    def load_fsdp_model_to_gpu(model):
        moves.append("load")

    def offload_fsdp_model_to_cpu(model, empty_cache: bool = True):
        moves.append("offload")

    class FSDPEngine:
        def __init__(self, module, is_offload_param):
            self.module = module
            self._is_offload_param = is_offload_param

        def get_per_tensor_param(self, layered_summon=False, base_sync_done=False):
            raise NotImplementedError

    original = FSDPEngine.get_per_tensor_param
    install(
        {
            "verl.utils.fsdp_utils": {
                "load_fsdp_model_to_gpu": load_fsdp_model_to_gpu,
                "offload_fsdp_model_to_cpu": offload_fsdp_model_to_cpu,
            },
            "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngine": FSDPEngine},
        }
    )
    run_block("verl")
    hook = FSDPEngine.get_per_tensor_param
    assert parameters_of(hook)[: len(parameters_of(original))] == parameters_of(original)
    engine = FSDPEngine(model, offload)

    # As ActorRolloutRefWorker.update_weights does, with a colocated engine and without.
    received = []

    class Rollout:
        async def update_weights(self, weights, **kwargs):
            received.extend(weights)

    per_tensor_param, peft_config = engine.get_per_tensor_param(
        layered_summon=False, base_sync_done=True
    )
    assert peft_config is None
    assert moves == (["load"] if offload else [])
    asyncio.run(
        Rollout().update_weights(per_tensor_param, peft_config=peft_config, base_sync_done=True)
    )
    check_received(received, model)
    assert moves == (["load", "offload"] if offload else [])
    per_tensor_param, _ = engine.get_per_tensor_param()
    check_received(list(per_tensor_param), model)


@pytest.mark.parametrize("mode", ["server", "colocate"])
@pytest.mark.parametrize("is_main_process", [True, False])
def test_trl(model, install, mode, is_main_process):
    received = []

    class VLLMClient:
        def update_named_param(self, name: str, weights: torch.Tensor):
            received.append((name, weights.clone()))

    class VllmModel:
        def load_weights(self, weights):
            received.extend((name, tensor.clone()) for name, tensor in weights)

    class VLLMGeneration:
        def __init__(self):
            self.mode = mode
            self.accelerator = types.SimpleNamespace(is_main_process=is_main_process)
            self.vllm_client = VLLMClient()
            runner = types.SimpleNamespace(model=VllmModel())
            worker = types.SimpleNamespace(model_runner=runner)
            executor = types.SimpleNamespace(driver_worker=worker)
            self.llm = types.SimpleNamespace(
                llm_engine=types.SimpleNamespace(model_executor=executor)
            )

        def _push_param_to_vllm(self, name: str, param) -> None:
            if self.mode == "server" and self.accelerator.is_main_process:
                self.vllm_client.update_named_param(name, param)
            elif self.mode == "colocate":
                worker = self.llm.llm_engine.model_executor.driver_worker
                worker.model_runner.model.load_weights([(name, param)])

        def _sync_fsdp2_params_to_vllm(self, module: nn.Module):
            raise NotImplementedError

    original = VLLMGeneration._sync_fsdp2_params_to_vllm
    install({"trl.generation.vllm_generation": {"VLLMGeneration": VLLMGeneration}})
    run_block("trl")
    assert parameters_of(VLLMGeneration._sync_fsdp2_params_to_vllm) == parameters_of(original)

    VLLMGeneration()._sync_fsdp2_params_to_vllm(model)
    if mode == "server" and not is_main_process:
        assert not received
    else:
        check_received(received, model)


@pytest.mark.parametrize("is_master", [True, False])
def test_prime_rl(model, install, is_master):
    sent: list[Any] = []

    def broadcast_integer(integer: int, communicator) -> None:
        communicator.append(integer)

    def broadcast_state_dict(state_dict: dict[str, torch.Tensor], communicator) -> None:
        communicator.append(state_dict)

    def get_layer_prefix(model_config, override: str | None = None) -> str:
        return "model.layers."

    def get_max_layer_num(state_dict, layer_prefix: str = "model.layers.") -> int:
        layers = [-1]
        for key in state_dict:
            if key.startswith(layer_prefix):
                layers.append(int(key[len(layer_prefix) :].split(".")[0]))
        return max(layers) + 1

    class NCCLWeightBroadcastSender:
        def __init__(self):
            self.world = types.SimpleNamespace(is_master=is_master)
            if is_master:
                self.communicator = sent

        @torch.no_grad()
        def broadcast_weights(self, model: nn.Module, step: int) -> None:
            raise NotImplementedError

    original = NCCLWeightBroadcastSender.broadcast_weights
    install(
        {
            "prime_rl.trainer.conversion_utils": {"get_max_layer_num": get_max_layer_num},
            "prime_rl.transports.weights.nccl": {
                "NCCLWeightBroadcastSender": NCCLWeightBroadcastSender,
                "broadcast_integer": broadcast_integer,
                "broadcast_state_dict": broadcast_state_dict,
            },
            "prime_rl.utils.vlm": {"get_layer_prefix": get_layer_prefix},
        }
    )
    run_block("prime_rl")
    hook = NCCLWeightBroadcastSender.broadcast_weights
    assert parameters_of(hook) == parameters_of(original)
    NCCLWeightBroadcastSender().broadcast_weights(model, step=3)
    if not is_master:
        assert not sent
        return

    # The receiver reads a count, and as many state dicts.
    count, *state_dicts = sent
    assert count == len(state_dicts) == 3
    received = []
    for state_dict in state_dicts:
        received += state_dict.items()
    check_received(received, model)
    layers = {name.split(".")[2] for name in state_dicts[0]}
    assert layers == {"0"}
