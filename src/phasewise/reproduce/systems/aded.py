"""ADED: a table of what follows two tokens, adapted to the text with every verdict, and a search of it for a tree."""

from __future__ import annotations

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomGuess
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource

NODES, VOCAB = 24, 4096


def drafting(**knobs: object) -> Setting:
    told = "".join(f",{knob}={value}" for knob, value in knobs.items())
    return Setting({"draft": f"aded:nodes={NODES}{told}"}, most=1)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def writing(asked: PromptSource) -> list[LoadEntry]:
    """Code of files that are in no corpus of the table, to go on with."""
    return [LoadEntry(asked.code(64), asked.size(64, 24)) for _ in range(asked.size(16, 6))]


def _spent(lab: Lab, setting: Setting) -> int:
    return lab.play(setting, writing(lab.asked("pocket")), "pocket").work.forwards


def adapted(lab: Lab) -> AttemptOutcome:
    """The corpus alone, and the text alone: a table of random tokens that adapts."""
    both, corpus, text = (_spent(lab, drafting(**knobs)) for knobs in ({}, {"step": 0}, {"store": "random:0"}))
    words = f"{both:,} passes; the corpus alone {corpus:,}, the text alone {text:,}"
    return AttemptOutcome(both < min(corpus, text), words)


def searched(lab: Lab) -> AttemptOutcome:
    heap, walks = _spent(lab, drafting()), _spent(lab, drafting(mode="mcts"))
    return AttemptOutcome(heap <= 1.02 * walks, f"{heap:,} passes, {walks:,} by the paper's search")


SYSTEM = System(
    title="ADED",
    paper=Paper("Adaptive Draft-Verification for Efficient Large Language Model Decoding", "2407.12021"),
    claim="a table of trigrams that adapts while it drafts, searched for the tree that balances what is likely with "
    "what is untried, makes decoding up to 2.5 times as fast without a second model or training.",
    conditions=("trigrams of Python files (The Stack) and of chats (UltraChat)", "HumanEval, MT-Bench and Alpaca",
                "150 rounds of Monte Carlo tree search a draft", "one table, shared by all requests"),
    method=drafting(),
    baseline=Setting(most=1),
    control=Setting(objects={"decode": Speculative(RandomGuess(NODES, VOCAB), Match())}, most=1),
    control_is="as many guesses drawn at random",
    line="a table of trigrams that adapts, searched for a tree: up to 2.5 times as fast",
    promises=("cost", "time"),
    load=writing,
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("guesses verified", f"{NODES} nodes a pass after the prompts'", lambda case: case.work.drafted,
                lambda case: NODES * (case.work.forwards - len(case.entries)), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.2),
        Saving("passes per token", passes, "control", 1.2),
    ),
    attempts=(
        Attempt("cost", "the corpus and the text, each without the other", "more passes than both together", adapted),
        Attempt("mechanism", "best first instead of the paper's search", "at most 102% of its passes", searched),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
    ),
    note="The method is timed with the heap, whose guesses are three in four those of the search, and with a table for "
    "each request. The corpus is the part of Python's library that the pocket model was trained on, the prompts are "
    "from files that are not in it. The padded model's clock is the one that is judged.",
)  # fmt: skip
