"""Training of masked drafts computes what the drafter would, at all positions of a text at once, and learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.diffuspec_layout import TRIGRAMS, masked_draft
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.heads import diffuspec
from phasewise.train.heads.diffuspec import FADING, SMOOTH, MaskedDecoder, MaskedDraftKind
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import HeadsJob, heads_loss, train
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import NO_LOSS, pad_rows
from phasewise.train.written import WrittenText
from tests import tiny
from tests.speculation.diffuspec_files import PlainBlock
from tests.train.test_eagle_heads import ROWS, target
from tests.train.test_heads import silent

KIND = MaskedDraftKind()


def decoder(guesses: int = 4, seed: int = 0) -> MaskedDecoder:
    """Random weights of all layers: a fresh decoder's begin as the identity."""
    torch.manual_seed(seed)
    made = DenseDecoder(DenseShape(tiny.VOCAB + 1, 64, 2, 2, 1, 96, 32, 1024))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return MaskedDecoder(made, guesses)


def stored(module: MaskedDecoder, its: FrozenTarget, at: Path) -> Path:
    folder.write(at, KIND.config(module, its), KIND.tensors(module))
    return at


@pytest.mark.parametrize("every", [1, 3])
def test_every_place_says_what_the_plain_forward_says(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each text by itself, some blocks at a time; what is stored is what the drafter loads."""
    monkeypatch.setattr(diffuspec, "AT_ONCE", 3)
    its, module = target(), decoder()
    plain = PlainBlock(stored(module, its, tmp_path))
    seen = its.see(pad_rows(ROWS, 0)).thinned(every)
    for head, logits in enumerate(KIND.guesses(module, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            places = seen.wanted(head)[row].nonzero()[:, 0].tolist()
            wanted += [plain.logits(text[: t + 2], 4)[head] for t in places]
        assert len(wanted) >= 4 // every
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)
    assert masked_draft(its.model, str(tmp_path)).guesses == 4


def test_the_loss_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without glancing: cross-entropies with the target's distributions, of masks with labels smoothed, place by place,
    against blocks of the plain forward's shape taken one by one."""
    monkeypatch.setattr(diffuspec, "GLANCED", 0.0)
    its, module, guesses = target(), decoder(), 4
    block = pad_rows(ROWS, 0)
    found = heads_loss(KIND, module, its, [block])
    chances = its.log_chances(its.see(block).h.flatten(0, 1)).view(*block.ids.shape, -1).exp()
    told, length = block.targets >= 0, block.ids.shape[1]
    text, _ = module.states(block, torch.zeros(0, dtype=torch.int64), 0)
    sums = [F.cross_entropy(module.logits(text[told]), chances[told], reduction="sum")]
    counts = [int(told.sum())]
    for i in range(guesses - 1):
        each = []
        for root in range(int(block.ids.sum()) % guesses, length, guesses):
            if root + 1 + i >= length:
                continue
            _, masks = module.states(block, torch.tensor([root]), guesses - 1)
            rows = told[:, root + 1 + i]
            labels = (1 - SMOOTH) * chances[:, root + 1 + i][rows] + SMOOTH / tiny.VOCAB
            each.append(F.cross_entropy(module.logits(masks[:, 0, i][rows]), labels, reduction="sum"))
            counts.append(int(rows.sum()))
        sums.append(torch.stack(each).sum())
        counts[i + 1 :] = [sum(counts[i + 1 :])]
    means = [total / count for total, count in zip(sums, counts)]
    weights = [FADING**i for i in range(guesses)]
    wanted = sum(weight * mean for weight, mean in zip(weights, means)) / sum(weights)
    assert float(found.total.detach()) == pytest.approx(float(wanted.detach()), rel=0.02)
    assert list(found.parts) == ["head1", "head2", "head3", "head4"]


def test_what_is_shown_is_read_and_not_learned() -> None:
    """A mask that became the right token changes the rows of its block that come before it, and no row of text."""
    its, module = target(), decoder()
    block, roots = pad_rows(ROWS, 0), torch.tensor([2])
    shown = torch.zeros(2, 1, 3, dtype=torch.bool)
    shown[0, 0, 2] = True
    (text, plain), (same, with_it) = module.states(block, roots, 3), module.states(block, roots, 3, shown)
    assert torch.allclose(text, same) and torch.allclose(plain[1], with_it[1])
    assert not torch.allclose(plain[0, 0, 0], with_it[0, 0, 0], atol=1e-3)
    glanced = KIND._glance(module, block, roots, 3)
    assert glanced.shape == (2, 1, 3) and its.vocab == module.mask


def test_a_row_whose_token_is_shown_beside_it_is_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all masks of a block shown, the last one alone is learned: the token behind it is in no block."""
    its, module, block = target(), decoder(), pad_rows(ROWS, 0)
    monkeypatch.setattr(
        MaskedDraftKind, "_glance", lambda self, module, block, roots, n: torch.ones(2, len(roots), n, dtype=torch.bool)
    )
    for odd in (0, 1):
        ids = torch.cat((block.ids, torch.full((2, 1), 0)), 1)
        ids[0, -1] = (int(block.ids.sum()) + odd) % 2  # an even sum takes all masks as they are
        padded = TokenBlock.of(ids, F.pad(block.targets, (0, 1), value=NO_LOSS))
        counts = [count for _, count in KIND._of_block(module, its, padded, 4)]
        assert counts[0] == int((block.targets >= 0).sum()) and counts[3] > 0
        assert (counts[1] > 0 and counts[2] > 0) is (odd == 0) and (odd == 0 or counts[1] == counts[2] == 0)


def test_it_learns_what_the_target_writes() -> None:
    its, module = target(), decoder()
    prompts = tiny.prompts(9, 14)
    answers = tiny.plain(prompts, tiny.greedy(12))
    block = pad_rows([[(p, False), (a, True)] for p, a in zip(prompts, answers)], 0)
    adam = torch.optim.AdamW(module.parameters(), lr=5e-3)
    losses = []
    for _ in range(40):
        adam.zero_grad()
        loss = heads_loss(KIND, module, its, [block])
        loss.total.backward()
        adam.step()
        losses.append(float(loss.total.detach()))
    assert losses[-1] < losses[0] - 1


def test_trigrams_are_of_prompts_and_replies() -> None:
    module = decoder()
    module.count([WrittenText([2, 3, 4], [5, 6]), WrittenText([9], [4, 5, 6])])
    assert module.trigrams.tolist() == [[2, 3, 4, 1], [3, 4, 5, 1], [4, 5, 6, 2], [9, 4, 5, 1]]
    assert torch.equal(KIND.tensors(module)[TRIGRAMS], module.trigrams)


def test_it_begins_as_a_draft_model() -> None:
    """Its logits of text are that model's own, before anything was learned."""
    its = FrozenTarget("pocket-draft")
    module = MaskedDraftKind(start="pocket-draft").build(its, 3)
    block = pad_rows([[(list(range(40, 60)), True)]], 0)
    text, _ = module.states(block, torch.tensor([3]), 2)
    own = its.log_chances(its.see(block).h[0])
    torch.testing.assert_close(module.logits(text[0]).log_softmax(-1).detach(), own, atol=2e-3, rtol=2e-3)
    assert module.mask == its.vocab == 4096


def test_what_cannot_be() -> None:
    with pytest.raises(UserError, match="start=pocket-draft: it has 4096 tokens and .* 64: name a draft model"):
        MaskedDraftKind(start="pocket-draft").build(target(), 3)
    with pytest.raises(UserError, match="depth=64: a pass guesses up to 63 tokens"):
        KIND.build(target(), 64)
    with pytest.raises(UserError, match="start=pocket-draft: heads of kind medusa begin with weights of their own"):
        train(HeadsJob("medusa", "pocket-draft", Path("nowhere"), start="pocket-draft"), silent)
    assert KINDS["diffuspec"] == KIND
