"""gpt-oss's checkpoints: each layer has one tensor for all its experts, in bfloat16 or in MXFP4.

`experts.gate_up_proj` [E, in, 2 I] has the gates at even places and the others at odd ones, `experts.down_proj` is
[E, I, out], and both have a `_bias` [E, outputs]. In MXFP4 a matrix is `_blocks` uint8 [E, outputs, inputs / 32, 16],
two inputs a byte, the first in the low nibble, and `_scales` uint8 [E, outputs, inputs / 32], powers of two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.errors import WeightsError
from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.quantised_tables import TableMatrix, mxfp4
from phasewise.model.weights import Checkpoint
from phasewise.ops.native.weights import DenseRows

FUSED = re.compile(r"(?P<mlp>.+\.experts)\.(?P<which>gate_up|down)_proj(?P<part>_blocks|_bias|)")
WHICH = {"gate_up": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
         "down": (("down_proj", slice(None)),)}  # fmt: skip
MOST_EXPERTS = 1 << 12


class ExpertPlace(NamedTuple):
    """Where an expert's tensor lies: its entry of a tensor of all, and which of the outputs are its own."""

    name: str
    entry: int
    outputs: slice


class JoinedExperts:
    """A checkpoint whose experts are known by names of their own: `experts.<e>.gate_proj.weight` and so on.

    Construction raises WeightsError for tensors that do not fit one another, naming them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.where: dict[str, Path] = dict(checkpoint.where)
        self._places: dict[str, ExpertPlace] = {}
        self._packed: dict[str, TableMatrix] = {}
        for name, path in checkpoint.where.items():
            if found := FUSED.fullmatch(name):
                self._spread(name, path, found)

    def _spread(self, name: str, path: Path, found: re.Match[str]) -> None:
        part, shape = found["part"], self.checkpoint.shape(name)
        if len(shape) != {"_blocks": 4, "_bias": 2, "": 3}[part] or not 0 < shape[0] <= MOST_EXPERTS:
            raise self._wrong(name, f"has the shape {list(shape)}")
        pair = self._checked(name) if part == "_blocks" else None
        del self.where[name]
        for e in range(shape[0]):
            for which, outputs in WHICH[found["which"]]:
                own = f"{found['mlp']}.{e}.{which}.{'bias' if part == '_bias' else 'weight'}"
                if own in self._places or own in self._packed:
                    raise self._wrong(name, "is there in bfloat16 and in MXFP4")
                self.where[own] = path
                if pair is None:
                    self._places[own] = ExpertPlace(name, e, outputs)
                else:
                    blocks, scales = (each[e][outputs] for each in pair)
                    self._packed[own] = mxfp4(f"{self.directory}: {own}", blocks.flatten(1), scales)

    def _checked(self, name: str) -> tuple[Tensor, Tensor]:
        """The blocks and scales of all experts. Raises WeightsError for those that do not belong together."""
        beside = name.removesuffix("_blocks") + "_scales"
        if beside not in self.checkpoint.where:
            raise self._wrong(name, f"has no {beside} beside it")
        blocks, scales = self.checkpoint.read(name), self.checkpoint.read(beside)
        if blocks.dtype != torch.uint8 or blocks.shape[3] != 16:
            raise self._wrong(name, f"is {blocks.dtype} {list(blocks.shape)}, and bytes in blocks of 16 are read")
        if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
            raise self._wrong(beside, f"is {scales.dtype} {list(scales.shape)}, wanted bytes {list(blocks.shape[:3])}")
        if bool((scales == 255).any()):
            raise self._wrong(beside, "has 255, which stands for no number")
        self.where.pop(beside)
        return blocks, scales

    def _wrong(self, name: str, what: str) -> WeightsError:
        return WeightsError(f"{self.checkpoint.where[name]}: {name} {what}. Download or export it again.")

    # ---- what Weights asks of a checkpoint
    @property
    def directory(self) -> Path:
        return self.checkpoint.directory

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._packed:
            return self._packed[name].outputs, self._packed[name].inputs
        place = self._places.get(name)
        if place is None:
            return self.checkpoint.shape(name)
        _, *each = self.checkpoint.shape(place.name)
        return len(range(each[-1])[place.outputs]), *each[:-1]

    def dtype(self, name: str) -> torch.dtype:
        if name in self._packed:
            return torch.bfloat16
        return self.checkpoint.dtype(self._places[name].name if name in self._places else name)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        if name in self._packed:
            return self._packed[name].expanded(dtype or torch.bfloat16)
        place = self._places.get(name)
        if place is None:
            return self.checkpoint.read(name)
        return self.checkpoint.read(place.name)[place.entry][..., place.outputs].t().contiguous()

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        return self.read(name, dtype)

    def blocks(self, name: str) -> BlockMatrix | None:
        """A matrix in MXFP4 as the file has it; None of all others."""
        found = self._packed.get(name)
        if found is None or found.kind is None:
            return None
        return BlockMatrix(found.kind, found, None, self._done(found))

    def _done(self, matrix: TableMatrix) -> Callable[[int, int], None]:
        def done(_: int, end: int) -> None:
            if end == matrix.outputs:
                for tensor in matrix.parts:
                    self.checkpoint.let_go(tensor)

        return done

    def let_go(self, tensor: Tensor) -> None:
        self.checkpoint.let_go(tensor)
