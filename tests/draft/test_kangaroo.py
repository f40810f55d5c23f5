"""Kangaroo: exact whatever its adapter knows, guesses as its plain forward says, and no row runs a layer twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.options import parse
from phasewise.request.request import Request
from phasewise.speculation import first_layers
from phasewise.verbs.draft import Draft
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.trained import KANGAROO
from tests.draft.watch import Watch, drafter_of, layers_run
from tests.engine.engines import step_all
from tests.speculation.exit_files import PlainAdapter, tiny_adapter

LAYERS, EXIT = 4, 2


# ---- guesses
@pytest.mark.parametrize("knobs", ["depth=4,stop=0", "depth=4,stop=0.3"])
def test_a_chain_is_what_the_plain_forward_says_and_ends_behind_an_unlikely_guess(knobs: str) -> None:
    plain, placed = PlainAdapter(KANGAROO.heads(), tiny.checkpoint()), tiny.engine(KANGAROO.verbs(knobs))
    watch, stop = Watch(placed), float(knobs.rpartition("=")[2])
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    assert len(watch.drafts) > 3
    for (_, known), draft in watch.drafts.items():
        guesses, most = list[int](), min(4, len(text) - known - 1)
        while len(guesses) < most:
            chances = plain.logits([*text[:known], *guesses])[-1].softmax(-1)
            guesses.append(int(chances.argmax()))
            if float(chances.max()) < stop:
                break
        assert draft.tokens == guesses and draft.parents == list(range(-1, len(guesses) - 1))


# ---- costs, to the row
@pytest.mark.parametrize("knobs", ["depth=4,stop=0", "depth=4,stop=0.3", "depth=4,stop=1"])
def test_every_row_runs_every_layer_once(knobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are those of prompts, a pending token a round and its guesses, and all layers have run as many."""
    ran = layers_run(monkeypatch)
    placed = tiny.engine(KANGAROO.verbs(knobs))
    (request,) = tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))
    c, rounds = placed.counters, placed.counters.forwards - 1
    assert request.n_out == N and c.emitted == c.forwards + c.accepted
    assert c.rows == len(PROMPTS[1]) + rounds + c.drafted
    assert ran == dict.fromkeys(range(LAYERS), c.rows) and c.row_layers == LAYERS * c.rows


@pytest.mark.parametrize(("stop", "each"), [("0", 4), ("1", 1)])
def test_a_round_of_s_guesses_is_s_and_one_pass_of_the_first_layers_and_one_of_the_others(stop: str, each: int) -> None:
    """With stop=0 all that fit are made, and with stop=1 one. The adapter runs once a guess."""
    placed = tiny.engine(KANGAROO.verbs(f"depth=4,stop={stop}"))
    (request,) = tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))
    known, guesses = 1, list[int]()
    for count in request.trace.counts[1:]:
        guesses.append(max(0, min(each, N - known - 1)))
        known += count
    c, made = placed.counters, [n for n in guesses if n]
    assert known == N and c.drafted == sum(guesses)
    assert c.draft_forwards == sum(2 * n + 1 for n in made)
    assert c.draft_depth == sum((n + 1) * EXIT + n for n in made)
    assert c.forwards == 1 + len(guesses)


def test_where_first_rows_were_computed_anew_the_count_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form fails for a drafter that drops what it has begun; its tokens are the same."""

    def dropped(self: Any, span: Any) -> None:
        self.drop(span.request)

    monkeypatch.setattr(first_layers.FirstLayers, "hand_over", dropped)
    placed = tiny.engine(KANGAROO.verbs())
    assert tiny.outs(tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[1:2]
    c = placed.counters
    begun = (c.draft_depth - c.draft_forwards) // (EXIT - 1)  # passes of the first layers, of a row each
    whole = c.rows - begun
    assert whole == len(PROMPTS[1]) + c.forwards - 1 + c.drafted
    assert c.row_layers == LAYERS * whole + EXIT * begun and begun > 0


def test_what_is_proposed_otherwise_runs_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other tokens come of it than were begun, rows of the first layers are dropped."""
    placed = tiny.engine(KANGAROO.verbs("depth=4,stop=0"))
    drafter = drafter_of(placed)
    draft = drafter.draft

    def other(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = draft(requests, budgets)
        return [d and Draft([*d.tokens[:-1], (d.tokens[-1] + 1) % tiny.VOCAB], d.parents) for d in drafts]

    drafter.draft = other
    requests = [Request(p, tiny.greedy(N)) for p in PROMPTS]
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, tiny.greedy(N)) and placed.counters.accepted > 0


def test_heads_of_another_width_are_named(tmp_path: Path) -> None:
    path = tiny_adapter(tmp_path)
    wide = tiny.model(hidden=32)
    with pytest.raises(UserError, match="hidden_size=48"):
        Builder(wide, parse(KANGAROO.verbs(source=path)), Limits(kv_bytes=64 << 20), load=tiny.load).build()
