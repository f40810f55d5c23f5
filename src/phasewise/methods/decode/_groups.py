"""The modules of HAMburger (arXiv 2505.20438), which serving and training share: what turns a group of tokens into one
row, the small decoder that writes a group's later tokens, and what says where a group ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from phasewise.model.config import ModelConfig

MOST = 4  # tokens of a group
EPS = 1e-6


def tapped(layers: int) -> tuple[int, ...]:
    """The layers whose outputs the small decoder reads: the middle one and the last, numbered from 0."""
    return (max(0, layers // 2 - 1), layers - 1)


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, EPS)


class GroupEmbedder(nn.Module):
    """Makes one row of the embeddings of a group: their mean, and what it finds in them by attention of one head."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(MOST, hidden // 2))
        self.q = nn.Linear(hidden, width, bias=False)
        self.k = nn.Linear(hidden + hidden // 2, width, bias=False)
        self.v = nn.Linear(hidden + hidden // 2, width, bias=False)
        self.out = nn.Linear(width, hidden, bias=False)

    def forward(self, e: Tensor, sizes: Tensor) -> Tensor:
        """e [n, MOST, d], of which the first `sizes` int64 [n] of each group count -> [n, d]."""
        real = torch.arange(MOST, device=e.device) < sizes[:, None]
        mean = (e * real[..., None]).sum(1) / sizes[:, None].to(e.dtype)
        placed = torch.cat((e, self.places.to(e.dtype).expand(len(e), -1, -1)), -1)
        k, v = self.k(placed).view(len(e), MOST, -1), self.v(placed).view(len(e), MOST, -1)
        scores = (k * self.q(mean)[:, None]).sum(-1).float() * k.shape[-1] ** -0.5
        shares = scores.masked_fill(~real, -torch.inf).softmax(-1).to(e.dtype)
        out: Tensor = mean + self.out((v * shares[..., None]).sum(1))
        return out


class MicroDecoder(nn.Module):
    """One decoder block over a few states of the base, then the tokens of a group so far. Its keys and values are made
    anew at every step, and thrown away. Positions are learned."""

    def __init__(self, hidden: int, width: int, inner: int, states: int) -> None:
        super().__init__()
        self.state_gains = nn.Parameter(torch.ones(states, hidden))
        self.token_gain = nn.Parameter(torch.ones(hidden))
        self.carry = nn.Parameter(torch.zeros(hidden))  # of a token's own row to what it says
        self.places = nn.Parameter(torch.zeros(states + MOST - 1, hidden))
        self.q = nn.Linear(hidden, width, bias=False)
        self.k = nn.Linear(hidden, width, bias=False)
        self.v = nn.Linear(hidden, width, bias=False)
        self.o = nn.Linear(width, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """States [n, S, d] of the row before a group, embeddings [n, j, d] of its first j tokens -> rows [n, j, d] for
        the base's head, each after its token."""
        count, kept = tokens.shape[1], states.shape[1]
        own = normed(tokens) * self.token_gain.to(tokens.dtype)
        rows = torch.cat((normed(states) * self.state_gains.to(states.dtype), own), 1)
        rows = rows + self.places[: kept + count].to(rows.dtype)
        inputs, x = normed(rows), rows[:, kept:] * self.carry.to(rows.dtype)
        q, k, v = self.q(inputs[:, kept:]), self.k(inputs), self.v(inputs)
        q, k, v = (each.view(len(states), -1, q.shape[-1]) for each in (q, k, v))
        scores = torch.matmul(q, k.transpose(1, 2)).float() * q.shape[-1] ** -0.5
        later = torch.ones(count, kept + count, dtype=torch.bool, device=x.device).triu(kept + 1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1).to(x.dtype)
        x = x + self.o(torch.matmul(shares, v)).view(x.shape)
        inputs = normed(x)
        change: Tensor = self.down(F.silu(self.gate(inputs)) * self.up(inputs))
        out: Tensor = x + change.view(x.shape)
        return out


class StopHead(nn.Module):
    """A perceptron of three layers: whether a group ends with a token, from the state that said it and itself."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2 * hidden, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        """State and embedding [n, d] each -> the logit of the probability that the group ends, [n]."""
        x = F.silu(self.first(torch.cat((normed(state), normed(token)), -1)))
        out: Tensor = self.last(F.silu(self.second(x)))[..., 0]
        return out


class GroupModules(nn.Module):
    """All three, for a model of such a config; float32 until they are cast."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, states = config.hidden, len(tapped(config.layers))
        narrow = max(4, hidden // 8)
        self.embedder = GroupEmbedder(hidden, narrow)
        self.micro = MicroDecoder(hidden, 3 * narrow, narrow, states)
        self.stop = StopHead(hidden, max(4, hidden // 16))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by their names in the artefact."""
        return {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}


def segments(entropies: Sequence[float], most: int, low: float, ratio: float) -> list[int]:
    """The sizes of the groups of tokens with these entropies (nats), in order: a token joins the group before it if
    that has fewer than `most` tokens and its entropy is below `low`, or below `ratio` of the group's largest."""
    sizes, largest = list[int](), 0.0
    for entropy in entropies:
        if sizes and sizes[-1] < most and (entropy < low or entropy < ratio * largest):
            sizes[-1] += 1
            largest = max(largest, entropy)
        else:
            sizes.append(1)
            largest = entropy
    return sizes
