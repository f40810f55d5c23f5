"""A pocket model in fewer KV heads: calibrated, converted, and taught to say again what it said before.

What is trained are the attentions and norms alone, for those are what joining heads touched: a converted model differs
from its base in few tensors. They learn the next tokens of the base's own training data, and its distribution of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.load import files_of, load_model
from phasewise.model import kv_heads
from phasewise.model.source import Source, copy_vocabulary
from phasewise.model.weights import INDEX, SINGLE
from phasewise.train import dense
from phasewise.train.artefacts import frozen
from phasewise.train.dense import DenseDecoder, TokenBlock
from phasewise.train.device import device, halved
from phasewise.train.mixture import Mixture, Stage, of_model, unpadded
from phasewise.train.pocket import draw_if_possible
from phasewise.train.trainer import TASK_WEIGHT, StepLoss, TrainingRecipe, TrainingRun, fit

SEEN = 131_072  # tokens of calibration
LOOK = Stage(1.0, 512, 4096, code=0.4, long=0.3, copies=0.15)
STAGES = (
    Stage(0.85, 512, 2048, code=0.35, long=0.3, copies=0.15),
    Stage(1.0, 1024, 3072, code=0.34, long=0.4, copies=0.15),
)
DECAY = ((0.2, 1.0), (1.0, 0.02))
RATE = 1e-3
PAUSE = 150.0  # seconds between checkpoints
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


@dataclass(frozen=True)
class KVHeadsJob:
    """One conversion. `out` becomes an ordinary checkpoint; out/recovery has checkpoint.pt, losses.csv, curve.png."""

    model: str  # a name or directory
    heads: int
    out: Path
    tokens: int = 0  # of recovery; none: the heads are joined, and nothing is trained
    seed: int = 0
    resume: bool = False

    @property
    def aside(self) -> Path:
        return self.out / "recovery"


def convert(job: KVHeadsJob, bar: Bar) -> Path:
    """Calibrate, join heads and recover; returns `job.out`. A `bar` of a title and a total is told how far it is.

    Raises UserError for a model that cannot have so few heads, or cannot be trained, before anything is written.
    """
    files = files_of(job.model)
    config = kv_heads.check(files, job.heads)
    if job.tokens:
        dense.load(files.path)  # refuses what has no twin to train
    data = of_model(files, config.eos, job.seed)
    if not job.resume:
        texts = list(looked_at(data, config.max_positions))
        model = load_model(job.model, dtype=torch.float32)
        with bar("looking at caches", len(texts)) as tell:
            seen = kv_heads.calibrate(model, texts, job.heads, tell)
        kv_heads.convert(files, job.heads, kv_heads.bases(config, seen), job.out)
        copy_vocabulary(files, job.out)
    return recover(job, files, data) if job.tokens else job.out


def looked_at(data: Mixture, longest: int, tokens: int = SEEN) -> Iterator[list[int]]:
    """Texts of calibration: steps that recovery does not begin with, source and tasks in turn."""
    left = tokens
    for step in count(1_000_000):
        source, tasks = data.step(step, LOOK)
        rows = [row[unpadded(row, data.pad)].tolist() for block in (*source, *tasks) for row in block.ids]
        Random(step).shuffle(rows)
        for row in rows:
            if left <= 0:
                return
            yield row[:longest]
            left -= len(row)


# ---- recovery
def start(student: DenseDecoder) -> TrainingRun[nn.ModuleList]:
    """A fresh run of what conversion touched; the rest is frozen."""
    student.requires_grad_(False)
    parts = ("self_attn", "input_layernorm", "post_attention_layernorm")
    touched = [getattr(layer, part) for layer in student.layers for part in parts]
    learns = nn.ModuleList([*touched, student.norm]).requires_grad_(True)
    return TrainingRun(learns, [AdamW(learns.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


def recovery_loss(
    teacher: DenseDecoder, student: DenseDecoder, batch: tuple[list[TokenBlock], list[TokenBlock]]
) -> StepLoss:
    """Cross-entropy of the next tokens, and the divergence from what the base expected there; tasks weigh more."""
    blocks = [*batch[0], *batch[1]]
    targets = torch.cat([block.targets.flatten() for block in blocks])
    wanted = targets >= 0
    with halved(teacher.embed_tokens.weight.device):
        with torch.no_grad():
            before = _logits(teacher, blocks, wanted).log_softmax(-1)
        now = _logits(student, blocks, wanted).log_softmax(-1)
    said = F.nll_loss(now, targets[wanted], reduction="none")
    apart = F.kl_div(now, before, reduction="none", log_target=True).sum(-1)
    of_code = sum(int((block.targets >= 0).sum()) for block in batch[0])
    weight = torch.full_like(said, TASK_WEIGHT)
    weight[:of_code] = 1.0
    means = {"code": said[:of_code], "task": said[of_code:], "apart": apart}
    return StepLoss(
        ((said + apart) * weight).sum() / weight.sum(),
        {name: float(part.detach().mean()) for name, part in means.items()},
        sum(block.ids.numel() for block in blocks),
    )


def _logits(model: DenseDecoder, blocks: list[TokenBlock], wanted: Tensor) -> Tensor:
    return F.linear(model.hidden(blocks)[wanted], model.embed_tokens.weight).float()


def recover(job: KVHeadsJob, files: Source, data: Mixture) -> Path:
    """Train what the heads lost, in place: the checkpoint in `job.out` gets better. Resumable."""
    torch.manual_seed(job.seed)
    teacher = frozen(job.model)
    student = dense.load(job.out).to(device())
    run = start(student)
    run.settings = {"model": job.model, "heads": job.heads, "seed": job.seed}
    if job.resume:
        run.read(job.aside / "checkpoint.pt")

    def save(_: TrainingRun[nn.ModuleList]) -> None:
        write(student, files, job.out)

    recipe = TrainingRecipe(job.tokens, STAGES, decay=DECAY, checkpoint_seconds=PAUSE, warmup_steps=20)
    fit(run, lambda _, batch: recovery_loss(teacher, student, batch), data, recipe, job.aside, save)
    save(run)
    draw_if_possible(job.aside)
    return job.out


def write(student: DenseDecoder, files: Source, folder: Path) -> None:
    """The checkpoint as it stands, in the dtypes of its base, in the place of what is there."""
    tensors = files.tensors()
    made = {f"model.{name}": value.detach() for name, value in student.state_dict().items()}
    fresh = folder / "model.new"
    save_file({name: value.to(tensors.dtype(name)) for name, value in made.items()}, fresh, {"format": "pt"})
    os.replace(fresh, folder / SINGLE)
    (folder / INDEX).unlink(missing_ok=True)
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
