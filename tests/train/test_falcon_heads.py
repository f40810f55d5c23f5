"""Falcon's heads learn k positions ahead: the losses, the answers that are shown, and what the drafter would say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.falcon import FalconHeads
from phasewise.speculation.heads.falcon_layout import usual_falcon
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.train.heads import aligned
from phasewise.train.heads.falcon import FalconKind, RelaxedAttention, answered, glanced
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import HeadsJob, heads_loss, train
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation.falcon_files import PlainFalcon
from tests.train.learned import lowered
from tests.train.test_eagle_heads import ROWS, target
from tests.train.test_heads import silent

FALCON, DEPTH = KINDS["falcon"], 5


def random_heads(its: FrozenTarget, k: int = 2) -> FalconHeads:
    made = usual_falcon(its.model, narrow=False, guesses=k)
    random = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3, random)
    made.steps = DEPTH
    return made


def stored(its: FrozenTarget, out: Path, k: int = 2) -> PlainFalcon:
    """The same heads, as their plain forward."""
    made = random_heads(its, k)
    folder.write(out, FALCON.config(made, its), tensors_of(made))
    return PlainFalcon(out, tiny.checkpoint())


def texts() -> list[tuple[list[int], list[bool]]]:
    """The tokens of each row, and which of them are learned."""
    return [([t for piece, _ in row for t in piece], [own for piece, own in row for _ in piece]) for row in ROWS]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_step_is_the_draft_loops_on_the_same_tokens(k: int, tmp_path: Path) -> None:
    its = target()
    plain, seen = stored(its, tmp_path, k), its.see(pad_rows(ROWS, 0))
    for step, logits in enumerate(FALCON.guesses(random_heads(its, k), its, seen)):
        wanted, got = list[Tensor](), list[Tensor]()
        places = seen.wanted(step).nonzero().tolist()
        for (row, t), said in zip(places, logits.detach(), strict=True):
            if t + 1 >= k:
                text = texts()[row][0]
                wanted.append(plain.logits(text[: t + 2], text[t + 2 : t + 2 + step])[-1])
                got.append(said)
        assert len(wanted) > 2
        torch.testing.assert_close(torch.stack(got), torch.stack(wanted), atol=1e-3, rtol=1e-3)


def test_training_sees_groups_of_k_and_all_before() -> None:
    """The second token of a group changes the outputs of its own group, the first one's too, and of no earlier row."""
    its = target()
    heads, seen = random_heads(its, 2), its.see(pad_rows(ROWS[:1], 0))
    assert RelaxedAttention(heads, seen.block.positions).sees[2].tolist() == [True] * 4 + [False] * 7
    outputs = list[Tensor]()
    for token in (5, 9):
        ids = seen.block.ids.clone()
        ids[0, 5] = token
        attend = RelaxedAttention(heads, seen.block.positions).attend
        outputs.append(heads(its.embed(ids), seen.h, attend)[0].detach())
    change = (outputs[0] - outputs[1]).abs().amax(-1)
    assert change[:4].max() == 0 and change[4] > 1e-3 and change[5] > 1e-3


def test_the_losses_are_those_of_the_state_and_what_is_said_k_positions_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position by position, against the plain forward: a smooth L1, and 0.1 of (0.9 of a divergence and 0.1 of a
    cross-entropy)."""
    monkeypatch.setattr(aligned, "NOISE", 0.0)
    its, k = target(), 2
    plain, rows = stored(its, tmp_path, k), pad_rows(ROWS, 0)
    seen, size = its.see(rows), float(its.model.norm.weight.square().mean()) ** 0.5
    parts = list[tuple[Tensor, Tensor, Tensor]]()
    for row, (text, learned) in enumerate(texts()):
        groups = torch.arange(len(text) - 1) // k
        outputs = plain.outputs(plain.embeddings[text[1:]], seen.h[row, : len(text) - 1], groups[:, None] >= groups)
        for t in range(len(text) - k - 1):
            if not learned[t + k + 1]:
                continue
            off = ((outputs[t] - seen.h[row, t + k]) / size).abs()
            said, own = its.unembed(outputs[t]), its.unembed(seen.h[row, t + k]) / 0.95
            divergence = (own.softmax(-1) * (own.log_softmax(-1) - (said / 0.95).log_softmax(-1))).sum()
            parts.append((torch.where(off < 1, off.square() / 2, off - 0.5).mean(), divergence,
                          -said.log_softmax(-1)[text[t + k + 1]]))  # fmt: skip
    found = heads_loss(FalconKind(glance=0.0), random_heads(its, k), its, [rows, rows])
    wanted = [float(torch.stack(each).mean()) for each in zip(*parts)]
    assert [*found.parts.values()] == pytest.approx(wanted, rel=1e-3) and len(parts) == 11
    total = wanted[0] + 0.1 * (0.9 * wanted[1] + 0.1 * wanted[2])
    assert float(found.total.detach()) == pytest.approx(total, rel=1e-3)


# ---- answers that are shown
def test_answers_are_the_states_and_tokens_k_positions_on() -> None:
    its, k = target(), 2
    seen = its.see(pad_rows(ROWS, 0))
    shown = glanced(seen, k, 3)
    assert int(shown.sum()) == 3 and all(t % k == 0 for _, t in shown.nonzero().tolist())
    assert bool((shown <= seen.wanted(k - 1)).all())
    rows = answered(torch.zeros_like(seen.h), seen.h, shown, k)
    for row in range(len(ROWS)):
        for t in range(seen.h.shape[1]):
            is_shown = t < shown.shape[1] and bool(shown[row, t])
            assert torch.equal(rows[row, t], seen.h[row, t + k] if is_shown else torch.zeros_like(rows[row, t]))


def test_of_larger_groups_runs_from_the_first_row_on_are_shown() -> None:
    seen, lengths = target().see(pad_rows([[([3], False), (list(range(4, 54)), True)]], 0)), set[int]()
    shown = glanced(seen, 4, 40)[0]
    for first in range(0, len(shown), 4):
        own = shown[first : first + 4].tolist()
        assert own == sorted(own, reverse=True)
        lengths.add(sum(own))
    assert sum(bool(shown[first]) for first in range(0, len(shown), 4)) == 10 and lengths <= {0, 1, 2, 3}


def test_as_many_answers_as_guesses_are_wrong_and_fewer_and_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    from phasewise.train.heads import falcon

    its, counts = target(), list[int]()
    heads, block = random_heads(its), pad_rows(ROWS, 0)
    seen = its.see(block)
    monkeypatch.setattr(aligned, "NOISE", 0.0)
    monkeypatch.setattr(falcon, "glanced", lambda seen, k, count: counts.append(count) or glanced(seen, k, count))
    for progress in (0.0, 0.5, 1.0):
        heads_loss(FalconKind(glance=1.0), heads, its, [block], None, progress)
    k = heads.together
    said = heads(its.embed(torch.nn.functional.pad(seen.block.ids[:, 1:], (0, 1))), seen.h,
                 RelaxedAttention(heads, seen.block.positions).attend)  # fmt: skip
    wanted = seen.wanted(k - 1)
    own = its.unembed(seen.h[:, k:][wanted]).argmax(-1)
    wrong = int((its.unembed(said[:, :-k][wanted]).argmax(-1) != own).sum())
    assert counts == [wrong, wrong // 2] and wrong > 4


def test_without_a_share_it_is_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share so small that no answer is shown leads to the same weights as no first run at all, to the bit; the usual
    one does not."""
    its, block, found = target(), pad_rows(ROWS, 0), list[dict[str, Tensor]]()
    for share in (0.0, 1e-9, 0.4):
        torch.manual_seed(0)
        module = FalconKind(glance=share).build(its, DEPTH)
        adam = torch.optim.AdamW(module.parameters(), lr=3e-3)
        for _ in range(4):
            adam.zero_grad()
            heads_loss(FalconKind(glance=share), module, its, [block]).total.backward()
            adam.step()
        found.append(module.state_dict())
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])
    assert not torch.equal(found[2]["lstm.weight_ih_l0"], found[0]["lstm.weight_ih_l0"])


# ---- runs
@pytest.mark.parametrize("k", [1, 2, 3])
def test_all_losses_are_lowered(k: int) -> None:
    its, block, kind = target(), pad_rows(ROWS, 0), FalconKind(together=k)
    torch.manual_seed(0)
    module = kind.build(its, DEPTH)
    found = lowered(kind, module, its, block, 60)
    assert [*found[0]] == ["feature", "divergence", "token"] and module.together == k
    assert all(found[-1][name] < most * found[0][name] for name, most in zip(found[0], (0.6, 0.6, 0.9)))


def test_untrained_heads_say_again_what_the_model_says() -> None:
    """So that training begins near: what is passed on points where the state does."""
    its = target()
    module, seen = FALCON.build(its, DEPTH), its.see(pad_rows(ROWS, 0))
    ids = torch.nn.functional.pad(seen.block.ids[:, 1:], (0, 1))
    output = module(its.embed(ids), seen.h, RelaxedAttention(module, seen.block.positions).attend)
    assert float(torch.cosine_similarity(output[0].detach(), seen.h[0], -1).min()) > 0.5


def test_guesses_of_a_pass_are_stored_and_read_again(tmp_path: Path) -> None:
    its = target()
    made = FalconKind(together=3).build(its, DEPTH)
    folder.write(tmp_path, FALCON.config(made, its), FALCON.tensors(made))
    again, _ = feature_heads(its.model, ("falcon",), str(tmp_path))
    assert isinstance(again, FalconHeads) and again.together == 3


def test_what_heads_of_a_kind_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unroll=2: heads of kind falcon learn the guesses of their first pass"):
        train(HeadsJob("falcon", "pocket-draft", tmp_path, unroll=2), silent)
    with pytest.raises(UserError, match="per_pass=3: heads of kind fspad have no such number"):
        train(HeadsJob("fspad", "pocket-draft", tmp_path, per_pass=3), silent)
