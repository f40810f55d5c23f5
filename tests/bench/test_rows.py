"""Rows for any model: what is asked is what is said, and the answers are compared as promised."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.bench.drive import Bench
from phasewise.bench.forced import Forced, write
from phasewise.bench.judge import Judge, stretch_losses
from phasewise.bench.quality import ALL, TASKS, TextCodec
from phasewise.bench.rows import agreement, english, index, later, longtext
from phasewise.bench.rows.subject import Subject
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.llm import LLM
from phasewise.load import model_path
from phasewise.model.tokenizer import Tokenizer
from tests import tiny
from tests.oracle import logits
from tests.serve.tiny_chat import CONTEXT, chat_checkpoint


def quiet(done: int) -> None:
    """Nobody watches."""


@cache
def subject(chats: bool = True) -> Subject:
    """The pocket model's way with text; it answers nothing and every stretch has the loss 1."""
    return Subject(
        lambda prompts, room: [[] for _ in prompts], lambda tokens, stretches: [1.0] * len(stretches),
        lambda jobs, room: [[] for _ in jobs], TextCodec.load(Path(model_path("pocket"))), 2048, chats,
    )  # fmt: skip


@cache
def llm(chat: bool = True) -> LLM:
    return LLM(str(chat_checkpoint(chat)), dtype="float32", limits=Limits(kv_bytes=64 << 20))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    rng = Random(0)
    texts = [" ".join(rng.choices(words, k=12 + i)) for i in range(8)]
    lines = [json.dumps({"turns": [text, "and then?"]}) for text in texts[:4]]
    path.write_text("\n".join([*lines, *(json.dumps({"prompt": text}) for text in texts[4:])]))
    return path


# ---- pass keys in English
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(500, 2500), chats=st.booleans())
def test_a_pass_key_text_has_its_length_and_one_key(seed: int, length: int, chats: bool) -> None:
    ids, key = english.prompt(subject(chats).ask, Random(seed), length)
    assert 0.99 * length <= len(ids) <= length
    text = subject(chats).text.decode(ids)
    assert set(re.findall(r"\d+", text)) == {key} and len(key) == 5
    body = text.split("\n\n")[1]
    said = [sentence for sentence in re.findall(r"[^.:]+\.", body) if key not in sentence]
    assert max(Counter(said).values()) == 1
    assert (ids, key) == english.prompt(subject(chats).ask, Random(seed), length)
    assert ids != english.prompt(subject(chats).ask, Random(seed + 1), length)[0]
    assert text.endswith(english.OPENING) != chats


@pytest.mark.parametrize("name", [name for name, length in english.LENGTHS.items() if length < CONTEXT])
def test_pass_key_texts_have_their_length_in_the_tokens_of_the_model(name: str) -> None:
    """Of a tokenizer with hardly a word in it."""
    tokenizer = llm().tokenizer
    text = TextCodec(
        lambda said: tokenizer.encode(said, False), tokenizer.decode, lambda messages: llm().encode_chat(messages)
    )
    [(ids, _)] = english.asked(name, replace(subject(), text=text).ask, Random(3), 1)
    assert 0.99 * english.LENGTHS[name] <= len(ids) <= english.LENGTHS[name]


def test_keys_lie_at_all_depths() -> None:
    depths = []
    for seed in range(15):
        ids, key = english.prompt(subject().ask, Random(seed), 600)
        body = subject().text.decode(ids).split("\n\n")[1]
        depths.append(body.index(key) / len(body))
    assert min(depths) < 0.15 and max(depths) > 0.75 and 0.3 < sum(depths) / 15 < 0.7


def test_a_text_too_short_for_the_question_is_refused() -> None:
    with pytest.raises(UserError, match="more than 20"):
        english.prompt(subject().ask, Random(0), 20)


@pytest.mark.parametrize(
    ("reply", "says"),
    [("The pass key is 12345.", True), ("12,345", True), ("**12345**", True), ("1234", False), ("123456", False),
     ("54321, not 12345", False), ("", False), ("none", False)],
)  # fmt: skip
def test_the_first_number_of_a_reply_is_its_answer(reply: str, says: bool) -> None:
    assert english.right(reply, "12345") is says


def test_who_reads_the_key_scores_one_and_who_is_mute_zero() -> None:
    text = subject().text

    def reader(prompts: list[list[int]], room: int) -> list[list[int]]:
        keys = [re.findall(r"\d{5}", text.decode(prompt))[0] for prompt in prompts]
        replies = [text.encode(f"The pass key is {key}.") for key in keys]
        assert max(map(len, replies)) <= room
        return replies

    row = index.general("passkey-english@1k", replace(subject(), generate=reader), 5, 0)[0]
    assert (row.row.value, row.row.n, row.values) == (1.0, 5, [1.0] * 5)
    assert index.general("passkey-english@1k", subject(), 5, 0)[0].row.value == 0.0


# ---- long texts
@pytest.mark.thorough
def test_prose_is_in_no_text_that_models_were_trained_on() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.replace("#", " ").split()
        return {tuple(words[i : i + 12]) for i in range(len(words) - 11)}

    held = runs(longtext.prose())
    assert len(held) > 20_000
    assert not any(runs(text) & held for text in sources(held_out=False).values())


def test_windows_are_scored_at_the_end_of_each_quarter() -> None:
    seen: list[tuple[list[int], list[range]]] = []

    def losses(tokens: list[int], stretches: list[range]) -> list[float]:
        seen.append((tokens, list(stretches)))
        return [1.0, 2.0, 3.0, 6.0]

    asked = replace(subject(), losses=losses)
    tokens, size, end = index.general("docs@2k", asked, 2, 0)
    assert {len(ids) for ids, _ in seen} == {2048} and len({tuple(ids) for ids, _ in seen}) == 2
    assert [stretch.stop for stretch in seen[0][1]] == [512, 1024, 1536, 2048]
    assert tokens.values == [3.0] * 2 and end.row.value == 6.0
    assert (tokens.row.unit, size.row.unit, end.row.name) == ("nats/token", "bits/byte", "docs@2k, its end")
    assert 0.5 < size.row.value < 4.4  # 3 nats are 4.3 bits, over more than a byte per token
    first = list(seen)
    index.general("docs@2k", asked, 2, 0)
    assert seen[2:] == first
    index.general("docs@2k", asked, 2, 1)
    assert seen[4:] != first


def test_the_loss_of_a_stretch_is_the_models_cross_entropy() -> None:
    tokens, stretches = tiny.prompts(96, seed=8)[0], [range(16, 24), range(40, 48), range(88, 96)]
    forced = Forced()
    engine = Bench(tiny.model()).engine({}, Limits(kv_bytes=64 << 20), sample=forced)
    scores = logits(tiny.checkpoint(), tokens).double().log_softmax(-1)
    want = [-float(scores[torch.tensor(s) - 1, torch.tensor(tokens)[s.start : s.stop]].mean()) for s in stretches]
    assert stretch_losses(engine, forced, tokens, stretches) == pytest.approx(want, abs=1e-4)
    assert engine.counters.prefix_hits > 0  # what the longest prompt computed, the others took


def test_a_text_too_short_for_a_window_is_refused() -> None:
    window = longtext.TextWindow(lambda: "a few words", 2048)
    with pytest.raises(UserError, match="too few for windows of 2048"):
        longtext.long_loss("docs@2k", window, subject(), Random(0), 1)


# ---- agreement
def test_choices_are_the_models_own_beside_a_text_that_is_not() -> None:
    tokens, forced = tiny.prompts(60, seed=9)[0], Forced()
    for verbs in ({}, {"draft": "prompt_lookup:k=3"}):
        engine = Bench(tiny.model()).engine(verbs, Limits(kv_bytes=64 << 20), sample=forced)
        [written] = write(engine, forced, [(tokens, 20)])
        assert written.choices == logits(tiny.checkpoint(), tokens)[19:59].argmax(-1).tolist()
    assert not forced.scripts and not forced.nats and not forced.choices


def test_an_exact_method_agrees_with_the_default(questions: Path) -> None:
    rows = Judge(llm(), {"draft": "prompt_lookup"}).measure("agreement", 3, 0, quiet, questions)
    assert (rows[0].value, rows[0].low, rows[0].n, rows[0].unit) == (1.0, 1.0, 3, "share")
    assert rows[1].value == rows[2].value  # the common beginning is all of the default's text
    assert [row.name for row in rows[3:]] == ["tokens per pass", "drafts accepted"]
    for row in rows[3:]:
        assert row.value >= 1 if row.unit == "tokens" else 0 <= row.value <= 1


def test_a_lossy_method_agrees_in_part_and_not_less_for_an_early_difference(questions: Path) -> None:
    judge = Judge(llm(), {"evict": "streaming:sinks=1,window=8"})
    share, common, whole = judge.measure("agreement", 3, 0, quiet, questions)
    assert 0 < share.value < 1 and 0 <= share.low <= share.high <= 1
    assert common.value < whole.value


def test_agreement_counts_places_and_beginnings() -> None:
    free = agreement.Free([[1, 2, 9, 9], [5]], [[1, 3], [1]], 6, 2)
    share, common, whole, passes, drafts = agreement.agreement(
        [[7], [8]],
        lambda prompts: [[1, 2, 3, 4], [5, 6]],
        lambda prompts: free,
        lambda prompts, texts: [[1, 9, 3, 4], [5, 6]],
    )
    assert share.values == [0.75, 1.0] and common.values == [2.0, 1.0] and whole.values == [4.0, 2.0]
    assert passes.values == [3.0] and (drafts.row.value, drafts.row.n) == (pytest.approx(1 / 3), 6)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", ":2: not JSON"),
        ('{"turns": []}', ":2: no prompt"),
        ('{"text": "x"}', ":2: no prompt"),
        ("[1]", ":2: no prompt"),
    ],
)
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(UserError, match=says):
        agreement.read(path)
    path.write_text("\n")
    with pytest.raises(UserError, match="no prompt in it"):
        agreement.read(path)
    with pytest.raises(UserError, match="cannot be read"):
        agreement.read(tmp_path / "nowhere.jsonl")


def test_prompts_beyond_the_context_are_left_out_whole_or_refused(questions: Path) -> None:
    with questions.open("a") as file:
        file.write("\n" + json.dumps({"prompt": "dog " * 3000}))
    found = agreement.prompts(subject(), questions, Random(0), 8)
    assert len(found) == 8 and max(map(len, found)) < 100
    with pytest.raises(UserError, match="8 of its 9 prompts fit"):
        agreement.prompts(subject(), questions, Random(0), 9)


# ---- which rows, and what keeps one from being measured
def test_a_model_gets_the_rows_that_suit_it(questions: Path) -> None:
    pocket = Tokenizer.load(model_path("pocket"))
    assert index.suited(pocket, 2048, None) == ([*ALL, *later.ROWS], [])
    wanted, long = index.suited(llm().tokenizer, 2048, questions)
    assert wanted == ["code@2k", "docs@2k", "passkey-english@1k", "passkey-english@2k", "agreement"]
    assert long == ["code@4k", "code@8k", "docs@4k", "docs@8k", "passkey-english@4k", "passkey-english@7.5k"]
    asked = list(english.FURTHER)
    assert index.suited(llm().tokenizer, 1 << 20, None) == ([name for name in index.GENERAL if name not in asked], [])


def test_what_examples_are_taken_from_is_told_from_another_text(
    questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_library = ("code", "next line", "code@2k", "code@4k", "code@8k", "docs@2k", "docs@4k", "docs@8k")
    found = {name: index.text(name, None) for name in index.EVERY if name != "agreement"}
    assert {name for name, text in found.items() if text is not None} == set(of_library)
    assert len({found[name] for name in of_library[:5]}) == 1
    assert found["docs@2k"] == found["docs@4k"] == found["docs@8k"] != found["code"]
    asked = index.text("agreement", questions)
    questions.write_text(questions.read_text() + "\n" + json.dumps({"prompt": "one more"}))
    assert asked is not None and index.text("agreement", questions) != asked

    index._of.cache_clear()
    monkeypatch.setattr(longtext, "sources", lambda held_out: {"one.py": "of another Python"})
    assert index.text("code@2k", None) == index.text("code", None) != found["code"]
    assert index.text("docs@2k", None) == found["docs@2k"]
    index._of.cache_clear()


def test_a_row_beyond_the_context_is_refused_with_what_fits() -> None:
    with pytest.raises(
        UserError, match=r"code@8k needs a context of 8,192 tokens, the model's is 2,048: measure code@2k"
    ):
        Judge(llm(), {}).measure("code@8k", 1, 0, quiet)
    with pytest.raises(UserError, match="leave it out"):
        index.fits("code@2k", 100)


@pytest.mark.thorough
def test_methods_that_carry_texts_beyond_the_context_are_measured_there() -> None:
    for verbs in ({"attend": "token_select:k=40,chunk=64,positions=list"}, {"evict": "streaming:window=252"}):
        judge = Judge(llm(), verbs)
        (row,) = judge.measure("passkey-english@4k", 1, 0, quiet)
        ((prompt, _),) = judge.asked["passkey-english@4k"]
        assert row.n == 1 and len(prompt) > CONTEXT and judge.answers["passkey-english@4k"][0]


def test_a_model_without_a_chat_template_is_told_so_or_asked_otherwise(questions: Path) -> None:
    judge = Judge(llm(chat=False), {})
    for name in TASKS:
        with pytest.raises(UserError, match=f"{name} is asked through a chat template"):
            judge.measure(name, 1, 0, quiet)
    assert judge.measure("passkey-english@1k", 2, 0, quiet)[0].n == 2
    assert judge.measure("agreement", 2, 0, quiet, questions)[0].value == 1.0


def test_unknown_rows_and_missing_prompts_are_named() -> None:
    with pytest.raises(UserError, match="Did you mean code@2k"):
        index.known(["code@2"], None)
    with pytest.raises(UserError, match="--prompts FILE"):
        index.known(["agreement"], None)


@pytest.mark.thorough
def test_the_loss_on_long_windows_hangs_on_what_is_kept() -> None:
    plain, lossy = (
        Judge(llm(), verbs).measure("docs@2k", 1, 0, quiet)[0].value
        for verbs in ({}, {"evict": "streaming:sinks=1,window=16"})
    )
    assert plain != pytest.approx(lossy, abs=1e-3)
