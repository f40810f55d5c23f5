"""One of the servers behind the router: whether it answers, what it has to do, and what it has cached."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phasewise.serve.route.index import PrefixIndex

SHARED_FIRST = ("system", "instructions", "tools", "suffix")  # fields that a prompt begins with, as templates write it


@dataclass(eq=False)
class Upstream:
    """A server as the routing policy sees it (`cluster.policy.WorkerView`). Sizes are tokens where the router has the
    prompts as tokens, else bytes of their text. `hits`: of all sizes that were routed here, what was thought cached."""

    number: int
    url: str
    index: PrefixIndex = field(default_factory=PrefixIndex)
    up: bool = True
    prefilling: int = 0  # of prompts without a first byte of their answer
    decoding: int = 0  # of prompts whose answer is under way
    requests: int = 0
    failures: int = 0
    sizes: int = 0
    hits: int = 0

    role = "replica"

    def cached(self, tokens: Sequence[int]) -> int:
        return self.index.cached(tokens)

    def lost(self) -> None:
        """It does not answer. What it had cached is gone if it was restarted."""
        self.up = False
        self.failures += 1
        self.index.clear()


class Visit:
    """The load that one request is to a server, from when it is sent until its answer has ended."""

    def __init__(self, upstream: Upstream, prompt: Sequence[int]) -> None:
        self._upstream, self._prompt = upstream, prompt
        self._size, self._state = len(prompt), "prefilling"
        upstream.requests += 1
        upstream.sizes += self._size
        upstream.hits += upstream.cached(prompt)
        upstream.prefilling += self._size

    def answered(self, good: bool) -> None:
        """The head of its answer is there; `good`: the prompt was computed, or will be."""
        self._upstream.prefilling -= self._size
        self._upstream.decoding += self._size
        self._state = "decoding"
        if good:
            self._upstream.index.remember(self._prompt)

    def over(self) -> None:
        """Its answer has ended, or nobody waits for it any more."""
        if self._state:
            setattr(self._upstream, self._state, getattr(self._upstream, self._state) - self._size)
        self._state = ""


def text_of(body: Mapping[str, Any]) -> Sequence[int]:
    """What a request's prompt begins with, to compare it with others: token ids where it has them, else bytes."""
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], Mapping):
        first = prompt[0]
        if all(type(token) is int and abs(token) < 1 << 62 for token in (first if isinstance(first, list) else prompt)):
            return list(first if isinstance(first, list) else prompt)
        prompt = first
    parts: list[Any] = [body.get(name) for name in SHARED_FIRST]
    messages = body.get("messages") if body.get("messages") is not None else prompt
    parts += messages if isinstance(messages, list) else [messages]
    said = [part if isinstance(part, str) else json.dumps(part, sort_keys=True) for part in parts if part is not None]
    return "\n".join(said).encode("utf-8", "surrogatepass")
