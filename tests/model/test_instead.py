"""Tensors instead of some of the model beside them: the same as a model whose files have them, or refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasewise.errors import UserError, WeightsError
from phasewise.load import files_of, model_path
from phasewise.model import instead
from phasewise.model.artefacts import fingerprint
from phasewise.model.directory import Directory
from phasewise.model.kv_heads import convert, means
from phasewise.model.model import Model
from phasewise.model.source import source
from tests import tiny


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pocket model as `base`, one with fewer KV heads as `whole`, and what differs as `mine` over the base."""
    folder = tmp_path_factory.mktemp("shelf")
    shutil.copytree(model_path("pocket"), folder / "base")
    files = files_of(str(folder / "base"))
    convert(files, 1, means(Model.load(folder / "base").config, 1), folder / "whole")
    written = instead.save(folder / "mine", Directory(folder / "base"), Directory(folder / "whole"), "none")
    assert written == 8 * 2 * 256 * (2 * 256 + 2 * 64), "q, k, v and o of every layer, in two bytes each"
    return folder


def test_it_is_the_model_whose_files_have_them(shelf: Path) -> None:
    prompts = tiny.prompts(30, 9, vocab=4096)
    mine, whole = (Model.load(shelf / name) for name in ("mine", "whole"))
    outs = [tiny.outs(tiny.run(tiny.engine(of=model), prompts, tiny.greedy(12))) for model in (mine, whole)]
    assert outs[0] == outs[1] and mine.config == whole.config and mine.config.kv_heads == 1
    assert fingerprint(mine) == fingerprint(whole) != fingerprint(Model.load(shelf / "base"))
    files, wanted = source(shelf / "mine").tensors(), load_file(shelf / "whole" / "model.safetensors")
    assert files.where.keys() == wanted.keys()
    assert all(torch.equal(files.read(name), tensor) for name, tensor in wanted.items())
    assert files.shape("model.layers.0.self_attn.k_proj.weight") == (64, 256)
    assert (shelf / "mine" / instead.FILE).stat().st_size < 3 << 20


def test_it_talks_as_its_base(shelf: Path) -> None:
    mine, base = source(shelf / "mine"), source(shelf / "base")
    assert mine.tokenizer().to_str() == base.tokenizer().to_str()
    assert mine.templates() == base.templates() and mine.special() == base.special()
    before = mine.stamp()
    (shelf / "mine" / instead.FILE).touch()
    assert mine.stamp() != before


def test_what_does_not_fit_is_refused_by_name(shelf: Path) -> None:
    tensors = load_file(shelf / "mine" / instead.FILE)
    good = {"base": fingerprint(Model.load(shelf / "base")), "over": "base"}
    folder = shelf / "other"
    folder.mkdir()
    shutil.copy(shelf / "mine" / "config.json", folder)
    for told, says in (
        (good | {"over": "../base"}, "must name the folder beside other"),
        (good | {"over": "gone"}, "gone, and nothing is there"),
        (good | {"base": "0123"}, r"was made from other weights \(0123\) than those in .*base"),
    ):
        save_file(tensors, folder / instead.FILE, metadata=told)
        with pytest.raises(UserError, match=says):
            Model.load(folder)
    save_file({**tensors, "more": torch.zeros(2)}, folder / instead.FILE, metadata=good)
    with pytest.raises(WeightsError, match="left over in instead.safetensors: more"):
        Model.load(folder)
