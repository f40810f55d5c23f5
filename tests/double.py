"""The engine in double precision: sums in another order differ by 1e-15, and rounding to levels falls the same way.

The code computes in float32 at least, and says so by `Tensor.float()`; here that means float64. (Rotations keep their
float32 angles, which are the same in any chunk.) Native kernels have no doubles: all runs on torch's operators.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.model import weights
from phasewise.model.model import Model
from tests import tiny


def _float(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


@cache
def _model(**options: Any) -> Model:
    return Model.load(tiny.checkpoint(**options), dtype=torch.float64)


def everything(patch: pytest.MonkeyPatch) -> None:
    """For as long as the patch lasts, tiny models compute in float64."""
    patch.setattr(weights, "DTYPES", (*weights.DTYPES, torch.float64))
    patch.setattr(Tensor, "float", _float)
    patch.setattr(tiny, "model", _model)
