"""Files of adapters: what PEFT writes is read, and whatever is wrong is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasewise.errors import UserError
from phasewise.model.lora import CONFIG, PICKLED, PREFIX, WEIGHTS, read
from tests import peft, tiny

Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


def config() -> Any:
    return tiny.model().config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return peft.write(tmp_path / "lora", tiny.checkpoint(), rank=3)


def test_what_several_layers_of_the_checkpoint_have_is_one_pair(tmp_path: Path) -> None:
    """q, k and v are one linear layer: their A below each other, B zero where an output is of another A."""
    made = peft.write(tmp_path, tiny.checkpoint(), rank=3, targets=("q_proj", "v_proj"), lora_alpha=6)
    found, stored = read(made, config(), 3), load_file(made / WEIGHTS)
    a, b = found.tensors["0.qkv.a"], found.tensors["0.qkv.b"]
    assert (a.shape, b.shape, found.rank) == ((6, 48), (96, 6), 3)
    q, v = (stored[f"{PREFIX}model.layers.0.self_attn.{name}.lora_B.weight"] for name in ("q_proj", "v_proj"))
    assert torch.equal(b[:48, :3], 2 * q) and torch.equal(b[72:, 3:], 2 * v)
    assert not b[48:72].any() and not b[:48, 3:].any() and not b[72:, :3].any()
    assert torch.equal(a[3:], stored[f"{PREFIX}model.layers.0.self_attn.v_proj.lora_A.weight"])
    assert {key.split(".")[1] for key in found.tensors} == {"qkv"}


def said(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        known = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**known, **settings}))

    return change


def tensors(**given: torch.Tensor | None) -> Callable[[Path], None]:
    """`__` in a name stands for a dot; None takes a tensor out."""

    def change(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS) | {name.replace("__", "."): each for name, each in given.items()}
        save_file({name: each for name, each in stored.items() if each is not None}, folder / WEIGHTS)

    return change


def text(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) * 2 // 3])


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / PICKLED)


A, B = (f"{Q}.lora_{half}.weight".replace(".", "__") for half in "AB")
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "dora": (said(use_dora=True), "use_dora = True is not supported"),
    "modules": (said(modules_to_save=["lm_head"]), "modules_to_save"),
    "bias": (said(bias="all"), "bias = 'all'"),
    "pissa": (said(init_lora_weights="pissa"), "init_lora_weights = 'pissa'"),
    "one for true": (said(use_dora=1), "use_dora = 1"),
    "other method": (said(peft_type="IA3"), "only LORA"),
    "head by name": (said(target_modules=["q_proj", "lm_head"]), "target_modules names lm_head"),
    "no number": (said(lora_alpha="much"), "lora_alpha = 'much' is not a number"),
    "infinite": (said(lora_alpha=float("inf")), "lora_alpha = inf"),
    "slow pattern": (said(alpha_pattern={"(a+)+$": 2}), "alpha_pattern names"),
    "no json": (text(CONFIG, b"{"), "is not JSON"),
    "deep json": (text(CONFIG, b"[" * 200_000), "is not JSON"),
    "a list": (text(CONFIG, b"[]"), "JSON object"),
    "no settings": (lambda folder: (folder / CONFIG).unlink(), f"has no {CONFIG}"),
    "no tensors file": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "pickled": (pickled, "nothing is ever unpickled"),
    "truncated": (cut, "may be truncated"),
    "rubbish": (text(WEIGHTS, b"\xff" * 100), "not a readable safetensors file"),
    "another width": (tensors(**{A: torch.ones(3, 40)}), r"A \[3, 40\].* wanted A \[r, 48\].* another base's"),
    "another rank": (tensors(**{B: torch.ones(48, 5)}), r"B \[48, 5\]"),
    "a vector": (tensors(**{A: torch.ones(48)}), r"A \[48\]"),
    "half": (tensors(**{B: None}), "has no lora_B"),
    "not a number": (tensors(**{A: torch.full((3, 48), torch.nan)}), "lora_A of .*q_proj has .* not finite"),
    "too large": (tensors(**{B: torch.full((48, 3), 3e38)}), "lora_B of .*q_proj has values that are not finite"),
    "whole numbers": (tensors(**{A: torch.ones(3, 48, dtype=torch.int32)}), "int32"),
    "magnitudes": (tensors(x__lora_magnitude_vector=torch.ones(3)), "DoRA"),
    "embedding": (tensors(x__lora_embedding_A=torch.ones(3)), "embeddings or the head"),
    "head": (tensors(lm_head__lora_A__weight=torch.ones(3, 48), lm_head__lora_B__weight=torch.ones(64, 3)),
             "embeddings or the head"),
    "a whole matrix": (tensors(model__layers__0__mlp__up_proj__weight=torch.ones(3, 3)), "no half of a low-rank pair"),
    "another layer": (tensors(**{name.replace("layers__0", "layers__9"): torch.ones(shape)
                                 for name, shape in ((A, (3, 48)), (B, (48, 3)))}), "the model has no layer"),
    "rank": (said(), "has rank 3, and the most is 2: raise --max-lora-rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_served_is_refused_by_name(name: str, folder: Path) -> None:
    change, why = HOSTILE[name]
    read(folder, config(), 3)
    change(folder)
    with pytest.raises(UserError, match=why):
        read(folder, config(), 2 if name == "rank" else 3)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    """A mixture's attention can have an adapter; its experts cannot."""
    base = tiny.checkpoint(experts=4)
    read(peft.write(tmp_path / "attention", base, targets=peft.ATTENTION), tiny.model(experts=4).config, 8)
    with pytest.raises(UserError, match="of a mixture of experts"):
        read(peft.write(tmp_path / "experts", base, targets=("w1",)), tiny.model(experts=4).config, 8)
