"""Vocabularies: from a file's metadata to a `tokenizers` pipeline.

Two kinds are in use. `gpt2`: byte-level BPE with its merges, and a name for how text is split before (`tokenizer.ggml
.pre`). `llama`: SentencePiece's BPE, without merges, which follow from the scores of its pieces: the best piece that
two neighbours make is made first.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from phasewise.errors import UnsupportedModel, UserError, near
from phasewise.gguf.container import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # how SentencePiece writes a space

# How a text is cut before merging, by the names that llama.cpp has given to published tokenizers.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, digits: str) -> str:
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{_UPPER}*{_LOWER}+{ending}|{first}{_UPPER}+{_LOWER}*{ending}|{digits}|{_SLASHED}"


LLAMA3 = f"{_LETTERS}|\\p{{N}}{{1,3}}|{_REST}"
QWEN2 = f"{_LETTERS}|\\p{{N}}|{_REST}"
GPT4O = _cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
TEKKEN = _cased("", r"\p{N}")
SPLITS = {  # None: as GPT-2 did; "digits": the same, and every digit by itself
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), "digits"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "tekken": TEKKEN,
}
WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")  # words that are tokens stay whole
BEGIN = WHOLE  # and begin with a BOS unless the file says otherwise


def tokenizer(meta: Metadata) -> Tokenizer:
    """The pipeline of a file. Raises UnsupportedModel for a kind that is not known, UserError for broken lists."""
    kind = meta.text("tokenizer.ggml.model")
    tokens = meta.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise UserError(f"{meta.path}: the vocabulary (tokenizer.ggml.tokens) is empty.")
    types = meta.array("tokenizer.ggml.token_type", whole=True) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(
            f"{meta.path}: {len(tokens)} tokens and {len(types)} types of them in tokenizer.ggml.token_type."
        )
    if kind == "gpt2":
        made = _byte_level(meta, tokens)
    elif kind == "llama":
        made = _sentencepiece(meta, tokens, types)
    else:
        raise UnsupportedModel(f"{meta.path}: the vocabulary is of the kind {kind[:60]!r}. "
                               f"{near(kind[:60], ('gpt2', 'llama'))}")  # fmt: skip
    _add(made, tokens, types, spaced=kind == "llama", strips=kind == "llama" and _phi3(meta))
    _ends(made, meta, tokens, begin=kind == "llama" or meta.get("tokenizer.ggml.pre") in BEGIN)
    return made


def special(meta: Metadata) -> dict[str, str]:
    """The texts of the special tokens, by their names in `tokenizer_config.json`."""
    tokens = meta.texts("tokenizer.ggml.tokens")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {theirs: meta.index(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name, theirs in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def templates(meta: Metadata) -> dict[str, str]:
    """Chat templates by name; the one without a name is `default`."""
    found = {}
    if "tokenizer.chat_template" in meta.values:
        found["default"] = meta.text("tokenizer.chat_template")
    for name in meta.texts("tokenizer.chat_templates") if "tokenizer.chat_templates" in meta.values else []:
        if f"tokenizer.chat_template.{name}" in meta.values:
            found[name] = meta.text(f"tokenizer.chat_template.{name}")
    return found


# ---- byte-level BPE
def _byte_level(meta: Metadata, tokens: Sequence[str]) -> Tokenizer:
    name = meta.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise UnsupportedModel(f"{meta.path}: text is split in an unknown way, {name[:60]!r} (tokenizer.ggml.pre). "
                               f"{near(name[:60], SPLITS)}")  # fmt: skip
    pairs = []
    for merge in meta.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise UserError(f"{meta.path}: the merge {merge!r:.60} is not two tokens with a space between them.")
        pairs.append((left, right))
    model = _bpe(meta, tokens, pairs, ignore_merges=name in WHOLE)
    made, split = Tokenizer(model), SPLITS[name]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (None, "digits"))
    if split is None:
        made.pre_tokenizer = plain
    else:
        first = pre_tokenizers.Digits(individual_digits=True) if split == "digits" else (
            pre_tokenizers.Split(Regex(split), behavior="isolated"))  # fmt: skip
        made.pre_tokenizer = pre_tokenizers.Sequence([first, plain])
    if split == QWEN2:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _bpe(meta: Metadata, tokens: Sequence[str], merges: list[tuple[str, str]], **more: object) -> models.BPE:
    ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1)))  # of a token that is there twice, the first
    try:
        return models.BPE(vocab=ids, merges=merges, **more)
    except Exception as error:  # the backend raises bare Exception; it holds each merge against the vocabulary
        raise UserError(
            f"{meta.path}: the vocabulary or its merges cannot be used ({error}). Download or export it again."
        ) from error


# ---- SentencePiece
def _sentencepiece(meta: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = meta.array("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise UserError(f"{meta.path}: {len(tokens)} tokens and {len(scores)} scores of them in tokenizer.ggml.scores.")
    if any(score != score for score in scores):
        raise UserError(f"{meta.path}: tokenizer.ggml.scores has values that are not finite. Export it again.")
    spelled = [SPACE * len(token) if kind == USER_DEFINED and not token.strip(" ") else token
               for token, kind in zip(tokens, types)]  # fmt: skip
    unknown = meta.index("tokenizer.ggml.unknown_token_id", len(tokens))
    model = _bpe(
        meta,
        spelled,
        _merges(spelled, types, scores),
        byte_fallback=BYTE in types,
        fuse_unk=True,
        unk_token=None if unknown is None else spelled[unknown],
    )
    made = Tokenizer(model)
    # A space goes before a text, whatever it begins with, and after each token that is found whole: so SentencePiece
    # has it, and the tokenizers published with Llama 2, Mistral, Mixtral and Phi-3.
    prefixed = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    before = [normalizers.Prepend(SPACE)] if prefixed else []
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])  # type: ignore[list-item]
    first = [decoders.Strip(" ", left=1)] if prefixed else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *first]  # type: ignore[list-item]
    )
    return made


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best piece first. Pieces that users have defined go before all others,
    in their order: their scores say nothing."""
    pieces = {token for token, kind in zip(tokens, types) if kind in (NORMAL, USER_DEFINED, UNUSED)}
    own = [i for i, kind in enumerate(types) if kind == USER_DEFINED]
    others = sorted((i for i, kind in enumerate(types) if kind == NORMAL), key=lambda i: -scores[i])
    made = []
    for token in dict.fromkeys(tokens[i] for i in (*own, *others)):
        for cut in range(len(token) - 1, 0, -1):  # the longest beginning first
            left = token[:cut]
            if left in pieces and (right := token[cut:]) in pieces:
                made.append((left, right))
    return made


# ---- around both
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def _phi3(meta: Metadata) -> bool:
    """True if blanks after its marks belong to them: no file says so, all published ones of this architecture do."""
    return meta.text("general.architecture") == "phi3"


def _add(made: Tokenizer, tokens: Sequence[str], types: Sequence[int], *, spaced: bool, strips: bool) -> None:
    """Tokens that are found in a text whole, before anything else is done to it."""
    every = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=strips and token not in UNSTRIPPED)
        for token, kind in zip(tokens, types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token and not (spaced and not token.strip(" "))
    ]
    made.add_special_tokens([each for each in every if each.special])
    made.add_tokens([each for each in every if not each.special])


def _ends(made: Tokenizer, meta: Metadata, tokens: Sequence[str], begin: bool) -> None:
    """The tokens before and after each text."""
    wanted = {"bos": meta.get("tokenizer.ggml.add_bos_token", begin), "eos": meta.get("tokenizer.ggml.add_eos_token")}
    ids = {name: meta.index(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name, add in wanted.items() if add}
    found = [{"id": name, "ids": [i], "tokens": [tokens[i]]} for name, i in ids.items() if i is not None]
    if found:
        single = [name for name in ("bos", "$A", "eos") if name == "$A" or ids.get(name) is not None]
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=found)
