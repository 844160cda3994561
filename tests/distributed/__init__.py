"""Tests that run on several ranks: `@ranks(1, 2, 4)` turns a function into such a test.

The function's body runs on every rank, in worker processes that are started once for
the whole session (see pool.py). Each case gets fresh process groups, so that nothing
leaks from one case into the next.

    @ranks(2, 4)
    @pytest.mark.parametrize("rows", [8, 7])
    def test_shards_add_up(rig, rows):
        assert rig.world_size in (2, 4)
        torch.distributed.all_reduce(torch.ones((), device=rig.device))

A case takes the `Rig` and the values of its own `parametrize` marks; everything it takes
and returns is pickled. It runs on the CPU with gloo and, marked `gpu`, on CUDA with NCCL
where there are as many GPUs as ranks.
"""

from .pool import Rig
from .ranks import ranks

__all__ = ["Rig", "ranks"]
