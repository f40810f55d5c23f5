"""PIE: an edit of a text moves the keys of what follows it, and computes the new tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from phasewise.bench.stats import means
from phasewise.methods.decode.pie import Editing, Pie
from phasewise.reproduce import loads
from phasewise.reproduce.answers import edited
from phasewise.reproduce.controls import Control
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Counter,
    KnobRatio,
    Load,
    Paper,
    Quality,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import STRANGER, PromptSource
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

LENGTH, FRESH, GONE, NEW = 1500, 48, 24, 8
METHOD, BASELINE = Setting({"decode": "pie"}), Setting(prefix_cache=True)
REPAIRS = (0, 16, 64)
CODE = Quality(("code",), allowed=0.05, examples=40, window=512, edited=32)
LONGER = Quality(("code",), allowed=0.05, examples=12, window=1024, edited=32, model=STRANGER)


@dataclass(frozen=True)
class Unturned(Control):
    """decode: the same rows, and the keys of those that moved stay turned as they were."""

    of: Pie

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Editing:
        return _Unturned(self.of, host)


class _Unturned(Editing):
    def moved(self, layer: int, k: Tensor, v: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        return k, v


def edits(*at: float) -> Load:
    """A text, and then the same with some tokens instead of fewer others, at these places."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        length = asked.size(LENGTH, 256)
        text, now, last = asked.code(length), list[int](), 0
        for place in (int(length * share) for share in at):
            now += text[last:place] + asked.piece(FRESH)
            last = place + GONE
        return [LoadEntry(text, 1), LoadEntry(now + text[last:], NEW, after=1, edits=0)]

    return load


def rows(run: PlayedRun) -> int:
    """Rows run for the edited text."""
    return run.work.rows - len(run.entries[0].prompt)


def turns_back(lab: Lab) -> AttemptOutcome:
    """Keys turned there and back again, in float32: how far they are from what they were."""
    model = lab.model("pocket", "float32")
    gen = torch.Generator().manual_seed(lab.scale.seed)
    k = torch.randn(model.config.kv_heads, 64, model.config.head_dim, generator=gen)
    off = max(float((model.rotate(i, model.rotate(i, k, -700), 700) - k).abs().max()) for i in (0, 1))
    return AttemptOutcome(off < 1e-4, f"at most {off:.1e} off")


def with_repair(lab: Lab) -> AttemptOutcome:
    """How far the loss behind an edit is from that of a recomputed text, either way, as more of what follows the edit
    is computed again: perfect repair is no distance at all."""
    n = lab.scale.examples or (6 if lab.scale.quick else CODE.examples)
    dense = edited(lab, BASELINE, CODE, n)
    each = [edited(lab, Setting({"decode": f"pie:repair={c}"}), CODE, n) for c in REPAIRS]
    return nearer([[abs(mine - its) for mine, its in zip(one, dense)] for one in each])


def nearer(far: Sequence[Sequence[float]]) -> AttemptOutcome:
    """Checks that the distances of the last lot are smaller than those of the first, for certain."""
    shrunk = means(far[0], far[-1])
    said = ", ".join(f"repair={c}: {fmean(each):.4f} nats" for c, each in zip(REPAIRS, far))
    return AttemptOutcome(shrunk.low > 0, f"{said}; nearer by {shrunk.text(False)}")


def forms(*at: float) -> tuple[Counter, ...]:
    """Counters of edits at so many places."""
    words = "one edit" if len(at) == 1 else f"{len(at)} edits"

    def kept(entries: Sequence[LoadEntry]) -> int:
        return len(entries[1].prompt) - len(at) * FRESH - 1

    return (
        Counter(f"rows for {words}", "new tokens + 1, and one for each token after the first",
                lambda case: rows(case.method), lambda case: len(at) * FRESH + 1 + NEW - 1, load=edits(*at)),
        Counter(f"rows taken for {words}", "all others of the prompt",
                lambda case: case.work.recalled, lambda case: kept(case.entries), load=edits(*at)),
    )  # fmt: skip


UNTURNED = Setting(objects={"decode": Unturned(Pie())})
SYSTEM = System(
    title="PIE",
    paper=Paper("Let the Code LLM Edit Itself When You Edit the Code", "2407.03157"),
    claim="after an edit the keys of what follows it are turned to their new places instead of computed again: over "
    "85 % of the work is saved, and code is completed as well as with all of it.",
    conditions=("DeepSeek-Coder 1.3B, 6.7B and 33B on RepoBench-C-8k", "insertion, deletion and edits in many places",
                "A100"),
    method=METHOD,
    baseline=BASELINE,
    control=UNTURNED,
    control_is="the same rows in the same places, their keys turned as they were before the edit",
    line="after an edit keys are turned, not computed: 85 % of the work saved, code completed as well",
    promises=("answers", "cost", "time"),
    load=edits(0.25),
    missing=("completions judged as RepoBench judges them",),
    counters=(*forms(0.25), *forms(0.1, 0.5, 0.8)),
    arithmetic=(KnobRatio("rows run for the edited text", lambda case, run: rows(run)),),
    quality=(CODE, LONGER),
    attempts=(
        Attempt("exact", "keys turned by 700 places and back", "within 1e-4", turns_back),
        Attempt("mechanism", "distance of the loss behind an edit from a recomputed text's, by tokens computed again",
                "nearer with the most than with none", with_repair),
    ),
    timings=(Timing("time to the first token of an edited text of 1,500 tokens", 9.0, loads.late_first),),
    note="The baseline has its prefix cache: what stands before the edit costs it nothing either.",
)  # fmt: skip
