"""From logits to tokens: distributions, and randomness that depends on the request alone.

One function turns logits into the distribution a token is drawn from (DESIGN law 6): the engine's `sample` method,
used by sampler, verifier and drafter alike. Randomness is counter-based, keyed by (request seed, absolute position,
purpose) (law 7), so a request draws the same tokens in any batch, process or placement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from phasewise.errors import Unanswerable

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.params import Params
    from phasewise.request.request import Request


class Purpose(IntEnum):
    """The use of a random number. Numbers for different uses at one position are independent."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    METHOD = 4  # free for a method's own use


Coupling = Literal["inverse", "gumbel"]
"""How a number becomes a token, and so how often two distributions that are drawn from with one number agree: the
inverse of the cumulated probabilities, or the largest of log-probabilities plus Gumbel noise (arXiv 2408.07978)."""

_WORD = 2**64 - 1


def uniform(seed: int, position: int, purpose: int, index: int = 0) -> float:
    """A number in [0, 1) that depends on the arguments alone: Philox 2x64, ten rounds (Salmon et al., 2011).

    `seed` counts modulo 2**64, `index` stays below 2**32.
    """
    left, right, key = position & _WORD, (purpose << 32) | index, seed & _WORD
    for _ in range(10):
        product = left * 0xD2B74407B1CE6E93
        left, right = (product >> 64) ^ key ^ right, product & _WORD
        key = (key + 0x9E3779B97F4A7C15) & _WORD
    return (left >> 11) * 2.0**-53


@dataclass(slots=True)
class Context:
    """The prefix a row of logits belongs to: the request's tokens, then `path` (a draft path not yet accepted)."""

    request: Request
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Absolute position of the token to be drawn."""
        return self.request.known + len(self.path)


NOTHING = -1  # in place of a token where none is left
LEAST = np.float32(2.0**-25)  # in place of 0, whose logarithm no division brings back


class Dist:
    """The distributions tokens are drawn from, one per row. Greedy rows are points and cost no softmax; so are those
    that leave no token, of NOTHING."""

    __slots__ = ("_row", "coupling", "probs", "top", "vocab")

    def __init__(
        self,
        top: list[int],
        vocab: int,
        sampled: Sequence[int] = (),
        probs: Tensor | None = None,
        coupling: Coupling = "inverse",
    ) -> None:
        self.top = top  # most likely token per row
        self.vocab = vocab
        self._row = {row: i for i, row in enumerate(sampled)} if sampled else {}  # rows that are not greedy, increasing
        self.probs = probs  # float32 [len(sampled), V]; None: all rows are greedy
        self.coupling: Coupling = coupling

    def __len__(self) -> int:
        return len(self.top)

    def part(self, start: int, end: int) -> Dist:
        """Rows start .. end-1 as a distribution of their own, sharing memory."""
        sampled = [row for row in range(start, end) if row in self._row]
        if not sampled:
            return Dist(self.top[start:end], self.vocab, coupling=self.coupling)
        assert self.probs is not None
        probs = self.probs[self._row[sampled[0]] : self._row[sampled[-1]] + 1]
        return Dist(self.top[start:end], self.vocab, [row - start for row in sampled], probs, self.coupling)

    def longer(self) -> Dist:
        """These rows and one more, a point of any token: what follows a guess behind which nothing was computed."""
        return Dist([*self.top, 0], self.vocab, list(self._row), self.probs, self.coupling)

    def greedy(self, row: int) -> bool:
        return row not in self._row

    def row(self, row: int) -> Tensor:
        """Probabilities float32 [V]."""
        if row in self._row:
            assert self.probs is not None
            return self.probs[self._row[row]]
        point = torch.zeros(self.vocab)
        point[max(self.top[row], 0)] = 1.0  # what a drafter guesses where nothing is left does not matter
        return point

    def draw(self, row: int, u: float) -> int:
        """The token that the number `u` draws: see `pick`."""
        return self.pick(self.row(row), u) if row in self._row else self.top[row]

    def pick(self, probs: Tensor, u: float) -> int:
        """`pick` by these distributions' coupling, from other probabilities [V]."""
        return pick(probs, u, self.coupling)

    def draw_all(self, us: Sequence[float]) -> list[int]:
        """One token per row; `us` [rows]."""
        tokens = list(self.top)
        if self._row and self.coupling == "gumbel":
            for row in self._row:
                tokens[row] = self.draw(row, us[row])
        elif self._row:
            assert self.probs is not None
            cumulated = self.probs.double().cumsum(-1)
            at = torch.tensor([us[row] for row in self._row], dtype=torch.float64)[:, None]
            found = torch.searchsorted(cumulated, at.to(cumulated.device) * cumulated[:, -1:], right=True)
            for row, token in zip(self._row, found[:, 0].tolist()):
                tokens[row] = min(token, self.vocab - 1)
        return tokens


def pick(probs: Tensor, u: float, coupling: Coupling = "inverse") -> int:
    """A token drawn from `probs` [V] (of any sum) with the number `u`; never one of weight 0.

    inverse: the token whose stretch of the cumulated probabilities, in the order of ids, holds `u`. gumbel: the token
    of the largest log-probability plus noise, which hangs on `u` and the token alone. Two distributions that share `u`
    then draw the same token i with probability 1 / sum_j max(p_j / p_i, q_j / q_i), summed over i.
    """
    if coupling == "gumbel":
        return int((_race(u, probs.shape[-1]).to(probs.device) / probs).argmax())
    cumulated = probs.double().cumsum(-1)
    found = int(torch.searchsorted(cumulated, u * float(cumulated[-1]), right=True))
    return min(found, probs.shape[-1] - 1)


def _race(u: float, n: int) -> Tensor:
    """Float32 [n], below 0: minus exponential times, which hang on `u`. Divided by probabilities, the largest is as the
    largest of log-probabilities plus Gumbel noise: that of the token which comes first at rates p."""
    drawn = np.random.Generator(np.random.Philox(key=int(u * 2**53))).random(n, dtype=np.float32)
    return torch.from_numpy(np.log(np.maximum(drawn, LEAST)))


class Sample(ABC):
    """sample: logits to the distribution a token is drawn from.

    A method may change logits and hand on to another one: it holds that in a field `then = part("sample", ...)`, and
    `--sample one+two` chains them. It never brings back a token that one before it has excluded (-inf). Runtimes
    inherit from this class: what they leave out is as it is here.
    """

    coupling: Coupling = "inverse"  # of its distributions

    @abstractmethod
    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        """logits float32 [n, V] (may be overwritten), one context per row."""

    def check(self, params: Params) -> None:
        """Raise UserError, naming it, where something in `Params.ask` that the method takes cannot be honoured. Called
        before a request with such a name is admitted, from any thread."""

    def greedy(self, contexts: Sequence[Context]) -> bool:
        """Returns True if each of these tokens is simply the one of the largest logit (of equal ones the first). It is
        then not called for them, and no logits are written."""
        return False

    def among(self, contexts: Sequence[Context]) -> Sequence[Tensor | None]:
        """Asked of greedy tokens: which tokens count at all, int32 [V / 32] for each (bit i of word j: token 32 j + i).
        None for all; empty where that is so of each."""
        return ()

    def ahead(self, contexts: Sequence[Context]) -> None:
        """Told, before the forward, of what it will be called for after it, as far as these requests ask for something
        (`Params.ask`): what takes time can be done meanwhile."""

    def sure(self, request: Request) -> Sequence[int]:
        """Tokens that follow its text whatever the model says, none of which ends it: at each of them it leaves but
        one. Asked of requests that ask for something. Decode methods compute them in one pass, without asking again,
        and they count as guesses that were accepted (`Counters.forced`)."""
        return ()

    def exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        """Set to -inf, in place, tokens that must not be said whatever the model thinks of them; a call does so, too.
        Who judges by the logits themselves (verifiers that want them) is shown them so."""


def choose(sample: Sample, model: Model, x: Tensor, contexts: Sequence[Context]) -> list[int]:
    """`draw(distribution(...))` in one."""
    return draw(distribution(sample, model, x, contexts), contexts)


def distribution(sample: Sample, model: Model, x: Tensor, contexts: Sequence[Context]) -> Dist:
    """Returns the distributions that tokens are drawn from after rows x [n, d] of the last layer, one context per
    row."""
    if sample.greedy(contexts):
        return Dist(model.best(x, sample.among(contexts)), model.config.vocab)
    return sample(model.head(x), contexts)


def distribution_shown(
    sample: Sample, model: Model, x: Tensor, contexts: Sequence[Context], logits: bool, top: int
) -> tuple[Dist, Tensor | None, Tensor]:
    """The same distributions, with the logits they came from, float32 [n, V], if asked for, and the ids of the `top`
    largest of each row of x, int64 [rows, top], best first; x may have more rows than contexts. One pass of the head.
    """
    raw = model.head(x)
    ids, raw = raw.topk(min(top, raw.shape[-1]), -1).indices, raw[: len(contexts)]
    if sample.greedy(contexts) and not sample.among(contexts):
        return Dist(raw.argmax(-1).tolist(), model.config.vocab), raw if logits else None, ids
    if logits:
        sample.exclude(raw, contexts)
    return sample(raw.clone() if logits else raw, contexts), raw if logits else None, ids


def draw(dist: Dist, contexts: Sequence[Context]) -> list[int]:
    """One token per row, by each request's own randomness. Raises Unanswerable where none is left."""
    if dist.probs is None:
        tokens = list(dist.top)
    else:
        us = [
            0.0 if dist.greedy(i) else uniform(c.request.params.seed, c.position, Purpose.SAMPLE)
            for i, c in enumerate(contexts)
        ]
        tokens = dist.draw_all(us)
    if NOTHING in tokens:
        context = contexts[tokens.index(NOTHING)]
        raise nothing_left(context.request, len(context.path))
    return tokens


def nothing_left(request: Request, beyond: int = 0) -> Unanswerable:
    """Why a request cannot go on, so many tokens beyond its text."""
    params = request.params
    named = [*(params.ask or ())]
    named += [name for name in ("allowed_token_ids", "logit_bias", "min_tokens", "bad_words") if getattr(params, name)]
    return Unanswerable(
        f"{' and '.join(named) or 'the rules of the request'} leave no token to go on with after "
        f"{request.n_out + beyond} tokens: allow more"
    )
