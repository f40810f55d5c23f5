"""DistServe's headline shapes, by simulation on device files.

    python scripts/headlines.py [--out FILE.json]

Goodput per device of pools for each phase over one engine that does both, as targets get tighter, on A100 with a model
of 13B sizes (arXiv 2401.09670). A verdict follows from the numbers by a rule that is printed with it. Splitwise's
provisioning (arXiv 2311.18677) is an attempt of `phasewise reproduce splitwise`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phasewise.bench.workloads import lengths
from phasewise.cli.progress import working
from phasewise.plan.arrivals import Load
from phasewise.plan.link import Link
from phasewise.plan.search import Question, SearchSpace, Tried, search
from phasewise.plan.setting import ServerSetting, known
from phasewise.plan.shape import DecoderShape
from phasewise.request.params import SLO

B13 = DecoderShape(40, 5120, 40, 40, 128, 13824, 32000)  # every head has KV of its own, as OPT-13B's have
INSIDE = Link(3e11, 1e-5)  # of one machine
CHAT = "lognormal:prompt=500,spread=0.8,longest=2000,new=150,new_spread=0.6,new_longest=500"
SUMMARIES = "lognormal:prompt=1700,spread=0.2,longest=2000,new=90,new_spread=0.4,new_longest=300"
TARGETS = {"tight": (0.25, 0.03), "medium": (0.5, 0.06), "relaxed": (4.0, 0.3)}  # seconds of TTFT and TPOT
POOLS = tuple(f"disaggregated:prefill={p},decode={d}" for p, d in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3)))
FIRST, CHUNKS = "prefill_first", "sarathi:budget=512"  # what it was compared with, and what came after
PRECISION = 0.04


def distserve() -> Iterator[dict[str, Any]]:
    """A row per load and target: goodput per device, requests/s."""
    source = known({"": "a100"}, 1, B13)
    for name, text in (("chat", CHAT), ("summarising", SUMMARIES)):
        for tightness, (ttft, tpot) in TARGETS.items():
            slo = SLO(ttft, tpot)
            load = Load(lengths(text), max(400, int(100 * ttft)), None, 1.0, 1)
            setting = ServerSetting(prefix_cache=False, link=INSIDE)
            question = Question(load, slo, lambda choice: source, setting, precision=PRECISION)
            with working(f"{name}, {tightness}"):
                found = search(SearchSpace(4, ("colocated", *POOLS), (FIRST, CHUNKS)), question, prune=False)
            one = {each.choice.schedule: each for each in found if each.choice.place == "colocated"}
            pools: Tried = next(each for each in found if each.choice.place != "colocated")
            yield {
                "load": name, "targets": tightness, "ttft": ttft, "tpot": tpot, "first": one[FIRST].worth,
                "chunks": one[CHUNKS].worth, "pools": pools.worth, "shape": pools.choice.place.partition(":")[2],
            }  # fmt: skip


def told_distserve(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| load | targets | prompts first | slices of 512 | pools | times the first | times the second |",
             "|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        aims = f"{row['targets']}: {1e3 * row['ttft']:.0f} / {1e3 * row['tpot']:.0f} ms"
        ratios = [f"{row['pools'] / row[name]:.2f}" if row[name] else "only pools" for name in ("first", "chunks")]
        own = [f"{row['first']:.2f}", f"{row['chunks']:.2f}", f"{row['pools']:.2f} ({row['shape']})"]
        lines.append(f"| {row['load']} | {aims} | {' | '.join([*own, *ratios])} |")
    tight = [row for row in rows if row["targets"] == "tight"]
    loose = [row for row in rows if row["targets"] == "relaxed"]
    wins = all(row["pools"] > row["first"] for row in tight)
    both = all(row["pools"] <= 1.02 * max(row["first"], row["chunks"]) for row in loose)
    verdict = "holds" if wins and both else "partly" if wins or both else "not here"
    rule = "pools beat prompts-first under both tight targets, and no pool beats the better engine under relaxed ones"
    return "\n".join([*lines, "", f"verdict: {verdict} ({rule})"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = list(distserve())
    print(f"## distserve\n\n{told_distserve(rows)}\n", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"distserve": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
