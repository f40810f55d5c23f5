"""Feature drafters that guess several tokens in one pass: what stands for a token not yet guessed is a mask.

What such heads say of a later guess does not hang on the guesses before it. So a tree of guesses takes no pass but the
first, whatever its shape.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureCompanion, FeatureDrafter, follower
from phasewise.speculation.tree_drafter import TreeShape
from phasewise.step.span import Span
from phasewise.verbs.host import Host


class OnePassCompanion(FeatureCompanion):
    """A companion that is asked once for `guesses` tokens in a row. `root` and `grow` give logits, not rows."""

    guesses: int

    @property
    @abstractmethod
    def extra(self) -> int:
        """Rows of a pass behind those of the text. They never stay."""

    @abstractmethod
    def _run(self, requests: Sequence[Request]) -> Tensor:
        """One pass: the rows [n * guesses, d] that foretell the next tokens of each request in turn."""

    def guessing(self, guesses: int) -> Self:
        self.guesses = guesses
        return self

    def root(self, requests: Sequence[Request]) -> Tensor:
        said = self.model.head(self._run(requests)).view(len(requests), self.guesses, -1)  # [n, guesses, V]
        self._said = {request.id: rows for request, rows in zip(requests, said)}
        self._depths: dict[str, list[int]] = {request.id: [] for request in requests}  # of each node so far
        return said[:, 0].clone()

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        found = []
        for level in levels:
            depths = self._depths[level.request.id]
            new = [1 if parent < 0 else depths[parent] + 1 for parent in level.parents]
            depths += new
            found.append(self._said[level.request.id][new])
        return torch.cat(found)

    def logits(self, x: Tensor) -> Tensor:
        return x


class MaskedTail(OnePassCompanion):
    """Behind the rows of the text stand masks, each of which sees all before it (arXiv 2602.01469). The text's last row
    makes the first guess."""

    @property
    def extra(self) -> int:
        return self.guesses - 1

    def _run(self, requests: Sequence[Request]) -> Tensor:
        spans = [self._with_masks(span) for span in self._ahead(requests)]
        x = self._forward(spans).x
        for span in spans:
            span.kv.commit(span.rows - self.extra)
        ends = [span.start + span.rows - self.guesses + i for span in spans for i in range(self.guesses)]
        return x[torch.tensor(ends, device=x.device)]

    def _with_masks(self, span: Span) -> Span:
        heads, start = self.model.heads, span.positions[0]
        assert span.given is not None
        masks = [heads.mask] * self.extra
        rows = span.rows + self.extra
        span.kv.reserve(rows)
        given = span.given
        if masks:
            feature = heads.masked_feature().expand(self.extra, -1)
            given = torch.cat((given, self.model.inputs(masks, feature)))
        tokens = [*span.tokens, *masks]
        return Span(span.request, span.kv, span.phase, tokens, range(start, start + rows), given=given)


class MaskedBlock(OnePassCompanion):
    """The last token and masks see the features of the text, and one another (arXiv 2602.06036)."""

    @property
    def extra(self) -> int:
        return self.guesses + 1

    def _run(self, requests: Sequence[Request]) -> Tensor:
        self._take_in(self._ahead(requests))
        spans = [self._block(request) for request in requests]
        x = self._forward(spans).x
        for span in spans:
            span.kv.commit(0)
        masks = [span.start + 1 + i for span in spans for i in range(self.guesses)]
        return x[torch.tensor(masks, device=x.device)]

    def _block(self, request: Request) -> Span:
        heads, held = self.model.heads, self._follower(request, len(self.text(request)))
        tokens = [request.tokens[-1], *[heads.mask] * self.guesses]
        held.kv.reserve(len(tokens))
        places = range(held.rows, held.rows + len(tokens))
        given = self.model.embedded(tokens)
        return Span(request, held.kv, self.phase, tokens, places, block=len(tokens), given=given)

    def _take_in(self, spans: Sequence[Span]) -> None:
        """Every layer keeps the features of the text as keys and values. That is projections alone: no row runs."""
        heads, device = self.model.heads, self.model.device
        features = torch.cat([span.given for span in spans if span.given is not None])
        positions = [at for span in spans for at in span.positions]
        rotary = self.model.rotary(torch.tensor(positions, device=device), 1 + max(positions))
        for i in range(self.model.config.layers):
            k, v = heads.keys_values(i, features)
            k, v, start = rotary(0, k).transpose(0, 1), v.transpose(0, 1), 0  # [H, T, D]
            for span in spans:
                rows = slice(start, start + span.rows)
                span.kv.layers[i].append(k[:, rows], v[:, rows], span.positions)
                start += span.rows
        for span in spans:
            span.kv.commit(span.rows)


class OnePassDrafter(FeatureDrafter):
    """The runtime of drafters that grow trees of guesses made in one pass."""

    companion: OnePassCompanion

    def _runs(self, levels: int) -> int:
        return self.companion.extra


def one_pass_drafter(host: Host, name: str, model: FeatureModel, shape: TreeShape, chunk: int) -> OnePassDrafter:
    """Makes the runtime of a drafter called `name` with heads that guess several tokens in one pass. Raises UserError
    for more levels than they can."""
    most = model.heads.parallel
    if shape.levels > most:
        raise UserError(f"{name}: depth={shape.levels} is too much: these heads guess up to {most} tokens in a pass")
    kind: type[OnePassCompanion] = MaskedBlock if model.heads.features_cached else MaskedTail
    return OnePassDrafter(host, follower(host, name, model, kind).guessing(shape.levels), shape, chunk)
