"""Chimera's heads as they are trained: their recursion at all positions of a text at once (arXiv 2402.15758).

Step j, from 0 on, stands behind the state t, which is the last true one, and guesses the token t + 2 + j. Its row is
the trigram of the token t + 1 + j. It sees the states up to t, the surrogate of each earlier step behind t, and itself,
as in a draft; the tokens are the text's. Each step learns what the model says where its token stands, and gradients
pass through the surrogates. The authors' code learns the tokens themselves and cuts gradients between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.chimera_layout import usual_chimera
from phasewise.speculation.heads.trigram import GRAM, TrigramHeads, TrigramOptions
from phasewise.train.heads.aligned import state_size
from phasewise.train.heads.feature import BEGIN, FeatureKind, UnrolledAttention
from phasewise.train.heads.target import FrozenTarget, SeenBlock

FAINT = 0.1  # root mean square of the first surrogates, over that of states


@dataclass(frozen=True)
class ChimeraKind(FeatureKind):
    """A layer with one key head and an MLP half as wide as the model; output heads read out through the model's own
    matrix. `ngram`: different tokens in a trigram."""

    kind: str = "chimera"
    ngram: int = GRAM

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> FeatureHeads:
        made = usual_chimera(target.model, narrow=True, options=TrigramOptions(depth, ngram=self.ngram))
        start(made, target)
        return made.to(target.output.device)

    def guesses(self, module: FeatureHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits of each step in turn, [n, V], where it is learned."""
        assert isinstance(module, TrigramHeads)
        length = seen.h.shape[1]
        attention = SurrogateAttention(module, seen.block.positions)
        attention.hold(seen.h)
        trigrams = module.trigram(windows(module, target.embed(seen.block.ids)))
        for step in range(module.steps):
            newest = F.pad(trigrams[:, 1 + step :], (0, 0, 0, 1 + step))  # behind the end nothing is learned
            surrogates = module.layer(0, newest, attention.attend)
            wanted = seen.wanted(step)
            learned = (each[:, : length - 1 - step][wanted] for each in (seen.h, surrogates))
            yield module.logits(module.read(step, *learned), target.unembed)
            attention.hold(surrogates)


def windows(heads: TrigramHeads, embedded: Tensor) -> Tensor:
    """Embeddings [rows, length, d] of texts -> those of each token's trigram, [rows, length, 3, d]. In front of a
    text its first token is repeated."""
    places = torch.arange(embedded.shape[1], device=embedded.device)
    back = torch.tensor(heads.reaches_back(), device=embedded.device)
    return embedded[:, (places[:, None] - back).clamp_(min=0)]


@torch.no_grad()
def start(heads: TrigramHeads, target: FrozenTarget) -> None:
    """Initial weights with which heads say again, less surely, what the model says: each reads state and surrogate
    through identities, as the authors' [W; W] does, and surrogates are a small part of a state's size."""
    block, same = heads.block, torch.eye(target.hidden)
    embedding = float(target.embed(torch.arange(target.vocab, device=target.output.device)).square().mean().sqrt())
    for closing in (block.self_attn.o_proj, block.mlp.down_proj):
        closing.weight.zero_()
    last = heads.get_parameter("trimlp.1.weight")
    last.normal_(std=FAINT * state_size(target) / (embedding * last.shape[1] ** 0.5))
    for head in heads.chimera_head:
        read = head.get_parameter("0.weight")
        if heads.options.own_output:
            read.copy_(torch.cat((BEGIN * target.output, target.output), -1))
        else:
            read.copy_(torch.cat((BEGIN * same, same), -1))


class SurrogateAttention(UnrolledAttention):
    """The attention of trigrams over the true states of the same rows, the surrogates of earlier steps and themselves.

    States are held first, then the surrogates of one step after the other. What is held stands one further on than what
    was held before; a trigram stands where its surrogate will."""

    def __init__(self, heads: TrigramHeads, positions: Tensor) -> None:
        super().__init__(heads, positions)
        self.heads = heads

    def hold(self, x: Tensor) -> None:
        """Keeps keys and values of states, or of a step's surrogates, [rows, length, d]."""
        k, v = self.heads.keys_values(0, x)
        k, v = self._as_read(self._turned(k)), self._as_read(v)
        self.keys.append(k)
        self.values.append(v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, length, Hq, D], k and v [rows, length, H, D] of a step's trigrams -> [rows, length, Hq, D]."""
        length = q.shape[1]
        q, k, v = self._as_read(self._turned(q)), self._as_read(self._turned(k)), self._as_read(v)
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        scores = (q @ self.keys[0].mT).masked_fill(later, float("-inf"))
        behind = [(q * key).sum(-1, keepdim=True) for key in (*self.keys[1:], k)]
        weights = (torch.cat((scores, *behind), -1) * self.scale).softmax(-1)
        read = weights[..., :length] @ self.values[0]
        for at, value in enumerate((*self.values[1:], v)):
            read = read + weights[..., length + at, None] * value
        return read.transpose(1, 2)

    def _as_read(self, x: Tensor) -> Tensor:
        """x [rows, length, n, D] -> [rows, Hq, length, D], each key head as often as query heads read it."""
        return x.repeat_interleave(self.heads.config.heads // x.shape[2], 2).transpose(1, 2)
