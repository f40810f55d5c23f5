"""FSPAD's rival learns as it did and is as large; controls differ in what they are said to."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.eagle import Eagle
from phasewise.methods.draft.fspad import FSPAD
from phasewise.methods.verify.match import Match
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.reproduce.aligned_heads import EAGLE, INNER, LEARNED, job
from phasewise.reproduce.controls import Control
from phasewise.reproduce.systems.fspad import TASKS, BesideTheModel, OneOutput, passes_on
from phasewise.request.counters import Counters
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.train.heads.aligned import AlignedKind
from phasewise.train.heads.target import FrozenTarget
from tests import tiny
from tests.draft import trained
from tests.draft.fitted import PROMPTS, N
from tests.speculation import eagle_files


def answered(method: Control | FSPAD | Eagle, model: Model) -> Counters:
    """The work of a drafter, whose answers are those of plain decoding."""
    methods = parse({"schedule": "prefill_first"}) | {"decode": Speculative(method, Match())}
    placed = Builder(model, methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    return placed.counters


def test_the_rival_is_as_large_and_learns_by_the_job_of_the_shipped_heads() -> None:
    target = FrozenTarget("pocket")
    ours, _ = feature_heads(target.model, ("fspad",), "auto")
    rival = AlignedKind(EAGLE, inner=INNER).build(target, 4)
    sizes = [sum(each.numel() for each in made.parameters()) for made in (ours, rival)]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-3)
    stored = folder.read_config(folder.locate(target.model, ("fspad",), "auto"))
    assert stored[folder.OWN]["command"] == job("fspad", Path(), LEARNED).command


def test_heads_beside_the_model_are_taken_and_no_others(tmp_path: Path) -> None:
    shutil.copytree(tiny.checkpoint(), tmp_path / "model")
    eagle_files.eagle1(folder.beside(Model.load(tmp_path / "model"), EAGLE), 48)
    method = Eagle(depth=3, width=2, nodes=5)
    found = answered(BesideTheModel(method), Model.load(tmp_path / "model"))
    named = Eagle(str(folder.beside(Model.load(tmp_path / "model"), EAGLE)), depth=3, width=2, nodes=5)
    assert found.drafted > 0 and found == answered(named, tiny.model())


def test_with_one_output_later_guesses_are_right_less_often() -> None:
    """As many guesses, of which the first ones are the same."""
    method = FSPAD(str(trained.FSPAD.heads()), depth=4, width=1)
    both, one = answered(method, tiny.model()), answered(OneOutput(method), tiny.model())
    assert one.accepted < 0.9 * both.accepted and one.forwards > both.forwards
    first = FSPAD(str(trained.FSPAD.heads()), depth=1, width=1)
    assert answered(first, tiny.model()).accepted == answered(OneOutput(first), tiny.model()).accepted


def test_passes_on_a_task_are_those_of_its_requests() -> None:
    requests = [SimpleNamespace(trace=SimpleNamespace(counts=counts)) for counts in ([1], [2, 3], [1, 1], [4])]
    run, case = cast(Any, SimpleNamespace(requests=requests)), cast(Any, None)
    assert [passes_on(task)(case, run) for task in TASKS] == pytest.approx([1, 2 / 5, 1, 1 / 4])
