"""Options and fixtures of all tests: devices, the choice of parameter combinations, the summary."""

import gc
import os
from collections import Counter, defaultdict

# Set before torch is imported, here and in every process that a test starts. torch's threads spin
# while they wait. If other processes (xdist workers, ranks) need the cores, small layers become ten
# times slower. The threads of fp8rs sleep instead, so two of them remain to test sharing a tensor.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "2")
# Each connection of a TCPStore looks up the name of ::ffff:127.0.0.1. Without this, a name server
# that does not answer costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest
import torch

from covering import covering
from fp8rs.gemm import estimates

NO_GPU = "needs a CUDA GPU"

#: Strength of a cover of stacked parameters -> what it contains.
STRENGTHS = {1: "each value", 2: "each pair"}


def pytest_addoption(parser):
    parser.addoption(
        "--long",
        action="store_true",
        help="run long tests too",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="run long tests too, and all combinations of stacked parameters instead of a cover",
    )
    parser.addoption(
        "--strength",
        type=int,
        choices=list(STRENGTHS),
        default=2,
        help="what a cover of parameters contains: each pair of values (2) or each value (1)",
    )


#: Folders of tests that reach a device through operators and torch alone. Pairs of their other
#: parameters run on the CPU. A GPU runs each value, which pairs it with CUDA. In other folders, GPU
#: cases cover all pairs, because parameters choose kernels and streams together.
THROUGH_OPERATORS = ("tensor", "fp8_weights", "checkpoint", "export", "convert", "monitoring")


# Before -k and -m select tests, collect the functions that also run on the CPU. Afterwards, build
# the cover from what remains.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    long = config.getoption("long") or config.getoption("full")
    on_cpu = {
        _function(item) for item in items if not _is_gpu(item) and (long or not _is_long(item))
    }
    yield
    if not config.getoption("full"):
        collected = len(items)
        strength = config.getoption("strength")
        short = [
            item
            for item in items
            if (long or not _is_long(item)) and not (strength == 1 and _is_second_tier(item))
        ]
        covered_ids = set(map(id, _cover(short, strength, on_cpu)))
        left_out = [item for item in items if id(item) not in covered_ids]
        items[:] = [item for item in items if id(item) in covered_ids]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            config.stash[COVER] = (len(items), collected)
    # This counts through NVML and creates no CUDA context, which would not survive a fork.
    if torch.cuda.device_count() == 0:
        for item in items:
            if _is_gpu(item):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable the garbage collector until all tests exist: it would walk them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Freeze the objects that exist after collection.

    The garbage collector would walk thousands of tests and all of torch, which takes a second each
    time. Tests for leaks collect often.
    """
    gc.collect()
    gc.freeze()


def _is_long(item):
    on_cpu = not _is_gpu(item)
    return bool(
        item.get_closest_marker("long") or (on_cpu and item.get_closest_marker("long_on_cpu"))
    )


def _is_second_tier(item):
    """Return whether other cases run the code of this one. On a GPU, recipes have own kernels."""
    return item.get_closest_marker("second_tier") is not None and not _is_gpu(item)


def _is_gpu(item):
    return item.get_closest_marker("gpu") is not None


def _folder(file):
    """Return the name of the folder that contains a test file."""
    return file.rpartition("/")[0].rpartition("/")[2]


#: The number of tests that run and the number that were collected.
COVER = pytest.StashKey[tuple[int, int]]()


def _function(item):
    return item.parent.nodeid, getattr(item, "originalname", item.name)


def _cover(items, strength, on_cpu):
    """Yield the test cases that cover all combinations of ``strength`` parameters of each function.

    A test with no more parameters than that keeps all cases, and so does a test marked
    ``whole_product``. Cases for a GPU are covered separately, because they are skipped without one,
    and so are cases that need more GPUs than there are. `THROUGH_OPERATORS` applies to functions
    that also run on the CPU (``on_cpu``).
    """
    gpus = torch.cuda.device_count()
    functions = defaultdict(list)
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("whole_product"):
            yield item
        else:
            needed = item.callspec.params.get("world_size", 1) if _is_gpu(item) else 0
            functions[_function(item), needed > 0, needed > gpus].append(item)
    for (function, gpu, _), cases in functions.items():
        file, _ = function
        case_strength = (
            1 if gpu and function in on_cpu and _folder(file) in THROUGH_OPERATORS else strength
        )
        # Restore the order of parametrization: pytest groups cases that share a fixture.
        cases.sort(key=lambda item: sorted(item.callspec.indices.items()))
        for index in covering(_places([_choices(item) for item in cases]), case_strength):
            yield cases[index]


def _places(choices):
    """Replace each choice by its index among the distinct choices of its column."""
    columns = [list(dict.fromkeys(column)) for column in zip(*choices, strict=True)]
    return [tuple(map(list.index, columns, row)) for row in choices]


def _choices(item):
    """Identify what each ``parametrize`` mark and each parametrized fixture chose for a case.

    A ``parametrize`` of several names is one choice. Values are compared by identity, because all
    cases share them.
    """
    chosen = dict(item.callspec.params)
    together = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        together.append(tuple(id(chosen.pop(name)) for name in names if name in chosen))
    return (*together, *((id(chosen[name]),) for name in sorted(chosen)))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Receive the counts of a pytest-xdist worker."""
    cover = getattr(node, "workeroutput", {}).get("cover")
    if cover:
        node.config.stash[COVER] = tuple(cover)


def pytest_runtest_teardown(item):
    if _is_gpu(item):
        torch.cuda.empty_cache()  # all test processes share the GPUs


def pytest_sessionfinish(session):
    # nanobind reports objects that are still alive at exit.
    gc.unfreeze()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cover"] = session.config.stash.get(COVER, None)


def _is_gpu_report(report):
    # The report of a file that is skipped as a whole has no keywords.
    return "gpu" in getattr(report, "keywords", ())


def pytest_terminal_summary(terminalreporter, config):
    """Print the number of skipped tests for each reason, instead of hundreds of lines."""
    ran, collected = config.stash.get(COVER, (0, 0))
    if ran:
        cover = STRENGTHS[config.getoption("strength")]
        terminalreporter.line(
            f"tests: {ran} of {collected}, a cover of {cover} of parameters (all: --full)"
        )
    skipped = terminalreporter.stats.get("skipped", [])
    other = Counter(_reason(report) for report in skipped if not _is_gpu_report(report))
    for reason, count in sorted(other.items()):
        terminalreporter.line(f"skipped: {count}: {reason}")
    count = sum(map(_is_gpu_report, skipped))
    terminalreporter.line(f"gpu tests skipped: {count}")


def _reason(report):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


@pytest.fixture(autouse=True)
def _always_fp8(monkeypatch):
    """Let small layers have FP8 GEMMs on a GPU too, where gemms="auto" chooses high precision."""
    monkeypatch.setattr(estimates, "MEASURED_DEVICES", ())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The devices that operators run on."""
    return torch.device(request.param)
