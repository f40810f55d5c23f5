"""Which systems there are: the module name is the registry."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from phasewise.errors import UserError, near
from phasewise.reproduce import systems
from phasewise.reproduce.system import System


@cache
def names() -> list[str]:
    """The names of all systems, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(systems.__path__) if not m.name.startswith("_"))


def system(name: str) -> System:
    """The system called `name`. Raises UserError with near matches for an unknown one."""
    if name not in names():
        raise UserError(f"unknown system {name!r}. {near(name, names())}")
    found: System = importlib.import_module(f"{systems.__name__}.{name}").SYSTEM
    return found
