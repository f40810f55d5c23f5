"""The tokenizer keeps digits apart and task words whole, and its chat template is what training rows look like."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import tokenizers

from phasewise.model.tokenizer import Tokenizer, beginning
from phasewise.train.mixture import NO_LOSS, Mixture, pad_rows
from phasewise.train.tasks import TaskTurn
from phasewise.train.tokenizer import BEGIN, SPECIAL, plain, write
from phasewise.train.words import WORDS
from tests.train import tiny


def test_digits_are_single_tokens_and_words_are_whole() -> None:
    tokenizer = tiny.tokenizer()
    assert [tokenizer.decode([i]) for i in plain(tokenizer, "1969")] == ["1", "9", "6", "9"]
    assert all(len(plain(tokenizer, space + word)) == 1 for word in WORDS for space in ("", " "))


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # é 漢字 🙂\n", "", "  \n\n   a", "12 + 30 = 42"])
def test_text_survives_the_round_trip(text: str) -> None:
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_single_and_first() -> None:
    tokenizer = tiny.tokenizer()
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    assert all(plain(tokenizer, token) == [index] for index, token in enumerate(SPECIAL))


def test_the_chat_template_equals_the_training_rows(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    write(tokenizer, tmp_path, 512)
    template = jinja2.Template(json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"])
    pieces = tiny.mixture().chat([TaskTurn("Say: a", "a"), TaskTurn("Sort: 2 1", "1 2")], "Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say: a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Sort: 2 1"},
    ]
    prompt = template.render(messages=messages, add_generation_prompt=True, bos_token=BEGIN)
    assert [i for ids, _ in pieces[:3] for i in ids] == plain(tokenizer, prompt)
    assert (
        pieces[0][0][0] == tokenizer.token_to_id(BEGIN)
        and sum(BEGIN in tokenizer.decode(ids, False) for ids, _ in pieces) == 1
    )
    assert tokenizer.decode(pieces[3][0], skip_special_tokens=False) == "1 2<|im_end|>"


def test_transformers_renders_the_same_chat(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny.tokenizer()
    write(tokenizer, tmp_path, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi 12"}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == f"{BEGIN}<|im_start|>user\nhi 12<|im_end|>\n<|im_start|>assistant\n"
    assert theirs("hi 12")["input_ids"] == tokenizer.encode("hi 12").ids
    assert (theirs.bos_token, theirs.eos_token) == (BEGIN, "<|im_end|>")


def test_every_text_and_every_row_begins_with_the_beginning_token(tmp_path: Path) -> None:
    begin = tiny.tokenizer().token_to_id(BEGIN)
    write(tiny.tokenizer(), tmp_path, 512)
    mine = Tokenizer.load(tmp_path)
    assert mine.encode("def") == [begin, *mine.encode("def", add_special=False)] and mine.special["bos_token"] == BEGIN
    source, tasks = tiny.mixture().step(0, tiny.STAGES[0])
    assert len(source) + len(tasks) > 2
    for block in (*source, *tasks):
        assert set(block.ids[:, 0].tolist()) == {begin} and int((block.ids == begin).sum()) == len(block.ids)


def test_a_tokenizer_without_one_gives_rows_without_one() -> None:
    written = json.loads(tiny.tokenizer().to_str())
    without = tokenizers.Tokenizer.from_str(json.dumps({**written, "post_processor": None}))
    mixture = Mixture(without, tiny.texts(), 0)
    assert beginning(without) == mixture.begin == []
    ids = [i for ids, _ in mixture.chat([TaskTurn("Say: a", "a")], None) for i in ids]
    assert without.decode(ids, False) == "<|im_start|>user\nSay: a<|im_end|>\n<|im_start|>assistant\na<|im_end|>"


def test_only_replies_are_learned() -> None:
    ids, targets, positions = pad_rows([[([5, 6, 7], False), ([8, 9], True)], [([5], False), ([6], True)]], pad=1)
    assert ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 1, 1, 1]]
    assert targets.tolist() == [[NO_LOSS, NO_LOSS, 8, 9, NO_LOSS], [6, *[NO_LOSS] * 4]]
    assert positions.tolist() == [list(range(5))] * 2
