"""The table of what operators do to quantized tensors. :mod:`fp8rs.tensor.aten` fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)


class Handlers(dict[Any, Handler]):
    """Operator -> handler(func, *args, **kwargs).

    One that has no row gets the handler that ``classify`` finds for it by its schema.
    """

    classify: Callable[[Any], Handler]

    def __missing__(self, func: Any) -> Handler:
        handler = self[func] = self.classify(func)
        return handler


HANDLERS = Handlers()


def implements(*funcs: Any) -> Callable[[H], H]:
    """Register a handler for overloads."""

    def register(handler: H) -> H:
        for func in funcs:
            HANDLERS[func] = handler
        return handler

    return register
