"""DFlash's training computes what a draft would: every block of every position, on given tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from phasewise.speculation.heads import folder
from phasewise.speculation.heads.dflash import DFlashHeads
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.train.heads.dflash import BlocksOverText, attention, linear, states_foretold, telling, what_is_read
from phasewise.train.heads.kinds import KINDS
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation import one_pass_files as files
from tests.train.learned import lowered
from tests.train.test_eagle_heads import ROWS, target

KIND = KINDS["dflash"]
WHOLE = [[(piece, True) for piece, _ in row] for row in ROWS]


def test_every_block_is_the_pass_of_a_draft(tmp_path: Path) -> None:
    """Against the plain forward, which computes each of them by itself."""
    its = target()
    made, _ = feature_heads(its.model, ("dflash",), "random:5")
    made.steps = made.parallel
    folder.write(tmp_path, KIND.config(made, its), tensors_of(made))
    plain = files.PlainPass(tmp_path, tiny.checkpoint(), mask=tiny.VOCAB - 1)
    seen = its.see(pad_rows(ROWS, 0), KIND.taps(made))
    for head, logits in enumerate(KIND.guesses(made, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            for t in seen.wanted(head)[row].nonzero()[:, 0].tolist():
                wanted.append(plain.logits(text[: t + 2], made.parallel)[head])
        assert len(wanted) == len(logits)
        if wanted:
            torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)


def test_what_training_lowers_is_what_it_is_told_to_learn() -> None:
    its, block = target(), pad_rows(ROWS, 0)
    torch.manual_seed(0)
    module = KIND.build(its, 4)
    found = lowered(KIND, module, its, block, 30)
    assert len(found[0]) == 4 and all(found[-1][name] < 0.8 * found[0][name] for name in found[0])


def test_rows_are_told_apart_before_anything_is_learned() -> None:
    """On each direction the rows of its kind lie on one side, and all others on the other."""
    random = torch.Generator().manual_seed(0)
    middles = torch.randn(3, 24, generator=random)
    rows = {
        kind: middle + 0.3 * torch.randn(n, 24, generator=random)
        for kind, middle, n in zip("abc", middles, (9, 30, 300))
    }
    for kind, direction in telling(rows).items():
        for other, x in rows.items():
            assert bool(((x @ direction > 0) == (kind == other)).all()), (kind, other)


def test_linear_maps_are_found_where_there_are_some() -> None:
    random = torch.Generator().manual_seed(0)
    x, matrix = torch.randn(90, 6, generator=random), torch.randn(4, 6, generator=random)
    y, weights = x @ matrix.T, torch.ones(90)
    y[:10], weights[:10] = 7.0, 0.0
    torch.testing.assert_close(linear(x, y, weights), matrix, atol=1e-2, rtol=1e-2)


def test_states_of_masks_are_those_that_say_their_tokens() -> None:
    seen = target().see(pad_rows(WHOLE, 0))
    states, known = states_foretold(seen, 3)
    ids = seen.block.ids
    for row, at, mask in known.nonzero().tolist():
        assert torch.equal(states[row, at, mask], seen.h[row, at + 1 + mask])
        assert seen.block.targets[row, at + 1 + mask] == ids[row, at + 2 + mask]
    lengths = [sum(len(piece) for piece, _ in row) for row in WHOLE]
    assert int(known.sum()) == sum(length - 2 - mask for length in lengths for mask in range(3))


def test_masks_begin_by_looking_at_the_last_features_and_the_root() -> None:
    """What half of the first layer's heads read changes with the last feature more than with an early one, and hardly
    with the root; what the others read changes with the root most."""
    its, block = target(), pad_rows(WHOLE, 0)
    torch.manual_seed(0)
    module = KIND.build(its, 3)
    assert isinstance(module, DFlashHeads)
    KIND.begin(module, its, block)
    seen, half, at = its.see(block, KIND.taps(module)), module.config.heads // 2, 8
    feature = module.fuse(torch.cat([seen.taps[tap] for tap in KIND.taps(module)], -1))

    def read(root: int, changed: int | None = None) -> Tensor:
        """What the first mask of the block behind token `at` reads, [Hq, D]."""
        own = feature.clone()
        if changed is not None:
            own[0, changed] = feature[1, changed]
        ids = torch.tensor([root, *[module.mask] * 3]).expand(2, block.ids.shape[1] - 1, 4)
        x = module.layers[0].input_layernorm(its.embed(ids))
        over = BlocksOverText(module, block.positions, own).attend(0)
        return what_is_read(attention(module.layers[0]), x, over)[0, at, 1].unflatten(0, (2 * half, -1))

    plain = read(8)
    far, last, other = (change_of(plain, each, half) for each in (read(8, 2), read(8, at), read(9)))
    assert last[0] > 3 * far[0] and other[1] > 2 * max(last[1], far[1]) and other[1] > 3 * other[0]


def change_of(before: Tensor, after: Tensor, half: int) -> tuple[float, float]:
    """How far heads of either half are from what they were."""
    change = (after - before).detach()
    return float(change[:half].norm()), float(change[half:].norm())


def test_some_blocks_are_learned_and_those_are_the_same() -> None:
    """Of every third position, from any on, the same logits as where all positions are learned."""
    its, block = target(), pad_rows(WHOLE, 0)
    module, _ = feature_heads(its.model, ("dflash",), "random:5")
    seen = its.see(block, KIND.taps(module))
    firsts = set[int]()
    for more in range(3):
        thinned = replace(seen, block=block._replace(ids=block.ids + more)).thinned(3)
        firsts.add(thinned.first)
        some = replace(seen, every=3, first=thinned.first)
        for head, (few, all_) in enumerate(zip(KIND.guesses(module, its, some), KIND.guesses(module, its, seen))):
            chosen = some.wanted(head)[seen.wanted(head)]
            torch.testing.assert_close(few, all_[chosen])
    assert len(firsts) > 1
