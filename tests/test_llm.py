"""The offline API: lists, streams and conversations give the engine's own tokens, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.engine.limits import Limits
from phasewise.errors import PhasewiseError, UserError
from phasewise.llm import LLM, Output
from phasewise.request.params import Params
from tests import tiny
from tests.serve.tiny_chat import chat_checkpoint

PROMPTS = ["the quick", "fox", "and then the other thing over the dog"]
HELLO = [{"role": "user", "content": "the fox?"}]
LONG = Params(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(chat_checkpoint()), limits=Limits(kv_bytes=8 << 20))


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
            break
    unused = llm.stream("the", LONG)
    del unused


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
