"""Tokens that files beside tokenizer.json add or mark are those of transformers, whatever files there are."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from phasewise.errors import UserError
from phasewise.model.directory import Directory
from phasewise.model.tokenizer import Tokenizer

TEXT = "ok <|end|> ok<|end|>ok<s>ok <|a|><|b|> o<|call|>k"
AFTER = "<|end|>"


def flags(content: str, special: bool, **more: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            "special": special, **more}  # fmt: skip


def write(folder: Path, plain: tuple[str, ...] = (), **files: Any) -> None:
    """A byte-level tokenizer.json with `plain` tokens added, and other files by their names without `.json`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    vocab["ok"] = len(vocab)
    backend = Backend(models.BPE(vocab, [("o", "k")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    backend.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    files["tokenizer_config"] = {**base, **files.get("tokenizer_config", {})}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


N = 260  # the first id that the vocabulary leaves free
PLAIN: tuple[tuple[str, ...], ...] = ((), (AFTER,), ("<|a|>", AFTER))
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "special in the decoder": {"added_tokens_decoder": {str(N): flags(AFTER, True)}},
    "plain in the decoder": {"added_tokens_decoder": {str(N): flags(AFTER, False)}},
    "strips": {"added_tokens_decoder": {str(N): flags(AFTER, True, lstrip=True, rstrip=True)}},
    "several, out of order, with a gap": {
        "added_tokens_decoder": {"400": flags("<|b|>", False), "261": flags("<|a|>", True), "1": flags("<s>", True)}
    },
    "end": {"eos_token": AFTER},
    "end with flags": {"eos_token": {"__type": "AddedToken", **flags(AFTER, True)}},
    "additional": {"additional_special_tokens": [AFTER, "<|a|>"]},
    "extra list": {"extra_special_tokens": [AFTER, "<|call|>"]},
    "extra by name": {"extra_special_tokens": {"image_token": "<|a|>", "call_token": "<|call|>"}},
    "name of its own": {"video_token": "<|b|>"},
    "splits": {"split_special_tokens": True, "added_tokens_decoder": {str(N): flags(AFTER, True)}},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "added_tokens": {"added_tokens": {AFTER: N, "<|a|>": N + 1}},
    "map": {"special_tokens_map": {"eos_token": AFTER, "additional_special_tokens": ["<|b|>"]}},
    "map with flags": {"special_tokens_map": {"pad_token": flags("<|b|>", False), "eos_token": "</s>"}},
    "both": {
        "added_tokens": {AFTER: N, "<|a|>": N + 1},
        "special_tokens_map": {"eos_token": AFTER, "additional_special_tokens": ["<|a|>"]},
    },
    "both, and extra": {
        "added_tokens": {AFTER: N}, "special_tokens_map": {"extra_special_tokens": [AFTER, "<|call|>"]},
    },
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_are_those_of_transformers(config: str, tmp_path: Path) -> None:
    for plain, other in itertools.product(PLAIN, OTHERS):
        folder, where = tmp_path / "model", f"{config}, {other}, {plain} in tokenizer.json"
        write(folder, plain, tokenizer_config=CONFIGS[config], **OTHERS[other])
        theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
        ids = theirs(TEXT).input_ids
        assert ours.encode(TEXT) == ids, where
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), where
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids), where
        assert Directory(folder).special() == theirs.special_tokens_map, where
        assert theirs.eos_token_id in Directory(folder).ends(), where


PADDING = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>", "pad_to_multiple_of": None}


@pytest.mark.parametrize("saved", [
    {"truncation": {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 2}},
    {"truncation": {"direction": "Right", "max_length": 4, "strategy": "OnlyFirst", "stride": 0}},
    {"padding": {**PADDING, "strategy": {"Fixed": 64}}},
    {"padding": {**PADDING, "strategy": "BatchLongest", "pad_to_multiple_of": 8, "direction": "Left"}},
])  # fmt: skip
def test_saved_truncation_and_padding_are_off(saved: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **saved}))
    ours = Tokenizer.load(tmp_path / "model")
    for text in ("o", "okok" * 30, "ok" * 5000):
        assert ours.encode(text) == AutoTokenizer.from_pretrained(tmp_path / "model")(text).input_ids


@pytest.mark.parametrize("name, value, said", [
    ("tokenizer_config", {"added_tokens_decoder": [1]}, "added_tokens_decoder"),
    ("tokenizer_config", {"added_tokens_decoder": {"x": flags("<a>", True)}}, "no token id"),
    ("tokenizer_config", {"eos_token": 7}, "no token"),
    ("tokenizer_config", {"extra_special_tokens": "<a>"}, "extra_special_tokens"),
    ("added_tokens", {"<a>": -1}, "no token id"),
])  # fmt: skip
def test_what_is_no_token_is_named(name: str, value: dict[str, Any], said: str, tmp_path: Path) -> None:
    write(tmp_path / "model", **{name: value})
    with pytest.raises(UserError) as raised:
        Tokenizer.load(tmp_path / "model")
    assert said in str(raised.value) and f"{name}.json" in str(raised.value)


def test_the_tokenizers_end_token_ends_answers_beside_those_of_the_settings(tmp_path: Path) -> None:
    write(tmp_path / "model", tokenizer_config={"eos_token": AFTER}, added_tokens={AFTER: N})
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert Directory(tmp_path / "model").settings().values["eos_token_id"] == [1, 2, N]
