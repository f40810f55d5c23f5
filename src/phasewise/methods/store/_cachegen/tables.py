"""Symbol tables profiled once for a model: one for every channel of a layer's keys and values, similar ones shared.

A table that is sent along costs more than a short block of rows saves. So histograms of all channels are counted on a
calibration text, and grouped into `CLASSES` tables by how many bits a table costs a channel's symbols (k-means under
the Kullback-Leibler divergence). All symbols of one table are coded in one call, which is also what makes it quick.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phasewise.methods.store._cachegen.entropy import FREQUENCIES, Symbols, codes_of, histogram, library
from phasewise.methods.store._cachegen.rounding import LEVELS

CLASSES = 64
ALPHABET = 255  # symbols at most, in every table
ROUNDS = 12  # of k-means
Counts = npt.NDArray[np.int64]


def shapes(layers: int, width: int, group: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a profile; `width`: channels of a layer's keys, all heads together."""
    lines = layers * 2 * (1 if group == 1 else 2) * width
    found: dict[str, tuple[int, ...]] = {}
    for level in range(1, len(LEVELS) + 1):
        found |= {f"{level}.classes": (lines,), f"{level}.codes": (CLASSES, ALPHABET)}
    return found


def counted(streams: Sequence[Symbols]) -> Counts:
    """Histograms [lines, ALPHABET] of streams [C, T] of one block, one after another."""
    return np.concatenate([histogram(each, ALPHABET) for each in streams])


def grouped(counts: Counts) -> dict[str, Tensor]:
    """Counts [lines, ALPHABET] -> the class of each line, and the codes of each class's counts."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    spread = -(share * np.log2(np.maximum(share, 1e-12))).sum(1)
    ranks = np.argsort(np.argsort(spread, kind="stable"), kind="stable")
    classes = (ranks * CLASSES // max(1, len(counts))).astype(np.int64)  # to begin with, by their entropy
    for _ in range(ROUNDS):
        totals = np.zeros((CLASSES, ALPHABET))
        np.add.at(totals, classes, counts)
        tables = (totals + 0.05) / (totals + 0.05).sum(1, keepdims=True)
        classes = (counts @ -np.log2(tables).T).argmin(1)
    totals = np.zeros((CLASSES, ALPHABET), np.int64)
    np.add.at(totals, classes, counts)
    scaled = totals * 65_536 // np.maximum(totals.sum(1, keepdims=True), 1)
    return {"classes": torch.from_numpy(classes), "codes": torch.from_numpy(codes_of(scaled + 1))}


class SymbolTables:
    """The tables of a profile, by level. A symbol that calibration never met costs many bits and is still coded."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        numbers = {name: tensor.to(torch.uint8).cpu().numpy() for name, tensor in sorted(tensors.items())}
        self.form = hashlib.blake2b(b"".join(each.tobytes() for each in numbers.values()), digest_size=8).hexdigest()
        levels = range(1, len(LEVELS) + 1)
        self._classes = {level: numbers[f"{level}.classes"] for level in levels}
        self._tables = {level: FREQUENCIES[numbers[f"{level}.codes"]] for level in levels}
        self._order = lru_cache(maxsize=16)(self._sorted)

    def _sorted(self, level: int, shapes: tuple[tuple[int, int], ...]) -> tuple[Counts, Counts]:
        """Which symbols come first: those of class 0, and so on; and how many each class has."""
        rows = np.concatenate([np.full(channels, length) for channels, length in shapes])
        if len(rows) != len(self._classes[level]):
            raise ValueError(f"{len(rows)} channels, and tables for {len(self._classes[level])}")
        whose = np.repeat(self._classes[level], rows)
        return np.argsort(whose, kind="stable"), np.bincount(whose, minlength=CLASSES)

    def encode(self, level: int, streams: Sequence[Symbols]) -> bytes:
        """The symbols of streams [C, T], all of a block's, as little-endian words."""
        order, counts = self._order(level, tuple(each.shape for each in streams))
        values = np.concatenate([each.ravel() for each in streams])[order].astype(np.int32)
        coder, start = library().stream, 0
        encoder = coder.queue.RangeEncoder()
        for table, count in zip(self._tables[level], counts):
            if count:
                encoder.encode(values[start : start + count], coder.model.Categorical(table, perfect=False))
                start += count
        words: bytes = encoder.get_compressed().astype("<u4").tobytes()
        return words

    def decode(self, level: int, data: bytes, shapes: Sequence[tuple[int, int]]) -> list[Symbols]:
        """The streams of `encode`, given their (C, T). Raises ValueError for bytes that cannot be theirs."""
        order, counts = self._order(level, tuple(shapes))
        coder, found = library().stream, list[npt.NDArray[np.int32]]()
        try:
            decoder = coder.queue.RangeDecoder(np.frombuffer(data, dtype="<u4").astype(np.uint32))
            for table, count in zip(self._tables[level], counts):
                if count:
                    found.append(decoder.decode(coder.model.Categorical(table, perfect=False), int(count)))
        except AssertionError as error:
            raise ValueError(f"the message cannot be read: {error}") from error
        values = np.empty(len(order), np.uint8)
        values[order] = np.concatenate(found)
        cuts = np.cumsum([channels * length for channels, length in shapes])[:-1]
        return [each.reshape(shape) for each, shape in zip(np.split(values, cuts), shapes)]
