"""A checkpoint's linear layers in few bits: one layer after the other, calibrated, resumable, written for others.

Beside the result lies a folder `OUT.parts` while the work goes on: settings, a file per layer that is done, and what
the calibration texts bring to the next one. A run that goes on from there ends with the same bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.load import files_of
from phasewise.model import compressed, gguf_file
from phasewise.model.config import ModelConfig
from phasewise.model.fingerprint import fingerprint
from phasewise.model.layout import layout
from phasewise.model.levels import Levels, matrices, require_whole_groups, rounded_to_nearest
from phasewise.model.parse import parse_config
from phasewise.model.rounded import tell_rounded
from phasewise.model.shards import write_checkpoint
from phasewise.model.source import Source, copy_vocabulary
from phasewise.model.tokenizer import beginning, begun
from phasewise.model.weights_form import Calibration, WeightsForm
from phasewise.train.awq import awq_layer
from phasewise.train.gptq import gptq
from phasewise.train.layer_parts import LayerParts, save_whole
from phasewise.train.layer_walk import LayerAtWork, LayerWalk, LinearInputs
from phasewise.train.rounded_layer import RoundedLayer, RoundedLinear

TEXT = 512  # tokens of a calibration text
NEAREST = Calibration()
SETTINGS, ERRORS = "settings.json", "errors"
Tell = Callable[..., object]
Bar = Callable[[str, int], AbstractContextManager[Tell]]


@dataclass(frozen=True)
class FewBitsJob:
    """One conversion. `out`: a folder, or a file that ends in .gguf. `tokens` of calibration are of library source, or
    of the file `text`."""

    model: str  # a name or path
    out: Path
    form: WeightsForm
    how: Calibration = NEAREST
    tokens: int = 16_384
    text: Path | None = None
    seed: int = 0
    resume: bool = False

    @property
    def aside(self) -> Path:
        return self.out.with_name(f"{self.out.name}.parts")

    @property
    def gguf(self) -> bool:
        return self.out.suffix == ".gguf"

    @property
    def calibrated(self) -> bool:
        return self.how.calibrate != "rtn"


@dataclass(frozen=True)
class LinearError:
    """How far a linear layer is from what it was: the norm of its weights' error over that of the weights, and that of
    its outputs' over the calibration texts (None: there were none)."""

    layer: int
    name: str  # qkv, o, gate_up ..
    weights: float
    outputs: float | None


def convert(job: FewBitsJob, bar: Bar) -> list[LinearError]:
    """Round all layers and write `job.out`; a `bar` of a title and a total is told how far it is.

    Raises UserError for a form that does not fit the model, a target that holds something, and a run to go on with that
    had other settings; before anything is written.
    """
    return _Run(job).go(bar)


class _Run:
    """One conversion at work."""

    def __init__(self, job: FewBitsJob) -> None:
        self.job, self.parts = job, LayerParts(job.aside)
        self.files = files_of(job.model)
        self.raw = self.files.settings()
        self.config = parse_config(self.raw)
        self.tensors = self.files.tensors()
        require_whole_groups(job.form, matrices(self.config), self.files.path)
        if job.gguf:
            gguf_file.check(self.files)
        self._check_target()
        tell_rounded(self.tensors, matrices(self.config))

    def _check_target(self) -> None:
        job = self.job
        if job.out.exists() and (job.gguf or not job.out.is_dir() or any(job.out.iterdir())):
            raise UserError(
                f"{job.out} is there already: name another {'file' if job.gguf else 'folder'}, or remove it"
            )
        if job.resume and not (job.aside / SETTINGS).is_file():
            raise UserError(f"there is nothing to resume: {job.aside} does not exist; leave --resume out")
        if not job.resume and job.aside.exists():
            raise UserError(f"{job.aside} holds a conversion that was cut short: add --resume, or remove it")

    @cached_property
    def settings(self) -> dict[str, object]:
        """What decides the result, bit for bit."""
        job = self.job
        found: dict[str, object] = {"model": fingerprint(self.config, self.tensors), "weights": str(job.form)}
        if job.calibrated:
            found |= {"calibrate": job.how.calibrate, "act_order": job.how.act_order, "tokens": job.tokens,
                      "text": None if job.text is None else str(job.text), "seed": job.seed}  # fmt: skip
        return found

    def go(self, bar: Bar) -> list[LinearError]:
        job, layers = self.job, self.config.layers
        texts = self._texts() if job.calibrated else []
        done = self._begin()
        with bar(f"rounding layers of {job.model}", layers) as tell, torch.inference_mode():
            for index, note in self._rounded(texts, done):
                tell(index + 1, note)
        with bar(f"writing {job.out}", 1) as tell:
            self._write()
            tell(1)
        errors = [error for i in range(layers) for error in self._errors(i)]
        shutil.rmtree(job.aside)
        return errors

    def _begin(self) -> int:
        """Opens the folder of parts; returns how many layers are done. Raises UserError for other settings."""
        file = self.job.aside / SETTINGS
        if self.job.resume:
            before = json.loads(file.read_text(encoding="utf-8"))
            for name in self.settings:
                if before.get(name) != self.settings[name]:
                    raise UserError(f"{self.job.aside} was begun with {name} {before.get(name)}, not "
                                    f"{self.settings[name]}: resume with the same, or remove it")  # fmt: skip
            return self.parts.done(self.config.layers)
        self.job.aside.mkdir(parents=True)
        file.write_text(json.dumps(self.settings) + "\n", encoding="utf-8")
        return 0

    def _texts(self) -> list[list[int]]:
        return calibration_texts(self.files, self.config, self.job.tokens, self.job.seed, self.job.text)

    # ---- layers
    def _rounded(self, texts: Sequence[Sequence[int]], done: int) -> Iterator[tuple[int, str]]:
        """Rounds the layers that are left, and saves each; gives its number and a word on its errors."""
        hidden = self.parts.hidden(done) if done and texts else None
        walk = LayerWalk(self.config, self.tensors, texts, done, hidden) if texts else None
        for index in range(done, self.config.layers):
            made = self._nearest(index) if walk is None else self._calibrated(walk, index)
            if walk is not None:
                self.parts.keep_hidden(index + 1, walk.hidden)
            errors = made.errors()
            told = json.dumps([[name, *both] for name, both in errors.items()])
            save_whole(self.parts.part(index), self._packed(index, made), {ERRORS: told})
            self.parts.forget_hidden(index)
            worst = max(errors, key=lambda name: errors[name][0])
            yield index, f"{worst} off by {errors[worst][0]:.1%}"

    def _nearest(self, index: int) -> RoundedLayer:
        """A layer whose levels are the nearest ones."""
        made = {}
        for key, parts in layout(self.config).items():
            start, _, name = key.partition(".")
            if start == str(index) and all(part in self._matrices for part, _ in parts):
                weight = torch.cat([self.tensors.read(part, torch.float32).float() for part, _ in parts])
                made[name] = RoundedLinear(weight, rounded_to_nearest(weight, self.job.form, parts[0][0]))
        return RoundedLayer(made)

    def _calibrated(self, walk: LayerWalk, index: int) -> RoundedLayer:
        """A layer rounded for what the texts bring to it; the walk goes on behind it."""
        at = walk.next()
        seen = at.watch(lambda: walk.run(at))
        made = self._by_inputs(at, seen)
        made.put_into(at, self.tensors)
        walk.hidden = walk.run(at)
        return made

    def _by_inputs(self, at: LayerAtWork, seen: Mapping[str, LinearInputs]) -> RoundedLayer:
        form, how = self.job.form, self.job.how
        if how.calibrate == "awq":
            return awq_layer(at, seen, self.tensors, form)
        made = {}
        for name in at.linears:
            weight, hessian = at.linear(name).dense(), seen[name].hessian
            levels = gptq(weight, hessian, form, act_order=how.act_order)
            made[name] = RoundedLinear(weight, levels, hessian=hessian)
        return RoundedLayer(made)

    @cached_property
    def _matrices(self) -> dict[str, tuple[int, int]]:
        return matrices(self.config)

    # ---- parts
    def _packed(self, index: int, made: RoundedLayer) -> dict[str, Tensor]:
        """The tensors of a layer by their names in the checkpoint."""
        found, names = dict(made.changed), layout(self.config)
        for name, linear in made.linears.items():
            start = 0
            for part, (rows, _) in names[f"{index}.{name}"]:
                found |= compressed.packed(part, linear.levels.rows(slice(start, start + rows)))
                start += rows
        return found

    def _errors(self, index: int) -> list[LinearError]:
        with safe_open(self.parts.part(index), framework="pt") as file:
            told = json.loads(file.metadata()[ERRORS])
        return [LinearError(index, name, weights, outputs) for name, weights, outputs in told]

    # ---- the result
    def _pieces(self) -> Iterator[dict[str, Tensor]]:
        """All tensors of the new checkpoint: what stays, then layer by layer what does not."""
        changed: dict[str, Tensor] = {}
        parts = [load_file(self.parts.part(i)) for i in range(self.config.layers)]  # mapped, not read
        for part in parts:
            changed |= {name: part[name] for name in part if name in self.tensors.where}
        yield from compressed.others(self.config, self.tensors, changed)
        for part in parts:
            yield {name: tensor for name, tensor in part.items() if name not in changed}

    def _write(self) -> None:
        job = self.job
        if job.gguf:
            changed: dict[str, Tensor] = {}
            for i in range(self.config.layers):
                part = load_file(self.parts.part(i))
                changed |= {name: part[name] for name in part if name in self.tensors.where}
            gguf_file.write(self.files, job.out, job.form, self._levels(), changed)
            return
        job.out.mkdir(parents=True, exist_ok=True)
        copy_vocabulary(self.files, job.out)
        if told := self.files.generation():
            (job.out / "generation_config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        write_checkpoint(job.out, self._pieces(), compressed.settings(self.raw, self.config, job.form))

    def _levels(self) -> Callable[[str], Levels]:
        """Finds the levels of a matrix by its name."""
        where = {name: int(name.split(".")[2]) for name in self._matrices}

        def found(name: str) -> Levels:
            with safe_open(self.parts.part(where[name]), framework="pt") as file:
                ends = [name + end for end in (compressed.PACKED, compressed.SCALE, compressed.ZERO)]
                tensors = {each: file.get_tensor(each) for each in ends if each in file.keys()}  # noqa: SIM118
            return compressed.unpacked(name, tensors, self.job.form)

        return found


def calibration_texts(
    files: Source, config: ModelConfig, tokens: int, seed: int, text: Path | None = None
) -> list[list[int]]:
    """Texts of at most 512 tokens, `tokens` of them in all: of library source that no evaluation sees, or of a file.

    Raises UserError for a file that cannot be read, or that is shorter.
    """
    tokenizer, rng = files.tokenizer(), Random(f"{seed} calibration")
    begin, length = beginning(tokenizer), min(TEXT, config.max_positions)
    if text is None:
        every = list(sources(held_out=False).values())
        rng.shuffle(every)
    else:
        try:
            every = [text.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {text} cannot be read ({error}): name a file of UTF-8") from error
    found: list[list[int]] = []
    for each in every:
        ids = tokenizer.encode(each, add_special_tokens=False).ids
        pieces = [ids[start : start + length - len(begin)] for start in range(0, len(ids), length)]
        whole = [piece for piece in pieces if len(piece) == length - len(begin)]
        found += [begun(piece, begin) for piece in (whole if text is not None else whole[:1])]
        if sum(map(len, found)) >= tokens:
            return found
    if text is not None:
        raise UserError(f"--text {text} has only {sum(map(len, found)):,} tokens in whole texts of {length}: name a "
                        f"longer one, or fewer than --tokens {tokens:,}")  # fmt: skip
    return found
