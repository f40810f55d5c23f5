"""The model that nobody here has trained: what drafters save there, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable

from phasewise.bench.rows.longtext import chapters
from phasewise.reproduce import loads
from phasewise.reproduce.headroom import stranger_chat
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Load, Saving, Timing
from phasewise.reproduce.workload import STRANGER, PromptSource

QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a cat and a dog.",
    "List the planets of the solar system with one fact about each.",
    "How do I make a simple soup from vegetables?",
)


ABOUT = ("Summarize this text.", "List the main points of this text.")
SHORT, LONG = 900, 1600  # characters of a text that is asked about


def asking(asked: PromptSource) -> list[LoadEntry]:
    """Everyday questions through its chat template."""
    some = QUESTIONS[: asked.size(len(QUESTIONS))]
    return [LoadEntry(stranger_chat(question), asked.size(96, 16)) for question in some]


def about_texts(asked: PromptSource) -> list[LoadEntry]:
    """Two questions about each of two chapters of the language reference: answers repeat what the prompt says."""
    texts = [text for text in chapters() if SHORT <= len(text) <= LONG][:2]
    said = [f"{question}\n\n{text}" for text in texts for question in ABOUT]
    return [LoadEntry(stranger_chat(each), asked.size(96, 16)) for each in said[: asked.size(len(said))]]


def shorter(asked: PromptSource) -> list[LoadEntry]:
    """Half of them, as far as a clock needs."""
    return [LoadEntry(stranger_chat(question), asked.size(48, 8)) for question in QUESTIONS[:2]]


def saved(passes: Callable[[Case, PlayedRun], float], least: float, load: Load = asking) -> Saving:
    """Passes per token there against plain decoding, as on the pocket model."""
    return Saving("passes per token", passes, "baseline", least, load=load, model=STRANGER)


FASTER_ABOUT = Timing(f"time per token of answers about texts, {STRANGER}", 1.0, loads.pace, load=about_texts,
                      model=STRANGER)  # fmt: skip
FASTER = Timing(f"time per token, {STRANGER}", 1.0, loads.pace, load=shorter, model=STRANGER)
