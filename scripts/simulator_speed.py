"""How many requests a minute the simulator lets through, by the processor time of one core.

    python scripts/simulator_speed.py [--requests 20000] [--workers 256] [--out FILE.json]

A model of 8B sizes on H100 by its device file; half of the workers compute prompts and half generate (splitwise), or
each is an engine of its own. Lengths are those of chats, and of long answers. A load is offered at a rate per worker
that keeps those that generate busy. Time is that of the process, so neighbours count little, but for what they do to
caches and clocks. The target is 50,000 requests a minute with 256 workers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from phasewise.bench.workloads import lengths
from phasewise.plan.arrivals import Load
from phasewise.plan.setting import ServerSetting, known
from phasewise.plan.shape import DecoderShape
from phasewise.plan.simulate import Scenario, run
from phasewise.request.params import SLO

SHAPE = DecoderShape(32, 4096, 32, 8, 128, 14336, 128256)
LOADS = {"chat": "lognormal", "long answers": "lognormal:prompt=800,longest=4096,new=300,new_longest=1024"}
RATE = {"chat": 8.0, "long answers": 2.0}  # requests/s per worker


def scenarios(workers: int) -> dict[str, Scenario]:
    half = workers // 2
    source = known({"": "h100"}, 1, SHAPE)
    pools = ServerSetting(place=f"splitwise:prompt={half},token={workers - half}", prefix_cache=False)
    engines = ServerSetting(prefix_cache=False)
    return {"splitwise": pools.scenario(source, 1, (), 0), "colocated": engines.scenario(source, workers, (), 0)}


def measure(scenario: Scenario, load: Load, rate: float) -> dict[str, Any]:
    jobs = load.jobs(SLO(), rate)
    began = time.process_time()
    outcome = run(scenario, jobs)
    seconds = time.process_time() - began
    numbers = outcome.numbers()
    tokens = sum(job.n_out for job in jobs)
    return {
        "requests_a_minute": 60 * len(jobs) / seconds, "tokens_per_s": tokens / seconds, "seconds": seconds,
        "steps": numbers["steps"], "steps_per_s": numbers["steps"] / seconds,
        "tokens_per_step": tokens / numbers["steps"], "busy_share": numbers["busy_share"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for what, text in LOADS.items():
        for place, scenario in scenarios(given.workers).items():
            found = measure(scenario, Load(lengths(text), given.requests), RATE[what] * given.workers)
            rows.append({"load": what, "place": place, "workers": given.workers, "requests": given.requests} | found)
            print(f"{what}, {place}, {given.workers} workers: {found['requests_a_minute']:,.0f} requests a minute "
                  f"({found['steps']:,} steps of {found['tokens_per_step']:.1f} tokens, workers busy "
                  f"{found['busy_share']:.0%}, {found['seconds']:.1f} s)", flush=True)  # fmt: skip
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
