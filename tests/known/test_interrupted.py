"""Processes that are killed, interrupted, or fetch one model at once. A server that stops half-way sets the pace."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from phasewise.known import shelf
from phasewise.known.fetch import PARTIAL, fetch
from phasewise.known.models import Known
from tests.known.conftest import Place
from tests.known.wheelhouse import fetching, house, model

pytestmark = pytest.mark.thorough

PATIENCE = 120.0


@contextmanager
def child(one: Known, cache: Path, links: str) -> Iterator[subprocess.Popen[str]]:
    """A process that fetches; in the end it is gone with whatever it has started."""
    process = fetching(one, cache, links)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def partial(one: Known) -> list[Path]:
    return list(shelf.place(one).parent.glob(f"{PARTIAL}*"))


def test_a_killed_fetch_leaves_nothing_that_looks_whole(at: Place, tmp_path: Path) -> None:
    one = model(tmp_path / "wheels", size=400_000)
    with house(tmp_path / "wheels") as site:
        cache = at(site.url)
        with child(one, cache, site.url) as process:
            assert site.half.acquire(timeout=PATIENCE)
            process.kill()
            process.wait()
        assert shelf.found(one) is None and not shelf.place(one).exists()
        assert partial(one)
        site.go.set()
        assert fetch(one).read_bytes() and shelf.found(one)  # the lock of the dead is free, and what they left goes
        assert not partial(one)


def test_an_interrupted_fetch_ends_pip_and_leaves_nothing(at: Place, tmp_path: Path) -> None:
    one = model(tmp_path / "wheels", size=400_000)
    with house(tmp_path / "wheels") as site:
        cache = at(site.url)
        with child(one, cache, site.url) as process:
            assert site.half.acquire(timeout=PATIENCE)
            assert partial(one)
            process.send_signal(signal.SIGINT)  # to it alone: pip would wait for the other half
            _, errors = process.communicate(timeout=PATIENCE)
            with pytest.raises(ProcessLookupError):  # nobody is left of the group
                os.killpg(process.pid, 0)
        assert process.returncode != 0 and "KeyboardInterrupt" in errors
        assert not site.go.is_set() and not partial(one) and not shelf.place(one).exists()


def test_of_two_at_once_one_fetches_and_both_have_it(at: Place, tmp_path: Path) -> None:
    one = model(tmp_path / "wheels", size=400_000)
    with house(tmp_path / "wheels") as site:
        cache = at(site.url)
        with child(one, cache, site.url) as first:
            assert site.half.acquire(timeout=PATIENCE)
            with child(one, cache, site.url) as second:
                assert second.stdout is not None
                assert second.stdout.readline() == "tiny: waiting for another process that fetches it\n"
                site.go.set()
                ends = [process.communicate(timeout=PATIENCE) for process in (first, second)]
        assert [process.returncode for process in (first, second)] == [0, 0], ends
        assert [out.splitlines()[-1] for out, _ in ends] == [str(shelf.place(one))] * 2
        assert len(site.asked) == 1
    assert shelf.found(one)
