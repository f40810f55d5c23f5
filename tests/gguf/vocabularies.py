"""Small vocabularies of both kinds, and the pipelines that published tokenizers of their families are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from .writer import Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
CORPUS = [
    "The cat sat on the mat, didn't it? WE'VE seen 12345 of them in 2024: the end.\n\n  return x + 10\n",
    "naïve cafés — 你好, 世界! 🎉🎊 привет мир, ελληνικά; the thing that they'll do",
    "def f(self):\n    for i in range(100):\n\t\tprint('hello world')  # hello, world!\r\n",
] * 4  # fmt: skip

# The patterns in the tokenizer.json of Llama 3, Qwen2, GPT-4o (as published for it) and Mistral's Tekken.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# ---- byte-level BPE
@dataclass(frozen=True)
class Split:
    """How a family cuts text: patterns (or "digits") before the bytes, and what else its tokenizer.json says."""

    pattern: str | None = None
    whole: bool = False  # words that are tokens are not merged
    composed: bool = False  # NFC
    begins: bool = False  # with a BOS


SPLITS = {
    "gpt-2": Split(),
    "smollm": Split("digits"),
    "llama-bpe": Split(LLAMA3, whole=True, begins=True),
    "qwen2": Split(QWEN2, composed=True),
    "gpt-4o": Split(GPT4O),
    "tekken": Split(TEKKEN, whole=True, begins=True),
    "dbrx": Split(LLAMA3),
}
MARKS = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<｜user｜>": CONTROL, "<tool>": USER_DEFINED,
         "a b": USER_DEFINED, "[PAD7]": UNUSED}  # fmt: skip


@cache
def _trained() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens and merges. Words that merges cannot make are among them, in front of others they could be cut into."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([made.pre_tokenizer, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return (*tokens, "Ġzebra", "Ġcats", "987"), tuple((left, right) for left, right in model["merges"])


def byte_level(pre: str) -> tuple[Vocabulary, Tokenizer]:
    """What a file says, and the pipeline that it stands for."""
    tokens, merges = _trained()
    every, split = [*tokens, *MARKS], SPLITS[pre]
    types = [NORMAL] * len(tokens) + list(MARKS.values())
    ids = {"bos_token_id": every.index("<|im_start|>"), "eos_token_id": every.index("<|im_end|>")}
    joined = [f"{left} {right}" for left, right in merges]
    vocabulary = Vocabulary("gpt2", every, types, merges=joined, pre=pre, extra=ids)
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(every)}, list(merges), ignore_merges=split.whole)
    )
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern in (None, "digits"))
    if split.pattern is None:
        backend.pre_tokenizer = plain
    elif split.pattern == "digits":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    else:
        first = pre_tokenizers.Split(Regex(split.pattern), "isolated", invert=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, plain])
    if split.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    _mark(backend, every, types)
    if split.begins:
        start = "<|im_start|>"
        backend.post_processor = processors.TemplateProcessing(
            f"{start} $A", special_tokens=[(start, every.index(start))]
        )
    return vocabulary, backend


def _mark(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int], rstrip: Sequence[str] = ()) -> None:
    for token, kind in zip(tokens, types):
        added = AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=token in rstrip)
        if kind in (UNKNOWN, CONTROL):
            backend.add_special_tokens([added])
        elif kind == USER_DEFINED:
            backend.add_tokens([added])


# ---- SentencePiece
PIECES = [SPACE, *"abcdehilnorstuw.,!<>|", "é", "你", "he", "th", "the", "in", "an", "and", "er", "hello", "ell", "lo",
          "hel", f"{SPACE}t", f"{SPACE}the", f"{SPACE}a", f"{SPACE}and", f"{SPACE}hello", "re", "or", "ld", "orl",
          "world", f"{SPACE}w", f"{SPACE}world", "st", "nd", "es", "st,", f"{SPACE}{SPACE}"]  # fmt: skip
SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
PLACED = {"<|user|>": CONTROL, "<|end|>": CONTROL, "<tag>": USER_DEFINED, "\n\n": USER_DEFINED, "  ": USER_DEFINED,
          "    ": USER_DEFINED, "unused": UNUSED}  # fmt: skip


def sentencepiece(*, prefix: bool = True, phi3: bool = False) -> tuple[Vocabulary, Tokenizer]:
    """What a file says, and the pipeline that it stands for: of Llama 2 (`prefix`), Gemma (without), or Phi-3."""
    placed = {token: kind for token, kind in PLACED.items() if not prefix or token.strip(" ")}
    byte = [f"<0x{i:02X}>" for i in range(256)]
    pieces = PIECES if prefix else PIECES[:-1]  # two blanks are a piece that users have defined
    tokens = [*SPECIAL, *byte, *placed, *pieces]
    types = [*SPECIAL.values(), *[BYTE] * 256, *placed.values(), *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-1000.0] * len(placed) + [score_of(piece) for piece in pieces]
    extra = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix}
    vocabulary = Vocabulary("llama", tokens, types, scores, pre="default", extra=extra)
    ids = {SPACE * len(token) if not token.strip(" ") else token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(ids, merges_of(ids, scores, types), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    blanks = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), blanks]) if prefix else blanks
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    stripped = ("</s>", *PLACED) if phi3 else ()
    shown = [token if token.strip(" ") else SPACE * len(token) for token in tokens]
    _mark(backend, shown, [NORMAL if set(token) == {SPACE} else kind for token, kind in zip(shown, types)], stripped)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return vocabulary, backend


def score_of(piece: str) -> float:
    """Not in the order of their ids: single characters last, then by a number that is everybody's own."""
    return -1000.0 - PIECES.index(piece) if len(piece) == 1 else -float((PIECES.index(piece) * 17) % 101)


def merges_of(ids: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """As the converters of published tokenizers make them: every pair that makes a piece, by its score."""
    pieces = {token for token, i in ids.items() if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
    found = []
    for token, i in ids.items():
        if types[i] in (NORMAL, USER_DEFINED):
            rank = (0.0, i) if types[i] == USER_DEFINED else (1.0, -scores[i])
            halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            found += [(rank, -len(left), left, right) for left, right in halves if {left, right} <= pieces]
    return [(left, right) for *_, left, right in sorted(found)]


def without(vocabulary: Vocabulary, *keys: str) -> Vocabulary:
    return replace(vocabulary, extra={key: value for key, value in vocabulary.extra.items() if key not in keys})
