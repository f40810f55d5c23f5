"""Masked draft models as they are trained: blocks of masks behind the positions of a text, and the text itself.

The target's text and all blocks are one row of the decoder. Rows of text see it causally; those of a block see the text
up to the block's beginning, and one another. The row of a token foretells the one after it, whether it is a mask or
not, so a decoder that was causal before has learned the first guess of every block already. What is learned are the
target's own distributions.

Two means are those of non-autoregressive drafters (arXiv 2203.16487). In every other step blocks are glanced at (GLAT,
arXiv 2008.07905): the more of a block's likeliest tokens are wrong, the more of its masks become the right tokens, and
the others are learned. Labels of masks are smoothed. Left out: their encoder, which a decoder-only target has not, and
other shares of masks than glancing leaves, which a draft made in one pass never meets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.load import model_path
from phasewise.speculation.heads.diffuspec_layout import MOST, TRIGRAMS, draft_settings
from phasewise.speculation.trigrams import SmoothedTrigrams
from phasewise.train import dense
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.device import halved
from phasewise.train.heads.target import FrozenTarget, SeenBlock
from phasewise.train.passes import Pass
from phasewise.train.trainer import StepLoss
from phasewise.train.written import WrittenText

WIDTH, HEAD, LAYERS = 192, 64, 2  # of a fresh decoder
TURNS = (4, 4, 8, MOST)  # places of the blocks of a step, at most as many as blocks may have
SHOWN = 4  # places whose losses are told
FADING = 0.8  # weight of a place over that of the one before
GLANCED = 0.5  # of the wrong tokens of a block, the share that is shown
SMOOTH = 0.1  # of a mask's labels, what is spread over all tokens
KEPT = 40_000  # trigrams
AT_ONCE = 64  # blocks of a row, where a text is measured


class MaskedDecoder(nn.Module):
    """A decoder over the target's vocabulary and, behind it, a mask: what the trainer makes of a draft."""

    def __init__(self, decoder: DenseDecoder, guesses: int) -> None:
        super().__init__()
        self.decoder, self.guesses = decoder, guesses
        self.trigrams = torch.zeros(0, 4, dtype=torch.int32)  # counted, not learned

    @property
    def mask(self) -> int:
        return self.decoder.shape.vocab_size - 1

    def count(self, written: Sequence[WrittenText]) -> None:
        """Count the trigrams of what the target was asked and wrote."""
        texts = ([*text.prompt, *text.reply] for text in written)
        self.trigrams = SmoothedTrigrams.of(texts, self.mask, KEPT).table

    def states(
        self, block: TokenBlock, roots: Tensor, masks: int, shown: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The final states of a text [rows, length, d] and of the masks behind its `roots` [rows, n, masks, d].

        `roots` int64 [n] are places in the text, whose token is the last before a block. `shown` bool [rows, n, masks]:
        masks in whose place the text's own token stands.
        """
        rows, length = block.ids.shape
        ahead = 1 + torch.arange(masks, device=roots.device)
        places = roots[:, None] + ahead  # [n, masks]
        ids = torch.full((rows, *places.shape), self.mask, device=roots.device)
        if shown is not None:
            ids = torch.where(shown, block.ids[:, places.clamp(max=length - 1)], ids)
        positions = block.positions[:, roots, None] + ahead
        both = TokenBlock(torch.cat((block.ids, ids.flatten(1)), 1), block.targets,
                          torch.cat((block.positions, positions.flatten(1)), 1))  # fmt: skip
        sees = _sees(length, roots, masks)
        width = self.decoder.shape.hidden_size
        x = self.decoder.hidden([both], Pass(sees=lambda layer, number: sees)).view(rows, -1, width)
        return x[:, :length], x[:, length:].reshape(rows, *places.shape, width)

    def logits(self, states: Tensor) -> Tensor:
        """[n, d] -> [n, V] over the target's vocabulary."""
        return F.linear(states, self.decoder.embed_tokens.weight[: self.mask])


def _sees(length: int, roots: Tensor, masks: int) -> Tensor:
    """bool [1, length + n masks, length + n masks]: what rows of a text and of its blocks read."""
    count, device = len(roots) * masks, roots.device
    text = torch.arange(length, device=device)
    sees = torch.zeros(length + count, length + count, dtype=torch.bool, device=device)
    sees[:length, :length] = text <= text[:, None]
    sees[length:, :length] = text <= roots.repeat_interleave(masks)[:, None]
    own = torch.arange(count, device=device) // max(1, masks)
    sees[length:, length:] = own == own[:, None]
    return sees[None]


@dataclass(frozen=True)
class MaskedDraftKind:
    """A masked draft model. It begins as the decoder `start`, a directory or a name, or with fresh weights."""

    start: str = ""
    every: int = 1

    @property
    def own_output(self) -> bool:
        return False

    def taps(self, module: MaskedDecoder) -> tuple[int, ...]:
        return ()

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> MaskedDecoder:
        if depth > MOST:
            raise UserError(f"depth={depth}: a pass guesses up to {MOST} tokens")
        before = self._before(target)
        if before is None:
            inner = round(WIDTH * 8 / 3 / HEAD) * HEAD
            context = target.model.config.max_positions
            decoder = DenseDecoder(DenseShape(target.vocab + 1, WIDTH, LAYERS, WIDTH // HEAD, 1, inner, HEAD, context))
        else:
            decoder = _with_mask(before)
        return MaskedDecoder(decoder, depth).to(target.output.device)

    def _before(self, target: FrozenTarget) -> DenseDecoder | None:
        if not self.start:
            return None
        made = dense.load(model_path(self.start))
        if made.shape.vocab_size != target.vocab:
            raise UserError(f"start={self.start}: it has {made.shape.vocab_size} tokens and {target.name} "
                            f"{target.vocab}: name a draft model of the same tokenizer, or leave it out")  # fmt: skip
        return made

    def begin(self, module: MaskedDecoder, target: FrozenTarget, texts: TokenBlock) -> None:
        """Does nothing: no initial weight hangs on the text."""

    def vocabulary(self, module: MaskedDecoder) -> Tensor | None:
        return None

    def guesses(self, module: MaskedDecoder, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits of each place in turn, [n, V], where it is learned. The text's own row makes the first guess."""
        length = seen.block.ids.shape[1]
        roots = 1 + torch.arange(seen.first, length - 1, seen.every, device=seen.block.ids.device)
        found = list[Tensor]()
        for some in torch.split(roots, AT_ONCE):
            text, masks = module.states(seen.block, some, module.guesses - 1)
            found.append(torch.cat((text[:, some][:, :, None], masks), 2))
        states = torch.cat(found, 1)  # [rows, n, guesses, d]
        for head in range(module.guesses):
            wanted = seen.wanted(head)[:, seen.first :: seen.every]
            yield module.logits(states[:, : wanted.shape[1], head][wanted])

    def loss(
        self, module: MaskedDecoder, target: FrozenTarget, blocks: Sequence[TokenBlock], learned: int | None = None
    ) -> StepLoss:
        """Cross-entropies (nats) with the target's distributions: of rows of text, and of the places of blocks, each
        the mean over its positions; their sum by weight. `learned`: so many first guesses are, the text's one among
        them; None: all."""
        most = min(learned or module.guesses, module.guesses)
        sums, counts = list[Tensor](), list[int]()
        for block in blocks:
            for place, (total, count) in enumerate(self._of_block(module, target, block, most)):
                if place == len(sums):
                    sums.append(total)
                    counts.append(count)
                else:
                    sums[place], counts[place] = sums[place] + total, counts[place] + count
        means = [total / max(1, count) for total, count in zip(sums, counts)]
        weights = [FADING**place for place in range(len(means))]
        total = torch.stack([weight * mean for weight, mean in zip(weights, means)]).sum() / sum(weights)
        parts = {f"head{place}": float(mean.detach()) for place, mean in enumerate(means[:SHOWN], 1)}
        return StepLoss(total, parts, sum(block.ids.numel() for block in blocks))

    def _of_block(
        self, module: MaskedDecoder, target: FrozenTarget, block: TokenBlock, most: int
    ) -> Iterator[tuple[Tensor, int]]:
        """Sums of cross-entropies and their numbers: of the text, then of the first mask of all blocks and so on."""
        told, length = block.targets >= 0, block.ids.shape[1]
        chances = target.log_chances(target.see(block).h[told]).exp_()
        place = torch.zeros(told.shape, dtype=torch.int64, device=told.device)
        place[told] = torch.arange(len(chances), device=told.device)
        chosen = int(block.ids.sum())
        guesses = min(most, TURNS[chosen // 2 % len(TURNS)])
        masks = guesses - 1
        roots = torch.arange(chosen % guesses, length, guesses, device=told.device)
        ahead = roots[:, None] + 1 + torch.arange(masks, device=told.device)  # [n, masks]: places of the masks
        inside = ahead < length
        ahead = ahead.clamp(max=length - 1)
        learned = told[:, ahead] & inside  # [rows, n, masks]
        shown = None
        if chosen % 2 and masks:
            shown = self._glance(module, block, roots, masks)
            learned &= ~F.pad(shown[..., 1:], (0, 1))  # a row whose token stands beside it has nothing to learn
        with halved(told.device):
            text, filled = module.states(block, roots, masks, shown)
            said = module.logits(text[told]).float()
        yield F.cross_entropy(said, chances, reduction="sum"), len(chances)
        for i in range(masks):
            rows = learned[:, :, i]
            wanted = chances[place[:, ahead[:, i]][rows]]
            with halved(told.device):
                said = module.logits(filled[:, :, i][rows]).float()
            yield F.cross_entropy(said, wanted, reduction="sum", label_smoothing=SMOOTH), len(said)

    @torch.no_grad()
    def _glance(self, module: MaskedDecoder, block: TokenBlock, roots: Tensor, masks: int) -> Tensor:
        """bool [rows, n, masks]: masks in whose place the right token is shown. Of a block's masks it is `GLANCED`
        times as many as its likeliest tokens are wrong, drawn by chance."""
        length = block.ids.shape[1]
        places = roots[:, None] + 1 + torch.arange(masks, device=roots.device)
        inside = (places < length) & (block.targets[:, places.clamp(max=length - 1)] >= 0)
        with halved(roots.device):
            _, filled = module.states(block, roots, masks)
            said = module.logits(filled).argmax(-1)
        right = block.targets[:, places.clamp(max=length - 1)]
        wrong = (said != right) & inside
        shares = GLANCED * wrong.sum(-1, keepdim=True) / masks
        made = torch.Generator().manual_seed(int(block.ids.sum()))
        drawn = torch.rand(inside.shape, generator=made).to(shares.device)
        return (drawn < shares) & inside

    def config(self, module: MaskedDecoder, target: FrozenTarget) -> dict[str, Any]:
        layer = asdict(module.decoder.shape) | {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        }  # fmt: skip
        return draft_settings(layer, target.model, module.mask, module.guesses)

    def tensors(self, module: MaskedDecoder) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {f"model.{name}": value for name, value in module.decoder.named_parameters()}
        return {**found, TRIGRAMS: module.trigrams} if len(module.trigrams) else found


def _with_mask(before: DenseDecoder) -> DenseDecoder:
    """The same decoder with one token more, whose embedding is the mean of all."""
    made = DenseDecoder(DenseShape(**(asdict(before.shape) | {"vocab_size": before.shape.vocab_size + 1})))
    tensors, name = before.state_dict(), "embed_tokens.weight"
    tensors[name] = torch.cat((tensors[name], tensors[name].mean(0, keepdim=True)))
    made.load_state_dict(tensors)
    return made
