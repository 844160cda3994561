"""Runs an example of torchtitan on CPU: ``torchtitan_on_cpu.py [its arguments]``.

It is ``examples/torchtitan_llama.py``, or the one that TEST_EXAMPLE names.

torchtitan's Trainer does not support CPU. This script replaces the device that it detects, its
timeouts, memory statistics, attention (flex has no gradient on CPU, so its SDPA module is used),
CUDA graphs, gloo's missing PREMUL_SUM (with torch's switch for it), Inductor (with aot_eager), and
the data and tokenizer that it would download. Everything else is torchtitan's Trainer.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan import trainer as titan  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import Configurable  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter  # noqa: E402

LENGTH = 64


class NoMemory:
    """Memory statistics of a device without any."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        pass


class Counting(torch.utils.data.IterableDataset):
    """Sequences that count modulo 64 from a random start."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.rank)
        positions = torch.arange(LENGTH)
        while True:
            tokens = (torch.randint(64, (1,), generator=generator) + torch.arange(LENGTH + 1)) % 64
            yield {"input": tokens[:-1], "positions": positions}, tokens[1:]


class Data(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
        super().__init__(Counting(dp_rank), dp_rank, dp_world_size, batch_size=2)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def adapt(config: titan.Trainer.Config) -> None:
    """Replace what the CPU does not support, and choose sizes that take seconds."""
    model: Any = config.model_spec.model
    model.layers = model.layers[:2]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    experts = int(os.environ.get("TEST_EXPERTS", "4"))
    for _, part, _, _ in list(model.traverse(Configurable.Config, recurse=True)):
        if isinstance(part, GroupedExperts.Config):
            part.hidden_dim = 96
        if hasattr(part, "num_experts"):
            part.num_experts = experts
        if hasattr(part, "top_k"):
            part.top_k = 2
        if isinstance(part, TokenChoiceTopKRouter.Config):
            part.gate.out_features = experts
    # gloo exchanges equal numbers of tokens only.
    config.debug.moe_force_load_balance = config.parallelism.expert_parallel_degree > 1
    config.training.local_batch_size = 2
    config.training.seq_len = LENGTH
    config.training.disable_cuda_graphs = True
    config.compile.backend = "aot_eager"
    config.dataloader = Data.Config()
    config.tokenizer = NoTokenizer.Config()
    config.validator.enable = False
    config.debug.enable_structured_logging = False
    if backend := os.environ.get("TEST_SPMD_BACKEND"):
        config.parallelism.spmd_backend = backend  # type: ignore[assignment]


losses: list[float] = []
trainers: list[titan.Trainer] = []


class CpuTrainer(titan.Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        pass

    def __init__(self, config: Any) -> None:
        adapt(config)
        super().__init__(config)
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        trainers.append(self)

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**kwargs)
        losses.append(loss.item())
        return loss


#: The steps, with the number of `fp8rs.monitor` statistics that torchtitan's logger received at
#: each.
logged: list[tuple[int, int]] = []


def watched() -> type[titan.Trainer]:
    """The monitoring Trainer of docs/clients/torchtitan.md, derived from the one here."""
    page = Path(__file__).resolve().parents[2] / "docs" / "clients" / "torchtitan.md"
    (block,) = re.findall(
        r"```python\n([^`]*class WatchedTrainer.*?)```", page.read_text(), re.DOTALL
    )
    names: dict[str, Any] = {"__name__": __name__}
    theirs = titan.Trainer
    titan.Trainer = CpuTrainer
    exec(compile(block.replace("every=100", "every=2"), page, "exec", dont_inherit=True), names)
    titan.Trainer = theirs

    class Kept(names["WatchedTrainer"]):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.metrics_processor.logger.log = keep

    def keep(values: dict[str, Any], step: int) -> None:
        if all(name.startswith("fp8/") for name in values):
            logged.append((step, len(values)))

    return Kept


def evaluate(model: Any) -> float:
    """Return the sum of the absolute logits for a fixed batch."""
    # The chunked loss calls the head itself.
    model._skip_lm_head = False
    tokens = torch.arange(LENGTH)[None]
    with torch.no_grad():
        out = model.eval()(tokens, positions=tokens)
    return float((out.to_local() if hasattr(out, "to_local") else out).float().abs().sum())


def main(argv: list[str]) -> dict[str, Any]:
    metrics.build_device_memory_monitor = NoMemory
    # It uses a barrier with device numbers.
    titan.dist_utils.set_pg_timeouts = lambda **_: None
    kind = watched() if os.environ.get("TEST_WATCHED") else CpuTrainer
    # `config.build()` creates an instance of this class.
    titan.Trainer.Config._owner = kind
    name = os.environ.get("TEST_EXAMPLE", "torchtitan_llama")
    path = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(argv)
    trainer = trainers[0]
    with trainer.train_context():
        evaluated = evaluate(trainer.model_parts[0])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    results = {"losses": losses, "step": trainer.step, "evaluated": evaluated, "graphs": graphs}
    return {**results, "logged": logged}
