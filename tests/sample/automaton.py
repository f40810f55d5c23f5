"""Which tokens may follow, slow and obvious: a regular expression by its derivatives, a vocabulary token by token.

The states of the automaton are expressions; that after a byte is the derivative (Brzozowski, 1964). A token may follow
where the state after all its bytes still has a text, an end token where the empty text is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, reduce


@dataclass(frozen=True)
class Expr:
    """Of a kind: "none", "empty", "chars", "then", "or", "many". `none` is never within another one."""

    kind: str
    chars: frozenset[int] = frozenset()
    inner: tuple[Expr, ...] = ()

    @property
    def nullable(self) -> bool:
        if self.kind == "then":
            return all(each.nullable for each in self.inner)
        return self.kind in ("empty", "many") or (self.kind == "or" and any(each.nullable for each in self.inner))

    def text(self) -> str:
        """As a regular expression that others read."""
        if self.kind == "chars":
            return "[" + "".join(f"\\x{each:02x}" for each in sorted(self.chars)) + "]"
        if self.kind == "many":
            return f"({self.inner[0].text()})*"
        return "(" + ("|" if self.kind == "or" else "").join(each.text() for each in self.inner) + ")"


NONE, EMPTY = Expr("none"), Expr("empty")


def chars(some: Iterable[int]) -> Expr:
    return Expr("chars", frozenset(some))


def then(a: Expr, b: Expr) -> Expr:
    if NONE in (a, b):
        return NONE
    return b if a == EMPTY else a if b == EMPTY else Expr("then", inner=(a, b))


def either(a: Expr, b: Expr) -> Expr:
    if a in (NONE, b):
        return b
    return a if b == NONE else Expr("or", inner=(a, b))


def many(a: Expr) -> Expr:
    return a if a.kind in ("empty", "many") else Expr("many", inner=(a,))


@cache
def after(state: Expr, byte: int) -> Expr:
    """What may follow once this byte was read."""
    if state.kind == "chars":
        return EMPTY if byte in state.chars else NONE
    if state.kind == "or":
        return either(after(state.inner[0], byte), after(state.inner[1], byte))
    if state.kind == "many":
        return then(after(state.inner[0], byte), state)
    if state.kind == "then":
        first, second = state.inner
        later = after(second, byte) if first.nullable else NONE
        return either(then(after(first, byte), second), later)
    return NONE


def reached(state: Expr, text: bytes) -> Expr:
    return reduce(after, text, state)


def allowed(state: Expr, vocabulary: Sequence[bytes], ends: Iterable[int]) -> set[int]:
    """The tokens that may come next; tokens without text never do."""
    found = {i for i, text in enumerate(vocabulary) if text and reached(state, text) != NONE}
    return (found - set(ends)) | (set(ends) if state.nullable else set())
