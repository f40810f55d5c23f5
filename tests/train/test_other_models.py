"""Everything that is trained for a method can be trained for a model of another tokenizer and another template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phasewise import LLM, catalog
from phasewise.errors import UserError
from phasewise.load import config_of, files_of
from phasewise.train import artefacts, mixture
from phasewise.train.dense import DenseShape
from phasewise.train.mixture import of_model, unpadded
from phasewise.train.tasks import TaskTurn
from phasewise.train.tokenizer import WRITTEN
from tests.train import tiny

SHAPE = DenseShape(2048, 64, 4, 4, 2, 96, head_dim=16)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<stop>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
KNOBS = {
    "evict.longgen": "longgen:window=6",
    "attend.infllm": "infllm:dense_len=20,window=4,topk=1",
    "decode.c2c": "c2c:sharer={other}",
    "decode.kv_prediction": "kv_prediction:model={other}",
    "decode.augment": "augment:latents=4",
    "draft.specdec": "specdec:model={other},stop=head",
    "draft.s2d": "s2d:exits=1+2",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign(tmp_path_factory.mktemp("base") / "model", SHAPE)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign(tmp_path_factory.mktemp("other") / "model", replace(SHAPE, num_hidden_layers=2))


def foreign(folder: Path, shape: DenseShape) -> Path:
    """A checkpoint whose tokenizer has an end token and none of the pocket model's."""
    tiny.lively(shape, folder)
    vocabulary = (folder / "tokenizer.json").read_text()
    for token in WRITTEN:
        vocabulary = vocabulary.replace(token, "<stop>" if token == "<|im_end|>" else f"<of {token[2:-2]}>")
    (folder / "tokenizer.json").write_text(vocabulary)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<stop>", "chat_template": TEMPLATE}))
    return folder


# a model of random weights finds no needle, and so no layer for tidal (tests/attend/test_tidal.py); it answers nothing
@pytest.mark.parametrize("kind", sorted({*artefacts.names()} - {"attend.tidal", "verify.judge"}))
def test_it_is_trained_and_serves(
    kind: str, base: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step or two of the real recipe; what is saved is taken by the model that it was trained for."""
    monkeypatch.setattr(mixture, "sources", lambda held_out: dict(enumerate(tiny.texts())))
    verb, _, name = kind.partition(".")
    method = catalog.build(verb, KNOBS.get(kind, name).format(other=other))
    path = artefacts.trainer(kind)(method, artefacts.ArtefactJob(str(base), tmp_path, tokens=600))
    serving = catalog.spell(verb, replace(method, weights=str(path)))
    llm = LLM(str(base), dtype="float32", **{verb: serving})
    try:
        assert len(llm.generate(["def f(x): return x " * 8], max_tokens=4)[0].tokens) > 0
    finally:
        llm.close()


def test_a_model_that_answers_nothing_has_no_judge(base: Path, other: Path, tmp_path: Path) -> None:
    method = catalog.build("verify", f"judge:mined={other}")
    with pytest.raises(UserError, match="0 unimportant guesses to learn from, and .* are needed: mine more"):
        artefacts.trainer("verify.judge")(method, artefacts.ArtefactJob(str(base), tmp_path, tokens=600))


def test_rows_are_in_the_models_own_words(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "sources", lambda held_out: dict(enumerate(tiny.texts())))
    made = of_model(files_of(str(base)), config_of(str(base)).eos, seed=0)
    asked, answered = made.chat([TaskTurn("Sort: 2 1", "1 2")], None)
    assert made.tokenizer.decode(asked[0]) == "[user] Sort: 2 1[assistant] " and not asked[1]
    assert made.tokenizer.decode(answered[0], skip_special_tokens=False) == "1 2<stop>" and answered[1]


def test_an_end_token_within_a_row_is_no_padding() -> None:
    ids = torch.tensor([[5, 0, 6, 0, 0], [0, 0, 0, 0, 7]])
    assert unpadded(ids, 0).tolist() == [[True, True, True, False, False], [True] * 5]
