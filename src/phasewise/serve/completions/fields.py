"""Fields that no answer depends on, and fields that are not supported: all others that are not known are refused.

A field is harmless by its meaning: who asks, how it is billed or counted, what may be cached (which changes no answer
here). Of those that are not supported some values ask for nothing, and so does null of any field.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from phasewise.errors import near
from phasewise.serve.failures import ApiError

Harmless = Mapping[str, tuple[object, ...]]  # fields that are not supported, each with the values that ask for nothing

HARMLESS = frozenset({
    "user", "safety_identifier", "metadata", "store", "service_tier", "request_id", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "prediction", "cache_prompt",
})  # fmt: skip
_BOTH: Harmless = {
    "logits_processors": ([],), "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
    "length_penalty": (1.0,), "use_beam_search": (False,), "early_stopping": (False,),
    "spaces_between_special_tokens": (True,), "detokenize": (True,), "guided_whitespace_pattern": (),
    "guided_decoding_backend": ("auto",), "structural_tag": (), "typical_p": (1.0,), "mirostat": (0,),
    "cache_salt": (), "kv_transfer_params": (), "vllm_xargs": ({},), "lora_path": (),
    "repetition_detection": (),
}  # fmt: skip
COMPLETION_REFUSED: Harmless = {**_BOTH, "prompt_embeds": ()}
CHAT_REFUSED: Harmless = {
    **_BOTH,
    "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "documents": ([],),
    "echo": (False,), "best_of": (1,), "add_special_tokens": (False,), "include_reasoning": (True,),
    "mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "moderation": (),
}  # fmt: skip


def check(ask: BaseModel, refused: Harmless, harmless: frozenset[str] = HARMLESS) -> None:
    """Raise ApiError for a field that is not supported, or not known."""
    for name, value in (ask.model_extra or {}).items():
        if value is None or name in harmless:
            continue
        if name not in refused:
            known = {*type(ask).model_fields, *harmless}
            raise ApiError(400, f"{name} is not known here. {near(name, known)}", name, "unknown_parameter")
        if not among(value, refused[name]):
            raise ApiError(400, f"{name} is not supported here; leave it out", name, "unsupported_parameter")


def among(value: object, harmless: tuple[object, ...]) -> bool:
    """True if `value` is one of these; 0 is not False, and 1 is not True."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)
