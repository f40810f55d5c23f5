"""`after` over HTTP (decode=pie): a request names an earlier answer, and goes on from its KV or from its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from phasewise.llm import LLM
from phasewise.request.params import Params
from phasewise.serve.completions.conversation_index import NOBODY, REMEMBERED, ConversationIndex
from tests.serve.running import PATIENCE, Server
from tests.serve.tiny_chat import CONTEXT, chat_checkpoint

RECIPES = {"edit": {"decode": "pie"}, "small": {"decode": "pie:least=8", "store": "int8"}}
TEXT = "the quick brown fox jumps over the lazy dog and then the other thing, " * 4
EDITED = TEXT.replace("lazy", "clever and quick", 1)
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
NEVER = ["cmpl-0", "r0", "r1", "0", "r0.1", ".", "..", "a.b", "x.99999999999999999999", "\u0000", "\u0663.\u0663",
         "../../etc/passwd", "'; DROP TABLE kv; --", "{}", "null", "\U0001f98a" * 60, " ", "-1"]  # fmt: skip


@pytest.fixture(scope="module")
def many() -> Iterator[Server]:
    with Server(recipes=RECIPES) as running:
        yield running


def complete(client: openai.OpenAI, prompt: Any, after: str | None = None, name: str = "tiny@edit", **more: Any) -> Any:
    extra = {"ignore_eos": True, **({} if after is None else {"after": after})}
    extra |= more.pop("extra", {})
    return client.completions.create(model=name, prompt=prompt, extra_body=extra, **{**GREEDY, **more})


def taken(answer: Any) -> int | None:
    details = answer.usage.prompt_tokens_details
    return None if details is None else int(details.cached_tokens)


def ids(text: str) -> list[int]:
    return LLM(str(chat_checkpoint())).encode(text)


def in_python(first: str, then: str) -> tuple[str, int]:
    llm = LLM(str(chat_checkpoint()), decode="pie")
    params = Params(max_tokens=12, ignore_eos=True)
    before = llm.generate([first], params)[0]
    after = llm.generate([then], params, after=before.id)[0]
    return after.text, after.recalled


def test_an_edited_text_goes_on_from_what_the_answer_left(many: Server) -> None:
    client = many.client()
    first = complete(client, TEXT)
    assert taken(first) is None, "nobody asked"
    before = many.settled()
    second = complete(client, EDITED, first.id)
    text, recalled = in_python(TEXT, EDITED)
    # what stands before the edit may also come from blocks that the prefix cache shares
    assert second.choices[0].text == text and recalled > 0 and taken(second) == recalled
    rows = many.settled()["phasewise_rows_total"] - before["phasewise_rows_total"]
    assert rows <= len(ids(EDITED)) - recalled + 11
    usage = second.usage
    assert usage.total_tokens == usage.prompt_tokens + 12 and usage.prompt_tokens == len(ids(EDITED))


def test_a_conversation_goes_on_exactly(many: Server) -> None:
    client = many.client()
    asked: list[Any] = [{"role": "user", "content": TEXT}]

    def chat(messages: list[Any], name: str, after: str | None = None) -> Any:
        extra = {"ignore_eos": True} | ({} if after is None else {"after": after})
        return client.chat.completions.create(model=name, messages=messages, extra_body=extra, **GREEDY)

    first = chat(asked, "tiny@edit")
    more = [*asked, {"role": "user", "content": "go on " * 6}]
    second, plain = chat(more, "tiny@edit", first.id), chat(more, "tiny")
    assert (taken(second) or 0) > 0 and taken(plain) is None
    assert second.choices[0].message.content == plain.choices[0].message.content


def test_streams_say_it_in_their_usage(many: Server) -> None:
    client = many.client()
    first = complete(client, TEXT)
    for continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        chunks = list(complete(client, EDITED, first.id, stream=True, stream_options=options))
        assert (taken(chunks[-1]) or 0) > 0 and not chunks[-1].choices
        assert {chunk.id for chunk in chunks} == {chunks[0].id} != {first.id}
        if continuous:
            assert taken(chunks[-2]) == taken(chunks[-1])
        again = complete(client, EDITED, chunks[0].id)
        assert (taken(again) or 0) > 0, "a streamed answer can be gone on from as well"


def test_responses_are_named_and_name(many: Server) -> None:
    client = many.client()
    first = client.responses.create(model="tiny@edit", input=TEXT, max_output_tokens=8, temperature=0)
    second = client.responses.create(
        model="tiny@edit", input=EDITED, max_output_tokens=8, temperature=0, extra_body={"after": first.id}
    )
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 0
    third = complete(client, EDITED, second.id)
    assert (taken(third) or 0) > 0, "one endpoint's answers, from another"
    chained = client.responses.create(
        model="tiny@edit", input="more", previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    assert chained.usage is not None and getattr(chained.usage, "input_tokens_details", None) is None


@pytest.mark.parametrize("name", NEVER)
def test_unknown_ids_are_computed_from_tokens(many: Server, name: str) -> None:
    client = many.client()
    answer = complete(client, EDITED, name)
    assert taken(answer) == 0
    assert answer.choices[0].text == complete(client, EDITED, name="tiny").choices[0].text


@pytest.mark.parametrize("wrong", ["", "x" * 129, 7, ["cmpl-1"], {"id": "x"}, True])
def test_what_is_no_id_is_refused(many: Server, wrong: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/responses", {"input": TEXT}),
    ):
        answer = many.post(path, {"model": "tiny@edit", "max_tokens": 2, "after": wrong} | body)
        assert answer.status_code == 400, answer.text
        assert "after" in answer.json()["error"]["message"] or path == "/v1/responses"


def test_other_recipes_and_models_take_nothing(many: Server) -> None:
    client = many.client()
    first = complete(client, TEXT)
    assert taken(complete(client, EDITED, first.id, "tiny@small")) == 0
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, EDITED, first.id, "tiny")
    body = caught.value.body
    assert isinstance(body, dict) and body["param"] == "after" and "no method of this engine takes" in body["message"]
    plain = complete(client, TEXT, name="tiny")
    assert taken(complete(client, EDITED, plain.id)) == 0, "its recipe left nothing"


def test_exact_and_after_exclude_each_other(many: Server) -> None:
    client = many.client()
    first = complete(client, TEXT)
    with pytest.raises(openai.BadRequestError, match="leave one out"):
        complete(client, EDITED, first.id, extra={"exact": True})


def test_choices_are_named_by_index(many: Server) -> None:
    client = many.client()
    first = complete(client, [TEXT, "something else entirely: " + TEXT[::-1]], n=2, temperature=1, seed=3)
    assert len(first.choices) == 4
    for name, some in ((first.id, True), (f"{first.id}.1", True), (f"{first.id}.2", False), (f"{first.id}.4", False)):
        assert bool(taken(complete(client, EDITED, name))) is some, name


def test_samples_are_told_once(many: Server) -> None:
    client = many.client()
    first = complete(client, TEXT)
    one = taken(complete(client, EDITED, first.id))
    assert taken(complete(client, EDITED, first.id, n=3, temperature=1, seed=1)) == one
    best = complete(client, EDITED, first.id, n=1, temperature=1, seed=1, best_of=3)
    assert taken(best) == one


def test_a_format_that_is_asked_for_is_kept_beside_it(many: Server) -> None:
    client = many.client()
    first = complete(client, TEXT)
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
    answer = complete(client, EDITED, first.id, extra=extra)
    assert answer.choices[0].text in ("yes", "no") and (taken(answer) or 0) > 0


def test_kv_that_made_way_is_computed(tmp_path: Path) -> None:
    """The budget holds one such text, not two."""
    with Server(recipes=RECIPES, limits={"kv_bytes": 300_000}) as small:
        client = small.client()
        first = complete(client, TEXT)
        assert (taken(complete(client, EDITED, first.id)) or 0) > 0
        for at in range(6):
            complete(client, f"{at} " + TEXT[::-1] * 2)
        answer = complete(client, EDITED, first.id)
        assert taken(answer) == 0
        assert answer.choices[0].text == complete(client, EDITED, name="tiny").choices[0].text


def test_ids_of_other_keys_mean_nothing(tmp_path: Path) -> None:
    """A secret in one client's text never shows in another's answers, not even as a number."""
    file = tmp_path / "keys.toml"
    secrets = {name: f"sk-{name}-0123456789abcdef" for name in ("alice", "bob")}
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in secrets.items()}
    file.write_text("".join(f'[keys.{name}]\nsha256 = "{digest}"\n' for name, digest in digests.items()))
    with Server(recipes=RECIPES, keys=str(file), secret=secrets["alice"]) as guarded:
        alice, bob = guarded.client(), guarded.client(api_key=secrets["bob"])
        first = complete(alice, TEXT)
        assert (taken(complete(alice, EDITED, first.id)) or 0) > 0
        stolen = complete(bob, EDITED, first.id)
        unknown = complete(bob, EDITED, "cmpl-never")
        assert taken(stolen) == taken(unknown) == 0
        assert stolen.choices[0].text == unknown.choices[0].text == complete(bob, EDITED, name="tiny").choices[0].text


def test_workers_that_have_the_kv_get_the_request() -> None:
    """Prompts are computed by one process and answers by another: what goes on starts where the KV is."""
    apart: dict[str, Any] = {
        "verbs": {"place": "disaggregated:prefill=1,decode=2", "decode": "pie"},
        "limits": {"cluster": "processes", "kv_bytes": 64 << 20},
    }
    with Server(**apart) as running:
        client = running.client()
        texts = [TEXT, TEXT[::-1], TEXT[::2] * 2]
        firsts = [complete(client, text, name="tiny") for text in texts]
        edited = [text[:150] + "something new" + text[150:] for text in texts]
        answers = [complete(client, text, one.id, "tiny") for text, one in zip(edited, firsts)]
        assert all((taken(answer) or 0) > 0 for answer in answers)
        for text, then, answer in zip(texts, edited, answers):
            assert answer.choices[0].text == in_python(text, then)[0]
        assert taken(complete(client, EDITED, "cmpl-never", "tiny")) == 0


def test_rows_that_a_method_adds_are_told_and_never_counted() -> None:
    """decode=augment: usage has the tokens of the request alone, and says how many rows stand for none."""
    with Server(recipes={"deep": {"decode": "augment:latents=6,weights=random:0"}}) as running:
        client = running.client()
        plain, deep = (complete(client, TEXT, name=name) for name in ("tiny", "tiny@deep"))
        assert deep.choices[0].text != plain.choices[0].text
        for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(deep.usage, field) == getattr(plain.usage, field), field
        assert plain.usage.prompt_tokens_details is None
        assert deep.usage.prompt_tokens_details.model_dump()["added_rows"] == 6
        two = complete(client, [TEXT, EDITED], name="tiny@deep", n=2, temperature=1, seed=1)
        assert two.usage.prompt_tokens_details.model_dump()["added_rows"] == 2 * 6
        options = {"include_usage": True}
        chunks = list(complete(client, TEXT, name="tiny@deep", stream=True, stream_options=options))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == deep.choices[0].text
        assert chunks[-1].usage.prompt_tokens_details.model_dump()["added_rows"] == 6
        with pytest.raises(openai.BadRequestError, match=f"context is {CONTEXT - 6} tokens"):
            complete(client, [5] * (CONTEXT - 6), name="tiny@deep")


def test_what_is_remembered_has_a_bound() -> None:
    earlier = ConversationIndex(3)
    for at in range(5):
        earlier.note(f"cmpl-{at}", [])
    assert len(earlier._known) == 3 and earlier.request("cmpl-4") == NOBODY == earlier.request("cmpl-0")
    assert REMEMBERED < 1 << 16


def test_metrics_and_the_document_know_of_it(many: Server) -> None:
    client, before = many.client(), many.settled()
    first = complete(client, TEXT)
    second = complete(client, EDITED, first.id)
    name = "phasewise_recalled_total"
    assert many.settled()[name] - before[name] == taken(second)
    document = json.dumps(httpx.get(f"{many.url}/openapi.json", timeout=PATIENCE).json())
    assert '"after"' in document
