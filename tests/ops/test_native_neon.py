"""The native kernels against plain loops (`native_driver.cpp`): on this processor, and for ARM under emulation."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phasewise.ops import native
from tests.ops import targets

HERE = Path(__file__).parent
SETUP = HERE.parents[1] / "setup.py"
KERNELS = Path(native.__file__).parent
DRIVER = sorted(HERE.glob("native_driver*.cpp"))
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NOT_FOR_THIS_PROCESSOR = 77
PROCESSORS = {"neon": "cortex-a53", "neon_dot": "cortex-a76"}  # the former has no dot products

pytestmark = pytest.mark.timeout(900)  # it compiles


def compile_all(compiler: str, sources: list[Path], flags: list[str], to: Path) -> list[str]:
    def compile_one(source: Path) -> str:
        path = to / f"{source.stem}.o"
        command = [compiler, *flags, f"-I{KERNELS}", "-c", str(source), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return str(path)

    to.mkdir()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def link(compiler: str, parts: list[str], to: Path) -> str:
    done = subprocess.run([compiler, *parts, "-pthread", "-o", str(to)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(to)


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The driver, compiled for this machine."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return compile_all("g++", DRIVER, ["-std=c++17", "-O1"], tmp_path_factory.mktemp("here") / "driver")


@pytest.mark.parametrize("target", targets.EACH)
def test_on_this_processor(target: str, here: list[str], tmp_path: Path) -> None:
    library = str(native.file(target))
    assert run(link("g++", [*here, library], tmp_path / "driver"), target) == (0, "all is well\n")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The driver with the kernels for each kind of ARM processor, compiled as the package compiles them."""
    pytest.importorskip("setuptools")
    for tool in (CROSS, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)")
    flags = runpy.run_path(str(SETUP))
    assert set(flags["ARM"]) == set(PROCESSORS)
    root, sources = tmp_path_factory.mktemp("arm"), sorted(KERNELS.glob("*.cpp"))
    driver = compile_all(CROSS, DRIVER, ["-std=c++17", "-O1"], root / "driver")
    made = {}
    for name, target in flags["ARM"].items():
        kernels = compile_all(CROSS, sources, [*flags["FLAGS"], *target], root / name)
        made[name] = link(CROSS, ["-static", *driver, *kernels], root / f"{name}_driver")
    return made


@pytest.mark.parametrize("target", PROCESSORS)
def test_on_arm(target: str, programs: dict[str, str]) -> None:
    assert run(EMULATOR, "-cpu", PROCESSORS[target], programs[target]) == (0, "all is well\n")


def test_dot_products_are_left_alone_where_there_are_none(programs: dict[str, str]) -> None:
    assert run(EMULATOR, "-cpu", PROCESSORS["neon"], programs["neon_dot"])[0] == NOT_FOR_THIS_PROCESSOR
