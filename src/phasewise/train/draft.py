"""A draft for any target whose tokenizer is at hand, in the stages of FastDraft (arXiv 2411.11055). Resumable.

1. `pretrain`: a small decoder, fresh or made of some of the target's own layers, learns source and tasks.
2. `code`, if asked for: it goes on with source alone.
3. `tune`: it learns what the target itself writes; or, to compare, as many steps of source and tasks.

After each stage its agreement with the target is measured over the same held-out texts of the target. Left out: a loss
on the target's whole distributions, which the paper tried without gain.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.llm import LLM
from phasewise.load import config_of, files_of, model_path
from phasewise.model.config import ModelConfig
from phasewise.model.source import copy_vocabulary
from phasewise.request.params import Params
from phasewise.train import dense
from phasewise.train.agreement import Agreement, agreement
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.device import Data, device, halved
from phasewise.train.folders import replaced
from phasewise.train.mixture import BATCH, CURRICULUM, Mixture, Stage, batched
from phasewise.train.tokenizer import plain
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, start, whole_loss
from phasewise.train.wording import Templated
from phasewise.train.written import Prompts, WrittenBatches, WrittenText, collect, of_file, of_mixture

HEAD, WIDTH, CONTEXT = 64, 192, 2048  # width of a head, and of a fresh draft; longest rows
EPOCHS, HELD_OUT, LONGEST = 3, 64, 384  # over what was written; prompts to judge by; tokens of a prompt
LARGE = 16_384  # a vocabulary beyond this has logits to take smaller steps for
ROW, STEP = 512, 4096  # tokens of a row and of a step of source, after the first stage
APART = 1 << 30  # more steps than a stage has
Start = Literal["scratch", "pruned"]
TunedOn = Literal["target", "text"]


@dataclass(frozen=True)
class DraftJob:
    """One draft. `out` gets a folder for each stage, written.jsonl, heldout.jsonl, agreement.json and model/."""

    target: str  # a name, directory or file
    out: Path
    layers: int = 2
    width: int | None = None  # None: WIDTH, or the target's own where its layers are taken
    tokens: int = 12_000_000  # of the first stage
    sequences: int = 4_000  # continuations by the target
    new: int = 96  # tokens of one
    prompts: Path | None = None  # JSON lines to continue, instead of the mixture's
    seed: int = 0
    resume: bool = False
    start: Start = "scratch"  # pruned: layers of the target, its embeddings and its norm
    code: int = 0  # tokens of source alone, after the first stage; 0: no such stage
    tuned_on: TunedOn = "target"  # text: as many steps of source and tasks instead

    @property
    def settings(self) -> dict[str, object]:
        """The settings that a resumed run must not change."""
        given = {name: value for name, value in vars(self).items() if name not in ("out", "resume")}
        return {**given, "prompts": self.prompts and str(self.prompts)}


@dataclass(frozen=True)
class TrainedDraft:
    """The folder of a draft, and its agreement with the target: at the `start`, and after each stage by its name."""

    folder: Path
    stages: dict[str, Agreement]

    def __str__(self) -> str:
        return "\n".join([f"{self.folder}", *(f"  {name}: {found}" for name, found in self.stages.items())])


def train(job: DraftJob) -> TrainedDraft:
    """All stages, from wherever a run that is resumed stood.

    Raises UserError for a shape or a start that cannot be, and if a run cannot be resumed as it was.
    """
    config, files = config_of(job.target), files_of(job.target)
    form = shape(job, config)
    begin = beginning(job, form)
    wording = Templated(files, config.eos)
    texts = list(sources(held_out=False).values())
    mixture = Mixture(wording.tokenizer, texts, job.seed, wording)
    prompts = asked(job, wording, mixture, min(LONGEST, config.max_positions - job.new))
    job.out.mkdir(parents=True, exist_ok=True)
    run = pretrained(job, begin, form, mixture)
    written, heldout = continued(job, *prompts)
    stages = {"start": agreement(begin().to(run.device), heldout), "pretrain": agreement(run.model, heldout)}
    if job.code:
        run = _on_code(job, form, run.model, mixture)
        stages["code"] = agreement(run.model, heldout)
    learned = WrittenBatches(written, wording.pad, job.seed)
    run = _tuned(job, form, run.model, learned, mixture)
    stages["tune"] = agreement(run.model, heldout)
    with replaced(job.out / "model") as fresh:
        dense.save(run.model, fresh, config.eos, config.bos)
        copy_vocabulary(files, fresh)
    found = {name: asdict(each) for name, each in stages.items()}
    (job.out / "agreement.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return TrainedDraft(job.out / "model", stages)


def shape(job: DraftJob, config: ModelConfig) -> DenseShape:
    """A narrow Llama over the target's vocabulary and as long; or one of the target's own sizes with fewer layers."""
    for name, value, known in (("start", job.start, get_args(Start)), ("tuned_on", job.tuned_on, get_args(TunedOn))):
        if value not in known:
            raise UserError(f"{name}={value}: choose {' or '.join(known)}")
    context = config.max_positions
    if job.new >= context - 16:
        raise UserError(f"new={job.new}: the target's context of {context:,} tokens has room for less")
    if job.start == "pruned":
        return _pruned_shape(job, config)
    width = job.width or WIDTH
    if width % HEAD or width < HEAD:
        raise UserError(f"width={width} must be a multiple of {HEAD}, as {HEAD * max(1, width // HEAD)} is")
    inner = round(width * 8 / 3 / HEAD) * HEAD
    return DenseShape(config.vocab, width, job.layers, width // HEAD, 1, inner, HEAD, context)


def _pruned_shape(job: DraftJob, config: ModelConfig) -> DenseShape:
    if job.width not in (None, config.hidden):
        raise UserError(f"width={job.width}: layers of the target are {config.hidden} wide: leave it out, or begin "
                        "from scratch")  # fmt: skip
    if not job.layers < config.layers:
        raise UserError(f"layers={job.layers}: the target has {config.layers}: take fewer")
    return replace(dense.load(model_path(job.target)).shape, num_hidden_layers=job.layers)


def beginning(job: DraftJob, form: DenseShape) -> Callable[[], DenseDecoder]:
    """Makes the decoder that training begins with, a fresh copy each time. Raises UserError for a target of which
    `dense` knows no twin, if its layers are to be taken."""
    if job.start == "scratch":

        def drawn() -> DenseDecoder:
            torch.manual_seed(job.seed)
            return DenseDecoder(form)

        return drawn
    whole = dense.load(model_path(job.target))
    pruned = dense.of_layers(whole, spread_over(whole.shape.num_hidden_layers, job.layers))
    return lambda: copy.deepcopy(pruned)


def spread_over(layers: int, kept: int) -> list[int]:
    """So many of the layers, evenly, the first and the last among them; one is the first."""
    return [round(i * (layers - 1) / max(1, kept - 1)) for i in range(kept)]


def pretrained(
    job: DraftJob, begin: Callable[[], DenseDecoder], form: DenseShape, mixture: Mixture
) -> TrainingRun[DenseDecoder]:
    """The first stage: source and tasks. Layers that were trained already learn at lower rates."""
    context = min(form.max_position_embeddings, CONTEXT)
    stages = tuple(replace(stage, row=min(stage.row, context)) for stage in CURRICULUM)
    recipe = TrainingRecipe(job.tokens, batched(stages, BATCH // 4 if form.vocab_size > LARGE else BATCH))
    if job.start == "pruned":
        recipe = gently(recipe)
    run = _begun(job, begin, recipe, "pretrain")
    fit(run, lambda stage, batch: whole_loss(run, stage, batch), mixture, recipe, job.out / "pretrain")
    return run


def asked(job: DraftJob, wording: Templated, mixture: Mixture, longest: int) -> tuple[Prompts, Prompts]:
    """The prompts that the target continues: to learn from, and held out. Raises UserError for a file that is none of
    prompts, before anything has been computed."""
    if job.prompts is not None:
        return of_file(wording, job.prompts, longest, False), of_file(wording, job.prompts, longest, True)
    held = plain(wording.tokenizer, "\n\n".join(sources(held_out=True).values()))
    streams = {False: mixture.stream.tolist(), True: held}
    learned, judged = (of_mixture(wording, stream, longest, job.seed, part) for part, stream in streams.items())
    return learned, judged


def continued(job: DraftJob, prompts: Prompts, judged: Prompts) -> tuple[list[WrittenText], list[WrittenText]]:
    """The target's continuations: to learn from, and greedy ones that the draft is judged by."""
    paths = {"written": job.out / "written.jsonl", "heldout": job.out / "heldout.jsonl"}
    if not job.resume:
        for path in paths.values():
            path.unlink(missing_ok=True)
    llm = LLM(job.target, device=device().type)
    try:
        drawn = Params(max_tokens=job.new, temperature=1.0, seed=job.seed)
        written = collect(llm, prompts, paths["written"], drawn, job.sequences)
        return written, collect(llm, judged, paths["heldout"], replace(drawn, temperature=0.0), HELD_OUT)
    finally:
        llm.close()


def gently(recipe: TrainingRecipe) -> TrainingRecipe:
    """The same at the rates of weights that have learned before."""
    return replace(recipe, opening_rate=0.006, closing_rate=0.002, embedding_rate=0.01, norm_rate=1e-3)


@dataclass(frozen=True)
class TextBatches:
    """Source and tasks by the stage's shares: the mixture's steps from `first` on, which no other stage learns."""

    of: Mixture
    first: int

    def step(self, step: int, stage: Stage) -> list[TokenBlock]:
        source, tasks = self.of.step(self.first + step, stage)
        return [*source, *tasks]


def _on_code(job: DraftJob, form: DenseShape, model: DenseDecoder, mixture: Mixture) -> TrainingRun[DenseDecoder]:
    """The second stage: source alone."""
    row = min(ROW, form.max_position_embeddings)
    stage = Stage(1.0, row, STEP, code=1.0, long=0.0, copies=0.0)
    return _later(job, model, gently(TrainingRecipe(job.code, (stage,))), "code", TextBatches(mixture, 1 * APART))


def _tuned(
    job: DraftJob, form: DenseShape, model: DenseDecoder, written: WrittenBatches, mixture: Mixture
) -> TrainingRun[DenseDecoder]:
    """The last stage: the target's text; or as many steps of other text."""
    code = {"target": 0.0, "text": 0.4}[job.tuned_on]
    row = CONTEXT if job.tuned_on == "target" else min(ROW, form.max_position_embeddings)
    stage = Stage(1.0, row, STEP, code=code, long=0.0, copies=0.15 if code else 0.0)
    recipe = gently(TrainingRecipe(EPOCHS * written.tokens, (stage,), decay=((0.1, 1.0), (1.0, 0.02))))
    return _later(job, model, recipe, "tune", TextBatches(mixture, 2 * APART) if code else written)


def _later(
    job: DraftJob, model: DenseDecoder, recipe: TrainingRecipe, name: str, data: Data[list[TokenBlock]]
) -> TrainingRun[DenseDecoder]:
    """A stage that goes on from a model, which stays as it is. Its losses are those of all text alike."""
    run = _begun(job, lambda: copy.deepcopy(model), recipe, name)

    def loss(stage: Stage, batch: list[TokenBlock]) -> StepLoss:
        with halved(run.device):
            each = torch.cat(dense.losses(run.model, batch))
        return StepLoss(
            each.mean(), {"written": float(each.detach().mean())}, sum(block.ids.numel() for block in batch)
        )

    fit(run, loss, data, recipe, job.out / name)
    return run


def _begun(
    job: DraftJob, begin: Callable[[], DenseDecoder], recipe: TrainingRecipe, name: str
) -> TrainingRun[DenseDecoder]:
    """A run of one stage, where its checkpoint stands if it is to be resumed and has one."""
    run = start(begin(), recipe)
    run.settings = job.settings
    checkpoint = job.out / name / "checkpoint.pt"
    if job.resume and checkpoint.is_file():
        run.read(checkpoint)
    elif not job.resume:
        checkpoint.unlink(missing_ok=True)
    return run
