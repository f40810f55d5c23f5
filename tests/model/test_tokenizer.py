"""Text to ids and back; a stream's pieces joined are the whole text, and no piece ends in half a character."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from phasewise.errors import UserError
from phasewise.model.stream import ALPHABET
from phasewise.model.tokenizer import LONG, Detokenizer, Tokenizer, begun
from tests.serve.tiny_chat import chat_checkpoint

TEXTS = ["the cat sat on the mat, the end", "naïve café — 你好, 世界! 🎉🎊 привет", "  two  spaces\n\ttabs"] * 3


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    backend.add_tokens(["<tool>", "a b", "｜x"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend)


def sentencepiece(decoder: str) -> Tokenizer:
    """Metaspace words with byte fallback, in the two spellings that checkpoints use."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for piece in ["▁", "a", "b", "e", "t", "h", "é", "你", "▁a", "▁▁", "th", "the", "▁the", "ab", "▁ab"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("a", "b"), ("▁a", "b")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if decoder == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tool>"])
    return Tokenizer(backend)


MAKERS = {"byte level": byte_level(), "metaspace": sentencepiece("metaspace"), "stripped": sentencepiece("strip")}
NAMES = st.sampled_from(sorted(MAKERS))


def pieces(tokenizer: Tokenizer, ids: list[int], size: int = 1, skip_special: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special)
    found = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*found, stream.flush()]


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of single bytes above 0x7F: what broken characters are made of."""
    spelled = [char for char, byte in ALPHABET.items() if byte > 0x7F] if tokenizer.byte_level else [
        f"<0x{byte:02X}>" for byte in range(0x80, 0x100)]  # fmt: skip
    found = [tokenizer.id(token) for token in spelled]
    assert None not in found
    return [i for i in found if i is not None]


@settings(max_examples=60, deadline=None)
@given(NAMES, st.data(), st.integers(1, 4), st.booleans())
def test_random_ids(name: str, data: st.DataObject, size: int, skip_special: bool) -> None:
    tokenizer = MAKERS[name]
    known = st.integers(0, tokenizer.size + 3)  # a model's vocabulary may reach beyond the tokenizer's
    bytes_ = st.sampled_from(byte_ids(tokenizer))
    ids = data.draw(st.lists(known | bytes_, max_size=24))
    assert "".join(pieces(tokenizer, ids, size, skip_special)) == tokenizer.decode(ids, skip_special)


@settings(max_examples=60, deadline=None)
@given(NAMES, st.text(max_size=40) | st.text("the ab é你🎉\u200d ", max_size=40), st.integers(1, 3))
def test_random_text(name: str, text: str, size: int) -> None:
    tokenizer = MAKERS[name]
    ids = tokenizer.encode(text)
    found = pieces(tokenizer, ids, size)
    assert "".join(found) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found), "half a character was shown"


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = MAKERS["byte level"]
    if not any(added in text for added in ("<s>", "</s>")):
        assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


@settings(max_examples=80, deadline=None)
@given(
    NAMES, st.text(max_size=40) | st.text("the ab é你🎉\u200d\n ", max_size=40), st.integers(0, 60), st.integers(1, 3)
)
def test_a_text_goes_on_as_if_it_were_whole(name: str, text: str, cut: int, size: int) -> None:
    """With its first space, wherever it is cut."""
    tokenizer = MAKERS[name]
    ids = tokenizer.encode(text)
    before, after = ids[:cut], ids[cut:]
    if "\ufffd" in tokenizer.decode(before) or ("\ufffd" in tokenizer.decode(after) and "\ufffd" not in text):
        return  # cut within a character
    stream = Detokenizer(tokenizer, before=before)
    found = [stream.push(after[start : start + size]) for start in range(0, len(after), size)]
    assert tokenizer.decode(before) + "".join(found) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["metaspace", "stripped"])
def test_byte_tokens_are_shown_as_soon_as_they_are_characters(name: str) -> None:
    tokenizer = MAKERS[name]
    line, parrot = tokenizer.id("<0x0A>"), [tokenizer.id(f"<0x{byte:02X}>") for byte in "🦜".encode()]
    assert line is not None and None not in parrot
    ids = [line, line, *parrot, line]
    assert pieces(tokenizer, ids) == ["\n", "\n", "", "", "", "🦜", "\n", ""]
    broken = [line, parrot[0], parrot[1], line, parrot[1], line, parrot[0]]
    assert pieces(tokenizer, broken) == ["\n", "", "", "\ufffd\ufffd\n", "\ufffd", "\n", "", "\ufffd"]
    assert tokenizer.decode(broken) == "\n\ufffd\ufffd\n\ufffd\n\ufffd"
    assert tokenizer.decode(parrot[:2]) == str(tokenizer.backend.decode(parrot[:2])) == "\ufffd\ufffd"


@pytest.mark.parametrize("name", ["metaspace", "stripped"])
def test_a_prompt_of_special_tokens_alone_has_no_text_to_go_on_with(name: str) -> None:
    tokenizer = MAKERS[name]
    begin, the, tool = (tokenizer.id(token) for token in ("<s>", "▁the", "<tool>"))
    assert Detokenizer(tokenizer, before=[begin] * 200).push([the]) == "the"
    assert Detokenizer(tokenizer, before=[the, *[begin] * 200]).push([the]) == " the"
    assert Detokenizer(tokenizer, before=[tool]).push([the]) == " the"


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_character_of_several_tokens_comes_whole(name: str) -> None:
    tokenizer = MAKERS[name]
    ids = tokenizer.encode("the 🦜 ab", add_special=False)
    shown = [piece for piece in pieces(tokenizer, ids) if piece]
    assert len(shown) > 2, "nothing was streamed"
    assert any("🦜" in piece for piece in shown)
    assert "".join(shown) == "the 🦜 ab"


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_words_are_shown_at_once_and_windows_stay_short(name: str) -> None:
    """No text waits longer than it must, however long the output: the work per token is bounded."""
    tokenizer = MAKERS[name]
    ids = tokenizer.encode("the ab " * 200, add_special=False)
    stream = Detokenizer(tokenizer)
    backend = stream._stream._pieces.backend
    longest = 0

    class Watched:
        def decode(self, ids: list[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return str(backend.decode(ids, **options))

        def id_to_token(self, i: int) -> str | None:
            return backend.id_to_token(i)

    stream._stream._pieces.backend = Watched()
    for n, i in enumerate(ids):
        shown = stream.push([i])
        assert shown or n == 0, "a leading space marker alone may be silent, nothing else"
    assert longest <= 4


def test_invalid_bytes_do_not_wait_for_ever() -> None:
    tokenizer = MAKERS["byte level"]
    broken = next(i for i in range(tokenizer.size) if tokenizer.token(i) == "Ģ")  # byte 0x80 alone
    shown = pieces(tokenizer, [broken] * 50)
    assert shown[:50] == ["\ufffd"] * 50


def test_special_tokens() -> None:
    tokenizer = MAKERS["byte level"]
    bos = tokenizer.id("<s>")
    assert tokenizer.encode("the")[0] == bos
    assert tokenizer.encode("the", add_special=False)[0] != bos
    ids = tokenizer.encode("the<tool></s>")
    assert tokenizer.decode(ids) == "the<tool>" == "".join(pieces(tokenizer, ids))
    whole = "<s>the<tool></s>"
    assert tokenizer.decode(ids, skip_special=False) == whole == "".join(pieces(tokenizer, ids, skip_special=False))
    assert tokenizer.special_ids == {tokenizer.id("<s>"), tokenizer.id("</s>")}
    assert tokenizer.token(bos) == "<s>"
    assert tokenizer.id("nothing like this") is None
    assert tokenizer.token(10**6) is None


def test_load(tmp_path: Path) -> None:
    MAKERS["byte level"].backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.encode("the mat") == MAKERS["byte level"].encode("the mat")
    assert tokenizer.size == MAKERS["byte level"].size


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": 3}'])
def test_a_broken_tokenizer(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_long_texts_are_read_as_short_ones_are(name: str, add: bool) -> None:
    tokenizer = MAKERS[name]
    text = "the quick brown fox, 17 + 25; " * 400
    assert len(text) > LONG
    assert tokenizer.encode(text, add) == list(tokenizer.backend.encode(text, add_special_tokens=add).ids)
    assert len(text) <= 4 * tokenizer.longest * len(tokenizer.encode(text, False))


def test_others_go_on_while_a_long_text_is_read() -> None:
    """Who reads it does not keep the interpreter: another thread wakes up many times meanwhile."""
    tokenizer, read = Tokenizer.load(chat_checkpoint()), threading.Event()

    def work() -> None:
        tokenizer.encode("the quick brown fox " * 25_000)
        read.set()

    thread, ticks = threading.Thread(target=work), 0
    thread.start()
    while not read.wait(0.002):
        ticks += 1
    thread.join()
    assert ticks > 10


# ---- what comes before a text


class BeginCase(NamedTuple):
    """A tokenizer that puts `before` and `after` around texts, or nothing."""

    before: bool
    after: bool

    def tokenizer(self) -> Tokenizer:
        made = byte_level().backend
        ids = {name: made.token_to_id(name) for name in ("<s>", "</s>")}
        single = ["<s>"] * self.before + ["$A"] + ["</s>"] * self.after
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
        return Tokenizer(made)


@pytest.mark.parametrize("case", [BeginCase(*flags) for flags in itertools.product((False, True), repeat=2)], ids=str)
def test_a_text_begins_with_the_begin_token_once(case: BeginCase) -> None:
    """Where the tokenizer has one, be the text short or long. One that has written it itself gets another, as from
    transformers; prompts of benchmarks go through `begun`, which keeps one."""
    tokenizer = case.tokenizer()
    begin, end = tokenizer.id("<s>"), tokenizer.id("</s>")
    plain = tokenizer.encode("the mat", add_special=False)
    want = [begin] * case.before + plain + [end] * case.after
    assert tokenizer.begin == [begin] * case.before
    assert tokenizer.encode("the mat") == want
    assert tokenizer.encode("<s>the mat") == [begin] * case.before + [begin, *plain] + [end] * case.after
    assert begun(tokenizer.encode("<s>the mat", add_special=False), tokenizer.begin) == [begin, *plain]
    assert tokenizer.encode("<s>the mat", add_special=False) == [begin, *plain]
    long = tokenizer.encode("the mat " * LONG)
    assert (long[0] == begin) == case.before and begin not in long[1:]
    assert tokenizer.encode("") == [begin] * case.before + [end] * case.after


def test_ids_begin_with_the_begin_token_once() -> None:
    assert begun([7, 8], [5]) == [5, 7, 8] == begun([5, 7, 8], [5])
    assert begun([7, 8], []) == [7, 8] and begun([], [5]) == [5]
    assert begun([5, 7], [5, 6]) == [5, 6, 5, 7] and begun([5, 6, 7], [5, 6]) == [5, 6, 7]
