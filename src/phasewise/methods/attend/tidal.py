"""One layer picks the tokens that matter, the layers after it read those alone (TidalDecode, arXiv 2410.05076).

Promises that a decoded row reads everything in the first layers and the two that pick, and at most `k` rows and itself
in every other; and that of what was decoded like that, nothing stays in the cache for longer than `every` tokens: the
rows are computed once more, densely, and then equal those of a dense prefill. Prompts are dense, so the cache is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, LayerPicks
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

PLACE = 0.4  # of the depth, where the choice is made again: see `Tidal`


@dataclass(frozen=True)
class Tidal(Method):
    """The first `dense` layers read everything. The next one does too, and picks for every row and KV head the `k`
    positions with the largest weight (over the query heads that share it); the row itself is read in any case. Layer
    `second` picks once more, and its choice replaces the first: 0 means two fifths of the depth, -1 never. That finds
    the largest share of what later layers would pick for themselves, of all layers and on both models it was tried on
    (scripts/tidal_layers.py; 64 of 768 rows, of which chance finds 0.08): 0.31 by layer 3 of the pocket model's 8 (0.24
    without a second choice), 0.475 by layer 12 of SmolLM2's 30. But answers may hang on one layer: of 48 needles in
    1,024 tokens the pocket model finds 9 without, 40 with second=3, 33 with 4, 44 with 5 and 15 with 6. So the paper
    chooses by needles: `phasewise train artefact attend.tidal --model MODEL` tries them with each layer, and
    `weights` takes its choice, `auto` (beside the model, or shipped) or a file. `none` leaves it to `second`.

    Rows that read less than everything leave keys and values that dense attention would not have left. After every
    `every` tokens those of them are computed again in one pass with the next token's row, all of which read everything:
    1 more row per token, counted as `recomputed`. 0 never does. Drafts end where such a pass is due. What a row reads
    follows from its position and the number of known tokens alone. Left out: evict methods that give rows up while
    decoding, and decode methods that finish tokens in blocks (refused, unless every=0).
    """

    k: int = 256
    dense: int = 2
    second: int = 0
    every: int = 32
    weights: str = "none"

    paper: ClassVar[str] = "arXiv 2410.05076"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"k": 1 << 30, "dense": 0}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"k": 128})
    tight: ClassVar[dict[str, object]] = {"k": 6, "dense": 0, "second": 2, "every": 5}

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("dense", 0), ("second", -1), ("every", 0)):
            if getattr(self, name) < least:
                raise UserError(f"tidal: {name}={getattr(self, name)} must be at least {least}")
        if self.every == 1:
            raise UserError("tidal: every=1 computes each row twice at once: say 2 or more, or 0 for never")
        if self.weights != "none" and self.second:
            raise UserError(f"tidal: weights={self.weights} chooses the layer that second={self.second} names: say one")
        if 0 < self.second <= self.dense:
            raise UserError(
                f"tidal: second={self.second} must lie behind the layer that picks first, dense={self.dense}; or say 0 "
                "for the default, -1 for none"
            )

    def choosing(self, layers: int) -> tuple[int, ...]:
        """The layers that pick, of a model with so many. Raises UserError where no layer is left to read less."""
        second = max(self.dense + 1, round(PLACE * layers)) if self.second == 0 else self.second
        found = tuple(layer for layer in (self.dense, second) if 0 <= layer < layers)
        if self.second >= layers:
            raise UserError(f"tidal: second={self.second}, but the model has {layers} layers, numbered from 0")
        if self.dense + len(found) >= layers:
            raise UserError(
                f"tidal: of {layers} layers, {self.dense} read everything and {len(found)} pick: none is left to read "
                "less. Lower dense, or say second=-1"
            )
        return found

    def candidates(self, layers: int) -> range:
        """The layers that may pick again, of a model with so many: one is left to read less."""
        return range(self.dense + 1, layers - 1)

    def artefact(self, config: ModelConfig) -> Artefact:
        """Names the artefact: the needles found with each layer picking again, summed over these; 0 where it cannot."""
        knobs: dict[str, int | float | str] = {"dense": self.dense}
        without = "say weights=none for two fifths of the depth, or second=LAYER"
        return Artefact("attend.tidal", {"found": (config.layers,)}, knobs, without)

    def chosen(self, host: Host) -> Tidal:
        """Returns the method with the layer that `weights` says picks again."""
        layers = host.model.config.layers
        if self.weights == "none" or not self.candidates(layers):
            return replace(self, weights="none")
        return self.best(host.artefact(self.artefact(host.model.config), self.weights)["found"].tolist())

    def best(self, found: Sequence[float]) -> Tidal:
        """Returns the method with the layer that finds most of the needles, of equal ones that nearest to two fifths of
        the depth."""
        layers = len(found)
        second = max(self.candidates(layers), key=lambda at: (found[at], -abs(at - PLACE * layers)))
        return replace(self, weights="none", second=second)

    @property
    def traits(self) -> Traits:
        return Traits("attend", own_attention=True, phases=("decode",), recomputes=self.every > 0)

    def bind(self, host: Host) -> Picker:
        one = self.chosen(host)
        return Picker(one, one.choosing(host.model.config.layers))


class Picker(Attend):
    """Runtime of Tidal. Nothing is remembered of a request: layers hand their picks on within a step."""

    def __init__(
        self, knobs: Tidal, choosing: tuple[int, ...], weights: Callable[[Read], Tensor] | None = None
    ) -> None:
        """`weights`: what layers pick by, if that is not attention (`LayerPicks`)."""
        self.weights = weights
        self.k, self.dense, self.every = knobs.k, knobs.dense, knobs.every
        self.choosing = choosing
        self.again = self._again if knobs.every else None
        self.until = self._until if knobs.every else None

    def plan(self, span: Span) -> AttentionPlan:
        since = self._first(span.request)
        if span.last < since:
            return EVERYTHING
        return AttentionPlan(LayerPicks(self.k, self.choosing, since, self.weights))

    # ---- which rows read less
    def _first(self, request: Request) -> int:
        """The first position whose row may read less: not that of a row which comes with those computed again."""
        settled = self._settled(request)
        return max(settled + (settled > request.prompt_len), self.k + 1)

    def _settled(self, request: Request) -> int:
        """Rows below this position are those of dense attention for good, when the last known token's row comes."""
        if not self.every:
            return 0
        decoded = request.known - 1 - request.prompt_len
        return request.prompt_len + decoded // self.every * self.every

    def _again(self, request: Request, computed: int) -> int:
        """How many of the rows below `computed` are to be computed once more, now that these are there."""
        before = self._settled(request)
        decoded = computed - request.prompt_len
        border = request.prompt_len + decoded // self.every * self.every
        return computed - before if border > before and border - 1 > self.k else 0

    def _until(self, request: Request) -> int | None:
        """The position that rows of the next step must not reach: those before it are computed again first."""
        border = self._settled(request) + self.every
        return border if border - 1 > self.k else None
