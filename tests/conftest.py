"""What all tests share: devices, and a count of the tests that a GPU would have run."""

import pytest
import torch

NO_GPU = "needs a CUDA GPU"


def pytest_collection_modifyitems(items):
    # Counted through NVML, so that no CUDA context starts here: tests fork.
    if torch.cuda.device_count() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("gpu" in report.keywords for report in skipped)
    terminalreporter.line(f"gpu tests skipped: {count}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device that operations run on."""
    return torch.device(request.param)
