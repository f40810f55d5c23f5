"""Commands of the first pages run for a newcomer who did what the page says and nothing else."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import typer.main
from packaging.utils import canonicalize_name

from phasewise import catalog
from phasewise.cli.app import program
from phasewise.options import parse
from phasewise.plan.fit import FittedLine
from phasewise.plan.profile import Profile
from tests.cli.test_project import installed_closure

ROOT = Path(__file__).parents[1]
FIRST = ("README.md", "docs/choosing.md")
PAGES = (*FIRST, "docs/using.md")
SHELL = ("make", "source", "curl", "pip")  # what is no program of this repository

# Each command of the first pages: what is added so that it ends in seconds, or why it is not run here.
SHORTER = {
    "phasewise bench draft": "--per-task 1 --tokens 16",
    "python scripts/same_tokens.py": "--questions 3 --tokens 16",
    "phasewise profile": "--quick --alone --threads 1",
    "phasewise run": "--max-tokens 8",
    "phasewise models": "",
    "phasewise tune": "--workload fixed:prompt=64,new=16 --requests 2 --quality code --examples 2 --rounds 3",
    "phasewise keys new": "",
    "phasewise bench load": "--rate 20 --requests 8",
    "phasewise report": "",
    "phasewise plan": "--requests 300 --ttft 200 --tpot 40",  # of `steady`'s machine: too many to be in time at once
    "phasewise methods": "",
    "phasewise bench methods": "--requests 2 --rounds 1",
    "phasewise reproduce": "--quick",
}
NOT_RUN = {
    "python scripts/simulated.py": "half an hour, as the page says",
    "phasewise serve": "serves until it is stopped: tests/serve",
}


def commands(page: str) -> Iterator[list[str]]:
    """The words of every command in the page's shell blocks, without comments, prompts or what shells add."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s&&\s", line):
                words = shlex.split(part, comments=True)
                if words and words[0] not in SHELL:
                    yield words


@pytest.mark.parametrize("page", PAGES)
def test_every_option_exists_and_every_method_can_be_built(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command line is parsed by the program itself, and the methods it names are made."""
    monkeypatch.chdir(tmp_path)
    found = list(commands(page))
    assert len(found) > 5
    for words in found:
        if words[0] == "python":
            assert (ROOT / words[1]).is_file(), words
            continue
        assert words[0] == "phasewise", words
        command, rest, context = typer.main.get_command(program()), words[1:], None
        while hasattr(command, "commands") and rest:
            context = command.context_class(command, info_name=rest[0], parent=context)
            command, rest = command.commands[rest[0]], rest[1:]
        for name in (word for word in rest if word.endswith(".toml")):
            Path(name).write_text('model = "pocket"\n')  # a command before it has written it
        given = command.make_context(words[-1], list(rest), parent=context).params
        parse({verb: given[verb] for verb in catalog.VERBS if given.get(verb)})
        for setting in given.get("settings") or ():
            parse(dict(word.split("=", 1) for word in setting.split()))


def test_make_serve_installs_what_the_pages_need() -> None:
    """The extras of the first stamp are those of which the commands below have nothing but."""
    assert extras() == ["serve", "grammar", "bench"]
    assert "source .venv/bin/activate" in (ROOT / "README.md").read_text()
    assert all("source .venv/bin/activate" in (ROOT / page).read_text() for page in PAGES)


def extras() -> list[str]:
    """The extras that `make serve` installs."""
    found = re.search(
        r"\$\(VENV\)/\.serve:.*\n\t\$\(call install,(\S+),serve,PHASEWISE_BUILD=best\)", (ROOT / "Makefile").read_text()
    )
    assert found
    return found[1].replace("$(comma)", ",").split(",")


def blocker(folder: Path) -> Path:
    """A folder that, on the path, hides every module of distributions that `make serve` does not install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in extras() for one in project["optional-dependencies"][extra])]
    here = {*installed_closure(wanted), "phasewise", "pip", "setuptools"}
    hidden = [
        module for module, by in packages_distributions().items()
        if not here & {str(canonicalize_name(name)) for name in by} and module.isidentifier()
    ]  # fmt: skip
    assert {"aiohttp", "openai", "ray", "constriction", "transformers"} <= set(hidden) and "scipy" not in hidden
    (folder / "sitecustomize.py").write_text(
        f"import sys\nHIDDEN = {set(hidden)!r}\n"
        "class Newcomer:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in HIDDEN:\n"
        "            raise ModuleNotFoundError(f'{name} is not installed by make serve', name=name)\n"
        "sys.meta_path.insert(0, Newcomer())\n"
    )
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("page", FIRST)
def test_every_command_runs(page: str, tmp_path: Path) -> None:
    """In order, in an empty folder, with pocket in smollm2's place and without what `make serve` leaves out."""
    paths = [str(blocker(tmp_path)), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    work = tmp_path / "work"
    work.mkdir()
    for words in commands(page):
        text = shlex.join(words)
        if any(text.startswith(start) for start in NOT_RUN):
            continue
        start = max((start for start in SHORTER if text.startswith(start)), key=len, default=None)
        assert start is not None, f"{page}: say in SHORTER or NOT_RUN what becomes of: {text}"
        words = ["pocket" if word == "smollm2" else word for word in [*words, *SHORTER[start].split()]]
        program = [str(ROOT / words[1]), *words[2:]] if words[0] == "python" else ["-m", "phasewise", *words[1:]]
        done = subprocess.run(
            [sys.executable, *program],
            cwd=work, env=env, input="What is 17 + 25?\n", capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if text.startswith("phasewise profile"):
            steady(work / "profile.json")


def steady(path: Path) -> None:
    """Puts the same speeds into a profile whatever this machine's are: what `plan` finds, and how long it searches,
    then does not depend on who else uses the machine."""
    profile = Profile.load(path)
    line = FittedLine({"base": 4e-3, "prefill_rows": 1e-4, "decode_rows": 2e-4}, 0.0)
    measured = [
        replace(one, lines=dict.fromkeys(one.lines, line), beside={}, shared={}) for one in profile.measured
    ]  # fmt: skip
    replace(profile, measured=measured, served={}).save(path)
