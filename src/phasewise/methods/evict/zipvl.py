"""A prompt's layers compute attention among important tokens alone, and keep only these (ZipVL, arXiv 2410.08584).

Promises that a layer's important tokens are the fewest that draw the share `tau` of what its probe rows attend to, that
nobody attends to the others, and that their rows are given up once the prompt is complete. At tau=1 all is dense. That
is the paper's second version; in its first one they are kept in fewer bits: `store.zipvl`. Left out: images.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.model.config import AttentionSpec
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AmongTokens, AttentionPlan
from phasewise.step.probe import received
from phasewise.step.read import Read
from phasewise.step.reference import causal_mask
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class ZipVL(Method):
    """The last `window` rows and `probes` earlier ones, drawn by `seed`, are looked at before the others: the tokens by
    what these give them, summed over rows and heads, are taken from the largest on until they have the share `tau`.
    That says how many; which ones, the same sums divided by the probes that see a token. The window is always among
    them: it holds the question.

    The set is one per layer, all heads share it, and it depends on the whole prompt: prompts are computed in one piece,
    whatever a scheduler gives them, and share no prefix.

    With `queries="important"` the other tokens' rows pass the layer's attention by, as in the paper. With "all" they
    attend to the important tokens before them, which takes up to n / p times as long for p of n tokens, and is worth
    many right answers on small models.
    """

    tau: float = 0.975
    window: int = 32
    probes: int = 32
    seed: int = 0
    queries: Literal["important", "all"] = "important"

    paper: ClassVar[str] = "arXiv 2410.08584"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"tau": 1.0}
    # what stays is read like any other KV
    traits: ClassVar[Traits] = Traits(
        "evict", fills=("attend",), phases=("prefill",), frees_rows=True, own_attention=True, whole_prompts=True,
        shares_prefix=False,
    )  # fmt: skip
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"tau": 0.9})
    tight: ClassVar[dict[str, object]] = {"tau": 0.6, "window": 4, "probes": 4}

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1:
            raise UserError(f"zipvl: tau={self.tau} must lie above 0 and be at most 1, a share of the attention")
        if self.window < 1:
            raise UserError(f"zipvl: window={self.window} must be at least 1: the prompt's last row gives its answer")
        if self.probes < 0:
            raise UserError(f"zipvl: probes={self.probes} must be at least 0: 0 asks the window alone")

    def bind(self, host: Host) -> Zipped:
        return Zipped(self, host.model.config.attention)


class Zipped(Attend, Evict):
    """A request's drawer holds the slots that a layer keeps, from its attention to the prompt's end."""

    def __init__(self, knobs: ZipVL, attention: tuple[AttentionSpec, ...]) -> None:
        self.knobs, self.attention = knobs, attention
        self._plan = AttentionPlan(AmongTokens(self.named, knobs.queries == "all"))

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        """Slots."""
        return 8 * room.rows if room.prompt and self.knobs.tau < 1 else 0

    # ---- attend
    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.acts(span) else EVERYTHING

    def acts(self, span: Span) -> bool:
        length = span.request.prompt_len
        return self.knobs.tau < 1 and span.request.prefilling and length > self.knobs.window and self._is_whole(span)

    def _is_whole(self, span: Span) -> bool:
        return span.positions[0] == 0 and span.rows == span.request.prompt_len

    def named(self, read: Read) -> Tensor | None:
        """The slots of the tokens that a layer's rows read, which are noted; None: all."""
        if not self.acts(read.span) or read.rows is not None:
            return None
        drawer: dict[int, Tensor] = read.span.request.state.setdefault("zipvl", {})
        drawer.pop(read.layer, None)  # of a step that failed
        stay, each = self.important(read)
        noted = self.noted(read, stay, each)
        if noted is not None:
            drawer[read.layer] = noted
        return stay

    def noted(self, read: Read, stay: Tensor | None, normalised: Tensor) -> Tensor | None:
        """What the request's drawer is to hold for a layer."""
        return stay

    def important(self, read: Read) -> tuple[Tensor | None, Tensor]:
        """The slots of the layer's important tokens, increasing [p], None = all of them; and what a probe gives each
        token on average, summed over the heads, float32 [n]."""
        n, spec = read.part.size[1], self.attention[read.layer]
        at = self.probed(n, read.layer).to(read.q.device)
        sees = causal_mask(at, torch.arange(n, device=read.q.device), spec.window)  # [r, n]
        drawn = received(read, at.tolist()).sum(0)
        number = fewest(drawn, self.knobs.tau)
        each = drawn / sees.sum(0).clamp(min=1)  # a layer's own window may hide a token from all of them
        if number >= n:
            return None, each
        older = n - self.knobs.window
        best = self.ranked(each, read)[:older].sort(stable=True, descending=True).indices
        older_stay = best[: max(0, number - self.knobs.window)].sort().values
        return torch.cat((older_stay, torch.arange(older, n, device=best.device))), each

    def ranked(self, normalised: Tensor, read: Read) -> Tensor:
        """By what tokens are chosen, float32 [n]."""
        return normalised

    def probed(self, n: int, layer: int) -> Tensor:
        """Rows of a prompt that are looked at first, increasing."""
        older = n - self.knobs.window
        drawn = Random(f"{self.knobs.seed} {n} {layer}").sample(range(older), min(self.knobs.probes, older))
        return torch.tensor([*sorted(drawn), *range(older, n)])

    # ---- evict: what stays has been chosen when the rows were read
    def due(self, request: Request) -> bool:
        return not request.prefilling and bool(request.state.get("zipvl"))

    def keep(self, request: Request, layer: int) -> Tensor | None:
        stay: Tensor | None = request.state["zipvl"].pop(layer, None)
        return stay

    def places(self, layer: int, shape: KVShape) -> int:
        return 1


def fewest(drawn: Tensor, tau: float) -> int:
    """The least number of tokens that draw the share `tau` of all attention, [n] -> 1 .. n; a millionth of it may be
    missing, for sums are rounded."""
    summed = drawn.double().sort(descending=True).values.cumsum(0)
    return min(int((summed < (tau - 1e-6) * summed[-1]).sum()) + 1, len(drawn))
