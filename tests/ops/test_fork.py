"""A forked child, such as a DataLoader worker, has none of its parent's other threads."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, threading
import torch, fp8rs

x = torch.randn(20, 800)
call = lambda: torch.ops.fp8rs.quantize_current(x, torch.float8_e4m3fn)  # the other plane is empty
call()

def again():
    while True:
        call()

for _ in range(2):
    threading.Thread(target=again, daemon=True).start()
failed = 0
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # seconds for microseconds of work
        call()
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
print("failed:", failed, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_an_operator_runs_in_a_child_forked_while_other_threads_ran():
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert out.stdout.strip() == "failed: 0", out.stderr[-2000:]
