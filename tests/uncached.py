"""One uncached causal pass by the forward of the engine itself, for models that `tests/oracle.py` does not read:
changed in memory, in bfloat16, or of another family. It says that the engine agrees with itself, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span

PLAIN = Phase("plain", decode=None, attend=Dense())  # type: ignore[arg-type]


@torch.inference_mode()
def logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Logits float32 [len(tokens), V] of one uncached causal pass."""
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=Counters())
    request = Request(tokens)
    kv = store.open(request, len(tokens))
    hidden = forward(model, [Span(request, kv, PLAIN, list(tokens), range(len(tokens)))], Counters())
    kv.close()
    return model.head(hidden.x)
