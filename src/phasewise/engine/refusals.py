"""Refusals of requests, decided by what they ask and what they would be computed with alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from phasewise.engine.binding import label
from phasewise.engine.binding import name as name_of
from phasewise.errors import UserError
from phasewise.kv.buffer import ROUND, rounded, stride
from phasewise.kv.format import SIDES, RowFormat, block_format

if TYPE_CHECKING:
    from phasewise.engine.runtime import Runtime
    from phasewise.kv.format import KVShape
    from phasewise.model.config import ModelConfig
    from phasewise.request.params import Params
    from phasewise.request.request import Request

DEPTH = (
    "the decode method gives rows a depth or a state of their own, where the schedule decides which layers run: choose "
    "a schedule that runs whole steps; a decode method leaves `layers` and `hidden` alone where the depth is split, "
    "and never ends before the last layer"
)


def refuse(request: Request, runtime: Runtime, vocab: int, eos: Sequence[int]) -> None:
    """Raise UserError for an empty prompt, for token ids that the model has not, for rules that leave nothing to say,
    and for what the decode method of a phase cannot do."""
    if not request.prompt_len:
        raise UserError("the prompt is empty: give at least one token")
    bad = _outside(request.tokens, vocab)
    if bad is not None:
        raise UserError(f"token id {bad} is outside the vocabulary: ids must lie in [0, {vocab})")
    _refuse_rules(request.params, vocab, eos)
    _refuse_scores(request.params, runtime)


def refuse_tiers(shaping: Iterable[Any], artefacts: Collection[str]) -> None:
    """Raise UserError for a method that makes a prompt's rows with weights of its own, or with a second model: of rows
    that outlive the process nobody could say from which weights they are. `artefacts`: kinds of those loaded."""
    for method in shaping:
        verb = method.traits.verb
        if f"{verb}.{name_of(verb, method)}" in artefacts or type(method).needs == "second model":
            raise UserError(f"{label(verb, method)} makes prompts' KV with weights of its own, which --kv-disk does "
                            "not tell apart: leave one of them out (--kv-host goes with it)")  # fmt: skip


def _refuse_rules(params: Params, vocab: int, eos: Sequence[int]) -> None:
    """Raise UserError for rules on tokens that name none of the model's, or leave nothing to say."""
    texts = [word for word in params.bad_words if isinstance(word, str)]
    if texts:
        raise UserError(f"bad_words={texts!r} are texts, which an LLM turns into token ids: give these here")
    words = [int(token) for word in params.bad_words for token in word]
    allowed = params.allowed_token_ids or ()
    for name, tokens in (("logit_bias", params.logit_bias), ("allowed_token_ids", allowed), ("bad_words", words)):
        bad = _outside(tokens, vocab)
        if bad is not None:
            raise UserError(f"{name} names token id {bad}: ids must lie in [0, {vocab})")
    if params.allowed_token_ids is not None:
        never = {word[0] for word in params.bad_words if len(word) == 1}
        if params.min_tokens:
            never |= {*params.stop_tokens, *(() if params.ignore_eos else eos)}
        if never >= set(params.allowed_token_ids):
            raise UserError("allowed_token_ids are all forbidden by bad_words or, as ends, by min_tokens: allow others")


def _refuse_scores(params: Params, runtime: Runtime) -> None:
    """Raise UserError where scores, vectors or bad words of several tokens are asked for that no step gives."""
    late = any(phase.late is not None for phase in runtime.phases)
    if late or runtime.traits.sparse_prompts:
        for name, value in (("prompt_logprobs", params.prompt_logprobs), ("pooling", params.pooling)):
            if value is not None:
                raise UserError(f"{name} asks about rows of the prompt, and not all of them run all layers here: leave "
                                f"it out, or choose another {'skip' if late else 'decode'} method")  # fmt: skip
    scored = any(each is not None for each in (params.logprobs, params.prompt_logprobs, params.pooling))
    if runtime.traits.unordered and (scored or any(len(word) > 1 for word in params.bad_words)):
        raise UserError(
            f"{_name(runtime.phases[0].decode)} does not draw one token after another, so there are no "
            "log-probabilities, no vectors and no bad words of several tokens: leave logprobs, prompt_logprobs, "
            "pooling and such bad_words out, or choose another decode method"
        )


def _outside(tokens: Iterable[int], vocab: int) -> int | None:
    return next((token for token in tokens if not 0 <= token < vocab), None)


def _name(decode: object) -> str:
    return type(decode).__module__.rpartition(".")[2]


def refuse_blocks(format: RowFormat, method: Any, shapes: Sequence[KVShape]) -> None:
    """Raise UserError where a store method packs blocks of rows that do not fit the model."""
    blocks = block_format(format)
    if blocks is None:
        return
    try:
        for shape in shapes:
            for side in SIDES:
                blocks.kinds(side, shape)
    except UserError as error:
        raise UserError(f"{label('store', method)}: {error}") from None


def refuse_sinks(config: ModelConfig, attend: Any, plain: Any) -> None:
    """Raise UserError for an attend method, other than the `plain` one, of a model whose attention has sink scores."""
    if config.sink_scores and type(attend) is not type(plain):
        raise UserError(f"{label('attend', attend)}: {config.family}'s attention has sink scores, which it knows "
                        "nothing of: leave it out")  # fmt: skip


def kept_within(runtime: Runtime, config: ModelConfig) -> str:
    """Returns the reason why texts stay within the context although their methods would carry them further; "" if there
    is none."""
    schemes = {rope.scheme for rope in config.ropes if not rope.fixed}
    if not schemes or runtime.reach(config.max_positions) <= config.max_positions:
        return ""
    return f" (its rope scaling {', '.join(sorted(schemes))!r} depends on the length, so texts cannot go on beyond it)"


def longest(runtime: Runtime, reach: int, config: ModelConfig, limit: int) -> int:
    """Tokens one request may have: `reach`, or fewer where the KV budget of `limit` bytes ends."""
    if runtime.need(reach + runtime.margin) <= limit:
        return reach
    whole = rounded(config.max_positions)
    # rows are bounded or not, and what is kept beside them may begin at some length: the least that either leaves
    fit = min(limit * rows // runtime.need(rows) for rows in (ROUND, whole))
    return min(reach, fit // stride(fit) * stride(fit) - runtime.margin)
