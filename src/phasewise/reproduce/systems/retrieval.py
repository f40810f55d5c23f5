"""REST: what followed the same words in a datastore is guessed, and verified as a tree."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource

NODES = 16
METHOD = Setting({"draft": f"retrieval:nodes={NODES}"}, most=1)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def writing(asked: PromptSource) -> list[LoadEntry]:
    """Code of files that are in no datastore of the library, to go on with."""
    return [LoadEntry(asked.code(64), asked.size(64, 24)) for _ in range(asked.size(16, 6))]


SYSTEM = System(
    title="REST",
    paper=Paper("REST: Retrieval-Based Speculative Decoding", "2311.08252"),
    claim="continuations found in a datastore of code or chats, verified as a tree, make generation 1.62 to 2.36 times "
    "as fast, with no second model and no training.",
    conditions=("CodeLlama and Vicuna, 7B and 13B", "one request at a time",
                "HumanEval with 27 GB of code, MT-Bench with a datastore of chats"),
    method=METHOD,
    baseline=Setting(most=1),
    control=Setting({"draft": f"retrieval:nodes={NODES},store=random:0,shortest=1"}, most=1),
    control_is="the same search in a datastore of random tokens",
    line="continuations from a datastore: 1.62 to 2.36 times as fast",
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
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
    ),
    note="The datastore is the part of Python's library that the pocket model was trained on, 2.5 million tokens; the "
    "prompts are from files that are in neither. The padded model's clock is the one that is judged.",
)  # fmt: skip
