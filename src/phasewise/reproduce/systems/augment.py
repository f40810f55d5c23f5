"""Cache augmentation: latents that a coprocessor makes of a prompt's KV, before a frozen model answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.bench import stats
from phasewise.bench.stats import Difference
from phasewise.known.corpus import sources
from phasewise.load import files_of, model_path
from phasewise.methods.decode.augment import Augment, Augmenting
from phasewise.model import artefacts
from phasewise.reproduce import loads
from phasewise.reproduce.controls import Control, drawn
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import HOT, SHORT
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Quality, Setting, System, Timing
from phasewise.request.request import Request
from phasewise.train import dense
from phasewise.train.artefacts import decode_augment as training
from phasewise.train.exchanges import Exchanges
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Mixture
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

LATENTS, PROMPT, NEW = 16, 256, 32
STEPS = 6  # of held-out data


@dataclass(frozen=True)
class RandomLatents(Control):
    """decode: as many rows in the same places, as long as the coprocessor's, in directions drawn at random."""

    of: Augment

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Augmenting:
        tensors = host.artefact(self.of.artefact(host.model.config), self.of.weights)
        return _RandomLatents(host, self.of.then, tensors)


class _RandomLatents(Augmenting):
    def made(self, request: Request, x: Tensor) -> Tensor:
        z = super().made(request, x)
        return any_way(z.float(), drawn(request.prompt[-8:], request.prompt_len)).to(z.dtype)


def any_way(z: Tensor, gen: torch.Generator) -> Tensor:
    """Rows as long as these, in any direction."""
    noise = torch.randn(z.shape, generator=gen)
    long: Tensor = z.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    return noise * long


def rows(case: Case) -> int:
    """The prompt's, the coprocessor's, as many latents, and one for each token after the first."""
    return loads.prompt_rows(case) + 2 * LATENTS + NEW - 1


def held(case: Case) -> int:
    return (loads.prompt_rows(case) + LATENTS + NEW - 2) * case.row_bytes


@torch.no_grad()
def losses(lab: Lab, weights: str = "auto") -> dict[str, list[float]]:
    """Nats of each token that follows a prompt, but for the first: after its own latents, none, random ones, and those
    of another prompt; held-out source and tasks."""
    name = lab.real("pocket")
    model, twin = lab.model(name, "float32"), dense.load(model_path(name)).requires_grad_(False)
    wanted = Augment(LATENTS).artefact(model.config)
    made = LowRank(wanted.shapes).requires_grad_(False)
    for key, value in artefacts.load(model, wanted, weights).items():
        made[key].copy_(value)
    text = Mixture(files_of(name).tokenizer(), list(sources(held_out=True).values()), lab.scale.seed + 1)
    found: dict[str, list[float]] = {}
    for step in range(1 if lab.scale.quick else STEPS):
        for part in Exchanges(text).step(step, training.STAGES[0]):
            past = training.past_of(twin, part)
            z = training.latents(twin, made, part, past)
            every = {"own": z, "none": None, "random": any_way(z, drawn(step)), "another": z.roll(1, 0)}
            for who, each in every.items():
                after = torch.cat(training.losses_after(twin, part, past, each, first=False))
                found.setdefault(who, []).extend(after.tolist())
    return found


def lead(other: str) -> Callable[[Lab], AttemptOutcome]:
    """The loss after the latents of `other` less that after a prompt's own."""

    def tried(lab: Lab) -> AttemptOutcome:
        found = losses(lab)
        gain: Difference = stats.means(found[other], found["own"])  # of losses: more is worse
        return AttemptOutcome(gain.low > 0, f"loss after {other} less own {gain.text(False)}")

    return tried


SYSTEM = System(
    title="Cache augmentation",
    paper=Paper("Deliberation in Latent Space via Differentiable Cache Augmentation", "2412.17747"),
    claim="latents that a trained coprocessor adds to the cache of a frozen Gemma-2 2B lower perplexity on many later "
    "tokens and raise scores in reasoning, more of them raising more (numbers in its tables only).",
    conditions=("Gemma-2 2B, and a coprocessor of its size trained on pretraining data",),
    method=Setting({"decode": f"augment:latents={LATENTS}"}),
    baseline=Setting(),
    control=Setting(objects={"decode": RandomLatents(Augment(LATENTS))}),
    control_is="as many rows, as long, in the same places, drawn at random",
    line="latents of a coprocessor in the cache: better answers of a frozen model",
    promises=("answers",),
    load=loads.lone(PROMPT, NEW),
    missing=("a coprocessor with all weights of its own", "more latents raising more"),
    counters=(
        Counter("rows", "prompt + 2 latents, and one for each token after the first",
                lambda case: case.work.rows, rows),
        Counter("KV bytes held at the last token", "prompt + latents + tokens rows",
                lambda case: case.method.steps[-2].kv, held),
    ),
    quality=(Quality(SHORT, None, 40, gains=True), Quality(SHORT, None, 40, temperature=HOT, gains=True)),
    attempts=(
        Attempt("answers", "loss of what follows a prompt, held out: none less own", "all of it above 0",
                lead("none"), model="pocket"),
        Attempt("control", "loss of what follows a prompt, held out: random latents less own", "all of it above 0",
                lead("random"), "answers", "pocket"),
        Attempt("control", "loss of what follows a prompt, held out: another prompt's latents less own",
                "all of it above 0", lead("another"), "answers", "pocket"),
    ),
    timings=(Timing("time per token at 512 tokens", 1.0, tokens=512, price=True),),
    note="The coprocessor is the base with low-rank weights. Without trained weights nothing of this can be examined: "
    f"`phasewise train artefact decode.augment:latents={LATENTS} --model pocket --out runs/augment`.",
)  # fmt: skip
