"""Training of PPD's prompt tokens computes what a draft would, at all positions of a text at once, and learns along the
model's own greedy continuations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.ppd_layout import prompt_tokens, random_prompts, usual_prompts
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import FADING, heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.speculation.ppd_files import PlainPrompts
from tests.train.learned import lowered
from tests.train.test_eagle_heads import ROWS, target

KIND, PROMPTS = KINDS["ppd"], 3
TEXTS = tiny.prompts(9, 14)
ANSWERS = tiny.plain(TEXTS, tiny.greedy(12))
GREEDY = [[(prompt, False), (answer, True)] for prompt, answer in zip(TEXTS, ANSWERS)]


def test_every_prompt_token_says_what_the_plain_forward_says(tmp_path: Path) -> None:
    """Of each text by itself; what is stored is what the drafter loads."""
    its = target()
    made = usual_prompts(its.model, PROMPTS)
    random_prompts(made, its.model, 5)
    folder.write(tmp_path, KIND.config(made, its), KIND.tensors(made))
    plain, seen = PlainPrompts(tmp_path, tiny.checkpoint()), its.see(pad_rows(ROWS, 0), KIND.taps(made))
    for head, logits in enumerate(KIND.guesses(made, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            places = seen.wanted(head)[row].nonzero()[:, 0].tolist()
            wanted += [plain.logits(text[: t + 1])[head] for t in places]
        assert len(wanted) > 4
        torch.testing.assert_close(logits.detach(), torch.stack(wanted), atol=1e-3, rtol=1e-3)
    again, _ = prompt_tokens(its.model, str(tmp_path))
    assert again.depth == PROMPTS and torch.equal(again.embeddings, made.embeddings)


def test_they_learn_along_the_models_own_continuation() -> None:
    """Prompt token i of position t is learned where tokens t + 1 to t + 1 + i are what the model would have said: all
    of an answer, and nothing behind a token that it would not have said."""
    its = target()
    spoilt = [*ANSWERS[0]]
    spoilt[5] = (spoilt[5] + 1) % tiny.VOCAB
    block = pad_rows([GREEDY[0], [(TEXTS[0], False), (spoilt, True)]], 0)
    seen = its.see(block)
    own = its.greedy(seen)
    assert own.own is not None
    first = len(TEXTS[0]) - 1  # the position after which the answer's first token comes
    for head in range(PROMPTS):
        every, some = seen.wanted(head), own.wanted(head)
        assert not (some & ~every).any() and every[0, first : first + 12 - 1 - head].all()
        assert torch.equal(some[0, first:], every[0, first:])
        broken = range(first + 5 - head, first + 6)  # positions from which the wrong token is on the way
        assert not any(some[1, t] for t in broken) and bool(some[1, first + 4 - head])


def test_the_loss_is_the_papers_but_for_what_nothing_learned_changes() -> None:
    """The gradient is that of the mean divergence of each prompt token, weighed by 0.8 for each one before it."""
    its = target()
    made = usual_prompts(its.model, PROMPTS)
    random_prompts(made, its.model, 5)
    block = pad_rows(GREEDY, 0)
    heads_loss(KIND, made, its, [block]).total.backward()
    given = made.embeddings.grad
    assert given is not None
    seen = its.greedy(its.see(block, KIND.taps(made)).thinned(KIND.every))
    teacher, total = its.log_chances(seen.h.flatten(0, 1)).view(*seen.h.shape[:2], -1), torch.zeros(())
    for head, logits in enumerate(KIND.guesses(made, its, seen)):
        wanted = seen.wanted(head)
        ahead = teacher[:, head + 1 :][wanted]
        divergence = (ahead.exp() * (ahead - logits.log_softmax(-1))).sum(-1).mean()
        total = total + FADING**head * divergence
    (wanted_gradient,) = torch.autograd.grad(total / sum(FADING**head for head in range(PROMPTS)), made.embeddings)
    torch.testing.assert_close(given, wanted_gradient, atol=1e-5, rtol=1e-4)


def test_what_training_lowers_is_what_it_is_told_to_learn() -> None:
    """The embeddings alone learn: nothing of the model has a gradient."""
    its, block = target(), pad_rows(GREEDY, 0)
    module = KIND.build(its, PROMPTS)
    KIND.begin(module, its, block)
    begun = module.embeddings.detach().clone()
    table = its.embed(torch.arange(tiny.VOCAB))
    assert all(any(torch.equal(row, each) for each in table) for row in begun) and not torch.equal(begun[0], begun[1])
    before = its.model.layers[3].o.dense().clone()
    found = lowered(KIND, module, its, block, 40, 3e-2)
    assert len(found[0]) == PROMPTS and all(found[-1][name] < 0.9 * found[0][name] for name in found[0])
    weight = its.model.layers[3].o.dense()
    assert weight.grad is None and torch.equal(weight, before)


def test_in_sixteen_bits_there_is_nothing_to_learn_through() -> None:
    with pytest.raises(UserError, match="leave out --dtype"):
        KIND.build(FrozenTarget(str(tiny.checkpoint()), "bfloat16"), 2)
