"""The most memory that this process has taken."""

from __future__ import annotations

from pathlib import Path


def peak() -> float:
    """The most that the process has had since `forget`, in megabytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def forget() -> bool:
    """Lets the peak begin anew; False where that cannot be."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
