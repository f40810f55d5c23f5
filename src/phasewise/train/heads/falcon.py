"""Falcon's heads as they are trained: on the model's own states, by coupled sequential glancing distillation.

The heads guess k tokens a pass. What they make of the pair at position t is to be the model's state at t + k, and the
logits of that what the model says there. A step runs the text twice (arXiv 2412.12639). The first run, without
gradients, says how many tokens are guessed wrong. A share of so many pairs is then replaced by the answers: the state
and the token k positions further on. The second run learns, beside answers at first, and without them at last: the
share falls to 0 over the run. So a guess learns to read what its neighbours in the group will be.

The losses are a smooth L1 loss of the state, and a tenth of 0.9 of a Kullback-Leibler divergence from the model's own
distribution and 0.1 of a cross-entropy with the token of the text. Other than in the paper, states and the noise on
them are measured by the states' root mean square (`aligned.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.model.rope import RopeTables
from phasewise.speculation.heads.falcon import FalconHeads, Recurrence
from phasewise.speculation.heads.falcon_layout import usual_falcon
from phasewise.speculation.heads.layouts import settings_of, tensors_of
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.aligned import noise, state_size
from phasewise.train.heads.target import FrozenTarget, SeenBlock
from phasewise.train.trainer import StepLoss

GLANCE = 0.4  # of the tokens that are guessed wrong, so many answers are shown at first
SAID, SOFT, TEMPERATURE = 0.1, 0.9, 0.95  # weight of both logits' losses, the divergence's among them, its temperature
OPEN, FORGET, PASSED = 2.0, -1.0, 1.0  # biases of gates at first, and how much of a state passes through both layers


@dataclass(frozen=True)
class FalconKind:
    """Falcon's heads: an LSTM of the model's width, a block with one key head and an MLP half as wide as the model.
    `together`: guesses of a pass; 0: as many as usual. `glance`: the share of answers at first; 0: plain training."""

    together: int = 0
    glance: float = GLANCE
    every: int = 1

    @property
    def own_output(self) -> bool:
        return False

    def taps(self, module: FalconHeads) -> tuple[int, ...]:
        return ()

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> FalconHeads:
        made = usual_falcon(target.model, narrow=True, guesses=self.together)
        made.steps = depth
        begin(made, target)
        return made.to(target.output.device)

    def begin(self, module: FalconHeads, target: FrozenTarget, texts: TokenBlock) -> None:
        """Does nothing: no initial weight hangs on the text."""

    def vocabulary(self, module: FalconHeads) -> Tensor | None:
        return None

    def guesses(self, module: FalconHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits of each depth in turn, [n, V], where it is learned: those of drafts from true states at every
        position, along the text's own tokens. Where a text has fewer than k pairs, its first row stands for those that
        are missing; no draft begins there."""
        ids, k = seen.block.ids, module.together
        rows, length = ids.shape
        pairs = module.inputs(target.embed(F.pad(ids[:, 1:], (0, 1))), seen.h)
        entered, state = every_state(module, pairs)
        attention = ChainedGroups(module, seen.block.positions)
        outputs = attention.text(entered)
        for step in range(module.steps):
            if step and step % k == 0:
                ahead = [2 + step - k + i for i in range(k)]  # the guesses of the pass before, as the text has them
                tokens = torch.stack([F.pad(ids[:, i:], (0, i))[:, :length] for i in ahead], -1).flatten(0, 1)
                features = module.passed_on(outputs).flatten(0, 1)
                entered, state = module.enter(module.inputs(target.embed(tokens), features), state)
                outputs = attention.further(entered.view(rows, length, k, -1))
            yield module.logits(outputs[:, : length - 1 - step, step % k][seen.wanted(step)], target.unembed)

    def config(self, module: FalconHeads, target: FrozenTarget) -> dict[str, Any]:
        return settings_of(module, target.model, module.steps)

    def tensors(self, module: FalconHeads) -> dict[str, Tensor]:
        return tensors_of(module)

    # ---- learning
    def loss(
        self, module: FalconHeads, target: FrozenTarget, blocks: Sequence[TokenBlock], progress: float
    ) -> StepLoss:
        """The loss of a step, with the means over all positions (nats) of its three parts. `progress`: how much of the
        run is over, from 0 to 1."""
        found = [self.losses(module, target, target.see(block), progress) for block in blocks]
        count = max(1, sum(n for *_, n in found))
        state, soft, hard = (torch.stack(each).sum() / count for each in list(zip(*found))[:3])
        parts = {"feature": float(state.detach()), "divergence": float(soft.detach()), "token": float(hard.detach())}
        total = state + SAID * (SOFT * soft + (1 - SOFT) * hard)
        return StepLoss(total, parts, sum(block.ids.numel() for block in blocks))

    def losses(
        self, module: FalconHeads, target: FrozenTarget, seen: SeenBlock, progress: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Sums over positions of the smooth L1 loss, the divergence and the cross-entropy (nats), and how many
        positions there are: those whose state k further on is followed by a token that is learned."""
        k, ids, size = module.together, seen.block.ids, state_size(target)
        wanted, attend = seen.wanted(k - 1), RelaxedAttention(module, seen.block.positions).attend
        embedded = target.embed(F.pad(ids[:, 1:], (0, 1)))  # what is said behind the end is never learned
        read, state = seen.h + size * noise(seen), seen.h[:, k:][wanted]
        own = target.log_chances(state)

        def outputs() -> Tensor:
            return module(embedded, read, attend)[:, : wanted.shape[1]][wanted]  # type: ignore[no-any-return]

        share = self.glance * (1 - progress)
        if share > 0:
            with torch.no_grad():
                wrong = int((module.logits(outputs(), target.unembed).argmax(-1) != own.argmax(-1)).sum())
            shown = glanced(seen, k, int(share * wrong))
            read, embedded = answered(read, seen.h, shown, k), answered(embedded, embedded, shown, k)
        output = outputs()
        logits = module.logits(output, target.unembed)
        passed = F.smooth_l1_loss(module.passed_on(output) / size, state / size, reduction="none").mean(-1).sum()
        soft = F.kl_div(
            (logits / TEMPERATURE).log_softmax(-1), (own / TEMPERATURE).log_softmax(-1), reduction="sum",
            log_target=True,
        )  # fmt: skip
        hard = F.cross_entropy(logits, seen.tokens(k - 1), reduction="sum")
        return passed, soft, hard, len(state)


def glanced(seen: SeenBlock, k: int, count: int) -> Tensor:
    """bool [rows, length - k]: the positions of about `count` pairs that become answers. Each is the first of a group
    where the heads' guess is learned; of groups of more than two also those behind it, so that all but one to all but
    k - 1 of a group may be shown. What the text is decides which, so that a run that goes on where it stopped meets
    the same."""
    wanted = seen.wanted(k - 1)
    places = torch.arange(wanted.shape[1], device=wanted.device)
    firsts = (wanted & (places % k == 0)).nonzero()
    drawn = torch.Generator().manual_seed(int(seen.block.ids.sum()) + 1)
    order = torch.randperm(len(firsts), generator=drawn)[: count if k <= 2 else count // k]
    lengths = torch.randint(1, max(2, k), (len(order),), generator=drawn).tolist()
    shown = torch.zeros_like(wanted)
    for (row, first), length in zip(firsts[order.to(firsts.device)].tolist(), lengths):
        shown[row, first : first + length] = wanted[row, first : first + length]
    return shown


def answered(given: Tensor, true: Tensor, shown: Tensor, k: int) -> Tensor:
    """Rows `given` [rows, length, d], but for those `shown`: there the `true` ones k positions further on."""
    return torch.cat((torch.where(shown[..., None], true[:, k:], given[:, :-k]), given[:, -k:]), 1)


@torch.no_grad()
def begin(heads: FalconHeads, target: FrozenTarget) -> None:
    """Initial weights with which heads say again, less surely, what the model says: through gates that are open, the
    feature passes nearly as it is."""
    d = target.hidden
    for closing in (heads.block.self_attn.o_proj, heads.block.mlp.down_proj):
        closing.weight.zero_()
    for layer in range(heads.lstm.num_layers):
        opened, kept, new, shown = heads.get_parameter(f"lstm.bias_ih_l{layer}").zero_().chunk(4)
        for bias, value in ((opened, OPEN), (kept, FORGET), (new, 0.0), (shown, OPEN)):
            bias.fill_(value)
        heads.get_parameter(f"lstm.bias_hh_l{layer}").zero_()
        heads.get_parameter(f"lstm.weight_hh_l{layer}").normal_(std=0.005)
        read = heads.get_parameter(f"lstm.weight_ih_l{layer}").normal_(std=0.005)
        read[2 * d : 3 * d, -d:] += (PASSED if layer == 0 else 1.0) * torch.eye(d)


# ---- who sees whom
class RelaxedAttention:
    """The attention of whole texts [rows, length], which begin at `positions`: a row sees all rows before its group of
    k, and its whole group."""

    def __init__(self, heads: FalconHeads, positions: Tensor) -> None:
        self.heads, self.positions = heads, positions
        self.scale = heads.config.attention[0].scale
        self.ropes = RopeTables(heads.config.ropes, heads.config.max_positions, torch.float32, positions.device)
        groups = torch.arange(positions.shape[1], device=positions.device) // heads.together
        self.sees = groups[:, None] >= groups

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, length, Hq, D], k and v [rows, length, H, D], not rotated -> [rows, length, Hq, D]."""
        q, k, v = (each.transpose(1, 2) for each in self.turned(q, k, v, self.positions))
        return F.scaled_dot_product_attention(q, k, v, self.sees, scale=self.scale).transpose(1, 2)

    def turned(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [..., n, D] rotated to `positions` [...], and keys and values for each query head."""
        heads, both = q.shape[-2], torch.cat((q, k), -2)
        both = self.ropes(positions.flatten())(0, both.flatten(0, -3)).view(both.shape)
        q, k = both[..., :heads, :], both[..., heads:, :]
        groups = heads // k.shape[-2]
        return q, k.repeat_interleave(groups, -2), v.repeat_interleave(groups, -2)


class ChainedGroups(RelaxedAttention):
    """The attention of drafts that begin at every position of texts, one pass after the other."""

    def __init__(self, heads: FalconHeads, positions: Tensor) -> None:
        super().__init__(heads, positions)
        self.places = torch.arange(positions.shape[1], device=positions.device)
        self.keys: list[Tensor] = []  # of the text [rows, length, Hq, D], then of each pass [rows, length, k, Hq, D]
        self.values: list[Tensor] = []

    def text(self, entered: Tensor) -> Tensor:
        """Rows [rows, length, d] that enter the block -> [rows, length, k, d]: at each position the outputs of the last
        k pairs up to it, which see one another and all before."""
        found, k = [], self.heads.together
        for i in range(k):
            later = k - 1 - i  # rows behind this one in its group
            self.sees = self.places[:, None] + later >= self.places
            found.append(self.heads.layer(0, entered, self.attend)[:, (self.places - later).clamp_min(0)])
        self.heads.layer(0, entered, self._keep)
        return torch.stack(found, 2)

    def _keep(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, k, v = self.turned(q, k, v, self.positions)
        self.keys, self.values = [k], [v]
        return q

    def further(self, entered: Tensor) -> Tensor:
        """The rows [rows, length, k, d] of the next pass at each position -> its outputs, likewise."""
        return self.heads.layer(0, entered, self._below)

    def _below(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = self.heads.together
        ahead = torch.arange(width, device=q.device) + 1 + width * (len(self.keys) - 1)
        q, k, v = self.turned(q, k, v, self.positions[..., None] + ahead)
        self.keys.append(k)
        self.values.append(v)
        scores = torch.einsum("rtihd,rshd->rtihs", q, self.keys[0])
        later = (self.places > self.places[:, None])[:, None, None]
        scores = scores.masked_fill(later, float("-inf"))
        own = [torch.einsum("rtihd,rtjhd->rtihj", q, each) for each in self.keys[1:]]
        weights = (torch.cat((scores, *own), -1) * self.scale).softmax(-1)
        length = scores.shape[-1]
        read = torch.einsum("rtihs,rshd->rtihd", weights[..., :length], self.values[0])
        for number, value in enumerate(self.values[1:]):
            at = length + number * width
            read = read + torch.einsum("rtihj,rtjhd->rtihd", weights[..., at : at + width], value)
        return read


def every_state(heads: FalconHeads, pairs: Tensor) -> tuple[Tensor, Recurrence]:
    """Pairs [rows, length, 2 d] of whole texts -> their rows [rows, length, d], and the recurrent states behind every
    position [layers, rows * length, d]."""
    state, entered, states = heads.fresh(len(pairs)), list[Tensor](), list[Recurrence]()
    for at in range(pairs.shape[1]):
        row, state = heads.enter(pairs[:, at : at + 1], state)
        entered.append(row)
        states.append(state)
    hidden, cell = (torch.stack(each, 2).flatten(1, 2) for each in zip(*states))
    return torch.cat(entered, 1), (hidden, cell)
