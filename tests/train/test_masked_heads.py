"""Training of masks, their low-rank weights and the sampler computes what a draft would, at all positions of a text at
once, and by the three losses that it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.masked_mtp import MaskedHeads
from phasewise.speculation.heads.masked_mtp_layout import masked_heads, random_masked, usual_masked
from phasewise.train.heads.masked_mtp import MaskedKind
from phasewise.train.heads.run import FADING, heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation.masked_mtp_files import PlainMasks
from tests.train.learned import lowered
from tests.train.test_eagle_heads import ROWS, target

KIND, MASKS = MaskedKind(rank=2), 3
TEXTS = tiny.prompts(9, 14)
GREEDY = [[(prompt, False), (answer, True)] for prompt, answer in zip(TEXTS, tiny.plain(TEXTS, tiny.greedy(12)))]


def made(its: FrozenTarget) -> MaskedHeads:
    """Random ones, of which every part is at work."""
    module = usual_masked(its.model, MASKS, 2)
    random_masked(module, its.model, 5)
    return module


@pytest.mark.parametrize("sampler", [True, False])
def test_every_mask_says_what_the_plain_forward_says(sampler: bool, tmp_path: Path) -> None:
    """Of each text by itself, behind the right tokens; what is stored is what the drafter loads."""
    its, kind = target(), replace(KIND, sampler=sampler)
    module = made(its)
    folder.write(tmp_path, kind.config(module, its), kind.tensors(module))
    plain, seen = PlainMasks(tmp_path, tiny.checkpoint()), its.see(pad_rows(ROWS, 0), kind.taps(module))
    for head, logits in enumerate(kind.guesses(module, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            for t in seen.wanted(head)[row].nonzero()[:, 0].tolist():
                state = plain.states(text[: t + 1])[head]
                wanted.append(plain.sampled(text[t + 1 + head], state) if sampler else plain.plain(state))
        assert len(wanted) > 4
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)
    again = masked_heads(its.model, str(tmp_path))
    assert again.depth == MASKS and again.rank == 2
    assert all(torch.equal(again.state_dict()[name], each) for name, each in module.state_dict().items())


def test_the_loss_is_its_parts() -> None:
    """Cross-entropies with the model's own distribution of what masks and sampler say, the squared distance to the
    model's own state there, and the sampler's cross-entropy behind the model's states."""
    its = target()
    module, block = made(its), pad_rows(GREEDY, 0)
    loss = heads_loss(KIND, module, its, [block])
    seen = its.see(block, KIND.taps(module)).thinned(KIND.every)
    teacher, size = its.log_chances(seen.h.flatten(0, 1)).view(*seen.h.shape[:2], -1).exp(), its.model.norm.weight
    total, weights = 0.0, 0.0
    said = [[*each.guesses(module, its, seen)] for each in (replace(KIND, sampler=False), KIND)]
    states = KIND.states(module, its, seen).detach()
    for head in range(MASKS):
        wanted = seen.wanted(head)
        own, there = seen.h[:, head + 1 :][wanted], teacher[:, head + 1 :][wanted]
        chosen = wanted[:, seen.first :: seen.every]
        mine = states[:, : chosen.shape[1], head][chosen]
        distance = (mine - own).square().mean() / size.square().mean()
        each = [F.cross_entropy(logits[head], there) for logits in said]
        total, weights = total + FADING**head * float(sum(each).detach() + distance), weights + FADING**head
    known = block.targets >= 0
    real = its.unembed(module.sampler(its.embed(block.ids[known]), seen.h[known]))
    assert float(loss.total.detach()) == pytest.approx(
        total / weights + float(F.cross_entropy(real, teacher[known])), rel=1e-4
    )


def test_masks_their_weights_and_the_sampler_learn_and_nothing_else() -> None:
    its, block = target(), pad_rows(GREEDY, 0)
    torch.manual_seed(0)
    module = KIND.build(its, MASKS)
    KIND.begin(module, its, block)
    begun = {name: each.detach().clone() for name, each in module.named_parameters()}
    table = its.embed(torch.arange(tiny.VOCAB))
    assert all(any(torch.equal(row, each) for each in table) for row in module.masks)
    before = its.model.layers[3].o.dense().clone()
    found = lowered(KIND, module, its, block, 40, 1e-2)
    assert len(found[0]) == 1 + 3 * MASKS
    assert all(found[-1][name] < 0.9 * found[0][name] for name in found[0] if not name.startswith("distance"))
    assert not any(torch.equal(each, begun[name]) for name, each in module.named_parameters())
    weight = its.model.layers[3].o.dense()
    assert weight.grad is None and torch.equal(weight, before)


def test_in_sixteen_bits_there_is_nothing_to_learn_through() -> None:
    with pytest.raises(UserError, match="leave out --dtype"):
        KIND.build(FrozenTarget(str(tiny.checkpoint()), "bfloat16"), 2)
