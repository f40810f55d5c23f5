"""Low-rank weights for draft.s2d: sorted fine-tuning of the model's own first layers (arXiv 2407.01955).

The loss is the mean over exits of the cross-entropy of the next token, by the model's own norm and head on the rows
behind each exit. With `learned=last` the last exit alone is trained, on as many tokens: what sorted training is
compared with. The paper's labels are the tokens of a set of conversations, and all weights of the draft are trained.
Here the labels are the model's own distributions over text that it wrote itself, and only low-rank weights are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.methods.draft.s2d import S2D
from phasewise.model.artefacts import fingerprint
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock, of_layers
from phasewise.train.device import halved, moved
from phasewise.train.heads.text import TextJob, write
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Stage, pad_rows
from phasewise.train.passes import Pass
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, bar, fit
from phasewise.train.written import WrittenBatches, WrittenText

TOKENS = 800_000  # prompts and padding included
SEQUENCES, NEW = 2_000, 96  # texts that the model writes, at most, and tokens of one
EACH = 200  # tokens to train on for which a text is written
STEP, RATE = 1024, 3e-3
DECAY = ((0.3, 1.0), (1.0, 0.01))
AT_ONCE = 16  # texts of a pass that measures


def train(method: S2D, job: ArtefactJob) -> Path:
    """Train one draft; `job.out` gets checkpoint.pt, losses.csv, s2d.json (`measured`) and the artefact.

    Raises UserError for a model of fewer layers than the exits name, for one that training has no twin of, for one that
    only repeats itself, and if a run cannot be resumed so.
    """
    base, twin = job.base()
    made, depths = method.artefact(base.config), method.depths
    learned = depths if method.learned == "sorted" else depths[-1:]
    tokens = job.tokens or TOKENS
    torch.manual_seed(job.seed)
    run = start(LowRank(made.shapes))
    run.settings = {"model": job.model, "exits": method.exits, "learned": method.learned, "tokens": tokens,
                    "seed": job.seed}  # fmt: skip
    if job.resume:
        run.read(job.checkpoint)
    new = min(NEW, base.config.max_positions // 2)
    text = TextJob(job.model, min(SEQUENCES, max(1, tokens // EACH)), new, seed=job.seed)
    written, heldout, pad = write(text, fingerprint(base), _counting)
    if not written or not heldout:
        raise UserError(f"{job.model} only repeats itself: no text is left to learn from. Train another model first")
    shallow = of_layers(twin, range(depths[-1]))

    def save(run: TrainingRun[LowRank]) -> None:
        job.save(base, made, run.model.tensors(), tokens)

    def loss(_: Stage, blocks: list[TokenBlock]) -> StepLoss:
        return sorted_loss(twin, shallow, run.model, learned, blocks)

    stage = Stage(1.0, 1, STEP, code=0.0, long=0.0, copies=0.0)
    recipe = TrainingRecipe(tokens, (stage,), decay=DECAY)
    fit(run, loss, WrittenBatches(written, pad, job.seed, prompts=True), recipe, job.out, save)
    found = measured(twin, shallow, run.model, depths, heldout, pad)
    (job.out / "s2d.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return job.save(base, made, run.model.tensors(), tokens)


def start(delta: LowRank) -> TrainingRun[LowRank]:
    """A fresh run; the frozen base is no part of it."""
    return TrainingRun(delta, [AdamW(delta.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


def exit_rows(
    shallow: DenseDecoder, delta: LowRank | None, exits: Sequence[int], blocks: Sequence[TokenBlock]
) -> list[Tensor]:
    """Rows [tokens, d] after the final norm, of each exit. `exits` numbers the layers before each."""
    taps = {depth - 1: torch.empty(0) for depth in exits}
    shallow.hidden(blocks, Pass(delta=delta, taps=taps))
    return [shallow.norm(taps[depth - 1]) for depth in exits]


def sorted_loss(
    twin: DenseDecoder, shallow: DenseDecoder, delta: LowRank, exits: Sequence[int], blocks: Sequence[TokenBlock]
) -> StepLoss:
    """The mean over exits of the cross-entropy (nats) with what the model itself says at learned places."""
    table = twin.embed_tokens.weight
    wanted = torch.cat([block.targets.flatten() for block in blocks]) >= 0
    with halved(table.device):
        with torch.no_grad():
            said = F.linear(twin.hidden(blocks)[wanted], table).float().softmax(-1)
        each = [F.linear(x[wanted], table).float() for x in exit_rows(shallow, delta, exits, blocks)]
    losses = [F.cross_entropy(logits, said) for logits in each]
    parts = {f"exit_{depth}": float(loss.detach()) for depth, loss in zip(exits, losses)}
    return StepLoss(torch.stack(losses).mean(), parts, sum(block.ids.numel() for block in blocks))


@torch.no_grad()
def measured(
    twin: DenseDecoder, shallow: DenseDecoder, delta: LowRank | None, exits: Sequence[int],
    texts: Sequence[WrittenText], pad: int,
) -> dict[str, Any]:  # fmt: skip
    """Over replies of held-out text, by exit: the share of places where exit and model hold the same token likeliest
    (`agrees`), and the chance that a drawn guess is accepted, the sum of min(p, q) (`accepted`)."""
    table = twin.embed_tokens.weight
    agrees, accepted, places = torch.zeros(len(exits)), torch.zeros(len(exits)), 0
    for at in range(0, len(texts), AT_ONCE):
        block = pad_rows([[(text.prompt, False), (text.reply, True)] for text in texts[at : at + AT_ONCE]], pad)
        blocks = [moved(block, table.device)]
        wanted = blocks[0].targets.flatten() >= 0
        p = F.linear(twin.hidden(blocks)[wanted], table).softmax(-1)
        places += len(p)
        for number, x in enumerate(exit_rows(shallow, delta, exits, blocks)):
            q = F.linear(x[wanted], table).softmax(-1)
            agrees[number] += (p.argmax(-1) == q.argmax(-1)).sum().cpu()
            accepted[number] += torch.minimum(p, q).sum().cpu()
    shares = {"agrees": agrees / places, "accepted": accepted / places}
    return {"places": places, **{name: dict(zip(map(str, exits), each.tolist())) for name, each in shares.items()}}


@contextmanager
def _counting(what: str, total: int) -> Iterator[Any]:
    with bar() as shown:
        task = shown.add_task(what, total=total, note="")
        yield lambda done: shown.update(task, completed=done)
