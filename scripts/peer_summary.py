"""This engine beside the best of the others, column by column, from what `scripts/peers.py` wrote.

    python scripts/peer_summary.py FILE

bfloat16 is held against the best other in 16 bits or more, int8 against the best other of any precision: the one with
the best median. Ratios are taken round by round (medians and ranges), above 1 where this engine is ahead.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OURS = "phasewise"
WIDE = ("bf16", "float32", "fp32")
LOADS = ("poisson", "burst")
THROUGHPUT = ("prefill512", "prefill2048", "decode1", "decode8", "decode16")


class Column(NamedTuple):
    size: str
    test: str
    figure: str
    unit: str
    less: bool  # is better

    @property
    def name(self) -> str:
        figure = "" if self.figure == "value" else f" {self.figure[:4].upper()} {self.figure[5:]}"
        return f"{self.size} {self.test}{figure}"


MEMORY = "peak memory"  # of the throughput tests, which all contenders run
Values = dict[str, dict[int, float]]  # contender: round: figure


def columns(sizes: list[str]) -> Iterator[Column]:
    for size in sizes:
        yield from (Column(size, test, "value", "tokens/s", False) for test in THROUGHPUT)
        for test in LOADS:
            yield Column(size, test, "value", "tokens/s", False)
            for figure in ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90"):
                yield Column(size, test, figure, "ms", True)
        yield Column(size, MEMORY, "value", "MB", True)


def memory(rows: list[dict[str, object]], size: str) -> Values:
    """MB, of the contender's processes, in the rounds in which it finished most of its tests."""
    found: Values = defaultdict(dict)
    tests: dict[str, Counter[object]] = defaultdict(Counter)
    for row in rows:
        if row["size"] == size and row["test"] in THROUGHPUT and row["value"] is not None:
            peak = row.get("child_rss_mb") or row["rss_mb"]  # of a process that the measuring one starts
            assert isinstance(peak, int) and isinstance(row["round"], int)
            name = f"{row['peer']} {row['dtype']}"
            found[name][row["round"]] = max(found[name].get(row["round"], 0), peak)
            tests[name][row["round"]] += 1
    return {
        name: {number: peak for number, peak in of.items() if tests[name][number] == max(tests[name].values())}
        for name, of in found.items()
    }


def values(rows: list[dict[str, object]], column: Column) -> Values:
    if column.test == MEMORY:
        return memory(rows, column.size)
    found: Values = defaultdict(dict)
    for row in rows:
        if (row["size"], row["test"]) == (column.size, column.test) and row["value"] is not None:
            figure = row[column.figure]
            assert isinstance(figure, float | int) and isinstance(row["round"], int)
            found[f"{row['peer']} {row['dtype']}"][row["round"]] = figure * (1e3 if column.unit == "ms" else 1)
    return found


def beside(found: Values, dtype: str, less: bool) -> list[str]:
    """Cells: ours, the best other and its name, the ratio."""
    mine = found.get(f"{OURS} {dtype}")
    others = {name: of for name, of in found.items() if not name.startswith(OURS)}
    if dtype != "int8":
        others = {name: of for name, of in others.items() if name.endswith(WIDE)}
    others = {name: of for name, of in others.items() if mine and mine.keys() & of.keys()}
    if not mine or not others:
        return ["-"] * 3
    pick = min if less else max
    name = pick(others, key=lambda other: statistics.median(others[other].values()))
    both = sorted(mine.keys() & others[name].keys())
    ratios = [others[name][r] / mine[r] if less else mine[r] / others[name][r] for r in both]
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else " (one round)"
    own, best = (statistics.median(of.values()) for of in (mine, others[name]))
    return [f"{own:.3g}" if own < 1000 else f"{own:.0f}", f"{best:.3g} {name}" if best < 1000 else f"{best:.0f} {name}",
            f"{statistics.median(ratios):.2f}{spread}"]  # fmt: skip


def summary(rows: list[dict[str, object]]) -> Iterator[str]:
    heads = ["", "unit", "bf16", "best other, 16 bits or more", "ahead by", "int8", "best other", "ahead by"]
    yield f"| {' | '.join(heads)} |"
    yield "|---|---|" + "---:|---|---:|" * 2
    for column in columns(sorted({str(row["size"]) for row in rows}, reverse=True)):
        found = values(rows, column)
        if any(name.startswith(OURS) for name in found):
            cells = [*beside(found, "bf16", column.less), *beside(found, "int8", column.less)]
            yield f"| {column.name} | {column.unit} | {' | '.join(cells)} |"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    print("\n".join(summary([json.loads(line) for line in lines])))


if __name__ == "__main__":
    main()
