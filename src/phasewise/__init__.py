"""The doors: the offline API, options and what is built from them, the catalogue of methods, models by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise.version import __version__

if TYPE_CHECKING:
    from phasewise.llm import LLM
    from phasewise.request.params import Params

__all__ = ["LLM", "Params", "__version__"]


def __getattr__(name: str) -> object:
    """`LLM` and `Params`, imported when they are first asked for: the command's help needs no torch."""
    if name == "LLM":
        from phasewise.llm import LLM

        return LLM
    if name == "Params":
        from phasewise.request.params import Params

        return Params
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
