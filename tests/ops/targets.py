"""The instruction sets whose kernels this machine has built and runs."""

from __future__ import annotations

from phasewise.ops import native

HERE = [target for target in native.TARGETS if native.load(target) is not None]
