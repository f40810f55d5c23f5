"""Tables of what `scripts/peers.py all --few-bits` wrote: python scripts/peers_few_bits_summary.py FILE

For each size the medians of the rounds, and how far this engine, with rows in int8 and in bfloat16, is ahead of the
others and of its own int8: medians of the ratios of the rounds, with their range.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

OURS = "phasewise"
TESTS = ("prefill512", "decode1", "decode8", "decode16")
Rounds = dict[int, float]
Found = Mapping[str, Mapping[str, Rounds]]  # by contender, by test: tokens/s of each round


def read(path: Path) -> tuple[dict[str, Found], dict[str, dict[str, float]]]:
    """Tokens/s by size, contender, test and round; and the largest memory in MB by size and contender."""
    found: dict[str, dict[str, dict[str, Rounds]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    memory: dict[str, dict[str, float]] = defaultdict(dict)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["value"] is None or row["test"] not in TESTS:
            continue
        name = f"{row['peer']} {row['dtype']}"
        found[row["size"]][name][row["test"]][row["round"]] = row["value"]
        peak = row.get("child_rss_mb") or row["rss_mb"]
        memory[row["size"]][name] = max(peak, memory[row["size"]].get(name, 0))
    return dict(found), memory


def ahead(ours: Rounds, theirs: Rounds) -> str:
    """Our speed over theirs, of the rounds that both have."""
    ratios = [ours[i] / theirs[i] for i in ours if i in theirs]
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(size: str, found: Found, memory: Mapping[str, float]) -> list[str]:
    lines = [
        f"| {size} | prompt of 512 | decode 1 | decode 8 | decode 16 | peak MB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, tests in sorted(found.items()):
        cells = [f"{statistics.median(tests[test].values()):,.4g}" if tests.get(test) else "-" for test in TESTS]
        lines.append(f"| {name} | {' | '.join(cells)} | {memory[name]:,.0f} |")
    lines += ["", f"| {size}: this engine ahead of | prompt of 512 | decode 1 | decode 8 | decode 16 |",
              "|---|---:|---:|---:|---:|"]  # fmt: skip
    ours = [name for name in found if name.startswith(OURS) and "rows in" in name]
    others = [name for name in sorted(found) if name not in ours]
    for own in sorted(ours):
        rows = own.rpartition(", ")[2]
        for other in others:
            cells = [ahead(found[own].get(test, {}), found[other].get(test, {})) for test in TESTS]
            lines.append(f"| {other}, {rows} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found, memory = read(Path(sys.argv[1]))
    print("\n\n".join("\n".join(table(size, each, memory[size])) for size, each in found.items()))


if __name__ == "__main__":
    main()
