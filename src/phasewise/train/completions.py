"""Functions to complete, whose checker forgives wording: a right completion is valid Python and invents no name.

Many continuations of a function are right in this sense, so that two models may differ without either being wrong.
It says nothing about whether a function does what its name promises.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from phasewise.known.corpus import is_held_out, sources

LINES = 4  # of a function or class that are given
LONGEST = 600  # characters of them
JUDGING_ONE_IN = 8  # files
CUT = 2  # lines before the last whole one that may be the beginning of a statement without its end
HEAD = re.compile(r"[ \t]*(async def|def|class) \w+")
NAME = re.compile(r"[^\W\d]\w*")
BUILT_IN = frozenset(dir(builtins))


@dataclass(frozen=True)
class Completion:
    """The first lines of a function or class, without the end of the last line."""

    prompt: str

    def right(self, reply: str) -> bool:
        """True if the whole lines of prompt and reply parse, of the reply's at least one and up to `CUT` last ones
        left out, and what they read has a name in the prompt, in themselves, or in Python."""
        lines, given = (self.prompt + reply).split("\n")[:-1], self.prompt.count("\n") + 1
        for end in range(len(lines), max(given, len(lines) - CUT - 1), -1):
            tree = _parsed("\n".join(lines[:end]) + "\n")
            if tree is not None:
                return _read(tree) <= BUILT_IN | set(NAME.findall(self.prompt)) | _bound(tree)
        return False


def judging(name: str) -> bool:
    """True if the functions of the library's file of this name are for judging, and never mined."""
    return is_held_out(name) or hashlib.sha256(name.encode()).digest()[4] % JUDGING_ONE_IN == 0


@cache
def completions(evaluation: bool) -> tuple[Completion, ...]:
    """All that there are in one part of the library, each once, in the order of files; methods are moved to the left.
    Those for evaluation stand in no file that is mined."""
    texts = {**sources(held_out=False), **sources(held_out=True)}
    mined = dict.fromkeys(prompt for name, text in texts.items() if not judging(name) for prompt in _beginnings(text))
    if not evaluation:
        return tuple(map(Completion, mined))
    others = (prompt for name, text in texts.items() if judging(name) for prompt in _beginnings(text))
    return tuple(Completion(prompt) for prompt in dict.fromkeys(others) if prompt not in mined)


def drawn(count: int, seed: int, evaluation: bool) -> list[Completion]:
    """So many of a part, or all: for the same seed, the same ones first."""
    every = list(completions(evaluation))
    Random(f"{seed} completions {evaluation}").shuffle(every)
    return every[:count]


def _beginnings(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for at, line in enumerate(lines[:-LINES]):
        if not HEAD.match(line):
            continue
        margin = len(line) - len(line.lstrip())
        inner = lines[at + 1 : at + LINES + 1]  # of a body that goes on
        prompt = textwrap.dedent("\n".join(lines[at : at + LINES]))
        if all(not each or len(each) - len(each.lstrip()) > margin for each in inner) and len(prompt) <= LONGEST:
            yield prompt


def _parsed(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that mean nothing
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _read(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _bound(tree: ast.Module) -> set[str]:
    """Names that something in the text gives a meaning."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add((other or name).partition(".")[0])
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
    return found
