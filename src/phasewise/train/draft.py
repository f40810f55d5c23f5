"""A draft for any target whose tokenizer is at hand, in the stages of FastDraft (arXiv 2411.11055): first a small
decoder learns the pocket models' mixture in the target's tokens, then what the target itself writes. Resumable.

Left out: continued pre-training of a pruned target, and a loss on the target's whole distributions.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.llm import LLM
from phasewise.load import config_of, files_of
from phasewise.model.config import ModelConfig
from phasewise.model.source import copy_vocabulary
from phasewise.request.params import Params
from phasewise.train import dense
from phasewise.train.agreement import Agreement, agreement
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.device import device, halved
from phasewise.train.folders import replaced
from phasewise.train.mixture import BATCH, CURRICULUM, Mixture, Stage, batched
from phasewise.train.tokenizer import plain
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, start, whole_loss
from phasewise.train.wording import Templated
from phasewise.train.written import Prompts, WrittenBatches, WrittenText, collect, of_file, of_mixture

HEAD, CONTEXT = 64, 2048  # width of a head; longest rows
EPOCHS, HELD_OUT, LONGEST = 3, 64, 384  # over what was written; prompts to judge by; tokens of a prompt
LARGE = 16_384  # a vocabulary beyond this has logits to take smaller steps for


@dataclass(frozen=True)
class DraftJob:
    """One draft. `out` gets pretrain/, written.jsonl, heldout.jsonl, tune/, agreement.json and model/."""

    target: str  # a name, directory or file
    out: Path
    layers: int = 2
    width: int = 192
    tokens: int = 12_000_000  # of the first stage
    sequences: int = 4_000  # continuations by the target
    new: int = 96  # tokens of one
    prompts: Path | None = None  # JSON lines to continue, instead of the mixture's
    seed: int = 0
    resume: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """The settings that a resumed run must not change."""
        given = {name: value for name, value in vars(self).items() if name not in ("out", "resume")}
        return {**given, "prompts": self.prompts and str(self.prompts)}


def train(job: DraftJob) -> tuple[Path, Agreement, Agreement]:
    """The folder of the draft, and its agreement with the target before and after it learned from it.

    Raises UserError for a shape that cannot be, and if a run cannot be resumed as it was.
    """
    config, files = config_of(job.target), files_of(job.target)
    form = shape(job, config)
    wording = Templated(files, config.eos)
    texts = list(sources(held_out=False).values())
    mixture = Mixture(wording.tokenizer, texts, job.seed, wording)
    prompts = asked(job, wording, mixture, min(LONGEST, config.max_positions - job.new))
    job.out.mkdir(parents=True, exist_ok=True)
    run = pretrained(job, form, mixture)
    written, heldout = continued(job, *prompts)
    before = agreement(run.model, heldout)
    tuned = _tuned(job, form, run.model, WrittenBatches(written, wording.pad, job.seed))
    after = agreement(tuned.model, heldout)
    with replaced(job.out / "model") as fresh:
        dense.save(tuned.model, fresh, config.eos, config.bos)
        copy_vocabulary(files, fresh)
    found = {"before": asdict(before), "after": asdict(after)}
    (job.out / "agreement.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return job.out / "model", before, after


def shape(job: DraftJob, config: ModelConfig) -> DenseShape:
    """A narrow Llama over the target's vocabulary and as long."""
    if job.width % HEAD or job.width < HEAD:
        raise UserError(f"width={job.width} must be a multiple of {HEAD}, as {HEAD * max(1, job.width // HEAD)} is")
    inner = round(job.width * 8 / 3 / HEAD) * HEAD
    context = config.max_positions
    if job.new >= context - 16:
        raise UserError(f"new={job.new}: the target's context of {context:,} tokens has room for less")
    return DenseShape(config.vocab, job.width, job.layers, job.width // HEAD, 1, inner, HEAD, context)


def pretrained(job: DraftJob, form: DenseShape, mixture: Mixture) -> TrainingRun[DenseDecoder]:
    """The first stage: source and tasks."""
    context = min(form.max_position_embeddings, CONTEXT)
    stages = tuple(replace(stage, row=min(stage.row, context)) for stage in CURRICULUM)
    recipe = TrainingRecipe(job.tokens, batched(stages, BATCH // 4 if form.vocab_size > LARGE else BATCH))
    run = _begun(job, form, recipe, job.out / "pretrain")
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


def _tuned(job: DraftJob, form: DenseShape, model: DenseDecoder, written: WrittenBatches) -> TrainingRun[DenseDecoder]:
    """The second stage: the target's text, at lower rates."""
    stage = Stage(1.0, CONTEXT, 4096, code=0.0, long=0.0, copies=0.0)
    recipe = TrainingRecipe(
        EPOCHS * written.tokens, (stage,), opening_rate=0.006, closing_rate=0.002, embedding_rate=0.01, norm_rate=1e-3,
        decay=((0.1, 1.0), (1.0, 0.02)),
    )  # fmt: skip
    run = _begun(job, form, recipe, job.out / "tune")
    if run.step == 0:
        run.model.load_state_dict(model.state_dict())

    def loss(stage: Stage, batch: list[TokenBlock]) -> StepLoss:
        with halved(run.device):
            each = torch.cat(dense.losses(run.model, batch))
        return StepLoss(
            each.mean(), {"written": float(each.detach().mean())}, sum(block.ids.numel() for block in batch)
        )

    fit(run, loss, written, recipe, job.out / "tune")
    return run


def _begun(job: DraftJob, form: DenseShape, recipe: TrainingRecipe, out: Path) -> TrainingRun[DenseDecoder]:
    """A run of one stage, where its checkpoint stands if it is to be resumed and has one."""
    torch.manual_seed(job.seed)
    run = start(DenseDecoder(form), recipe)
    run.settings = job.settings
    checkpoint = out / "checkpoint.pt"
    if job.resume and checkpoint.is_file():
        run.read(checkpoint)
    elif not job.resume:
        checkpoint.unlink(missing_ok=True)
    return run
