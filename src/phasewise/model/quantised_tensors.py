"""What readers of quantised checkpoints share: each matrix under the name of the weight that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from phasewise.errors import WeightsError
from phasewise.model.weights import DTYPES, Checkpoint
from phasewise.ops.native.weights import DenseRows


class Expandable(Protocol):
    """A matrix [outputs, inputs] in few bits."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    def expanded(self, dtype: torch.dtype) -> Tensor: ...


M = TypeVar("M", bound=Expandable)


class QuantisedTensors(Generic[M]):
    """A checkpoint some of whose matrices are quantised; all else is read as it is."""

    checkpoint: Checkpoint
    _matrices: dict[str, M]

    @property
    def directory(self) -> Path:
        return self.checkpoint.directory

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._matrices.get(name)
        return self.checkpoint.shape(name) if found is None else (found.outputs, found.inputs)

    def dtype(self, name: str) -> torch.dtype:
        own = torch.bfloat16 if name in self._matrices else self.checkpoint.dtype(name)
        return torch.bfloat16 if own in DTYPES else own

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        found, wanted = self._matrices.get(name), dtype or self.dtype(name)
        if found is not None:
            tensor = found.expanded(wanted)
            self._let_go(found)
            return tensor
        stored = self.checkpoint.read(name)
        tensor = stored.to(wanted) if stored.dtype in DTYPES else stored
        if tensor is not stored:
            self.checkpoint.let_go(stored)
        return tensor

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        return self.read(name, dtype) if name in self._matrices else self.checkpoint.rows(name, dtype)

    def _let_go(self, matrix: M) -> None:
        """Give the pages of a matrix's tensors back."""
        raise NotImplementedError

    def _check_any(self, ending: str) -> None:
        """Raise WeightsError if no matrix is quantised."""
        if not self._matrices:
            raise WeightsError(f"{self.directory}: config.json says that it is quantised, and no tensor is (none is "
                               f"called *{ending}). Take quantization_config out, or download it again.")  # fmt: skip
