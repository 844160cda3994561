"""If a test calls a check and does not assert its result, the test cannot fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from project.sources import TESTS, imported, modules

#: Functions of Python and torch that return a bool, by the last part of their names.
KNOWN = {"all", "any", "isinstance", "issubclass", "hasattr", "callable", "bool"}
KNOWN |= {"equal", "allclose", "is_tensor"}


def name_of(call: ast.expr) -> str:
    """Return the name of the called function: ``f`` for ``f(x)`` and for ``module.f(x)``."""
    if not isinstance(call, ast.Call):
        return ""
    function = call.func
    return getattr(function, "id", "") or getattr(function, "attr", "")


def is_bool(value: ast.expr | None, bool_functions: set[str]) -> bool:
    """Return whether an expression is certain to be a bool."""
    if isinstance(value, ast.Compare):
        return True
    if isinstance(value, ast.Constant):
        return isinstance(value.value, bool)
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.Not)
    if isinstance(value, ast.BoolOp):
        return all(is_bool(part, bool_functions) for part in value.values)
    return value is not None and name_of(value) in bool_functions


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, except the bodies of nested functions."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def returns_bool(function: ast.FunctionDef, bool_functions: set[str]) -> bool:
    """Return whether a function returns a bool, by its annotation or its return statements."""
    if function.returns is not None:
        return ast.unparse(function.returns) == "bool"
    values = [node.value for node in own_nodes(function) if isinstance(node, ast.Return)]
    return bool(values) and all(is_bool(value, bool_functions) for value in values)


def bare_checks(trees: dict[str, ast.Module]) -> list[str]:
    """Return the statements that call a function that returns a bool and drop the result.

    Args:
        trees: Modules by name.

    Returns:
        The place and the source of each statement.
    """
    bool_functions = {name: set(KNOWN) for name in trees}
    before = 0
    # Repeat until nothing is added, because one helper may call another.
    while (count := sum(map(len, bool_functions.values()))) > before:
        before = count
        for name, tree in trees.items():
            functions = [f for f in tree.body if isinstance(f, ast.FunctionDef)]
            bool_functions[name] |= {
                f.name for f in functions if returns_bool(f, bool_functions[name])
            }
            bool_functions[name] |= {
                local_name
                for module, source_name, local_name in imported(name, tree)
                if source_name in bool_functions.get(module, ())
            }
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and name_of(node.value) in bool_functions[name]
    ]


def test_checks_are_asserted():
    assert not bare_checks(modules(TESTS))


def test_bare_checks_are_found():
    helpers = """
def same(a, b):
    return all(x == y for x, y in zip(a, b))
def alike(a, b):
    if not a:
        return False
    return same(a, b) and len(a) > 1
def count(a):
    def inner():
        return True
    return len(a)
"""
    source = """
from .helpers import alike as equal_enough
from package.helpers import count, same
def case():
    same([], [])
    equal_enough([], [])
    torch.equal(a, b)
    count([])
    assert same([], [])
    found = same([], [])
"""
    trees = {"package.helpers": ast.parse(helpers), "package.case": ast.parse(source)}
    assert [place.split(": ")[1] for place in bare_checks(trees)] == [
        "same([], [])",
        "equal_enough([], [])",
        "torch.equal(a, b)",
    ]
