"""Tests that run on several ranks: `@ranks(1, 2, 4)` turns a function into such a test.

The function runs on every rank, in worker processes that are started once per session (see
pool.py). Each case gets new process groups, so that no state leaks into the next case.

    @ranks(2, 4)
    @pytest.mark.parametrize("rows", [8, 7])
    def test_shards_add_up(rig, rows):
        assert rig.world_size in (2, 4)
        torch.distributed.all_reduce(torch.ones((), device=rig.device))

A case receives a `Rig` and the values of its `parametrize` marks. Arguments and results are
pickled. It runs on CPU with gloo. The variant marked `gpu` runs on CUDA with NCCL if there are
enough GPUs.
"""

from .pool import Rig
from .ranks import ranks

__all__ = ["Rig", "ranks"]
