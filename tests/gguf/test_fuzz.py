"""Files that somebody spoilt, or made to harm: each is read, or refused by name, quickly and in little memory."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.model.chat import ChatTemplate
from phasewise.model.layout import layout
from phasewise.model.parse import parse_config
from phasewise.model.source import source
from phasewise.model.tokenizer import Tokenizer
from phasewise.model.weights import Weights

from ..memory import forget, peak
from ..model.reference import save_random
from .vocabularies import byte_level, sentencepiece
from .writer import Conversion, tiny

EXTREMES = (0, 1, 2, 7, 31, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, 1 << 62,
            (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
FLOATS = (0.0, -0.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
SECONDS, MEGABYTES = 2.0, 50.0


def opened(path: Path) -> bool:
    """Everything that loading a model does before its tensors are read."""
    try:
        files = source(path)
        config = parse_config(files.settings())
        Weights(files.tensors(), layout(config), None, torch.device("cpu"))
        tokenizer = Tokenizer.load(path)
        tokenizer.decode(tokenizer.encode("The cat's 12 hats <|im_end|> ☃\n"))
        ChatTemplate.load(path)
    except UserError as error:
        assert len(str(error)) < 200_000
        return False
    return True


@pytest.fixture
def little_memory(wholes: list[bytes]) -> Iterator[None]:
    """Whatever a test does within takes no more than 50 MB beside what was there."""
    known = forget()
    before = peak() if known else 0.0
    yield
    if known:
        assert peak() - before < MEGABYTES


SMALL = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0]}
CONFIGS = (
    lambda: hf.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2, sliding_window=None),
    lambda: hf.Phi3Config(**SMALL, rope_parameters=LONG, original_max_position_embeddings=16),
    lambda: hf.Gemma3TextConfig(**SMALL, head_dim=4, sliding_window=5, query_pre_attn_scalar=4),
)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Complete models: with either kind of vocabulary, with experts, with tensors for settings, with two ropes."""
    folder = tmp_path_factory.mktemp("whole")
    paths = []
    for i, vocabulary in enumerate((byte_level("qwen2")[0], sentencepiece(prefix=False)[0])):
        made = replace(vocabulary, template="{{ messages[0].content }}")
        paths.append(tiny(folder / f"{i}.gguf", made, rope__freq_base=5000.0))
    for i, config in enumerate(CONFIGS):
        save_random(config(), folder / f"directory {i}")
        paths.append(Conversion().write(folder / f"directory {i}", folder / f"family {i}.gguf"))
    assert all(opened(path) for path in paths), "they are not whole"
    return [path.read_bytes() for path in paths]


@dataclass(frozen=True)
class Change:
    """One thing done to a file, at a share of its length."""

    kind: str
    at: float
    length: int
    value: int

    def __call__(self, raw: bytearray) -> None:
        at = int(self.at * len(raw))
        end = min(len(raw), at + self.length)
        match self.kind:
            case "flip":
                for i in range(at, end):
                    raw[i] ^= 1 << (self.value + i) % 8
            case "zero":
                raw[at:end] = bytes(end - at)
            case "remove":
                del raw[at:end]
            case "double":
                raw[at:at] = raw[at:end]
            case "cut":
                del raw[at:]
            case "word":
                raw[at : at + 4] = struct.pack("<I", EXTREMES[self.value % len(EXTREMES)] & 0xFFFFFFFF)
            case "long":
                raw[at : at + 8] = struct.pack("<Q", EXTREMES[self.value % len(EXTREMES)])
            case "float":
                raw[at : at + 4] = struct.pack("<f", FLOATS[self.value % len(FLOATS)])


# half of all changes are made to the header and the first of the metadata, where most can go wrong
PLACES = st.floats(0, 1, exclude_max=True) | st.floats(0, 0.06)
KINDS = st.sampled_from(["flip", "zero", "remove", "double", "cut", "word", "long", "float"])
CHANGES = st.builds(Change, KINDS, PLACES, st.integers(1, 64) | st.integers(1, 4), st.integers(0, 255))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(which=st.integers(0, 4), changes=st.lists(CHANGES, min_size=1, max_size=3))
def check(path: Path, wholes: list[bytes], which: int, changes: list[Change]) -> None:
    raw = bytearray(wholes[which])
    for change in changes:
        change(raw)
    path.write_bytes(raw)
    start = time.process_time()
    opened(path)
    assert time.process_time() - start < SECONDS


def test_any_change(wholes: list[bytes], little_memory: None, tmp_path: Path) -> None:
    check(tmp_path / "model.gguf", wholes)


def test_every_word_of_the_metadata(wholes: list[bytes], little_memory: None, tmp_path: Path) -> None:
    """Every number and length before the vocabulary, and every header of a tensor, made extreme in turn."""
    path = tmp_path / "model.gguf"
    for raw in wholes[1:]:
        first, names = raw.index(b"tokenizer.ggml.tokens"), raw.index(b"token_embd.weight")
        for i, at in enumerate([*range(4, first, 4), *range(names - 16, names + 600, 4)]):
            spoilt = bytearray(raw)
            spoilt[at : at + 8] = struct.pack("<Q", EXTREMES[i * 7 % len(EXTREMES)])
            path.write_bytes(spoilt)
            opened(path)


# ---- files that are sound, and say absurd things
ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"block_count": (1 << 31)}, "block_count must be a whole number from 1 to"),
    ({"block_count": (1 << 31) - 1}, "block_count is 2,147,483,647, and there are tensors of 1 blocks"),
    ({"block_count": 2}, "block_count is 2, and there are tensors of 1 blocks"),
    ({"block_count": 0}, "block_count must be a whole number"),
    ({"block_count": None}, "has no llama.block_count"),
    ({"attention__head_count": 0}, "attention.head_count must be a whole number from 1"),
    ({"attention__head_count": 3}, "attention.head_count 3 does not divide llama.embedding_length 8"),
    ({"attention__head_count": 3, "attention__key_length": 4}, "not a multiple of num_key_value_heads|do not fit"),
    ({"attention__head_count": (1 << 31) - 1}, "does not divide"),
    ({"attention__head_count": 8}, "1 rotated dimensions of 1: both must be even"),
    ({"attention__head_count_kv": 3}, "num_attention_heads 2 is not a multiple of num_key_value_heads 3"),
    ({"attention__head_count_kv": [1, 2]}, r"head_count_kv must be a whole number .* got array\(\[1, 2\]"),
    ({"attention__key_length": 1 << 30}, "key_length must be a whole number from 1 to 16,384"),
    ({"attention__key_length": 16_384}, "do not fit its settings"),
    ({"attention__value_length": 2}, "keys of 4 and values of another width"),
    ({"rope__dimension_count": 3}, "3 rotated dimensions of 4"),
    ({"rope__dimension_count": 1 << 20}, "1048576 rotated dimensions of 4"),
    ({"attention__layer_norm_rms_epsilon": -1.0}, "epsilon must be a number above 0, got -1.0"),
    ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon must be a number, got nan"),
    ({"attention__layer_norm_rms_epsilon": "tiny"}, "epsilon must be a number, got 'tiny'"),
    *(({"rope__freq_base": base}, "freq_base must be a number") for base in (0.0, 1.0, -5.0, *FLOATS[-3:])),
    ({"context_length": 0}, "context_length must be a whole number"),
    ({"context_length": 1 << 31}, "context_length must be a whole number"),
    ({"context_length": 1 << 60}, "context_length must be a whole number"),
    ({"context_length": -5}, "context_length must be a whole number"),
    ({"feed_forward_length": (1 << 31) - 1}, "do not fit its settings"),
    ({"embedding_length": (1 << 31) - 2}, "do not fit its settings|key_length"),
    ({"rope__scaling__type": "linear", "rope__scaling__factor": -2.0}, "positions stretch by more than 0"),
    ({"rope__scaling__type": "linear", "rope__scaling__factor": float("nan")}, "factor must be a number"),
    ({"rope__scaling__type": 7}, "rope.scaling.type must be a text"),
    ({"rope__scaling__type": "longrope"}, "has no tensor rope_factors_long.weight"),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_beta_fast": 0.0}, "beta_fast"),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__original_context_length": 1},
     "original_context_length must be a length of 2 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "words"), ABSURD)
def test_absurd_settings(extra: dict[str, Any], words: str, little_memory: None, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", byte_level("gpt-2")[0], **extra)
    with pytest.raises(UserError, match=words):
        files = source(path)
        config = parse_config(files.settings())
        Weights(files.tensors(), layout(config), None, torch.device("cpu"))
    assert not opened(path)
