"""Falcon: a recurrent block that guesses two tokens a pass, trained beside answers that become fewer."""

from __future__ import annotations

from phasewise.reproduce import sampled
from phasewise.reproduce.drafting_heads import (
    DEPTH,
    LOAD,
    NODES,
    PASSES,
    TIMINGS,
    guessing,
    passes,
    shipped,
    verified,
)
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Paper, Saving, Setting, System
from phasewise.speculation.heads.falcon import FalconHeads
from phasewise.train.heads.falcon import RelaxedAttention

TOGETHER = 2  # guesses of a pass
ROUNDS = -(-DEPTH // TOGETHER)  # passes of the heads for a draft
WIDTH = 4
SHAPE = f"width={WIDTH},nodes={NODES}"
CODE, HOT = sampled.writing(0.0), sampled.writing(1.0)
EAGLE = "EAGLE-3's block that ships, as many passes of the heads and as many guesses"
PLAIN = "the same heads trained as long on the same texts, without answers to glance at"


def drafting(heads: str = "auto", model: str = "", tree: str = "likeliest") -> Setting:
    return Setting({"draft": f"falcon:heads={heads},depth={DEPTH},{SHAPE},tree={tree}"}, most=1, model=model)


def heads_passes(case: Case, run: PlayedRun) -> float:
    """Passes of the heads per verdict of the model."""
    return run.work.draft_forwards / (run.work.forwards - len(run.requests))


def groups_see_themselves(lab: Lab) -> AttemptOutcome:
    """Over a text, with the heads that ship: another second token of a group changes the group's first output, and no
    output of an earlier group."""
    import torch

    model = lab.model("pocket", "float32")
    heads = shipped(model, "falcon")
    assert isinstance(heads, FalconHeads)
    tokens = torch.tensor([lab.asked("pocket").code(32)])
    features = torch.randn(1, 32, model.config.hidden, generator=torch.Generator().manual_seed(0))
    features *= float(model.norm.weight.float().square().mean().sqrt())
    attention, own, earlier = RelaxedAttention(heads, torch.arange(32)[None]), 0, 0
    with torch.no_grad():
        plain = heads(model.embed(tokens[0])[None].float(), features, attention.attend)[0]
        seconds = range(TOGETHER - 1, 32, TOGETHER)
        for at in seconds:
            changed = tokens.clone()
            changed[0, at] = (changed[0, at] + 1) % model.config.vocab
            other = heads(model.embed(changed[0])[None].float(), features, attention.attend)[0]
            rows = (other != plain).any(-1)
            own += bool(rows[at - TOGETHER + 1])
            earlier += bool(rows[: at - TOGETHER + 1].any())
    told = f"{own} of {len(seconds)} change the first output of their group, {earlier} one of an earlier group"
    return AttemptOutcome(own == len(seconds) and not earlier, told)


def fixed_and_likeliest(lab: Lab) -> AttemptOutcome:
    """Passes per token of held-out code with the paper's tree, of the same ranks in every pass, and with the chain of
    as many levels."""
    chain = Setting({"draft": f"falcon:heads=auto,depth={DEPTH},width=1,nodes={DEPTH}"}, most=1)
    found = []
    for setting in (drafting(tree="ranks"), chain):
        case = lab.case({"method": setting}, CODE, "pocket", "float32")
        found.append(passes(case, case.method))
    return AttemptOutcome(found[0] < found[1], f"{found[0]:.4f} against {found[1]:.4f}")


SYSTEM = System(
    title="Falcon",
    paper=Paper("Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive "
                "Drafting and Custom-Designed Decoding Tree", "2412.12639"),
    claim="a block that guesses k tokens a pass, with an LSTM in front, trained beside ever fewer answers, makes "
    "as many levels of a tree in k times fewer passes of the heads: 2.91 to 3.51 times as fast as plain decoding, "
    "and faster than EAGLE.",
    conditions=("Vicuna and LLaMA 2 Chat 7B and 13B, one request at a time, greedy", "k=2, trees of eight levels",
                "trained on ShareGPT"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="heads of the same shape with random weights, as many guesses",
    line="two tokens a pass of the heads: more tokens a pass of the model than EAGLE with as many passes of its own",
    promises=("cost", "time"),
    load=LOAD,
    rivals={
        EAGLE: Setting({"draft": f"eagle:heads=auto,depth={ROUNDS},{SHAPE}"}, most=1),
        PLAIN: drafting(model="pocket-falcon-plain"),
    },
    exact=True,
    counters=(PASSES, verified(NODES), guessing(ROUNDS)),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token of code", passes, "rivals", 1.0, load=CODE),
        Saving("passes per token of code at T=1", passes, "baseline", 1.1, load=HOT),
        Saving("passes per token of code at T=1", passes, "rivals", 1.0, load=HOT),
        Saving("passes of the heads per verdict, against EAGLE-3's block with as many levels", heads_passes,
               "control", 1.5, load=CODE,
               settings={"control": Setting({"draft": f"eagle:heads=auto,depth={DEPTH},{SHAPE}"}, most=1)}),
    ),
    attempts=(
        Attempt("mechanism", "outputs that another second token of a group changes",
                "the first output of the same group, and none of an earlier one", groups_see_themselves),
        Attempt("mechanism", "passes per token of code, the paper's fixed tree against a chain of as many levels",
                "less", fixed_and_likeliest),
    ),
    timings=TIMINGS,
    note="Heads and those without answers learned 300,000 tokens that pocket wrote and was asked; the former run each "
    "text twice. The paper's trees have eight levels; here four, and 7 guesses: rows cost time on a CPU.",
)  # fmt: skip
