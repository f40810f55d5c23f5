"""Limits of a key: requests and tokens per minute, each a token bucket, and requests at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from phasewise.serve.failures import ApiError
from phasewise.serve.guard.policy import UNLIMITED, Caps

Clock = Callable[[], float]
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Key:
    """One client: its name, the SHA-256 of its keys (the old one beside the new while it changes), what it may use.
    None: as much as there is."""

    name: str
    digests: tuple[bytes, ...]
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    caps: Caps = UNLIMITED
    models: tuple[str, ...] | None = None
    metrics: bool = False  # whether it may read /metrics
    loras: bool = False  # whether it may load and unload adapters
    priority: int = 0  # of its requests, before what they ask for themselves


class Bucket:
    """Full at first, filled evenly with `size` per minute, never fuller than that. What an answer took beyond what was
    reserved for it leaves a debt, which the next one waits for."""

    def __init__(self, size: int, clock: Clock) -> None:
        self.size, self._clock = size, clock
        self._level, self._at = float(size), clock()

    @property
    def level(self) -> float:
        """The amount that can be taken now; below 0 the key is in debt."""
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._at) * self.size / MINUTE)
        self._at = now
        return self._level

    def take(self, amount: int) -> None:
        """Take so much, whether it is there or not; what is negative is given back."""
        self._level = min(self.size, self.level - amount)

    def wait(self, amount: int) -> float:
        """Seconds until so much can be taken."""
        return max(0.0, (amount - self.level) * MINUTE / self.size)

    @property
    def full(self) -> float:
        """Seconds until it is full, if nothing more is taken."""
        return self.wait(self.size)

    def resized(self, size: int) -> Bucket:
        """One of another size from which as much is missing."""
        other = Bucket(size, self._clock)
        other.take(round(self.size - self.level))
        return other


class Quota:
    """A key's use of what it may use. Refusals are ApiErrors 429 that say when to try again, and take nothing."""

    def __init__(self, key: Key, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.running = 0  # requests whose answer is under way, or whose sequences the engine still has
        self.used: Counter[str] = Counter()  # requests, and tokens by `prompt` and `output`, since the start
        self.refused: Counter[str] = Counter()  # by what was used up
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.change(key)

    def change(self, key: Key) -> None:
        """Other limits from now on; what has been used stays used."""
        self.key = key
        self.requests = self._bucket(self.requests, key.requests_per_minute)
        self.tokens = self._bucket(self.tokens, key.tokens_per_minute)

    def _bucket(self, old: Bucket | None, size: int | None) -> Bucket | None:
        if size is None:
            return None
        return Bucket(size, self._clock) if old is None else old.resized(size)

    def enter(self) -> None:
        """A request comes. Whoever is let in must `leave`."""
        most = self.key.concurrent
        if most is not None and self.running >= most:
            raise self._refusal("concurrent", f"has {self.running} requests under way, as many as it may", 1.0)
        if self.requests is not None and (wait := self.requests.wait(1)) > 0:
            raise self._refusal("requests", f"may send {self.requests.size} requests per minute", wait)
        if self.requests is not None:
            self.requests.take(1)
        self.used["requests"] += 1
        self.running += 1

    def leave(self, reserved: int, prompt: int, output: int) -> None:
        """A request has ended: of the tokens reserved for it, those it did not use are given back."""
        self.running -= 1
        self.note(prompt, output)
        if self.tokens is not None:
            self.tokens.take(prompt + output - reserved)

    def note(self, prompt: int, output: int) -> None:
        """Tokens of a request outside of the limits."""
        self.used["prompt"] += prompt
        self.used["output"] += output

    def reserve(self, tokens: int) -> None:
        """Take the tokens of a request that is about to run."""
        if self.tokens is None:
            return
        if tokens > self.tokens.size:
            raise ApiError(
                400, f"this asks for up to {tokens} tokens at once, but the key {self.key.name!r} may use "
                f"{self.tokens.size} per minute: shorten the prompt, or lower max_tokens or n", code="request_too_large"
            )  # fmt: skip
        if (wait := self.tokens.wait(tokens)) > 0:
            raise self._refusal("tokens", f"may use {self.tokens.size} tokens per minute; {tokens} are asked for", wait)
        self.tokens.take(tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The rest of the limits as OpenAI's clients read it."""
        found = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                values = ("limit", str(bucket.size)), ("remaining", str(max(0, int(bucket.level))))
                for what, value in (*values, ("reset", f"{bucket.full:.3f}s")):
                    found.append((f"x-ratelimit-{what}-{name}".encode(), value.encode()))
        return found

    def _refusal(self, limit: str, why: str, wait: float) -> ApiError:
        self.refused[limit] += 1
        when = "when one has ended" if limit == "concurrent" else f"in {wait:.1f} s"
        return ApiError(429, f"the key {self.key.name!r} {why}: try again {when}", code="rate_limit_exceeded",
                        retry=wait)  # fmt: skip
