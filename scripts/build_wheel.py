"""Build dist/phasewise-VERSION-py3-none-manylinux_2_N_x86_64.whl: one wheel for every Python of 64-bit Linux.

    python scripts/build_wheel.py [--out dist] [--reuse]

setuptools builds it from a copy of the sources; auditwheel reads which symbols the kernels need of the system and
names the oldest Linux that has them all. Exits with 1 if kernels of this architecture were not built, or if one needs
a library that not every Linux has: the wheel brings none along. For Linux alone; needs what `make test` installs.

Kernels are compiled anew, which takes minutes. With --reuse those of this checkout go in, where they are newer than
their sources and setup.py.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
NATIVE = Path("phasewise") / "ops" / "native"
BUILT = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")


def build(at: Path, reuse: bool = False) -> Path:
    """setuptools' wheel, for this Linux alone. A copy is built, so that nothing of earlier builds gets into it, unless
    kernels are to be reused."""
    tree = at / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=BUILT)
        else:
            shutil.copy2(ROOT / name, tree / name)
    if reuse:
        lend(tree)
    run("pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(at / "built"), str(tree))
    return next((at / "built").glob("*.whl"))


def lend(tree: Path) -> None:
    """Put this checkout's kernels where setuptools looks for those it built last; what is older than its sources, by
    times that copies keep, it compiles all the same."""
    last = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / NATIVE
    last.mkdir(parents=True)
    for kernels in (ROOT / "src" / NATIVE).glob("*.so"):
        shutil.copy2(kernels, last)


def lacking(wheel: Path) -> list[str]:
    """Kernels of this architecture that are not in a wheel."""
    targets = runpy.run_path(str(ROOT / "setup.py"))["targets"]
    with zipfile.ZipFile(wheel) as archive:
        return sorted({(NATIVE / f"_{target}.so").as_posix() for target in targets} - set(archive.namelist()))


def name_system(wheel: Path, at: Path) -> Path:
    """The same wheel, named for the oldest Linux that has what its libraries need."""
    found = json.loads(run("auditwheel", "show", "--json", str(wheel)))
    system = found["overall_tag"]
    if system.startswith("linux_"):
        sys.exit(f"error: not every Linux has {', '.join(found['external_libs']) or 'what the kernels need'}")
    said = ("--plat", system, "--only-plat", "--patcher", "none")  # neither guess nor change anything
    run("auditwheel", "repair", *said, "--wheel-dir", str(at / "named"), str(wheel))
    return next((at / "named").glob("*.whl"))


def run(*module: str) -> str:
    """What a module, run as a program, prints to stdout."""
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}error: {' '.join(module[:2])} ended with {done.returncode}")
    return done.stdout


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder that gets the wheel (%(default)s)")
    parser.add_argument("--reuse", action="store_true", help="take kernels that this checkout has built")
    given = parser.parse_args(argv)
    out = given.out
    with tempfile.TemporaryDirectory() as folder:
        plain = build(Path(folder), given.reuse)
        if missing := lacking(plain):
            sys.exit(f"error: not built: {', '.join(missing)}. GCC 11 and newer build all of them")
        named = name_system(plain, Path(folder))
        out.mkdir(parents=True, exist_ok=True)
        print(shutil.copy2(named, out / named.name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
