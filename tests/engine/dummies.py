"""Methods made of methods, found as another package's would be: through the entry points of `phasewise.methods`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal
from unittest.mock import patch

from phasewise import catalog
from phasewise.catalog import part
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Chain:
    """A part with one knob."""

    depth: int = 2


@dataclass(frozen=True)
class Tree:
    """A part that holds another of its kind, a chain of 5 unless told otherwise."""

    width: float = 1.5
    below: Any = part("draft.shape", "chain:depth=5")


@dataclass(frozen=True)
class Deep:
    """A part whose default has knobs at every depth."""

    inner: Any = part("draft.shape", "tree:width=2,below=(tree:width=3,below=(chain:depth=9))")


@dataclass(frozen=True)
class Simple(Method):
    """A method with a knob of every type."""

    n: int = 4
    x: float = 0.5
    word: str = "pocket"
    on: bool = True
    mode: Literal["low", "high", "none"] = "low"
    maybe: int | None = None
    name: str | None = None
    either: int | str = 7
    traits: ClassVar[Traits] = Traits("draft")


@dataclass(frozen=True)
class Mixed(Method):
    """A method that holds two methods of its own verb, one of them without default, and a part."""

    source: Any = part("draft")
    base: Any = part("draft", "simple:n=6")
    shape: Any = part("draft.shape", "tree")
    k: int = 1
    traits: ClassVar[Traits] = Traits("draft")


METHODS = {
    "draft.simple": Simple,
    "draft.mixed": Mixed,
    "draft.shape.chain": Chain,
    "draft.shape.tree": Tree,
    "draft.shape.deep": Deep,
}


@contextmanager
def installed(methods: dict[str, type[Any]] | None = None) -> Iterator[None]:
    """These methods, {kind.name: class of a module}, are in the catalogue besides the built-in ones."""
    found = [
        EntryPoint(name, f"{cls.__module__}:{cls.__qualname__}", "phasewise.methods")
        for name, cls in (METHODS if methods is None else methods).items()
    ]
    with patch.object(catalog, "entry_points", lambda group: found):
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    catalog._installed.cache_clear()
    catalog.names.cache_clear()
    catalog.folders.cache_clear()
