"""HAMburger: the tokens of a step share one row of KV, and nobody verifies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.bench import stats
from phasewise.bench.forced import Forced
from phasewise.known.corpus import sources
from phasewise.load import files_of, model_path
from phasewise.methods.decode._groups import MOST, GroupModules, segments
from phasewise.methods.decode.hamburger import GroupDecoder, Hamburger, TunedLayers
from phasewise.model.lowrank import Delta
from phasewise.reproduce import loads
from phasewise.reproduce.answers import right
from phasewise.reproduce.controls import Control
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import HOT, SHORT, short_texts
from phasewise.reproduce.play import PlayedRun, finish
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Paper,
    Saving,
    Setting,
    System,
    Timing,
)
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.train import dense
from phasewise.train.artefacts.decode_hamburger import LOW, RATIO, STAGES
from phasewise.train.dense import TokenBlock
from phasewise.train.mixture import Mixture
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

CONFIDENCE = 0.85
CONFIDENCES = (1.0, 0.95, 0.9, 0.85, 0.7, 0.5)
BETAS = (1.1, 0.99, 0.95, 0.9, 0.7, 0.5)  # LUD's, from few tokens a pass to many
ON = Setting({"decode": f"hamburger:confidence={CONFIDENCE}"})
SINGLE = Setting({"decode": "hamburger:confidence=1"})
TASKS = loads.answering(*SHORT, n=4)
ALONE, NEW = 256, 64  # tokens of one request
NEAR = 0.25  # share by which the size of groups may be off what entropies say


# ---- controls
@dataclass(frozen=True)
class Unread(Control):
    """decode: groups are written by the trained modules, but what reads them was not trained: a group enters as the
    mean of its embeddings, and no low-rank weights run."""

    of: Hamburger

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> GroupDecoder:
        made: GroupDecoder = self.of.bind(_Unreading(host))  # type: ignore[arg-type]
        return made


class _Unreading:
    """A host whose artefacts leave reading as it was."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def artefact(self, wanted: Any, weights: str) -> dict[str, Tensor]:
        found = self._host.artefact(wanted, weights)
        zero = {name for name in found if name.endswith(".b") or name == "embedder.out.weight"}
        return {name: torch.zeros_like(tensor) if name in zero else tensor for name, tensor in found.items()}


@dataclass(frozen=True)
class TunedPlain(Control):
    """skip: all layers, with the method's low-rank weights; tokens come one by one."""

    of: Hamburger

    @property
    def traits(self) -> Traits:
        return Traits("skip", low_rank=True)

    def bind(self, host: Host) -> TunedLayers:
        model = host.model
        found = host.artefact(self.of.artefact(model.config), self.of.weights)
        own = GroupModules(model.config).shapes()
        delta = Delta({name: each for name, each in found.items() if name not in own}, model.dtype, model.device)
        return TunedLayers(delta, model.config.layers)


# ---- what is counted
def groups(run: PlayedRun) -> int:
    """Groups of all requests together."""
    return sum(len(request.groups) for request in run.requests)


def steps(run: PlayedRun) -> int:
    """Passes in which a request decodes, of all requests together."""
    return sum(step.streams for step in run.steps)


def passes(case: Case | None, run: PlayedRun) -> float:
    """Passes in which a request decodes, for each token of its output."""
    return steps(run) / run.work.emitted


def rows(run: PlayedRun) -> int:
    """Rows of decoded tokens that were computed."""
    return run.work.rows - run.work.prompt_rows


def read(case: Case, run: PlayedRun) -> float:
    """Bytes of KV that were read after the prompt, for each token."""
    return sum(step.read for step in run.steps if step.streams) / run.work.emitted


def grown(case: Case, run: PlayedRun) -> float:
    """Bytes of KV that decoding has added, for each token."""
    return (run.steps[-2].kv - run.steps[0].kv) / run.work.emitted


# ---- what is tried
def falling(lab: Lab) -> AttemptOutcome:
    """Rows per token as the confidence falls."""
    found = []
    for confidence in CONFIDENCES:
        who = Setting({"decode": f"hamburger:confidence={confidence}"})
        run = lab.play(who, TASKS(lab.asked("pocket")), "pocket")
        found.append(groups(run) / run.work.emitted)
    words = ", ".join(f"{each:.2f} at {confidence:g}" for each, confidence in zip(found, CONFIDENCES))
    return AttemptOutcome(found[0] == 1 and found[-1] < 1 and found == sorted(found, reverse=True), words)


def not_tokens(lab: Lab) -> AttemptOutcome:
    """Whether a count by tokens would be told from one by groups."""
    run = lab.play(ON, TASKS(lab.asked("pocket")), "pocket")
    by_tokens = run.work.emitted - len(run.requests)
    return AttemptOutcome(rows(run) < by_tokens, f"{rows(run)} rows, {by_tokens} if each token had its own")


def plain(lab: Lab) -> AttemptOutcome:
    """Tokens at confidence 1, and those of plain decoding with the same weights, in float32."""
    tuned = Setting(objects={"skip": TunedPlain(Hamburger())})
    entries = [*TASKS(lab.asked("pocket")), *loads.lone(ALONE, NEW)(lab.asked("pocket", 1))]
    one, other = (lab.play(who, entries, "pocket", "float32") for who in (SINGLE, tuned))
    same = sum(a == b for a, b in zip(one.outs, other.outs))
    sizes = {size for request in one.requests for size in request.groups}
    return AttemptOutcome(one.outs == other.outs and sizes == {1}, f"{same} of {len(entries)} texts alike")


@torch.no_grad()
def predicted(lab: Lab) -> AttemptOutcome:
    """The mean size of groups by the entropies of the base, and that of the engine that is made to write the same
    held-out source and tasks."""
    name = lab.real("pocket")
    texts, twin = held_out(lab, name), dense.load(model_path(name)).requires_grad_(False)
    forced, requests, sizes = Forced(), list[Request](), list[int]()
    for prompt, reply in texts:
        ids = torch.tensor([[*prompt, *reply]])
        said = twin.hidden([TokenBlock.of(ids, ids)])[len(prompt) - 1 : -1]
        chances = F.linear(said, twin.embed_tokens.weight).log_softmax(-1)
        sizes += segments((-(chances.exp() * chances).sum(-1)).tolist(), MOST, LOW, RATIO)
        requests.append(Request(prompt, Params(len(reply), ignore_eos=True)))
        forced.scripts[requests[-1].id], forced.nats[requests[-1].id] = [*prompt, *reply], {}
    with lab.engine(ON, sample=forced) as engine:
        finish(engine, requests)
    tokens = sum(sizes)
    wanted, found = (tokens / n for n in (len(sizes), sum(len(request.groups) for request in requests)))
    words = f"{found:.2f} tokens, {wanted:.2f} by entropy, of {tokens} tokens"
    return AttemptOutcome(abs(found / wanted - 1) <= NEAR, words)


def held_out(lab: Lab, name: str) -> list[tuple[list[int], list[int]]]:
    """Prompts and what follows them: the two halves of stretches of source, and tasks with their first replies."""
    text = Mixture(files_of(name).tokenizer(), list(sources(held_out=True).values()), lab.scale.seed + 1)
    source, tasks = text.step(0, STAGES[0])
    found = [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for block in source for ids in block.ids.tolist()]
    for block in tasks:
        for ids, targets in zip(block.ids.tolist(), block.targets.tolist()):
            first = next(i for i, target in enumerate(targets) if target >= 0)
            stop = next((i for i in range(first, len(ids)) if targets[i] < 0), len(ids))
            found.append((ids[: first + 1], targets[first:stop]))
    return found[:8] if lab.scale.quick else found


def beside_lud(temperature: float) -> Any:
    """An attempt: right answers to short tasks less those of LUD, at the largest threshold with as few passes."""

    def tried(lab: Lab) -> AttemptOutcome:
        ours = passes(None, lab.play(ON, TASKS(lab.asked("pocket")), "pocket"))
        beta, theirs = BETAS[-1], 0.0
        for beta in BETAS:
            who = Setting({"decode": f"lud:beta={beta}"}, model="pocket-units")
            theirs = passes(None, lab.play(who, TASKS(lab.asked("pocket")), "pocket"))
            if theirs <= ours:
                break
        n = lab.scale.examples or (2 if lab.scale.quick else 40)
        lud = Setting({"decode": f"lud:beta={beta}"}, model="pocket-units")
        mine, its = ([x for task in SHORT for x in right(lab, who, task, n, temperature)] for who in (ON, lud))
        gain = stats.shares(mine, its)
        words = f"{gain.text(True)}, at {ours:.2f} passes per token and {theirs:.2f} of LUD (beta={beta:g})"
        return AttemptOutcome(gain.low > 0, words)

    return tried


def beside_drafts(lab: Lab) -> AttemptOutcome:
    """Passes per token, and those of exact drafting, whose answers are the model's own."""
    asked = {"HAMburger": ON, "Medusa's heads": Setting({"draft": "medusa"}),
             "pocket-draft": Setting({"draft": "draft_model:model=pocket-draft"})}  # fmt: skip
    found = {name: passes(None, lab.play(who, TASKS(lab.asked("pocket")), "pocket")) for name, who in asked.items()}
    words = ", ".join(f"{name} {each:.2f}" for name, each in found.items())
    return AttemptOutcome(found["HAMburger"] <= min(found.values()), words)


SYSTEM = System(
    title="HAMburger",
    paper=Paper("HAMburger: Accelerating LLM Inference via Token Smashing", "2505.20438"),
    claim="a model that was tuned to write several tokens a step, and to read them as one row of KV, computes up to 2 "
    "times fewer rows and writes up to 2 times the tokens a second (1B parameters), at the quality of the base.",
    conditions=("Llama-3.2-1B-Instruct, all weights tuned on instructions", "groups of at most four tokens"),
    method=ON,
    baseline=Setting(),
    control=Setting(objects={"decode": Unread(Hamburger(confidence=CONFIDENCE))}),
    control_is="the same modules write groups, which enter as means of embeddings, and the model was not tuned",
    line="several tokens in one row of KV, unverified: half of the rows, twice the pace, the same quality",
    promises=("answers", "cost", "time"),
    load=TASKS,
    missing=("a model all weights of which are tuned: low-rank weights are",),
    counters=(
        Counter("rows after the prompt", "one for each group but the last", lambda case: rows(case.method),
                lambda case: groups(case.method) - len(case.entries)),
        Counter("passes in which a request decodes", "one for each group but the first",
                lambda case: steps(case.method), lambda case: groups(case.method) - len(case.entries)),
        Counter("KV bytes held before the last pass", "a row for each token of the prompt, and for each group but two",
                lambda case: case.method.steps[-2].kv,
                lambda case: (loads.prompt_rows(case) + groups(case.method) - 2) * case.row_bytes,
                load=loads.lone(ALONE, NEW)),
        Counter("rows after the prompt at confidence=1", "one for each token but the last",
                lambda case: rows(case.method), lambda case: case.work.emitted - len(case.entries), load=TASKS,
                who=SINGLE),
    ),
    savings=(
        Saving("passes per token of short tasks", passes, "baseline", 1.5),
        Saving("KV bytes added per token of one text", grown, "baseline", 1.2, load=loads.lone(ALONE, NEW)),
        Saving("KV bytes read per token of one text", read, "baseline", 1.2, load=loads.lone(ALONE, NEW)),
    ),
    quality=short_texts(),
    attempts=(
        Attempt("mechanism", "rows per token as the confidence falls", "1 at first, then never more", falling, None,
                "pocket"),
        Attempt("control", "rows after the prompts of short tasks", "fewer than tokens", not_tokens, "counter",
                "pocket"),
        Attempt("mechanism", "tokens at confidence=1 and of plain decoding with the same weights", "the same", plain,
                None, "pocket"),
        Attempt("mechanism", "tokens of a group in held-out text", f"within {NEAR:.0%} of what entropies say",
                predicted, None, "pocket"),
        Attempt("mechanism", "right answers less those of LUD at as many passes", "all of it above 0", beside_lud(0.0),
                None, "pocket"),
        Attempt("mechanism", f"right answers less those of LUD at as many passes, T={HOT:g}", "all of it above 0",
                beside_lud(HOT), None, "pocket"),
        Attempt("mechanism", "passes per token of short tasks beside exact drafting", "the fewest", beside_drafts, None,
                "pocket"),
    ),
    timings=(
        Timing("time per token of short tasks, one by one", 1.0, seconds=loads.pace, load=TASKS,
               settings={"method": Setting(ON.verbs, most=1), "baseline": Setting(most=1)}),
    ),
    note="Prompts are never grouped. A group is as long as the stop head says; what is predicted is cut by the entropy "
    "of the base, as training texts were. LUD and drafting are no part of the claim: they are shown as rivals at as "
    "many passes.",
)  # fmt: skip
