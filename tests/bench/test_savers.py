"""Savers beside dense: contexts and bytes in closed form, gains from made-up times, and the page they get."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise import catalog
from phasewise.bench.drive import Bench
from phasewise.bench.prompts import random_prompts
from phasewise.bench.report import filled
from phasewise.bench.rounds import Ratio
from phasewise.bench.savers import DENSE, SAVING, BatchLoad, Savers, SettingTurn, contenders, savers, together
from phasewise.bench.settings import BenchSetting
from phasewise.bench.worth import INTRO, Worth, cells, layer_bytes, promised, section, worths
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.options import DEFAULTS
from tests import tiny

N, NEW, ROUNDS = 100, 3, 2
HEADS, DIM, LAYERS = 2, 12, 4
ROW = LAYERS * HEADS * 2 * DIM * 4


def measured(*settings: str, batches: Sequence[int] = (1, 3), kv_bytes: int = 64 << 20, tokens: int = N) -> Savers:
    load = BatchLoad(tokens, batches, NEW, ROUNDS)
    run = Savers(Bench(tiny.model()), [BenchSetting.parse(text) for text in settings], load, Limits(kv_bytes=kv_bytes))
    done: list[int] = []
    run.run(random_prompts(tiny.VOCAB, 0), itertools.count(100.0).__next__, done.append)
    assert done == list(range(1, len(run.turns) + 1))
    rounds = list(dict.fromkeys((turn.batch, turn.group, turn.number) for turn in run.turns))
    groups = list(dict.fromkeys((batch, group) for batch, group, _ in rounds))
    assert run.anew == 0 and [turn.rate for turn in run.turns] == [
        100.0 + rounds.index((turn.batch, turn.group, turn.number)) + groups.index((turn.batch, turn.group))
        for turn in run.turns
    ]  # memory is read once before every round, and after the last one
    return run


def mean(rows: Sequence[int]) -> float:
    return sum(rows) / len(rows)


def steps(number: int, start: int) -> list[int]:
    """Rows that the steps of a round read, its own included, where `start` were there after the prompt."""
    return [start + 1 + i for i in range((1 + number) * NEW, (2 + number) * NEW)]


# ---- who takes part
def test_every_saver_is_there_neutral_and_at_work() -> None:
    found = [(verb, text.partition(":")[0]) for setting in savers() for verb, text in setting.verbs.items()]
    wanted = {(verb, name) for verb, name, _ in catalog.every() if verb in SAVING and name != DEFAULTS[verb]}
    assert set(found) == wanted and {("attend", "quest"), ("evict", "snapkv"), ("skip", "unified")} < wanted
    for verb, name in wanted:
        knobs = [tuple(catalog.method(verb, name).neutral), tuple(getattr(catalog.method(verb, name), "untrained", {}))]
        assert found.count((verb, name)) == len(set(knobs))
    assert len({setting.name for setting in savers()}) == len(found)


def test_words_stand_for_all_of_them_one_way_or_the_other() -> None:
    idle, acting = contenders(["neutral"]), contenders(["work"])
    assert all(setting.name.endswith(", neutral") for setting in idle) and len(idle) > 20
    assert not any(setting.name.endswith(", neutral") for setting in acting) and len(acting) > 20
    assert {setting.name for setting in contenders([])} == {setting.name for setting in (*idle, *acting)}
    assert {setting.name for setting in savers()} == {setting.name for setting in contenders([])}
    some = contenders(["store=int8", "work", "evict=snapkv:keep=0.1"])
    assert [setting.name for setting in some].count("store=int8") == 1 and len(some) == len(acting) + 1
    with pytest.raises(UserError, match="is not a setting"):
        contenders(["neutrl"])


def test_who_looks_meanwhile_finds_the_groups_that_are_through() -> None:
    run = Savers(Bench(tiny.model()), [], BatchLoad(N, (1, 3), NEW, ROUNDS), Limits(kv_bytes=64 << 20))
    seen: list[list[int]] = []
    run.run(random_prompts(tiny.VOCAB, 0), lambda: 16e9, after=lambda: seen.append([turn.batch for turn in run.turns]))
    assert seen == [[1] * ROUNDS, [1] * ROUNDS + [3] * ROUNDS]


def test_all_of_them_run() -> None:
    run = Savers(Bench(tiny.model()), savers(), BatchLoad(40, (2,), 2, 1), Limits(kv_bytes=64 << 20))
    run.run(random_prompts(tiny.VOCAB, 0), lambda: 16e9)
    few = {"attend=tidal", "attend=tidal, neutral"}  # four layers are too few for its defaults
    untrained = {"evict=rlkv"}
    assert {*run.refused} <= few | untrained
    reasons = {name: "needs weights" if name in untrained else "none is left to read less" for name in run.refused}
    assert all(reasons[name] in said for name, said in run.refused.items())
    names = [setting.name for setting in savers() if setting.name not in run.refused]
    assert [turn.setting for turn in run.turns] == [DENSE, *names]


# ---- what is measured
def test_all_contexts_are_equal_and_bytes_are_those_of_their_rows() -> None:
    kept, half, rounded = "evict=snapkv:keep=20,window=4", "skip=unified:weights=none", "store=int8"
    run = measured(kept, half, rounded)
    at = {(turn.setting, turn.batch, turn.number): turn for turn in run.turns}
    assert len(at) == len(run.turns) == 4 * 2 * ROUNDS
    for batch in (1, 3):
        for number in range(ROUNDS):
            rows = batch * mean(steps(number, N))
            assert at[DENSE, batch, number].read == pytest.approx(ROW * rows)
            assert at[kept, batch, number].read == pytest.approx(ROW * batch * mean(steps(number, 20)))
            assert at[half, batch, number].read == pytest.approx(ROW * rows / 2)
            assert at[rounded, batch, number].read == pytest.approx(LAYERS * HEADS * 2 * (DIM + 2) * rows)
            layers = {name: at[name, batch, number].layers for name in (DENSE, kept, half, rounded)}
            assert layers == {DENSE: LAYERS, kept: LAYERS, half: LAYERS / 2, rounded: LAYERS}


def test_settings_take_turns_in_rotating_order() -> None:
    run = measured("store=int8", batches=[2])
    assert [(turn.number, turn.setting) for turn in run.turns] == [
        (0, DENSE), (0, "store=int8"), (1, "store=int8"), (1, DENSE),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "counted", "anew"),
    [([50, 50, 54, 59], [50, 50, 54], 0),
     ([50, 80, 80, 80, 81], [80, 80, 80], 1),  # the first is measured anew
     ([50, 56, 50, 50, 40, 40, 41], [50, 40, 40], 3),
     ([1, 2, 4, 8, 16, 32, 64], [8, 16, 32], 3)],  # no more than as many again
)  # fmt: skip
def test_a_round_in_which_the_machine_changed_does_not_count(
    rates: list[float], counted: list[float], anew: int
) -> None:
    run = Savers(
        Bench(tiny.model()), [BenchSetting.parse("store=int8")], BatchLoad(N, [1], NEW, 3), Limits(kv_bytes=64 << 20)
    )
    said = iter(rates)
    run.run(random_prompts(tiny.VOCAB, 0), said.__next__)
    assert [turn.rate for turn in run.turns if turn.setting == DENSE] == counted and run.anew == anew
    assert [*said] == [] and len(run.turns) == 6
    before = [turn.read for turn in run.turns if turn.setting == DENSE]
    assert before == sorted(before) and run.turns[-1].number == 2, "contexts grow all the same"


def test_prompts_are_computed_once_where_they_may_be_shared() -> None:
    load = BatchLoad(96, [4], NEW, ROUNDS)
    run = Savers(Bench(tiny.model()), [], load, Limits(kv_bytes=64 << 20))
    (dense,) = run._engines().values()
    dense.enter(random_prompts(tiny.VOCAB, 0)(96), 4, load.most)
    assert dense.engine.counters.prefix_hits == 4 * 64  # two whole blocks: the last row is always computed
    assert dense.engine.counters.rows == 96 + 4 * 32
    assert [request.n_out for request in dense.requests] == [1] * 4
    dense.leave(forget=True)
    assert dense.engine.idle and dense.engine.kv_bytes == 0


def test_who_does_not_fit_has_a_turn_with_dense_of_its_own() -> None:
    settings = ["store=int8", "evict=snapkv", "attend=hydragen"]
    whole = measured(*settings, batches=[2])
    assert whole.groups == {2: [[DENSE, *settings]]}
    engines = tiny.engine(), tiny.engine({"evict": "snapkv"})  # whose votes need room as well
    budget = 3 * sum(engine.store.cost(N + whole.load.most) for engine in engines)
    run = measured(*settings, batches=[2], kv_bytes=budget)
    assert run.groups == {2: [[DENSE, "store=int8"], [DENSE, "evict=snapkv"], [DENSE, "attend=hydragen"]]}
    assert {(turn.group, turn.setting) for turn in run.turns} == {
        (group, name) for group, names in enumerate(run.groups[2]) for name in names
    }
    with pytest.raises(UserError, match="--kv-bytes"):
        measured(*settings, batches=[2], kv_bytes=budget - 1)


@given(st.integers(1, 9), st.dictionaries(st.text("abc", min_size=1), st.integers(1, 9)), st.integers(18, 60))
def test_groups_hold_everybody_once_within_the_budget(dense: int, others: dict[str, int], budget: int) -> None:
    groups = together({DENSE: dense, **others}, budget)
    assert all(group[0] == DENSE for group in groups)
    assert [name for group in groups for name in group[1:]] == list(others)
    assert all(dense + sum(others[name] for name in group[1:]) <= budget for group in groups)


def test_who_cannot_run_is_named_and_the_rest_goes_on() -> None:
    run = measured("skip=unified", "store=int8", batches=[1])
    assert list(run.refused) == ["skip=unified"] and "weights=none" in run.refused["skip=unified"]
    assert {turn.setting for turn in run.turns} == {DENSE, "store=int8"}


def test_more_tokens_than_the_context_are_refused_with_the_most_that_fit() -> None:
    load = BatchLoad(0, (1,), NEW, ROUNDS)
    most = tiny.model().config.max_positions - load.most
    replace(load, tokens=most).check(tiny.model())
    with pytest.raises(UserError, match=f"tokens={most + 1} .* lower --tokens to at most {most},"):
        measured(tokens=most + 1)


def test_a_model_is_its_layers_and_its_embeddings() -> None:
    per_layer = (2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 96 + 2 * 48) * 4  # q, o; k, v; the MLP; two norms
    assert layer_bytes(tiny.model()) == pytest.approx(per_layer + 48 * 4 / LAYERS)  # and a share of the last norm


# ---- what comes of it
RATES = (500.0, 500.0, 250.0)  # bytes per second, by round


def turns(setting: str, seconds: Sequence[float], read: float, layers: float = 8, group: int = 0) -> list[SettingTurn]:
    return [SettingTurn(setting, 2, group, i, each, read, layers, RATES[i]) for i, each in enumerate(seconds)]


def test_gains_are_paired_and_held_against_what_the_bytes_promise() -> None:
    made = [
        *turns(DENSE, [1.0, 2.0, 4.0], 1000),
        *turns("half", [0.8, 1.6, 3.2], 500),
        *turns("skip", [1.0, 1.0, 1.0], 1000, layers=4),
        *turns(DENSE, [2.0, 2.0, 2.0], 1000, group=1),
        *turns("none", [2.0, 4.0, 1.0], 1000, group=1),
    ]
    found = {worth.setting: worth for worth in worths(made, per_layer=250)}
    assert list(found) == [DENSE, "half", "skip", "none"]
    half = found["half"]
    assert half.gain == Ratio(pytest.approx(1.25), pytest.approx(1.25), pytest.approx(1.25), 3)
    assert half.read == 250 and half.promised == pytest.approx(2.0 / (2.0 - 500 / 500))  # of unbounded, 2 and 2
    assert half.reached == pytest.approx(0.25)
    assert found["skip"].promised is None and found["skip"].reached is None  # 4 x 250 bytes are all of the 2 s
    assert found["none"].gain == Ratio(1.0, 0.5, 2.0, 3)
    assert found["none"].promised == 1 and found["none"].reached is None
    assert found[DENSE].gain == Ratio(1.0, 1.0, 1.0, 3) and found[DENSE].seconds == 2.0
    assert [row[-2:] for row in map(cells, found.values())] == [
        ["1.00", "-"], ["2.00", "25%"], ["unbounded", "-"], ["1.00", "-"],
    ]  # fmt: skip


@given(st.floats(1e-4, 10), st.floats(0, 1e12), st.floats(1e6, 1e12))
def test_a_promise_is_the_time_that_is_left(dense: float, saved: float, rate: float) -> None:
    found = promised(dense, saved, rate)
    if found is None:
        assert saved / rate >= dense
    else:
        assert found >= 1 and math.isclose(dense / found + saved / rate, dense, rel_tol=1e-9)


# ---- the page
def table(gain: float) -> str:
    worth = Worth("store=int8", 4, 0.01, Ratio(gain, gain, gain, 1), 2048.0, 1.5)
    return section([worth], "## M, 9 tokens", ["not run: x: y"])


def test_a_page_keeps_what_others_wrote() -> None:
    page = filled(INTRO, "M 9", table(1.25))
    assert page.startswith(INTRO) and "| store=int8 | 10 ms | 1.25 | 2 KiB | 1.50 | 50% |" in page
    assert "4 at once:" in page and "not run: x: y" in page
    both = filled(page, "S 9", table(1.5))
    assert both.startswith(page.rstrip()) and both.count("store=int8") == 2
    again = filled(both, "M 9", table(1.125))
    assert "| 1.12 |" in again and "| 1.25 |" not in again and "| 1.50 |" in again
    assert filled(again, "M 9", table(1.25)) == both


@pytest.mark.parametrize("marks", [["begin"], ["end"], ["end", "begin"], ["begin", "end", "end"]])
def test_broken_markers_are_not_written_over(marks: list[str]) -> None:
    page = "text\n" + "\n".join(f"<!-- M 9:{mark} -->" for mark in marks)
    with pytest.raises(ValueError, match="once each"):
        filled(page, "M 9", table(1.25))
