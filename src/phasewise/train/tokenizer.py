"""The byte-level BPE tokenizer of the pocket model: trained on the corpus and the task texts, digits kept apart.

Every text begins with a token of its own, as those of most large models do: what a reader of nothing can look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from phasewise.train.words import CITIES, COLORS, NAMES, SHOUTED, WORDS

END_OF_TEXT, PAD, MASK, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|mask|>", "<|im_start|>", "<|im_end|>"
BEGIN = "<|begin|>"
SPECIAL = (END_OF_TEXT, PAD, MASK, TURN_START, TURN_END, BEGIN)
WRITTEN = (END_OF_TEXT, PAD, TURN_START, TURN_END)
"""What training rows cannot do without; a tokenizer without BEGIN gives rows without one."""
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096, repeats: int = 2000) -> Tokenizer:
    """Learn a byte-level BPE of `vocab_size` entries. The task words stand 2 * `repeats` times among the texts, so that
    each becomes one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_task_words(texts, repeats), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def _with_task_words(texts: Iterable[str], repeats: int) -> Iterable[str]:
    yield from texts
    words = [*WORDS, *NAMES, *CITIES, *COLORS, *(word.upper() for word in SHOUTED)]
    yield from ["".join(f" {word}\n{word}\n" for word in words)] * repeats


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of one of the special tokens."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer was not trained here: it lacks {token}"
    return int(found)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a piece of text, without what a beginning would have."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def write(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and a tokenizer_config.json with the ChatML template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        **({"bos_token": BEGIN} if tokenizer.token_to_id(BEGIN) is not None else {}),
        "eos_token": TURN_END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
