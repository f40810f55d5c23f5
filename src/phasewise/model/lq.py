"""Checkpoints of LQ-LoRA (arXiv 2311.12023): each linear layer is a matrix in few bits and a low-rank pair beside it.

A layer computes `Q x + up (down x)`. Q lies in blocks of a kind that kernels multiply as it is, and each layer has a
kind of its own. In the files a matrix X of Q is `X_blocks`, uint8 [out, bytes of a row]; the pair of a layer, such as
`3.qkv`, is `lq.3.qkv.down` [rank, in] and `lq.3.qkv.up` [out, rank], both bfloat16, for q, k and v together. What
config.json says of kinds and matrices:

    "quantization_config": {"quant_method": "lq", "rank": 8, "bits": 5.0,
                            "layers": {"3.qkv": {"kind": "INT4_64", "parts": ["model.layers.3..", ..]}, ..}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasewise.errors import UserError, WeightsError, near
from phasewise.gguf.blocks import BlockMatrix, LowRankPair
from phasewise.model.lq_kinds import MENU, Bytes, decode, finite
from phasewise.model.quantisation import KEY, LQ
from phasewise.model.quantised_tensors import QuantisedTensors
from phasewise.model.raw import RawConfig
from phasewise.model.weights import Checkpoint
from phasewise.ops.native.levels import KINDS
from phasewise.spelling import parse_value, read

BLOCKS, DOWN, UP = "_blocks", "down", "up"


# ---- what is asked for
@dataclass(frozen=True)
class LQForm:
    """`rank` of the pairs; `bits` of a weight on average, with scales and the pairs in bfloat16. `fisher`: errors are
    weighed by mean squared gradients. `finetune`: steps in which the pairs then learn the model's own distributions."""

    rank: int = 8
    bits: float = 5.0
    fisher: bool = True
    finetune: int = 0

    def __str__(self) -> str:
        return f"{LQ}:rank={self.rank},bits={self.bits:g},fisher={str(self.fisher).lower()},finetune={self.finetune}"


def parse_lq(text: str, option: str = "--weights") -> LQForm | None:
    """What `lq:rank=8,bits=5` asks for; None if it is another form. Raises UserError naming the value that is wrong."""
    spelled = read(text, option)
    if spelled.name != LQ:
        return None
    kinds = {"rank": int, "bits": float, "fisher": bool, "finetune": int}
    given: dict[str, Any] = {}
    for knob, value in spelled.knobs.items():
        if knob not in kinds:
            raise UserError(f"{option} {text}: {LQ} has no knob {knob!r}. {near(knob, kinds)}")
        given[knob] = parse_value(str(value), kinds[knob], f"{option} {text}: {knob}")
    form = LQForm(**given)
    for knob in ("rank", "finetune"):
        if getattr(form, knob) < 0:
            raise UserError(f"{option} {text}: {knob}={getattr(form, knob)} is below 0")
    if form.bits <= 0:
        raise UserError(f"{option} {text}: bits={form.bits:g} must be a positive number, such as 5")
    if form.finetune and not form.rank:
        raise UserError(
            f"{option} {text}: finetune is of the low-rank pairs, and rank=0 has none: leave one of them out"
        )
    return form


# ---- what is written
@dataclass(frozen=True)
class LQLayer:
    """A linear layer as it is stored: the names and the rows of its parts, their blocks uint8 [out, bytes of a row],
    and the pair beside them in bfloat16, if there is one."""

    key: str
    kind: str
    parts: Sequence[tuple[str, int]]
    raw: Tensor
    pair: LowRankPair | None

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the checkpoint."""
        rows = [rows for _, rows in self.parts]
        found = {name + BLOCKS: raw for (name, _), raw in zip(self.parts, torch.split(self.raw, rows))}
        if self.pair is not None:
            found |= {f"{LQ}.{self.key}.{DOWN}": self.pair.down, f"{LQ}.{self.key}.{UP}": self.pair.up}
        return found


def settings(form: LQForm, layers: Mapping[str, tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """`quantization_config` of {layer: (kind, names of its parts)}."""
    told = {key: {"kind": kind, "parts": list(parts)} for key, (kind, parts) in layers.items()}
    return {"quant_method": LQ, "rank": form.rank, "bits": form.bits, "layers": told}


# ---- what is read
@dataclass(frozen=True)
class LQMatrix:
    """Some outputs of a layer: blocks of a kind uint8 [out, bytes of a row], and what lies beside them."""

    name: str
    kind: str
    raw: Tensor
    pair: LowRankPair | None

    @property
    def outputs(self) -> int:
        return len(self.raw)

    @property
    def inputs(self) -> int:
        return self.raw.shape[1] // KINDS[self.kind].size * KINDS[self.kind].inputs

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The matrix that blocks and pair stand for together, worked out in float32, [out, in]."""
        values = decode(self.raw.numpy(), self.kind)
        if self.pair is not None:
            values += self.pair.up.float() @ self.pair.down.float()
        return values.to(dtype)


class LowRankQuantised(QuantisedTensors[LQMatrix]):
    """The tensors of such a checkpoint by the names of one that is not quantised.

    A matrix that is read is the sum of its blocks and its pair; `blocks` keeps them apart. Raises WeightsError naming
    the layer whose tensors are missing, do not fit each other, or are not finite.
    """

    def __init__(self, checkpoint: Checkpoint, raw: RawConfig) -> None:
        self.checkpoint = checkpoint
        self.where: dict[str, Path] = dict(checkpoint.where)
        self._matrices: dict[str, LQMatrix] = {}
        said = RawConfig(raw.mapping(KEY), f"{raw.path}: {KEY}")
        for key, layer in said.mapping("layers").items():
            kind, parts = _layer(said, key, layer)
            for matrix in self._read(key, kind, parts):
                self._matrices[matrix.name] = matrix
        self._check_any(BLOCKS)

    def _read(self, key: str, kind: str, parts: Sequence[str]) -> Iterator[LQMatrix]:
        blocks = [self._tensor(key, name + BLOCKS, torch.uint8) for name in parts]
        size, names = KINDS[kind].size, [f"{LQ}.{key}.{half}" for half in (DOWN, UP)]
        for name, raw in zip(parts, blocks):
            if raw.shape[1] != blocks[0].shape[1] or not raw.shape[1] or raw.shape[1] % size:
                raise self._wrong(key, f"{name}{BLOCKS} has rows of {raw.shape[1]} bytes, which are not whole blocks "
                                       f"of {kind} ({size} bytes) or not as many as those beside it")  # fmt: skip
            if not finite(raw.numpy(), kind):
                raise self._wrong(key, f"{name}{BLOCKS} has scales that are not finite")
            self.checkpoint.let_go(raw)
        rows, inputs = sum(map(len, blocks)), blocks[0].shape[1] // size * KINDS[kind].inputs
        pair = self._pair(key, names, rows, inputs) if any(name in self.checkpoint.where for name in names) else None
        at = 0
        for name, raw in zip(parts, blocks):
            own = None if pair is None else LowRankPair(pair.down, pair.up[at : at + len(raw)])
            at += len(raw)
            self.where[name] = self.where.pop(name + BLOCKS)
            yield LQMatrix(name, kind, raw, own)
        for name in names:
            self.where.pop(name, None)

    def _pair(self, key: str, names: Sequence[str], rows: int, inputs: int) -> LowRankPair:
        down, up = (self._tensor(key, name, torch.bfloat16) for name in names)
        if down.shape[1] != inputs or len(up) != rows or len(down) != up.shape[1] or not len(down):
            raise self._wrong(key, f"down {list(down.shape)} and up {list(up.shape)} do not fit a matrix of "
                                   f"[{rows}, {inputs}]: wanted [r, {inputs}] and [{rows}, r]")  # fmt: skip
        for name, half in zip(names, (down, up)):
            if not bool(torch.isfinite(half).all()):
                raise self._wrong(key, f"{name} has numbers that are not finite")
        return LowRankPair(down, up)

    def _tensor(self, key: str, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self.checkpoint.where:
            raise self._wrong(key, f"{name} is missing")
        found = self.checkpoint.read(name)
        if found.dtype != dtype or found.ndim != 2:
            raise self._wrong(key, f"{name} is {found.dtype} {list(found.shape)}, wanted a matrix of {dtype}")
        return found

    def _wrong(self, key: str, what: str) -> WeightsError:
        return WeightsError(f"{self.directory}: layer {key} of the {LQ} checkpoint: {what}. Convert it again.")

    def blocks(self, name: str) -> BlockMatrix | None:
        found = self._matrices.get(name)
        if found is None:
            return None

        def done(_: int, end: int) -> None:
            if end == found.outputs:
                self._let_go(found)

        raw: Bytes = found.raw.numpy()
        return BlockMatrix(found.kind, raw, None, done, None, found.pair)

    def let_go(self, tensor: Tensor) -> None:
        self.checkpoint.let_go(tensor)

    def _let_go(self, matrix: LQMatrix) -> None:
        self.checkpoint.let_go(matrix.raw)


def _layer(said: RawConfig, key: str, layer: Any) -> tuple[str, list[str]]:
    """The kind of a layer and the names of its parts. Raises UserError for settings that say neither."""
    kind = layer.get("kind") if isinstance(layer, Mapping) else None
    parts = layer.get("parts") if isinstance(layer, Mapping) else None
    if kind not in MENU:
        raise UserError(f"{said.path}: layers: {key}: its kind is {kind!r:.80}. {near(str(kind), MENU)}")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
        raise UserError(f"{said.path}: layers: {key}: its parts must be names of matrices, got {parts!r:.80}.")
    return kind, parts
