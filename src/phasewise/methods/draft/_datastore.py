"""Token texts that are searched, not scanned: a suffix array in files that are read where they lie."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.known.shelf import caches
from phasewise.methods.draft._continuations import NOTHING
from phasewise.model.source import Source
from phasewise.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from phasewise.model.model import Model

ORDERED = 16  # tokens by which suffixes are sorted: the longest match
TOKENS, ORDER, ABOUT = "tokens.npy", "order.npy", "datastore.json"
LIBRARY, RANDOM = "library", "random:"  # what a method's `store` may say besides a folder


class Datastore:
    """`tokens` int32 [n], texts one after the other, each followed by `NOTHING`; `order` int32 [n]: the places in them,
    sorted by the `ORDERED` tokens that begin there, equal ones as they stand."""

    def __init__(self, tokens: NDArray[np.int32], order: NDArray[np.int32]) -> None:
        self.tokens, self.order = tokens, order

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> Datastore:
        """Raises UserError where the texts hold nothing."""
        pieces = [np.asarray([*text, NOTHING], dtype=np.int32) for text in texts if len(text)]
        if not pieces:
            raise UserError("a datastore needs text, but none was found: name a folder with text files")
        tokens = np.concatenate(pieces)
        return cls(tokens, order(tokens))

    def find(self, text: Sequence[int], shortest: int, longest: int) -> tuple[int, NDArray[np.int32]]:
        """The length of the longest end of `text` that occurs here, and the places right after it.

        (0, none) where no end of `shortest` to `longest` (at most `ORDERED`) tokens does.
        """
        low, high, best = shortest, min(longest, len(text)), (0, self.order[:0])
        while low <= high:  # whoever has a long end has its shorter ones
            length = (low + high) // 2
            places = self._places(list(text[-length:]))
            if len(places):
                best, low = (length, places + np.int32(length)), length + 1
            else:
                high = length - 1
        return best

    def continuations(self, places: NDArray[np.int32], length: int) -> NDArray[np.int32]:
        """[places, length] tokens from each place on; `NOTHING` where its text has ended."""
        at = places[:, None] + np.arange(length)
        rows = self.tokens[np.minimum(at, len(self.tokens) - 1)]
        return np.where(np.logical_or.accumulate(rows == NOTHING, axis=1), np.int32(NOTHING), rows)

    def _places(self, wanted: list[int]) -> NDArray[np.int32]:
        def beginning(rank: int) -> list[int]:
            place = int(self.order[rank])
            found: list[int] = self.tokens[place : place + len(wanted)].tolist()
            return found

        ranks = range(len(self.order))
        first = bisect_left(ranks, wanted, key=beginning)
        return self.order[first : bisect_right(ranks, wanted, lo=first, key=beginning)]

    def save(self, folder: Path, vocabulary: str, about: str) -> None:
        """Write all at once into a folder that must be new or empty. Raises UserError naming it."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                np.save(made / TOKENS, self.tokens)
                np.save(made / ORDER, self.order)
                facts = {"vocabulary": vocabulary, "tokens": len(self.tokens), "ordered": ORDERED, "of": about}
                (made / ABOUT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
                made.chmod(0o755)
                os.replace(made, folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
        except OSError as error:
            raise UserError(f"{folder}: no datastore can be written there ({error}): name a new folder") from error


def order(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Places sorted by the `ORDERED` tokens that begin there (the end sorts before all), by doubling what is sorted."""
    rank = tokens.astype(np.int64) + 2
    base, done, sorted_by = max(int(rank.max()), len(rank)) + 2, 1, np.argsort(rank, kind="stable")
    while done < ORDERED:
        after = np.zeros_like(rank)
        after[:-done] = rank[done:]
        key = rank * base + after
        sorted_by = np.argsort(key, kind="stable")
        ranked = key[sorted_by]
        rank[sorted_by] = np.concatenate(([0], np.cumsum(ranked[1:] != ranked[:-1]))) + 1
        done *= 2
    return sorted_by.astype(np.int32)


def named(method: str, store: str, model: Model) -> Datastore:
    """Opens the `store` of a method: `library`, a folder, or `random:SEED`. Raises UserError naming the method."""
    if store == LIBRARY:
        return library(model.files)
    if not store.startswith(RANDOM):
        folder = Path(store).expanduser()
        if not folder.is_dir():
            raise UserError(f"{method}: store={store}: there is no such folder. Say {LIBRARY}, or make one with "
                            f"phasewise datastore {store}")  # fmt: skip
        return load(folder, model.files)
    seed = store.removeprefix(RANDOM)
    if not seed.isdecimal():
        raise UserError(f"{method}: store={store}: the seed must be a whole number, as in random:0")
    return random(model.config.vocab, int(seed))


def load(folder: Path, files: Source) -> Datastore:
    """The datastore of a folder, for a model. Raises UserError: not there, damaged, or of another tokenizer."""
    try:
        facts = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        tokens = np.load(folder / TOKENS, mmap_mode="r", allow_pickle=False)
        places = np.load(folder / ORDER, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise UserError(f"{folder}: {missing} is missing: make a datastore with phasewise datastore OUT") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no datastore can be read there ({error}): make it again") from error
    if facts.get("vocabulary") != vocabulary(files):
        raise UserError(
            f"{folder}: the datastore was made for another tokenizer than that of {files.path}: make one with "
            f"phasewise datastore OUT --model {files.path}"
        )
    if facts.get("ordered") != ORDERED or not len(tokens) == len(places) == facts.get("tokens"):
        raise UserError(f"{folder}: the datastore is damaged, or another version's: make it again")
    return Datastore(tokens, places)


def library(files: Source) -> Datastore:
    """A datastore of the training part of Python's own library, made once per tokenizer and kept where caches lie."""
    name = f"library-{sys.version_info.major}.{sys.version_info.minor}-{vocabulary(files)}"
    folder = caches() / "phasewise" / "datastores" / name
    if not (folder / ABOUT).is_file():
        made = encoded(files, list(sources(held_out=False).values()))
        try:
            made.save(folder, vocabulary(files), "Python's library")
        except UserError:
            if not (folder / ABOUT).is_file():  # else somebody else has just made it
                raise
    return load(folder, files)


def encoded(files: Source, texts: Sequence[str], done: Callable[[int], None] = lambda texts: None) -> Datastore:
    """A datastore of texts in a model's tokens; `done` is told how many of them have been encoded."""
    tokenizer, out = Tokenizer.load(files.path), list[Sequence[int]]()
    for n, text in enumerate(texts, 1):
        out.append(tokenizer.encode(text, add_special=False))
        done(n)
    return Datastore.of(out)


def random(vocab: int, seed: int) -> Datastore:
    """A datastore of random tokens: nothing that a model would say, but always something to find."""
    drawn = np.random.default_rng(seed).integers(0, vocab, (64, 256))
    return Datastore.of(drawn.tolist())


def vocabulary(files: Source) -> str:
    """The fingerprint of a tokenizer, 16 hexadecimal digits."""
    return hashlib.sha256(files.tokenizer().to_str().encode()).hexdigest()[:16]
