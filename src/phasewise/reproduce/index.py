"""Which systems there are: the module name is the registry."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

from phasewise import catalog
from phasewise.errors import UserError, near
from phasewise.reproduce import systems
from phasewise.reproduce.system import System
from phasewise.version import __version__

RULE = ("verdict", "system", "runner", "clock", "grading", "answers", "headroom", "panel", "play")


METHODS = "phasewise.methods."
IMPORTED = re.compile(r"^from (phasewise\.methods\.[\w.]+) import", re.MULTILINE)


@cache
def names() -> list[str]:
    """The names of all systems, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(systems.__path__) if not m.name.startswith("_"))


def titles() -> list[str]:
    """The titles of all systems, in the order of their names."""
    return [system(name).title for name in names()]


def digest(name: str) -> str:
    """What a verdict on a system follows from: its file, its contenders' methods with what these import of other
    methods, the rule, what measures, and the version of phasewise. Comments and docstrings do not count.

    A report of another digest is not of today's.
    """
    return _digest([Path(systems.__path__[0]) / f"{name}.py", *_rule(), *methods(system(name))])


def rule() -> str:
    """What every verdict follows from: the rule, what measures, and the version of phasewise."""
    return _digest(_rule())


def _rule() -> list[Path]:
    return [Path(__file__).with_name(f"{each}.py") for each in RULE]


def _digest(files: list[Path]) -> str:
    found = hashlib.sha256(__version__.encode())
    for file in files:
        found.update(code(file.read_text(encoding="utf-8")).encode())
    return found.hexdigest()[:16]


@cache
def code(text: str) -> str:
    """What Python makes of a file, without its comments, its layout and its docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        match body:
            case [ast.Expr(ast.Constant(str())), *rest]:  # a text that stands alone does nothing
                body[:] = rest
    return ast.unparse(tree)


def methods(one: System) -> list[Path]:
    """The files of the methods that a system's contenders name, and of the methods' own modules that these import."""
    verbs = {(verb, text.partition(":")[0]) for who in one.contenders.values() for verb, text in who.verbs.items()}
    left = [catalog.method(verb, name).__module__ for verb, name in verbs]
    found = dict[str, Path]()
    while left:
        module = left.pop()
        if module in found or not module.startswith(METHODS):
            continue
        found[module] = file = Path(inspect.getfile(importlib.import_module(module)))
        left += IMPORTED.findall(file.read_text(encoding="utf-8"))
    return [found[module] for module in sorted(found)]


def system(name: str) -> System:
    """The system called `name`. Raises UserError with near matches for an unknown one."""
    if name not in names():
        raise UserError(f"unknown system {name!r}. {near(name, names())}")
    found: System = importlib.import_module(f"{systems.__name__}.{name}").SYSTEM
    return found
