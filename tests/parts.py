"""What a parameter is made of: the private names that tests ask for, of torch and of fp8rs."""

from torch import Tensor

from fp8rs.tensor.store import Store


def local_of(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, not a view of it; another tensor itself."""
    return getattr(t, "_local_tensor", t)


def store_of(t: Tensor) -> Store:
    """What an FP8 tensor, sharded or not, shares with its views: planes, owner, delayed scale."""
    return local_of(t)._store
