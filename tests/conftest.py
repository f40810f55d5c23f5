"""Options of the test suite."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # beside a busy core an example takes as long as it takes
settings.load_profile("unhurried")

# Files that take longest, by the processor's time or by waiting: a worker that is given one of them last keeps all
# others waiting. Those of many processes stand apart, so that they seldom run at the same time.
LONGEST = (
    "laws/test_methods.py", "laws/test_distribution.py", "cluster/test_soak.py", "reproduce/test_systems.py",
    "laws/test_kv_methods.py", "cluster/test_ray_server.py", "laws/test_compositions.py", "laws/test_recipes.py",
    "laws/test_sampled_drafts.py", "cluster/test_processes.py", "attend/test_selectors.py", "train/test_draft.py",
    "serve/tools/test_forced.py", "place/test_semi_pd.py", "cluster/test_ray.py", "gguf/test_real_files.py",
    "place/test_push.py", "test_wheel.py", "bench/test_compare.py", "engine/test_native_sights.py",
    "speculation/test_greedy.py", "place/test_disaggregated.py", "place/test_splitwise.py",
    "train/test_c2c_training.py", "plan/test_serving.py",
)  # fmt: skip


SCRATCH = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """What this process and all that it starts put down for a while goes into one folder, which goes at the end; but
    for pytest's own `tmp_path`, of which the last ones can be looked at."""
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the longest of them foremost; all else in its order."""

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, name in enumerate(LONGEST) if path.endswith(f"/tests/{name}")), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of cases, and the libraries of them all, are there to stay: garbage is not looked for among them."""
    gc.freeze()
