"""Kangaroo: the model's first layers and an adapter guess; the verdict goes on from the rows that they have left."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.kangaroo import Kangaroo
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.controls import Control
from phasewise.reproduce.drafting_heads import LOAD, PASSES, TIMINGS, passes
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System
from phasewise.speculation.early_exit import ExitDrafter
from phasewise.speculation.first_layers import FirstLayers
from phasewise.speculation.heads.exit import ExitAdapter
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

ADAPTER = 1 / 3  # of a layer's weights: attention with a key head for each query head, and no MLP


@dataclass(frozen=True)
class Bare(Control):
    """draft: Kangaroo without what was trained: rows that leave early are read by the model's own norm and output
    matrix, as LayerSkip's drafts are. The adapter's layer runs and adds nothing."""

    of: Kangaroo

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> ExitDrafter:
        heads, _ = feature_heads(host.model, ("kangaroo",), self.of.heads)
        assert isinstance(heads, ExitAdapter)
        with torch.no_grad():
            heads.get_parameter("layers.0.self_attn.o_proj.weight").zero_()
            heads.norm.weight.copy_(host.model.norm.weight)
        return self.of.with_heads(host, heads, "the model's own norm")


@dataclass(frozen=True)
class Anew(Control):
    """draft: Kangaroo's guesses, verified from the first layer on: what the first layers made of them is dropped."""

    of: Kangaroo

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> ExitDrafter:
        made = self.of.bind(host)
        made.first_layers = made.companion.first_layers = _Dropping(host.model, made.first_layers.depth, host.counters)
        return made


class _Dropping(FirstLayers):
    def hand_over(self, span: Span) -> None:
        self.drop(span.request)


def drafting(method: Control) -> Setting:
    return Setting(objects={"decode": Speculative(method, Match())}, most=1)


RECOMPUTING = drafting(Anew(Kangaroo()))


# ---- costs, of one request at a time: then the adapter's passes are the guesses
def short(run: PlayedRun) -> int:
    """Passes of the first layers: one for each guess, and one for the token before the first of a round."""
    return run.work.draft_forwards - run.work.drafted


def rounds(case: Case) -> int:
    """Rounds with guesses: all but those that begin with a request's last token but one."""
    found = 0
    for request in case.method.requests:
        known = 1
        for count in request.trace.counts[1:]:
            found += request.params.max_tokens - known > 1
            known += count
    return found


def exit_of(run: PlayedRun) -> float:
    """The layers of such a pass."""
    return (run.work.draft_depth - run.work.drafted) / max(1, short(run))


def read(case: Case, run: PlayedRun) -> float:
    """Layers whose weights are read, per token after a request's first, the adapter's share included."""
    work, n = run.work, len(run.requests)
    later = exit_of(run) * work.drafted  # the pass before a round's first guess takes the place of the verdict's own
    return ((work.forwards - n) * case.config.layers + later + ADAPTER * work.drafted) / (work.emitted - n)


def pairs(case: Case, run: PlayedRun) -> float:
    """(row, layer) pairs per token after a request's first."""
    prompts = sum(len(entry.prompt) for entry in run.entries) * case.config.layers
    return (run.work.row_layers - prompts) / (run.work.emitted - len(run.requests))


SYSTEM = System(
    title="Kangaroo",
    paper=Paper("Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting", "2404.18911"),
    claim="the model's first layers and a trained adapter, one layer of attention, draft for the whole model, and stop "
    "where they are unsure: up to 1.68 times as fast on Spec-Bench, with 88.7 % fewer numbers to train than Medusa-1.",
    conditions=("exit after 2 of 32 layers (Vicuna 7B), 3 of 40 (13B), in fp16", "chains of at most 6 guesses, ended "
                "by a probability below 0.6", "one request at a time"),
    method=Setting({"draft": "kangaroo"}, most=1),
    baseline=Setting(most=1),
    control=Setting({"draft": "kangaroo:heads=random:0"}, most=1),
    control_is="an adapter of the same shape with random weights",
    line="the first layers and an adapter guess, and their rows are kept: up to 1.68 times as fast",
    promises=("cost", "time"),
    load=LOAD,
    rivals={
        "the same exit without an adapter, by the model's own norm and output matrix": drafting(Bare(Kangaroo())),
        "the same guesses, whose first layers the verdict computes anew": RECOMPUTING,
    },
    exact=True,
    missing=("fewer numbers to train than Medusa-1, whose heads have output matrices of their own",),
    counters=(
        PASSES,
        Counter("(row, layer) pairs", "all layers once for each row of prompts, pending token and guess: those that "
                "guessing has run are not run again", lambda case: case.work.row_layers,
                lambda case: case.config.layers
                * (loads.prompt_rows(case) + case.work.forwards - len(case.entries) + case.work.drafted)),
        Counter("passes of the first layers and of the adapter", "s + 1 and s in a round of s guesses",
                lambda case: case.work.draft_forwards, lambda case: 2 * case.work.drafted + rounds(case)),
    ),
    savings=(
        Saving("layers read per token", read, "baseline", 1.1),
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token, against the same exit without an adapter", passes, "control", 1.1,
               settings={"control": drafting(Bare(Kangaroo()))}),
        Saving("(row, layer) pairs per token, against first layers computed anew", pairs, "control", 1.05,
               settings={"control": RECOMPUTING}),
        Saving("passes per token at T=0.7", passes, "baseline", 1.02, load=sampled.writing(0.7)),
    ),
    timings=TIMINGS,
    note="The adapter stands behind one of pocket's eight layers, and learned from 600,000 tokens of what the model "
    "wrote and was asked. It has a norm of its own before the model's output matrix. Layers read count a guess as that "
    "layer and the adapter, a third of one; the output matrix, which a guess reads as a token does, is left out.",
)  # fmt: skip
