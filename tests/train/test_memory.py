"""What a step frees stays with the process: the next step's allocations meet no fresh pages."""

import subprocess
import sys

import pytest

pytest.importorskip("resource")

STEP = """
import resource, torch
from phasewise.train.memory import keep_freed_memory
kept = {kept}
if kept and not keep_freed_memory():
    print("unheard")
    raise SystemExit
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    for _ in range(4):
        torch.ones(8 << 20)  # 32 MB each
step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


def _faults(kept: bool) -> int:
    done = subprocess.run([sys.executable, "-c", STEP.format(kept=kept)], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "unheard":
        pytest.skip("this C library takes no such advice")
    return int(done.stdout)


def test_memory_that_a_step_freed_is_not_asked_for_again() -> None:
    given_back, kept = _faults(kept=False), _faults(kept=True)
    assert kept < given_back / 4
