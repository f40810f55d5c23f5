"""Drafting heads for a widened model: those of the original, padded with zeros."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from phasewise.load import files_of
from phasewise.model.fingerprint import fingerprint
from phasewise.model.parse import parse_config
from phasewise.speculation.heads import folder
from phasewise.train.heads.kinds import KINDS


def widen_heads(source: Path, target: Path, base: str, factor: int) -> None:
    """The heads at `source` for a model of `factor` times the width, whose states are padded with zeros: they guess the
    same. Its embeddings are repeated instead, so what reads them has zeros for the repetitions."""
    stored = folder.read(source)
    width = stored.number("hidden_size")

    def wider(tensor: Tensor) -> Tensor:
        """Every dimension that is made of whole widths, padded part by part."""
        for dim, size in enumerate(tensor.shape):
            if size % width == 0:
                parts = tensor.reshape(*tensor.shape[:dim], size // width, width, *tensor.shape[dim + 1 :])
                padded = parts.new_zeros(*parts.shape[: dim + 1], factor * width, *parts.shape[dim + 2 :])
                padded.narrow(dim + 1, 0, width).copy_(parts)
                tensor = padded.flatten(dim, dim + 1)
        return tensor

    own = {**stored.own, "base": base}
    config = {**stored.config, "hidden_size": width * factor, folder.OWN: own}
    folder.write(target, config, {name: wider(tensor) for name, tensor in stored.tensors.items()})


def widen_all(model: Path, factor: int) -> None:
    """Give a widened pocket model the heads that ship for pocket, widened."""
    files = files_of(str(model))
    base = fingerprint(parse_config(files.settings()), files.tensors())
    pocket = files_of("pocket").folder / "phasewise" / "heads"
    for source in sorted(pocket.glob("*")):
        if source.name in KINDS:
            widen_heads(source, model / "phasewise" / "heads" / source.name, base, factor)
