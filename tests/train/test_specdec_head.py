"""The acceptance head of draft.specdec: labels where p and q are tables, its loss by hand, and what ships."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.llm import LLM
from phasewise.load import config_of, files_of, load_model
from phasewise.methods.draft.specdec import SpecDec
from phasewise.model import artefacts
from phasewise.request.params import Params
from phasewise.train.artefacts import ArtefactJob, draft_specdec
from phasewise.train.artefacts.draft_specdec import (
    DRAFTED,
    DTYPE,
    REJECTED,
    LabelledStates,
    StateBatches,
    labelled,
    measured,
    train,
    weighted_loss,
)
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.target import FrozenTarget, SeenBlock
from phasewise.train.heads.text import unlooped
from phasewise.train.mixture import Stage
from phasewise.train.tokenizer import plain
from phasewise.train.wording import Templated
from phasewise.train.written import WrittenText, of_mixture
from tests.speculation.markov import table

V, PAD = 6, 0


class TableModel:
    """A model whose next token hangs on the last one alone. Its states say where they are: behind which token, which
    one before that, and at which place."""

    def __init__(self, seed: int) -> None:
        self.table = table(V, seed)

    def see(self, block: TokenBlock) -> SeenBlock:
        before = F.pad(block.ids, (1, 0))[:, :-1]
        return SeenBlock(block, torch.stack((block.ids, before, block.positions), -1).float())

    def log_chances(self, states: Tensor) -> Tensor:
        return self.table.log()[states[:, 0].long()].float()


def test_labels_where_p_and_q_are_tables() -> None:
    """The chance of a drawn token is that after the text's own beginning; the state is that of a text in which most
    tokens are drawn ones."""
    target, draft = TableModel(1), TableModel(2)
    text = WrittenText([1, 2], [3, 4, 5, 3] * 1000)
    found = labelled(target, draft, [text], PAD, 0)  # type: ignore[arg-type]
    whole, ratios = text.prompt + text.reply, (target.table / draft.table).clamp(max=1.0)
    drawn, before, places = found.states.long().unbind(-1)
    own = torch.tensor(whole)[places - 1]
    torch.testing.assert_close(found.accepted, ratios[own, drawn], atol=1e-5, rtol=0)
    share = len(places) / len(text.reply)
    assert share == pytest.approx(DRAFTED, abs=0.03) and len(set(places.tolist())) == len(places)
    often = torch.bincount(drawn, minlength=V) / len(drawn)
    assert float((often - draft.table[own].mean(0)).abs().max()) < 0.04, "tokens are the draft model's own draws"
    kept = float((before == own).double().mean())
    same = float(draft.table[torch.tensor(whole)[:-1], torch.tensor(whole)[1:]].mean())
    assert kept == pytest.approx(1 - DRAFTED + DRAFTED * same, abs=0.04), "and so are those before them"


def test_a_rejection_weighs_more() -> None:
    logits, accepted = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)), torch.rand(50)
    total = weight = 0.0
    for (no, yes), a in zip(logits.double().tolist(), accepted.double().tolist()):
        both = math.log(math.exp(no) + math.exp(yes))
        total += REJECTED * (1 - a) * (both - no) + a * (both - yes)
        weight += REJECTED * (1 - a) + a
    assert float(weighted_loss(logits, accepted)) == pytest.approx(total / weight, abs=1e-5)


def test_no_constant_is_better_than_the_one_that_is_reported() -> None:
    judged = LabelledStates(torch.zeros(200, 4), torch.rand(200, generator=torch.Generator().manual_seed(1)))
    found = {bias: measured({"out.weight": torch.zeros(2, 4), "out.bias": torch.tensor([0.0, bias])}, judged)
             for bias in torch.linspace(-3, 3, 121).tolist()}  # fmt: skip
    (constant,) = {each["constant"] for each in found.values()}
    assert min(each["loss"] for each in found.values()) == pytest.approx(constant, abs=1e-3)
    assert all(each["loss"] >= constant - 1e-6 for each in found.values())


def test_batches_hang_on_the_step_alone() -> None:
    states = LabelledStates(torch.arange(50.0)[:, None], torch.rand(50))
    stage = Stage(1.0, 1, 8, code=0.0, long=0.0, copies=0.0)
    one, same, other = (StateBatches(states, 0).step(step, stage).states for step in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other) and one.shape == (8, 1)


def test_a_run_writes_what_the_drafter_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pocket models, a few texts; a run that goes on from its end gives the same head."""
    monkeypatch.setattr(draft_specdec, "EPOCHS", 2)
    monkeypatch.setattr(draft_specdec, "write", lambda *_: (written("greedy")[:2], written("greedy")[2:4], 4))
    job = ArtefactJob("pocket", tmp_path, 2000)
    made = train(SpecDec(), job)
    report = json.loads((tmp_path / "specdec.json").read_text())
    assert report["learned"] and report["judged"] and 0 < report["accepted"] < 1
    model, draft = load_model("pocket"), load_model("pocket-draft")
    wanted = SpecDec().artefact(model.config, draft.config, artefacts.fingerprint(draft))
    first = artefacts.load(model, wanted, str(made))
    assert artefacts.setting(made) == f"specdec:stop=head,model=pocket-draft,blocks=1,weights={made}"
    again = artefacts.load(model, wanted, str(train(SpecDec(), ArtefactJob("pocket", tmp_path, 2000, resume=True))))
    assert all(torch.equal(first[name], again[name]) for name in wanted.shapes)
    with pytest.raises(UserError, match="resume it as it was"):
        train(SpecDec(blocks=0), ArtefactJob("pocket", tmp_path, 2000, resume=True))


def test_draft_models_of_other_tokenizers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_specdec, "config_of", lambda name: config_of("pocket") if name == "pocket" else _Other())
    with pytest.raises(UserError, match="choose a draft model of the same tokenizer"):
        train(SpecDec(model="other"), ArtefactJob("pocket", tmp_path))


class _Other:
    vocab = 7


# ---- what ships
@cache
def written(how: str) -> list[WrittenText]:
    """What pocket says after held-out source and questions, in turn, without its loops."""
    params = Params(max_tokens=64, ignore_eos=True, temperature=0.0 if how == "greedy" else 1.0, seed=3)
    wording = Templated(files_of("pocket"), config_of("pocket").eos)
    stream = plain(wording.tokenizer, "\n\n".join(sources(held_out=True).values()))
    prompts = [of_mixture(wording, stream, 200, 1, True)(i) for i in range(40)]
    llm = LLM("pocket")
    outputs: list[Any] = llm.generate(prompts, params)
    return unlooped([WrittenText(prompt, list(output.tokens)) for prompt, output in zip(prompts, outputs)])


@pytest.mark.parametrize("how", ["greedy", "drawn"])
def test_the_head_that_ships_beats_every_constant(how: str) -> None:
    """Over text that nobody has learned; a head with random weights does not."""
    target, draft = FrozenTarget("pocket", DTYPE), FrozenTarget("pocket-draft", DTYPE)
    judged = labelled(target, draft, written(how), PAD, 0)
    wanted = SpecDec().artefact(target.model.config, draft.model.config, draft.fingerprint)
    ours, anyones = (
        measured({name: each.float() for name, each in artefacts.load(target.model, wanted, weights).items()}, judged)
        for weights in ("auto", "random:0")
    )
    assert ours["loss"] < ours["constant"] < anyones["loss"]
