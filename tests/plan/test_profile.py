"""Profiles of the real engine, by a clock that goes with its counters: the fit must find what the clock was made of."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from phasewise.bench.drive import Bench
from phasewise.bench.prompts import random_prompts
from phasewise.cli import main
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.plan.beside import Beside
from phasewise.plan.interference import BusyWorker, around, measure
from phasewise.plan.profile import Grid, HeldOutError, Measured, Measuring, Profile
from phasewise.plan.profiler import LONG, LONG_STEPS, STEPS, Size, StepProfiler, sizes
from phasewise.plan.serving import Serving
from phasewise.plan.setting import ServerSetting, measured
from phasewise.plan.shape import DecoderShape
from tests import tiny

GRID = Grid((8, 32), (1, 4), (32, 96), 1)
BASE, ROW, BYTE = 1e-2, 1e-4, 1e-7


class Clock:
    """Seconds by what an engine has done since the start: no wall clock, so no noise."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self) -> float:
        done = self.engine.counters
        return BASE * done.steps + ROW * done.rows + BYTE * done.kv_bytes_read


def profiler(**more: Any) -> StepProfiler:
    engine = tiny.engine(**more)
    assert isinstance(engine, Engine)
    return StepProfiler(engine, random_prompts(tiny.VOCAB, 0), clock=Clock(engine))


def test_what_a_step_computes_is_what_the_engine_counts() -> None:
    """The same rows, and of a decode the same bytes of KV, as the engine's own counters say."""
    made = profiler()
    per_row = made.engine.store.row_bytes
    for size in (Size(0, 3, 40), Size(16, 0, 64), Size(16, 3, 33)):
        for timed in made.measure(size, 1):
            step = timed.step
            assert (step.prefill_rows, step.decode_rows) == (size.prefill, size.decode)
            counted = (timed.seconds - BASE - ROW * step.rows) / BYTE
            if not size.prefill:
                assert counted == pytest.approx(step.context * per_row)
                assert step.context >= size.decode * size.context
    made.leave()
    assert made.engine.idle and not made.engine.kv_bytes  # nobody stays behind


def test_slices_see_what_lies_before_them() -> None:
    first, second, *_ = profiler().measure(Size(16, 0, 64), 1)
    assert first.step.pairs == 16 * 80 + 16 * 17 / 2  # 64 cached rows, and the slice that warmed up
    assert second.step.pairs - first.step.pairs == 16 * 16
    assert (first.step.prefixes, second.step.prefixes) == (96, 112)


def test_the_clocks_own_numbers_come_out() -> None:
    run = Measuring(profiler(), GRID)
    heard: list[None] = []
    run.run(lambda: heard.append(None))
    lines, held = run.lines()
    assert len(heard) == GRID.rounds * (len(GRID.seen()) + len(GRID.held_out()))
    assert lines["decode"].weights["context"] == pytest.approx(BYTE * run.profiler.engine.store.row_bytes)
    assert lines["decode"].weights["base"] == pytest.approx(BASE)
    assert held["decode"].median < 1e-6
    assert held["prefill"].median < 0.05 and held["mixed"].median < 0.05
    seen = {(one.step.prefill_rows, one.step.decode_rows, one.step.context) for one in run.seen}
    assert not seen & {(one.step.prefill_rows, one.step.decode_rows, one.step.context) for one in run.unseen}


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match="needs .* positions, but the model's context is 1024"):
        profiler().check([Size(512, 1, 512)])
    with pytest.raises(UserError, match="99 decodes at once need --max-running 100"):
        profiler().check(sizes((), (99,), (32,)))
    with pytest.raises(UserError, match="raise --kv-bytes"):
        profiler(kv_bytes=1 << 16).check([Size(0, 8, 96)])


def test_without_a_context_every_step_has_a_prompt_of_its_own() -> None:
    made = profiler()
    for decode in (0, 2):
        for timed in made.measure(Size(48, decode, 0), 1):
            step = timed.step
            assert (step.prefill_rows, step.pairs, step.prefixes) == (48, 48 * 49 / 2, 48)
            assert (step.decode_rows, step.emits) == (decode, decode + 1)
    assert made.engine.idle


def test_steps_of_both_phases_are_half_of_all_as_on_a_chessboard() -> None:
    every = sizes((8, 32, 64), (1, 4), (32, 96))
    alone = [size for size in every if not size.prefill or not size.decode]
    assert len(every) == len({*every}) and len(alone) == 2 * (3 + 2)
    both = [size for size in every if size.prefill and size.decode]
    assert len(both) == 2 * 3 * 2 / 2
    assert {size.prefill for size in both} == {8, 32, 64} and {size.decode for size in both} == {1, 4}


def test_prompts_of_many_rows_are_measured_fewer_times() -> None:
    assert (Size(LONG, 0, 0).steps, Size(LONG - 1, 0, 0).steps, Size(0, 8, 512).steps) == (LONG_STEPS, STEPS, STEPS)


def test_workers_of_one_machine_are_measured_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a real second process; what it makes of the clock is not asked."""
    small = {"prefill": (Size(16, 0, 32),), "decode": (Size(0, 2, 32),)}
    monkeypatch.setattr("phasewise.plan.interference.SIZES", small)
    bench = Bench.load("pocket")
    engine = bench.engine({}, Limits(kv_bytes=1 << 28))
    assert isinstance(engine, Engine)
    alone = StepProfiler(engine, random_prompts(bench.model.config.vocab, 0))
    cores = os.sched_getaffinity(0)
    for table in around(alone, BusyWorker("pocket", "float32", {}, Limits(kv_bytes=1 << 28), 1), 1):
        if len(cores) > 1:
            assert {(mine, theirs) for mine, row in table.items() for theirs in row} == {*product(small, small)}
        assert all(factor >= 1.0 for row in table.values() for factor in row.values())
    assert os.sched_getaffinity(0) == cores  # of every thread, as it was


def test_who_shares_a_core_has_it_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy is told of threads and cores, by how many threads the measured one has."""
    asked = []

    def measured(profiler: StepProfiler, busy: BusyWorker, rounds: int, cores: Sequence[int] | None = None) -> Beside:
        asked.append((busy.threads, busy.cores, cores))
        return {}

    monkeypatch.setattr("phasewise.plan.interference.measure", measured)
    monkeypatch.setattr("phasewise.plan.interference.cores_here", lambda: [2, 3, 5, 7])
    like = BusyWorker("pocket", "float32", {}, Limits(), 1)
    around(profiler(), like, 1)
    assert asked == [(1, None, None), (4, None, [7])]
    asked.clear()
    around(profiler(), replace(like, threads=4), 1)
    assert asked == [(1, [7], None)]
    asked.clear()
    around(profiler(), replace(like, threads=3), 1)
    assert asked == []


@pytest.mark.thorough  # starts a process
def test_a_neighbour_that_does_not_come_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.plan.interference.SIZES", {"decode": (Size(0, 2, 32),)})
    with pytest.raises(UserError, match="has not started.*--alone"):
        measure(profiler(), BusyWorker("no/such/model", "float32", {}, Limits(), 1), 1)


def made() -> Profile:
    run = Measuring(profiler(), GRID)
    run.run()
    lines, held = run.lines()
    beside: Beside = {"prefill": {"decode": 1.5}}
    measured = [Measured("", n, {"store": "int8"}, lines, held, 128, beside if n == 1 else {}, beside if n == 2 else {})
                for n in (1, 2)]  # fmt: skip
    return Profile(
        {"cpu": "abacus"}, {"name": "x", "hash": "12"}, DecoderShape(2, 8, 2, 1, 4, 16, 64), {"flops": 1.0}, measured
    )


def test_profiles_come_back_from_their_files(tmp_path: Path) -> None:
    profile, path = made(), tmp_path / "p.json"
    profile.save(path)
    again = Profile.load(path)
    assert again == profile
    assert again.of().threads == 2 and again.of(threads=1).threads == 1
    assert again.check("abacus", "12") == []
    assert len(again.check("another", "13")) == 2
    with pytest.raises(UserError, match=r"taken with 1, 2 threads, and a worker would have 8.*--threads 1,2,8"):
        again.of(threads=8)
    with pytest.raises(UserError, match="does not know the recipe 'fsat'"):
        again.of("fsat")


def test_all_that_was_measured_reaches_the_simulator() -> None:
    workers = Serving(0.5, 0.25, 0.125, 0.0625, {"prefill": {"decode": 3.0}})
    profile = replace(made(), machine={"cpu": "abacus", "cores": 2}, served={"workers": workers})
    layout = ServerSetting(place="semi_pd").scenario(measured(profile), 1, (), 0).layout
    assert layout.served == workers
    assert layout.beside(1)["prefill"]["decode"] == 3.0
    assert layout.shared(2)["prefill"]["decode"] == 1.5 * 3.0  # of a busy, times what the server makes of it
    assert layout.shared(1) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[]", "is no profile of version 1"),
        ('{"version": 7}', "is no profile of version 1"),
        ('{"version": 1, "measured": []}', "is damaged ('shape')"),
        ('{"version": 1, "measured": [{}], "shape": {}}', "is damaged"),
    ],
)
def test_files_that_are_no_profiles_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Profile.load(path)
    assert words in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        Profile.load(tmp_path / "none.json")


def test_held_out_errors_are_medians() -> None:
    assert HeldOutError.of([0.3, 0.1, 0.2]) == HeldOutError(3, 0.2, 0.3)


def test_the_command_measures_and_says_what_it_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasewise.plan.profile.QUICK", Grid((8, 16), (1, 3), (32, 64), 1))
    monkeypatch.setattr("phasewise.bench.bandwidth.reading", lambda rounds: 1e9)
    path = tmp_path / "p.json"
    with pytest.raises(SystemExit) as ended:
        main(
            ["profile", "--quick", "--alone", "--threads", "1", "--out", str(path), "--recipe", "long=evict=streaming"]
        )
    said = capsys.readouterr().out
    assert not ended.value.code
    assert "held out" in said and "| long | 1 | mixed |" in said
    plain = json.loads(path.read_text())
    assert plain["model"]["name"] == "pocket" and len(plain["model"]["hash"]) == 16
    assert plain["machine"]["cpu"] and plain["phasewise"]
    assert Profile.load(path).of("long").methods == {"evict": "streaming"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--threads", "none"], "threads='none': write different numbers from 1"),
        (["--threads", "4096"], "threads='4096': write different numbers from 1"),
        (["--draft", "prompt_lookup"], "recipe 'default' does not decode with autoregressive"),
        (["--recipe", "fast=draft=prompt_lookup"], "recipe 'fast' does not decode with autoregressive"),
        (["--place", "disaggregated"], "leave --place, --schedule out"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *words])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err
