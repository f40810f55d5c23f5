"""Training for decode.augment (arXiv 2412.17747): the loss of what follows a prompt, given latents made of its KV.

The base stays frozen; the coprocessor's low-rank weights, the rows that it begins with and the scale of what it makes
are learned, through the base. Latents are put at the end of every prompt, as they will be when it serves, and in
library source at `POINTS` more points of each row, as in the paper: there the loss is that of the next `AHEAD` tokens.
The base computes a row once for all its points, and nothing at one point sees what is at another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.methods.decode.augment import GAIN, SOFT, Augment
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock, losses
from phasewise.train.device import halved
from phasewise.train.exchanges import Exchanges, PromptReplyBatch
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import NO_LOSS, Stage
from phasewise.train.passes import Pass, Past
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, weighed

TOKENS = 1_500_000  # prompts and padding included
RATE = 3e-3
STAGES = (
    Stage(0.7, 512, 4096, code=0.5, long=0.15, copies=0.3),
    Stage(1.0, 1024, 6144, code=0.5, long=0.2, copies=0.3),
)
DECAY = ((0.4, 1.0), (1.0, 0.01))
POINTS, AHEAD = 8, 16  # of a row of source, besides its prompt's end; tokens behind each that are learned
Batch = tuple[list[PromptReplyBatch], list[PromptReplyBatch]]


def train(method: Augment, job: ArtefactJob) -> Path:
    """Train for one number of latents; `job.out` gets checkpoint.pt, losses.csv and the artefact."""
    if not method.latents:
        raise UserError("augment: latents=0 needs no training: choose latents above 0")
    base, twin = job.base()
    made = method.artefact(base.config)
    torch.manual_seed(job.seed)
    tokens = job.tokens or TOKENS
    run = start(LowRank(made.shapes), twin)
    if job.resume:
        run.read(job.checkpoint)

    def save(run: TrainingRun[LowRank]) -> None:
        job.save(base, made, run.model.tensors(), tokens)

    def loss(stage: Stage, batch: Batch) -> StepLoss:
        return ahead_loss(twin, run.model, batch)

    fit(run, loss, Exchanges(job.mixture(), POINTS, AHEAD), TrainingRecipe(tokens, STAGES, decay=DECAY), job.out, save)
    return job.save(base, made, run.model.tensors(), tokens)


def start(made: LowRank, twin: DenseDecoder) -> TrainingRun[LowRank]:
    """A fresh run; the frozen base is no part of it. The coprocessor begins as the base, with some tokens' embeddings
    as its rows and latents as long as embeddings are."""
    words = twin.embed_tokens.weight
    with torch.no_grad():
        made[SOFT].copy_(words[torch.randint(len(words), (len(made[SOFT]),))])
        made[GAIN].fill_(float(words.norm(dim=1).mean() / twin.norm.weight.norm()))  # type: ignore[union-attr]
    return TrainingRun(made, [AdamW(made.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


def ahead_loss(twin: DenseDecoder, made: LowRank, batch: Batch) -> StepLoss:
    """Cross-entropy of replies, their first tokens among them, over prompts and the latents made of these."""
    source, tasks = batch
    whole = [*tasks, *source]
    with halved(twin.embed_tokens.weight.device):
        past = past_of(twin, whole)
        more = [spread(part, its) for part, its in zip(whole, past, strict=True) if part.points]
        both, past = [*whole, *(part for part, _ in more)], [*past, *(its for _, its in more)]
        each = losses_after(twin, both, past, latents(twin, made, both, past))
    task, code = torch.cat(each[: len(tasks)]), torch.cat(each[len(tasks) :])
    tokens = sum(part.tokens for part in whole) + sum(part.replies.ids.numel() for part, _ in more)
    return weighed(code, task, tokens)


def spread(part: PromptReplyBatch, past: Past) -> tuple[PromptReplyBatch, Past]:
    """The points of a batch as prompts that end there, each with the next `AHEAD` tokens as its reply; and their KV,
    which is the beginning of that of their row."""
    device = part.real.device
    rows, ends = (torch.tensor(each, device=device) for each in zip(*part.points, strict=True))
    longest, ids = int(ends.max()), part.prompts.ids
    ahead = ids[rows[:, None], ends[:, None] + torch.arange(AHEAD, device=device)]
    real = torch.arange(longest, device=device) < ends[:, None]
    positions = ends[:, None] + torch.arange(AHEAD - 1, device=device)
    prompts = TokenBlock.of(ids[rows, :longest], torch.full_like(ids[rows, :longest], NO_LOSS))
    layers = {layer: (k[rows, :longest], v[rows, :longest]) for layer, (k, v) in past.layers.items()}
    return PromptReplyBatch(prompts, real, TokenBlock(ahead[:, :-1], ahead[:, 1:], positions)), Past(real, layers)


def past_of(twin: DenseDecoder, exchanges: Sequence[PromptReplyBatch]) -> list[Past]:
    """The KV of all prompts, as the base makes it."""
    return twin.prefill([part.prompts for part in exchanges], [part.real for part in exchanges])


def latents(twin: DenseDecoder, made: LowRank, exchanges: Sequence[PromptReplyBatch], past: Sequence[Past]) -> Tensor:
    """The latents that the coprocessor makes of each prompt, [all rows, N, hidden]."""
    count = len(made[SOFT])
    blocks = [_block(part, count) for part in exchanges]
    rows = sum(len(block.ids) for block in blocks)
    soft = made[SOFT].repeat(rows, 1)
    how = Pass(past=past, delta=made, soft=(torch.arange(rows * count, device=soft.device), soft))
    return (twin.hidden(blocks, how) * made[GAIN]).view(rows, count, -1)


def losses_after(
    twin: DenseDecoder,
    exchanges: Sequence[PromptReplyBatch],
    past: Sequence[Past],
    z: Tensor | None,
    first: bool = True,
) -> list[Tensor]:
    """Cross-entropies of each exchange's replies over their prompts and latents z; None: over prompts alone. `first`:
    with the first token of each, which the last latent predicts (nothing here does without latents)."""
    if z is None:
        return losses(twin, [part.replies for part in exchanges], Pass(past=past))
    count = z.shape[1]
    blocks, at, start = [], [], 0
    for part in exchanges:
        block = _behind(part, count, first)
        rows, length = block.ids.shape
        at.append(start + (torch.arange(rows)[:, None] * length + torch.arange(count)).flatten())
        blocks.append(block)
        start += rows * length
    soft = torch.cat(at).to(z.device), z.flatten(0, 1)
    return losses(twin, blocks, Pass(past=past, soft=soft))


def _block(part: PromptReplyBatch, count: int) -> TokenBlock:
    """Places for latents behind each prompt; what tokens stand there does not matter."""
    lengths = part.real.sum(1, keepdim=True)  # [rows, 1]
    ids = torch.zeros((len(lengths), count), dtype=torch.int64, device=lengths.device)
    return TokenBlock(ids, ids + NO_LOSS, lengths + torch.arange(count, device=lengths.device))


def _behind(part: PromptReplyBatch, count: int, first: bool) -> TokenBlock:
    """The replies behind such places."""
    places, replies = _block(part, count), part.replies
    targets = places.targets.clone()
    if first:
        targets[:, -1] = replies.ids[:, 0]
    both = ((places.ids, replies.ids), (targets, replies.targets), (places.positions, replies.positions + count))
    return TokenBlock(*(torch.cat(pair, 1) for pair in both))
