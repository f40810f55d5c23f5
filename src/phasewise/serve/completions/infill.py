"""`suffix` of completions: a model that was trained to fill in the middle is asked in its own words.

Which words these are is found in the vocabulary: all of a form's tokens have to be single ids there. What comes before
goes first, then what comes after, and the answer is what is between (prefix, suffix, middle).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.model.tokenizer import Tokenizer
from phasewise.serve.failures import ApiError


@dataclass(frozen=True)
class InfillTokens:
    """The tokens before each part, and those that end an answer besides the model's own end."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()


FORMS = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",  # Qwen2.5-Coder, CodeGemma
         ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>")),
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>")),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>",)),  # SantaCoder
    InfillTokens("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),  # Code Llama
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),  # DeepSeek-Coder
)  # fmt: skip
MARK = "\u263a"  # spelled alike whatever follows it: a suffix that begins after it begins with no space of its own


class Infill:
    """The form of this tokenizer, if it has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._form = next((form for form in FORMS if self._ids(form.prefix, form.suffix, form.middle)), None)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end what is filled in: the form's own, and any that would begin another part."""
        form = self._known()
        every = (*form.ends, form.prefix, form.suffix, form.middle)
        return tuple(i for i in map(self._tokenizer.id, every) if i is not None)

    def prompt(self, before: str | Sequence[int], after: str, special: bool = True) -> list[int]:
        """The prompt; `special` begins it as texts begin here. Raises ApiError for a model without a form."""
        form, encode = self._known(), self._tokenizer.encode
        prefix, suffix, middle = self._ids(form.prefix, form.suffix, form.middle)
        own = encode(before, False) if isinstance(before, str) else list(before)
        return [*(encode("") if special else ()), prefix, *own, suffix, *self._glued(after), middle]

    def _known(self) -> InfillTokens:
        if self._form is None:
            raise ApiError(400, "suffix: this model's vocabulary has no tokens for filling in the middle "
                           f"({', '.join(form.prefix for form in FORMS)}): leave it out, or serve a model that was "
                           "trained to", "suffix", "unsupported_parameter")  # fmt: skip
        return self._form

    def _ids(self, *words: str) -> list[int]:
        """Their ids; none if one of them is no token."""
        ids = [self._tokenizer.id(word) for word in words]
        return [] if None in ids else [i for i in ids if i is not None]

    def _glued(self, text: str) -> list[int]:
        """A text without the space that some tokenizers put before any."""
        encode = self._tokenizer.encode
        if self._tokenizer.byte_level:
            return encode(text, False)
        marked, mark = encode(MARK + text, False), encode(MARK, False)
        return marked[len(mark) :] if marked[: len(mark)] == mark else encode(text, False)
