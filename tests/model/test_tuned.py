"""Low-rank weights over the model beside them: the same as a model whose files have them added, or refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.errors import UserError, WeightsError
from phasewise.load import model_path
from phasewise.model import tuned
from phasewise.model.artefacts import fingerprint
from phasewise.model.chat import ChatTemplate
from phasewise.model.lowrank import shapes
from phasewise.model.model import Model
from phasewise.model.source import source
from tests import tiny

RANK = 4
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def delta(base: Model, scale: float = 0.15) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    wanted = shapes(base.config, range(base.config.layers), RANK)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in wanted.items()}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pocket draft as `base`, and `mine` over it."""
    folder = tmp_path_factory.mktemp("shelf")
    shutil.copytree(model_path("pocket-draft"), folder / "base")
    base = Model.load(folder / "base")
    about = {"base": fingerprint(base), "over": "base", "command": "none"}
    tuned.save(folder / "mine" / tuned.FILE, delta(base), about)
    return folder


def other(shelf: Path, tensors: dict[str, Tensor] | None = None, **about: Any) -> Path:
    """Another model over the same base, with a file that is wrong in some way."""
    folder = shelf / f"other{len(list(shelf.iterdir()))}"
    base = Model.load(shelf / "base")
    told = {"base": fingerprint(base), "over": "base"} | about
    tuned.save(folder / tuned.FILE, delta(base) if tensors is None else tensors, told)
    return folder


def added(shelf: Path) -> dict[str, Tensor]:
    """Every matrix with what was learned added, worked out one by one."""
    weights, change = load_file(shelf / "base" / "model.safetensors"), load_file(shelf / "mine" / tuned.FILE)
    for layer in range(2):
        for linear, names in PARTS.items():
            a, b = (change[f"{layer}.{linear}.{part}"].double() for part in "ab")
            rows = torch.split(b @ a, [len(weights[f"model.layers.{layer}.{name}.weight"]) for name in names])
            for name, more in zip(names, rows, strict=True):
                key = f"model.layers.{layer}.{name}.weight"
                weights[key] = (weights[key].double() + more).bfloat16()
    return weights


def test_it_is_the_model_whose_files_have_them_added(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf / "base", tmp_path / "whole")
    save_file(added(shelf), tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    prompts = tiny.prompts(30, 9, vocab=4096)
    outs = {}
    for name, path in (("base", shelf / "base"), ("mine", shelf / "mine"), ("whole", tmp_path / "whole")):
        outs[name] = tiny.outs(tiny.run(tiny.engine(of=Model.load(path)), prompts, tiny.greedy(12)))
    assert outs["mine"] == outs["whole"] != outs["base"]
    files = source(shelf / "mine").tensors()
    for name, wanted in added(shelf).items():
        assert torch.equal(files.read(name), wanted) and files.read(name).dtype == wanted.dtype
        assert files.shape(name) == tuple(wanted.shape)


def test_it_is_a_model_of_its_own(shelf: Path) -> None:
    mine, base = Model.load(shelf / "mine"), Model.load(shelf / "base")
    assert fingerprint(mine) != fingerprint(base), "what was trained for the base is refused"
    assert mine.config == base.config and (mine.stack is None) == (base.stack is None)
    assert mine.files.folder == shelf / "mine" and mine.weight_bytes == base.weight_bytes
    assert mine.files.tokenizer().to_str() == base.files.tokenizer().to_str()
    before = mine.files.stamp()
    (shelf / "mine" / tuned.FILE).touch()
    assert mine.files.stamp() != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_it_loads_in_every_dtype(shelf: Path, dtype: torch.dtype) -> None:
    model = Model.load(shelf / "mine", dtype=dtype)
    assert model.dtype == (torch.bfloat16 if dtype == torch.int8 else dtype)
    (out,) = tiny.outs(tiny.run(tiny.engine(of=model), tiny.prompts(20, vocab=4096), tiny.greedy(4)))
    assert len(out) == 4


def test_sums_are_rounded_once(shelf: Path) -> None:
    files, exact = source(shelf / "mine").tensors(), added(shelf)
    name = "model.layers.1.mlp.up_proj.weight"
    wide = files.read(name, torch.float32)
    assert wide.dtype == torch.float32 and not torch.equal(wide, exact[name].float())
    assert torch.equal(wide.bfloat16(), exact[name])


def test_templates_are_its_own_where_it_has_any(shelf: Path, tmp_path: Path) -> None:
    assert source(shelf / "mine").templates() == source(shelf / "base").templates()
    folder = other(shelf)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "hi", "eos_token": "<|im_end|>"}')
    assert ChatTemplate.load(folder).render([]) == "hi"
    assert source(folder).special() == {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize("over", ["", "..", ".", "../base", "base/x", "/tmp"])
def test_the_base_lies_beside_it(shelf: Path, over: str) -> None:
    with pytest.raises(UserError, match="must name the folder beside other"):
        source(other(shelf, over=over))


def test_what_does_not_fit_is_refused_by_name(shelf: Path) -> None:
    with pytest.raises(UserError, match="gone, and nothing is there"):
        source(other(shelf, over="gone"))
    with pytest.raises(WeightsError, match=r"made for other weights \(0123\) than those in .*base"):
        Model.load(other(shelf, base="0123"))
    good = delta(Model.load(shelf / "base"))
    for wrong, says in (
        ({**good, "0.qkv.a": torch.zeros(RANK, 5)}, r"0\.qkv does not fit"),
        ({**good, "0.qkv.a": torch.zeros(RANK + 1, 192)}, r"0\.qkv does not fit"),
        ({**good, "9.qkv.a": good["0.qkv.a"], "9.qkv.b": good["0.qkv.b"]}, r"9\.qkv does not fit.*wanted nothing"),
        ({**good, "0.o.a": torch.zeros(3)}, r"0\.o is no pair of matrices"),
        ({"0.o.a": good["0.o.a"]}, r"0\.o is no pair of matrices"),
        ({**good, "0.o.c": torch.zeros(3, 3)}, r"0\.o\.c are no low-rank weights"),
    ):
        with pytest.raises(WeightsError, match=says):
            Model.load(other(shelf, wrong))
    broken = other(shelf)
    (broken / tuned.FILE).write_bytes(b"not safetensors")
    with pytest.raises(WeightsError, match="not a readable safetensors file"):
        source(broken)
