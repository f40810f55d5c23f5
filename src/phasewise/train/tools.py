"""Teach a pocket model to call a calculator: low-rank weights on all its linear layers, its own weights frozen.

What the assistant says in conversations with tools is learned by cross-entropy. What the model does without tools is
kept by the Kullback-Leibler divergence from what it did before, over its own training data.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.model import tuned
from phasewise.model.artefacts import fingerprint
from phasewise.model.directory import Directory
from phasewise.model.lowrank import shapes
from phasewise.model.raw import read_json
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock, losses
from phasewise.train.device import halved
from phasewise.train.folders import replaced
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Stage
from phasewise.train.passes import Pass
from phasewise.train.pocket import draw_if_possible
from phasewise.train.tooluse import TEMPLATE, ToolBatch, ToolConversations
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit

TOKENS, RANK, RATE = 1_000_000, 16, 3e-3  # padding included
STAGES = (
    Stage(0.35, 320, 3072, code=0.06, long=0.0, copies=0.25, short=96),  # easy sums alone
    Stage(1.0, 320, 2048, code=0.06, long=0.0, copies=0.25, short=96),
)
DECAY = ((0.5, 1.0), (1.0, 0.01))
KEEP = 2.0  # weight of the divergence from the base, beside the cross-entropy


def start(delta: LowRank) -> TrainingRun[LowRank]:
    """A fresh run; the frozen base is no part of it."""
    return TrainingRun(delta, [AdamW(delta.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


def tool_loss(twin: DenseDecoder, delta: LowRank, batch: ToolBatch) -> StepLoss:
    """Cross-entropy of what is said with tools, and the divergence from the base where there are none."""
    tuned = Pass(delta=delta)
    with halved(twin.embed_tokens.weight.device):
        said = torch.cat(losses(twin, batch.learned, tuned))
        kept = divergence(twin, batch.kept, tuned)
    total = said.mean() + KEEP * kept.mean()
    means = {"call": float(said.detach().mean()), "kept": float(kept.detach().mean())}
    return StepLoss(total, means, sum(block.ids.numel() for block in (*batch.learned, *batch.kept)))


def divergence(twin: DenseDecoder, blocks: list[TokenBlock], tuned: Pass) -> Tensor:
    """KL(base || tuned) in nats at every learned token, float32 [learned]."""
    wanted = torch.cat([block.targets.flatten() for block in blocks]) >= 0
    with torch.no_grad():
        base = _logits(twin, blocks, Pass(), wanted).log_softmax(-1)
    own = _logits(twin, blocks, tuned, wanted).log_softmax(-1)
    return F.kl_div(own, base, reduction="none", log_target=True).sum(-1)


def _logits(twin: DenseDecoder, blocks: list[TokenBlock], how: Pass, wanted: Tensor) -> Tensor:
    return F.linear(twin.hidden(blocks, how)[wanted], twin.embed_tokens.weight).float()


def train(job: ArtefactJob) -> Path:
    """Teach `job.model`; `job.out` gets checkpoint.pt, losses.csv, curve.png, the low-rank weights and model/.

    Returns the folder of the model, a plain checkpoint. Raises UserError for a model that this is not for, and if a
    run cannot be resumed so.
    """
    base, twin = job.base()
    files = base.files
    if not isinstance(files, Directory):
        raise UserError(f"{files.path} is not a directory with a model of its own: teach pocket, or one like it")
    torch.manual_seed(job.seed)
    tokens = job.tokens or TOKENS
    run = start(LowRank(shapes(base.config, range(base.config.layers), RANK)))
    run.settings = {"model": job.model, "seed": job.seed}
    if job.resume:
        run.read(job.checkpoint)
    words = f"phasewise train tools --model {job.model} --tokens {tokens} --seed {job.seed}"
    about = {"base": fingerprint(base), "over": files.path.name, "command": words}

    def save(run: TrainingRun[LowRank]) -> None:
        tuned.save(job.out / tuned.FILE, run.model.tensors(), about)

    recipe = TrainingRecipe(tokens, STAGES, decay=DECAY)
    fit(
        run, lambda _, batch: tool_loss(twin, run.model, batch), ToolConversations(job.mixture()), recipe, job.out, save
    )
    save(run)
    draw_if_possible(job.out)
    return export(files, job.out / tuned.FILE, job.out / "model", TEMPLATE)


def export(base: Directory, delta: Path, folder: Path, template: str | None) -> Path:
    """A complete model folder, in the place of what is there: the base with what was learned added, and with this chat
    template; None: the base's own."""
    merged = tuned.Merged(base, delta)
    with replaced(folder) as fresh:
        fresh.mkdir(parents=True)
        tensors = {name: merged.read(name).contiguous() for name in merged.where}
        save_file(tensors, fresh / "model.safetensors", {"format": "pt"})
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            shutil.copyfile(base.path / name, fresh / name)
        config = read_json(base.path / "tokenizer_config.json")
        config |= {} if template is None else {"chat_template": template}
        (fresh / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
