"""The offline API: lists, streams and conversations give the engine's own tokens, and leave nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phasewise.engine.limits import Limits
from phasewise.errors import PhasewiseError, UserError
from phasewise.llm import LLM, Output
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.serve.tiny_chat import chat_checkpoint

PROMPTS = ["the quick", "fox", "and then the other thing over the dog"]
HELLO = [{"role": "user", "content": "the fox?"}]
LONG = Params(max_tokens=40, ignore_eos=True)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 99), "temperature": st.floats(0, 9), "top_k": st.integers(0, 9),
    "top_p": st.floats(0.1, 1), "min_p": st.floats(0, 1), "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2), "seed": st.integers(),
    "logit_bias": st.dictionaries(st.integers(0, 9), st.floats(-5, 5)), "ignore_eos": st.booleans(),
    "stop_tokens": st.tuples(st.integers(0, 9)),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(chat_checkpoint()), limits=Limits(kv_bytes=8 << 20))


HALF = "\ud83d"  # of a pair of surrogates: no character


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM) -> Any:
    yield
    assert llm.engine.idle
    assert llm.engine.kv_bytes == llm.engine.prefix_bytes


def test_generate_gives_the_engines_tokens(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, LONG)
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = tiny.outs(tiny.run(tiny.engine(of=llm.model), ids, LONG))
    assert [output.tokens for output in outputs] == expected
    assert [output.text for output in outputs] == [llm.tokenizer.decode(tokens) for tokens in expected]
    assert [(output.left.how, output.left.reason) for output in outputs] == [("finished", "length")] * 3
    assert all(output.trace.ttft and output.trace.tpot for output in outputs)


def test_methods_are_named_by_verb() -> None:
    plain, odd = (
        LLM(str(chat_checkpoint()), **verbs).generate(PROMPTS, LONG)
        for verbs in ({}, {"schedule": "prefill_first", "evict": "none"})
    )
    assert [output.tokens for output in plain] == [output.tokens for output in odd]


def test_one_prompt_may_stand_alone(llm: LLM) -> None:
    def tokens(outputs: list[Output]) -> list[list[int]]:
        return [output.tokens for output in outputs]

    ids = llm.encode("the quick")
    assert (
        tokens(llm.generate("the quick", LONG)) == tokens(llm.generate(ids, LONG)) == tokens(llm.generate([ids], LONG))
    )
    assert llm.generate([], LONG) == []


def test_params_for_all_or_for_each(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, [Params(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)])
    assert [len(output.tokens) for output in outputs] == [1, 2, 3]
    with pytest.raises(UserError, match="2 params for 3 prompts"):
        llm.generate(PROMPTS, [LONG, LONG])


def test_fields_of_params_may_be_keywords(llm: LLM) -> None:
    drawn = Params(max_tokens=12, temperature=1.5, seed=3, ignore_eos=True)
    words = {"max_tokens": 12, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    expected = llm.generate(PROMPTS, drawn)
    assert [o.tokens for o in llm.generate(PROMPTS, **words)] == [o.tokens for o in expected]
    assert "".join(llm.stream(PROMPTS[0], **words)) == expected[0].text
    assert llm.chat(HELLO, **words).tokens == llm.chat(HELLO, drawn).tokens
    assert [o.tokens for o in expected] != [o.tokens for o in llm.generate(PROMPTS, LONG, max_tokens=12)]


def test_keywords_override_params(llm: LLM) -> None:
    full = llm.generate("the quick", LONG)[0].tokens
    assert llm.generate("the quick", LONG, max_tokens=7)[0].tokens == full[:7]
    each = [Params(max_tokens=n) for n in (1, 2, 3)]
    assert [len(o.tokens) for o in llm.generate(PROMPTS, each, ignore_eos=True)] == [1, 2, 3]
    assert [len(o.tokens) for o in llm.generate(PROMPTS, each, max_tokens=4, ignore_eos=True)] == [4, 4, 4]
    assert [p.max_tokens for p in each] == [1, 2, 3] and LONG.max_tokens == 40, "what was given is as it was"
    assert len(llm.chat(HELLO, LONG, max_tokens=3).tokens) == 3
    assert "".join(llm.stream("the quick", LONG, max_tokens=7)) == llm.tokenizer.decode(full[:7])


@given(st.fixed_dictionaries({}, optional=FIELDS), st.fixed_dictionaries({}, optional=FIELDS))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_request_has_the_keywords_and_else_the_params(llm: LLM, below: dict[str, Any], own: dict[str, Any]) -> None:
    seen: list[Params] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(llm, "request", lambda ids, params, *_, **__: seen.append(params) or Request(ids, params))
        llm.stream([5], Params(**below), **own)
        llm.stream([5], **below)
    assert seen == [Params(**{**below, **own}), Params(**below)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokns": 5}, ["'max_tokns'", "Did you mean max_tokens", "Valid: ", "temperature", "stop"]),
        ({"max_new_tokens": 5}, ["max_tokens"]),
        ({"stp": "."}, ["Did you mean", "stop"]),
        ({"greedy": True}, ["unknown keyword 'greedy'"]),
        ({"penalised": False}, ["unknown keyword 'penalised'"]),
        ({"max_tokens": 0}, ["max_tokens=0 is allowed only"]),
        ({"temperature": "warm"}, ["temperature='warm' is not a number"]),
        ({"seed": 0.5}, ["seed=0.5 is not a whole number"]),
        ({"params": {"max_tokens": 5}}, ["params={'max_tokens': 5}", "max_tokens=64"]),
    ],
    ids=str,
)
def test_wrong_keywords_are_named(llm: LLM, wrong: dict[str, Any], words: list[str]) -> None:
    calls = (llm.generate, [], "the"), (llm.stream, [], "the"), (llm.chat, ["variables={...}"], HELLO)
    for call, more, prompt in calls:
        with pytest.raises(UserError) as caught:
            call(prompt, **wrong)
        assert all(word in str(caught.value) for word in words)
        if "unknown keyword" in str(caught.value):
            assert all(word in str(caught.value) for word in more)
    with pytest.raises(UserError):
        llm.generate([], **wrong)  # also where nobody asks


def test_stop_strings_end_text_and_request(llm: LLM) -> None:
    full = llm.generate("the quick", LONG)[0]
    for stop in (full.text[6:8], ["\0", full.text[10:13]]):
        where = full.text.find(stop if isinstance(stop, str) else stop[1])
        output = llm.generate("the quick", LONG, stop=stop)[0]
        assert (output.text, output.left.reason) == (full.text[:where], "stop")
        assert output.tokens == full.tokens[: len(output.tokens)] and len(output.tokens) < 40
        assert "".join(llm.stream("the quick", LONG, stop=stop)) == output.text
    with pytest.raises(UserError, match="empty"):
        llm.generate("the", LONG, stop=[""])


def test_an_end_token_is_a_token_without_text(llm: LLM) -> None:
    output = llm.generate("the", Params(logit_bias={2: 1000.0}))[0]
    assert (output.tokens, output.text, output.left.reason) == ([2], "", "stop")


def test_progress_counts_those_that_have_left(llm: LLM) -> None:
    told: list[int] = []
    llm.generate(PROMPTS, [Params(max_tokens=n, ignore_eos=True) for n in (3, 9, 6)], progress=told.append)
    assert told == [1, 2, 3]


def test_a_refused_prompt_takes_the_others_with_it(llm: LLM) -> None:
    with pytest.raises(UserError, match="outside the vocabulary"):
        llm.generate([[5, 6], [100_000]], LONG)
    with pytest.raises(UserError, match="logit_bias"):
        llm.generate("the", Params(logit_bias={-1: 1.0}))


def test_an_interrupt_leaves_nothing_running(llm: LLM) -> None:
    def interrupt(left: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [Params(max_tokens=n) for n in (1, 500, 500)], progress=interrupt)


def test_a_stream_is_the_text_in_pieces(llm: LLM) -> None:
    pieces = list(llm.stream("the quick", LONG))
    assert len(pieces) > 5 and all(pieces)
    assert "".join(pieces) == llm.generate("the quick", LONG)[0].text


def test_leaving_a_stream_early_cancels_it(llm: LLM) -> None:
    for i, _ in enumerate(llm.stream("the", Params(max_tokens=1000, ignore_eos=True))):
        if i == 3:
            assert len(llm.engine.running) == 1
            break
    assert llm.engine.idle and not llm.engine.running
    unused = llm.stream("the", LONG)
    del unused
    assert llm.engine.idle


def test_streams_and_lists_may_share_the_engine(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, LONG)
    one, two = llm.stream(PROMPTS[0], LONG), llm.stream(PROMPTS[1], LONG)
    first, second = next(one), next(two)
    assert llm.generate(PROMPTS[2], LONG)[0].tokens == expected[2].tokens  # runs the other two as well
    assert [first + "".join(one), second + "".join(two)] == [output.text for output in expected[:2]]


def test_chat_is_the_template_and_the_model(llm: LLM) -> None:
    rendered = "<|im_start|>user\nthe fox?<|im_end|>\n<|im_start|>assistant\n"
    assert llm.encode_chat(HELLO) == llm.tokenizer.encode(rendered, add_special=False)
    assert llm.chat(HELLO, LONG).tokens == llm.generate([llm.encode_chat(HELLO)], LONG)[0].tokens
    assert "".join(llm.stream(HELLO, LONG)) == llm.chat(HELLO, LONG).text
    with pytest.raises(UserError, match="no such role"):
        llm.chat([{"role": "stranger", "content": ""}])


def test_variables_are_for_the_template_alone(tmp_path: Path) -> None:
    where = tmp_path / "model"
    shutil.copytree(chat_checkpoint(), where)
    (where / "chat_template.jinja").write_text("{{ temperature }} {{ mood }} {{ messages[0].content }}")
    templates = where / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }} and the lazy")
    llm = LLM(str(where))
    plain = {"temperature": "warm", "mood": "quick"}
    assert llm.encode_chat(HELLO, plain) == llm.tokenizer.encode("warm quick the fox?", add_special=False)
    expected = llm.generate([llm.encode_chat(HELLO, plain)], LONG)[0]
    assert llm.chat(HELLO, LONG, variables=plain).tokens == expected.tokens
    assert "".join(llm.stream(HELLO, LONG, variables=plain)) == expected.text
    for variables in ({"tools": "fox"}, {"template": "tool_use", "tools": "fox"}):
        assert llm.tokenizer.decode(llm.encode_chat(HELLO, variables)) == "fox and the lazy"
    with pytest.raises(UserError, match=r"'mood'.*variables=\{...\}"):
        llm.chat(HELLO, mood="quick")
    for taken in ("messages", "self"):
        with pytest.raises(UserError, match=taken):
            llm.chat(HELLO, variables={taken: HELLO})
    with pytest.raises(UserError, match="mood.*list of messages"):
        llm.stream("the fox", variables=plain)


def test_without_a_template_there_is_no_chat() -> None:
    plain = LLM(str(chat_checkpoint(chat=False)))
    with pytest.raises(UserError, match="no chat template"):
        plain.chat(HELLO)
    assert plain.generate("the", LONG)[0].tokens


def test_a_failing_request_is_an_output_or_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = llm.model.embed

    def poisoned(tokens: Any) -> Any:
        if bool((tokens == 100).any()):
            raise RuntimeError("poison")
        return embed(tokens)

    monkeypatch.setattr(llm.model, "embed", poisoned)
    good, bad = llm.generate([[5, 6], [5, 100]], Params(max_tokens=2, ignore_eos=True))
    assert (good.left.how, bad.left.how) == ("finished", "failed") and "poison" in bad.left.reason
    with pytest.raises(PhasewiseError, match="poison"):
        list(llm.stream([100], LONG))


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"draft": "prompt_lokup"}, "prompt_lookup"),
        ({"dtype": "bf16"}, "bfloat16"),
        ({"device": "toaster"}, "toaster"),
        ({"model": "no/such-checkpoint-here"}, "no/such-checkpoint-here"),
        ({"flavour": "vanilla"}, "flavour"),
        ({"schedule": "sarathi:bugdet=5"}, "budget"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], names: str) -> None:
    with pytest.raises(UserError, match=names):
        LLM(**{"model": str(chat_checkpoint()), **wrong})


@pytest.mark.parametrize("call", [
    lambda llm: llm.generate(b"the quick"), lambda llm: llm.generate([b"the", "fox"]), lambda llm: llm.embed(b"the"),
    lambda llm: llm.generate(bytearray(b"the")), lambda llm: llm.generate(7), lambda llm: list(llm.stream(b"the")),
    lambda llm: llm.chat([{"role": "user", "content": b"the"}]), lambda llm: llm.generate("the", bad_words=[b"a"]),
    lambda llm: llm.generate("the", stop=b"a"), lambda llm: llm.generate("the", stop=[b"a"]),
    lambda llm: llm.generate("caf\udce9"), lambda llm: llm.generate(HALF * 5000), lambda llm: llm.embed(HALF),
    lambda llm: llm.chat([{"role": "user", "content": HALF}]), lambda llm: llm.generate("the", bad_words=[HALF]),
    lambda llm: llm.generate("the", choice=["blue", HALF]), lambda llm: llm.generate("a", json_schema={"const": HALF}),
])  # fmt: skip
def test_what_is_no_text_is_refused(call: Any, llm: LLM) -> None:
    """Bytes are no token ids, though they are numbers; a lone surrogate is no character."""
    with pytest.raises(UserError, match="bytes|surrogate|not text|must be a|texts or of"):
        call(llm)


def test_a_pair_of_surrogates_in_json_is_a_character(llm: LLM) -> None:
    assert Params(ask={"choice": ["\ud83e\udd9c"]}).ask == {"choice": ["\U0001f99c"]}
