"""What a step frees stays with the process, until it is given back: the next step's allocations meet no fresh pages."""

import platform
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library takes no such advice")

STEP = """
import resource, torch
from phasewise.train.memory import keep_freed_memory
kept = {kept}
assert not kept or keep_freed_memory()
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
    return int(done.stdout)


def test_memory_that_a_step_freed_is_not_asked_for_again() -> None:
    given_back, kept = _faults(kept=False), _faults(kept=True)
    assert kept < given_back / 4


GAPS = """
import torch
from phasewise.train.memory import give_back, keep_freed_memory
assert keep_freed_memory()
resident = lambda: int(open("/proc/self/statm").read().split()[1])
blocks = [torch.ones(1 << 20) for _ in range(64)]  # 4 MB each
full = resident()
kept = blocks[1::2]
del blocks
before = resident()
give_back()
print(full, before, resident())
"""


def test_gaps_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    full, before, after = map(int, done.stdout.split())
    pages = 32 * (4 << 20) // resource.getpagesize()  # those of half of the blocks
    assert full - before < pages / 10 < pages * 0.9 < before - after


TINY = """
import torch
from phasewise.train.memory import tiny_numbers_as_zero
torch.set_num_threads(2)
left = lambda numbers: int((torch.full((numbers,), 1e-20) * 1e-20).count_nonzero())
{before}
with tiny_numbers_as_zero() as could:
    print(could, left(1 << 20))
print(left(8))
"""


def test_tiny_numbers_are_zero_in_all_threads_and_only_meanwhile() -> None:
    for before, after in (("", "8"), ("torch.set_flush_denormal(True)", "0")):
        script = TINY.format(before=before)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        could, inside, outside = done.stdout.split()
        assert could == "True" or platform.machine() != "x86_64"
        if could == "True":
            assert (inside, outside) == ("0", after)
