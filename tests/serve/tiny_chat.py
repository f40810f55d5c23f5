"""A tiny checkpoint that can chat: random weights, a byte-level tokenizer trained here, a ChatML template."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tiny import write_checkpoint

SPECIAL = ["<unk>", "<s>", "<|im_end|>", "<|im_start|>"]  # 2 is the end token of the tiny checkpoints
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 320
CONTEXT = 2048


def write_tokenizer(path: Path, chat: bool = True) -> None:
    """tokenizer.json of `VOCAB` entries (all bytes, some merges) and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog and then the other thing"] * 50, trainer
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>"} | ({"chat_template": TEMPLATE} if chat else {})
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def chat_checkpoint(chat: bool = True) -> Path:
    """The directory; made once per test process."""
    path = Path(tempfile.mkdtemp(prefix="phasewise-chat-"))
    write_checkpoint(path, layers=2, vocab=VOCAB, context=CONTEXT)
    write_tokenizer(path, chat)
    return path
