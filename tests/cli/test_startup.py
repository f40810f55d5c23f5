"""Help, the version and mistakes come without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import phasewise

pytestmark = pytest.mark.thorough

COMMANDS = ["serve", "run", "methods", "eval", "bench", "bench offline", "bench load", "bench methods", "bench compare",
            "train", "train pocket", "train draft", "models", "models fetch", "models path", "widen",
            "convert kv_heads", "keys", "keys new", "report", "tune", "plan", "profile", "simulate"]  # fmt: skip


def light(*words: str) -> tuple[int, str]:
    """Exit status and output of a command that must not have imported torch."""
    program = (
        "import sys, io\nfrom phasewise.cli import main\ncode = 0\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as left:\n    code = left.code or 0\n"
        "heavy = sorted({'torch', 'fastapi', 'numpy'} & set(sys.modules))\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_teaches_at_once(command: str) -> None:
    code, text = light(*command.split(), "--help")
    assert code == 0, text
    assert "Usage: phasewise" in text
    if command not in ("", "bench", "train"):
        assert "Examples" in text and f"phasewise {command}" in text


def test_the_version() -> None:
    assert light("--version") == (0, f"phasewise {phasewise.__version__}\n")


def test_an_unknown_method_is_refused_at_once() -> None:
    code, text = light("serve", "--evict", "snapkw")
    assert code == 2 and text.startswith("error: unknown evict method 'snapkw'. Did you mean snapkv?")


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "phasewise", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"phasewise {phasewise.__version__}\n"
