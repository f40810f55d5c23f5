"""Predictions held against the served clock: the same requests on real servers and in virtual time.

    python scripts/simulated.py PROFILE [--model smollm2] [--dtype bfloat16] [--workload KIND[:KNOB=VALUE,...]]
        [--shares 0.4,0.7,1.0] [--requests 100] [--ttft 1000] [--tpot 60] [--out FILE.json] [--plot FILE.png]

PROFILE is what `phasewise profile` has measured on this machine, with nothing else running, as must be now. Per
placement (one engine, disaggregated, semi_pd) the simulator says which rate 90 % of the requests would survive; a
server gets `--shares` of that rate over HTTP. Predicted and served are compared by the share of requests within both
targets and by the medians of TTFT and TPOT. Exits with 1 where a share is off by more than 10 points, or a median by
more than 15 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phasewise.bench.latency import ServedRequest, percentile
from phasewise.bench.load import measure
from phasewise.bench.machine import cpu
from phasewise.bench.prompts import prompts_from
from phasewise.bench.server import serving
from phasewise.bench.workloads import fit, lengths, workload
from phasewise.cli.progress import counting
from phasewise.errors import UserError
from phasewise.load import config_of
from phasewise.plan.arrivals import Load
from phasewise.plan.profile import Profile
from phasewise.plan.setting import ServerSetting, measured
from phasewise.plan.simulate import goodput, run
from phasewise.request.params import SLO

PLACES = ("colocated", "disaggregated", "semi_pd")
POINTS, PART = 0.10, 0.15  # that a share and a median may be off by
WARM = 4  # requests before the first that count
KV = 1 << 30


@dataclasses.dataclass(frozen=True)
class Both:
    """One placement at one rate, by the simulator and by the clock."""

    place: str
    rate: float
    predicted: dict[str, float]
    served: dict[str, float]

    def off(self) -> dict[str, float]:
        """The share's difference, and of the medians predicted over served, less 1."""
        found = {"share": self.predicted["share"] - self.served["share"]}
        return found | {k: self.predicted[k] / self.served[k] - 1 for k in ("ttft", "tpot")}

    @property
    def holds(self) -> bool:
        off = self.off()
        return abs(off.pop("share")) <= POINTS and all(abs(part) <= PART for part in off.values())


def numbers(ttfts: Sequence[float | None], tpots: Sequence[float | None], share: float) -> dict[str, float]:
    """Medians in seconds, and the share within the targets."""
    found = {"share": share}
    for name, values in (("ttft", ttfts), ("tpot", tpots)):
        median = percentile([value for value in values if value is not None], 0.5)
        if median is None:
            raise UserError(f"no request has a {name}: ask for longer answers")
        found[name] = median
    return found


def of_served(served: Sequence[ServedRequest], slo: SLO) -> dict[str, float]:
    share = sum(one.meets(slo) for one in served) / len(served)
    return numbers([one.trace.ttft for one in served], [one.trace.tpot for one in served], share)


def compare(place: str, args: argparse.Namespace, slo: SLO) -> list[Both]:
    """A placement at all rates."""
    profile = Profile.load(args.profile)
    for line in profile.check(cpu(), None):
        raise UserError(line)
    config = config_of(args.model)
    setting = ServerSetting(place=place, kv_bytes=KV, prefix_cache=False)
    scenario = setting.scenario(measured(profile), 1, (), args.seed)
    load = Load(lengths(args.workload), args.requests, None, 1.0, args.seed, config.max_positions)
    most = goodput(scenario, load, slo).rate
    prompts = prompts_from("random", args.model, config.vocab, args.seed)  # one for all rates: no prompt comes twice
    found = []
    words = ["--model", args.model, "--dtype", args.dtype, "--place", place, "--draft", "none", "--kv-bytes", str(KV)]
    with serving(words) as url, counting(place, len(args.shares) * args.requests) as tell:
        for number, share in enumerate(args.shares):
            rate = round(share * most, 3)
            jobs = run(scenario, load.jobs(slo, rate)).jobs
            predicted = numbers(
                [j.ttft for j in jobs], [j.tpot for j in jobs], sum(j.meets(slo) for j in jobs) / len(jobs)
            )
            shots = workload(load.lengths, args.requests, prompts, rate=rate, seed=args.seed)
            shots = fit(shots, config.max_positions, prompts.begin)
            assert [shot.arrival for shot in shots] == sorted(job.arrived for job in jobs)
            measure(url, [dataclasses.replace(shot, arrival=0.0) for shot in shots[:WARM]], lambda done: None)
            served = measure(url, shots, lambda done, n=number: tell(n * args.requests + done)).served  # type: ignore[misc]
            failed = [one.error for one in served if one.error is not None]
            if failed:
                raise UserError(f"{len(failed)} requests failed: {failed[0]}")
            found.append(Both(place, rate, predicted, of_served(served, slo)))
    return found


def table(found: Sequence[Both]) -> str:
    lines = [
        "| placement | requests/s | in time, predicted / served | TTFT p50 | | TPOT p50 | | holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        p, s, off = one.predicted, one.served, one.off()
        cells = [one.place, f"{one.rate:.2f}", f"{p['share']:.0%} / {s['share']:.0%}"]
        for name in ("ttft", "tpot"):
            cells += [f"{1e3 * p[name]:.3g} / {1e3 * s[name]:.3g} ms", f"{off[name]:+.0%}"]
        lines.append(f"| {' | '.join([*cells, 'yes' if one.holds else 'no'])} |")
    return "\n".join(lines)


def draw(found: Sequence[Both], path: Path, slo: SLO) -> None:
    """Predicted beside served, over the rate: a column per placement."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = (("share", 100.0, "in time, %"), ("ttft", 1e3, "TTFT p50, ms"), ("tpot", 1e3, "TPOT p50, ms"))
    places = list(dict.fromkeys(one.place for one in found))
    figure, panels = pyplot.subplots(3, len(places), figsize=(4 * len(places), 7), sharey="row", squeeze=False)
    for column, place in enumerate(places):
        mine = [one for one in found if one.place == place]
        rates = [one.rate for one in mine]
        for panel, (name, scale, label) in zip(panels[:, column], rows, strict=True):
            for said, style in (("served", "o-"), ("predicted", "x--")):
                panel.plot(rates, [scale * getattr(one, said)[name] for one in mine], style, label=said)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            if not column:
                panel.set_ylabel(label)
        panels[0, column].set_title(place)
        panels[2, column].set_xlabel("requests/s")
    panels[0, 0].legend()
    figure.suptitle(f"targets: TTFT {1e3 * (slo.ttft or 0):g} ms, TPOT {1e3 * (slo.tpot or 0):g} ms")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workload", default="lognormal:prompt=200,longest=800,new=48,new_longest=128")
    parser.add_argument("--places", type=lambda text: text.split(","), default=list(PLACES))
    parser.add_argument(
        "--shares", type=lambda text: [float(part) for part in text.split(",")], default=[0.4, 0.7, 1.0]
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--ttft", type=float, default=1000.0)
    parser.add_argument("--tpot", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    slo = SLO(args.ttft / 1e3, args.tpot / 1e3)
    found: list[Both] = []
    try:
        for place in args.places:
            found += compare(place, args, slo)
            if args.out is not None:
                rows: list[dict[str, Any]] = [dataclasses.asdict(one) | {"off": one.off()} for one in found]
                args.out.write_text(
                    json.dumps({"cpu": cpu(), "workload": args.workload, "rows": rows}, indent=1) + "\n"
                )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.model}, {args.dtype}, {args.requests} x {args.workload}, {cpu()}\n\n{table(found)}")
    if args.plot is not None:
        draw(found, args.plot, slo)
    return 0 if all(one.holds for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
