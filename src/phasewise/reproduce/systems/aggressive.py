"""Aggressive Decoding: an answer that edits a text is guessed to go on as the text does."""

from __future__ import annotations

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomGuess
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing

K, VOCAB = 63, 4096


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


SYSTEM = System(
    title="Aggressive Decoding (input-guided)",
    paper=Paper("Lossless Acceleration for Seq2seq Generation with Aggressive Decoding", "2205.10350"),
    claim="where an answer edits its source, the source itself is the draft: 7 to 9 times faster on grammar "
    "correction, with the very tokens of greedy decoding.",
    conditions=("an encoder-decoder of six layers trained to correct grammar", "one request at a time, on a GPU",
                "the source known by its place: here it is the whole prompt"),
    method=Setting({"draft": f"aggressive:k={K}"}, most=1),
    baseline=Setting(most=1),
    control=Setting(objects={"decode": Speculative(RandomGuess(K, VOCAB), Match())}, most=1),
    control_is="as long guesses drawn at random",
    line="the source of an edit is the draft: 7 to 9 times as fast",
    promises=("cost", "time"),
    load=loads.answering("copy", "edit", n=16),
    exact=True,
    missing=("the second drafter (GAD), which is a trained model",),
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "control", 1.2),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
    ),
)  # fmt: skip
