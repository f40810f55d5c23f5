"""DiffuSpec and GAD in the engine: guesses are the plain forward's, and answers plain decoding's.

The draft has learned what the tiny model writes, by the trainer's own loss, so that guesses are often right.
"""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.methods.draft.diffuspec import DiffuSpec
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.diffuspec_layout import TRIGRAMS
from phasewise.speculation.trigrams import SmoothedTrigrams
from tests import tiny
from tests.draft import trained
from tests.draft.fitted import PROMPTS, N, masked_draft
from tests.draft.watch import Watch, watched
from tests.speculation.diffuspec_files import PlainBlock


# ---- guesses
def test_a_block_is_as_long_as_fits_and_says_what_else_was_likely() -> None:
    watch = watched(trained.GAD.verbs(), PROMPTS[2:])
    assert watch.drafts
    for (_, known), draft in watch.drafts.items():
        k = len(draft.tokens)
        assert k == min(4, len(PROMPTS[2]) + N - known - 1) and draft.likely is not None and len(draft.likely) == k


def test_a_path_is_the_best_that_the_search_finds_in_what_the_plain_forward_says() -> None:
    placed, method = (
        tiny.engine(trained.DIFFUSPEC.verbs("least=5,most=5,beams=2,tau=0.99")),
        DiffuSpec(beams=2, tau=0.99),
    )
    watch, plain, stored = Watch(placed), PlainBlock(masked_draft()), folder.read(masked_draft())
    trigrams = SmoothedTrigrams(stored.tensors[TRIGRAMS], tiny.VOCAB)
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    for (_, known), draft in watch.drafts.items():
        k = min(5, len(text) - known - 1)
        rows = method.search.candidates(plain.logits(text[:known], k), {2})
        path = method.search.best(rows, text[:known], {2}, trigrams.log_chance)
        assert draft.tokens == [token for token, _ in path]


def test_the_length_follows_what_is_accepted() -> None:
    """With heads that know the text it stays long; with random ones it falls to half of the most, where the average of
    generated tokens stays, as no end is ever generated."""
    lengths = []
    for source in (str(masked_draft()), "random:0"):
        placed = tiny.engine({"draft": f"diffuspec:heads={source},least=2,most=6,delta=4"})
        watch = Watch(placed)
        tiny.run(placed, PROMPTS[:1], tiny.greedy(N))
        lengths.append([len(draft.tokens) for _, draft in sorted(watch.drafts.items(), key=lambda each: each[0][1])])
    knowing, random = lengths
    assert knowing[0] == random[0] == 6 and random[1:-3] == [3] * len(random[1:-3]) and sum(knowing) / len(knowing) > 3


def test_with_top_beta_gad_is_exact_at_1_and_not_at_3() -> None:
    """The paper's acceptance: one of the likeliest tokens, not much less likely than the best."""
    plain = tiny.plain(PROMPTS, tiny.greedy(N))
    outs = [tiny.outs(tiny.run(tiny.engine(trained.GAD.verbs(verify=rule)), PROMPTS, tiny.greedy(N)))
            for rule in ("top_beta:beta=1", "top_beta:beta=1,tau=0", "top_beta:beta=3,tau=100")]  # fmt: skip
    assert outs[:2] == [plain] * 2
    random = {"draft": "gad:heads=random:0,k=4", "verify": "top_beta:beta=3,tau=100"}
    assert outs[2] != plain or tiny.outs(tiny.run(tiny.engine(random), PROMPTS, tiny.greedy(N))) != plain


def test_a_long_prompt_is_read_in_pieces() -> None:
    placed = tiny.engine(trained.DIFFUSPEC.verbs("least=2,most=6,chunk=16"))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > 0


def test_little_memory_takes_guesses_and_no_token() -> None:
    placed = tiny.engine(trained.DIFFUSPEC.verbs(), kv_bytes=400_000)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))


def test_more_than_a_pass_fills_is_refused() -> None:
    with pytest.raises(UserError, match=r"diffuspec: 7 guesses are too many: .* up to 6 places"):
        tiny.engine(trained.DIFFUSPEC.verbs("most=7"))
    with pytest.raises(UserError, match=r"gad: 8 guesses are too many"):
        tiny.engine({"draft": f"gad:heads={masked_draft()}"})


WRONG = [{"least": 0}, {"least": 9}, {"most": 64}, {"beams": 0}, {"candidates": 0}, {"chunk": 0}, {"delta": -1},
         {"path": "best"}, {"rho": 1.5}, {"tau": -0.1}, {"lam": 2.0}]  # fmt: skip


@pytest.mark.parametrize("knobs", WRONG, ids=str)
def test_knobs_that_make_no_sense(knobs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"diffuspec: .*{next(iter(knobs))}="):
        DiffuSpec(**knobs)
