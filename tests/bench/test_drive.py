from __future__ import annotations

import pytest

from phasewise.bench.drive import Bench, drive
from phasewise.bench.workloads import Shot
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from tests import oracle, tiny

LIMITS = Limits(kv_bytes=64 << 20)


def shots(*lengths: int, new: int = 6) -> list[Shot]:
    return [Shot(0.0, prompt, new) for prompt in tiny.prompts(*lengths)]


def test_a_drive_is_greedy_whole_and_counted() -> None:
    told: list[int] = []
    asked = shots(9, 20, 3)
    run = drive(Bench(tiny.model()).engine({}, LIMITS), asked, told.append)
    assert [r.out for r in run.requests] == [oracle.greedy(tiny.checkpoint(), shot.prompt, 6)[0] for shot in asked]
    assert run.work.emitted == 18 and run.tokens_per_s == pytest.approx(18 / run.seconds)
    assert told[-1] == 3 and told == sorted(told)
    assert all(one.error is None and one.new_tokens == 6 and one.trace.ttft is not None for one in run.served)


def test_only_the_drives_own_work_counts() -> None:
    engine = Bench(tiny.model()).engine({}, LIMITS)
    first, second = drive(engine, shots(12)), drive(engine, shots(13, new=4))
    assert first.work.emitted == 6 and second.work.emitted == 4
    assert first.peak_kv > 0


def test_what_prompts_share_is_there_before_the_clock_starts() -> None:
    engine = Bench(tiny.model()).engine({}, LIMITS)
    beginning, *ends = tiny.prompts(64, 3, 5)
    run = drive(engine, [Shot(0.0, beginning + end, 4, 64) for end in ends])
    assert run.work.prefix_hits == 2 * 64 and run.work.emitted == 8
    assert run.work.rows == 3 + 5 + 2 * 3
    assert len(run.requests) == 2


def test_second_models_are_loaded_once() -> None:
    bench, directory = Bench(tiny.model()), str(tiny.checkpoint(layers=2, seed=1))
    verbs = {"draft": f"draft_model:model={directory}"}
    bench.engine(verbs, LIMITS)
    loaded = bench._loaded[directory]
    bench.engine(verbs, LIMITS)
    assert bench._loaded == {directory: loaded}


def test_what_does_not_fit_is_the_users_error() -> None:
    with pytest.raises(UserError, match="no directory"):
        Bench.load("/no/such/model")
    with pytest.raises(UserError, match="snapkv"):
        Bench(tiny.model()).engine({"evict": "snapkw"}, LIMITS)
