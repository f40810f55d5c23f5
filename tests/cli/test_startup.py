"""Help, the version and mistakes come without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys

import phasewise

COMMANDS = ["serve", "run", "methods", "eval", "bench", "bench offline", "bench load", "bench methods", "bench compare",
            "train", "train pocket", "train draft", "models", "models fetch", "models path",
            "models show", "models forms", "widen", "convert kv_heads", "convert weights", "keys", "keys new", "report",
            "tune", "plan", "profile", "simulate"]  # fmt: skip


def light(*commands: str) -> list[tuple[int, str]]:
    """Exit status and output of commands, one after the other in a process that must not have imported torch."""
    program = """
import contextlib, io, json, sys
from phasewise.cli import main
for command in sys.argv[1:]:
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(command.split())
        except SystemExit as left:
            code = left.code or 0
    heavy = sorted({"torch", "fastapi", "numpy"} & set(sys.modules))
    print(json.dumps([f"imported {heavy}" if heavy else code, said.getvalue()]))
"""
    done = subprocess.run([sys.executable, "-c", program, *commands], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_help_and_mistakes_come_at_once() -> None:
    wrong, form, version, *helps = light("serve --evict snapkw", "serve --weights int5", "--version",
                                         *(f"{name} --help" for name in ["", *COMMANDS]))  # fmt: skip
    assert form[0] == 2 and "no form of weights is called 'int5'" in form[1]
    assert wrong[0] == 2 and wrong[1].startswith("error: unknown evict method 'snapkw'. Did you mean snapkv?")
    assert version == (0, f"phasewise {phasewise.__version__}\n")
    for command, (code, text) in zip(["", *COMMANDS], helps, strict=True):
        assert code == 0, text
        assert "Usage: phasewise" in text
        if command not in ("", "bench", "train"):
            assert "Examples" in text and f"phasewise {command}" in text


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "phasewise", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"phasewise {phasewise.__version__}\n"
