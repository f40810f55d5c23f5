"""What the package gives by its own name: all of it, nothing earlier than it is asked for."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import phasewise
import phasewise.llm
import phasewise.request.params


def loaded(program: str) -> set[str]:
    """The modules that are there once a new process has run `program`."""
    show = "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program + show], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_names_are_those_of_the_modules() -> None:
    assert phasewise.LLM is phasewise.llm.LLM
    assert phasewise.Params is phasewise.request.params.Params
    assert set(phasewise.__all__) <= set(dir(phasewise))
    everything: dict[str, object] = {}
    exec("from phasewise import *", everything)
    assert set(phasewise.__all__) <= set(everything)


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    light = "from phasewise import Params, __version__\nParams(max_tokens=3)"
    assert not {"torch", "numpy", "phasewise.llm"} & loaded(light)


def test_other_names_are_not_there() -> None:
    assert not hasattr(phasewise, "LMM")
    with pytest.raises(ImportError, match="LMM"):
        exec("from phasewise import LMM")


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert phasewise.__version__ == project["version"]
