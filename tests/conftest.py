"""What all tests share: devices, which part of a product of parameters runs, what is counted."""

import gc
import os
from collections import Counter, defaultdict

# Read where torch is imported, here and in what tests start. torch's threads wait for each other by
# spinning: where other processes (of xdist, ranks) want the cores too, small layers take ten times
# as long. fp8rs's own threads, which sleep, stay as many as share a tensor.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "2")
# Each connection of a TCPStore looks up the name of ::ffff:127.0.0.1. Without this, a name server
# that does not answer costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest
import torch

from covering import covering

NO_GPU = "needs a CUDA GPU"

#: What a cover holds of stacked parameters, by the number of them that meet.
STRENGTHS = {1: "each value", 2: "each pair"}


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="long tests too, and whole products of stacked parameters, not a cover of pairs",
    )
    parser.addoption(
        "--strength",
        type=int,
        choices=list(STRENGTHS),
        default=2,
        help="what a cover holds of stacked parameters: each pair of values (2), or each value (1)",
    )


# Last, when -k and -m have chosen: a cover of what they leave.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("full"):
        collected = len(items)
        short = [item for item in items if not _is_long(item)]
        kept = set(map(id, _cover(short, config.getoption("strength"))))
        left_out = [item for item in items if id(item) not in kept]
        items[:] = [item for item in items if id(item) in kept]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            config.stash[COVER] = (len(items), collected)
    # Counted through NVML, so that no CUDA context starts here: tests fork.
    if torch.cuda.device_count() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish():
    """Thousands of tests and all of torch are no garbage.

    To walk them takes a second each time, and tests that look for leaks collect often."""
    gc.collect()
    gc.freeze()


def _is_long(item):
    on_cpu = not item.get_closest_marker("gpu")
    return bool(
        item.get_closest_marker("long") or (on_cpu and item.get_closest_marker("long_on_cpu"))
    )


#: (tests that run, tests that there are)
COVER = pytest.StashKey[tuple[int, int]]()


def _cover(items, strength):
    """Of each test function the cases in which all meets that meets in so many of its parameters.

    A test of no more parameters than that keeps all cases, as does one marked ``whole_product``.
    Cases for a GPU are covered on their own: where there is none they cover nothing.
    """
    functions = defaultdict(list)
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("whole_product"):
            yield item
        else:
            gpu = item.get_closest_marker("gpu") is not None
            functions[item.parent.nodeid, item.originalname, gpu].append(item)
    for cases in functions.values():
        # As they were made: where a fixture serves several tests, pytest puts them together.
        cases.sort(key=lambda item: sorted(item.callspec.indices.items()))
        for index in covering(_places([_choices(item) for item in cases]), strength):
            yield cases[index]


def _places(choices):
    """The place of each choice among those of its column, in the order that they come up in."""
    columns = [list(dict.fromkeys(column)) for column in zip(*choices, strict=True)]
    return [tuple(map(list.index, columns, row)) for row in choices]


def _choices(item):
    """What each ``parametrize`` and each fixture with parameters chose, by identity.

    A ``parametrize`` of several names is one choice. All cases share the objects to choose from.
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
    """A process of pytest-xdist hands its figures to the one that prints them."""
    cover = getattr(node, "workeroutput", {}).get("cover")
    if cover:
        node.config.stash[COVER] = tuple(cover)


def pytest_sessionfinish(session):
    gc.unfreeze()  # nanobind's modules complain of what nobody collects at the end
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cover"] = session.config.stash.get(COVER, None)


def _is_gpu(report):
    return "gpu" in getattr(report, "keywords", ())  # a file that is skipped whole has none


def pytest_terminal_summary(terminalreporter, config):
    """Counts in place of lists: what is skipped is hundreds of tests for a few reasons."""
    ran, collected = config.stash.get(COVER, (0, 0))
    if ran:
        what = STRENGTHS[config.getoption("strength")]
        terminalreporter.line(
            f"tests: {ran} of {collected}, a cover of {what} of parameters (all: --full)"
        )
    skipped = terminalreporter.stats.get("skipped", [])
    other = Counter(_reason(report) for report in skipped if not _is_gpu(report))
    for reason, count in sorted(other.items()):
        terminalreporter.line(f"skipped: {count}: {reason}")
    count = sum(map(_is_gpu, skipped))
    terminalreporter.line(f"gpu tests skipped: {count}")


def _reason(report):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device that operations run on."""
    return torch.device(request.param)
