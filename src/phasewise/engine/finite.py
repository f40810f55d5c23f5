"""Steps that end in NaN or infinity: how they are noticed at no cost to plain decoding, and traced to a layer.

Plain greedy decoding writes no logits. Its kernel takes the first NaN for the largest output, so where all are NaN it
gives token 0: only rows with that token are looked at. Rows of requests that sample, or set any rule, are looked at
always, which costs far less than their distribution. A head with a broken row would choose that row's token each
time: it is tried when the model is loaded, on a row of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from phasewise.errors import NotFinite
from phasewise.request.counters import Counters
from phasewise.step.forward import forward

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.step.phase import Hidden
    from phasewise.step.span import Span
    from phasewise.verbs.decode import Outcome

FIRST = 0  # the token that a row of NaN seems to choose
LOOKED_AT = 64  # rows of a span, its last ones: those before them are a prompt's, which the last one has read


class FiniteCheck:
    """Looks at what the steps of one model leave behind."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(self, spans: Iterable[Span], outcomes: Iterable[Outcome], hidden: Hidden) -> None:
        """Raises NotFinite where a span whose outcome may come of NaN has rows that are not finite."""
        suspects = [
            span for span, outcome in zip(spans, outcomes) if FIRST in outcome.tokens or not span.request.params.plain
        ]
        if suspects and not self._finite(suspects, hidden):
            raise NotFinite("a step ends in numbers that are not finite")

    def _finite(self, spans: Sequence[Span], hidden: Hidden) -> bool:
        rows = [span.start + i for span in spans for i in range(max(0, span.rows - LOOKED_AT), span.rows)]
        return bool(torch.isfinite(hidden.rows(rows)).all())

    def trace(self, span: Span) -> NotFinite:
        """The error that says where a span's numbers end. Its rows are computed again, and are left uncommitted."""
        layers = self._model.config.layers
        if not self._model.head_finite:
            return self._told("the final norm or the output head")
        tokens = torch.tensor(span.tokens, device=self._model.device)
        if not bool(torch.isfinite(self._model.embed(tokens)).all()):
            return self._told("the embeddings of its tokens")
        taps = forward(self._model, [span], Counters(), set(range(layers))).taps
        first = next((i for i in range(layers) if i in taps and not bool(torch.isfinite(taps[i]).all())), None)
        return self._told("the output head" if first is None else f"layer {first} (of {layers}, the first is 0)")

    def _told(self, where: str) -> NotFinite:
        name = str(self._model.dtype).removeprefix("torch.")
        fix = "the weights may be broken: check the files, or export them again"
        if self._model.dtype == torch.float16:
            fix = "its largest number is 65,504: load the model with --dtype bfloat16 or float32"
        return NotFinite(f"{where} gives numbers that are not finite (NaN or infinity) in {name}; {fix}")
