"""Write tests/slow.txt: the slower quick tests, which take turns in `make test` (tests/tiers.py).

    make test ARGS="--every-day --junitxml quick.xml"    # those of all days, on a quiet machine
    python scripts/slow_tests.py quick.xml [more.xml ...]
    python scripts/slow_tests.py --keep today.xml        # of `make test` alone: what has no turn today stays listed

A test is listed if all of its cases together take longer than `--seconds`. Laws, clients and tests of the repository
itself are not, and no test by which a planted fault was caught (docs/results/faults.jsonl): `make test` catches every
day what that table says. Of several reports the least time of a case counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import tiers  # noqa: E402

FAULTS = ROOT / "docs" / "results" / "faults.jsonl"
HEAD = """\
# Quick tests of which `make test` runs a quarter each day (tests/tiers.py), with the seconds that their cases took.
# Written by scripts/slow_tests.py.
"""


def seconds(reports: list[Path]) -> dict[str, float]:
    """{test, without its cases: the seconds of all cases}."""
    cases: dict[tuple[str, str], float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            module, name, took = case.attrib["classname"], case.attrib["name"], float(case.attrib["time"])
            key = module.removeprefix("tests.").replace(".", "/") + ".py", name
            cases[key] = min(took, cases.get(key, took))
    found = defaultdict[str, float](float)
    for (file, name), took in cases.items():
        found[f"{file}::{name.partition('[')[0]}"] += took
    return found


def before() -> dict[str, float]:
    """{test: seconds} of what is listed."""
    lines = (tiers.HERE / "slow.txt").read_text(encoding="utf-8").splitlines()
    return {test: float(spent) for test, spent in (line.split() for line in lines if not line.startswith("#"))}


def is_there(file: str, test: str) -> bool:
    path = tiers.HERE / file
    return path.exists() and re.search(rf"^(async )?def {test}\(", path.read_text(encoding="utf-8"), re.M) is not None


def catchers() -> set[str]:
    """Tests by which a planted fault was caught."""
    verdicts = [json.loads(line) for line in FAULTS.read_text(encoding="utf-8").splitlines()]
    return {verdict["test"].removeprefix("tests/").partition("[")[0] for verdict in verdicts if verdict["test"]}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("reports", nargs="+", type=Path, metavar="JUNIT")
    asked.add_argument("--seconds", type=float, default=0.07)
    asked.add_argument("--keep", action="store_true", help="what is listed and in no report stays")
    args = asked.parse_args()
    took, needed = seconds(args.reports), catchers()
    if args.keep:
        took = before() | took
    listed = {
        test: spent
        for test, spent in took.items()
        if spent > args.seconds
        and test not in needed
        and is_there(*test.split("::"))  # a class's tests are named otherwise, and stay
        and not test.startswith(tiers.DAILY)
        and not tiers.thorough(*test.split("::"))
    }
    # neighbours in the list have their turns on different days: by cost, so that the days cost alike
    lines = [f"{test} {listed[test]:.2f}\n" for test in sorted(listed, key=lambda test: -listed[test])]
    (tiers.HERE / "slow.txt").write_text(HEAD + "".join(lines), encoding="utf-8")
    whole = sum(took.values())
    print(f"{len(listed)} tests of {sum(listed.values()):.0f} s of {whole:.0f} s take turns")


if __name__ == "__main__":
    main()
