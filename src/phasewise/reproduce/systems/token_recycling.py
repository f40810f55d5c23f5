"""Token Recycling: what the model thought likely after a token is guessed when that token comes again."""

from __future__ import annotations

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads, stranger
from phasewise.reproduce.controls import RandomGuess
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing

NODES, VOCAB = 15, 4096


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


SYSTEM = System(
    title="Token Recycling",
    paper=Paper("Turning Trash into Treasure: Accelerating Inference of LLMs with Token Recycling", "2408.08696"),
    claim="a table of each token's likeliest successors, kept up to date by every judged row, drafts without a second "
    "model: 2.73 tokens per pass, 2.2 times the speed (Spec-Bench, Vicuna-7B, greedy, A100).",
    conditions=("a tree of 80 nodes, eight successors a token", "one request at a time, fp16",
                "the table shared by all requests"),
    method=Setting({"draft": f"token_recycling:scope=engine,nodes={NODES}"}, most=1),
    baseline=Setting(most=1),
    control=Setting(objects={"decode": Speculative(RandomGuess(NODES, VOCAB), Match())}, most=1),
    control_is="as many guesses drawn at random",
    line="successors seen before are the draft: 2.2 times as fast",
    promises=("cost", "time"),
    load=loads.answering("json", "arithmetic", "list", "copy", n=16),
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("rows of the head", "one per pass, and one per guess: what is learned comes from the pass that judges",
                lambda case: case.work.head_rows, lambda case: case.work.forwards + case.work.drafted),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.2),
        stranger.saved(passes, 1.2),
        Saving("passes per token", passes, "control", 1.2),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
        stranger.FASTER,
    ),
    note="The tree has 15 nodes, not 80: rows cost time on a CPU. Ranks are weighed by how often each was right, and "
    "prompts leave what follows what in the table, which the paper's begin without.",
)  # fmt: skip
