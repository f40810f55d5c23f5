"""Prompt lookup: what followed the last time is guessed, and verified."""

from __future__ import annotations

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads, stranger
from phasewise.reproduce.controls import RandomGuess
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource

K, VOCAB = 16, 4096
METHOD = Setting({"draft": f"prompt_lookup:k={K},min_match=1"}, most=1)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def repeating(asked: PromptSource) -> list[LoadEntry]:
    """A text of forty tokens of source, again and again: a model that copies goes on with it."""
    return [LoadEntry(asked.begun(asked.piece(40) * 6), 200)]


SYSTEM = System(
    title="Prompt lookup",
    paper=Paper("Prompt lookup decoding", where="github.com/apoorvumang/prompt-lookup-decoding"),
    claim="where answers repeat their prompts, copying what followed the last match is the cheapest drafter: 2.4 times "
    "faster on summaries and questions about a text.",
    conditions=("Mistral-7B-Instruct on one A100", "greedy, one request at a time",
                "CNN/DailyMail and questions in context"),
    method=METHOD,
    baseline=Setting(most=1),
    control=Setting(objects={"decode": Speculative(RandomGuess(K, VOCAB), Match())}, most=1),
    control_is="as long guesses drawn at random",
    line="what followed the last match is the draft: 2.4 times as fast where answers repeat prompts",
    promises=("cost", "time"),
    load=loads.answering("copy", "json", "passkey@256", n=16),
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("passes over 200 tokens that repeat the prompt", "ceil(200 / (k + 1)) + 5",
                lambda case: case.work.forwards, lambda case: -(-200 // (K + 1)) + 5, bound="at most", load=repeating),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        stranger.saved(passes, 1.5, stranger.about_texts),
        Saving("passes per token", passes, "control", 1.2),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
        stranger.FASTER_ABOUT,
    ),
    note="The padded model gives the same tokens at the price of 105 million weights, and its clock is the one that is "
    "judged; the small one, shown beside it, spends much of a pass on what no drafter saves. smollm2 is asked for "
    "summaries and main points of texts, as in the claim: answers to other questions repeat little.",
)  # fmt: skip
