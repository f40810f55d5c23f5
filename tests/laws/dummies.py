"""Methods made for a test, in the catalogue for as long as it lasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from phasewise import catalog

HERE: dict[tuple[str, str], type[Any]] = {}


def __getattr__(name: str) -> type[Any]:
    """What the catalogue looks up here: `verb_name`."""
    verb, _, method = name.partition("_")
    if (verb, method) not in HERE:
        raise AttributeError(name)
    return HERE[verb, method]


def register(monkeypatch: pytest.MonkeyPatch, methods: Mapping[tuple[str, str], type[Any]]) -> None:
    """Let these be discovered, by (verb, name), next to what is there."""
    real = catalog.names
    for key, cls in methods.items():
        monkeypatch.setitem(HERE, key, cls)

    def names(verb: str) -> dict[str, str]:
        ours = {name: f"{__name__}:{verb}_{name}" for of, name in methods if of == verb}
        return dict(sorted({**real(verb), **ours}.items()))

    monkeypatch.setattr(catalog, "names", names)
