"""Times methods that save KV, depth or reads beside the gain that the saved bytes promise.

Every setting has an engine of its own, kept alive with the prompts of its requests computed. Then they take turns: each
decodes a few tokens of every request, in rotating order, and only ratios to dense of the same round count. A round in
which the machine began to read memory faster or slower is measured anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phasewise import catalog
from phasewise.bench.drive import Bench
from phasewise.bench.prompts import Prompts
from phasewise.bench.rounds import order
from phasewise.bench.settings import BenchSetting
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.model.model import Model
from phasewise.options import DEFAULTS
from phasewise.request.params import Params
from phasewise.request.request import Request

NEUTRAL, WORK = "neutral", "work"  # all savers, one way or the other
SAVING = ("attend", "evict", "store", "skip")  # the verbs whose methods save something
DENSE = "dense"
STEADY = 0.1  # how far the rate at which memory is read may be off after a round, as a share of what it was before
PROMPTS_FIRST = {"schedule": "prefill_first"}  # nobody decodes until all prompts are there: equal contexts


def contenders(given: Sequence[str]) -> list[BenchSetting]:
    """Settings as they are written, `neutral` and `work` standing for all savers that way; everybody where none is
    given. Raises UserError."""
    found: dict[str, BenchSetting] = {}
    for text in given or (NEUTRAL, WORK):
        for setting in savers((text,)) if text in (NEUTRAL, WORK) else [BenchSetting.parse(text)]:
            found.setdefault(setting.name, setting)
    return list(found.values())


def savers(ways: Sequence[str] = (WORK, NEUTRAL)) -> list[BenchSetting]:
    """Every method of these verbs but the defaults: at its neutral setting, where it must cost nothing, and at work: as
    its knobs are by default, without training."""
    found: dict[str, BenchSetting] = {}
    for verb in SAVING:
        for name in catalog.names(verb):
            if name == DEFAULTS[verb]:
                continue
            method = catalog.method(verb, name)
            for way, knobs, words in (
                (WORK, method.untrained, ""), (NEUTRAL, method.neutral, ", neutral"),
            ):  # fmt: skip
                if way not in ways:
                    continue
                text = name + (":" + ",".join(f"{knob}={value}" for knob, value in knobs.items()) if knobs else "")
                found.setdefault(
                    f"{verb}={text}", BenchSetting(f"{verb}={name if words else text}{words}", {verb: text})
                )
    return list(found.values())


@dataclass(frozen=True)
class BatchLoad:
    """`batch` requests with the same prompt of `tokens` tokens; each round decodes `new` of every one. As many rounds
    again may be measured anew."""

    tokens: int
    batches: Sequence[int]
    new: int
    rounds: int

    @property
    def most(self) -> int:
        """Tokens that a request may make: the first, a round that warms up, all others, and one that stays to come."""
        return 2 + (1 + 2 * self.rounds) * self.new

    def check(self, model: Model) -> None:
        """Raise UserError where the model's context is too short."""
        context = model.config.max_positions
        if self.tokens + self.most > context:
            raise UserError(
                f"tokens={self.tokens} and {self.most} decoded ones are more than the model's context of {context}: "
                f"lower --tokens to at most {max(0, context - self.most)}, or --new or --rounds"
            )


@dataclass(frozen=True, slots=True)
class SettingTurn:
    """One setting's turn in one round; `group`: who was alive together."""

    setting: str
    batch: int
    group: int
    number: int
    seconds: float  # of a step, in which every request of the batch gets a token
    read: float  # KV bytes read in a step
    layers: float  # run by a row, on average
    rate: float  # bytes per second that memory was read at when the round began


class Resident:
    """An engine that is kept alive with the requests of a batch."""

    def __init__(self, setting: BenchSetting, engine: Engine) -> None:
        self.setting, self.engine = setting, engine
        self.requests: list[Request] = []

    def need(self, load: BatchLoad, batch: int) -> int:
        """Bytes of KV for a batch, and for the shared prompt in the prefix cache."""
        return (batch + 1) * self.engine.recipes[""].need(load.tokens + load.most)

    def enter(self, prompt: Sequence[int], batch: int, most: int) -> None:
        """The prompt is computed once; the others take it from the prefix cache, where the method leaves it there."""
        self._add([Request(prompt, Params(max_tokens=1, ignore_eos=True))])
        self.requests = self._add([Request(prompt, Params(max_tokens=most, ignore_eos=True)) for _ in range(batch)])

    def _add(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self.engine.add(request)
        self._upto(requests, 1)
        return requests

    def _upto(self, requests: Sequence[Request], tokens: int) -> None:
        while any(request.n_out < tokens for request in requests):
            self.engine.step()
            bad = next((r.left for r in requests if r.left is not None and r.left.how != "finished"), None)
            if bad is not None:
                raise UserError(
                    f"{self.setting.name}: a request of {requests[0].prompt_len} tokens failed: {bad.reason}"
                )

    def decode(self, new: int) -> tuple[float, float, float]:
        """`new` more tokens of every request. -> seconds and KV bytes read, of a step; layers that a row ran"""
        before, had = self.engine.counters.as_dict(), self.requests[0].n_out
        start = time.perf_counter()
        self._upto(self.requests, had + new)
        seconds = time.perf_counter() - start
        done = {name: value - before[name] for name, value in self.engine.counters.as_dict().items()}
        steps = done["emitted"] / len(self.requests)
        return seconds / steps, done["kv_bytes_read"] / steps, done["row_layers"] / done["rows"]

    def leave(self, forget: bool) -> None:
        for request in self.requests:
            self.engine.cancel(request)
        self.requests = []
        if forget:
            self.engine.forget_prefixes()


@dataclass
class Savers:
    """Settings against dense. `refused` holds those that could not run, with the reason; `groups`, by batch, who was
    alive together, dense in each: all at once where the KV budget holds them; `anew`, how many rounds did not count."""

    bench: Bench
    settings: Sequence[BenchSetting]
    load: BatchLoad
    limits: Limits
    base: Mapping[str, str] = field(default_factory=dict)  # verbs that every contender shares, dense too
    turns: list[SettingTurn] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    groups: dict[int, list[list[str]]] = field(default_factory=dict)
    anew: int = 0

    def run(
        self, prompts: Prompts, memory: Callable[[], float], tell: Callable[[int], object] = lambda done: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Measure everything. `memory` says at which rate memory is read now, in bytes per second; `tell` hears how
        many turns are done, `after` is called when a group is through."""
        self.load.check(self.bench.model)
        everybody, prompt = self._engines(), prompts(self.load.tokens)
        with torch.inference_mode():
            for batch in self.load.batches:
                ready = {name: one for name, one in everybody.items() if name not in self.refused}
                needs = {name: one.need(self.load, batch) for name, one in ready.items()}
                self.groups[batch] = together(needs, self.limits.budget)
                for number, names in enumerate(self.groups[batch]):
                    alive = [everybody[name] for name in names]
                    try:
                        able = [one for one in alive if self._enters(one, prompt, batch)]
                        for turn in self._rounds(able, batch, number, memory):
                            self.turns.append(turn)
                            tell(len(self.turns))
                    finally:
                        for one in alive:
                            one.leave(forget=len(self.groups[batch]) > 1)
                    after()

    def _enters(self, one: Resident, prompt: Sequence[int], batch: int) -> bool:
        """Have the prompts of a batch computed; False for one that cannot."""
        try:
            one.enter(prompt, batch, self.load.most)
        except UserError as error:
            if one.setting.name == DENSE:
                raise
            one.leave(forget=True)
            self.refused[one.setting.name] = str(error)
        return one.setting.name not in self.refused

    def _rounds(
        self, alive: Sequence[Resident], batch: int, group: int, memory: Callable[[], float]
    ) -> Iterator[SettingTurn]:
        for one in alive:
            one.decode(self.load.new)  # what is derived from the prompt is derived here
        spare, rate = self.load.rounds, memory()
        for number in range(self.load.rounds):
            while True:
                turns = [
                    SettingTurn(one.setting.name, batch, group, number, *one.decode(self.load.new), rate)
                    for one in order(alive, number)
                ]
                before, rate = rate, memory()
                if not spare or abs(rate - before) <= STEADY * before:
                    break
                spare, self.anew = spare - 1, self.anew + 1
            yield from turns

    def _engines(self) -> dict[str, Resident]:
        """One per setting, dense first. Dense must work; the others may refuse."""
        found: dict[str, Resident] = {}
        limits = Limits(self.limits.budget, max(self.load.batches), self.limits.prefix_cache)
        for setting in [BenchSetting(DENSE), *self.settings]:
            try:
                engine = self.bench.engine({**PROMPTS_FIRST, **self.base, **setting.verbs}, limits)
            except UserError as error:
                if setting.name == DENSE:
                    raise
                self.refused[setting.name] = str(error)
                continue
            if not isinstance(engine, Engine):
                raise UserError("savers are compared within one engine: leave --place out")
            found[setting.name] = Resident(setting, engine)
        return found


def together(needs: Mapping[str, int], budget: int) -> list[list[str]]:
    """Groups the settings that are alive at the same time: dense, and as many others as the budget holds beside it.
    Raises UserError where it does not hold dense and one other."""
    rest = [name for name in needs if name != DENSE]
    groups: list[list[str]] = []
    for name in rest:
        if needs[DENSE] + needs[name] > budget:
            raise UserError(
                f"dense and {name} need {needs[DENSE] + needs[name]:,} bytes of KV together, but the budget is "
                f"{budget:,}: raise --kv-bytes, or lower --tokens or --batch"
            )
        if not groups or sum(needs[one] for one in groups[-1]) + needs[name] > budget:
            groups.append([DENSE])
        groups[-1].append(name)
    return groups or [[DENSE]]
