"""A checkpoint's linear layers as N:M sparse ones, by the magnitude of their weights: nothing is trained or read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.load import files_of
from phasewise.model import compressed
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.levels import LINEARS, matrices
from phasewise.model.nm import NMMatrix, NMPattern, require_whole, settings
from phasewise.model.parse import parse_config
from phasewise.model.quantisation import KEY
from phasewise.model.rounded import tell_rounded
from phasewise.model.shards import write_checkpoint
from phasewise.model.source import Source, copy_vocabulary
from phasewise.model.weights import Tensors
from phasewise.train.few_bits import LinearError

Bar = Callable[[str, int], AbstractContextManager[Callable[..., object]]]
Matrix = Callable[[str], NMMatrix]


@dataclass(frozen=True)
class PruneJob:
    """One conversion of `model`, a name or path, into the folder `out`."""

    model: str
    out: Path
    pattern: NMPattern


def prune(job: PruneJob, bar: Bar) -> list[LinearError]:
    """Write `job.out`, of whose matrices the largest weights of each group are left; returns how far layers are off.

    One layer is in memory at a time. A `bar` of a title and a total is told how far it is. Raises UserError for a
    pattern that does not fit the model, and a target that holds something, before anything is written.
    """
    files = files_of(job.model)
    config, tensors = parse_config(files.settings()), files.tensors()
    require_whole(job.pattern, matrices(config), files.path)
    if job.out.exists() and (not job.out.is_dir() or any(job.out.iterdir())):
        raise UserError(f"{job.out} is there already: name another folder, or remove it")
    tell_rounded(tensors, matrices(config))
    errors = []

    def found(name: str) -> NMMatrix:
        return NMMatrix.of(name, _finite(tensors, name), job.pattern)

    with torch.inference_mode(), bar(f"pruning layers of {job.model}", config.layers) as tell:

        def told(key: str, made: list[NMMatrix]) -> None:
            layer, _, name = key.partition(".")
            errors.append(LinearError(int(layer), name, _off(tensors, made), None))
            tell(int(layer) + 1, f"{name} off by {errors[-1].weights:.1%}")

        write(files, config, job.out, job.pattern, found, {}, told)
    return errors


def write(
    files: Source, config: ModelConfig, out: Path, pattern: NMPattern, matrix: Matrix, changed: Mapping[str, Tensor],
    told: Callable[[str, list[NMMatrix]], None] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint whose matrices are made by name, one layer after the other, which `told` hears of. Of all else
    what is `changed` stands in it, or the model's own, in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    copy_vocabulary(files, out)
    if said := files.generation():
        (out / "generation_config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")

    def pieces() -> Iterator[dict[str, Tensor]]:
        yield from compressed.others(config, files.tensors(), changed)
        for key, parts in layout(config).items():
            if key.rpartition(".")[2] not in LINEARS:
                continue
            made = [matrix(name) for name, _ in parts]
            yield {name: tensor for each in made for name, tensor in each.tensors().items()}
            if told is not None:
                told(key, made)

    values = {name: value for name, value in files.settings().values.items() if name not in compressed.LEFT_OUT}
    own = {"torch_dtype": "bfloat16", "tie_word_embeddings": config.tied, KEY: settings(pattern)}
    write_checkpoint(out, pieces(), {**values, **own})


def _finite(tensors: Tensors, name: str) -> Tensor:
    """A matrix in float32. Raises UserError if it has numbers that are not finite."""
    found = tensors.read(name, torch.float32).float()
    if not bool(torch.isfinite(found).all()):
        raise UserError(f"{tensors.directory}: {name} has weights that are not finite. Download or export it again.")
    return found


def _off(tensors: Tensors, made: list[NMMatrix]) -> float:
    """The norm of what is lost of a layer's weights, over theirs."""
    lost = whole = 0.0
    for each in made:
        weight = tensors.read(each.name, torch.float32).float()
        lost += float((weight - each.expanded(torch.float32)).square().sum())
        whole += float(weight.square().sum())
        tensors.let_go(weight)
    return float((lost / max(whole, 1e-30)) ** 0.5)
