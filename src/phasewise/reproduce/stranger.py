"""The model that nobody here has trained: what drafters save there, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable

from phasewise.reproduce import loads
from phasewise.reproduce.headroom import stranger_chat
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Saving, Timing
from phasewise.reproduce.workload import STRANGER, PromptSource

QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a cat and a dog.",
    "List the planets of the solar system with one fact about each.",
    "How do I make a simple soup from vegetables?",
)


def asking(asked: PromptSource) -> list[LoadEntry]:
    """Everyday questions through its chat template."""
    some = QUESTIONS[: asked.size(len(QUESTIONS))]
    return [LoadEntry(stranger_chat(question), asked.size(96, 16)) for question in some]


def shorter(asked: PromptSource) -> list[LoadEntry]:
    """Half of them, as far as a clock needs."""
    return [LoadEntry(stranger_chat(question), asked.size(48, 8)) for question in QUESTIONS[:2]]


def saved(passes: Callable[[Case, PlayedRun], float], least: float) -> Saving:
    """Passes per token there against plain decoding, as on the pocket model."""
    return Saving("passes per token", passes, "baseline", least, load=asking, model=STRANGER)


FASTER = Timing(f"time per token, {STRANGER}", 1.0, loads.pace, load=shorter, model=STRANGER)
