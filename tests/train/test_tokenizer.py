"""The tokenizer keeps digits apart and task words whole, and its chat template is what training rows look like."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from phasewise.train.mixture import NO_LOSS, pad_rows
from phasewise.train.tasks import Turn
from phasewise.train.tokenizer import SPECIAL, write
from phasewise.train.words import WORDS
from tests.train import tiny


def test_digits_are_single_tokens_and_words_are_whole() -> None:
    tokenizer = tiny.tokenizer()
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1969").ids] == ["1", "9", "6", "9"]
    assert all(len(tokenizer.encode(space + word).ids) == 1 for word in WORDS for space in ("", " "))


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # é 漢字 🙂\n", "", "  \n\n   a", "12 + 30 = 42"])
def test_text_survives_the_round_trip(text: str) -> None:
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_single_and_first() -> None:
    tokenizer = tiny.tokenizer()
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    assert all(tokenizer.encode(token).ids == [index] for index, token in enumerate(SPECIAL))


def test_the_chat_template_equals_the_training_rows(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    write(tokenizer, tmp_path, 512)
    template = jinja2.Template(json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"])
    pieces = tiny.mixture().chat([Turn("Say: a", "a"), Turn("Sort: 2 1", "1 2")], "Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say: a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Sort: 2 1"},
    ]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    assert [i for ids, _ in pieces[:3] for i in ids] == tokenizer.encode(prompt).ids
    assert tokenizer.decode(pieces[3][0], skip_special_tokens=False) == "1 2<|im_end|>"


def test_transformers_renders_the_same_chat(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny.tokenizer()
    write(tokenizer, tmp_path, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi 12"}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi 12<|im_end|>\n<|im_start|>assistant\n"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert theirs.eos_token == "<|im_end|>"


def test_only_replies_are_learned() -> None:
    ids, targets, positions = pad_rows([[([5, 6, 7], False), ([8, 9], True)], [([5], False), ([6], True)]], pad=1)
    assert ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 1, 1, 1]]
    assert targets.tolist() == [[NO_LOSS, NO_LOSS, 8, 9, NO_LOSS], [6, *[NO_LOSS] * 4]]
    assert positions.tolist() == [list(range(5))] * 2
