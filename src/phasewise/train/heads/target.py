"""The frozen model that heads are trained for: its states of padded rows, by its own layers, a step at a time.

Whatever the decoder can load can be a target: rows go through the model's own layers, each row attending to itself, so
no second description of the model is needed. Nothing is kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.errors import UnsupportedModel
from phasewise.load import dtype_of, load_model
from phasewise.model.artefacts import fingerprint
from phasewise.model.model import Model
from phasewise.ops.attention import attention_plain
from phasewise.train.dense import TokenBlock
from phasewise.train.device import device


@dataclass(frozen=True, eq=False)
class SeenBlock:
    """A block of rows with what the model makes of them. `h` float32 [rows, length, d]: states after the final norm;
    `taps`: rows after some layers, likewise.

    Head i, from 0 on, reads the state at position t, guesses the token at t + 2 + i, and is learned where that token is
    (`wanted`). Padding is behind everything that is learned. With `every` above 1 only one position of so many is, from
    `first` on. `own` bool [rows, length]: whether the next token is the one that the model holds likeliest; if it is
    given, a head is learned only where the text between its state and its token goes on so.
    """

    block: TokenBlock
    h: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    every: int = 1
    first: int = 0
    own: Tensor | None = None

    def wanted(self, head: int) -> Tensor:
        """bool [rows, length - 1 - head]: the positions t at which the head's token is one that is learned."""
        learned = self.block.targets[:, head + 1 :] >= 0
        if self.every > 1:
            places = torch.arange(learned.shape[1], device=learned.device)
            learned &= (places - self.first) % self.every == 0
        if self.own is not None:
            for ahead in range(head + 1):
                learned &= self.own[:, ahead : ahead + learned.shape[1]]
        return learned

    def thinned(self, every: int) -> SeenBlock:
        """The same, of which one position of so many is learned. What the text is decides at which they begin."""
        return replace(self, every=every, first=int(self.block.ids.sum()) % every)

    def tokens(self, head: int) -> Tensor:
        """The tokens that the head should guess, int64 [n], row by row."""
        return self.block.targets[:, head + 1 :][self.wanted(head)]

    def states(self, head: int) -> Tensor:
        """The states that the head reads where it is learned, [n, d]."""
        return self.h[:, : self.h.shape[1] - 1 - head][self.wanted(head)]

    def path(self, head: int) -> Tensor:
        """The tokens at t + 1 ... t + 1 + head, which are known when the head guesses, int64 [n, head + 1]."""
        ids, wanted = self.block.ids, self.wanted(head)
        length = wanted.shape[1]
        return torch.stack([ids[:, 1 + ahead : 1 + ahead + length][wanted] for ahead in range(head + 1)], 1)


class FrozenTarget:
    """A model that nothing changes, where training computes. Its layers run in `dtype`; all else is float32."""

    def __init__(self, name: str, dtype: str = "float32") -> None:
        self.name = name
        self.model: Model = load_model(name, dtype=dtype_of(dtype), device=device().type)
        if self.model.config.sink_scores:
            raise UnsupportedModel(f"{name}: its attention has sink scores, with which no heads can be trained.")
        self.output = self.model.unembed.dense().float()  # [V, d]
        self.fingerprint = fingerprint(self.model)

    @property
    def hidden(self) -> int:
        return self.model.config.hidden

    @property
    def vocab(self) -> int:
        return self.model.config.vocab

    def unembed(self, states: Tensor) -> Tensor:
        """The product with the model's output matrix, [n, d] -> [n, V]. Gradients pass to the states."""
        return F.linear(states, self.output)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., d]."""
        return self.model.embed(tokens.flatten()).float().view(*tokens.shape, -1)

    @torch.no_grad()
    def see(self, block: TokenBlock, taps: Sequence[int] = ()) -> SeenBlock:
        """Runs a block. `taps`: layers after which rows are wanted as well."""
        rows, length = block.ids.shape
        context = _PaddedRows(self.model, block)
        x, kept = self.model.embed(block.ids.flatten()), dict[int, Tensor]()
        for layer in range(self.model.config.layers):
            x = self.model.layer(layer, x, context)
            if layer in taps:
                kept[layer] = x.float().view(rows, length, -1)
        return SeenBlock(block, self.model.norm(x).float().view(rows, length, -1), kept)

    @torch.no_grad()
    def greedy(self, seen: SeenBlock) -> SeenBlock:
        """The same block, learned along the model's own greedy continuations: of every beginning of its texts, as far
        as the text is that."""
        told = seen.block.targets >= 0
        own = torch.zeros_like(told)
        own[told] = self.unembed(seen.h[told]).argmax(-1) == seen.block.targets[told]
        return replace(seen, own=own)

    @torch.no_grad()
    def log_chances(self, states: Tensor) -> Tensor:
        """What the model itself says after states [n, d]: log-probabilities float32 [n, V]."""
        logits, cap = self.unembed(states), self.model.config.logit_softcap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits.log_softmax(-1)


class _PaddedRows:
    """What the model's layers ask (`LayerContext`): every row of a block reads itself, causally."""

    def __init__(self, model: Model, block: TokenBlock) -> None:
        self.config, self.size = model.config, block.ids.shape
        self.rotary = model.rotary(block.positions.flatten(), int(block.positions.max()) + 1)
        places = torch.arange(self.size[1], device=block.ids.device)
        self.distance = places[:, None] - places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, H, D] of all rows, one after the other -> [T, Hq, D]."""
        spec = self.config.attention[layer]
        q, k, v = (each.reshape(*self.size, *each.shape[1:]) for each in (q, k, v))
        if spec.softcap is not None or (spec.window is not None and spec.window < self.size[1]):
            near = (self.distance >= 0) & (self.distance < (spec.window or self.size[1]))
            each = zip(q, k.transpose(1, 2), v.transpose(1, 2))
            parts = [attention_plain(*row, near[None], spec.scale, spec.softcap) for row in each]
            return torch.stack(parts).flatten(0, 1)
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [rows, Hq, length, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
        return out.transpose(1, 2).flatten(0, 1)

    def count(self, counter: str, n: int) -> None:
        """Counts nothing."""
