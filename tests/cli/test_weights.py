"""--weights: which commands take it, what it becomes, and what is said where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import phasewise.serve.app
from phasewise.builder import build
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.engine.limits import Limits
from phasewise.llm import LLM
from phasewise.load import weight_bytes
from phasewise.model.weights_form import WeightsForm
from phasewise.ops import native
from tests.cli.conftest import Cli
from tests.serve.tiny_chat import VOCAB, write_tokenizer
from tests.tiny import write_checkpoint

FORM = "int4:group=32"
LIMITS = Limits(kv_bytes=64 << 20)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("base"), layers=2, hidden=64, vocab=VOCAB)
    write_tokenizer(path)
    return path


def test_a_server_has_the_form(base: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(phasewise.serve.app, "run", lambda llm, **options: seen.update(llm=llm()))
    assert cli("serve", "--model", base, "--weights", FORM, "--kv-bytes", "64M").code == 0
    assert seen["llm"].model.form == WeightsForm("int4", 32)


def test_a_model_wakes_up_in_its_form(base: Path) -> None:
    llm = LLM(str(base), weights=FORM, limits=LIMITS)
    before = llm.generate("the quick brown", max_tokens=8)[0].tokens
    llm.sleep()
    llm.wake()
    assert llm.model.form == WeightsForm("int4", 32)
    assert llm.generate("the quick brown", max_tokens=8)[0].tokens == before
    assert before != LLM(str(base), limits=LIMITS).generate("the quick brown", max_tokens=8)[0].tokens


def test_workers_are_told_the_form() -> None:
    spec = EngineSpec("model", LIMITS, weights=FORM)
    assert EngineSpec.of(json.loads(json.dumps(spec.plain()))) == spec


def test_kv_on_disk_is_of_one_form(base: Path, tmp_path: Path) -> None:
    found = set()
    for form in (None, FORM, "int8:group=32"):
        limits = Limits(kv_bytes=64 << 20, kv_disk=str(tmp_path / str(form)), kv_disk_bytes=1 << 20)
        tiers, identity = build(EngineSpec(str(base), limits, weights=form))._tiers()
        assert tiers is not None
        found.add(identity)
    assert len(found) == 3


def test_a_model_of_a_file_of_models_has_its_own_form(base: Path, tmp_path: Path, cli: Cli,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    wrong = tmp_path / "models.toml"
    wrong.write_text(f'[small]\nmodel = "{base}"\nweights = "int9"\n')
    said = cli("serve", "--models", wrong)
    assert said.code == 2 and "no form of weights is called 'int9'" in said.err


@pytest.mark.parametrize("words", [("serve",), ("eval",), ("bench", "offline"), ("run", "hello"), ("tune",)])
def test_a_wrong_form_is_refused_before_a_model_is_loaded(words: tuple[str, ...], cli: Cli) -> None:
    for form, says in (("int4:group=33", "group=33 is no multiple of 32"), ("int4:calibrate=awq", "Calibrate once")):
        said = cli(*words, "--model", "/no/such/model", "--weights", form)
        assert said.code == 2 and says in said.err and "/no/such" not in said.err


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_forms_and_their_bytes_are_shown(base: Path, cli: Cli) -> None:
    said = cli("models", "show", base, "--weights", FORM, "--dtype", "bfloat16")
    assert said.code == 0
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in said.out.splitlines()]
    found = {row[0]: row[1:] for row in rows if len(row) == 5}
    matrices = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128)
    assert found["INT4_32"][:2] == ["14", f"{matrices:,}"] and found["INT4_32"][3] == "4.50"
    assert found["bfloat16"][3] == "16.00" and "all" in found
    total = weight_bytes(str(base), "bfloat16", FORM)
    assert found["all"][2] == f"{total / 1e6:,.1f} MB"
