"""Which technique pays on this model and this machine: settings of the verbs against the default, paired by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from phasewise import catalog
from phasewise.bench import report
from phasewise.bench.drive import Bench, Drive, drive
from phasewise.bench.latency import summary
from phasewise.bench.rounds import agreement, median, order, ratio
from phasewise.bench.workloads import Shot
from phasewise.engine.limits import Limits
from phasewise.errors import UserError, near
from phasewise.options import DEFAULTS
from phasewise.recipes import NO_DRAFT, PARTS_OF_DECODE
from phasewise.verbs.place import Placed

DEFAULT = "default"


@dataclass(frozen=True)
class BenchSetting:
    """One contender: a name for the table and the verbs it sets."""

    name: str
    verbs: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> BenchSetting:
        """From `draft=prompt_lookup:k=6 evict=streaming` (verbs separated by spaces); `draft=none`: no drafting.

        Raises UserError.
        """
        verbs: dict[str, str] = {}
        for word in text.split():
            verb, equals, method = word.partition("=")
            if not equals or not method:
                raise UserError(f"{word!r} is not a setting: write VERB=METHOD[:knob=value,...]")
            if verb not in catalog.VERBS:
                raise UserError(f"unknown verb {verb!r} in {text!r}. {near(verb, catalog.VERBS)}")
            if (verb, method) != ("draft", NO_DRAFT):
                catalog.known(verb, method)
            verbs[verb] = method
        if not verbs:
            raise UserError("an empty setting: write VERB=METHOD, such as draft=prompt_lookup")
        return cls(" ".join(f"{verb}={method}" for verb, method in verbs.items()), verbs)


def untrained() -> list[BenchSetting]:
    """Every method of the catalogue that needs nothing, at its default knobs, one at a time."""
    found = []
    for verb, name, method in catalog.every():
        if verb == "verify" or DEFAULTS.get(verb) == name or method.needs != "nothing":
            continue
        if any(slot not in DEFAULTS for slot in catalog.slots_of(method) if slot in PARTS_OF_DECODE):
            continue  # needs a drafter: the drafters' own settings bring it in
        found.append(BenchSetting(f"{verb}={name}", {verb: name}))
    return found


@dataclass(frozen=True)
class SettingTrial:
    """One run of one setting in one round; `same` is the share of tokens before the first one that differs."""

    setting: str
    number: int
    run: Drive
    same: float

    def numbers(self) -> dict[str, Any]:
        work, out = self.run.work, max(1, self.run.work.emitted)
        latencies = summary(self.run.served, self.run.seconds)
        return {
            "setting": self.setting,
            "round": self.number,
            "seconds": self.run.seconds,
            "output_tokens": self.run.work.emitted,
            "output_tokens_per_s": self.run.tokens_per_s,
            "same_tokens": self.same,
            "peak_kv_bytes": self.run.peak_kv,
            "live_bytes_per_request": fmean(each.live for each in self.run.held) if self.run.held else None,
            "booked_bytes_per_request": fmean(each.booked for each in self.run.held) if self.run.held else None,
            "forwards_per_token": work.forwards / out,
            "draft_forwards_per_token": work.draft_forwards / out,
            "rows_per_token": work.rows / out,
            "row_layers_per_token": work.row_layers / out,
            "kv_bytes_read_per_token": work.kv_bytes_read / out,
            "kv_bytes_written_per_token": work.kv_bytes_written / out,
            "accepted_share": work.accepted / work.drafted if work.drafted else None,
            "preemptions": work.preemptions,
            **{key: latencies[key] for key in ("failed", "ttft_p50_s", "tpot_p50_s")},
        }


@dataclass
class Comparison:
    """Settings against the default on the same prompts. `refused` holds those that could not run, with the reason."""

    bench: Bench
    settings: Sequence[BenchSetting]
    limits: Limits
    base: dict[str, str] = field(default_factory=dict)  # verbs that every contender shares, the default too
    fit_bytes: int = 256 << 20  # a KV budget, to tell how many requests it holds
    trials: list[SettingTrial] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int, shots: Callable[[int], list[Shot]]) -> Iterator[int]:
        """Run everything; yields how many runs are done. `shots(round)` gives a round's prompts, none used twice."""
        engines = self._engines([Shot(0.0, shot.prompt, min(shot.new, 4)) for shot in shots(-1)[:1]])
        for number in range(rounds):
            asked, base, pending = shots(number), None, []
            for name in order(list(engines), number):
                run = drive(engines[name], asked)
                engines[name].forget_prefixes()
                pending.append((name, run))
                if name == DEFAULT:
                    base = [request.out for request in run.requests]
                yield number * len(engines) + len(pending)
            assert base is not None
            self.trials += [
                SettingTrial(name, number, run, agreement([r.out for r in run.requests], base)) for name, run in pending
            ]

    def _engines(self, warm: list[Shot]) -> dict[str, Placed]:
        """An engine per setting, each warmed up. The default must work; the others may refuse."""
        engines: dict[str, Placed] = {}
        for setting in [BenchSetting(DEFAULT), *self.settings]:
            try:
                engine = self.bench.engine({**self.base, **setting.verbs}, self.limits)
                drive(engine, warm)
            except UserError as error:
                if setting.name == DEFAULT:
                    raise
                self.refused[setting.name] = str(error)
            else:
                engine.forget_prefixes()
                engines[setting.name] = engine
        return engines

    def rows(self) -> list[dict[str, Any]]:
        """One row per run, and one per setting that could not run."""
        refused = [{"setting": name, "refused": reason} for name, reason in self.refused.items()]
        return [trial.numbers() for trial in self.trials] + refused

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and one row per setting: speed against the default (median of paired ratios), then counters."""
        header = ["setting", "tokens/s", "speed / default", "TTFT", "TPOT", "forwards/token", "rows/token",
                  "KV read/token", "peak KV", "live KV/request", f"fit {report.size(self.fit_bytes)}",
                  "drafts accepted", "same tokens"]  # fmt: skip
        by: dict[str, list[dict[str, Any]]] = {}
        for trial in self.trials:
            by.setdefault(trial.setting, []).append(trial.numbers())
        speed = {name: {n["round"]: n["output_tokens_per_s"] for n in rows} for name, rows in by.items()}
        body = []
        for name in [DEFAULT, *(s.name for s in self.settings if s.name in by)]:
            accepted, same = middle(by[name], "accepted_share"), middle(by[name], "same_tokens")
            body.append([
                name, report.short(median(speed[name])), str(ratio(speed[name], speed[DEFAULT]) or "-"),
                report.milliseconds(middle(by[name], "ttft_p50_s")),
                report.milliseconds(middle(by[name], "tpot_p50_s")),
                report.short(middle(by[name], "forwards_per_token")), report.short(middle(by[name], "rows_per_token")),
                report.size(middle(by[name], "kv_bytes_read_per_token") or 0),
                report.size(middle(by[name], "peak_kv_bytes") or 0), *self._memory(by[name]),
                "-" if accepted is None else f"{accepted:.0%}", "-" if same is None else f"{same:.0%}",
            ])  # fmt: skip
        return header, body

    def _memory(self, rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """Live bytes of a request at its end, and how many such requests `fit_bytes` hold, prefix cache apart."""
        live, booked = middle(rows, "live_bytes_per_request"), middle(rows, "booked_bytes_per_request")
        if live is None or not booked:
            return "-", "-"
        return report.size(live), str(int(self.fit_bytes // booked))


def middle(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    """The median of a number over the rounds that have it."""
    return median({row["round"]: row[key] for row in rows if row[key] is not None})
