"""Text that is certain: whole characters, no stop string, nothing lost."""

from __future__ import annotations

import random

import pytest

from phasewise.errors import UserError
from phasewise.model.tokenizer import Tokenizer
from phasewise.request.text import Text
from tests.serve.tiny_chat import chat_checkpoint


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(chat_checkpoint())


def pieces(text: Text, tokens: list[int], size: int = 1) -> list[str]:
    return [text.push(tokens[i : i + size]) for i in range(0, len(tokens), size)] + [text.flush()]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_whole_characters_only(tokenizer: Tokenizer, size: int) -> None:
    written = "héllo, wörld: 日本語 🎉🎉 the fox"
    tokens = tokenizer.encode(written)
    assert len(tokens) > len(written)  # characters of several tokens
    found = pieces(Text(tokenizer), tokens, size)
    assert "".join(found) == written
    assert not any("\ufffd" in piece for piece in found)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, size: int) -> None:
    tokens = tokenizer.encode("the lazy dog jumps")
    for stops, expected in (
        ("zy d", "the la"),
        (["dog", "lazy"], "the "),
        (["jumps!", "jumpy"], "the lazy dog jumps"),
        (["e lazy cat", "g"], "the lazy do"),
        ("the", ""),
        ("s", "the lazy dog jump"),
        ("é", "the lazy dog jumps"),
    ):
        text = Text(tokenizer, stops)
        assert "".join(pieces(text, tokens, size)) == expected, stops
        assert text.stopped == (expected != "the lazy dog jumps")


def test_a_stop_string_of_half_seen_characters(tokenizer: Tokenizer) -> None:
    text = Text(tokenizer, ["🎉"])
    assert "".join(pieces(text, tokenizer.encode("a🎉b"))) == "a"


def test_what_may_be_a_stop_string_waits_no_longer_than_it_must(tokenizer: Tokenizer) -> None:
    text = Text(tokenizer, ["xyxz"])
    letters = {letter: tokenizer.encode(letter) for letter in "xyza"}
    given = [text.push(letters[letter]) for letter in "axyxyxa"]
    assert given == ["a", "", "", "", "xy", "", "xyxa"]
    assert (text.flush(), text.stopped) == ("", False)
    assert [text.push(letters[letter]) for letter in "axyxyxza"] == ["a", "", "", "", "xy", "", "", ""]
    assert text.stopped


def test_random_stops_against_the_plain_way(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        written = "".join(rng.choices("abé", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("abé", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        tokens, text, shown = tokenizer.encode(written), Text(tokenizer, stops), ""
        for i, token in enumerate(tokens):
            shown += text.push([token])
            known = tokenizer.decode(tokens[: i + 1]).rstrip("\ufffd")
            ends = [known.find(stop) for stop in stops if stop in known]
            if ends:  # the engine ends the request at this token
                assert text.stopped and shown == known[: min(ends)]
                break
            hidden = known[len(shown) :]
            assert known.startswith(shown)
            assert not hidden or any(stop.startswith(hidden) for stop in stops), "text is held back for no reason"
        else:
            assert shown + text.flush() == written and not text.stopped


def test_watching_decides_as_writing_does(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the quick brown fox")
    watching, writing = Text(tokenizer, ["own"]), Text(tokenizer, ["own"])
    ended = next(i for i, token in enumerate(tokens) if watching.watch(token))
    assert writing.push(tokens[:ended]) + writing.push(tokens[ended : ended + 1]) == "the quick br"
    assert writing.stopped and writing.push(tokens) == "" == writing.flush()


def test_end_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    [x] = tokenizer.encode("x")
    assert Text(tokenizer, ends=[x]).push(tokenizer.encode("axb")) == "ab"


def test_empty_stop_strings_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="empty string"):
        Text(tokenizer, ["a", ""])
