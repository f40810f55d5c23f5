"""The zero-padded twin: the same tokens, a large model's cost, and every weight a copy or a zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasewise.errors import UserError
from phasewise.load import files_of
from phasewise.model import widen as module
from phasewise.model.model import Model
from phasewise.model.source import copy_vocabulary
from phasewise.model.tokenizer import Tokenizer
from phasewise.model.widen import LEAST, MOST, WHY_NOT, widen
from tests import seeds, tiny
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.model.families import FAMILIES, hf
from tests.model.reference import save_random

WIDENED = sorted(name for name in FAMILIES if name.partition("-")[0].replace("gemma3", "gemma3_text") not in WHY_NOT)


def said(model: Model, count: int = 24) -> list[list[int]]:
    return tiny.outs(tiny.run(tiny.engine(of=model), tiny.prompts(9, 48), tiny.greedy(count)))


@pytest.mark.parametrize("name", seeds.params(WIDENED, 2, "widened"))
def test_logits_and_tokens_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    save_random(FAMILIES[name](), small)
    widen(files_of(str(small)), tmp_path / "wide", 3)
    ids = torch.randint(3, 60, (2, 20))
    with torch.no_grad():
        models = [hf.AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32).eval()
                  for at in (small, tmp_path / "wide")]  # fmt: skip
        torch.testing.assert_close(models[1](ids).logits, models[0](ids).logits, atol=2e-4, rtol=1e-4)
    assert said(Model.load(tmp_path / "wide")) == said(Model.load(small))


@pytest.mark.parametrize("factor", seeds.params(range(LEAST, MOST + 1), 1, "factors"))
def test_every_factor_gives_the_same_tokens_and_the_bytes_of_the_closed_form(factor: int, tmp_path: Path) -> None:
    total = widen(files_of(str(tiny.checkpoint())), tmp_path, factor)
    wide = Model.load(tmp_path)
    assert said(wide) == said(tiny.model())
    v, h, layers, q, kv, inner = 64, 48 * factor, 4, 48 * factor, 24 * factor, 96 * factor
    values = 2 * v * h + h + layers * (2 * h + 2 * h * q + 2 * h * kv + 3 * h * inner)
    assert total == 4 * values == wide.weight_bytes
    assert total == sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())


def test_no_weight_is_rounded_in_bfloat16(tmp_path: Path) -> None:
    small = tmp_path / "small"
    save_random(FAMILIES["qwen3"](), small).to(torch.bfloat16).save_pretrained(small)
    widen(files_of(str(small)), tmp_path / "wide", 5)
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    for name, tensor in load_file(small / "model.safetensors").items():
        corner = wide[name][tuple(slice(size) for size in tensor.shape)]
        assert torch.equal(corner, tensor), name
        assert set(wide[name].unique().tolist()) <= {0.0, *tensor.unique().tolist()}, name


def test_a_hidden_state_that_is_written_once_says_something_else(tmp_path: Path) -> None:
    """The negative control: zeros where the embeddings were repeated, so that norms divide by less."""
    widen(files_of(str(tiny.checkpoint())), tmp_path, 4)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 48:] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    assert said(Model.load(tmp_path)) != said(tiny.model())


def test_large_twins_lie_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 200_000)
    widen(files_of(str(tiny.checkpoint())), tmp_path, 2)
    files = list(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2 and max(path.stat().st_size for path in files) < 250_000
    assert said(Model.load(tmp_path)) == said(tiny.model())


def test_text_is_read_as_before(tmp_path: Path) -> None:
    files = files_of("pocket-draft")
    widen(files, tmp_path, 2)
    copy_vocabulary(files, tmp_path)
    mine, theirs = Tokenizer.load(tmp_path), Tokenizer.load(files.path)
    assert mine.encode("def f(x):\n    return 12") == theirs.encode("def f(x):\n    return 12")
    assert mine.special["eos_token"] == theirs.special["eos_token"]
    assert files_of(str(tmp_path)).templates() == files.templates()


@pytest.mark.parametrize("family", sorted(WHY_NOT))
def test_families_that_cannot_be_padded_are_refused_by_name(family: str, tmp_path: Path) -> None:
    FAMILIES[family.removesuffix("_text")]().save_pretrained(tmp_path / "small")
    config = tmp_path / "small" / "config.json"
    config.write_text(config.read_text().replace("{", '{"architectures": ["XForCausalLM"],', 1))
    with pytest.raises(UserError, match=f"a {family} cannot be widened: it"):
        widen(files_of(str(tmp_path / "small")), tmp_path / "wide", 2)
    assert not (tmp_path / "wide").exists()


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(str(tiny.checkpoint()))
    for factor in (LEAST - 1, MOST + 1):
        with pytest.raises(UserError, match=f"factor={factor}"):
            widen(files, tmp_path / "new", factor)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine.txt").touch()
    with pytest.raises(UserError, match="kept is not empty"):
        widen(files, tmp_path / "kept", 2)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="another disk, or a smaller factor"):
        widen(files, tmp_path / "new", 2)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "mine.txt", "new"]


def test_the_command_says_how_to_go_on(cli: Cli, tmp_path: Path) -> None:
    assert "--factor 8" in cli("widen", "--help").out
    said = cli("widen", "pocket-draft", "--factor", 2, "--out", tmp_path / "wide")
    assert said.code == 0 and f"--model {tmp_path / 'wide'}" in said.out
    again = cli("widen", "pocket-draft", "--factor", 2, "--out", tmp_path / "wide")
    assert again.code == 2 and "is not empty" in again.err
    assert cli("widen", "pocket-draft", "--factor", 9, "--out", tmp_path / "more").code == 2
