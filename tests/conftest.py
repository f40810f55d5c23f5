"""Options of the test suite."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import seeds, tiers

settings.register_profile("unhurried", deadline=None)  # beside a busy core an example takes as long as it takes
settings.load_profile("unhurried")

SCRATCH = pytest.StashKey[str]()
LEFT_OUT = pytest.StashKey[int]()
LATER = pytest.StashKey[int]()
FILES_LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """What this process and all that it starts put down for a while goes into one folder, which goes at the end; but
    for pytest's own `tmp_path`, of which the last ones can be looked at."""
    config.addinivalue_line("markers", "thorough: left to `make test-rest` (tests/tiers.py)")
    if config.getoption("--draws"):
        os.environ[seeds.NAME] = config.getoption("--draws")
    os.environ.setdefault(seeds.NAME, seeds.today())  # the same in all processes, and after midnight
    if not hasattr(config, "workerinput"):  # of pytest-xdist, which has the environment of the process that started it
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        config.stash[SCRATCH] = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="phasewise-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if SCRATCH in config.stash:
        shutil.rmtree(config.stash[SCRATCH], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-pairs",
        action="store_true",
        help="laws over every scheduler, placement and way to decode, instead of rows in which every two methods meet",
    )
    parser.addoption("--draws", metavar="SEED", help="draw the cases that an earlier run has drawn (tests/seeds.py)")
    parser.addoption(
        "--tier",
        choices=tiers.TIERS,
        default="all",
        help="quick: without the thorough tests, but for those in files or folders that are named; rest: only them",
    )
    parser.addoption("--every-day", action="store_true", help="the quick tests of all days (tests/slow.txt)")
    parser.addoption(
        "--turns",
        type=int,
        default=1,
        metavar="N",
        help="of the thorough tests run every Nth file, another lot each day; what is named runs anyway",
    )


def pytest_report_header() -> str:
    return f"cases drawn with --draws {seeds.today()}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of cases, and the libraries of them all, are there to stay: garbage is not looked for among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """Typer builds its tree of commands anew for every call of `main`, which takes longer than most tests of it do."""
    typer = sys.modules.get("typer.main")
    with pytest.MonkeyPatch.context() as patch:
        if typer is not None:
            patch.setattr(typer, "get_command", cache(typer.get_command))
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which all is thorough are not even imported for the quick tests, unless they are named."""
    if config.getoption("--tier") != "quick" or collection_path.suffix != ".py":
        return None
    file = tiers.file(collection_path)
    if not tiers.thorough(file, "") or tiers.named(file, _given(config)):
        return None
    config.stash[FILES_LEFT_OUT] = config.stash.get(FILES_LEFT_OUT, 0) + 1
    return True


def _given(config: pytest.Config) -> list[str]:
    """The paths that the command line names, as from the folder of this file."""
    return [tiers.file(config.invocation_params.dir / arg.partition("::")[0]) for arg in config.args]


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What the tier leaves out goes; the longest files first; all else in its order."""
    tier, runs, left_out = config.getoption("--tier"), list[pytest.Item](), list[pytest.Item]()
    rotates = not config.getoption("--every-day")
    given, waits = _given(config), _sampled_out(items)
    for item in items:
        file, test = tiers.file(item.path), getattr(item, "originalname", item.name)
        hard = tiers.thorough(file, test) or item in waits or item.get_closest_marker("thorough") is not None
        hard = hard or (rotates and tiers.of_another_day(file, test, seeds.turn()))
        (runs if tiers.chosen(tier, hard, tiers.named(file, given)) else left_out).append(item)
    later = tiers.later({tiers.file(item.path) for item in runs}, config.getoption("--turns"), seeds.turn(), given)
    if tier == "rest" and later:
        waiting = {item for item in runs if tiers.file(item.path) in later}
        config.hook.pytest_deselected(items=[*waiting])
        config.stash[LATER] = len(waiting)
        runs = [item for item in runs if item not in waiting]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):  # of pytest-xdist: goes to the process that writes the summary
        files = config.stash.get(FILES_LEFT_OUT, 0)
        config.workeroutput |= {"left out": len(left_out), "later": config.stash.get(LATER, 0), "files": files}
    items[:] = sorted(runs, key=lambda item: tiers.place(tiers.file(item.path)))


def _sampled_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Cases of sampled tests (tests/tiers.py) whose turn is on another day."""
    cases = defaultdict[tuple[str, str], list[pytest.Item]](list)
    for item in items:
        cases[tiers.file(item.path), getattr(item, "originalname", item.name)].append(item)
    waits = set[pytest.Item]()
    for (file, test), each in cases.items():
        now = tiers.sampled(file, test, len(each), seeds.turn())
        waits |= {item for i, item in enumerate(each) if i not in now}
    return waits


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if hasattr(node, "workeroutput"):  # it has not crashed; each has collected the same
        node.config.stash[LEFT_OUT] = node.workeroutput.get("left out", 0)
        node.config.stash[LATER] = node.workeroutput.get("later", 0)
        node.config.stash[FILES_LEFT_OUT] = node.workeroutput.get("files", 0)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Of files without a thorough test the rest is nothing, which is no failure."""
    nothing = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if nothing and session.config.getoption("--tier") == "rest" and session.config.stash.get(LEFT_OUT, 0):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out, files = config.stash.get(LEFT_OUT, 0), config.stash.get(FILES_LEFT_OUT, 0)
    if left_out or files:
        counts = [f"{n} {what}" + "s" * (n > 1) for n, what in ((left_out, "test"), (files, "file")) if n]
        tests = " and ".join(counts)
        if config.getoption("--tier") == "quick":
            how = 'make test-rest runs them, or name a file or folder: make test ARGS="tests/laws"'
            terminalreporter.write_line(f"{tests} left out as thorough (tests/tiers.py): {how}")
        else:
            terminalreporter.write_line(f"{tests} left out as not thorough (tests/tiers.py): make test runs them")
    if later := config.stash.get(LATER, 0):
        how = 'make test-rest ARGS="--turns 1" runs all'
        terminalreporter.write_line(f"{later} thorough tests have their turn on another day: {how}")
