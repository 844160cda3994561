"""A killed training on real text resumes from its last checkpoint on another number of ranks."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import kill_with_children

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resume.py"
STEP = re.compile(r"step (\d+): loss ([\d.]+)")


def start(ranks, folder, steps, every):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(EXAMPLE), "--folder", str(folder)]
    command += ["--steps", str(steps), "--save-every", str(every)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def losses_of(process, until=None):
    """Return the losses by step of a run whose ranks are all killed at a step, and its first line.

    The losses include those of steps that the run printed before it was killed.
    """
    losses = {}
    first = ""
    for line in process.stdout:
        first = first or line
        match = STEP.search(line)
        if match:
            losses[int(match[1])] = float(match[2])
            if int(match[1]) == until:
                kill_with_children(process)
    process.stdout.close()
    process.wait(60)
    return losses, first


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("steps, every", [(200, 20)])
def test_a_killed_run_resumes_from_its_last_checkpoint_on_another_world_size(
    tmp_path, steps, every
):
    killed_at = random.randrange(2 * every + 5, steps - every)
    before, _ = losses_of(start(2, tmp_path, steps, every), killed_at)
    after, first = losses_of(start(4, tmp_path, steps, every))
    begun = int(re.match(r"resumed from step-(\d+) on 4 ranks", first)[1])
    # Only the steps since the last save are lost, or since the one before if a save was in
    # progress. A step is printed before it is saved.
    last_saved = (max(before) + 1) // every * every
    assert begun in (last_saved, last_saved - every)
    assert sorted(after) == list(range(begun, steps))
    for step in sorted(before.keys() & after.keys()):
        assert abs(before[step] - after[step]) < 0.03 * before[step], (killed_at, step)
    assert max(list(after.values())[-5:]) < min(list(before.values())[:5])
    print(f"killed at step {killed_at}, resumed from {begun}: {before[begun - 1]} {after[begun]}")
