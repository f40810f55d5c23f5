"""Builds the optional CPU kernels: one shared library per instruction set, chosen when first used.

Without a C++ compiler, or on another processor than x86-64, the installation goes on without them.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup

WHERE = Path("src/phasewise/ops/native")
FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-strict-aliasing"]
FLAGS += ["-fno-math-errno", "-Wno-maybe-uninitialized"]  # the latter: false alarms in GCC's own headers
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "bf16", "vnni"))]

AMX = [*AVX512, *(f"-mamx-{part}" for part in ("tile", "bf16", "int8"))]


def library(name: str, target: list[str]) -> Extension:
    return Extension(
        f"phasewise.ops.native._{name}",
        sources=[str(path) for path in sorted(WHERE.glob("*.cpp"))],
        depends=[str(path) for path in sorted(WHERE.glob("*.h"))],
        extra_compile_args=FLAGS + target,
        language="c++",
        optional=True,
    )


x86 = platform.machine().lower() in ("x86_64", "amd64") and platform.system() != "Windows"
TARGETS = [("avx2", AVX2), ("avx512", AVX512), ("amx", AMX)]
setup(ext_modules=[library(*target) for target in TARGETS] if x86 else [])
