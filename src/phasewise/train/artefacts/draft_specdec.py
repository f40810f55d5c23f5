"""The acceptance head of draft.specdec, as SpecDec++ trains it (arXiv 2405.19715, section on training).

The model writes texts. At each of their places the draft model draws one token Z, which is accepted with probability
a = min(1, p(Z) / q(Z)), both conditioned on the model's own text before. Then the draft model reads the text once more
with most of its tokens replaced by Z: so the head meets beginnings that have guesses in them, as in a draft. From the
state behind each Z it learns a, and rejections count more than acceptances.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.load import config_of
from phasewise.methods.draft._acceptance_head import ACCEPT, REJECT, classes
from phasewise.methods.draft.specdec import SpecDec
from phasewise.model.artefacts import Artefact
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.heads.text import TextJob, write
from phasewise.train.mixture import Stage, pad_rows
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, bar, fit
from phasewise.train.written import WrittenText

TOKENS, ROOM = 150_000, 96  # tokens of the model's texts, and of one
DRAFTED = 0.85  # share of a text's places at which the draft model reads its own token
REJECTED = 6.0  # weight of a rejection over an acceptance
EPOCHS, STEP, RATE = 8, 512, 2e-3
DECAY = ((0.1, 1.0), (1.0, 0.02))
AT_ONCE = 16  # texts of a pass
DTYPE = "bfloat16"  # as both models serve


def train(method: SpecDec, job: ArtefactJob) -> Path:
    """Write texts, label and learn. `job.out` gets checkpoint.pt, losses.csv, specdec.json (the head's loss over
    held-out text beside the best constant's) and the artefact. Raises UserError for a draft model with another
    vocabulary, and for a model that only repeats itself."""
    tokens = job.tokens or TOKENS
    ours, theirs = config_of(job.model), config_of(method.model)
    if ours.vocab != theirs.vocab:
        raise UserError(f"model={method.model} has {theirs.vocab} tokens and {job.model} {ours.vocab}: choose a draft "
                        "model of the same tokenizer, as in draft.specdec:model=DIR")  # fmt: skip
    target, draft = FrozenTarget(job.model, DTYPE), FrozenTarget(method.model, DTYPE)
    made = method.artefact(ours, theirs, draft.fingerprint)
    text = TextJob(job.model, max(1, tokens // ROOM), ROOM, seed=job.seed)
    written, heldout, pad = write(text, target.fingerprint, _counting)
    if not written or not heldout:
        raise UserError(f"{job.model} only repeats itself: no text is left to learn from. Train another model first")
    learned, judged = (labelled(target, draft, texts, pad, job.seed) for texts in (written, heldout))
    torch.manual_seed(job.seed)
    settings = {"base": target.fingerprint, "draft": draft.fingerprint, "tokens": tokens, "blocks": method.blocks}
    module = LearningHead(made)
    run = TrainingRun(module, [AdamW(module.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)],
                      settings=settings)  # fmt: skip
    if job.resume:
        run.read(job.checkpoint)
    stage = Stage(1.0, 1, STEP, code=0.0, long=0.0, copies=0.0)
    recipe = TrainingRecipe(EPOCHS * len(learned.accepted), (stage,), decay=DECAY)
    fit(run, step_loss(module), StateBatches(learned, job.seed), recipe, job.out)
    tensors = {name: tensor.detach().bfloat16().float() for name, tensor in module.tensors().items()}  # as stored
    report = {"learned": len(learned.accepted), "judged": len(judged.accepted),
              "accepted": float(judged.accepted.mean()), **measured(tensors, judged)}  # fmt: skip
    (job.out / "specdec.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return job.save(target.model, made, tensors, tokens)


@dataclass(frozen=True, eq=False)
class LabelledStates:
    """States of the draft model behind tokens that it drew, float32 [n, d] after the final norm, and the chance with
    which each token is accepted, float32 [n]."""

    states: Tensor
    accepted: Tensor


@torch.no_grad()
def labelled(
    target: FrozenTarget, draft: FrozenTarget, texts: Sequence[WrittenText], pad: int, seed: int
) -> LabelledStates:
    """One drawn token at each place of the texts' replies. Those whose place keeps the text's own token are left
    out."""
    states, accepted = list[Tensor](), list[Tensor]()
    made = torch.Generator().manual_seed(seed)
    for at in range(0, len(texts), AT_ONCE):
        block = pad_rows([[(text.prompt, False), (text.reply, True)] for text in texts[at : at + AT_ONCE]], pad)
        rows, places = (block.targets >= 0).nonzero(as_tuple=True)
        p, q = (model.log_chances(model.see(block).h[rows, places]).exp() for model in (target, draft))
        drawn = torch.multinomial(q, 1, generator=made)
        chances = (p.gather(1, drawn) / q.gather(1, drawn))[:, 0].clamp(max=1.0)
        taken = torch.rand(len(rows), generator=made) < DRAFTED
        ids = block.ids.clone()
        ids[rows[taken], places[taken] + 1] = drawn[taken, 0]
        h = draft.see(TokenBlock.of(ids, block.targets)).h
        states.append(h[rows[taken], places[taken] + 1])
        accepted.append(chances[taken])
    return LabelledStates(torch.cat(states), torch.cat(accepted))


class LearningHead(nn.Module):
    """The tensors of the artefact while they are learned. At first the blocks add little."""

    def __init__(self, made: Artefact) -> None:
        super().__init__()
        self.names = tuple(made.shapes)
        start = {name: _start(name, shape) for name, shape in made.shapes.items()}
        self.parts = nn.ParameterDict({name.replace(".", "_"): value for name, value in start.items()})

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by their names in the artefact."""
        return {name: self.parts[name.replace(".", "_")] for name in self.names}


def _start(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape) if name.endswith("bias") else torch.randn(shape) * 0.1 * shape[-1] ** -0.5


@dataclass(frozen=True)
class StateBatches:
    """Some of the states of each step, a function of the seed and the step."""

    of: LabelledStates
    seed: int

    def step(self, step: int, stage: Stage) -> LabelledStates:
        made = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = torch.randint(len(self.of.accepted), (stage.step_tokens,), generator=made)
        return LabelledStates(self.of.states[chosen], self.of.accepted[chosen])


def step_loss(module: LearningHead) -> Callable[[Any, LabelledStates], StepLoss]:
    def loss(_: object, batch: LabelledStates) -> StepLoss:
        total = weighted_loss(classes(module.tensors(), batch.states), batch.accepted)
        return StepLoss(total, {"acceptance": float(total.detach())}, len(batch.accepted))

    return loss


def weighted_loss(logits: Tensor, accepted: Tensor) -> Tensor:
    """Cross-entropy (nats) of both classes [n, 2] with their chances; rejections weigh `REJECTED` times as much."""
    said = F.log_softmax(logits, -1)
    rejected = REJECTED * (1 - accepted)
    total = -(rejected * said[:, REJECT] + accepted * said[:, ACCEPT]).sum()
    return total / (rejected + accepted).sum()


def measured(tensors: dict[str, Tensor], judged: LabelledStates) -> dict[str, float]:
    """The head's loss, and that of the constant that suits these very labels best."""
    head = weighted_loss(classes(tensors, judged.states), judged.accepted)
    rejected = REJECTED * (1 - judged.accepted).sum()
    constant = torch.stack((rejected, judged.accepted.sum())).log()
    return {"loss": float(head), "constant": float(weighted_loss(constant.expand(len(judged.accepted), 2),
                                                                  judged.accepted))}  # fmt: skip


@contextmanager
def _counting(what: str, total: int) -> Iterator[Callable[[int], object]]:
    with bar() as shown:
        task = shown.add_task(what, total=total, note="")
        yield lambda done: shown.update(task, completed=done)
