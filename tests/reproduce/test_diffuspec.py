"""DiffuSpec's entry: what a pass reads, and that controls differ in what they are said to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.load import files_of, load_model
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.diffuspec import DiffuSpec
from phasewise.methods.verify.match import Match
from phasewise.model.artefacts import fingerprint
from phasewise.model.model import Model
from phasewise.model.widen import widen
from phasewise.options import parse
from phasewise.reproduce.systems.diffuspec import DRAFT, OtherWords, numbers, weights
from phasewise.reproduce.wide_heads import widen_heads
from phasewise.request.counters import Counters
from phasewise.speculation.heads import folder
from tests import tiny
from tests.draft.fitted import PROMPTS, N, masked_draft


def answered(method: Any) -> Counters:
    """The work of a drafter, whose answers are those of plain decoding."""
    methods = parse({"schedule": "prefill_first"}) | {"decode": Speculative(method, Match())}
    placed = Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    return placed.counters


def test_trigrams_of_other_words_choose_other_guesses_as_long() -> None:
    method = DiffuSpec(str(masked_draft()), least=6, most=6, lam=0.1, tau=1.0)
    true, false = answered(method), answered(OtherWords(method))
    assert true.accepted > false.accepted and true.draft_forwards > 0


def test_the_widened_twin_takes_the_same_draft(tmp_path: Path) -> None:
    """It reads tokens alone: the same tensors, for a model with another fingerprint, and the same guesses."""
    widen(files_of(str(tiny.checkpoint())), tmp_path / "model", 4)
    wide = Model.load(tmp_path / "model")
    shutil.copytree(masked_draft(), tmp_path / "heads")
    config = folder.read_config(masked_draft()) | {folder.OWN: {"base": fingerprint(tiny.model())}}
    (tmp_path / "heads" / folder.CONFIG).write_text(json.dumps(config))
    widen_heads(tmp_path / "heads", tmp_path / "wide", fingerprint(wide), 4)
    counted = []
    for name, model in (("heads", tiny.model()), ("wide", wide)):
        placed = tiny.engine({"draft": f"diffuspec:heads={tmp_path / name},most=6"}, of=model)
        outs = tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N)))
        counted.append((outs, placed.counters.drafted, placed.counters.accepted))
    assert counted[0] == counted[1] and counted[0][2] > N / 2
    with pytest.raises(UserError, match="trained for another model"):
        tiny.engine({"draft": f"diffuspec:heads={tmp_path / 'heads'}"}, of=wide)


def test_weights_are_those_of_every_matrix() -> None:
    """A pass of each model reads all of its matrices once; embeddings are the output matrix."""
    small, large = load_model(DRAFT), load_model("pocket")
    for model in (small, large):
        layer, head = numbers(model.config)
        vectors = (2 * model.config.layers + 1) * model.config.hidden
        assert model.config.layers * layer + head + vectors == model.weight_bytes // 2
    (layer, head), (own, last) = numbers(large.config), numbers(small.config)
    work = Counters()
    work.forwards, work.draft_forwards, work.draft_depth, work.emitted = 3, 2, 4, 6
    case, run = SimpleNamespace(config=large.config), SimpleNamespace(work=work)
    whole = large.config.layers * layer + head
    found = weights(cast(Any, case), cast(Any, run))
    assert found == pytest.approx((3 * whole + 4 * own + 2 * last) / whole / 6)
