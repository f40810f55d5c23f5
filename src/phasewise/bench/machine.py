"""Which machine a number was measured on."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path

import torch

from phasewise.ops import native


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def kernels() -> str:
    """The instruction set that the native kernels in use are for: names of processors may hide how old they are."""
    found = native.library()
    return "no native kernels" if found is None else f"{Path(found._name).stem.strip('_')} kernels"


def where(device: torch.device) -> str:
    """Names the processor and the versions that compute there: texts of evaluations belong to Python's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu()
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"


def describe() -> dict[str, str | int]:
    return {
        "cpu": cpu(), "cores": cores(), "threads": torch.get_num_threads(), "system": platform.system(),
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip


def peak_rss() -> int:
    """The most bytes of memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
