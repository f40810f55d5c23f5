"""NaN and infinity, of broken weights or of overflow, end the requests that meet them, with their layer and dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasewise.engine.finite import FiniteCheck
from phasewise.errors import PhasewiseError
from phasewise.llm import LLM
from tests.serve.tiny_chat import VOCAB, write_tokenizer
from tests.tiny import write_checkpoint

BROKEN = 7  # a token whose embedding is broken
PROMPT, MATE = [BROKEN, 11, 12, 13], [21, 22, 23, 24]
NAN, INF = float("nan"), float("inf")
PLACES = {
    "model.norm.weight": "final norm", "lm_head.weight": "output head", "model.embed_tokens.weight": "embeddings",
    "model.layers.0.mlp.down_proj.weight": "layer 0 (of 2", "model.layers.1.self_attn.v_proj.weight": "layer 1 (of 2",
    "model.layers.1.input_layernorm.weight": "layer 1 (of 2",
}  # fmt: skip


def sound(folder: Path) -> None:
    write_checkpoint(folder, layers=2, vocab=VOCAB, context=128)
    write_tokenizer(folder)


def model(folder: Path, name: str, value: float, row: int = BROKEN) -> Path:
    sound(folder)
    file = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[name].view(tensors[name].shape[0], -1)[row, 0] = value
    save_file(tensors, file, {"format": "pt"})
    return folder


def say(llm: LLM, prompts: list[list[int]], **more: Any) -> list[Any]:
    return llm.generate(prompts, max_tokens=6, ignore_eos=True, **more)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_broken_weights_are_named(dtype: str, place: str, value: float, tmp_path: Path) -> None:
    llm = LLM(str(model(tmp_path / "model", place, value)), dtype=dtype)
    for more in ({}, {"temperature": 1.0, "seed": 3}, {"logprobs": 1}, {"repetition_penalty": 1.2}):
        (answer,) = say(llm, [PROMPT], **more)
        assert answer.left.how == "failed" and answer.tokens == [], more
        assert PLACES[place] in answer.left.reason and dtype in answer.left.reason, answer.left.reason
    with pytest.raises(PhasewiseError, match="not finite"):
        llm.embed([PROMPT])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("verbs", [{}, {"draft": "prompt_lookup"}, {"schedule": "sarathi:budget=2"}])
def test_mates_in_a_step_are_not_touched(verbs: dict[str, str], dtype: str, tmp_path: Path) -> None:
    llm = LLM(str(model(tmp_path / "model", "model.embed_tokens.weight", NAN)), dtype=dtype, **verbs)
    (alone,) = say(llm, [MATE])
    bad, good = say(llm, [PROMPT, MATE])
    assert bad.left.how == "failed" and good.tokens == alone.tokens and good.left.how == "finished"


def test_overflow_in_float16(tmp_path: Path) -> None:
    place = "model.layers.1.mlp.down_proj.weight"
    sound(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    for name in (place, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"):
        tensors[name] *= 3000.0
    save_file(tensors, file, {"format": "pt"})
    (half,) = say(LLM(str(tmp_path / "model"), dtype="float16"), [MATE])
    assert half.left.how == "failed"
    assert "layer 1 (of 2" in half.left.reason and "float16" in half.left.reason and "bfloat16" in half.left.reason
    (wide,) = say(LLM(str(tmp_path / "model"), dtype="bfloat16"), [MATE])
    assert wide.left.how == "finished"


def test_overflow_of_logits_alone(tmp_path: Path) -> None:
    """What the last layer gives is finite; its product with the head is not."""
    sound(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors["lm_head.weight"][5] = 60_000.0 * torch.sign(tensors["lm_head.weight"][5])
    tensors["model.norm.weight"] *= 40.0
    save_file(tensors, file, {"format": "pt"})
    llm = LLM(str(tmp_path / "model"), dtype="float16")
    for more in ({}, {"temperature": 1.0}):
        answers = say(llm, [MATE, PROMPT], **more)
        assert any(answer.left.how == "failed" and "output head" in answer.left.reason for answer in answers)


def test_plain_decoding_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where it says token 0, which is what a row of NaN seems to choose."""
    sound(tmp_path / "model")
    looks: list[int] = []
    whole = FiniteCheck._finite

    def counted(self: FiniteCheck, spans: Any, hidden: Any) -> bool:
        looks.append(len(spans))
        return whole(self, spans, hidden)

    monkeypatch.setattr(FiniteCheck, "_finite", counted)
    llm = LLM(str(tmp_path / "model"))
    answers = say(llm, [MATE, PROMPT])
    assert sum(looks) == sum(answer.tokens.count(0) for answer in answers) < 12
    say(llm, [MATE], temperature=1.0)
    assert sum(looks) >= 6
