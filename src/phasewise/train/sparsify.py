"""Trains linear layers to be N:M sparse: of every M inputs of an output N weights are left in the end.

Three recipes, whose steps, data and rates are alike:

    decay      weights outside the mask are multiplied with d, which falls from 1 to 0 (arXiv 2402.04744): first steps
               are dense ones (d = 1), last ones sparse (d = 0). The mask is of the largest weights, anew each step, and
               the gradient passes as if d were 1, so that what is outside may come back
    sr-ste     d = 0 from the first step on; mask and gradient likewise, and outside the mask 0.0002 w is added to the
               gradient (arXiv 2102.04010)
    magnitude  the mask of the first step stays, and only what is inside learns

Embeddings, the head and norms stay dense, and learn as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.load import files_of
from phasewise.model.fingerprint import fingerprint
from phasewise.model.levels import matrices
from phasewise.model.nm import NMMatrix, NMPattern, largest, require_whole
from phasewise.model.parse import parse_config
from phasewise.train import dense
from phasewise.train.dense import DenseDecoder, TokenBlock, losses
from phasewise.train.device import halved
from phasewise.train.folders import replaced
from phasewise.train.mixture import Stage, of_model
from phasewise.train.pocket import draw_if_possible
from phasewise.train.prune import write
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, weighed

Recipe = Literal["decay", "sr-ste", "magnitude"]
Fade = Literal["linear", "exponential"]
RECIPES: tuple[Recipe, ...] = ("decay", "sr-ste", "magnitude")
TOKENS = 600_000
STAGES = (Stage(1.0, 512, 2048, code=0.5, long=0.25, copies=0.15),)
STEP_TOKENS = STAGES[0].step_tokens
DECAY = ((0.2, 1.0), (1.0, 0.02))  # of the rate
RATE, WARMUP = 1e-3, 20
STEEP = 5.0  # d falls to e^-STEEP in the exponential, before it is 0
SR_STE = 2e-4  # what is outside the mask shrinks by so much of it, in the gradient


@dataclass(frozen=True)
class SparsifyJob:
    """One run. `out` gets checkpoint.pt, losses.csv, curve.png, and the checkpoint `model`/ at the end.

    `dense` and `sparse`: shares of the steps, at the beginning and at the end, in which d is 1 and 0 (decay); `fade`:
    how it falls in between.
    """

    model: str  # a name or directory
    out: Path
    pattern: NMPattern
    recipe: Recipe = "decay"
    tokens: int = TOKENS
    dense: float = 0.05
    sparse: float = 0.4
    fade: Fade = "exponential"
    rate: float = RATE
    seed: int = 0
    resume: bool = False
    by_chance: bool = False  # masks are drawn by chance and stay, for comparison

    @property
    def steps(self) -> int:
        return -(-self.tokens // STEP_TOKENS)

    def share(self, step: int) -> float:
        """d of a step: what weights outside the mask are multiplied with."""
        if self.recipe != "decay":
            return 0.0
        begin, end = round(self.dense * self.steps), self.steps - round(self.sparse * self.steps)
        left = min(1.0, max(0.0, (end - step) / max(end - begin, 1)))
        return math.exp(STEEP * (left - 1)) if left > 0 and self.fade == "exponential" else left


# ---- layers
class FadedWeight(torch.autograd.Function):
    """A weight whose numbers outside a mask are multiplied with `share`; the gradient passes as if they were not, with
    `pull` times those numbers added to it there."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, share: float, pull: float) -> Tensor:
        ctx.pull = pull
        ctx.save_for_backward(*((weight, mask) if pull else ()))
        return torch.where(mask, weight, weight * share)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        if ctx.pull:
            weight, mask = ctx.saved_tensors
            grad = grad + weight.masked_fill(mask, 0.0) * ctx.pull
        return grad, None, None, None


class NMLinear(nn.Linear):
    """A linear layer without a bias, of the weight that another one has; `mask` bool [out, in] is what it keeps."""

    mask: Tensor

    def __init__(self, base: nn.Linear, pattern: NMPattern, recipe: Recipe) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.pattern, self.recipe = base.weight, pattern, recipe
        self.share = 0.0
        self.register_buffer("mask", largest(base.weight, pattern))

    def enter(self, share: float) -> None:
        """A step with this d begins: where weights outside the mask may come back, it is of the largest weights now."""
        if share < 1 and self.recipe != "magnitude":
            self.mask.copy_(largest(self.weight, self.pattern))
        self.share = share

    def forward(self, input: Tensor) -> Tensor:
        if self.recipe == "magnitude":
            return F.linear(input, self.weight.masked_fill(~self.mask, 0.0))
        pull = SR_STE if self.recipe == "sr-ste" else 0.0
        return F.linear(input, FadedWeight.apply(self.weight, self.mask, self.share, pull))  # type: ignore[no-untyped-call]


def sparse_layers(model: DenseDecoder, pattern: NMPattern, recipe: Recipe) -> dict[str, NMLinear]:
    """Makes the linear layers of all layers sparse ones, in place; returns them by the names of their weights."""
    found = {}
    for name, base in list(model.layers.named_modules()):
        if isinstance(base, nn.Linear):
            parent, _, own = name.rpartition(".")
            made = NMLinear(base, pattern, recipe)
            setattr(model.layers.get_submodule(parent), own, made)
            found[f"model.layers.{name}.weight"] = made
    return found


def draw_masks(layers: Sequence[NMLinear], seed: int) -> None:
    """Gives layers whose masks stay some that are drawn by chance."""
    draw = torch.Generator().manual_seed(seed)
    for each in layers:
        assert each.recipe == "magnitude", "others choose their masks"
        each.mask.copy_(largest(torch.rand(each.mask.shape, generator=draw), each.pattern))


# ---- training
def start(job: SparsifyJob, model: DenseDecoder) -> TrainingRun[DenseDecoder]:
    """A fresh run over all parameters of a model."""
    return TrainingRun(model, [AdamW(model.parameters(), lr=job.rate, betas=(0.9, 0.95), weight_decay=0.0)])


def step_loss(
    job: SparsifyJob, model: DenseDecoder, layers: Sequence[NMLinear], step: int,
    batch: tuple[list[TokenBlock], list[TokenBlock]],
) -> StepLoss:  # fmt: skip
    """Cross-entropy of the next tokens with the masks and the d of a step, tasks weighing more."""
    share = job.share(step)
    for each in layers:
        each.enter(share)
    blocks = [*batch[0], *batch[1]]
    with halved(model.embed_tokens.weight.device):
        found = losses(model, blocks)
    code, task = torch.cat(found[: len(batch[0])]), torch.cat(found[len(batch[0]) :])
    return weighed(code, task, sum(block.ids.numel() for block in blocks))


def train(job: SparsifyJob) -> Path:
    """Train and write `job.out`/model; returns it. Raises UserError for a model that training does not know, a pattern
    that does not fit it, shares that leave no steps to fade in, other settings than those of the run to go on with, and
    a loss that is no number any more."""
    files = files_of(job.model)
    config = parse_config(files.settings())
    folder = job.out / "model"
    require_whole(job.pattern, matrices(config), files.path)
    if job.recipe == "decay" and not (min(job.dense, job.sparse) >= 0 and job.dense + job.sparse < 1):
        raise UserError(f"--dense {job.dense:g} and --sparse {job.sparse:g} leave no steps in which weights fade: "
                        "their sum must be below 1, and neither below 0")  # fmt: skip
    torch.manual_seed(job.seed)
    model = dense.load(files.path)
    layers = sparse_layers(model, job.pattern, job.recipe)
    if job.by_chance:
        draw_masks(list(layers.values()), job.seed)
    run = start(job, model)
    run.settings = {"model": fingerprint(config, files.tensors()), "pattern": str(job.pattern), "recipe": job.recipe,
                    "tokens": job.tokens, "dense": job.dense, "sparse": job.sparse, "fade": job.fade,
                    "rate": job.rate, "seed": job.seed, "by_chance": job.by_chance}  # fmt: skip
    if job.resume:
        run.read(job.out / "checkpoint.pt")
    recipe = TrainingRecipe(job.tokens, STAGES, warmup_steps=WARMUP, decay=DECAY)
    data, every = of_model(files, config.eos, job.seed), list(layers.values())
    try:
        fit(run, lambda _, batch: step_loss(job, model, every, run.step, batch), data, recipe, job.out)
    except FloatingPointError as error:
        raise UserError(f"{error}, now --rate {job.rate:g}. Begin anew with a lower one") from error
    for each in every:
        each.enter(0.0)
    draw_if_possible(job.out)
    own = {f"model.{name}": value.detach().cpu() for name, value in model.named_parameters()}

    def found(name: str) -> NMMatrix:
        return NMMatrix.of(name, own[name], job.pattern, layers[name].mask.cpu())

    with replaced(folder) as fresh:
        write(files, config, fresh, job.pattern, found, own)
    return folder
