"""Masks against an automaton of our own, on small vocabularies; what a vocabulary's tokens add to a text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.sample._grammars import Grammars
from phasewise.methods.sample._words import Bits, Words
from phasewise.methods.sample.grammar import GrammarState
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests.sample import automaton
from tests.sample.automaton import EMPTY, NONE, Expr, either, many, reached, then
from tests.sample.vocabularies import END, SPECIAL, byte_level, sentencepiece

pytest.importorskip("llguidance")
LETTERS = b'ab{"'
TEXTS = [bytes([letter]) for letter in LETTERS]
EXPRESSIONS = st.recursive(
    st.sets(st.sampled_from(LETTERS), min_size=1).map(automaton.chars),
    lambda inner: st.one_of(
        st.builds(then, inner, inner), st.builds(either, inner, inner), st.builds(many, inner),
        st.builds(either, inner, st.just(EMPTY)),
    ),
    max_leaves=8,
)  # fmt: skip
WORDS = st.lists(st.lists(st.sampled_from(LETTERS), min_size=2, max_size=4).map(bytes), max_size=8, unique=True)


def tokens(mask: Bits | None, vocab: int) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab)).tolist())


def line_of(expression: Expr, words: Words) -> GrammarState:
    return GrammarState(Grammars(words).get({"regex": expression.text()}), words, 0)


@settings(deadline=None, max_examples=50)
@given(EXPRESSIONS, WORDS, st.data())
def test_masks_are_those_of_an_automaton(expression: Expr, longer: list[bytes], data: st.DataObject) -> None:
    """Along a text, and at every node of a tree of guesses below it, in any order. Where the next byte is forced, a
    mask may have only those tokens that the tokenizer itself would spell it with."""
    words = Words(byte_level(TEXTS + longer), 40, [END])
    if expression == EMPTY:
        return
    line, request, state = line_of(expression, words), Request([], Params()), expression
    for _ in range(4):
        line.roll(request)
        paths = data.draw(st.lists(st.lists(st.integers(3, 2 + len(TEXTS + longer)), max_size=3), max_size=4))
        for path in [*paths, []]:
            below = reached(state, b"".join(words.bytes[token] for token in path))
            steps = [reached(state, b"".join(words.bytes[t] for t in path[:n])) for n in range(len(path) + 1)]
            if NONE in steps:
                assert line.mask(tuple(path), ()) is None, "the path leaves the grammar"
            else:
                got, want = tokens(line.mask(tuple(path), ()), 40), automaton.allowed(below, words.bytes, [END])
                forced = END not in want and len({words.bytes[token][:1] for token in want}) == 1
                assert got == want or (forced and got and got < want)
        sure = line.sure(Params())
        for i, token in enumerate(sure):
            assert tokens(line.mask(sure[:i], ()), 40) == {token}, "there is no other"
        going_on = sorted(automaton.allowed(state, words.bytes, [END]) - {END})
        if not going_on:
            break
        request.tokens.append(data.draw(st.sampled_from(going_on)))
        state = reached(state, words.bytes[request.tokens[-1]])


def test_the_automaton_itself() -> None:
    a, b = automaton.chars(b"a"), automaton.chars(b"b")
    ab = many(then(a, b))
    assert reached(ab, b"abab").nullable and not reached(ab, b"aba").nullable and reached(ab, b"b") == NONE
    assert automaton.allowed(ab, [b"", b"a", b"ab", b"aa", b"b", b"x"], [5]) == {1, 2, 5}
    assert then(a, b).text() == "([\\x61][\\x62])"


def test_special_tokens_padding_and_foreign_ids_are_no_text() -> None:
    words = Words(byte_level([b"a", b"<s"]), 40, [END])
    line = line_of(many(automaton.chars(b"a<s>/")), words)
    assert tokens(line.mask((), ()), 40) == {3, 4, END}
    assert words.bytes[1] == b"<s>", "a special token that reads like text"


def test_stop_tokens_that_are_no_text_are_allowed_where_the_text_may_end() -> None:
    words = Words(byte_level([b"a"]), 8, [END])
    line = line_of(then(automaton.chars(b"a"), EMPTY), words)
    assert tokens(line.mask((), [1]), 8) == {3}
    assert tokens(line.mask((3,), [1]), 8) == {END, 1}
    assert line.mask((3, END), [1]) is None, "it has ended"


@pytest.mark.parametrize("strips", [True, False])
def test_sentencepiece_tokens_are_bytes(strips: bool) -> None:
    texts = [" a", "a", " ", "é", " é"]
    tokenizer = sentencepiece(texts, strips)
    words = Words(tokenizer, 300, [END])
    base = len(SPECIAL) + 256
    ids = [base + 1, base, 3 + 0xC3, 3 + 0xA9, base + 4, base + 2]
    assert b"".join(words.bytes[i] for i in ids).decode() == tokenizer.decode(ids) == "a aé é "
    assert (words.strips is not None) == strips
    line = GrammarState(Grammars(words).get({"regex": " ?a"}), words, 0)
    first = {base + 1, 3 + ord("a")}
    assert tokens(line.mask((), ()), 300) == (first if strips else first | {base, base + 2, 3 + ord(" ")})


def test_tokenizers_that_do_not_join_bytes_are_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    from phasewise.model.tokenizer import Tokenizer

    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="byte-level and SentencePiece"):
        Words(Tokenizer(backend), 3, [2])


def test_a_fork_goes_its_own_way() -> None:
    words = Words(byte_level([b"a", b"b"]), 8, [END])
    request = Request([], Params())
    line = line_of(many(then(automaton.chars(b"a"), automaton.chars(b"b"))), words)
    line.mask((3,), ())
    twin = line.fork()
    request.tokens.append(3)
    line.roll(request)
    assert tokens(line.mask((), ()), 8) == {4} and tokens(twin.mask((), ()), 8) == {3, END}
