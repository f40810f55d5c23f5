"""Vocabularies of files give the ids of the tokenizers that their models were published with, and text back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from phasewise.errors import UnsupportedModel, UserError
from phasewise.model.chat import ChatTemplate
from phasewise.model.source import source
from phasewise.model.tokenizer import Detokenizer, Tokenizer

from .vocabularies import MARKS, PIECES, SPACE, SPLITS, byte_level, score_of, sentencepiece, without
from .writer import Vocabulary, tiny

MADE: dict[str, tuple[Callable[[], tuple[Vocabulary, Backend]], str]] = {
    **{name: (lambda name=name: byte_level(name), "llama") for name in SPLITS},
    "llama 2": (lambda: sentencepiece(), "llama"),
    "gemma": (lambda: sentencepiece(prefix=False), "gemma2"),
    "phi3": (lambda: sentencepiece(phi3=True), "phi3"),
}
NAMES = sorted(MADE)
ODD = [
    "", " ", "  ", "   ", "\n", "\n\n\n", " \n \t ", "\r\n\r\n", "a", " a", "  a", "a ", "hello world",
    " hello  world  ", "1", "12", "123", "1234", "12345678", "a1b22c333", "٣٤٥", "½", "Ⅷ", "x²", "2024-01-02",
    "3.14159", "don't DON'T we'Ve 'sS", "CamelCaseHTTPServer", "ПРИВЕТмир", "ǅungla", "naïve café", "cafe\u0301",
    "\u212b", "你好世界", "🎉👨\u200d👩\u200d👧", "\u200b\u200d", "\x00\x01", "\ufffd", "a\u0300\u0301b", "!!!///\n\n",
    "...\r\n", "#!/bin/sh\n//\n", "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|><|im_start|>", " <tool> <tool>x",
    "a b", "xa by", "<｜user｜>", "[PAD7]", "<s>hello</s> world", "<s> hello", "<unk>",
    "hello<|user|>  \n hello <|end|>\n\nthe", "<tag> the<tag>the", "\n\nthe\n\n\n",
    "the    end  of   it", f"{SPACE}the{SPACE}", "<0x41>", "the " * 40,
    " zebra zebra cats", "2024 987 98",
]  # fmt: skip
TEXTS = st.text(max_size=60) | st.text("the cat'S 12½éÉ你🎉\u0301\n\r\t<|>/ ", max_size=40) | st.lists(
    st.sampled_from([each for each in ODD if len(each) < 40]), max_size=6).map("".join)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Backend]]:
    """By name: what is read from a file, and the pipeline that it must be."""
    found = {}
    for name, (make, architecture) in MADE.items():
        vocabulary, backend = make()
        path = tiny(tmp_path_factory.mktemp("vocabulary") / "model.gguf", vocabulary, architecture)
        found[name] = Tokenizer.load(path), backend
    return found


def same(ours: Tokenizer, theirs: Backend, text: str) -> None:
    for special in (True, False):
        ids = ours.encode(text, special)
        assert ids == theirs.encode(text, add_special_tokens=special).ids
        for hidden in (True, False):
            assert ours.decode(ids, hidden) == theirs.decode(ids, skip_special_tokens=hidden)
        assert pieces(ours, ids) == ours.decode(ids)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = Detokenizer(tokenizer)
    return "".join([*(stream.push([i]) for i in ids), stream.flush()])


@pytest.mark.parametrize("name", NAMES)
def test_odd_texts(name: str, made: dict[str, tuple[Tokenizer, Backend]]) -> None:
    for text in ODD:
        same(*made[name], text)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(NAMES), TEXTS)
def test_any_text(made: dict[str, tuple[Tokenizer, Backend]], name: str, text: str) -> None:
    same(*made[name], text)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([name for name in NAMES if name not in ("phi3", "qwen2")]), st.text(max_size=60))
def test_text_comes_back(made: dict[str, tuple[Tokenizer, Backend]], name: str, text: str) -> None:
    """But for what tokenizers lose: Phi-3's blanks after marks, composed characters, and how blanks are written."""
    ours, _ = made[name]
    if SPACE not in text and not any(mark in text for mark in ("<s>", "</s>", "<unk>", *MARKS)):
        assert ours.decode(ours.encode(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_any_ids(made: dict[str, tuple[Tokenizer, Backend]], name: str, data: st.DataObject) -> None:
    ours, theirs = made[name]
    assert ours.size == theirs.get_vocab_size(with_added_tokens=True)
    assert ours.byte_level == (name in SPLITS)
    ids = data.draw(st.lists(st.integers(0, ours.size - 1), max_size=24))
    whole = theirs.decode(ids)
    assert ours.backend.decode(ids) == whole and ours.decode(ids) == pieces(ours, ids)
    if "\ufffd" not in whole:  # of a run of byte tokens that is no text, ours keeps the characters
        assert ours.decode(ids) == whole
    assert ours.special_ids == {i for i, each in theirs.get_added_tokens_decoder().items() if each.special}


@pytest.mark.parametrize("name", NAMES)
def test_every_token_has_its_id(name: str, made: dict[str, tuple[Tokenizer, Backend]]) -> None:
    ours, _ = made[name]
    vocabulary, _ = MADE[name][0]()
    for i, token in enumerate(vocabulary.tokens):
        spelled = SPACE * len(token) if not str(token).strip(" ") else token
        assert ours.token(i) == spelled and ours.id(str(spelled)) == i


def best_pairs_first(text: str) -> list[str]:
    """SentencePiece's own way, without merges: whichever two neighbours make the piece of the highest score."""
    parts = list(text)
    while True:
        scored = [(score_of(a + b), -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not scored:
            return parts
        at = -max(scored)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=100, deadline=None)
@given(st.text("abcdehilnorstuw.,! ", max_size=40) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_scores_decide(made: dict[str, tuple[Tokenizer, Backend]], text: str) -> None:
    ours, _ = made["llama 2"]
    wanted = best_pairs_first(SPACE + text.replace(" ", SPACE)) if text else []
    if "<s>" not in text:
        assert [ours.token(i) for i in ours.encode(text, add_special=False)] == wanted


# ---- what goes around a text
def loaded(path: Path, vocabulary: Vocabulary, architecture: str = "llama", **extra: Any) -> Tokenizer:
    return Tokenizer.load(tiny(path / "model.gguf", vocabulary, architecture, **extra))


@pytest.mark.parametrize(
    ("name", "extra", "wanted"),
    [
        ("gpt-2", {}, ""),
        ("gpt-2", {"add_bos_token": True}, "b"),
        ("gpt-2", {"add_eos_token": True}, "e"),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "be"),
        ("llama-bpe", {}, "b"),
        ("llama-bpe", {"add_bos_token": False}, ""),
        ("tekken", {"add_eos_token": True}, "be"),
        ("qwen2", {"add_bos_token": False, "add_eos_token": False}, ""),
        ("llama 2", {}, "b"),
        ("llama 2", {"add_bos_token": False, "add_eos_token": True}, "e"),
        ("llama 2", {"add_eos_token": True}, "be"),
    ],
)
def test_begin_and_end(name: str, extra: dict[str, bool], wanted: str, tmp_path: Path) -> None:
    vocabulary, _ = MADE[name][0]()
    tokenizer = loaded(tmp_path, replace(vocabulary, extra={**vocabulary.extra, **extra}))
    first, last = ([vocabulary.extra[f"{end}_token_id"]] * (end[0] in wanted) for end in ("bos", "eos"))
    plain = tokenizer.encode("hello", add_special=False)
    assert plain and tokenizer.encode("hello") == [*first, *plain, *last]
    assert tokenizer.encode("") == [*first, *last]
    without_ids = loaded(tmp_path, without(replace(vocabulary, extra={**vocabulary.extra, **extra}), "bos_token_id"))
    assert without_ids.encode("hello") == [*plain, *last]


@pytest.mark.parametrize("odd", ["$A", "$", "a:b", "$B:1", ":", " ", "A"])
def test_a_begin_of_any_spelling(odd: str, tmp_path: Path) -> None:
    """None is taken for the language in which a template is written."""
    vocabulary, _ = byte_level("gpt-2")
    tokens = list(vocabulary.tokens)
    tokens[-1] = odd if odd not in tokens else tokens[-1]
    extra = {"bos_token_id": tokens.index(odd), "add_bos_token": True}
    tokenizer = loaded(tmp_path, replace(vocabulary, tokens=tokens, extra=extra))
    assert tokenizer.encode("hello")[0] == tokens.index(odd)


def test_names_of_special_tokens(tmp_path: Path) -> None:
    vocabulary, _ = sentencepiece()
    assert loaded(tmp_path, vocabulary).special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    padded = replace(vocabulary, extra={**vocabulary.extra, "padding_token_id": 2})
    assert loaded(tmp_path, padded).special["pad_token"] == "</s>"
    assert loaded(tmp_path, without(vocabulary, *vocabulary.extra)).special == {}


def test_templates(tmp_path: Path) -> None:
    def render(given: str | list[dict[str, str]] | None, **options: Any) -> str:
        vocabulary = replace(byte_level("qwen2")[0], template=given)
        path = tiny(tmp_path / "model.gguf", vocabulary)
        return ChatTemplate.load(path).render([{"role": "user", "content": "hi"}], **options)

    own = "{{ bos_token }}{{ messages[0].content }}"
    assert render(own) == "<|im_start|>hi"
    named = [{"name": "default", "template": own}, {"name": "tool_use", "template": "{{ tools }}"},
             {"name": "rag", "template": "rag {{ eos_token }}"}]  # fmt: skip
    assert render(named) == "<|im_start|>hi"
    assert render(named, tools=[1]) == "[1]"
    assert render(named, template="rag") == "rag <|im_end|>"
    with pytest.raises(UserError, match="no chat template 'rug'. Did you mean rag"):
        render(named, template="rug")
    with pytest.raises(UserError, match="has no chat template"):
        render(None)
    with pytest.raises(UserError, match="does not parse"):
        render("{% if %}")


# ---- what cannot be right
def refused(path: Path, vocabulary: Vocabulary, words: str, error: type[UserError] = UserError) -> None:
    with pytest.raises(error, match=words) as raised:
        loaded(path, vocabulary)
    assert type(raised.value) is error and str(path) in str(raised.value)


def test_unknown_kinds(tmp_path: Path) -> None:
    vocabulary, _ = byte_level("gpt-2")
    refused(tmp_path, replace(vocabulary, model="bert"), "of the kind 'bert'. Valid: gpt2, llama", UnsupportedModel)
    words = "split in an unknown way, 'qwen3' .*Did you mean qwen2"
    refused(tmp_path, replace(vocabulary, pre="qwen3"), words, UnsupportedModel)


def test_broken_merges(tmp_path: Path) -> None:
    vocabulary, _ = byte_level("gpt-2")
    merges = list(vocabulary.merges or ())
    for odd in ("ab", "a b c", " b", "a ", ""):
        refused(tmp_path, replace(vocabulary, merges=[odd, *merges]), "is not two tokens with a space between")
    for odd in ("a ☃", "☃ a", "z q"):
        refused(tmp_path, replace(vocabulary, merges=[*merges, odd]), "its merges cannot be used .*out of vocabulary")
    refused(tmp_path, replace(vocabulary, merges=None), "has no tokenizer.ggml.merges")


def test_lists_of_other_lengths(tmp_path: Path) -> None:
    vocabulary, _ = sentencepiece()
    size = len(vocabulary.tokens)
    words = f"{size} tokens and {size - 1} scores"
    refused(tmp_path, replace(vocabulary, scores=list(vocabulary.scores or ())[1:]), words)
    refused(tmp_path, replace(vocabulary, scores=None), f"{size} tokens and 0 scores")
    refused(
        tmp_path, replace(vocabulary, types=list(vocabulary.types or ())[1:]), f"{size} tokens and {size - 1} types"
    )
    refused(tmp_path, replace(vocabulary, types=[1.5] * size), "token_type must be a list of whole numbers")
    refused(tmp_path, replace(vocabulary, scores=[float("nan")] * size), "has values that are not finite")


@pytest.mark.parametrize("key", ["bos", "eos", "unknown", "padding"])
def test_ids_out_of_range(key: str, tmp_path: Path) -> None:
    vocabulary, _ = sentencepiece()
    odd: list[Any] = [len(vocabulary.tokens), (1 << 32) - 1, "1", True, 1.0]
    for value in odd:
        extra = {**vocabulary.extra, f"{key}_token_id": value}
        refused(tmp_path, replace(vocabulary, extra=extra), f"{key}_token_id must be a number from 0 to")


def test_fewer_tokens_than_embeddings(tmp_path: Path) -> None:
    """Tables are padded to round sizes."""
    vocabulary, _ = sentencepiece()
    tokenizer = loaded(tmp_path, vocabulary, padding=7)
    assert tokenizer.size == len(vocabulary.tokens)
    assert source(tmp_path / "model.gguf").settings().size("vocab_size") == tokenizer.size + 7


def test_more_tokens_than_embeddings(tmp_path: Path) -> None:
    vocabulary, _ = sentencepiece()
    path = tiny(tmp_path / "model.gguf", vocabulary)
    raw = path.read_bytes()
    size = len(vocabulary.tokens)
    shape = b"token_embd.weight" + (2).to_bytes(4, "little") + (8).to_bytes(8, "little")
    assert raw.count(shape + size.to_bytes(8, "little")) == 1
    path.write_bytes(raw.replace(shape + size.to_bytes(8, "little"), shape + (size - 1).to_bytes(8, "little")))
    with pytest.raises(UserError, match=f"{size} tokens, and embeddings of {size - 1}"):
        Tokenizer.load(path)


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    vocabulary, _ = byte_level("gpt-2")

    class Odd(Vocabulary):
        def add(self, writer: GGUFWriter) -> None:
            vocabulary.add(writer)
            writer.add_uint32("tokenizer.chat_template", 7)

    path = tiny(tmp_path / "model.gguf", Odd("gpt2", vocabulary.tokens))
    with pytest.raises(UserError, match=r"tokenizer.chat_template must be a text, got 7"):
        ChatTemplate.load(path)


def test_a_token_that_is_there_twice_is_the_first(tmp_path: Path) -> None:
    vocabulary, _ = byte_level("gpt-2")
    tokens, types = [*vocabulary.tokens, "a"], [*(vocabulary.types or ()), 1]
    tokenizer = loaded(tmp_path, replace(vocabulary, tokens=tokens, types=types))
    assert tokenizer.id("a") == tokens.index("a") < len(tokens) - 1
    assert tokenizer.decode(tokenizer.encode("a hat")) == "a hat"
