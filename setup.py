"""Builds the optional CPU kernels: one shared library per instruction set, chosen when first used.

Without a C++ compiler, or on another processor than 64-bit x86 and ARM, the installation goes on without them.
The libraries are plain C ones, loaded with ctypes: they serve every Python, and so does a wheel that holds them.
"""

from __future__ import annotations

import copy
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

WHERE = Path("src/phasewise/ops/native")
FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-strict-aliasing"]
FLAGS += ["-fno-math-errno", "-Wno-maybe-uninitialized"]  # the latter: false alarms in GCC's own headers
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "bf16", "vnni"))]
AVX512_FMA = [*AVX512, "-DWIDENED"]  # products of bfloat16 by the instructions of float32, see simd.h
AMX = [*AVX512, *(f"-mamx-{part}" for part in ("tile", "bf16", "int8"))]
NEON = ["-fno-schedule-insns"]  # else GCC loads so far ahead that sums leave the registers
NEON_DOT = [*NEON, "-march=armv8.2-a+dotprod"]
X86, ARM = {"avx2": AVX2, "avx512": AVX512, "avx512_fma": AVX512_FMA, "amx": AMX}, {"neon": NEON, "neon_dot": NEON_DOT}
TARGETS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}


BUILD = "PHASEWISE_BUILD"  # in the environment, "best": only what the processor here takes, a quarter of the time


def best(cpuinfo: str) -> list[str]:
    """The libraries that a processor takes, by what Linux says of it in /proc/cpuinfo; [] if that says too little.

    With a matrix unit two, since the system may not let programs use it.
    """
    said = dict(map(str.strip, line.split(":", 1)) for line in cpuinfo.splitlines() if ":" in line)  # its last core
    has = set(said.get("flags", "").split())
    wide = "avx512_fma" if said.get("vendor_id") == "GenuineIntel" else "avx512"  # as `suits` has it, pool.cpp
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"} <= has:
        return ["amx", wide] if {"amx_tile", "amx_bf16", "amx_int8"} <= has else [wide]
    return ["avx2"] if {"avx2", "fma", "f16c"} <= has else []


def chosen(targets: dict[str, list[str]]) -> dict[str, list[str]]:
    """The libraries to build of those that are there for this architecture."""
    about = Path("/proc/cpuinfo")
    if os.environ.get(BUILD) != "best" or not about.is_file():
        return targets
    return {name: targets[name] for name in best(about.read_text()) if name in targets} or targets


def library(name: str, target: list[str]) -> Extension:
    return Extension(
        f"phasewise.ops.native._{name}",
        sources=[str(path) for path in sorted(WHERE.glob("*.cpp"))],
        depends=["setup.py", *(str(path) for path in sorted(WHERE.glob("*.h")))],
        extra_compile_args=FLAGS + target,
        language="c++",
        optional=True,
    )


class Kernels(build_ext):
    """Names libraries without Python's ABI, `_avx2.so`, and builds as many at once as there are cores: each takes one
    of them for about a minute."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extensions(self) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._build_apart, self.extensions))

    def _build_apart(self, library: Extension) -> None:
        """With object files of its own: all libraries have the same sources."""
        one = copy.copy(self)
        one.extensions, one.build_temp = [library], str(Path(self.build_temp, library.name))
        super(Kernels, one).build_extensions()


class AnyPython(bdist_wheel):
    """Names the wheel after the system alone."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


targets = TARGETS.get(platform.machine().lower(), {}) if platform.system() != "Windows" else {}
if __name__ == "__main__":  # scripts/build_wheel.py and tests read what is above
    setup(
        ext_modules=[library(name, flags) for name, flags in chosen(targets).items()],
        cmdclass={"build_ext": Kernels, "bdist_wheel": AnyPython},
    )
