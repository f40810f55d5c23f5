"""Options that the benchmarks share: the load, its arrivals, and the targets of good service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.goodput import GoodputPoint, Target
    from phasewise.bench.latency import ServedRequest
    from phasewise.bench.prompts import Prompts
    from phasewise.bench.workloads import Shot
    from phasewise.request.params import SLO


@dataclass(frozen=True)
class BenchRequests:
    """The requests of a benchmark, and the file for its results."""

    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 32
    workload: Annotated[
        str,
        typer.Option(
            metavar="KIND[:KNOB=VALUE,...]",
            help="Lengths of requests: lognormal, fixed:prompt=,new=, shared:prefix=,prompt=,new=, "
            "turns:users=,turns=,system=,prompt=,new=, trace:path=,scale= or mooncake:path=,scale=.",
        ),
    ] = "lognormal"
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="random|code|FILE", help="Source of prompts: random token ids, library source, or a text file."
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, arrivals and prompts.")] = 0
    out: Annotated[Path | None, typer.Option(help="Append JSON lines to this file.")] = None

    def source(self, model: str, vocab: int, default: str = "random") -> Prompts:
        """The source of prompts; `default` if the user named none."""
        from phasewise.bench.prompts import prompts_from

        return prompts_from(self.prompts or default, model, vocab, self.seed)

    def shots(
        self, prompts: Prompts, context: int, rate: float | None = None, number: int = 0, cv: float = 1.0
    ) -> list[Shot]:
        """The requests of round `number`, cut to the context."""
        from phasewise.bench.workloads import fit, lengths, workload

        shape, seed = lengths(self.workload), self.seed + number
        return fit(workload(shape, self.requests, prompts, rate=rate, seed=seed, cv=cv), context, prompts.begin)


@dataclass(frozen=True)
class Arriving:
    """The arrivals of requests."""

    rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_S", help="Mean rate of arrivals; inf: all at once. Default: 1, or the trace's own times."
        ),
    ] = None
    cv: Annotated[
        float,
        typer.Option(help="Coefficient of variation of the gaps between arrivals: 1 is Poisson, more is burstier."),
    ] = 1.0

    def of(self, asked: BenchRequests) -> float | None:
        """The rate in requests per second; None: at the trace's own times."""
        return 1.0 if self.rate is None and not asked.workload.startswith(("trace", "mooncake")) else self.rate


@dataclass(frozen=True)
class Targets:
    """The targets that count as good service."""

    ttft: Annotated[float | None, typer.Option(min=0.0, metavar="MS", help="Target for the time to first token.")] = (
        None
    )
    tpot: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Target for the time per further token, the mean.")
    ] = None
    tbt: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="MS", help="Target for the times between a stream's tokens, their 99th percentile."
        ),
    ] = None

    def slo(self) -> SLO:
        from phasewise.request.params import SLO

        return SLO(*(None if target is None else target / 1e3 for target in (self.ttft, self.tpot, self.tbt)))

    def asked(self) -> SLO:
        """The same. Raises UserError where there is none, or one that nothing could meet."""
        given = [target for target in (self.ttft, self.tpot, self.tbt) if target is not None]
        if not given:
            raise UserError("targets are needed: add --ttft MS, --tpot MS, --tbt MS or several of them")
        if min(given) <= 0:
            raise UserError("targets are milliseconds above 0: --ttft 500 --tpot 50")
        return self.slo()

    def arguments(self) -> list[str]:
        """The targets that a server schedules by, as options of `phasewise serve`: it has none for --tbt."""
        given = {"--slo-ttft": self.ttft, "--slo-tpot": self.tpot}
        return [word for name, ms in given.items() if ms is not None for word in (name, str(ms))]


@dataclass(frozen=True)
class Tests:
    """The tests of `bench compare` without contenders, and the other engine."""

    peer: Annotated[
        str, typer.Option(help="The engine to compare with, where no contenders are named: transformers.")
    ] = "transformers"
    tests: Annotated[
        str,
        typer.Option(
            metavar="TEST,...",
            help="Tests without contenders. decodeB: B sequences at once; prefillN: a prompt of N tokens.",
        ),
    ] = "decode1,decode8,decode16,prefill512,prefill2048"
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens in the decode tests.")] = 128
    new: Annotated[int, typer.Option(min=1, help="New tokens in the decode tests.")] = 128

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.tests.split(",") if name.strip()]


@dataclass(frozen=True)
class Rates:
    """The rates that `bench goodput` tries."""

    rates: Annotated[str, typer.Option(metavar="R,...", help="Rates to try, in requests per second.")] = "0.5,1,2,4"
    precision: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Bisect between the lowest and the highest of --rates until the answer is known to this "
            "share, such as 0.1.",
        ),
    ] = None

    @property
    def steps(self) -> list[float]:
        """The rates in rising order. Raises UserError."""
        try:
            found = sorted(float(part) for part in self.rates.split(","))
        except ValueError:
            found = []
        if not found or found[0] <= 0 or len(set(found)) < len(found):
            raise UserError(f"rates={self.rates!r}: write different rates above 0, separated by commas")
        if self.precision is not None and not (0.01 <= self.precision <= 1 and len(found) > 1):
            raise UserError(
                f"precision={self.precision:g} must lie between 0.01 and 1, and --rates name two rates to begin with"
            )
        return found

    def points(
        self, contender: str, targets: Sequence[Target], measure: Callable[[float], Sequence[ServedRequest]]
    ) -> Iterator[GoodputPoint]:
        """The measured points of one contender."""
        from phasewise.bench.goodput import bisect, sweep

        steps = self.steps
        if self.precision is None:
            return sweep(contender, steps, targets, measure)
        return bisect(contender, (steps[0], steps[-1]), targets, measure, self.precision)


ASKED, ARRIVING, TARGETS, TESTS, RATES = BenchRequests(), Arriving(), Targets(), Tests(), Rates()
