"""Every prompt that is measured begins with what its model expects before a text, and has the length asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.bench.prompts import begin_of, prompts_from, random_prompts, text_prompts
from phasewise.bench.quality import TextCodec
from phasewise.bench.questions import CODE, made
from phasewise.bench.workloads import Shot, fit, lengths, workload
from phasewise.engine.limits import Limits
from phasewise.llm import LLM
from phasewise.load import model_path
from phasewise.model.tokenizer import Tokenizer
from phasewise.reproduce import answers
from phasewise.reproduce import workload as reproduced
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.system import Quality, Setting
from phasewise.request.request import Request
from tests import tiny

BEGIN = Tokenizer.load(model_path("pocket")).id("<|begin|>")
VOCAB = 8192


def begins(prompt: list[int]) -> bool:
    """Whether it has the begin token first, and nowhere else."""
    return prompt[0] == BEGIN and prompt.count(BEGIN) == 1


@pytest.mark.parametrize("kind", ["random", "code", "file"])
def test_prompts_of_benches(kind: str, tmp_path: Path) -> None:
    if kind == "file":
        (tmp_path / "text.txt").write_text("It was the best of times. " * 40)
        kind = str(tmp_path / "text.txt")
    prompts = prompts_from(kind, "pocket", VOCAB, 3)
    for length in (1, 2, 60):
        prompt = prompts(length)
        assert len(prompt) == length and prompt[0] == BEGIN
    assert len(prompts.piece(40)) == 40 and BEGIN not in prompts.piece(40)[:1]


def test_a_model_without_a_begin_token_gets_none() -> None:
    plain = str(tiny.checkpoint())  # it has no tokenizer either
    assert begin_of(plain) == []
    assert prompts_from("random", plain, 64, 3)(9) == random_prompts(64, 3)(9)


def test_shared_and_cut_prompts_begin_once() -> None:
    prompts = text_prompts(range(100, 900), 0, [BEGIN])
    shots = workload(lengths("shared:prefix=40,prompt=5,new=7"), 3, prompts)
    assert all(begins(shot.prompt) and len(shot.prompt) == 45 for shot in shots)
    (cut,) = fit([Shot(0.0, [BEGIN, *range(100, 199)], 50)], 64, [BEGIN])
    assert cut.prompt == [BEGIN, *range(168, 199)] and len(cut.prompt) == 64 - 32


def test_made_questions_begin_once() -> None:
    tokenizer = Tokenizer.load(model_path("pocket"))
    found = made(lambda messages: [1], lambda text: tokenizer.encode(text[:9000], False), tokenizer.begin, 2, 0)
    assert all(begins(prompt) for prompt in found[CODE])


def test_conversations_begin_once() -> None:
    """The pocket model's chat template writes the token itself."""
    llm = LLM("pocket", limits=Limits(kv_bytes=16 << 20))
    said = [{"role": "user", "content": "What is 2 + 3?"}]
    text = TextCodec.load(Path(model_path("pocket")))
    assert text.begin == [BEGIN] and text.chat(said) == llm.encode_chat(said)
    assert begins(llm.encode_chat(said))
    assert begins(llm.encode("import os")) and llm.encode([7, 8]) == [7, 8]


def test_prompts_of_reproduce() -> None:
    asked = reproduced.PromptSource(VOCAB, 0, False)
    assert all(begins(asked.code(length)) and len(asked.code(length)) == length for length in (2, 32, 300))
    assert asked.random(9)[0] == BEGIN and len(asked.random(9)) == 9
    assert begins(asked.begun(asked.piece(20) * 3)) and BEGIN not in asked.piece(50)
    assert reproduced.PromptSource(64, 0, True).code(9) == random_prompts(64, 0)(9)  # another vocabulary
    assert begins(reproduced.stretch(1000, 50)) and len(reproduced.stretch(1000, 50)) == 50
    assert reproduced.stretch_to(1000, 50)[1:] == list(reproduced.code_ids()[951:1000])
    for prompt, _ in asked.chats("arithmetic", 2):
        assert begins(prompt)


@pytest.mark.parametrize("edited", [0, 8])
def test_texts_whose_loss_reproduce_takes(edited: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def watched(prompt: list[int], *rest: object, **more: object) -> Request:
        seen.append(list(prompt))
        return Request(prompt, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(answers, "Request", watched)
    quality = Quality(("code",), allowed=0.1, examples=2, window=160, given=16, edited=edited)
    with Lab.open(Scale(quick=True)) as lab:
        found = answers.code(lab, Setting(), quality, 2)
    assert len(found) == 2 and seen and all(begins(prompt) for prompt in seen)
