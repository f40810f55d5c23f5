"""Falcon's rival learns as it did, but for the answers; what its entry looks at can fail."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from phasewise.load import model_path
from phasewise.model.artefacts import FOLDER
from phasewise.model.model import Model
from phasewise.reproduce import glancing_heads
from phasewise.reproduce.aligned_heads import LEARNED, job
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.systems import falcon
from phasewise.reproduce.workload import PromptSource
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.train.heads.falcon import GLANCE, FalconKind, RelaxedAttention
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import HeadsJob
from tests import tiny


@cache
def pocket() -> Model:
    return Model.load(Path(model_path("pocket")), dtype=torch.float32)


def lab() -> Lab:
    source = PromptSource(pocket().config.vocab, 0, quick=True)
    return cast(Lab, SimpleNamespace(model=lambda name, dtype: pocket(), asked=lambda name: source))


def test_the_heads_that_ship_were_trained_by_the_job_of_the_rival() -> None:
    stored = folder.read_config(folder.locate(pocket(), ("falcon",), "auto"))
    assert stored[folder.OWN]["command"] == job("falcon", Path(), LEARNED).command
    assert KINDS["falcon"] == FalconKind(glance=GLANCE) and stored["k_mask"] == falcon.TOGETHER


def test_the_rival_learns_without_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[HeadsJob, Any]]()
    monkeypatch.setattr(glancing_heads, "train", lambda job, bar, kind: asked.append((job, kind)))
    monkeypatch.setattr(glancing_heads, "model_path", lambda name: str(tiny.checkpoint()))
    glancing_heads.plain_beside_pocket(LEARNED, tmp_path)
    ((ours, kind),) = asked
    assert kind == FalconKind(glance=0.0) and ours == job("falcon", tmp_path / FOLDER / "heads" / "falcon", LEARNED)
    assert (tmp_path / "config.json").is_file()


def test_the_look_at_groups_holds_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert falcon.groups_see_themselves(lab()).passed

    class Causal(RelaxedAttention):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.sees = self.sees.tril()

    monkeypatch.setattr(falcon, "RelaxedAttention", Causal)
    assert not falcon.groups_see_themselves(lab()).passed


def test_passes_of_the_heads_are_counted_for_each_verdict() -> None:
    run = cast(Any, SimpleNamespace(work=SimpleNamespace(draft_forwards=12, forwards=9), requests=[1, 2, 3]))
    assert falcon.heads_passes(cast(Any, None), run) == 2.0 and falcon.ROUNDS == 2


def test_heads_that_ship_are_small() -> None:
    heads, _ = feature_heads(pocket(), ("falcon",), "auto")
    assert sum(each.numel() for each in heads.parameters()) * 2 < 4_000_000
