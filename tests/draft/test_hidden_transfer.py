"""Hidden Transfer: exact whatever its maps know, guesses as its plain forward says, no real row sees a pseudo row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.errors import UserError
from phasewise.ops import native
from phasewise.speculation import first_layers
from phasewise.speculation.first_layers import FirstLayers
from phasewise.speculation.loop import draft_span
from phasewise.step.span import Span
from phasewise.verbs.draft import Draft
from tests import tiny
from tests.draft.begun import CHAIN, DENSE, TREE, Begun, Passed, half
from tests.draft.fitted import PROMPTS, N
from tests.draft.trained import HIDDEN_TRANSFER
from tests.draft.watch import Watch, drafter_of, layers_run, run_with_few_rows
from tests.speculation.transfer_files import PlainTransfer, tiny_maps

LAYERS, LAYER, MAPS = 4, 2, 3


# ---- guesses
@pytest.mark.parametrize("source", ["trained", "random:0"])
def test_a_draft_is_what_the_plain_forward_of_the_row_before_says(source: str, tmp_path: Path) -> None:
    """Every guess is the rank of its map that its path in the tree names, and the guesses are all that fit."""
    path = HIDDEN_TRANSFER.heads() if source == "trained" else tiny_maps(tmp_path)
    plain, placed = PlainTransfer(path, tiny.checkpoint()), tiny.engine(HIDDEN_TRANSFER.verbs("nodes=9", path))
    watch = Watch(placed)
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    drafter = drafter_of(placed)
    text, drawn = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]], 0
    for (_, known), draft in watch.drafts.items():
        levels, guesses = len(text) - known - 1, len(draft.tokens) - draft.ask
        ranks = plain.logits(text[: known - 1]).topk(10, -1).indices.tolist()
        paths = [path for path in drafter.tree if len(path) <= levels]
        want = [tuple(ranks[head][rank] for head, rank in enumerate(path)) for path in paths]
        if known > len(PROMPTS[2]) + 1:  # the first pass after a prompt has nothing to guess by
            assert draft.cut(guesses).paths(guesses) == want
            drawn += 1
        else:
            assert not guesses and draft.ask == MAPS
    assert drawn > 3 and len(drafter.tree) == 9


# ---- real rows beside pseudo rows, to the bit
def later(mine: Begun, draft: Draft, maps: Sequence[torch.Tensor]) -> Span:
    """The span of a draft that goes on from layer `LAYER`, with a pseudo row of each map behind each row."""
    whole, first = Draft([*draft.tokens], [*draft.parents]), FirstLayers(half(), LAYER, mine.counters)
    for node in range(-1, len(draft.tokens)):
        above = node
        for _ in maps:
            above = whole.add(above, 0)
            whole.ask += 1
    with first.lent(DENSE):
        (rows,) = first.run_trees([mine.request], [whole])
        if maps:
            first.begin_behind(mine.request, torch.stack([row @ w for row in rows for w in maps]))
        span = draft_span(mine.request, whole, DENSE)
        first.hand_over(span)
    assert span.layers == (LAYER, LAYERS)
    return span


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("draft", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("mates", [0, 1, 2])
@torch.inference_mode()
def test_real_rows_are_the_same_beside_pseudo_rows(draft: Draft, mates: int) -> None:
    """Rows after the last layer and the KV that stays, in the same batches, and rows that run all layers at once. Where
    the mask lets real rows see pseudo rows, the same comparison fails."""
    generator, kept = torch.Generator().manual_seed(0), [0, 1, 3]
    maps = [(torch.randn(64, 64, generator=generator) / 8).bfloat16() for _ in range(MAPS)]
    found, real = dict[str, Passed](), 1 + len(draft.tokens)
    for way in ("pseudo", "none", "whole", "open"):
        mine, others = Begun(tiny.prompts(37)[0]), [Begun(prompt) for prompt in tiny.prompts(20, 51)[:mates]]
        if way == "whole":
            span = draft_span(mine.request, draft, DENSE)
        else:
            span = later(mine, draft, [] if way == "none" else maps)
        if way == "open":
            assert span.sees is not None
            span.sees[:real, real:] = True
        found[way] = mine.run(span, others, kept if draft is TREE else 2)
    pseudo = found["pseudo"]
    for way in ("none", "whole", "open"):
        assert pseudo.same_rows(found[way], real) == pseudo.same_kv(found[way]) == (way != "open")


# ---- costs, to the row


@pytest.mark.parametrize("knobs", ["nodes=7", "nodes=15,depth=2", "nodes=1"])
def test_real_rows_run_every_layer_once_and_pseudo_rows_the_later_ones(
    knobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass is one of the first layers and one of the others. A row has as many pseudo rows as there are maps, but
    for tokens that the next draft could not reach any more."""
    verbs = HIDDEN_TRANSFER.verbs(knobs)
    ran, placed = layers_run(monkeypatch), tiny.engine(verbs)
    watch = Watch(placed)
    (request,) = tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))
    c, prompt = placed.counters, len(PROMPTS[1])
    depth, pseudo, judged = (2 if "depth=2" in knobs else MAPS), 0, 0
    for (_, known), draft in watch.drafts.items():
        guesses, left = len(draft.tokens) - draft.ask, prompt + N - known - 1
        paths = [(), *draft.paths(guesses)]
        assert draft.ask == sum(max(0, min(depth, left - len(path) - 1)) for path in paths)
        pseudo, judged = pseudo + draft.ask, judged + guesses
    rounds = c.forwards - 1
    assert request.n_out == N and c.emitted == c.forwards + c.accepted and c.drafted == judged
    assert c.rows == prompt + rounds + judged
    assert ran == {i: c.rows + (pseudo if i >= LAYER else 0) for i in range(LAYERS)}
    assert c.row_layers == LAYERS * c.rows + (LAYERS - LAYER) * pseudo and pseudo > judged
    assert c.draft_forwards == len(watch.drafts) and c.draft_depth == LAYER * len(watch.drafts)
    assert rounds - len(watch.drafts) <= 1  # the last token alone is guessed by nobody


def test_where_first_rows_were_computed_anew_the_count_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form fails for a drafter that drops what it has begun. Its tokens are the same, and nothing is
    guessed: pseudo rows that ran all layers are none."""

    def dropped(self: Any, span: Any) -> None:
        self.drop(span.request)

    monkeypatch.setattr(first_layers.FirstLayers, "hand_over", dropped)
    placed = tiny.engine(HIDDEN_TRANSFER.verbs())
    assert tiny.outs(tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[1:2]
    c = placed.counters
    assert c.drafted == 0 and c.forwards == N and c.draft_forwards > N // 2
    assert c.rows > len(PROMPTS[1]) + c.forwards - 1 + c.draft_forwards


# ---- limits
@pytest.mark.parametrize("budget", [3, 6, 7, 14, 15, 40])
def test_a_draft_that_there_are_few_rows_for_keeps_its_pseudo_rows(budget: int) -> None:
    """It has fewer guesses instead; where not even the pending token's fit, there is none."""
    watch = run_with_few_rows(HIDDEN_TRANSFER.verbs(), budget)
    sizes = Counter[int]()
    for (_, known), made in watch.drafts.items():
        guesses, left = len(made.tokens) - made.ask, len(PROMPTS[0]) + N - known - 1
        paths = [(), *made.paths(guesses)]
        assert made.ask == sum(max(0, min(MAPS, left - len(path) - 1)) for path in paths)
        sizes[guesses] += left > 2 * MAPS  # all of whose rows have all theirs
    assert max(n for n in sizes if sizes[n]) == min(7, (1 + budget) // (1 + MAPS) - 1)


def test_a_model_of_one_layer_is_refused() -> None:
    with pytest.raises(UserError, match="has 1 layer; maps stand between two"):
        tiny.engine(HIDDEN_TRANSFER.verbs(source="random:0"), of=tiny.model(layers=1))
