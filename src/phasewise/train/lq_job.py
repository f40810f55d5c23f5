"""A checkpoint made into few bits with low-rank weights beside them (LQ-LoRA, arXiv 2311.12023): resumable, and told.

Beside the result lies a folder `OUT.parts` while the work goes on: settings, the gradients' squares, the errors of
every kind for every matrix, the layers that are split, and the pairs while they learn. A run that goes on from there
ends with the same bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from phasewise.errors import UserError
from phasewise.gguf.blocks import LowRankPair
from phasewise.load import files_of, model_path
from phasewise.model import compressed
from phasewise.model.config import ModelConfig
from phasewise.model.fingerprint import fingerprint
from phasewise.model.layout import layout
from phasewise.model.levels import LINEARS
from phasewise.model.lq import DOWN, UP, LQForm, LQLayer, settings
from phasewise.model.lq_kinds import bits_of, decode, fitting
from phasewise.model.parse import parse_config
from phasewise.model.quantisation import KEY
from phasewise.model.shards import write_checkpoint
from phasewise.model.source import copy_vocabulary
from phasewise.model.weights import Tensors
from phasewise.train import dense, few_bits, lq
from phasewise.train.dense import PLAIN, DenseDecoder, TokenBlock
from phasewise.train.device import halved
from phasewise.train.few_bits import Bar, LinearError
from phasewise.train.layer_parts import save_whole
from phasewise.train.lowrank import LowRank
from phasewise.train.lq import KindChoice, LayerSplit
from phasewise.train.passes import Pass
from phasewise.train.trainer import TrainingRun

EXAMPLES = 32  # texts whose gradients are squared, one at a time
TRIAL = 1  # rounds by which kinds are compared
STEP_TEXTS = 4  # of a step of fine-tuning
RATES = {"split": 4e-4, "zero": 2e-3, "random": 4e-4}  # of pairs, falling to 0; from zero they have further to go
SAVED = 10  # steps between two checkpoints
SETTINGS, ERRORS, FISHER, TUNED = "settings.json", "errors", "fisher.safetensors", "tuned.safetensors"
Pairs = dict[str, LowRankPair]


@dataclass(frozen=True)
class LQJob:
    """One conversion into the folder `out`. `tokens`: of the texts for gradients; those are library source that no
    evaluation sees, or of the file `text`. `start`: which pairs there are at first, those of the method, or for
    comparison others (`lq.from_zero`, `lq.by_chance`). `gradients`: a file of squared gradients that
    conversions of one model share, with the same texts; it is made where it is missing."""

    model: str
    out: Path
    form: LQForm
    tokens: int = 16_384
    text: Path | None = None
    seed: int = 0
    resume: bool = False
    start: Literal["split", "zero", "random"] = "split"
    gradients: Path | None = None

    @property
    def aside(self) -> Path:
        return self.out.with_name(f"{self.out.name}.parts")


@dataclass(frozen=True)
class SplitMatrix:
    """A linear layer that is split: its name among the decoder's, and its parts."""

    key: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    rank: int

    @property
    def shape(self) -> tuple[int, int]:
        return sum(shape[0] for _, shape in self.parts), self.parts[0][1][1]

    @property
    def sizes(self) -> dict[str, int]:
        """Bits by kind, those of the pair among them."""
        outputs, inputs = self.shape
        pair = lq.pair_bits(self.rank, outputs, inputs)
        return {kind: round(outputs * inputs * bits_of(kind)) + pair for kind in fitting(inputs)}


@dataclass(frozen=True)
class Converted:
    """What came out: how far every layer's weights are off; the kinds, and the best choice of one kind for all, with
    the errors by which they were compared; and the squared error of what is written, under the gradients where these
    are taken, before pairs learn."""

    errors: list[LinearError]
    choice: KindChoice
    same: KindChoice | None
    error: float
    bits: float  # of a weight, the pairs among them


def matrices_of(config: ModelConfig, rank: int) -> list[SplitMatrix]:
    """The linear layers of all layers; experts have no pairs, since nothing lies beside them when they run."""
    found = []
    for key, parts in layout(config).items():
        if key.rpartition(".")[2] in LINEARS:
            found.append(
                SplitMatrix(key, tuple((name, shape) for name, shape in parts), rank if key.count(".") == 1 else 0)
            )
    return found


def check(config: ModelConfig, form: LQForm, where: object) -> None:
    """Raise UserError naming the matrix that no kind's blocks divide or whose rank is smaller, or the least budget."""
    found = matrices_of(config, form.rank)
    for matrix in found:
        if not matrix.sizes:
            raise UserError(f"{where}: {matrix.parts[0][0]} has {matrix.shape[1]:,} inputs, no multiple of 32: no kind "
                            "of few bits takes it")  # fmt: skip
        if matrix.rank > min(matrix.shape):
            raise UserError(f"{where}: rank={form.rank} is above that of {matrix.key} {list(matrix.shape)}: choose at "
                            f"most {min(matrix.shape)}")  # fmt: skip
    weights = sum(matrix.shape[0] * matrix.shape[1] for matrix in found)
    least = sum(min(matrix.sizes.values()) for matrix in found) / weights
    if form.bits < least:
        pairs = sum(lq.pair_bits(matrix.rank, *matrix.shape) for matrix in found) / weights
        raise UserError(f"{where}: bits={form.bits:g} cannot be met: pairs of rank={form.rank} take {pairs:.2f} bits a "
                        f"weight, and the smallest kinds {least - pairs:.2f}: choose bits={least + 0.005:.2f} or more, "
                        "or a lower rank")  # fmt: skip


def convert(job: LQJob, bar: Bar) -> Converted:
    """LayerSplit all layers and write `job.out`; a `bar` of a title and a total is told how far it is.

    Raises UserError for a form that does not fit the model, a target that holds something, and a run to go on with that
    had other settings; before anything is written.
    """
    return _Run(job).go(bar)


class _Run:
    """One conversion at work."""

    def __init__(self, job: LQJob) -> None:
        self.job = job
        self.files = files_of(job.model)
        self.config = parse_config(self.files.settings())
        self.tensors: Tensors = self.files.tensors()
        check(self.config, job.form, self.files.path)
        self.matrices = matrices_of(self.config, job.form.rank)
        self._check_target()
        if job.form.fisher or job.form.finetune:
            self.twin()  # of a model that training does not know nothing is begun

    def _check_target(self) -> None:
        job = self.job
        if job.out.exists() and (not job.out.is_dir() or any(job.out.iterdir())):
            raise UserError(f"{job.out} is there already: name another folder, or remove it")
        if job.resume and not (job.aside / SETTINGS).is_file():
            raise UserError(f"there is nothing to resume: {job.aside} does not exist; leave --resume out")
        if not job.resume and job.aside.exists():
            raise UserError(f"{job.aside} holds a conversion that was cut short: add --resume, or remove it")

    def twin(self) -> DenseDecoder:
        """The model as training computes it, float32. Raises UserError where it cannot."""
        try:
            return dense.load(model_path(self.job.model))
        except UserError as error:
            raise UserError(f"{error}. Say fisher=false and finetune=0, which need no training") from error

    @cached_property
    def settings(self) -> dict[str, object]:
        """What decides the result, bit for bit."""
        job = self.job
        return {"model": fingerprint(self.config, self.tensors), "weights": str(job.form), "tokens": job.tokens,
                "text": None if job.text is None else str(job.text), "seed": job.seed, "start": job.start}  # fmt: skip

    def go(self, bar: Bar) -> Converted:
        job, form = self.job, self.job.form
        self._begin()
        fisher = self._fisher(bar) if form.fisher else {}
        errors, sizes = self._errors(fisher, bar), [matrix.sizes for matrix in self.matrices]
        weights = sum(matrix.shape[0] * matrix.shape[1] for matrix in self.matrices)
        choice = lq.allocate(errors, sizes, form.bits * weights)
        same = lq.uniform(errors, sizes, form.bits * weights)
        found = self._split(choice, fisher, bar)
        if form.finetune:
            self._finetune(choice, bar)
        with bar(f"writing {job.out}", 1) as tell:
            self._write(choice)
            tell(1)
        shutil.rmtree(job.aside)
        return Converted([one for one, _ in found], choice, same, sum(error for _, error in found),
                         choice.size / weights)  # fmt: skip

    def _begin(self) -> None:
        """Opens the folder of parts. Raises UserError for other settings."""
        file = self.job.aside / SETTINGS
        if not self.job.resume:
            self.job.aside.mkdir(parents=True)
            file.write_text(json.dumps(self.settings) + "\n", encoding="utf-8")
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        for name, now in self.settings.items():
            if before.get(name) != now:
                raise UserError(f"{self.job.aside} was begun with {name} {before.get(name)}, not {now}: resume with "
                                "the same, or remove it")  # fmt: skip

    def _texts(self, tokens: int) -> list[list[int]]:
        return few_bits.calibration_texts(self.files, self.config, tokens, self.job.seed, self.job.text)

    def _weight(self, matrix: SplitMatrix) -> Tensor:
        """Float32 [out, in], all parts one below the other."""
        return torch.cat([self.tensors.read(name, torch.float32).float() for name, _ in matrix.parts])

    # ---- gradients
    def _fisher(self, bar: Bar) -> dict[str, Tensor]:
        """The mean squared gradients of each matrix over single texts, float32 [out, in]."""
        file = self.job.gradients or self.job.aside / FISHER
        if not file.is_file():
            texts = self._texts(self.job.tokens)[:EXAMPLES]
            with bar("squaring gradients", len(texts)) as tell:
                save_whole(file, squared_gradients(self.twin(), texts, self.matrices, tell))
        return load_file(file)

    # ---- kinds
    def _errors(self, fisher: Mapping[str, Tensor], bar: Bar) -> list[dict[str, float]]:
        """By matrix, the error of every kind after TRIAL rounds."""
        found = list[dict[str, float]]()
        with bar("comparing kinds of bits", len(self.matrices)) as tell:
            for number, matrix in enumerate(self.matrices):
                file = self.job.aside / f"errors-{matrix.key}.json"
                if not file.is_file():
                    self._write_json(file, self._tried(matrix, fisher.get(matrix.key)))
                found.append(json.loads(file.read_text(encoding="utf-8")))
                tell(number + 1, matrix.key)
        return found

    def _tried(self, matrix: SplitMatrix, fisher: Tensor | None) -> dict[str, float]:
        weight = self._weight(matrix)
        return {kind: self._one(weight, kind, matrix.rank, fisher, TRIAL).error for kind in matrix.sizes}

    def _one(self, weight: Tensor, kind: str, rank: int, fisher: Tensor | None, rounds: int) -> LayerSplit:
        if self.job.start == "split" or rank == 0:
            return lq.split(weight, kind, rank, fisher, rounds=rounds, seed=self.job.seed)
        return (lq.from_zero if self.job.start == "zero" else lq.by_chance)(weight, kind, rank, fisher, self.job.seed)

    # ---- layers
    def _part(self, key: str) -> Path:
        return self.job.aside / f"layer-{key}.safetensors"

    def _split(self, choice: KindChoice, fisher: Mapping[str, Tensor], bar: Bar) -> list[tuple[LinearError, float]]:
        """Splits and saves what is left; how far each one's weights are off, over their norm, and the squared error."""
        found = []
        with bar(f"splitting layers of {self.job.model}", len(self.matrices)) as tell:
            for number, (matrix, kind) in enumerate(zip(self.matrices, choice.kinds)):
                file = self._part(matrix.key)
                if not file.is_file():
                    weight = self._weight(matrix)
                    made = self._one(weight, kind, matrix.rank, fisher.get(matrix.key), lq.ROUNDS)
                    off = float((weight - made.values()).norm() / weight.norm().clamp_min(1e-30))
                    pair = {} if made.pair is None else {DOWN: made.pair.down, UP: made.pair.up}
                    save_whole(file, {"raw": made.coded.raw, **pair}, {ERRORS: json.dumps([off, made.error])})
                with safe_open(file, framework="pt") as opened:
                    off, error = json.loads(opened.metadata()[ERRORS])
                layer, _, name = matrix.key.partition(".")
                found.append((LinearError(int(layer), name, off, None), error))
                tell(number + 1, f"{matrix.key} in {kind}, off by {off:.1%}")
        return found

    def _write_json(self, path: Path, value: object) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(value), encoding="utf-8")
        fresh.replace(path)

    # ---- pairs that learn
    def _finetune(self, choice: KindChoice, bar: Bar) -> None:
        file = self.job.aside / TUNED
        if file.is_file():
            return
        kept = {matrix.key: load_file(self._part(matrix.key)) for matrix in self.matrices}
        pairs = {key: LowRankPair(parts[DOWN], parts[UP]) for key, parts in kept.items() if DOWN in parts}
        teacher, student = self.twin(), self.twin()
        with torch.no_grad():
            for matrix, kind in zip(self.matrices, choice.kinds):
                values, row = decode(kept[matrix.key]["raw"].numpy(), kind), 0
                for name, shape in matrix.parts:
                    student.get_parameter(name.removeprefix("model.")).copy_(values[row : row + shape[0]])
                    row += shape[0]
        steps = self.job.form.finetune
        texts = self._texts(steps * STEP_TEXTS * few_bits.TEXT)
        checkpoint = self.job.aside / "tuning.pt"
        run = tuning(pairs, self.settings, RATES[self.job.start])
        if checkpoint.is_file():
            run.read(checkpoint)
        with bar("tuning pairs", steps) as tell:
            for loss in tuned(run, teacher, student, texts, steps):
                tell(run.step, f"{loss:.4f} nats from the model")
                if run.step % SAVED == 0:
                    run.write(checkpoint)
        save_whole(file, {name: half.detach().bfloat16() for name, half in run.model.tensors().items()})

    # ---- the result
    def _layers(self, choice: KindChoice) -> Iterator[LQLayer]:
        file = self.job.aside / TUNED
        learned = load_file(file) if file.is_file() else {}
        for matrix, kind in zip(self.matrices, choice.kinds):
            kept = load_file(self._part(matrix.key))
            pair = None
            if DOWN in kept:
                pair = LowRankPair(learned.get(f"{matrix.key}.a", kept[DOWN]), learned.get(f"{matrix.key}.b", kept[UP]))
            yield LQLayer(matrix.key, kind, [(name, shape[0]) for name, shape in matrix.parts], kept["raw"], pair)

    def _write(self, choice: KindChoice) -> None:
        job = self.job
        job.out.mkdir(parents=True, exist_ok=True)
        copy_vocabulary(self.files, job.out)
        if told := self.files.generation():
            (job.out / "generation_config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        said = {matrix.key: (kind, [name for name, _ in matrix.parts])
                for matrix, kind in zip(self.matrices, choice.kinds)}  # fmt: skip
        raw = self.files.settings()
        values = {name: value for name, value in raw.values.items() if name not in compressed.LEFT_OUT}
        config = {**values, "torch_dtype": "bfloat16", "tie_word_embeddings": self.config.tied,
                  KEY: settings(job.form, said)}  # fmt: skip
        write_checkpoint(job.out, self._pieces(choice), config)

    def _pieces(self, choice: KindChoice) -> Iterator[dict[str, Tensor]]:
        yield from compressed.others(self.config, self.tensors, {})
        for layer in self._layers(choice):
            yield layer.tensors()


# ---- gradients and pairs
def blocks_of(texts: Sequence[Sequence[int]]) -> list[TokenBlock]:
    """A block for every text; each token's target is the next."""
    found = []
    for text in texts:
        ids = torch.tensor([text])
        found.append(TokenBlock.of(ids, torch.cat((ids[:, 1:], torch.full((1, 1), -1)), 1)))
    return found


def squared_gradients(
    model: DenseDecoder, texts: Sequence[Sequence[int]], matrices: Sequence[SplitMatrix], tell: Callable[..., object]
) -> dict[str, Tensor]:
    """The mean over texts of the squared gradient of a text's mean loss, float32 [out, in] by the name of the layer."""
    found = {matrix.key: torch.zeros(matrix.shape) for matrix in matrices}
    for number, block in enumerate(blocks_of(texts), 1):
        model.zero_grad()
        dense.losses(model, [block])[0].mean().backward()  # type: ignore[no-untyped-call]
        for matrix in matrices:
            grads = [model.get_parameter(name.removeprefix("model.")).grad for name, _ in matrix.parts]
            found[matrix.key] += torch.cat([torch.zeros(0) if g is None else g for g in grads]).square() / len(texts)
        tell(number)
    return found


def tuning(pairs: Mapping[str, LowRankPair], said: Mapping[str, object], rate: float) -> TrainingRun[LowRank]:
    """A run at its start: pairs by layer, as trainable weights."""
    shapes = dict[str, tuple[int, ...]]()
    for key, pair in pairs.items():
        shapes |= {f"{key}.a": tuple(pair.down.shape), f"{key}.b": tuple(pair.up.shape)}
    model = LowRank(shapes)
    with torch.no_grad():
        for key, pair in pairs.items():
            model[f"{key}.a"].copy_(pair.down)
            model[f"{key}.b"].copy_(pair.up)
    return TrainingRun(model, [Adam(model.parameters(), lr=rate, betas=(0.9, 0.95))], settings=dict(said))


def tuned(
    run: TrainingRun[LowRank], teacher: DenseDecoder, student: DenseDecoder, texts: Sequence[Sequence[int]], steps: int
) -> Iterator[float]:
    """Trains the pairs towards the teacher's distributions up to so many steps; the divergence after each, nats.

    A step sees texts by its number alone, so a run that goes on sees what it would have seen.
    """
    for model in (teacher, student):
        model.requires_grad_(False)
    while run.step < steps:
        some = [texts[(run.step * STEP_TEXTS + i) % len(texts)] for i in range(STEP_TEXTS)]
        blocks = blocks_of(some)
        with halved(run.device):
            with torch.no_grad():
                wanted = _logits(teacher, blocks, PLAIN)
            found = _logits(student, blocks, Pass(delta=run.model))
            loss = F.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), reduction="sum", log_target=True)
        loss = loss / len(wanted)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * (1 - run.step / steps)
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in run.optimizers:
            optimizer.step()
        run.step += 1
        yield float(loss.detach())


def _logits(model: DenseDecoder, blocks: Sequence[TokenBlock], how: Pass) -> Tensor:
    """Logits float32 [tokens, V] of all tokens."""
    return F.linear(model.hidden(blocks, how), model.embed_tokens.weight).float()
