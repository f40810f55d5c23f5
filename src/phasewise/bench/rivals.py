"""Servers side by side: recipes of ours and whatever else speaks OpenAI's API, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phasewise.bench import report
from phasewise.bench.latency import summary
from phasewise.bench.load import LoadResult
from phasewise.bench.rounds import interval, median, order, ratio
from phasewise.bench.settings import DEFAULT, BenchSetting
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError

RATIOS = {  # what is compared, and whether more of it is better
    "output_tokens_per_s": True,
    "ttft_p50_s": False,
    "tpot_p50_s": False,
}


@dataclass(frozen=True)
class Rival:
    """One contender: a server that runs at `url`, or one of ours to be made with `verbs`."""

    name: str
    url: str | None = None
    verbs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Rival:
        """From `default`, `VERB=METHOD ...`, `http://...`, or `NAME=http://...`. Raises UserError."""
        name, equals, address = text.partition("=")
        if not (equals and address.startswith(("http://", "https://"))):
            name, address = text, text
        if address.startswith(("http://", "https://")):
            return cls(name.partition("://")[2] or name, address.rstrip("/"))
        if text == DEFAULT:
            return cls(DEFAULT)
        setting = BenchSetting.parse(text)
        return cls(setting.name, verbs=setting.verbs)


def rivals(texts: Sequence[str]) -> list[Rival]:
    """At least two, no name twice. Raises UserError."""
    found = [Rival.parse(text) for text in texts]
    twice = next((one.name for i, one in enumerate(found) if one.name in {other.name for other in found[:i]}), None)
    if twice is not None:
        raise UserError(f"{twice!r} is named twice: give servers different names, such as a=http://... b=http://...")
    if len(found) < 2:
        raise UserError(f"{texts[0]!r} is only one contender: name two, such as default {texts[0]}")
    return found


Measure = Callable[[str, Sequence[Shot]], LoadResult]


@dataclass
class Contest:
    """Every round asks the same of each, in rotating order; the first named is what the others are held against."""

    urls: Mapping[str, str]  # by contender
    measure: Measure
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, rounds: int, shots: Callable[[int], list[Shot]]) -> Iterator[int]:
        """Yields how many turns are done. Before the first, each has one request to warm up. Raises UserError where
        one answers nothing at all."""
        warm, turns = shots(-1)[:1], 0
        for url in self.urls.values():
            self.measure(url, [Shot(0.0, shot.prompt, min(shot.new, 4)) for shot in warm])
        for number in range(rounds):
            asked = shots(number)
            for name in order(list(self.urls), number):
                self._turn(name, number, asked)
                turns += 1
                yield turns

    def _turn(self, name: str, number: int, asked: Sequence[Shot]) -> None:
        result = self.measure(self.urls[name], asked)
        if all(one.error for one in result.served):
            raise UserError(f"{name} answered none of {len(asked)} requests: {result.served[0].error}")
        about = {"contender": name, "round": number, "served_model": result.model, "late_s": result.late}
        self.rows.append(about | summary(result.served, result.seconds))

    def values(self, name: str, key: str) -> dict[int, float]:
        """{round: value}"""
        return {row["round"]: row[key] for row in self.rows if row["contender"] == name and row[key] is not None}

    def failed(self, name: str) -> int:
        return sum(row["failed"] for row in self.rows if row["contender"] == name)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Medians over the rounds, and how many times as good as the first each is, with 95 % intervals."""
        first, *_ = self.urls
        header = ["", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "failed",
                  "tokens/s, times", "TTFT, times as fast", "TPOT, times as fast"]  # fmt: skip
        body = []
        for name in self.urls:
            waits = [f"{kind}_p{q}_s" for kind in ("ttft", "tpot") for q in (50, 99)]
            row = [name, report.short(median(self.values(name, "output_tokens_per_s")))]
            row += [report.milliseconds(median(self.values(name, key))) for key in waits]
            row += [str(self.failed(name)), *("1" if name == first else self._times(name, key) for key in RATIOS)]
            body.append(row)
        return header, body

    def _times(self, name: str, key: str) -> str:
        ours, first = self.values(name, key), self.values(next(iter(self.urls)), key)
        pair = (ours, first) if RATIOS[key] else (first, ours)
        found, within = ratio(*pair), interval(*pair)
        if found is None:
            return "-"
        return f"{found.median:.2f}" if within is None else f"{found.median:.2f} [{within[0]:.2f}, {within[1]:.2f}]"
