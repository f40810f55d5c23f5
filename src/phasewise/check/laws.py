"""The laws. Each asks a server something twice, in two ways that must not matter, and says where the answers differ."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from phasewise.check.client import Client, Refused, Reply, ReplyChoice

NOUNS = ("river", "engine", "garden", "letter", "window", "market", "harbour", "teacher", "bridge", "forest")
VERBS = ("crosses", "repairs", "remembers", "follows", "describes", "measures", "paints", "forgets")
ROUNDS = 3
STOP = 3  # characters of a stop string
SLACK = 1e-3  # of log-probabilities that are told twice


@dataclass(frozen=True)
class Asked:
    """Who is asked, and about what. `models`: all names that the server lists."""

    client: Client
    models: Sequence[str]
    random: Random
    tokens: int  # of an answer
    mates: int  # requests at once

    def prompt(self, sentences: int = 4) -> str:
        """A text that nobody has asked about before, so that nothing of it is cached."""
        draw, said = self.random, [f"Note {self.random.randrange(10**9)}."]
        for _ in range(sentences):
            first, second, third = draw.sample(NOUNS, 3)
            said.append(f"The {first} {draw.choice(VERBS)} the {second} by the {third}.")
        return " ".join(said) + " The"

    async def known(self, sentences: int = 4) -> str:
        """A text that has been asked about once, so that whatever is cached of it is there each time: laws that are not
        about caches hold however cached rows round."""
        prompt = self.prompt(sentences)
        await self.client.complete(prompt, 1)
        return prompt

    async def greedy(self, prompt: str, **fields: Any) -> ReplyChoice:
        return (await self.client.complete(prompt, self.tokens, **fields)).only


class Broken(Exception):
    """A law does not hold; the text says what differed, and where."""


class Skipped(Exception):
    """A law cannot be asked of this server; the text says why."""


def same(one: ReplyChoice, other: ReplyChoice, how: str) -> None:
    """Raise Broken where two answers differ; `how` names the two ways in which they were asked for."""
    if one.tokens is not None and other.tokens is not None and one.tokens != other.tokens:
        at = _first(one.tokens, other.tokens)
        raise Broken(f"{how}: differ at token {at}: {_at(one.tokens, at)} and {_at(other.tokens, at)}")
    if one.text != other.text:
        at = _first(one.text, other.text)
        raise Broken(f"{how}: differ at character {at}: {one.text[at : at + 20]!r} and {other.text[at : at + 20]!r}")
    if one.finish != other.finish:
        raise Broken(f"{how}: end by {one.finish!r} and by {other.finish!r}")


def _first(one: Sequence[str], other: Sequence[str]) -> int:
    """Where two sequences begin to differ."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _at(tokens: Sequence[str], at: int) -> str:
    return repr(tokens[at]) if at < len(tokens) else "its end"


# ---- greedy answers
async def alone(asked: Asked) -> None:
    prompt = await asked.known()
    first = await asked.greedy(prompt)
    for number in range(2, ROUNDS + 1):
        same(first, await asked.greedy(prompt), f"the first answer and number {number}")


async def batch(asked: Asked) -> None:
    prompts = [await asked.known(sentences) for sentences in range(1, asked.mates + 1)]
    single = [await asked.greedy(prompt) for prompt in prompts]
    for number in range(1, ROUNDS + 1):
        order = asked.random.sample(range(len(prompts)), len(prompts))
        together = await asyncio.gather(*(asked.greedy(prompts[i]) for i in order))
        for i, answer in zip(order, together):
            same(single[i], answer, f"prompt {i + 1} alone, and among {len(prompts)} at once (round {number})")


async def prefix(asked: Asked) -> None:
    for sentences in (2, 4, 8, 16):
        prompt = asked.prompt(sentences)
        same(await asked.greedy(prompt), await asked.greedy(prompt), "a new prompt, and the same one again")
    short = asked.prompt(12)
    long, sibling = f"{short} {asked.prompt(6)}", f"{short} {asked.prompt(6)}"
    cold = await asked.greedy(long)
    same(cold, await asked.greedy(long), "a new prompt, and the same one again")
    first = await asked.greedy(short)
    same(first, await asked.greedy(short), "its beginning, and that again")
    same(cold, await asked.greedy(long), "a new prompt, and the same after its beginning was asked")
    partly = await asked.greedy(sibling)
    same(partly, await asked.greedy(sibling), "a prompt with a known beginning, and the same when all of it is known")


async def shorter(asked: Asked) -> None:
    prompt = await asked.known()
    whole = await asked.greedy(prompt)
    few = max(1, asked.tokens // 3)
    part = (await asked.client.complete(prompt, few)).only
    if not whole.text.startswith(part.text.rstrip("\ufffd")):
        at = _first(whole.text, part.text)
        raise Broken(f"answers of {asked.tokens} and {few} tokens: differ at character {at}")


async def streamed(asked: Asked) -> None:
    prompt = await asked.known()
    whole = await asked.greedy(prompt)
    same(whole, (await asked.client.stream(prompt, asked.tokens)).only, "whole and streamed")


async def chats(asked: Asked) -> None:
    content = asked.prompt()
    await asked.client.chat(content, 1, False)
    whole, stream = [(await asked.client.chat(content, asked.tokens, way)).only for way in (False, True)]
    same(whole, stream, "a chat, whole and streamed")


async def drafts(asked: Asked) -> None:
    name = asked.client.model
    recipes = [each for each in asked.models if each.startswith(f"{name}@")]
    if not recipes:
        raise Skipped("the server lists no other way to answer as this model (phasewise: MODEL@RECIPE)")
    prompt = await asked.known()
    first, held = await asked.greedy(prompt), 0
    for recipe in recipes:
        try:
            answer = await asked.client.named(recipe).complete(prompt, asked.tokens, exact=True)
        except Refused:  # it may change answers, and says so
            continue
        same(first, answer.only, f"{name} and {recipe}")
        held += 1
    if not held:
        raise Skipped("every recipe of this model may change answers")


# ---- draws
async def seeds(asked: Asked) -> None:
    prompt, drawn = await asked.known(), {"temperature": 1, "top_p": 1}
    numbers = [asked.random.randrange(1 << 31) for _ in range(4)]
    first = [await asked.greedy(prompt, seed=number, **drawn) for number in numbers]
    crowd = (asked.greedy(asked.prompt(), seed=1, **drawn) for _ in range(asked.mates))
    again = (await asyncio.gather(*(asked.greedy(prompt, seed=n, **drawn) for n in numbers), *crowd))[: len(numbers)]
    for number, one, other in zip(numbers, first, again):
        same(one, other, f"seed {number} alone and among others")
    if len({answer.text for answer in first}) == 1:
        raise Broken(f"temperature 1: {len(numbers)} seeds gave one and the same text, so nothing is drawn")


async def several(asked: Asked) -> None:
    prompt = await asked.known()
    single = await asked.greedy(prompt)
    answer = await asked.client.complete(prompt, asked.tokens, n=3)
    _count(answer, 3)
    for index, choice in enumerate(answer.choices):
        same(single, choice, f"n = 1, and choice {index} of n = 3")
    drawn = [await asked.client.complete(prompt, asked.tokens, n=3, seed=7, temperature=1) for _ in range(2)]
    for one, other in zip(*(_count(each, 3) for each in drawn)):
        same(one, other, "a choice of n = 3 with seed 7, and again")


def _count(answer: Reply, n: int) -> tuple[ReplyChoice, ...]:
    if len(answer.choices) != n:
        raise Broken(f"n = {n} gave {len(answer.choices)} choices")
    return answer.choices


# ---- what is told of tokens
async def argmax(asked: Asked) -> None:
    choice = await asked.greedy(asked.prompt(), logprobs=3)
    if choice.tokens is None or not choice.tops:
        raise Skipped("the answer has no log-probabilities")
    for at, (token, logprob, top) in enumerate(zip(choice.tokens, choice.logprobs, choice.tops)):
        if logprob is None or not math.isfinite(logprob) or logprob > SLACK:
            raise Broken(f"token {at}, {token!r}: {logprob} is no log-probability")
        if not top:
            continue
        likeliest = max(top, key=top.__getitem__)
        if top[likeliest] > logprob + SLACK:
            raise Broken(f"token {at}: {token!r} ({logprob:.4f}) was said greedily, and {likeliest!r} "
                         f"({top[likeliest]:.4f}) is likelier")  # fmt: skip
        if sum(map(math.exp, top.values())) > 1 + SLACK:
            raise Broken(f"token {at}: the probabilities of the likeliest add up to more than 1")


async def stops(asked: Asked) -> None:
    prompt = await asked.known()
    whole = await asked.greedy(prompt)
    middle = len(whole.text) // 2
    stop = next((s for at in range(middle, 0, -1) if "\ufffd" not in (s := whole.text[at : at + STOP])), "")
    if len(stop) < STOP:
        raise Skipped("the answer is too short to stop in")
    before = whole.text[: whole.text.index(stop)]
    for way, ask in (("whole", asked.client.complete), ("streamed", asked.client.stream)):
        cut = (await ask(prompt, asked.tokens, stop=[stop])).only
        if cut.text != before:
            at = _first(cut.text, before)
            there = cut.text[at : at + 20]
            raise Broken(f"stop {stop!r}, {way}: differs from the text before it at character {at}: {there!r}")
        if cut.finish != "stop":
            raise Broken(f"stop {stop!r}, {way}: ends by {cut.finish!r}")


async def echoed(asked: Asked) -> None:
    prompt = await asked.known()
    plain = await asked.greedy(prompt)
    both = await asked.greedy(prompt, echo=True, logprobs=1)
    if both.text != prompt + plain.text:
        at = _first(both.text, prompt + plain.text)
        raise Broken(f"echo: differs from prompt and answer at character {at}: {both.text[at : at + 20]!r}")
    for at, (token, offset) in enumerate(zip(both.tokens or (), both.offsets)):
        if "\ufffd" in token or token.startswith(("bytes:", "<")):  # part of a character, or no text
            continue
        if not both.text.startswith(token, offset):
            raise Broken(f"text_offset of token {at}, {token!r}, is {offset}, where {both.text[offset:][:20]!r} stands")


async def usage(asked: Asked) -> None:
    prompt = asked.prompt()
    whole = await asked.client.complete(prompt, asked.tokens)
    told = _usage(whole)
    if told["total_tokens"] != told["prompt_tokens"] + told["completion_tokens"]:
        raise Broken(f"usage: {told['total_tokens']} is not the sum of prompt and completion: {dict(told)}")
    tokens = whole.only.tokens
    wanted = asked.tokens if whole.only.finish == "length" else None if tokens is None else len(tokens)
    if wanted is not None and told["completion_tokens"] not in (wanted, wanted + (whole.only.finish == "stop")):
        raise Broken(f"usage: {told['completion_tokens']} completion tokens, and {wanted} came")
    again = _usage(await asked.client.complete(prompt, asked.tokens))
    if again != told:
        raise Broken(f"usage of the same request: {dict(told)} and {dict(again)}")
    try:
        streamed = await asked.client.stream(prompt, asked.tokens, stream_options={"include_usage": True})
    except Refused:
        return
    if streamed.usage and _usage(streamed) != told:
        raise Broken(f"usage, whole and streamed: {dict(told)} and {dict(_usage(streamed))}")


def _usage(answer: Reply) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    missing = [name for name in names if name not in answer.usage]
    if missing:
        raise Broken(f"usage has no {missing[0]}")
    return {name: answer.usage[name] for name in names}


@dataclass(frozen=True)
class Law:
    """`optional`: what it asks for that a server need not offer; a refusal of that is no fault."""

    name: str
    says: str
    ask: Callable[[Asked], Awaitable[None]]
    optional: str = ""


LAWS = (
    Law("alone", "a greedy answer is the same each time", alone),
    Law("batch", "it is the same beside other requests", batch),
    Law("prefix", "it is the same when the prompt, or its beginning, was asked before", prefix),
    Law("shorter", "a shorter answer is the beginning of a longer one", shorter),
    Law("stream", "a streamed completion is the whole one", streamed),
    Law("chat", "a streamed chat is the whole one", chats, "chat completions"),
    Law("drafts", "it is the same with and without drafts", drafts, "exact"),
    Law("seeds", "at temperature 1 a seed draws the same tokens, alone and beside others", seeds, "seed"),
    Law("choices", "the choices of n > 1 are those of n = 1, and a seed's own", several, "n"),
    Law("logprobs", "a greedy token is the likeliest one", argmax, "logprobs"),
    Law("stop", "a stop string ends the text before it, streamed or not", stops, "stop"),
    Law("echo", "an echo is prompt and answer, and offsets say where tokens stand", echoed, "echo"),
    Law("usage", "usage counts what came, each time and in streams", usage),
)


def chosen(names: Iterable[str]) -> list[Law]:
    """The laws of these names, in their order; all where none is named."""
    wanted = set(names)
    return [law for law in LAWS if not wanted or law.name in wanted]
