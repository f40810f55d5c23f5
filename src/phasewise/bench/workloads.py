"""Workloads of an engine: lengths, arrivals and prompts. Everything is seeded, and no prompt comes twice."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import repeat
from pathlib import Path
from random import Random
from typing import ClassVar, Protocol

from phasewise.bench.blocks import Conversations, Mooncake, SharedBlocks, prompts_of
from phasewise.bench.prompts import Prompts
from phasewise.catalog import configure
from phasewise.errors import UserError, near
from phasewise.model.tokenizer import begun

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: when it arrives (seconds after the start), its prompt, and how many tokens it wants.

    The first `shared` tokens of the prompt are those of others too.
    """

    arrival: float
    prompt: list[int]
    new: int
    shared: int = 0


class Lengths(Protocol):
    """A source of lengths; `gaps` are the recorded seconds between arrivals, where there are any.

    `prefix` tokens come before every prompt, the same for all.
    """

    @property
    def prefix(self) -> int: ...

    def draw(self, rng: Random) -> Iterator[tuple[int, int]]:
        """(prompt tokens, new tokens) of one request after another."""
        ...

    def gaps(self) -> list[float] | None: ...


@dataclass(frozen=True)
class Fixed:
    """Every request alike."""

    prompt: int = 128
    new: int = 128
    prefix: ClassVar[int] = 0

    def draw(self, rng: Random) -> Iterator[tuple[int, int]]:
        return repeat((self.prompt, self.new))

    def gaps(self) -> None:
        return None


@dataclass(frozen=True)
class Shared:
    """A long beginning that all prompts share, as of a system prompt, and `prompt` tokens of each request's own."""

    prefix: int = 1024
    prompt: int = 32
    new: int = 128

    def draw(self, rng: Random) -> Iterator[tuple[int, int]]:
        return repeat((self.prompt, self.new))

    def gaps(self) -> None:
        return None


@dataclass(frozen=True)
class Lognormal:
    """Lengths as in chat traffic: many short ones, few long ones; defaults resemble ShareGPT conversations."""

    prompt: int = 120  # median
    spread: float = 0.9  # sigma of the prompts' logarithm
    longest: int = 1024
    new: int = 80
    new_spread: float = 0.7
    new_longest: int = 256
    prefix: ClassVar[int] = 0

    def draw(self, rng: Random) -> Iterator[tuple[int, int]]:
        while True:
            prompt = round(self.prompt * math.exp(self.spread * rng.gauss(0, 1)))
            new = round(self.new * math.exp(self.new_spread * rng.gauss(0, 1)))
            yield min(self.longest, max(16, prompt)), min(self.new_longest, max(8, new))

    def gaps(self) -> None:
        return None


@dataclass(frozen=True)
class RequestTrace:
    """Requests of a recorded service: a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens.

    `scale` shortens all lengths for a small machine; `start` is the first row taken. The file is read once.
    """

    path: str
    scale: float = 1.0
    start: int = 0
    prefix: ClassVar[int] = 0

    def draw(self, rng: Random) -> Iterator[tuple[int, int]]:
        for row in self._rows:
            yield tuple(max(1, round(int(row[name]) * self.scale)) for name in COLUMNS[1:])  # type: ignore[misc]

    def gaps(self) -> list[float]:
        return self._gaps

    @cached_property
    def _gaps(self) -> list[float]:
        times = [datetime.fromisoformat(row[COLUMNS[0]]) for row in self._rows]
        return [max(0.0, (b - a).total_seconds()) for a, b in zip(times, times[1:])]  # noqa: RUF007

    @cached_property
    def _rows(self) -> list[dict[str, str]]:
        try:
            with Path(self.path).expanduser().open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
                columns = reader.fieldnames or ()
        except OSError as error:
            raise UserError(f"the trace {self.path!r} cannot be read: {error.strerror}") from error
        missing = [name for name in COLUMNS if name not in columns]
        if missing:
            raise UserError(f"the trace {self.path!r} lacks the column {missing[0]}: it needs {', '.join(COLUMNS)}")
        if self.start >= len(rows):
            raise UserError(f"the trace {self.path!r} has {len(rows)} requests, none from start={self.start} on")
        return rows[self.start :]


KINDS: dict[str, type] = {
    "fixed": Fixed, "shared": Shared, "lognormal": Lognormal, "turns": Conversations, "trace": RequestTrace,
    "mooncake": Mooncake,
}  # fmt: skip
RECORDED = {"trace": "FILE.csv", "mooncake": "FILE.jsonl"}  # kinds that need a file, and have times of their own


def lengths(text: str) -> Lengths:
    """Lengths written as `fixed:prompt=128,new=64`, `lognormal` or `trace:path=FILE,scale=0.1`. Raises UserError."""
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise UserError(f"unknown workload {name!r}. {near(name, KINDS)}")
    knobs: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"workload {name}: {item!r} is not of the form knob=value")
        knobs[key] = value
    if name in RECORDED and "path" not in knobs:
        raise UserError(f"workload {name} needs a file: write {name}:path={RECORDED[name]}")
    made: Lengths = configure(KINDS[name], knobs, f"workload {name}")
    return made


def shares(shape: Lengths) -> bool:
    """True if prompts have something in common."""
    return shape.prefix > 0 or isinstance(shape, SharedBlocks)


def timed(
    shape: Lengths, n: int, *, rate: float | None = None, seed: int = 0, cv: float = 1.0
) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, new tokens) of `n` requests, a shared prefix apart.

    `rate` (requests/s): Poisson arrivals, or gamma ones where the gaps' standard deviation is `cv` times their mean;
    infinite: all at once; None: as recorded, else all at once. A recorded trace with a `rate` keeps its bursts and is
    stretched to that mean rate. Raises UserError if a trace holds fewer than `n` requests.
    """
    if rate is not None and not rate > 0:
        raise UserError(f"rate={rate:g} is not a rate: give requests per second above 0")
    if not 0 < cv < math.inf:
        raise UserError(f"cv={cv:g} is no spread of gaps: 1 is Poisson, below is steadier, above comes in bursts")
    rng = Random(seed)
    recorded = shape.gaps()
    sizes, gaps = [], []
    for size in shape.draw(rng):
        sizes.append(size)
        gaps.append(rng.expovariate(1.0) if cv == 1.0 else rng.gammavariate(1 / cv**2, cv**2))
        if len(sizes) == n:
            break
    else:
        raise UserError(f"the workload holds only {len(sizes)} requests, {n} were asked for: lower --requests")
    if recorded is not None:
        gaps, mean = recorded[: n - 1], sum(recorded[: n - 1]) / max(1, n - 1)
        stretch = 1.0 if rate is None else (0.0 if not mean else 1 / (rate * mean))
    else:
        stretch = 0.0 if rate is None else 1 / rate
    found, now = [], 0.0
    for (length, new), gap in zip(sizes, [*gaps, 0.0]):
        found.append((now, length, new))
        now += gap * stretch
    return found


def workload(
    shape: Lengths, n: int, prompts: Prompts, *, rate: float | None = None, seed: int = 0, cv: float = 1.0
) -> list[Shot]:
    """`n` requests with prompts, as `timed` says."""
    every = timed(shape, n, rate=rate, seed=seed, cv=cv)
    if isinstance(shape, SharedBlocks):
        return _of_blocks(shape, every, prompts)
    shared = prompts(shape.prefix) if shape.prefix else []
    own = prompts.piece if shared else prompts
    return [Shot(now, shared + own(length), new, len(shared)) for now, length, new in every]


def _of_blocks(shape: SharedBlocks, every: Sequence[tuple[float, int, int]], prompts: Prompts) -> list[Shot]:
    """Each block has a text of its own; the first one of a prompt begins as every text does."""
    texts: dict[int, list[int]] = {}

    def text(id: int) -> list[int]:
        if id not in texts:
            texts[id] = prompts.piece(shape.tokens_each)
        return texts[id]

    whole = [begun(tokens, prompts.begin)[: len(tokens)] for tokens in prompts_of(shape, len(every), text)]
    return [Shot(now, prompt, new) for (now, _, new), prompt in zip(every, whole)]


def fit(shots: Sequence[Shot], context: int, begin: Sequence[int] = ()) -> list[Shot]:
    """The same requests cut to a context length: first the prompt loses its beginning, then the output its end. What
    comes before every text, `begin`, stays."""
    fitted = []
    for shot in shots:
        new = min(shot.new, max(1, context // 2), context - 1)
        prompt = shot.prompt
        if len(prompt) > context - new:
            prompt = begun(prompt[new - context + len(begin) :], begin)
        fitted.append(Shot(shot.arrival, prompt, new, max(0, shot.shared - len(shot.prompt) + len(prompt))))
    return fitted
