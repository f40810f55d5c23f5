"""The fuser for decode.c2c (arXiv 2510.03215, section on training): prompts are read by both models, replies by the
receiver over what was fused, and the loss is that of the replies. Both models stay frozen.

Gates are soft and noisy while they are learned (Gumbel-sigmoid), ever harder, and in the end open or closed. At first
the fuser adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.load import load_model
from phasewise.methods.decode._fuser import SIDES, added, layer_map
from phasewise.methods.decode.c2c import C2C
from phasewise.model.artefacts import Artefact, fingerprint
from phasewise.train.artefacts import ArtefactJob, frozen
from phasewise.train.dense import DenseDecoder, losses
from phasewise.train.device import halved
from phasewise.train.exchanges import Exchanges, Pair, PromptReplyBatch
from phasewise.train.mixture import Stage
from phasewise.train.passes import Pass, Past
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, weighed

TOKENS = 1_500_000  # prompts and padding included
RATE = 3e-3
STAGES = (
    Stage(0.7, 512, 4096, code=0.4, long=0.2, copies=0.3),
    Stage(1.0, 1024, 6144, code=0.35, long=0.25, copies=0.3),
)
DECAY = ((0.5, 1.0), (1.0, 0.02))
COLDEST = 1e-3  # temperature of the gates in the end; 1 at first


class TrainedFuser(nn.Module):
    """Trained tensors, by the names of the artefact. Gates are at first neither open nor closed, and content is 0."""

    def __init__(self, made: Artefact) -> None:
        super().__init__()
        self.names = tuple(made.shapes)
        start = {name: _start(name, shape) for name, shape in made.shapes.items()}
        self.parts = nn.ParameterDict({name.replace(".", "_"): value for name, value in start.items()})

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by their names in the artefact."""
        return {name: self.parts[name.replace(".", "_")] for name in self.names}


def _start(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("norm"):
        return torch.ones(shape)
    if name.endswith((".in", "up", "down", "head")):
        return torch.randn(shape) / sqrt(shape[-1])
    return torch.zeros(shape)


class C2CSplit(Exchanges):
    """Prompts but for their last token, which the receiver reads over what was fused, as it does the reply."""

    def _blocks(self, pairs: list[Pair]) -> list[PromptReplyBatch]:
        return super()._blocks([(prompt[:-1], [prompt[-1], *reply]) for prompt, reply in pairs if len(prompt) > 1])


def train(method: C2C, job: ArtefactJob) -> Path:
    """Train for one pair of models; `job.out` gets checkpoint.pt, losses.csv and the artefact. Raises UserError for
    several sharers."""
    if len(method.each) > 1:
        raise UserError(f"decode.c2c: sharer={method.sharer}: a fuser is trained for one sharer: train one for each")
    base, twin = job.base()
    small = load_model(method.sharer, dtype=torch.float32)
    sharer = frozen(method.sharer)
    made = method.artefact(base.config, small.config, fingerprint(small))
    torch.manual_seed(job.seed)
    tokens = job.tokens or TOKENS
    run = start(TrainedFuser(made))
    if job.resume:
        run.read(job.checkpoint)

    def save(run: TrainingRun[TrainedFuser]) -> None:
        job.save(base, made, run.model.tensors(), tokens)

    def loss(stage: Stage, batch: tuple[list[PromptReplyBatch], list[PromptReplyBatch]]) -> StepLoss:
        gates = noisy(run.model, min(1.0, run.tokens / tokens), job.seed, run.step)
        return reply_loss(twin, sharer, run.model, gates, batch)

    fit(run, loss, C2CSplit(job.mixture()), TrainingRecipe(tokens, STAGES, decay=DECAY), job.out, save)
    return job.save(base, made, run.model.tensors(), tokens)


def start(learns: TrainedFuser) -> TrainingRun[TrainedFuser]:
    """A fresh run; both frozen models are no part of it."""
    return TrainingRun(learns, [AdamW(learns.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)])


Gates = dict[str, Tensor]  # by side, a factor [layers] from 0 to 1


def noisy(learns: TrainedFuser, progress: float, seed: int, step: int) -> Gates:
    """Gates of a step: a function of what was learned, of how far the run is, of its seed and the step."""
    gen = torch.Generator().manual_seed(seed * 1_000_003 + step)
    out, weights = {}, learns.tensors()
    for side in SIDES:
        logits = weights[f"{side}.gate"]
        noise = torch.rand(logits.shape, generator=gen).clamp(1e-6, 1 - 1e-6).logit().to(logits.device)
        out[side] = ((logits + noise) / COLDEST**progress).sigmoid()
    return out


def settled(learns: TrainedFuser) -> Gates:
    """Gates as they serve."""
    weights = learns.tensors()
    return {side: (weights[f"{side}.gate"] > 0).float() for side in SIDES}


def reply_loss(
    twin: DenseDecoder, sharer: DenseDecoder, learns: TrainedFuser, gates: Gates,
    batch: tuple[list[PromptReplyBatch], list[PromptReplyBatch]],
) -> StepLoss:  # fmt: skip
    """Cross-entropy of replies over fused prompts."""
    source, tasks = batch
    both = [*source, *tasks]
    with halved(twin.embed_tokens.weight.device):
        prompts, real = [part.prompts for part in both], [part.real for part in both]
        past = fused(learns, gates, twin.prefill(prompts, real), sharer.prefill(prompts, real))
        each = losses(twin, [part.replies for part in both], Pass(past=past))
    code, task = torch.cat(each[: len(source)]), torch.cat(each[len(source) :])
    return weighed(code, task, sum(part.tokens for part in both))


def fused(learns: TrainedFuser, gates: Gates, own: Sequence[Past], other: Sequence[Past]) -> list[Past]:
    """The KV that the receiver reads, block by block."""
    weights = learns.tensors()
    out = []
    for mine, theirs in zip(own, other, strict=True):
        of = layer_map(len(mine.layers), len(theirs.layers))
        layers = {}
        for layer, rows in mine.layers.items():
            pair = []
            for side, x, y in zip(SIDES, rows, theirs.layers[of[layer]], strict=True):
                more = added(weights, side, layer, x.flatten(2), y.flatten(2)).view(x.shape)
                pair.append((x + gates[side][layer] * more).to(x.dtype))
            layers[layer] = (pair[0], pair[1])
        out.append(Past(mine.real, layers))
    return out
