"""How well to send each chunk of a request's KV, or to have it computed again: numbers only (DESIGN law 11).

What is known of the link, of the levels and of the model is measured on moves that are over; time comes from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Average:
    """A mean in which each new sample weighs `weight` and older ones less and less; None before the first."""

    weight: float = 0.3
    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + self.weight * (sample - self.value)


def choose(
    sizes: Sequence[Sequence[float]], recompute: Sequence[float], bandwidth: float, seconds: float
) -> list[int | None]:
    """The level of each chunk, in the order of their rows; None = not sent, to be computed again by the receiver.

    `sizes[i][l]` are the bytes of chunk i at level l, the best level first and the smallest last; `recompute[i]` the
    seconds to compute it from tokens; `bandwidth` is in bytes per second, and all is to be there within `seconds`.

    A chunk goes at the best level at which it and all that follow arrive in time. Only if not even the last level is
    fast enough, chunks are left out, as many as make the total shortest. They are a suffix: a row is computed from all
    rows before it, so whatever was sent behind a chunk left out would have to wait beside the KV until that is done.
    """
    if not sizes:
        return []
    transfer = np.asarray(sizes, dtype=float).reshape(len(sizes), -1) / bandwidth  # seconds, [chunks, levels]
    count, levels = transfer.shape
    sent = np.concatenate(([0.0], transfer[:, -1:].sum(1).cumsum()))  # seconds of the first c chunks, as fast as can be
    again = np.concatenate((np.cumsum(recompute[::-1])[::-1], [0.0]))  # seconds of all but the first c
    cut = count if sent[-1] <= seconds else count - int((sent + again)[::-1].argmin())
    left = seconds - again[cut]
    plan: list[int | None] = [None] * count
    for i in range(cut):
        rest = transfer[i:cut].sum(0)  # [levels]
        level = next((at for at in range(levels) if rest[at] <= left), levels - 1)
        plan[i], left = level, left - transfer[i, level]
    return plan


class VersionSpeeds:
    """What loads of stored blocks have learnt: bytes a second of where they lie, seconds to decode each version.

    `known`: bytes a second, if that is known.
    """

    def __init__(self, known: float | None = None) -> None:
        self.known = known
        self._byte = Average()  # seconds to read one: their mean follows a disk that becomes slow at once
        self._decoding: dict[int, Average] = {}

    @property
    def bandwidth(self) -> float | None:
        if self.known is not None or self._byte.value is None:
            return self.known
        return 1.0 / self._byte.value

    def took(self, version: int, n_bytes: int, reading: float, decoding: float) -> None:
        """A block was read and decoded in so many seconds."""
        if reading > 0 and n_bytes > 0:
            self._byte.add(reading / n_bytes)
        self._decoding.setdefault(version, Average()).add(decoding)

    def seconds(self, version: int, n_bytes: int, bandwidth: float) -> float:
        """Expected for one block; a version that nobody has decoded yet is taken to cost nothing but its way."""
        known = self._decoding.get(version)
        return n_bytes / bandwidth + (0.0 if known is None or known.value is None else known.value)


class LoadPacer:
    """The version of each block of one chain, chosen anew for every block from what the ones before it took: the best
    at which all that are left would be there `deadline` seconds after the first was asked for; else the smallest.

    A `BlockPacer`. Before anything has been measured it takes the middle one.
    """

    def __init__(self, speeds: VersionSpeeds, deadline: float) -> None:
        self._speeds, self._left, self._version = speeds, deadline, 0

    def choose(self, sizes: Sequence[int], left: int) -> int | None:
        bandwidth = self._speeds.bandwidth
        if bandwidth is None:
            self._version = len(sizes) // 2
        else:
            fits = (at for at, size in enumerate(sizes)
                    if left * self._speeds.seconds(at, size, bandwidth) <= self._left)  # fmt: skip
            self._version = next(fits, len(sizes) - 1)
        return self._version

    def took(self, n_bytes: int, reading: float, decoding: float) -> None:
        self._speeds.took(self._version, n_bytes, reading, decoding)
        self._left -= reading + decoding


class LinkPacer:
    """What a sender has learnt: bytes a second of its link, bytes a number at each level, seconds a row to compute.

    `guesses`: bytes a number at each level before any has been encoded. `bandwidth`: bytes a second, if it is known.
    """

    def __init__(self, guesses: Sequence[float], bandwidth: float | None = None) -> None:
        self.guesses = list(guesses)
        self.known = bandwidth
        self._bandwidth = Average()
        self._sizes = [Average() for _ in guesses]
        self._row = Average()

    @property
    def bandwidth(self) -> float | None:
        return self.known if self.known is not None else self._bandwidth.value

    def size(self, level: int) -> float:
        """Bytes a number is expected to take."""
        known = self._sizes[level].value
        return self.guesses[level] if known is None else known

    # ---- what has been measured
    def delivered(self, n_bytes: int, seconds: float) -> None:
        """The link has carried so many bytes in so long; a message that took no time says nothing."""
        if n_bytes > 0 and seconds > 0:
            self._bandwidth.add(n_bytes / seconds)

    def encoded(self, level: int, numbers: int, n_bytes: int) -> None:
        if numbers:
            self._sizes[level].add(n_bytes / numbers)

    def computed(self, rows: int, seconds: float) -> None:
        if rows > 0 and seconds > 0:
            self._row.add(seconds / rows)

    # ---- what follows
    def plan(self, rows: Sequence[int], numbers: Sequence[int], seconds: float, may_stop: bool) -> list[int | None]:
        """As `choose`, for chunks of so many rows and numbers. Before the link has been measured: the middle level.

        Nothing is left to be computed again unless `may_stop`, and the time that takes has been measured.
        """
        if self.bandwidth is None:
            return [len(self.guesses) // 2] * len(rows)
        sizes = [[n * self.size(level) for level in range(len(self.guesses))] for n in numbers]
        row = self._row.value if may_stop else None
        again = [float("inf") if row is None else n * row for n in rows]
        return choose(sizes, again, self.bandwidth, seconds)
