"""Rules for imports in test modules."""

from __future__ import annotations

import ast

import torch

from project.sources import FP8RS, TESTS, imported, modules

#: Private names of torch and of clients that fp8rs uses too.
THEIRS = {*dir(torch.Tensor), *dir(torch.nn.Module()), "_experts_implementation"}
THEIRS |= {"_open", "_owner", "_prepare_ao"}

#: Owners of attributes that are not names of fp8rs, even if fp8rs has such names.
NOT_OURS = "self", "torch", "ops"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported_tests(name: str, tree: ast.Module) -> set[str]:
    """Return the test modules that a module imports."""
    names = [part for module, there, _ in imported(name, tree) for part in (module, there)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {n for n in names if n.split(".")[-1].startswith("test_")}


def private_names() -> set[str]:
    """Return the private functions, classes, variables and attributes that fp8rs defines."""
    names = set()
    for tree in modules(FP8RS).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return set(filter(is_private, names)) - THEIRS


def takes_name(function: ast.expr) -> bool:
    """Return whether a function reads or replaces an attribute whose name is an argument."""
    *_, name = called = ast.unparse(function).split(".")
    return name in ("getattr", "setattr", "delattr", "patch") or called[-2:] == ["patch", "object"]


def private_reads(name: str, tree: ast.Module, private: set[str]) -> list[str]:
    """Return the imports and attributes of a module that are private names of fp8rs.

    A name may be a string: `setattr(module, "_name", ...)`. So may a path, even to a public name:
    `setattr("fp8rs.module.name", ...)`. Paths hide which module a test depends on. Attributes of
    `self`, of torch and of `torch.ops.fp8rs` are not names of fp8rs.
    """
    reads = [
        f"{module}.{there}"
        for module, there, _ in imported(name, tree)
        if module.split(".")[0] == "fp8rs" and any(map(is_private, [*module.split("."), there]))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            owner = ast.unparse(node.value)
            if owner.split(".")[0] not in NOT_OURS:
                reads.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Call) and takes_name(node.func) and node.args:
            if ast.unparse(node.args[0]).split(".")[0] in NOT_OURS:
                continue
            reads += [
                argument.value
                for argument in node.args[:2]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                if argument.value in private or argument.value.startswith("fp8rs.")
            ]
    return reads


def test_no_test_module_imports_another_one():
    imports = {name: imported_tests(name, tree) for name, tree in modules(TESTS).items()}
    assert not {name: others for name, others in imports.items() if others}


def test_imports_of_test_modules_are_found():
    source = "import nn.test_a\nfrom .test_b import x\nfrom convert import test_c, models"
    assert imported_tests("nn.case", ast.parse(source)) == {"nn.test_a", "nn.test_b", "test_c"}


def test_only_internals_reads_private_names_of_fp8rs():
    private = private_names()
    trees = modules(TESTS)
    assert private_reads("internals", trees.pop("internals"), private)
    # A client's rank runs this file as a script, which cannot import `internals`.
    assert private_reads("clients.observe", trees.pop("clients.observe"), private)
    reads_by_name = {name: private_reads(name, tree, private) for name, tree in trees.items()}
    assert not {name: reads for name, reads in reads_by_name.items() if reads}


def test_private_names_in_strings_are_found():
    source = """
monkeypatch.setattr(function, "_quantize", f)
mock.patch.object(function, "_quantize", f)
monkeypatch.setattr("fp8rs.nn.function.scaled_mm", f)
monkeypatch.setattr(function, "scaled_mm", f)
"""
    reads = private_reads("case", ast.parse(source), {"_quantize"})
    assert reads == ["_quantize", "_quantize", "fp8rs.nn.function.scaled_mm"]
