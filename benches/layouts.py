"""How the end-to-end benchmark distributes a model: FSDP2, HSDP, or tensor parallelism with FSDP2.

Layouts of N ranks, by name:

- fsdp: a parameter has N shards
- hsdp: a parameter has N / 2 shards, and two replicas, whose gradients are all-reduced
- tp: a layer is split over 2 ranks, and each part of a parameter has N / 2 shards. The ranks that
  share a layer also share its batch, and have half of the tokens in norms and residuals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fp8rs.demo.model import Llama
from fp8rs.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)


@dataclass(frozen=True)
class Layout:
    """The meshes of a layout.

    Attributes:
        data: the mesh of FSDP2. With two dimensions, the first one has replicas.
        tensor: the mesh of tensor parallelism, or None.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None = None

    @property
    def shards(self) -> int:
        """Return the number of FSDP2's shards of a parameter, or of a rank's part of it."""
        return self.data.size(self.data.ndim - 1)

    @property
    def batches(self) -> int:
        """Return the number of batches in a step."""
        return self.data.size()


def make_layout(name: str, device: str, ranks: int) -> Layout:
    """Return the layout "fsdp", "hsdp" or "tp" of all ranks.

    Raises:
        ValueError: the layout requires an even number of ranks.
    """
    if name == "fsdp":
        return Layout(init_device_mesh(device, (ranks,)))
    if ranks % 2:
        raise ValueError(f"layout {name} requires an even number of ranks, but got {ranks}")
    if name == "hsdp":
        names = ("replicas", "shards")
        return Layout(init_device_mesh(device, (2, ranks // 2), mesh_dim_names=names))

    # Ranks of tensor parallelism are neighbours.
    mesh = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    return Layout(mesh["data"], mesh["tensor"])


def parallelize(model: Llama, mesh: DeviceMesh, fp8: bool) -> None:
    """Split layers over the ranks of a mesh, and tokens where no layer is split.

    Call it after the conversion, before the model is compiled and sharded.

    Args:
        model: a model with plain blocks.
        mesh: the mesh of tensor parallelism.
        fp8: whether the blocks are converted by fp8rs. They then exchange activations in FP8.
    """
    all_tokens: dict[str, Any] = {
        "input_layouts": (Shard(1),),
        "desired_input_layouts": (Replicate(),),
    }
    # The attention's second argument is the rotation, which all ranks compute.
    all_tokens_and_rotation: dict[str, Any] = {
        "input_layouts": (Shard(1), None),
        "desired_input_layouts": (Replicate(), None),
    }
    columns: ParallelStyle
    rows: ParallelStyle
    attention: ParallelStyle
    feed_forward: ParallelStyle
    if fp8:
        columns = Float8ColwiseParallel()
        rows = Float8RowwiseParallel(output_layouts=Shard(1))
        attention = PrepareFloat8ModuleInput(**all_tokens_and_rotation)
        feed_forward = PrepareFloat8ModuleInput(**all_tokens)
    else:
        columns = ColwiseParallel()
        rows = RowwiseParallel(output_layouts=Shard(1))
        attention = PrepareModuleInput(**all_tokens_and_rotation)
        feed_forward = PrepareModuleInput(**all_tokens)

    plan_of_block = {
        "attention_norm": SequenceParallel(),
        "attention": attention,
        "attention.wq": columns,
        "attention.wk": columns,
        "attention.wv": columns,
        "attention.wo": rows,
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": feed_forward,
        "feed_forward.w1": columns,
        "feed_forward.w3": columns,
        "feed_forward.w2": rows,
    }
    plan_of_root = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan_of_block)
    parallelize_module(model, mesh, plan_of_root)
    model.embedding.register_forward_hook(_clone_output)


def _clone_output(embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Return the embedding's output as a plain tensor.

    The output is an AsyncCollectiveTensor. torch 2.15 computes no gradient of such an input of a
    compiled block, so the embedding would not be trained. torch 2.11 does.
    """
    return output.clone()
