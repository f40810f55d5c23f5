"""Tables of what `scripts/peers.py all --few-bits` wrote: python scripts/peers_few_bits_summary.py FILE

Medians of the rounds in tokens per second, and how far this engine, with rows in int8 and in bfloat16, is ahead of the
others and of its own int8 of a checkpoint in bfloat16: medians of the ratios of the rounds, with their range.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

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


def medians(found: dict[str, Found], memory: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = ["| | | rounds | prompt of 512 | decode 1 | decode 8 | decode 16 | peak MB |",
             "|---|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for size, each in found.items():
        for name, tests in sorted(each.items()):
            cells = [f"{statistics.median(tests[test].values()):,.4g}" if tests.get(test) else "-" for test in TESTS]
            rounds = max(map(len, tests.values()))
            lines.append(f"| {size} | {told(name)} | {rounds} | {' | '.join(cells)} | {memory[size][name]:,.0f} |")
    return lines


def ratios(found: dict[str, Found]) -> list[str]:
    lines = ["| | rows in | against | prompt of 512 | decode 1 | decode 8 | decode 16 |",
             "|---|---|---|---:|---:|---:|---:|"]  # fmt: skip
    for size, each in found.items():
        ours = sorted((name for name in each if "rows in" in name), reverse=True)
        for own in ours:
            for other in sorted(name for name in each if name not in ours):
                cells = [ahead(each[own].get(test, {}), each[other].get(test, {})) for test in TESTS]
                lines.append(f"| {size} | {own.rpartition(' ')[2]} | {told(other)} | {' | '.join(cells)} |")
    return lines


def told(name: str) -> str:
    """A contender's name without that of the file, which the size tells."""
    peer, _, rest = name.partition(" ")
    rows = rest.partition(", ")[2]
    return f"{peer}, {rows}" if rows else f"{peer} int8, expanded" if rest == "int8" else peer


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found, memory = read(Path(sys.argv[1]))
    print("\n".join([*medians(found, memory), "", *ratios(found)]))


if __name__ == "__main__":
    main()
