"""`make wheel`: what is in the wheel, what it asks of a system, and that it runs where there is no compiler."""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

from phasewise.ops import native

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "phasewise"
KERNELS = {"x86_64": {"amx", "avx512_fma", "avx512", "avx2"}, "aarch64": {"neon_dot", "neon"}}.get(
    platform.machine(), set()
)
EVERYWHERE = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"}  # and the loader of programs
OLDER = r"(manylinux\d+_\w+\.)?"  # the same system's older name, where it has one
NAME = re.compile(rf"phasewise-(?P<version>[^-]+)-py3-none-{OLDER}manylinux_(?P<glibc>\d+_\d+)_(?P<machine>\w+)\.whl")
PROMPT = "def fibonacci(n):\n    "

pytestmark = pytest.mark.timeout(900)  # it compiles where kernels are older than their sources


def compiler() -> list[str]:
    """The C++ compiler that setuptools takes. Skips where it is missing, or too old for some of the kernels."""
    pytest.importorskip("setuptools")
    command = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    if shutil.which(command[0]) is None:
        pytest.skip(f"no C++ compiler: {command[0]}")
    for name, flags in runpy.run_path(str(ROOT / "setup.py"))["targets"].items():
        if subprocess.run([*command, *flags, "-E", "-x", "c++", os.devnull], capture_output=True).returncode:
            pytest.skip(f"{command[0]} does not know the instructions of {name}")
    return command


def make(out: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `make wheel` runs."""
    for tool in ("pip", "auditwheel"):
        pytest.importorskip(tool)
    command = [sys.executable, str(ROOT / "scripts" / "build_wheel.py"), "--out", str(out), *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


V3, V4 = "avx2 fma f16c", "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni"


@pytest.mark.parametrize(
    ("vendor", "flags", "built"),
    [
        ("AuthenticAMD", V3, ["avx2"]),
        ("AuthenticAMD", V4, ["avx512"]),
        ("GenuineIntel", V4, ["avx512_fma"]),
        ("GenuineIntel", f"{V4} amx_tile amx_bf16 amx_int8", ["amx", "avx512_fma"]),
        ("GenuineIntel", f"{V3} avx512f avx512bw", ["avx2"]),
        ("GenuineIntel", "sse4_2", []),
    ],
)
def test_what_a_server_compiles(vendor: str, flags: str, built: list[str]) -> None:
    """The kernels that this processor would take of all; where little is known of it, all."""
    best = runpy.run_path(str(ROOT / "setup.py"))["best"]
    assert best(f"processor : 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\nbugs\t\t:\n\n") == built


@pytest.mark.skipif(sys.platform != "linux" or "avx2" not in KERNELS, reason="reads /proc/cpuinfo of x86")
def test_a_server_compiles_what_is_taken_here() -> None:
    built = runpy.run_path(str(ROOT / "setup.py"))["best"](Path("/proc/cpuinfo").read_text())
    taken = [name for name in native.TARGETS if (found := native.load(name)) is not None and found.suits()]
    assert taken[:1] == [name for name in built if name in taken][:1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not KERNELS or sys.platform != "linux":
        pytest.skip("wheels are made on 64-bit Linux")
    compiler()
    out = tmp_path_factory.mktemp("wheel")
    done = make(out, "--reuse")  # those that run in all other tests: to compile them again takes minutes
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    assert done.stdout == f"{made}\n"
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_its_name_fits_every_python(wheel: Path, unpacked: Path) -> None:
    name = NAME.fullmatch(wheel.name)
    assert name and name["machine"] == platform.machine()
    assert name["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    inside = (unpacked / f"phasewise-{name['version']}.dist-info" / "WHEEL").read_text()
    tags = re.findall(r"^Tag: py3-none-(\S+)$", inside, re.M)
    assert set(tags) == set(wheel.stem.rpartition("-")[2].split(".")) and len(tags) == inside.count("Tag: ")


def test_it_holds_the_package_and_all_kernels_and_nothing_else(unpacked: Path) -> None:
    ours = set(PACKAGE.rglob("*.py")) | {PACKAGE / "py.typed"}
    shipped = (path for folder in ("pocket", "known") for path in (PACKAGE / folder).rglob("*"))
    ours |= {path for path in shipped if path.is_file() and path.suffix != ".pyc"}
    ours |= set((PACKAGE / "serve" / "playground" / "static").iterdir())
    ours |= set((PACKAGE / "plan" / "devices").glob("*.toml"))
    wanted = {f"phasewise/{path.relative_to(PACKAGE).as_posix()}" for path in ours}
    wanted |= {f"phasewise/ops/native/_{target}.so" for target in KERNELS}
    found = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert {name for name in found if ".dist-info/" not in name} == wanted
    assert any(name.endswith("licenses/LICENSE") for name in found)


def needs(library: Path) -> tuple[set[str], set[str]]:
    """(libraries, versions of their symbols) that a library asks a system for."""
    from elftools.elf.elffile import ELFFile  # comes with auditwheel

    with library.open("rb") as file:
        elf = ELFFile(file)
        libraries = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        every = elf.get_section_by_name(".gnu.version_r").iter_versions()
        return libraries, {version.name for _, versions in every for version in versions}


def test_its_kernels_need_no_newer_system_than_it_says(wheel: Path, unpacked: Path) -> None:
    name = NAME.fullmatch(wheel.name)
    assert name
    said = tuple(int(part) for part in name["glibc"].split("_"))
    for target in KERNELS:
        libraries, versions = needs(unpacked / "phasewise" / "ops" / "native" / f"_{target}.so")
        assert {one for one in libraries if not one.startswith("ld-linux")} <= EVERYWHERE
        numbers = [re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version) for version in versions]
        glibc = [(int(number[1]), int(number[2])) for number in numbers if number]
        assert glibc and max(glibc) <= said


# ---- where it is installed
PROBE = """
import json, sys
import phasewise
from phasewise.cli import main
from phasewise.ops import native
try:
    main()
finally:
    asked, kernels = native.library.cache_info().currsize, native.library()
    print(json.dumps({"package": phasewise.__file__, "asked": asked, "kernels": kernels._name}))
"""


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it, and this one's packages behind it: what a .pth file in those says is
    not followed, so an editable phasewise is not seen."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-compile", str(wheel)], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    behind = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(packages) / "behind.pth").write_text("\n".join(behind) + "\n")
    return home


def run(home: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of the environment, where there is nothing else: no compiler, no sources of ours."""
    path = home / "bin"
    bare = {"PATH": str(path), "HOME": str(home.parent), "CC": "/nonexistent", "CXX": "/nonexistent"}
    bare |= {"OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": "1"} | environment
    assert all(shutil.which(tool, path=str(path)) is None for tool in ("cc", "gcc", "c++", "g++", "clang"))
    first, *rest = command
    return subprocess.run([str(path / first), *rest], env=bare, cwd=home.parent, capture_output=True, text=True)


def test_it_runs_with_its_own_kernels_where_there_is_no_compiler(installed: Path) -> None:
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2, which is the least that our kernels need")
    words = ("run", PROMPT, "--dtype", "bfloat16", "--max-tokens", "12")
    done = run(installed, "python", "-c", PROBE, *words)
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    found = json.loads(last)
    assert "".join(text).strip()
    assert found["asked"] == 1  # by who wrote that text
    package, kernels = Path(found["package"]), Path(found["kernels"])
    assert package.is_relative_to(installed) and kernels.parent == package.parent / "ops" / "native"
    assert kernels.name in {f"_{target}.so" for target in KERNELS}
    without = run(installed, "phasewise", *words, PHASEWISE_KERNELS="none")
    assert without.returncode == 0 and "CPU kernels" in without.stderr
    assert "CPU kernels" not in done.stderr  # so no word of doing without, nor of one thread for want of torch's own


def test_its_command_knows_its_version(wheel: Path, installed: Path) -> None:
    done = run(installed, "phasewise", "--version")
    assert (done.returncode, done.stdout.split()) == (0, ["phasewise", wheel.name.split("-")[1]])


# ---- what is refused
@pytest.mark.skipif(not KERNELS or sys.platform != "linux", reason="wheels are made on 64-bit Linux")
def test_a_wheel_without_kernels_is_not_made(tmp_path: Path) -> None:
    done = make(tmp_path / "dist", CC="/nonexistent", CXX="/nonexistent")
    assert done.returncode == 1 and not (tmp_path / "dist").exists()
    assert "error: not built: " in done.stderr and all(f"/_{target}.so" in done.stderr for target in KERNELS)


def test_a_library_that_not_every_linux_has_is_not_put_into_it(wheel: Path, tmp_path: Path) -> None:
    """OpenMP's runtime is torch's own, found when a process runs: another one would bring threads of its own."""
    source, library = tmp_path / "threads.cpp", tmp_path / "threads.so"
    source.write_text('#include <omp.h>\nextern "C" int interface() { return omp_get_max_threads(); }\n')
    built = subprocess.run([*compiler(), "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(library)])
    if built.returncode:
        pytest.skip("the compiler comes without OpenMP")
    assert not needs(library)[0] <= EVERYWHERE
    one = min(KERNELS)
    other = tmp_path / f"phasewise-0-py3-none-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(other, "w") as copy:
        for name in archive.namelist():
            copy.writestr(name, library.read_bytes() if name.endswith(f"/_{one}.so") else archive.read(name))
    script = runpy.run_path(str(ROOT / "scripts" / "build_wheel.py"))
    with pytest.raises(SystemExit, match="^error: not every Linux has lib(gomp|omp|iomp5).so"):
        script["name_system"](other, tmp_path)
