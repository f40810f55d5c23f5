"""Sampling that a model's authors recommend: taken where a request says nothing, listed, and turned off by choice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.model.generation import recommended
from phasewise.request.params import Params
from phasewise.serve.completions.schema import AS_MANY_AS_FIT, ChatAsk, CompletionAsk, read
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.service import Service
from tests.serve.running import Server
from tests.serve.tiny_chat import chat_checkpoint

GIVEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "min_p": None,
         "eos_token_id": 2, "max_new_tokens": 7}  # fmt: skip
HI = [{"role": "user", "content": "the"}]
TAKEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 7}


def params(defaults: dict[str, Any], **body: Any) -> Params:
    return read(ChatAsk, json.dumps({"messages": HI, "seed": 1, **body}).encode()).params(defaults)


def model(folder: Path, **given: Any) -> Path:
    shutil.copytree(chat_checkpoint(), folder)
    (folder / "generation_config.json").write_text(json.dumps(given))
    return folder


def test_what_a_request_does_not_say_is_as_recommended() -> None:
    said = params(recommended(GIVEN, Path("f")))
    assert (said.temperature, said.top_k, said.top_p, said.repetition_penalty, said.max_tokens) == (
        0.6,
        20,
        0.95,
        1.05,
        7,
    )
    own = params(recommended(GIVEN, Path("f")), temperature=0, top_k=-1, top_p=1, repetition_penalty=1, max_tokens=9)
    assert own == params({}, temperature=0, max_tokens=9)
    assert params({}) == params(recommended({"do_sample": False, "eos_token_id": 3}, Path("f")))
    assert params({}).max_tokens == AS_MANY_AS_FIT
    short = read(CompletionAsk, b'{"prompt": "a"}').params({"max_new_tokens": 7})
    assert short.max_tokens == 16, "the endpoint has a default of its own"
    assert params({"max_new_tokens": 7}, min_tokens=9).max_tokens == 9


def test_neutral_values_are_neutral() -> None:
    assert params({"temperature": 0.0, "top_k": -1, "top_p": 0.0}).greedy
    assert params({"top_k": -1}).top_k == 0


@pytest.mark.parametrize("given", [{"temperature": "warm"}, {"top_p": 1.5}, {"top_k": 0.5}, {"temperature": -1},
                                   {"repetition_penalty": 0}, {"min_p": True}, {"max_new_tokens": 0}])  # fmt: skip
def test_a_value_that_is_wrong_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"gen.json: {next(iter(given))} is "):
        recommended(given, Path("gen.json"))


def test_where_it_is_read(tmp_path: Path) -> None:
    llm = LLM(str(model(tmp_path / "model", **GIVEN)))
    sampling = {
        chosen: Service(llm, "tiny", ServePolicy(generation_config=chosen)).sampling for chosen in ("auto", "none")
    }
    assert sampling == {"auto": TAKEN, "none": {}}
    file = tmp_path / "other.json"
    file.write_text('{"top_k": 1}')
    assert Service(llm, "tiny", ServePolicy(generation_config=str(file))).sampling == {"top_k": 1}
    folder = ServePolicy(generation_config=str(tmp_path / "model"))
    assert Service(llm, "tiny", folder).sampling == TAKEN
    with pytest.raises(UserError, match="--generation-config"):
        Service(llm, "tiny", ServePolicy(generation_config=str(tmp_path / "gone")))


def test_requests_are_drawn_so(tmp_path: Path) -> None:
    with Server(model=model(tmp_path / "model", top_k=1, temperature=1.8)) as server:
        assert server.client().models.list().data[0].model_extra["default_sampling_params"] == {
            "temperature": 1.8, "top_k": 1,
        }  # fmt: skip

        def texts(path: str, **body: Any) -> set[str]:
            answers = [
                server.post(path, {"model": "tiny", "max_tokens": 6, "seed": i, **body}).json() for i in range(6)
            ]
            return {
                json.dumps(answer.get("choices") or answer.get("content") or answer.get("output")) for answer in answers
            }

        drawn = texts("/v1/chat/completions", messages=HI)
        assert drawn == texts("/v1/chat/completions", messages=HI, temperature=0)
        assert len(texts("/v1/chat/completions", messages=HI, top_k=0)) > 1
        assert len(texts("/v1/completions", prompt="the")) == 1
        message = {"model": "tiny", "max_tokens": 6, "messages": HI}
        assert len({json.dumps(server.post("/v1/messages", message).json()["content"]) for _ in range(6)}) == 1
