"""A checkpoint made into learned codebooks (JLCM, arXiv 2309.17361), one layer after the other: resumable, and told.

Beside the result lies a folder `OUT.parts` while the work goes on: settings, a file per layer that is done, and what
the calibration texts bring to the next one. A run that goes on from there ends with the same bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from phasewise.errors import UserError
from phasewise.load import files_of
from phasewise.model import codebook, compressed
from phasewise.model.codebook import CodebookForm, require_whole_groups
from phasewise.model.fingerprint import fingerprint
from phasewise.model.layout import layout
from phasewise.model.levels import matrices
from phasewise.model.parse import parse_config
from phasewise.model.quantisation import KEY
from phasewise.model.rounded import tell_rounded
from phasewise.model.shards import write_checkpoint
from phasewise.model.source import copy_vocabulary
from phasewise.train import neuron_order
from phasewise.train.codebook import LearnedCodebooks, Start, learned, output_errors
from phasewise.train.few_bits import Bar, LinearError, calibration_texts
from phasewise.train.layer_parts import LayerParts, save_whole
from phasewise.train.layer_walk import LayerAtWork, LayerWalk, LinearInputs
from phasewise.train.neuron_order import NeuronOrder

SETTINGS, ERRORS = "settings.json", "errors"


@dataclass(frozen=True)
class CodebookJob:
    """One conversion into the folder `out`. `tokens` of calibration are of library source that no evaluation sees, or
    of the file `text`. `start`: the codebooks at first; `uniform` ones stay even, to compare with."""

    model: str  # a name or path
    out: Path
    form: CodebookForm
    tokens: int = 16_384
    text: Path | None = None
    seed: int = 0
    resume: bool = False
    start: Start = "kmeans"

    @property
    def aside(self) -> Path:
        return self.out.with_name(f"{self.out.name}.parts")


@dataclass(frozen=True)
class InCodebooks:
    """What came out: how far every linear layer is off, and how far its outputs were before anything was learned, for
    the same inputs; and the bits of a weight, with scales and codebooks."""

    errors: list[LinearError]
    before: list[float]
    bits: float

    @property
    def less(self) -> float:
        """The share that learning takes off the layers' squared errors of outputs, a mean over layers."""
        shares = [(each.outputs / then) ** 2 for each, then in zip(self.errors, self.before) if each.outputs and then]
        return 1 - sum(shares) / max(1, len(shares))


def convert(job: CodebookJob, bar: Bar) -> InCodebooks:
    """Learn the codebooks of all layers and write `job.out`; a `bar` of a title and a total is told how far it is.

    Raises UserError for a form that does not fit the model, a target that holds something, and a run to go on with that
    had other settings; before anything is written.
    """
    return _Run(job).go(bar)


class _Run:
    """One conversion at work."""

    def __init__(self, job: CodebookJob) -> None:
        self.job, self.parts = job, LayerParts(job.aside)
        self.files = files_of(job.model)
        self.config = parse_config(self.files.settings())
        self.tensors = self.files.tensors()
        self.matrices = matrices(self.config)
        require_whole_groups(job.form, self.matrices, self.files.path)
        self._check_target()
        tell_rounded(self.tensors, self.matrices)

    def _check_target(self) -> None:
        job = self.job
        if job.out.exists() and (not job.out.is_dir() or any(job.out.iterdir())):
            raise UserError(f"{job.out} is there already: name another folder, or remove it")
        if job.resume and not (job.aside / SETTINGS).is_file():
            raise UserError(f"there is nothing to resume: {job.aside} does not exist; leave --resume out")
        if not job.resume and job.aside.exists():
            raise UserError(f"{job.aside} holds a conversion that was cut short: add --resume, or remove it")

    @cached_property
    def settings(self) -> dict[str, object]:
        """What decides the result, bit for bit."""
        job = self.job
        return {"model": fingerprint(self.config, self.tensors), "weights": str(job.form), "tokens": job.tokens,
                "text": None if job.text is None else str(job.text), "seed": job.seed, "start": job.start}  # fmt: skip

    def go(self, bar: Bar) -> InCodebooks:
        job, layers = self.job, self.config.layers
        texts = calibration_texts(self.files, self.config, job.tokens, job.seed, job.text)
        done = self._begin()
        with bar(f"learning codebooks of {job.model}", layers) as tell, torch.inference_mode():
            for index, note in self._learned(texts, done):
                tell(index + 1, note)
        with bar(f"writing {job.out}", 1) as tell:
            self._write()
            tell(1)
        told = [each for i in range(layers) for each in self._told(i)]
        bits = 8 * self._bytes() / sum(outputs * inputs for outputs, inputs in self.matrices.values())
        shutil.rmtree(job.aside)
        return InCodebooks([error for error, _ in told], [before for _, before in told], bits)

    def _begin(self) -> int:
        """Opens the folder of parts; returns how many layers are done. Raises UserError for other settings."""
        file = self.job.aside / SETTINGS
        if not self.job.resume:
            self.job.aside.mkdir(parents=True)
            file.write_text(json.dumps(self.settings) + "\n", encoding="utf-8")
            return 0
        before = json.loads(file.read_text(encoding="utf-8"))
        for name, now in self.settings.items():
            if before.get(name) != now:
                raise UserError(f"{self.job.aside} was begun with {name} {before.get(name)}, not {now}: resume with "
                                "the same, or remove it")  # fmt: skip
        return self.parts.done(self.config.layers)

    # ---- layers
    def _learned(self, texts: Sequence[Sequence[int]], done: int) -> Iterator[tuple[int, str]]:
        """Learns the layers that are left, and saves each; gives its number and a word on its errors."""
        walk = LayerWalk(self.config, self.tensors, texts, done, self.parts.hidden(done) if done else None)
        for index in range(done, self.config.layers):
            at = walk.next()
            made, told = self._layer(at, at.watch(lambda: walk.run(at)))  # noqa: B023
            walk.hidden = walk.run(at)
            self.parts.keep_hidden(index + 1, walk.hidden)
            save_whole(self.parts.part(index), made, {ERRORS: json.dumps(told)})
            self.parts.forget_hidden(index)
            name, _, worst, _ = max(told, key=lambda each: each[2])
            yield index, f"{name}'s outputs off by {worst:.1%}"

    def _layer(
        self, at: LayerAtWork, seen: Mapping[str, LinearInputs]
    ) -> tuple[dict[str, Tensor], list[tuple[str, float, float, float]]]:
        """The tensors of a layer by their names in the checkpoint, and of each linear layer how far its weights are
        off, its outputs, and these before they learned. The layer then computes with what it will have."""
        weights = {name: at.linear(name).dense().float() for name in at.linears}
        order = neuron_order.of_layer(self.config, weights) if self.job.form.reorder else neuron_order.AS_IT_WAS
        made, told = dict[str, Tensor](), []
        for name, own in weights.items():
            weight, hessian = order.weight(name, own), order.hessian(name, seen[name].hessian)
            parts = self._parts_of(at.index, name)
            found = [learned(some, hessian, self.job.form, self.job.start)
                     for some in torch.split(weight, [rows for _, rows in parts])]  # fmt: skip
            for (part, _), each in zip(parts, found):
                made |= each.coded.tensors(part)
            told.append((name, *_errors(weight, hessian, found)))
            bias = self._bias(at.index, name, order)
            made |= bias
            values = torch.cat([each.coded.values() for each in found])
            at.replace(name, values, torch.cat([each.float() for each in bias.values()]) if bias else None)
        return made, told

    def _parts_of(self, index: int, name: str) -> list[tuple[str, int]]:
        return [(part, shape[0]) for part, shape in layout(self.config).get(f"{index}.{name}", ())]

    def _bias(self, index: int, name: str, order: NeuronOrder) -> dict[str, Tensor]:
        """The biases of a linear layer's parts in the order of its neurons."""
        parts = self._parts_of(index, f"{name}.bias")
        if not parts:
            return {}
        whole = order.bias(name, torch.cat([self.tensors.read(part, torch.bfloat16) for part, _ in parts]))
        return {part: each for (part, _), each in zip(parts, torch.split(whole, [rows for _, rows in parts]))}

    # ---- parts
    def _told(self, index: int) -> list[tuple[LinearError, float]]:
        with safe_open(self.parts.part(index), framework="pt") as file:
            told = json.loads(file.metadata()[ERRORS])
        return [(LinearError(index, name, weights, outputs), before) for name, weights, outputs, before in told]

    def _bytes(self) -> int:
        """Of what stands for the matrices."""
        parts = (load_file(self.parts.part(i)) for i in range(self.config.layers))  # mapped, not read
        return sum(tensor.nbytes for part in parts for name, tensor in part.items() if name not in self.tensors.where)

    # ---- the result
    def _pieces(self) -> Iterator[dict[str, Tensor]]:
        """All tensors of the new checkpoint: what stays or was only reordered, then layer by layer the rest."""
        parts = [load_file(self.parts.part(i)) for i in range(self.config.layers)]  # mapped, not read
        changed = {name: part[name] for part in parts for name in part if name in self.tensors.where}
        yield from compressed.others(self.config, self.tensors, changed)
        for part in parts:
            yield {name: tensor for name, tensor in part.items() if name not in changed}

    def _write(self) -> None:
        job, raw = self.job, self.files.settings()
        job.out.mkdir(parents=True, exist_ok=True)
        copy_vocabulary(self.files, job.out)
        if told := self.files.generation():
            (job.out / "generation_config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        values = {name: value for name, value in raw.values.items() if name not in compressed.LEFT_OUT}
        config = {**values, "torch_dtype": "bfloat16", "tie_word_embeddings": self.config.tied,
                  KEY: codebook.settings(job.form)}  # fmt: skip
        write_checkpoint(job.out, self._pieces(), config)


def _errors(weight: Tensor, hessian: Tensor, found: Sequence[LearnedCodebooks]) -> tuple[float, float, float]:
    """How far weights are off, over their norm; outputs over the texts, over theirs; and these before learning."""
    values, before = (torch.cat([each.values() for each in every]) for every in zip(*found))
    whole = float(output_errors(weight, hessian, torch.zeros_like(weight)).sum())
    off = [float(output_errors(weight, hessian, each).sum()) for each in (values, before)]
    outputs = [(max(0.0, each) / whole) ** 0.5 if whole > 0 else 0.0 for each in off]
    return float((weight - values).norm() / weight.norm().clamp_min(1e-30)), outputs[0], outputs[1]
