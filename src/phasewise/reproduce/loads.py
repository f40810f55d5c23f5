"""Loads that several systems are asked, and what of a run counts."""

from __future__ import annotations

from phasewise.ops import native
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Load
from phasewise.reproduce.workload import PromptSource

STREAMS = 4


def streams_and_prompts(*lengths: int, new: int = 64, least: int = 256) -> Load:
    """Four requests that write, and after some tokens of theirs prompts of these lengths, all at once."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        early = [LoadEntry(asked.code(32), asked.size(new, 24)) for _ in range(STREAMS)]
        return early + [LoadEntry(asked.code(asked.size(length, min(length, least))), 4, after=8) for length in lengths]

    return load


def arriving(*lengths: int, new: int, least: int = 64) -> Load:
    """Four requests that write, and prompts that come one after another, each after a further eighth of the tokens."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        tokens = asked.size(new, 24)
        early = [LoadEntry(asked.code(64), tokens) for _ in range(STREAMS)]
        late = [
            LoadEntry(asked.code(asked.size(length, least)), 6, after=max(1, tokens * (i + 1) // 8))
            for i, length in enumerate(lengths)
        ]
        return early + late

    return load


def lone(prompt: int, new: int, least: int = 256) -> Load:
    """One request."""
    return lambda asked: [LoadEntry(asked.code(asked.size(prompt, min(least, prompt))), new)]


def together(n: int, prompt: int, new: int, least: int = 256) -> Load:
    """A load of several requests at once."""
    return lambda asked: [LoadEntry(asked.code(asked.size(prompt, min(least, prompt))), new) for _ in range(n)]


def answering(*rows: str, n: int) -> Load:
    """Questions of these tasks, each as many tokens long as its right answer."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        return [LoadEntry(prompt, max(2, new)) for row in rows for prompt, new in asked.chats(row, asked.size(n, 3))]

    return load


def prompt_rows(case: Case) -> int:
    """The prompt rows of all requests."""
    return sum(len(entry.prompt) for entry in case.entries)


def halves_read() -> int:
    """The number of times that a token's scores and its attention together read keys or values: native steps find
    weights on their way, else keys are read once more."""
    return 3 if native.library() is None else 2


def paused(case: Case) -> int:
    """(stream, step) pairs in which a stream got no token."""
    return sum(step.streams - step.advanced for step in case.method.steps)


def held(run: PlayedRun) -> int:
    """The most bytes of committed KV after any step."""
    return max(step.kv for step in run.steps)


def longest_gap(run: PlayedRun) -> float:
    """Seconds between two tokens of a request that was there from the start, at most."""
    return max(gap for request in run.early for gap in request.trace.itl)


def late_first(run: PlayedRun) -> float:
    """Mean seconds to the first token of those that came later."""
    return _mean([request.trace.ttft for request in run.late])


def late_second(run: PlayedRun) -> float:
    """Mean seconds from the first token to the second of those that came later."""
    return _mean([request.trace.itl[0] for request in run.late])


def late_whole(run: PlayedRun) -> float:
    """Mean seconds to the end of those that came later."""
    traces = [request.trace for request in run.late]
    return _mean([None if trace.left is None else trace.left - trace.arrived for trace in traces])


def per_token(run: PlayedRun) -> float:
    """Seconds of the whole run per token."""
    return run.seconds / sum(map(len, run.outs))


def pace(run: PlayedRun) -> float:
    """Mean seconds per token after the first."""
    return _mean([request.trace.tpot for request in run.requests])


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
