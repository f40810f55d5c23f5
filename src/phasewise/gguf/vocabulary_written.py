"""Vocabularies, written: from a `tokenizers` pipeline to a file's metadata, for byte-level BPE.

What is written is read again and held against the pipeline: where the file would mean another one, it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from phasewise.errors import UnsupportedModel
from phasewise.gguf import vocabulary
from phasewise.gguf.container import Metadata, TextArray
from phasewise.gguf.vocabulary import CONTROL, NORMAL, SPLITS, UNUSED, USER_DEFINED

MODEL, PRE, LIST = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens"
NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
PROBES = (
    "The cat sat on the mat, didn't it? WE'VE seen 12345 of them in 2024: the end.\n\n  return x + 10\n",
    "naïve cafés — 你好, 世界! 🎉🎊 привет мир, ελληνικά; the thing that they'll do ",
    "def f(self):\r\n    for i in range(100):\n\t\tprint('hello world')  # hello, world!\n\n\n   end",
)


def written(
    tokenizer: Tokenizer, special: Mapping[str, str], templates: Mapping[str, str], size: int, path: Path
) -> dict[str, Any]:
    """The metadata for a pipeline, its special tokens and chat templates, and embeddings of `size` tokens.

    Raises UnsupportedModel, naming the model `path`, for a pipeline that such a file cannot say.
    """
    told = json.loads(tokenizer.to_str())
    if told["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(told["pre_tokenizer"]):
        raise _refused(path, f"it is {told['model']['type']}, not byte-level BPE")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in told["model"]["merges"]]
    found = _tokens(tokenizer, special, size) | {"tokenizer.ggml.merges": merges}
    if "default" in templates:
        found["tokenizer.chat_template"] = templates["default"]
    for pre in SPLITS:
        if _same(tokenizer, read := {**found, PRE: pre}, path):
            return read
    raise _refused(path, "no name for how it cuts text gives the same tokens")


def _tokens(tokenizer: Tokenizer, special: Mapping[str, str], size: int) -> dict[str, Any]:
    """The list of tokens with their types, which of them are special, and what goes around a text."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [f"[PAD{i}]" for i in range(max(size, max(ids.values()) + 1))]
    types = [UNUSED] * len(tokens)
    for token, i in ids.items():
        tokens[i], types[i] = token, NORMAL
    for i, added in tokenizer.get_added_tokens_decoder().items():
        types[i] = CONTROL if added.special else USER_DEFINED
    named = {f"tokenizer.ggml.{NAMES[name]}_token_id": ids[token] for name, token in special.items()
             if name in NAMES and token in ids}  # fmt: skip
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    return {
        MODEL: "gpt2", LIST: tokens, "tokenizer.ggml.token_type": np.array(types, np.int32), **named,
        "tokenizer.ggml.add_bos_token": whole[: len(whole) - len(plain)] != [],
        "tokenizer.ggml.add_eos_token": whole[-1:] != plain[-1:],
    }  # fmt: skip


def _same(tokenizer: Tokenizer, found: Mapping[str, Any], path: Path) -> bool:
    """Whether what is read from this metadata is the pipeline."""
    as_read = {name: TextArray.of(value) if isinstance(value, list) else value for name, value in found.items()}
    again = vocabulary.tokenizer(Metadata(as_read, path))
    marks = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
    probes = [*PROBES, *(f"a {mark} b{mark}c" for mark in marks)]
    return all(again.encode(text).ids == tokenizer.encode(text).ids for text in probes)


def _refused(path: Path, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{path}: its vocabulary cannot be written into a .gguf file ({why}). Name a folder "
                            "instead of a .gguf file, or convert a .gguf file of the model.")  # fmt: skip
