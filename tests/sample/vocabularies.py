"""Small tokenizers of any tokens that a test likes."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from phasewise.model.stream import ALPHABET
from phasewise.model.tokenizer import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]
END = 2
LETTERS = {byte: char for char, byte in ALPHABET.items()}


def byte_level(texts: Sequence[bytes]) -> Tokenizer:
    """The special tokens, then these; no merges."""
    names = [*SPECIAL, *("".join(LETTERS[byte] for byte in text) for text in texts)]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return Tokenizer(backend)


def sentencepiece(texts: Sequence[str], strips: bool = True) -> Tokenizer:
    """The special tokens, all bytes, then these texts, as Llama 2 and Mistral have them."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(text.replace(" ", "\u2581") for text in texts)]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    first = [decoders.Strip(" ", left=1)] if strips else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *first]  # type: ignore[list-item]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return Tokenizer(backend)
