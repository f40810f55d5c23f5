"""SuffixDecoding: what has followed the end of the text before is guessed, likeliest first, and verified as a tree."""

from __future__ import annotations

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads, stranger
from phasewise.reproduce.controls import RandomGuess
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.systems.prompt_lookup import VOCAB, passes, repeating

NODES = 24


def method(scores: str) -> Setting:
    return Setting({"draft": f"suffix_decoding:nodes={NODES},scope=engine,scores={scores}"}, most=1)


METHOD, LOAD = method("frequency"), loads.answering("copy", "json", "passkey@256", n=16)


def choosy(lab: Lab) -> AttemptOutcome:
    """Compares the shares accepted of guesses by how often tokens followed and by which followed last."""
    found = {}
    for scores in ("frequency", "recency"):
        work = lab.play(method(scores), LOAD(lab.asked("pocket")), "pocket").work
        found[scores] = (work.accepted / work.drafted, work.forwards / work.emitted)
    (often, passes), (last, others) = found["frequency"], found["recency"]
    words = f"{often:.0%} against {last:.0%}, in {passes:.3f} against {others:.3f} passes per token"
    return AttemptOutcome(often > last, words)


SYSTEM = System(
    title="SuffixDecoding",
    paper=Paper("SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", "2411.04975"),
    claim="where agents repeat themselves, trees of what followed the same words, as large as they are sure, make "
    "answers up to 5.3 times as fast, and 1.9 times as fast as Token Recycling.",
    conditions=("Llama 3 8B and 70B on a GPU", "SWE-Bench and SQL written by agents",
                "suffix trees of the request and of earlier answers"),
    method=METHOD,
    baseline=Setting(most=1),
    control=Setting(objects={"decode": Speculative(RandomGuess(NODES, VOCAB), Match())}, most=1),
    control_is="as long guesses drawn at random",
    line="trees of what followed the same words: up to 5.3 times as fast where agents repeat themselves",
    promises=("cost", "time"),
    load=LOAD,
    rivals={"Token Recycling": Setting({"draft": f"token_recycling:scope=engine,nodes={NODES}"}, most=1)},
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("guesses verified", f"{NODES} nodes a pass after the prompts'", lambda case: case.work.drafted,
                lambda case: NODES * (case.work.forwards - len(case.entries)), bound="at most"),
        Counter("passes over 200 tokens that repeat the prompt", "ceil(200 / (nodes + 1)) + 5",
                lambda case: case.work.forwards, lambda case: -(-200 // (NODES + 1)) + 5, bound="at most",
                load=repeating),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        stranger.saved(passes, 1.5, stranger.about_texts),
        Saving("passes per token", passes, "rivals", 1.02),
        Saving("passes per token", passes, "control", 1.2),
    ),
    attempts=(
        Attempt("mechanism", "share of guesses that are right, ranked by frequency, against ranked by recency",
                "more", choosy),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
        stranger.FASTER_ABOUT,
    ),
    note="Earlier answers are searched beside the request's own text, as in the paper; smollm2 is asked twice about "
    "each of two texts. Token Recycling guesses as many tokens a pass. The padded model gives the same tokens at the "
    "price of 105 million weights, and its clock is the one that is judged; the small one, beside it, spends much of a "
    "pass on what no drafter saves.",
)  # fmt: skip
