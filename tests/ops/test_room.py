"""What a process gives back: code that only its start has run, and none that was altered."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux what is mapped")

STARTED = """
import torch
from phasewise.ops.native.room import give_back_code

def files():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))

want, before = torch.ones(300, 300) @ torch.ones(300), files()
gone = give_back_code()
print(before, files(), gone)
assert torch.equal(torch.ones(300, 300) @ torch.ones(300), want)
"""


@linux
def test_code_that_the_start_has_run_leaves_and_comes_back_when_it_is_run() -> None:
    said = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True).stdout
    before, after, gone = map(int, said.split())
    assert after < before / 2
    assert gone > before / 2


@linux
def test_altered_code_stays(tmp_path: Path) -> None:
    """A page of a file that is mapped for running, one byte of which was changed in memory alone."""
    from phasewise.ops.native.room import give_back_code

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    file = tmp_path / "code"
    file.write_bytes(b"\x90" * 4096)
    with file.open("rb") as code:
        address = libc.mmap(None, ctypes.c_size_t(4096), 3, 2, code.fileno(), ctypes.c_long(0))  # to write, private
    page = (ctypes.c_char * 4096).from_address(address)
    page[7] = b"\xcc"
    assert not libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), 5)  # to read and to run
    give_back_code()
    assert page[7] == b"\xcc"
    assert not libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4096))
