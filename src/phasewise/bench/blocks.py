"""Workloads whose prompts begin alike: conversations of several turns, and Mooncake's traces (arXiv 2407.00079).

A prompt is a list of block ids. Prompts share the text of the blocks that their lists begin with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from phasewise.errors import UserError

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK = 512  # tokens of a block in these traces


class BlockRequest(NamedTuple):
    """One request: prompt tokens, new tokens, and the ids of the blocks that the prompt consists of."""

    length: int
    new: int
    ids: Sequence[int]


@runtime_checkable
class SharedBlocks(Protocol):
    """Lengths (`bench.workloads`) that know which blocks of `tokens_each` tokens their prompts consist of."""

    @property
    def tokens_each(self) -> int: ...

    def requests(self) -> Iterator[BlockRequest]:
        """One after another, in the order of `Lengths.draw`."""
        ...


def prompts_of(shape: SharedBlocks, n: int, text: Callable[[int], Sequence[int]]) -> list[list[int]]:
    """The prompts of the first `n` requests; `text`: the tokens of the block with this id."""
    found = []
    for request in islice(shape.requests(), n):
        tokens = [token for id in request.ids for token in text(id)]
        found.append(tokens[: request.length])
    return found


@dataclass(frozen=True)
class Conversations:
    """Conversations: `users` of them at a time, of `turns` requests each. A prompt is `system` tokens that all share,
    then all that was said before, then `prompt` tokens of its own; an answer has `new` tokens. Users ask by turns, in
    another order each time; then the next ones come."""

    users: int = 8
    turns: int = 4
    system: int = 128
    prompt: int = 64
    new: int = 32
    tokens_each: int = 16
    prefix: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name in ("users", "turns", "prompt", "new", "tokens_each"):
            if getattr(self, name) < 1:
                raise UserError(f"workload turns: {name}={getattr(self, name)} must be at least 1")
        if self.system < 0:
            raise UserError(f"workload turns: system={self.system} must not be negative (tokens)")

    def draw(self, rng: Random) -> Iterator[tuple[int, int]]:
        return ((request.length, request.new) for request in self.requests())

    def gaps(self) -> None:
        return None

    def requests(self) -> Iterator[BlockRequest]:
        for group in count():
            users = list(range(group * self.users, (group + 1) * self.users))
            for turn in range(self.turns):
                Random(f"turn {turn} of {group}").shuffle(users)
                length = self.system + turn * (self.prompt + self.new) + self.prompt
                yield from (BlockRequest(length, self.new, self._ids(user, length)) for user in users)

    def _ids(self, user: int, length: int) -> list[int]:
        """Those of the system prompt are everybody's, and the others one user's."""
        shared, most = self.system // self.tokens_each, -(-self._longest // self.tokens_each)
        return [i if i < shared else (user + 1) * most + i for i in range(-(-length // self.tokens_each))]

    @property
    def _longest(self) -> int:
        return self.system + self.turns * (self.prompt + self.new)


@dataclass(frozen=True)
class Mooncake:
    """A trace in Mooncake's format: JSON lines of timestamp (ms), input_length, output_length and hash_ids, one id for
    each 512 tokens. `scale` shortens all lengths, blocks included; `start` is the first line taken."""

    path: str
    scale: float = 1.0
    start: int = 0
    prefix: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 1.0 or self.start < 0:
            raise UserError(f"workload mooncake: scale={self.scale} must lie in (0, 1], and start={self.start} not be "
                            "negative")  # fmt: skip

    @property
    def tokens_each(self) -> int:
        return max(1, round(MOONCAKE_BLOCK * self.scale))

    def draw(self, rng: Random) -> Iterator[tuple[int, int]]:
        return ((request.length, request.new) for request in self.requests())

    def gaps(self) -> list[float]:
        times = [row["timestamp"] / 1e3 for row in self._rows]
        return [max(0.0, b - a) for a, b in zip(times, times[1:])]  # noqa: RUF007

    def requests(self) -> Iterator[BlockRequest]:
        for row in self._rows:
            most = len(row["hash_ids"]) * self.tokens_each
            length = min(most, max(1, round(row["input_length"] * self.scale)))
            yield BlockRequest(length, max(1, round(row["output_length"] * self.scale)), row["hash_ids"])

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        try:
            lines = Path(self.path).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the trace {self.path!r} cannot be read: {error}") from error
        rows = [_row(self.path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if self.start >= len(rows):
            raise UserError(f"the trace {self.path!r} has {len(rows)} requests, none from start={self.start} on")
        return rows[self.start :]


def _row(path: str, number: int, line: str) -> dict[str, Any]:
    """A line of a trace. Raises UserError naming what is wrong with it."""
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise UserError(f"the trace {path!r}, line {number}, is no JSON: {error}") from error
    missing = next((name for name in FIELDS if not isinstance(row, dict) or name not in row), None)
    if missing is not None:
        raise UserError(f"the trace {path!r}, line {number}, lacks {missing!r}: it needs {', '.join(FIELDS)}")
    ids, numbers = row["hash_ids"], [row[name] for name in FIELDS[:3]]
    right = isinstance(ids, list) and ids and all(type(id) is int and 0 <= id < 1 << 40 for id in ids)
    if not right or not all(type(each) in (int, float) and 0 <= each < 1e15 for each in numbers):
        raise UserError(f"the trace {path!r}, line {number}: timestamp and lengths are numbers that are not negative, "
                        "and hash_ids a list of whole ones below 2^40")  # fmt: skip
    return row
