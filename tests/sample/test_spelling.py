"""What a grammar forces is said byte for byte, whatever the tokenizer does to a text before it is encoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from phasewise.known import shelf
from phasewise.known.models import KNOWN
from phasewise.llm import LLM
from phasewise.load import model_path
from phasewise.methods.sample._grammars import Grammars
from phasewise.methods.sample._spelling import Speller
from phasewise.methods.sample._words import Words
from phasewise.methods.sample.grammar import GrammarState
from phasewise.model.tokenizer import Tokenizer
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests.sample.vocabularies import END, LETTERS, SPECIAL, sentencepiece
from tests.tiny import write_checkpoint

pytest.importorskip("llguidance")
SPACE = "\u2581"
CHARACTERS = ["a", "b", "l", "u", "e", " ", "  ", "\n", "é", "e\u0301", "ﬁ", "A", "0", "{", '"', "日", "<tool>",
              "<0x41>", "</s>", SPACE, "\u00a0", "Å"]  # fmt: skip
TEXT = st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=8).map("".join)
PIECES = ["bl", "ue", "blue", " b", " bl", "  ", "e\u0301", "é", '{"', "a b", " a", "日", "00", "b "]

NORMALIZERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "nfc": normalizers.NFC,
    "nfd": normalizers.NFD,
    "nfkc": normalizers.NFKC,
    "lowercase": normalizers.Lowercase,
    "strip": normalizers.Strip,
    "accents": lambda: normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "prepend": lambda: normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]),
    "replace": lambda: normalizers.Replace(" ", SPACE),
    "blanks": lambda: normalizers.Replace(Regex(" +"), " "),
}
PRE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "byte level": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "prefixed": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "whole": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
    "digits": lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]),
    "split": lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "metaspace": lambda: pre_tokenizers.Metaspace(prepend_scheme="always"),
    "metaspace first": lambda: pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    "white space": pre_tokenizers.Whitespace,
    "punctuation": lambda: pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace()]),
}  # fmt: skip
RUNS = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS: dict[str, Callable[[], Any]] = {
    "byte level": decoders.ByteLevel,
    "byte level, twice": lambda: decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    "stripped": lambda: decoders.Sequence([*RUNS, decoders.Strip(" ", 1, 0)]),
    "runs": lambda: decoders.Sequence(RUNS),
    "metaspace": lambda: decoders.Sequence([decoders.Metaspace(prepend_scheme="always"), decoders.ByteFallback()]),
    "metaspace, never": lambda: decoders.Sequence([
        decoders.Metaspace(prepend_scheme="never"), decoders.ByteFallback()]),
}  # fmt: skip
ADDED = [
    {}, {"lstrip": True}, {"rstrip": True, "lstrip": True}, {"single_word": True}, {"normalized": True},
    {"normalized": False, "special": True},
]  # fmt: skip


def vocabulary(byte_level: bool) -> list[str]:
    """Special tokens, every byte, and some pieces, in the spelling of either kind."""
    if byte_level:
        return [*SPECIAL, *LETTERS.values(), *("".join(LETTERS[b] for b in text.encode()) for text in PIECES)]
    letters = [SPACE, *map(chr, range(33, 127)), *(text.replace(" ", SPACE) for text in PIECES)]
    return [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *dict.fromkeys(letters)]


@st.composite
def tokenizers(draw: st.DrawFn) -> Tokenizer:
    """Any mixture, however odd: a model, a normalizer, a pre-tokenizer, a decoder, an added token."""
    decoder = draw(st.sampled_from(sorted(DECODERS)))
    names = vocabulary(decoder.startswith("byte"))
    ids = {name: i for i, name in enumerate(names)}
    bytes_too = not decoder.startswith("byte")
    if draw(st.booleans()):
        scores = [(name, -float(len(names)) / (1 + len(name))) for name in names]
        backend = Backend(models.Unigram(scores, 0, byte_fallback=bytes_too))
    else:
        merges = [(name[:at], name[at:]) for name in names[3:] for at in range(1, len(name))
                  if not name.startswith("<0x") and name[:at] in ids and name[at:] in ids]  # fmt: skip
        merges = list({left + right: (left, right) for left, right in merges}.values())
        backend = Backend(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=bytes_too, fuse_unk=True))
    normalizer = NORMALIZERS[draw(st.sampled_from(sorted(NORMALIZERS)))]()
    if normalizer is not None:
        backend.normalizer = normalizer
    pre = PRE[draw(st.sampled_from(sorted(PRE)))]()
    if pre is not None:
        backend.pre_tokenizer = pre
    backend.decoder = DECODERS[decoder]()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    how = draw(st.sampled_from(ADDED))
    token = AddedToken("<tool>", **how)
    (backend.add_special_tokens if how.get("special") else backend.add_tokens)([token])
    if draw(st.booleans()):
        backend.enable_truncation(2)
    return Tokenizer(backend)


def words_of(tokenizer: Tokenizer) -> Words:
    return Words(tokenizer, tokenizer.size, [END])


def allowed(mask: Any, vocab: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab)).tolist()


def said(words: Words, grammars: Grammars, ask: dict[str, Any], pick: Callable[[list[int]], int]) -> list[int]:
    """Tokens of an answer: what is forced as it is forced, else one of those that the mask allows."""
    line, request = GrammarState(grammars.get(ask), words, 0), Request([], Params())
    while not request.tokens or request.tokens[-1] not in words.ends:
        line.roll(request)
        sure = line.sure(Params())
        may = allowed(line.mask((), ()), words.vocab)
        assert may, (ask, [words.bytes[i] for i in request.tokens])
        assert not sure or may == [sure[0]]
        request.tokens += sure or [pick(may)]
    return request.tokens[:-1]


def exactly(tokenizer: Tokenizer, texts: list[str], pick: Callable[[list[int]], int]) -> None:
    words = words_of(tokenizer)
    speller, grammars = Speller(tokenizer, words.bytes, words.special), Grammars(words)
    for text in texts:
        assert b"".join(words.bytes[i] for i in speller(text.encode())) == text.encode()
        if words.strips is not None and text.startswith(" "):
            continue  # what begins with such a token loses its space
        ids = said(words, grammars, {"choice": [text]}, pick)
        assert b"".join(words.bytes[i] for i in ids) == text.encode()
        assert tokenizer.decode(ids, skip_special=False) == text
    schema = {"type": "object", "properties": {text: {"const": text} for text in texts}, "required": texts,
              "additionalProperties": False}  # fmt: skip
    ids = said(words, grammars, {"json_schema": schema}, lambda may: END if END in may else pick(may))
    assert json.loads(tokenizer.decode(ids, skip_special=False)) == {text: text for text in texts}


@settings(deadline=None, max_examples=60)
@given(tokenizers(), st.lists(TEXT, min_size=1, max_size=3, unique=True), st.randoms(use_true_random=False))
def test_texts_come_byte_for_byte(tokenizer: Tokenizer, texts: list[str], random: Any) -> None:
    exactly(tokenizer, texts, random.choice)


def test_a_first_token_that_would_lose_its_blank_is_said_in_parts() -> None:
    """The decoder takes every blank out of a first token, so "b " begins with "b" alone."""
    ids = {name: i for i, name in enumerate(vocabulary(False))}
    backend = Backend(models.BPE(ids, [("b", SPACE)], unk_token="<unk>", byte_fallback=True))
    backend.decoder = DECODERS["metaspace"]()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer = Tokenizer(backend)
    assert Speller(tokenizer, words_of(tokenizer).bytes, set())(b"b ") == [ids["b" + SPACE]]
    exactly(tokenizer, ["b "], lambda may: may[-1])


@settings(deadline=None, max_examples=60)
@given(tokenizers(), st.data())
def test_the_table_is_what_the_decoder_joins(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Wherever the bytes are UTF-8, with what a first token loses."""
    table = tokenizer.bytes_of
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), min_size=1, max_size=6))
    joined = table.begins(ids[0]) + b"".join(map(table, ids[1:]))
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        return
    if table(ids[0]) == b" ":  # the decoder then looks at the next one for a space to leave out, or has none left
        return
    assert tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("name", ["pocket", "smollm2", "gemma3-270m"])
def test_vocabularies_of_models(name: str) -> None:
    """Trained ones: what comes with phasewise, and what this machine has fetched."""
    if name in KNOWN and not shelf.place(KNOWN[name]).exists():
        pytest.skip(f"{name} has not been fetched")
    exactly(Tokenizer.load(model_path(name)), ["blue", "e\u0301 é", ' {"a": "日本"}', "\u00a0\n\n  x", "ﬁ ™"], max)


@pytest.mark.parametrize("prompt", ["The", ""])
@pytest.mark.parametrize("choice", [["blue", "green"], [" blue", " green"], ["a  b ", "\u2581"]])
def test_a_model_with_spaces_in_its_tokens(choice: list[str], prompt: str, tmp_path: Path) -> None:
    """After a prompt the answer's first space is its own; where there is none, no answer can begin with one."""
    backend = sentencepiece([" b", "lue", " blue", "blue", " "]).backend
    backend.normalizer = NORMALIZERS["prepend"]()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    write_checkpoint(tmp_path, layers=1, vocab=backend.get_vocab_size(), context=256)
    backend.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), dtype="float32")
    if not prompt and choice[0].startswith(" "):
        (output,) = llm.generate([[1]], choice=choice)
        assert output.left.how == "failed" and output.left.asked
        return
    asked: list[Any] = [prompt] if prompt else [[1]]
    assert llm.generate(asked, choice=choice, temperature=1, seed=2)[0].text in choice
    if prompt:
        assert llm.chat([{"role": "user", "content": prompt}], choice=choice).text in choice
        assert "".join(llm.stream(prompt, choice=choice)) in choice
