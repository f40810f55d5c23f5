"""Options that the benchmarks share: what is asked of an engine, what counts as good service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phasewise.bench.prompts import Prompts
    from phasewise.bench.workloads import Shot
    from phasewise.request.params import SLO


@dataclass(frozen=True)
class Asked:
    """What is asked of the engine, and where the results go."""

    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 32
    workload: Annotated[
        str,
        typer.Option(
            metavar="KIND[:KNOB=VALUE,...]",
            help="lognormal, fixed:prompt=,new=, shared:prefix=,prompt=,new= or trace:path=,scale=.",
        ),
    ] = "lognormal"
    prompts: Annotated[
        str | None, typer.Option(metavar="random|code|FILE", help="Random ids, library source, or a text file.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, arrivals and prompts.")] = 0
    out: Annotated[Path | None, typer.Option(help="Append JSON lines to this file.")] = None

    def source(self, model: str, vocab: int, default: str = "random") -> Prompts:
        """Where prompts come from; `default` when the user did not say."""
        from phasewise.bench.prompts import prompts_from

        return prompts_from(self.prompts or default, model, vocab, self.seed)

    def shots(self, prompts: Prompts, context: int, rate: float | None = None, number: int = 0) -> list[Shot]:
        """The requests of round `number`, cut to the context."""
        from phasewise.bench.workloads import fit, lengths, workload

        return fit(
            workload(lengths(self.workload), self.requests, prompts, rate=rate, seed=self.seed + number), context
        )


@dataclass(frozen=True)
class Targets:
    """What counts as good service."""

    ttft: Annotated[float | None, typer.Option(min=0.0, metavar="MS", help="Target: time to first token.")] = None
    tpot: Annotated[float | None, typer.Option(min=0.0, metavar="MS", help="Target: time per further token.")] = None

    def slo(self) -> SLO:
        from phasewise.request.params import SLO

        return SLO(*(None if target is None else target / 1e3 for target in (self.ttft, self.tpot)))

    def arguments(self) -> list[str]:
        """The words that make them a server's own targets."""
        given = {"--slo-ttft": self.ttft, "--slo-tpot": self.tpot}
        return [word for name, ms in given.items() if ms is not None for word in (name, str(ms))]


@dataclass(frozen=True)
class Tests:
    """What `bench compare` measures."""

    tests: Annotated[
        str, typer.Option(metavar="TEST,...", help="decodeB: B sequences at once; prefillN: a prompt of N tokens.")
    ] = "decode1,decode8,decode16,prefill512,prefill2048"
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of the decode tests.")] = 128
    new: Annotated[int, typer.Option(min=1, help="New tokens of the decode tests.")] = 128

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.tests.split(",") if name.strip()]


ASKED, TARGETS, TESTS = Asked(), Targets(), Tests()
