"""The limits of an engine: bytes of KV, requests that run at a time, and what else it may do."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from phasewise.engine.assembly import kv_shapes as kv_shapes


def memory_default() -> int:
    """A quarter of the machine's memory, at most 4 GiB."""
    return min(4 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


def device_memory(device: torch.device) -> int:
    """Three quarters of the bytes that are free on a GPU once weights are there; the rest is for steps."""
    free, _ = torch.cuda.mem_get_info(device)
    return free * 3 // 4


@dataclass(frozen=True)
class Limits:
    """The limits of an engine: bytes of KV, requests that run at a time, and what else it may do."""

    kv_bytes: int | None = (
        None  # hard budget for KV, prefix cache and companions included; None = see `on`, memory_default()
    )
    max_running: int = 64
    prefix_cache: bool = True
    # where the workers of a placement run: inline (this thread), processes, ray[:knobs] or auto (processes if possible)
    cluster: str = "inline"
    exact: bool = False  # no method that may change answers, in any recipe
    kv_host: int = 0  # bytes of memory for prefix blocks that the budget gives up; 0: none
    kv_disk: str | None = None  # a folder for prefix blocks, which outlives the process ...
    kv_disk_bytes: int = 0  # ... and its bound
    max_loras: int = 16  # adapters at a time
    max_lora_rank: int = 64  # of a linear layer of the checkpoint

    def on(self, device: torch.device) -> Limits:
        """The same for a model on `device`: KV that nobody has limited lies in the memory of a GPU, if it is one."""
        if self.kv_bytes is not None or device.type != "cuda":
            return self
        return replace(self, kv_bytes=device_memory(device))

    @property
    def tiered(self) -> bool:
        """True if prefix blocks have a place below the budget."""
        return self.kv_host > 0 or self.kv_disk is not None

    @property
    def budget(self) -> int:
        """Bytes of KV."""
        return memory_default() if self.kv_bytes is None else self.kv_bytes
