"""Models made for systems: padded ones say the same, random ones load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.load import files_of
from phasewise.model.model import Model
from phasewise.model.widen import widen
from phasewise.reproduce import models
from phasewise.reproduce.models import Shelf
from phasewise.reproduce.play import LoadEntry, PlayedRun, play
from phasewise.reproduce.workload import PromptSource
from tests import tiny


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("models"))


def said(model: Model, prompt: list[int]) -> PlayedRun:
    return play(tiny.engine(of=model, prefix_cache=False), [LoadEntry(prompt, 24)])


def test_a_widened_checkpoint_says_the_same_at_another_price(tmp_path: Path) -> None:
    widen(files_of(str(tiny.checkpoint())), tmp_path, 4)
    wide, prompt = Model.load(str(tmp_path)), tiny.prompts(48)[0]
    small, large = said(tiny.model(), prompt), said(wide, prompt)
    assert large.outs == small.outs and len(set(small.outs[0])) > 3
    assert wide.weight_bytes > 12 * tiny.model().weight_bytes
    assert large.work.kv_bytes_read == 4 * small.work.kv_bytes_read


def test_the_widened_draft_is_the_draft_in_bfloat16_too(shelf: Shelf) -> None:
    prompt = PromptSource(4096, 0, False).code(48)
    wide, narrow = (said(Model.load(shelf.path(name)), prompt) for name in ("pocket-draft-wide", "pocket-draft"))
    assert wide.outs == narrow.outs and len(set(narrow.outs[0])) > 3


@pytest.mark.parametrize("name", ["tiny-experts", "tiny-dense", "untrained-draft"])
def test_random_models_load_and_are_made_once(shelf: Shelf, name: str) -> None:
    path = Path(shelf.path(name))
    made = (path / "model.safetensors").stat().st_mtime_ns
    model = Model.load(shelf.path(name))
    assert (path / "model.safetensors").stat().st_mtime_ns == made
    run = play(tiny.engine(of=model, prefix_cache=False), [LoadEntry(tiny.prompts(20)[0], 4)])
    assert len(run.outs[0]) == 4
    assert bool(run.work.expert_loads) == (name == "tiny-experts")


def test_an_untrained_draft_has_the_drafts_shape(shelf: Shelf) -> None:
    assert Model.load(shelf.path("untrained-draft")).config == Model.load(shelf.path("pocket-draft")).config


def test_unknown_models(shelf: Shelf) -> None:
    with pytest.raises(UserError, match="unknown model 'pocket-wid'. Did you mean pocket-wide"):
        shelf.path("pocket-wid")


def test_heads_are_joined_in_three_ways(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CALIBRATED", 2000)
    made = {by: Model.load(shelf.path(f"pocket-1kv-{by}")) for by in ("caches", "weights", "mean")}
    config = Model.load(shelf.path("pocket")).config
    assert all(model.config == replace(config, kv_heads=1) for model in made.values())
    prompt = PromptSource(4096, 0, False).code(48)
    outs = [said(model, prompt).outs[0] for model in made.values()]
    assert len(set(map(tuple, outs))) == 3


def test_joined_heads_learn_what_joining_touched(shelf: Shelf, tmp_path: Path) -> None:
    """The attentions alone: what they are held against has learned as many tokens."""
    models.joined("mean", tmp_path / "taught", tokens=1)
    before, after = (files_of(str(path)).tensors() for path in (shelf.path("pocket-1kv-mean"), tmp_path / "taught"))
    moved = {name for name in before.where if not torch.equal(before.read(name), after.read(name))}
    assert "model.layers.0.self_attn.q_proj.weight" in moved and not any("mlp" in name for name in moved)
