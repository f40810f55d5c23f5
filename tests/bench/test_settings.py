from __future__ import annotations

import pytest

from phasewise import catalog
from phasewise.bench.drive import Bench
from phasewise.bench.settings import DEFAULT, BenchSetting, Comparison, untrained
from phasewise.bench.workloads import Shot
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.options import DEFAULTS
from tests import tiny


def shots(number: int) -> list[Shot]:
    return [Shot(0.0, prompt * 3, 8) for prompt in tiny.prompts(10, 12, seed=number + 1)]


def compared(*settings: str, rounds: int = 2, base: dict[str, str] | None = None) -> Comparison:
    run = Comparison(
        Bench(tiny.model()), [BenchSetting.parse(s) for s in settings], Limits(kv_bytes=64 << 20), base or {}
    )
    assert list(run.run(rounds, shots)) == list(range(1, rounds * (len(settings) + 1 - len(run.refused)) + 1))
    return run


def test_a_setting_is_verbs() -> None:
    setting = BenchSetting.parse("draft=prompt_lookup:k=6,min_match=1   evict=streaming")
    assert setting.verbs == {"draft": "prompt_lookup:k=6,min_match=1", "evict": "streaming"}
    assert setting.name == "draft=prompt_lookup:k=6,min_match=1 evict=streaming"


@pytest.mark.parametrize(
    ("text", "says"),
    [("evict", "not a setting"), ("evcit=none", "Did you mean evict"), ("evict=snapkw", "snapkv"), (" ", "empty")],
)
def test_mistakes_in_settings_are_named(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        BenchSetting.parse(text)


def test_exact_methods_agree_and_lossy_ones_are_seen_to_differ() -> None:
    run = compared("draft=prompt_lookup:k=3", "evict=streaming:sinks=1,window=6")
    same = {trial.setting: trial.same for trial in run.trials}
    assert same[DEFAULT] == same["draft=prompt_lookup:k=3"] == 1.0
    assert same["evict=streaming:sinks=1,window=6"] < 1.0


def test_rounds_are_paired_and_rotate() -> None:
    run = compared("schedule=prefill_first", rounds=3)
    turns = [(trial.number, trial.setting) for trial in run.trials]
    one, two = DEFAULT, "schedule=prefill_first"
    assert turns == [(0, one), (0, two), (1, two), (1, one), (2, one), (2, two)]
    prompts = {(t.number, t.setting): [r.prompt for r in t.run.requests] for t in run.trials}
    assert prompts[0, one] == prompts[0, two] != prompts[1, one]


def test_counters_are_per_token() -> None:
    run = compared()
    numbers = run.trials[0].numbers()
    assert numbers["output_tokens"] == 16 and numbers["forwards_per_token"] == pytest.approx(8 / 16)
    assert numbers["rows_per_token"] == pytest.approx((10 * 3 + 12 * 3 + 2 * 7) / 16)
    assert numbers["accepted_share"] is None and numbers["failed"] == 0


def test_memory_per_request_is_rows_and_what_is_kept_beside_them() -> None:
    quest, snapkv = "attend=quest:page=4,budget=12,dense_layers=1", "evict=snapkv:keep=8,window=4"
    run = compared(quest, snapkv, "store=int8", rounds=1)
    numbers = {trial.setting: trial.numbers() for trial in run.trials}
    row, layers, page = 4 * 2 * 12 * 2 * 4, 4, 2 * 2 * 12 * 4  # k and v of 2 heads of 12 floats in 4 layers
    rows = [3 * 10 + 7, 3 * 12 + 7]  # the last token is not computed
    live = {name: each["live_bytes_per_request"] for name, each in numbers.items()}
    assert live[DEFAULT] == row * sum(rows) / 2
    assert live[quest] == live[DEFAULT] + (layers - 1) * page * 64 // 4  # room for the pages of 64 rows
    assert live[snapkv] == row * (8 + 7)
    assert live["store=int8"] == layers * 2 * 2 * (12 + 2) * sum(rows) / 2
    booked = {name: each["booked_bytes_per_request"] for name, each in numbers.items()}
    assert booked[DEFAULT] == row * 64 and booked[quest] == row * 64 + (layers - 1) * 64 // 4 * (page + 32)
    header, body = run.table()
    fit = {line[0]: line[header.index("fit 256 MiB")] for line in body}
    assert fit == {name: str((256 << 20) // int(each)) for name, each in booked.items()}


def test_what_cannot_run_is_reported_and_the_rest_runs() -> None:
    run = compared("decode=speculative", "schedule=prefill_first", rounds=1)
    assert list(run.refused) == ["decode=speculative"] and "draft" in run.refused["decode=speculative"]
    assert {trial.setting for trial in run.trials} == {DEFAULT, "schedule=prefill_first"}
    assert run.rows()[-1]["refused"] == run.refused["decode=speculative"]


def test_the_base_applies_to_everyone() -> None:
    run = compared("schedule=prefill_first", rounds=1, base={"evict": "streaming:sinks=1,window=6"})
    assert all(trial.same == 1.0 for trial in run.trials)  # exact o X == X
    plain = compared(rounds=1)
    assert run.trials[0].run.work.kv_bytes_read < plain.trials[0].run.work.kv_bytes_read


def test_the_table_has_a_row_per_setting_and_a_speed_of_one_for_the_default() -> None:
    header, rows = compared("schedule=prefill_first").table()
    assert [row[0] for row in rows] == [DEFAULT, "schedule=prefill_first"]
    assert rows[0][header.index("speed / default")] == "1.00 (1.00 to 1.00)"
    assert rows[0][header.index("same tokens")] == "100%"


@pytest.mark.thorough
def test_by_default_everything_that_needs_nothing_is_tried() -> None:
    found = {(verb, name) for setting in untrained() for verb, name in setting.verbs.items()}
    assert ("evict", "streaming") in found and ("draft", "prompt_lookup") in found
    for verb, name in found:
        assert catalog.method(verb, name).needs == "nothing" and DEFAULTS.get(verb) != name
    run = Comparison(Bench(tiny.model()), untrained(), Limits(kv_bytes=64 << 20))
    list(run.run(1, shots))
    few = run.refused.pop("attend=tidal")
    assert "none is left to read less" in few, "four layers are too few for its defaults"
    assert set(run.refused) == {"draft=aded", "draft=retrieval"}, "datastores are made with a tokenizer: it has none"
    assert all("no tokenizer.json" in reason for reason in run.refused.values())
