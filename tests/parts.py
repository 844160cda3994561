"""The former name of `internals`."""

from internals import local_of, store_of

__all__ = ["local_of", "store_of"]
