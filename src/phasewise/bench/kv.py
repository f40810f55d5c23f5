"""Measures what KV methods cost in answers, over the bytes that they hold and read.

Every setting answers the same examples as dense. The bytes are counted in runs of their own: some of the very prompts
that its answers came from, drawn alike for all, each alone in its engine. What is counted does not depend on the
machine's speed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from phasewise import catalog
from phasewise.bench import machine, report
from phasewise.bench.drive import HeldKV, note
from phasewise.bench.judge import Judge
from phasewise.bench.rows import index
from phasewise.bench.settings import BenchSetting
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.options import DEFAULTS
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from phasewise.verbs.store import Storing

KEEPING = ("attend", "evict", "store", "skip")  # verbs whose methods keep less of the KV, or read less of it
CHANGING = "decode"  # a method of this one that declares a ladder makes a prompt's KV otherwise than by computing it
DENSE = "dense"
LOOKS = 8  # prompts of a task whose bytes are counted
SENDS = {"place": "disaggregated"}  # what a store whose rows travel in a form of their own needs to have any effect
Line = dict[str, Any]
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""A progress bar of this title and so many steps; it is told how many are done."""


# ---- who takes part
def every(most: int | None = None) -> list[BenchSetting]:
    """Every lossy method that concerns the KV, at each step of its ladder, or at `most` of them."""
    found = []
    for verb in (*KEEPING, CHANGING):
        for name in catalog.names(verb):
            if _concerns(verb, name) and catalog.method(verb, name).guarantee == "lossy":
                found += ladder(verb, name, most)
    return found


def _concerns(verb: str, name: str) -> bool:
    """True if a method changes what is kept or read of the KV."""
    if verb == CHANGING:
        return bool(catalog.method(verb, name).budgets)
    return verb in KEEPING and name != DEFAULTS[verb]


def chosen(texts: Sequence[str], most: int | None = None) -> list[BenchSetting]:
    """Settings from text, each once; a single method without knobs stands for its ladder. Raises UserError."""
    found: dict[str, BenchSetting] = {}
    for text in texts:
        setting = BenchSetting.parse(text)
        [(verb, method), *others] = setting.verbs.items()
        alone = not others and ":" not in method and _concerns(verb, method)
        for one in ladder(verb, method, most) if alone else [setting]:
            found.setdefault(one.name, one)
    return list(found.values())


def ladder(verb: str, name: str, most: int | None = None) -> list[BenchSetting]:
    """A method at each step of the ladder that it declares, or at `most` of them, spread evenly, the last included.
    Steps that differ in more than numbers (who shares rows out, weights or none) are ladders of their own."""
    method = catalog.method(verb, name)
    steps: Sequence[Mapping[str, object]] = method.budgets or ({},)
    if most is not None:
        kinds = [named(step) for step in steps]
        own = [[step for step, its in zip(steps, kinds, strict=True) if its == kind] for kind in report.unique(kinds)]
        kept = [step for some in own for step in _spread(some, min(most, len(some)))]
        steps = [step for step in steps if step in kept]
    beside = SENDS if verb == "store" and method.wire is not Storing.wire else {}  # rows travel in a form of their own
    found = []
    for knobs in steps:
        text = name + (":" + ",".join(f"{knob}={value}" for knob, value in knobs.items()) if knobs else "")
        found.append(BenchSetting(" ".join([f"{verb}={text}", *map("=".join, beside.items())]), {verb: text, **beside}))
    return found


def named(knobs: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Those of these knobs that are no numbers: they make another system of a method."""
    return tuple((knob, value) for knob, value in knobs.items() if not number(str(value)))


def number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _spread(some: Sequence[Mapping[str, object]], count: int) -> list[Mapping[str, object]]:
    return [some[round((i + 1) * len(some) / count) - 1] for i in range(count)]


# ---- bytes
@dataclass(frozen=True)
class Bytes:
    """Means over the prompts that were looked at. `live`: what a request held at its last token, of rows but those that
    it refers to in the prefix cache, and of what is kept beside them, None where its KV is out of sight; `read` and
    `layers`: KV bytes read for a token after the first, and layers run for a row of it; the others for a row of the
    prompt: KV bytes put down for another engine, KV bytes read (a slice of a prompt reads what is there once for all
    its rows), layers run."""

    live: float | None
    read: float
    layers: float
    sent: float
    prompt_read: float
    prompt_layers: float


def count(engine: Placed, jobs: Sequence[tuple[Sequence[int], int]]) -> Bytes:
    """Each prompt alone, followed by as many tokens as its answer may have had, at least two. Raises UserError if one
    fails."""
    seen = [_one(engine, prompt, max(2, new)) for prompt, new in jobs]
    live = [one.live for one in seen if one.live is not None]
    rest = {each.name: fmean(getattr(one, each.name) for one in seen) for each in fields(Bytes) if each.name != "live"}
    return Bytes(fmean(live) if len(live) == len(seen) else None, **rest)


@torch.inference_mode()
def _one(engine: Placed, prompt: Sequence[int], new: int) -> Bytes:
    engine.forget_prefixes()
    request, held = Request(prompt, Params(max_tokens=new, ignore_eos=True)), list[HeldKV]()
    request.watch = partial(note, request, held)
    start = copy.copy(engine.counters)
    engine.add(request)
    try:
        while request.left is None and not request.n_out:
            engine.step()
        first, had = copy.copy(engine.counters), request.n_out
        while request.left is None:
            engine.step()
    finally:
        engine.cancel(request)
    if request.left.how != "finished":
        raise UserError(f"a prompt of {len(prompt)} tokens failed: {request.left.reason}")
    before, after = first - start, engine.counters - first
    whole = engine.counters - start
    return Bytes(
        held[-1].live if held else None,
        after.kv_bytes_read / max(1, request.n_out - had),
        after.row_layers / max(1, after.rows),
        whole.kv_bytes_sent / len(prompt),
        before.kv_bytes_read / len(prompt),
        before.row_layers / len(prompt),
    )


def looks(asked: Sequence[tuple[list[int], int]], seed: int) -> list[tuple[list[int], int]]:
    """Those whose bytes are counted: the same for all who were asked the same."""
    rng = Random(f"bytes {seed}")
    return [asked[at] for at in sorted(rng.sample(range(len(asked)), min(LOOKS, len(asked))))]


# ---- everything
@dataclass
class KVBench:
    """Settings beside dense, on rows of `phasewise eval`. `base`: verbs that all share, dense too."""

    llm: LLM
    model: str  # its name in what is written
    settings: Sequence[BenchSetting]
    tasks: Sequence[str]
    examples: int
    seed: int = 0
    base: Mapping[str, str] = field(default_factory=dict)
    prompts: Path | None = None

    def about(self, setting: str, task: str) -> Line:
        """Identifies the examples of a line; it is equal in lines of the same measurement. `text` is what the
        examples are taken from, which another Python, or another file of the same name, has otherwise."""
        dtype = str(self.llm.model.dtype).removeprefix("torch.")
        return {"model": self.model, "dtype": dtype, "setting": setting, "task": task, "examples": self.examples,
                "seed": self.seed, "base": dict(self.base), "prompts": self.prompts and self.prompts.name,
                "text": index.text(task, self.prompts)}  # fmt: skip

    def known(self, lines: Sequence[Line]) -> list[Line]:
        """Those of `lines` that are measurements of this run, each once."""
        found = {}
        for line in lines:
            key = str(line.get("setting")), str(line.get("task"))
            if all(line.get(name, ...) == value for name, value in self.about(*key).items()):
                found[key] = line
        wanted = [(name, task) for name in (DENSE, *(one.name for one in self.settings)) for task in self.tasks]
        return [found[key] for key in wanted if key in found]

    def run(self, have: Sequence[Line], bar: Bar) -> Iterator[Line]:
        """A line for every measurement that is not among `have`, dense's first; one that is refused says why. Raises
        UserError where dense cannot be measured."""
        done = {(line["setting"], line["task"]) for line in self.known(have)}
        total, number = (1 + len(self.settings)) * len(self.tasks), len(done)
        for setting in [BenchSetting(DENSE), *self.settings]:
            missing = [task for task in self.tasks if (setting.name, task) not in done]
            judge: Judge | UserError | None = None
            for task in missing:
                number += 1
                if judge is None:
                    judge = self._judge(setting)
                with bar(f"{setting.name}: {task} ({number} of {total})", self.examples) as tell:
                    line = self._line(judge, task, tell)
                if setting.name == DENSE and "refused" in line:
                    raise UserError(f"{task}: {line['refused']}")
                yield self.about(setting.name, task) | line

    def _judge(self, setting: BenchSetting) -> Judge | UserError:
        try:
            return Judge(self.llm, {**self.base, **setting.verbs})
        except UserError as error:
            return error

    def _line(self, judge: Judge | UserError, task: str, tell: Callable[[int], None]) -> Line:
        if isinstance(judge, UserError):
            return {"refused": str(judge)}
        try:
            judge.measure(task, self.examples, self.seed, tell, self.prompts)
            counted = count(judge.engine, looks(judge.asked[task], self.seed))
        except UserError as error:
            return {"refused": str(error)}
        finally:
            judge.engine.forget_prefixes()
        found = judge.found[task][0]  # the first says it: the others are the same in other units, or a part of it
        about = {"values": found.values, "on": machine.where(self.llm.model.device)}
        return {**asdict(replace(found.row, name=task)), **about, **asdict(counted)}
