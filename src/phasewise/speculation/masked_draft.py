"""A second model that fills a block of masks behind a request's text, in one pass.

```
 row        t1   t2   t3   mask mask        t1 and t2 are new since the last pass, t3 is the last known token
 sees       causally        t1 .. t3 and all masks
 foretells             1st  2nd  3rd        as in a model that was causal before, a row foretells the token after it
```

Rows of text see what is before them alone. So their keys and values stay, and a pass costs what is new and the masks.
Published masked models see the text in both directions, and compute all of it anew in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.request.request import Request
from phasewise.speculation.companion import Companion
from phasewise.step.span import Span


class MaskedDraftCompanion(Companion):
    """A companion that is asked for several tokens in a row of each request at once."""

    mask: int
    vocab: int  # the target's; what is said of later tokens is left out

    def fill(self, requests: Sequence[Request], guesses: Sequence[int]) -> Tensor:
        """Logits float32 [sum of guesses, vocab] of the next so many tokens of each request in turn, at least one of
        each. The memory for as many rows behind the text must have been reserved. Rows of masks never stay."""
        spans = [self._with_masks(span, count - 1) for span, count in zip(self._ahead(requests), guesses)]
        x = self._forward(spans).x
        ends = list[int]()
        for span, count in zip(spans, guesses):
            span.kv.commit(span.rows - (count - 1))
            ends += range(span.start + span.rows - count, span.start + span.rows)
        said = self.model.head(x[torch.tensor(ends, device=x.device)])
        return said[:, : self.vocab]

    def _with_masks(self, span: Span, masks: int) -> Span:
        if not masks:
            return span
        known, start = span.rows, span.positions[0]
        rows = known + masks
        span.kv.reserve(rows)
        sees = torch.ones(rows, rows, dtype=torch.bool, device=self.model.device).tril_()
        sees[known:] = True
        tokens = [*span.tokens, *[self.mask] * masks]
        return Span(span.request, span.kv, span.phase, tokens, range(start, start + rows), sees=sees)
