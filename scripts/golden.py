"""The golden record: what one seeded trace of every method gave, for tests/laws/test_golden.py to hold the code to.

    python scripts/golden.py                       compare, under every instruction set that this processor has
    python scripts/golden.py --add attend.new ...  record methods that are new; no entry that there is is touched
    python scripts/golden.py --drop attend.old ... forget entries of cases that are no more
    python scripts/golden.py --kernels             record bfloat16 of instruction sets that the record has not
    python scripts/golden.py --forget avx2 ...     forget bfloat16 of instruction sets whose arithmetic is another now
    python scripts/golden.py --rewrite-everything  record all cases anew, which forgives every change of behaviour

Tokens, counters and KV bytes in float32 are the same for all kernels, up to recorded near ties. In bfloat16 they are
recorded for each instruction set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phasewise.ops import native
from tests.laws import golden


def sets() -> list[str]:
    """The instruction sets that this processor runs, best first."""
    return [target for target in native.TARGETS if native.load(target) is not None]


def under(kernels: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This script in a process with other kernels. Errors are shown as they come."""
    environment = os.environ | {native.CHOICE: kernels, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)


def traces(names: list[str], dtype: str, ties: bool) -> dict[str, Any]:
    """What this process's kernels give for the cases, and where the best two logits are close."""
    cases = golden.cases()
    found = {name: {"trace": golden.trace(cases[name], dtype)} for name in names}
    if ties:
        for name in names:
            found[name]["ties"] = golden.near_ties(cases[name], dtype)
    return found


def made(names: list[str]) -> dict[str, Any]:
    """New entries for the cases. float32 is recorded with the best kernels."""
    cases = golden.cases()
    entries: dict[str, Any] = {name: {"verbs": cases[name], "bfloat16": {}} for name in names}
    for kernels in sets():
        for dtype in ["float32"] * (kernels == sets()[0]) + ["bfloat16"]:
            ran = under(kernels, "--trace", dtype, *names)
            ran.check_returncode()
            for name, one in json.loads(ran.stdout).items():
                if dtype == "float32":
                    entries[name] |= {"float32": one["trace"], "ties": one["ties"]}
                else:
                    entries[name]["bfloat16"][kernels] = one["trace"]
    return entries


def with_kernels(record: dict[str, Any]) -> dict[str, Any]:
    """The record with bfloat16 of this processor's instruction sets for the entries that lack it."""
    for kernels in sets():
        if names := [name for name, entry in record.items() if kernels not in entry["bfloat16"]]:
            ran = under(kernels, "--trace", "bfloat16", *names)
            ran.check_returncode()
            for name, one in json.loads(ran.stdout).items():
                record[name]["bfloat16"][kernels] = one["trace"]
    return record


def compare() -> int:
    """Compare all entries in this process, and report. Returns how many cases differ."""
    record, cases, failed, skipped = golden.read(), golden.cases(), 0, 0
    for name, entry in record.items():
        for dtype in ("float32", "bfloat16"):
            if name not in cases:
                continue
            wrong, parted, why = golden.check(entry, cases[name], dtype)
            failed, skipped = failed + bool(wrong), skipped + bool(why)
            for line in [*wrong, *(f"near tie, {each}" for each in parted)]:
                print(f"{golden.kernels()} {dtype} {name}: {line}", flush=True)
    print(f"{golden.kernels()}: {failed} of {2 * len(record)} traces differ, {skipped} are not recorded", flush=True)
    return failed


def compare_all() -> int:
    """Compare under every instruction set. Returns 1 where something differs, else 0."""
    failed = 0
    for kernels in (*sets(), "none"):
        ran = under(kernels, "--here")
        print(ran.stdout, end="", flush=True)
        failed |= ran.returncode
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs="+", metavar="CASE", help="methods, or single cases, to record that are new")
    parser.add_argument("--drop", nargs="+", metavar="CASE", help="entries to forget whose methods are no more")
    parser.add_argument("--kernels", action="store_true", help="record bfloat16 of instruction sets that are new")
    parser.add_argument(
        "--forget", nargs="+", choices=native.TARGETS, help="instruction sets whose bfloat16 is forgotten"
    )
    parser.add_argument("--rewrite-everything", action="store_true", help="forget the record and make it anew")
    parser.add_argument("--here", action="store_true", help="compare with this process's kernels alone")
    parser.add_argument("--trace", nargs="+", metavar=("DTYPE", "CASE"), help="print traces as JSON")
    options = parser.parse_args()
    if options.trace:
        dtype, *names = options.trace
        print(json.dumps(traces(names, dtype, ties=dtype == "float32")))
        return 0
    if options.here:
        return min(1, compare())
    if options.rewrite_everything:
        golden.write(made(list(golden.cases())))
        return 0
    record, known = golden.read(), golden.cases()
    if options.forget:
        for entry in record.values():
            entry["bfloat16"] = {
                kernels: one for kernels, one in entry["bfloat16"].items() if kernels not in options.forget
            }
        golden.write(record)
    elif options.kernels:
        golden.write(with_kernels(record))
    elif options.drop:
        if wrong := sorted(name for name in options.drop if name in known or name not in record):
            parser.error(f"{', '.join(wrong)}: not recorded, or still there")
        golden.write({name: entry for name, entry in record.items() if name not in options.drop})
    elif options.add:
        if old := sorted(set(options.add) & record.keys()):
            parser.error(f"{', '.join(old)}: already recorded, and an entry is never changed by --add")
        added = {case for name in options.add for case in golden.naming(name)} - record.keys()
        if unknown := [name for name in options.add if name not in known]:
            missing = sorted(known.keys() - record.keys())
            parser.error(f"{', '.join(unknown)}: no such case. Not recorded yet: {', '.join(missing) or 'none'}")
        golden.write(record | made(sorted(added)))
    else:
        return compare_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
