"""Log-probabilities over HTTP, through the real `openai` package: they are `transformers`' own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import openai
import pytest
import torch

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import Server
from tests.serve.tiny_chat import VOCAB, chat_checkpoint

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"
CLOSE = {"abs": 2e-4}
RECIPES = {"guess": {"draft": "prompt_lookup:k=4,min_match=1"}, "tree": {"draft": "token_recycling"}}


@pytest.fixture(scope="module")
def many() -> Iterator[Server]:
    with Server(recipes=RECIPES) as running:
        yield running


@pytest.fixture(scope="module")
def placed() -> Iterator[Server]:
    """Prompts in one process, tokens in another."""
    with Server(verbs={"place": "disaggregated"}, limits={"cluster": "processes"}) as running:
        yield running


@cache
def twin() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(chat_checkpoint(), dtype=torch.float32).eval()


@torch.inference_mode()
def truth(tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [len(tokens), V] by `transformers`: row i of the token at i + 1."""
    rows: torch.Tensor = twin()(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)
    return rows


def ids_of(llm: LLM, entries: Sequence[Any]) -> list[int]:
    """The tokens of a chat's entries, by their bytes, which no two of them share."""
    by_bytes = {llm.tokenizer.raw(i): i for i in range(KNOWN)}
    assert len(by_bytes) == KNOWN and not any(llm.tokenizer.raw(i) for i in range(KNOWN, VOCAB))
    return [by_bytes[bytes(entry.bytes)] for entry in entries]


def check_chat(llm: LLM, prompt: Sequence[int], content: Sequence[Any], top: int) -> None:
    tokens = ids_of(llm, content)
    rows = truth([*prompt, *tokens])
    for i, entry in enumerate(content):
        row = rows[len(prompt) + i - 1]
        assert entry.logprob == pytest.approx(float(row[tokens[i]]), **CLOSE)
        best = row.topk(top) if top else None
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(
            best.values.tolist() if best else [], **CLOSE
        )
        written = [each for each in entry.top_logprobs if each.bytes]
        for each, other in zip(written, ids_of(llm, written)):
            assert each.logprob == pytest.approx(float(row[other]), **CLOSE)


KNOWN = 303  # tokens that have a text; the model's vocabulary is padded
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16, "logprobs": True,
    "extra_body": {"ignore_eos": True}, "logit_bias": {str(i): -100.0 for i in range(KNOWN, VOCAB)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("tiny", {"temperature": 1.3, "seed": 5, "n": 3, "presence_penalty": 1}),
        *((f"tiny@{recipe}", {"temperature": 0}) for recipe in RECIPES),
    ],
)
def test_chats(many: Server, llm: LLM, name: str, knobs: dict[str, Any]) -> None:
    client, prompt = many.client(), llm.encode_chat(BODY["messages"])
    whole = client.chat.completions.create(model=name, top_logprobs=4, **BODY, **knobs)
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 16
        check_chat(llm, prompt, choice.logprobs.content, 4)
    parts: dict[int, list[Any]] = {}
    for chunk in client.chat.completions.create(model=name, top_logprobs=4, stream=True, **BODY, **knobs):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                parts.setdefault(choice.index, []).extend(choice.logprobs.content or [])
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert [(e.token, e.bytes) for e in parts[choice.index]] == [
            (e.token, e.bytes) for e in choice.logprobs.content or []
        ]
        check_chat(llm, prompt, parts[choice.index], 4)


def test_tokens_in_other_processes(placed: Server, llm: LLM) -> None:
    prompt = llm.encode_chat(BODY["messages"])
    done = placed.client().chat.completions.create(model="tiny", top_logprobs=2, temperature=1, seed=3, n=2, **BODY)
    for choice in done.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        check_chat(llm, prompt, choice.logprobs.content, 2)


def test_without_others_beside(client: openai.OpenAI, llm: LLM) -> None:
    done = client.chat.completions.create(model="tiny", **BODY)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and logprobs.refusal is None
    assert all(entry.top_logprobs == [] for entry in logprobs.content)
    check_chat(llm, llm.encode_chat(BODY["messages"]), logprobs.content, 0)


def test_nobody_is_told_unasked(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "messages": BODY["messages"], "max_tokens": 3}
    assert client.chat.completions.create(**body).choices[0].logprobs is None
    assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3).choices[0].logprobs is None


def check_completion(llm: LLM, tokens: Sequence[int], logprobs: Any, start: int, top: int) -> None:
    """`logprobs` are of tokens[start:]."""
    rows = truth(tokens)
    assert logprobs.tokens == [llm.tokenizer.raw(token).decode("utf-8", "replace") for token in tokens[start:]]
    for i, at in enumerate(range(start, len(tokens))):
        if at == 0:
            assert logprobs.token_logprobs[i] is None and logprobs.top_logprobs[i] is None
            continue
        row, told = rows[at - 1], logprobs.top_logprobs[i]
        assert logprobs.token_logprobs[i] == pytest.approx(float(row[tokens[at]]), **CLOSE)
        assert told[logprobs.tokens[i]] >= logprobs.token_logprobs[i]
        if top:
            assert max(told.values()) == pytest.approx(float(row.max()), **CLOSE)
        assert len(told) <= top + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
def test_completions(client: openai.OpenAI, llm: LLM, stream: bool, top: int) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 4}
    tokens = llm.generate(PROMPT, Params(max_tokens=12, temperature=1.0, seed=4))[0].tokens
    made: Any = client.completions.create(logprobs=top, stream=stream, **body)
    choices = [choice for chunk in made for choice in chunk.choices] if stream else made.choices
    prompt = llm.encode(PROMPT)
    told = 0
    for choice in choices:
        if choice.logprobs is not None and choice.logprobs.tokens:
            upto = told + len(choice.logprobs.tokens)
            check_completion(llm, [*prompt, *tokens[:upto]], choice.logprobs, len(prompt) + told, top)
            told = upto
    assert told == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_scored(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    made: Any = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=2, n=2, stream=stream
    )
    prompt, said = llm.encode(PROMPT), llm.generate(PROMPT, max_tokens=4)[0]
    choices = [choice for chunk in made for choice in chunk.choices] if stream else made.choices
    for index in (0, 1):
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        text = ""
        for choice in (each for each in choices if each.index == index):
            text += choice.text
            for key in found if choice.logprobs else ():
                found[key] += getattr(choice.logprobs, key)
        assert text == PROMPT + said.text
        check_completion(llm, [*prompt, *said.tokens], type("Logprobs", (), found), 0, 2)
        starts = [*found["text_offset"][: len(prompt)], len(PROMPT)]
        assert [text[a:b] for a, b in pairwise(starts)] == found["tokens"][: len(prompt)]


def test_what_an_evaluation_sends(many: Server, llm: LLM) -> None:
    """Loglikelihoods of continuations: token ids, echoed, one token more, and again, so that prefixes are met."""
    contexts = [llm.encode("the quick brown fox " * 6), llm.encode("the lazy dog")]
    wholes = [[*context, *llm.encode(" jumps over")] for context in contexts]
    for name in ("tiny", "tiny@guess"):
        for most in (1, 0, 1):
            done = many.client().completions.create(
                model=name, prompt=wholes, temperature=0, max_tokens=most, logprobs=1, seed=1234, echo=True
            )
            for choice, context, whole in zip(sorted(done.choices, key=lambda c: c.index), contexts, wholes):
                assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
                end = -1 if most else None
                own = choice.logprobs.token_logprobs[len(context) : end]
                rows = truth(whole)
                want = [float(rows[at - 1, whole[at]]) for at in range(len(context), len(whole))]
                assert own == pytest.approx(want, **CLOSE)
                assert choice.logprobs.top_logprobs is not None
                tops = choice.logprobs.top_logprobs[len(context) : end]
                greedy = all(tok == max(top.values()) for tok, top in zip(own, tops))
                assert greedy == all(int(rows[at - 1].argmax()) == whole[at] for at in range(len(context), len(whole)))
                assert choice.finish_reason == "length"


def test_prompt_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    body = {"prompt_logprobs": 2}
    done = client.completions.create(model="tiny", prompt=[PROMPT, "the"], max_tokens=0, extra_body=body)
    assert done.usage is not None and done.usage.completion_tokens == 0
    for choice, text in zip(done.choices, (PROMPT, "the")):
        assert choice.text == "" and choice.logprobs is None
        check_prompt(llm, llm.encode(text), choice.prompt_logprobs)  # type: ignore[attr-defined]
    said = client.chat.completions.create(model="tiny", messages=BODY["messages"], max_tokens=2, extra_body=body)
    check_prompt(llm, llm.encode_chat(BODY["messages"]), said.prompt_logprobs)  # type: ignore[attr-defined]


def check_prompt(llm: LLM, tokens: Sequence[int], told: Sequence[Any]) -> None:
    rows = truth(tokens)
    assert told[0] is None and len(told) == len(tokens)
    for at in range(1, len(tokens)):
        own = told[at][str(tokens[at])]
        assert own["logprob"] == pytest.approx(float(rows[at - 1, tokens[at]]), **CLOSE)
        assert own["decoded_token"] == llm.tokenizer.raw(tokens[at]).decode("utf-8", "replace")
        assert min(entry["rank"] for entry in told[at].values()) == 1 and len(told[at]) in (2, 3)
        for token, entry in told[at].items():
            assert entry["logprob"] == pytest.approx(float(rows[at - 1, int(token)]), **CLOSE)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"logprobs": 3}, "logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 0, "echo": True}, "max_tokens"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_mistakes_are_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    asked = {"messages": BODY["messages"]} if path.startswith("chat") else {"prompt": PROMPT}
    answer = server.post(f"/v1/{path}", {"model": "tiny", **asked, **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_diffusion_has_none(llm: LLM) -> None:
    with Server(verbs={"decode": "block_diffusion"}) as running:
        answer = running.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, "logprobs": 1})
        assert answer.status_code == 400 and "block_diffusion" in answer.json()["error"]["message"]


def test_in_python(llm: LLM) -> None:
    (said,) = llm.generate(PROMPT, max_tokens=5, logprobs=2, prompt_logprobs=0)
    prompt = llm.encode(PROMPT)
    rows = truth([*prompt, *said.tokens])
    assert said.logprobs is not None and said.prompt_logprobs is not None and said.prompt_logprobs[0] is None
    told = [score.logprob for score in (*said.prompt_logprobs[1:], *said.logprobs) if score is not None]
    want = [float(rows[at, token]) for at, token in enumerate([*prompt, *said.tokens][1:])]
    assert told == pytest.approx(want, **CLOSE)
    assert all(len(score.top) == 2 for score in said.logprobs)
    assert llm.generate(PROMPT, max_tokens=5)[0].logprobs is None
