"""The runtime of drafters whose chain is the path through a block that a masked model has filled in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.draft._block_length import LengthRule, length_record
from phasewise.methods.draft._chain import ChainShape
from phasewise.methods.draft._path_search import PathSearch, generated
from phasewise.request.request import Request
from phasewise.speculation.heads.diffuspec_layout import MaskedDraft, masked_draft
from phasewise.speculation.masked_draft import MaskedDraftCompanion
from phasewise.speculation.tree_drafter import DraftBuilder, TreeDrafter
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import headroom
from phasewise.verbs.host import Host


class MaskedBlockDrafter(TreeDrafter):
    """Guesses are chosen, not drawn: a path that was searched for follows no distribution that a verifier could divide
    by."""

    companion: MaskedDraftCompanion

    def __init__(
        self, host: Host, name: str, draft: MaskedDraft, search: PathSearch, length: LengthRule, chunk: int
    ) -> None:
        companion = host.companion(name, draft.model, MaskedDraftCompanion)
        assert isinstance(companion, MaskedDraftCompanion)
        companion.mask, companion.vocab = draft.mask, draft.vocab
        super().__init__(host, companion, ChainShape(length.most, 1, "point"), chunk)
        self.record, self.search, self.length = f"{name} length", search, length
        self.chance = None if draft.trigrams is None or search.lam == 1 else draft.trigrams.log_chance
        self.ends = frozenset(token for token in host.model.config.eos if token < draft.vocab)

    def think(self) -> bool:
        """False: what it holds likely after a path is known for its places, not for the path."""
        return False

    def size(self, request: Request) -> int:
        return min(self._length(request), headroom(request))

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        if self.length.fixed:
            return
        for span, outcome in zip(spans, outcomes):
            if span.note is not None:
                length_record(span.request, self.record, self.length).judged(self.length, outcome.accepted)

    def _length(self, request: Request) -> int:
        return self.length.most if self.length.fixed else length_record(request, self.record, self.length).length

    def _runs(self, levels: int) -> int:
        return levels - 1  # the last token's own row makes the first guess

    def _grow(self, trees: Sequence[DraftBuilder]) -> None:
        counts = [min(tree.levels, self._length(tree.request)) for tree in trees]
        logits = self.companion.fill([tree.request for tree in trees], counts)
        rows, first = self.search.candidates(logits, self.ends), 0
        for tree, count in zip(trees, counts):
            own, first = rows[first : first + count], first + count
            if not self.length.fixed:
                likeliest = [row[0][0] for row in own]
                length_record(tree.request, self.record, self.length).last = generated(likeliest, self.ends)
            path, node = self.search.best(own, tree.request.tokens[-2:], self.ends, self.chance), -1
            for token, _ in path:
                node = tree.add(node, token)
            tree.draft.likely = [math.exp(said) for _, said in path]


def masked_block_drafter(
    host: Host, name: str, heads: str, search: PathSearch, length: LengthRule, chunk: int
) -> MaskedBlockDrafter:
    """Makes the runtime of a drafter called `name`. Raises UserError for longer blocks than the draft was trained for,
    and where it has no trigrams and the search asks for some."""
    draft = masked_draft(host.model, heads)
    if length.most > draft.guesses:
        raise UserError(f"{name}: {length.most} guesses are too many: this draft fills up to {draft.guesses} places in "
                        "a pass")  # fmt: skip
    if draft.trigrams is None and search.lam < 1 and not search.greedy:
        raise UserError(f"{name}: lam={search.lam:g} needs trigrams, and this draft has none: say lam=1")
    return MaskedBlockDrafter(host, name, draft, search, length, chunk)
