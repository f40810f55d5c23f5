"""The quick tier and the rest: together everything, nothing twice, and every law of every method in the quick one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from phasewise import catalog
from tests import tiers
from tests.laws import axes, golden
from tests.ops import targets

ROOT = tiers.HERE.parent
LISTED = [entry for entries in tiers.THOROUGH.values() for entry in entries]
FILES = sorted(tiers.file(path) for path in tiers.HERE.rglob("test_*.py"))
QUICK = {  # files of which nothing is thorough: laws, a real client over HTTP, processes that are killed
    "laws/test_declarations.py", "laws/test_golden.py", "laws/test_parts.py",
    "laws/test_sure.py", "serve/clients/test_openai.py", "serve/test_chat.py", "serve/test_errors.py",
    "store/test_packed.py", "kv/test_blocks.py", "speculation/test_greedy.py",
}  # fmt: skip


@cache
def of(file: str) -> set[str]:
    """The names of its tests."""
    text = (tiers.HERE / file).read_text(encoding="utf-8")
    return set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))


# ---- the list
@pytest.mark.parametrize("entry", LISTED)
def test_what_is_listed_is_there(entry: str) -> None:
    file, _, test = entry.partition("::")
    assert file in FILES
    assert not test or test in of(file)


@pytest.mark.parametrize("file", tiers.SAMPLED)
def test_what_is_sampled_is_there_and_not_thorough(file: str) -> None:
    assert file in FILES and set(tiers.SAMPLED[file]) <= of(file)
    assert not any(tiers.thorough(file, test) for test in tiers.SAMPLED[file])


def test_sampled_cases_take_turns_and_no_day_has_too_many() -> None:
    (file, tests), *_ = tiers.SAMPLED.items()
    (test, most), *_ = tests.items()
    for cases in (1, most, most + 1, 7 * most + 3):
        days = -(-cases // most)
        lots = [tiers.sampled(file, test, cases, 100 + day) for day in range(days)]
        assert sorted(case for lot in lots for case in lot) == list(range(cases))
        assert all(0 < len(lot) <= most for lot in lots)
    assert set(tiers.sampled(file, "test_of_another_name", 5, 3)) == set(range(5))


def test_nothing_is_listed_twice_and_all_that_begins_early_is_there() -> None:
    assert len(set(LISTED)) == len(LISTED)
    assert not [entry for entry in LISTED if "::" in entry and entry.partition("::")[0] in LISTED]
    assert len(set(tiers.LONGEST)) == len(tiers.LONGEST) and set(tiers.LONGEST) <= set(FILES)


def test_every_folder_is_tested_quickly_too() -> None:
    quick = {str(Path(file).parent) for file in FILES if any(not tiers.thorough(file, t) for t in of(file))}
    assert quick == {str(Path(file).parent) for file in FILES}
    listed = {entry.partition("::")[0] for entry in LISTED}
    assert set(FILES) >= QUICK and not listed & QUICK
    assert not tiers.thorough("cluster/test_processes.py", "test_killed_at_work")


def test_every_method_is_under_every_law_quickly() -> None:
    every = {(verb, name) for verb, name, _ in catalog.every()}
    assert len(every) > 60 and every == {(verb, name) for verb, name, _ in axes.singles()}
    assert {f"{verb}.{name}" for verb, name in every} <= golden.cases().keys()
    for file, test in (
        ("laws/test_methods.py", "test_tokens_are_a_requests_own"),
        ("laws/test_methods.py", "test_neutral_equals_dense"),
        ("laws/test_golden.py", "test_a_method_gives_what_it_gave"),
        ("laws/test_golden.py", "test_lossy_methods_bite_where_they_are_tested"),
    ):  # fmt: skip
        assert test in of(file) and not tiers.thorough(file, test)


def test_the_machines_own_kernels_are_tested_quickly() -> None:
    marked = [case.values[0] for case in targets.EACH if not isinstance(case, str)]
    assert [case if isinstance(case, str) else case.values[0] for case in targets.EACH] == targets.HERE
    assert set(targets.HERE) - set(marked) == ({targets.OWN} if targets.OWN else set())


# ---- pytest
WHOLE = "laws/test_kv_methods.py"
PART, HARD = "sample/test_grammar.py", "test_placements_change_no_token"
TREE = {  # file: its tests
    WHOLE: "def test_w(): pass\n",
    PART: f"import pytest\n@pytest.mark.parametrize('i', [1, 2])\ndef {HARD}(i): pass\ndef test_easy(): pass\n",
    "place/test_other.py": "import pytest\n@pytest.mark.parametrize('i', ['own', pytest.param('else', "
    "marks=pytest.mark.thorough)])\ndef test_marked(i): pass\n",
    "kv/test_unlisted.py": "def test_u(): pass\n",
}
DRAWN, CASES = "verify/test_k_seq.py", 9
EASY = {f"{PART}::test_easy", "place/test_other.py::test_marked[own]", "kv/test_unlisted.py::test_u"}
IN_PART = {f"{PART}::{HARD}[1]", f"{PART}::{HARD}[2]"}
REST = {f"{WHOLE}::test_w", *IN_PART, "place/test_other.py::test_marked[else]"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small repository with this one's conftest, settings and list."""
    root = tmp_path_factory.mktemp("tree")
    for file, text in TREE.items():
        path = root / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("__init__.py", "conftest.py", "seeds.py", "tiers.py"):
        shutil.copy(tiers.HERE / name, root / "tests" / name)
    (root / "tests" / "slow.txt").touch()
    shutil.copy(ROOT / "pyproject.toml", root)
    profiles = "register_profile = load_profile = staticmethod(lambda *_, **__: None)"
    (root / "hypothesis.py").write_text(f"class settings:\n    {profiles}\n")  # the real one takes longer than a run
    return root


def ran(tree: Path, *words: str, folder: str = ".") -> tuple[set[str], str, int]:
    """The tests that pytest runs, the line about those left out, and its exit code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of those only what it takes
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "xdist", "-p", "pytest_timeout", *words]
    done = subprocess.run(command, cwd=tree / folder, env=environment, capture_output=True, text=True)
    passed = re.findall(r"^PASSED (?:tests/)?(\S+)$", done.stdout, re.M)
    assert len(passed) == len(set(passed)), "each runs once"
    said = re.findall(r"^.* left out .*$", done.stdout, re.M)
    return set(passed), "".join(said), done.returncode


def test_both_tiers_are_all_and_share_nothing(tree: Path) -> None:
    assert ran(tree) == (EASY | REST, "", 0)
    passed, said, code = ran(tree, "--tier", "quick")
    assert (passed, code) == (EASY, 0)
    assert said.startswith(
        "3 tests and 1 file left out as thorough (tests/tiers.py): make test-rest runs them, or name"
    )
    assert ran(tree, "--tier", "quick", "-n", "2", "--dist", "loadfile") == (EASY, said, 0)
    said = "3 tests left out as not thorough (tests/tiers.py): make test runs them"
    assert ran(tree, "--tier", "rest") == (REST, said, 0)


def test_sampled_cases_of_other_days_are_thorough(tree: Path) -> None:
    ((test, most),) = tiers.SAMPLED[DRAWN].items()
    path = tree / "tests" / DRAWN
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import pytest\n@pytest.mark.parametrize('i', range({CASES}))\ndef {test}(i): pass\n")
    every = {f"{DRAWN}::{test}[{i}]" for i in range(CASES)}
    day = ("--draws", "2026-11-28")
    now, rest = (ran(tree, "--tier", tier, *day, "-k", test)[0] for tier in ("quick", "rest"))
    assert now | rest == every and not now & rest and 0 < len(now) <= most
    later = ran(tree, "--tier", "quick", "--draws", "2026-11-29", "-k", test)[0]
    assert now != later < every and 0 < len(later) <= most
    assert ran(tree, "--tier", "quick", *day, "tests/verify")[0] == every, "what is named runs whole"
    path.unlink()


def test_slower_tests_take_turns_and_are_in_one_tier_every_day(tree: Path) -> None:
    test, turn = "test_slow", next(iter(tiers.slow().values()))
    path = tree / "tests" / "kv" / "test_turns.py"
    path.write_text("".join(f"def {test}_{i}(): pass\n" for i in range(tiers.DAYS)) + "def test_swift(): pass\n")
    entries = [f"kv/test_turns.py::{test}_{i}" for i in range(tiers.DAYS)]
    (tree / "tests" / "slow.txt").write_text("# by cost\n" + "".join(f"{entry} 1.5\n" for entry in entries))
    assert turn == 0
    words, seen = ("-k", "turns"), set[str]()
    for day in (f"2026-11-{26 + i}" for i in range(tiers.DAYS)):
        now = ran(tree, "--tier", "quick", *words, "--draws", day)[0]
        rest = ran(tree, "--tier", "rest", *words, "--draws", day)[0]
        assert "kv/test_turns.py::test_swift" in now and len(now) == 2
        assert now | rest == {*entries, "kv/test_turns.py::test_swift"} and not now & rest, "the others are thorough"
        seen |= now
    assert seen >= {*entries}, "in turn each is among the quick ones"
    assert len(ran(tree, "--tier", "quick", "--every-day", *words)[0]) == 1 + tiers.DAYS
    assert len(ran(tree, "--tier", "quick", "tests/kv/test_turns.py")[0]) == 1 + tiers.DAYS, "what is named runs whole"
    path.unlink()
    (tree / "tests" / "slow.txt").write_text("")


def test_no_test_that_is_needed_every_day_takes_turns() -> None:
    listed = [entry.split("::") for entry in tiers.slow()]
    missing = [f"{file}::{test}" for file, test in listed if file not in FILES or test not in of(file)]
    assert not missing, "write tests/slow.txt anew (scripts/slow_tests.py), or take these lines out"
    assert not [entry for entry in tiers.slow() if entry.startswith(tiers.DAILY)]
    verdicts = (ROOT / "docs" / "results" / "faults.jsonl").read_text(encoding="utf-8").splitlines()
    caught = {json.loads(line)["test"].removeprefix("tests/").partition("[")[0] for line in verdicts}
    assert not caught & tiers.slow().keys(), "planted faults are caught every day"


def test_every_thorough_file_has_its_turn_and_named_ones_do_not_wait(tree: Path) -> None:
    days = ["2026-11-28", "2026-11-29"]
    lots = [ran(tree, "--tier", "rest", "--turns", "2", "--draws", day)[0] for day in days]
    assert lots[0] | lots[1] == REST and not lots[0] & lots[1] and all(lots)
    assert lots[0] and lots[1]
    words = ("--tier", "rest", "--turns", "2", "--draws", days[0])
    assert ran(tree, *words, "tests/laws", "tests/sample", "tests/place")[0] == REST, "whatever is named runs"
    files = {f"kv/test_{i}.py" for i in range(9)} | set(tiers.LONGEST[:6])
    for turns in (1, 2, 3):
        waiting = [tiers.later(files, turns, day, []) for day in range(turns)]
        assert all(sum(file not in lot for lot in waiting) == 1 for file in files)
        assert all(len([file for file in tiers.LONGEST[:6] if file not in lot]) == 6 // turns for lot in waiting)


def test_what_is_named_runs_whole(tree: Path) -> None:
    words = ("--tier", "quick", "laws", f"{PART}::{HARD}", "-n", "1")
    assert ran(tree, *words, folder="tests") == ({f"{WHOLE}::test_w", *IN_PART}, "", 0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("tests", False), (".", False), ("tests/laws", True), ("tests/laws/", True), (f"tests/kv/../{WHOLE}", True),
        (f"tests/{WHOLE}", True), ("tests/law", False), ("tests/laws/test_kv.py", False), ("tests/kv", False),
    ],
)  # fmt: skip
def test_a_path_names_what_lies_in_it_unless_all_does(given: str, named: bool) -> None:
    assert tiers.named(WHOLE, [tiers.file(ROOT / given)]) == named
    assert tiers.named(WHOLE, ["kv", tiers.file(ROOT / given)]) == named


def test_the_rest_of_what_has_none_is_no_failure_and_what_is_nowhere_is_one(tree: Path) -> None:
    nothing = "1 test left out as not thorough (tests/tiers.py): make test runs them"
    assert ran(tree, "--tier", "rest", "tests/kv") == (set(), nothing, 0)
    assert ran(tree, "--tier", "rest", "-k", "nowhere") == (set(), "", 5)
    passed, said, code = ran(tree, "--tier", "quick", "-k", "test_w")
    assert (passed, code) == (set(), 5) and said.startswith("1 file left out as thorough"), "it was asked for"


# ---- make and continuous integration
def test_make_runs_the_tiers_and_continuous_integration_both_of_them() -> None:
    def make(target: str) -> list[str]:
        done = subprocess.run(["make", "-C", str(ROOT), "-n", target], capture_output=True, text=True, check=True)
        return [line.partition(" -m pytest ")[2] for line in done.stdout.splitlines() if " -m pytest " in line]

    (quick,), (rest,), (everything, pairs) = make("test"), make("test-rest"), make("test-all")
    assert "--tier quick" in quick and "--tier rest --turns 5" in rest
    assert "--tier" not in everything and "--all-pairs tests/laws" in pairs and "--tier" not in pairs
    steps = re.search(r"^for step in (.*); do$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert steps is not None and steps[1].split() == ["lint", "types", "rooms", "test", "test-rest"]
