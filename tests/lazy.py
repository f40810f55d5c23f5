"""Modules of other projects that take long to import. Every test process collects all tests; only some run them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class lazy(ModuleType):
    """The module of this name, imported when a public member of it is first asked for: pytest asks everything that it
    collects for private ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)
