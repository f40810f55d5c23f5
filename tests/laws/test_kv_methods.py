"""The laws over the KV-side methods at knobs that bite, alone and composed: a request's tokens are its own.

Schedulers in turn; with `--all-pairs`, each method with all of them.
"""

from __future__ import annotations

from functools import cache

import pytest

from phasewise.engine.engine import Engine
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import double, tiny
from tests.kv.harness import drafting
from tests.laws import axes, scenario

QUEST = {"attend": "quest:page=4,budget=16,dense_layers=1"}
STREAMING = {"evict": "streaming:sinks=3,window=23"}
SNAPKV = {"evict": "snapkv:keep=0.3,window=6"}
PYRAMID = {"evict": "snapkv:keep=0.3,window=6,layers=pyramid,beta=4"}
ADA = {"evict": "snapkv:keep=0.3,window=6,heads=ada"}
H2O = {"evict": "h2o:heavy=8,recent=5,lot=4"}
H2O_ADA = {"evict": "h2o:heavy=0.2,recent=3,lot=3,heads=ada,layers=pyramid,beta=3"}
TOVA = {"evict": "tova:keep=14,lot=4"}
KEYFORMER = {"evict": "keyformer:keep=14,lot=4"}
LONGGEN = {"evict": "longgen:sinks=3,window=17,weights=random:0"}
POWER = {"attend": "power:block=3,window=2,sinks=1,weights=random:0"}
TIDAL = {"attend": "tidal:k=8,dense=0,second=2,every=5"}
FETCHED = {"attend": "double_sparsity:channels=4,k=12,dense_layers=1,offload=true,weights=random:0"}
AGAIN = {"attend": "token_select:k=6,first=2,local=4,theta=0.1"}
CHUNKS = {"attend": "token_select:k=6,first=2,local=4,chunk=8"}
LISTED = {"attend": "token_select:k=6,first=2,local=4,chunk=8,positions=list"}
LIFTED = {"attend": "zero_tuning:gamma=20,weights=none"}
INT8, UNIFIED = {"store": "int8"}, {"skip": "unified:speedup=2,weights=none"}
KIVI = {"store": "kivi:bits=2,group=4,residual=8"}
GEAR = {"store": "gear:bits=2,group=4,block=8,rank=1,sparse=0.1"}
ZIPCACHE = {"store": "zipcache:gap=8,important=0.5"}
METHODS = {
    "quest": QUEST,
    "streaming": STREAMING,
    "streaming text": {"evict": "streaming:sinks=3,window=23,positions=text"},
    "longgen": LONGGEN,
    "longgen quest int8": LONGGEN | QUEST | INT8,
    "longgen strided": {"evict": "longgen:sinks=0,window=9,stride=3,block=4,weights=none"},
    "power": POWER,
    "infllm tuned": {"attend": "infllm:block=4,init=1,window=4,topk=1,dense_len=0,weights=random:0"},
    "power streaming": POWER | STREAMING,
    "power snapkv int8": POWER | SNAPKV | INT8,
    "snapkv": SNAPKV,
    "int8": INT8,
    "unified": UNIFIED,
    "tidal": TIDAL,
    "tidal uncorrected": {"attend": "tidal:k=8,dense=0,second=2,every=0"},
    "double sparsity fetched": FETCHED,
    "double sparsity fetched snapkv unified": FETCHED | SNAPKV | UNIFIED,
    "token_select again": AGAIN,
    "token_select again h2o ada int8": AGAIN | H2O_ADA | INT8,
    "token_select chunks": CHUNKS,
    "token_select listed": LISTED,
    "token_select chunks snapkv int8": CHUNKS | SNAPKV | INT8,
    "token_select listed streaming": LISTED | STREAMING,
    "token_select listed again tova": {"attend": f"{LISTED['attend']},theta=0.1"} | TOVA,
    "zero tuning": LIFTED,
    "tidal snapkv int8": TIDAL | SNAPKV | INT8,
    "zero tuning streaming": LIFTED | STREAMING,
    "zero tuning snapkv int8": LIFTED | SNAPKV | INT8,
    "kivi": KIVI,
    "gear": GEAR,
    "zipcache": ZIPCACHE,
    "unified zipcache": UNIFIED | ZIPCACHE,
    "unified kivi": UNIFIED | KIVI,
    "quest streaming": QUEST | STREAMING,
    "quest snapkv": QUEST | SNAPKV,
    "quest int8": QUEST | INT8,
    "snapkv int8": SNAPKV | INT8,
    "unified snapkv": UNIFIED | SNAPKV,
    "quest snapkv int8 unified": QUEST | SNAPKV | INT8 | UNIFIED,
    "pyramid": PYRAMID,
    "ada int8": ADA | INT8,
    "h2o": H2O,
    "h2o ada pyramid": H2O_ADA,
    "h2o int8 quest unified": H2O | INT8 | QUEST | UNIFIED,
    "tova": TOVA,
    "tova int8": TOVA | INT8,
    "keyformer": KEYFORMER,
    "keyformer int8": KEYFORMER | INT8,
}
PROMPTS = tiny.prompts(41, 7, 90, 60)
N = 24
SAMPLED = Params(max_tokens=N, ignore_eos=True, temperature=0.8, top_p=0.95, seed=11)


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to eight bits, and choosing pages by rounded keys, are step functions: in single precision the last bit
    of a float, which depends on how many rows a kernel is given, now and then moves a number to the next level. In
    double precision it does not, so every token can be asked for."""
    double.everything(monkeypatch)


@cache
def alone(name: str, sampled: bool = False) -> list[list[int]]:
    """Each prompt by itself, in one piece, with all the memory it wants."""
    params = SAMPLED if sampled else tiny.greedy(N)
    return [tiny.outs(tiny.run(tiny.engine(METHODS[name], prefix_cache=False), [p], params))[0] for p in PROMPTS]


@axes.over(lambda full: axes.turns([*METHODS], axes.schedulers(), full), "-".join, most=24)
def test_tokens_are_a_requests_own(case: tuple[str, str]) -> None:
    """Mates, slices, preemption, forks, cached prefixes, cancellation and hand-off, all in one trace."""
    name, schedule = case
    scenario.check(METHODS[name], schedule)


def names(full: bool) -> list[str]:
    return [*METHODS]


@axes.over(names, str, most=16)
def test_the_knobs_bite(case: str) -> None:
    if case != "int8":  # eight bits seldom change a token of so short an answer
        assert alone(case) != tiny.plain(PROMPTS, tiny.greedy(N))


@axes.over(names, str, most=8)
def test_scarce_memory(case: str) -> None:
    budget = tiny.engine(METHODS[case]).store.cost(64 * 5)  # what is kept beside the rows included
    placed = tiny.engine(METHODS[case], kv_bytes=budget)
    assert isinstance(placed, Engine)
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS * 2]
    for request in requests:
        placed.add(request)
    while any(request.left is None for request in requests):
        placed.step()
        assert placed.kv_bytes <= budget
    assert tiny.outs(requests) == alone(case) * 2


@axes.over(names, str, most=8)
def test_drafts(case: str) -> None:
    """Law 3: exact drafting over a lossy method gives that method's tokens, trees, rejections and all."""
    for sampled in (False, True):
        script = {tuple(prompt): out for prompt, out in zip(PROMPTS, alone(case, sampled))}
        placed = drafting(METHODS[case] | {"schedule": "sarathi:budget=40"}, script, prefix_cache=False)
        requests = tiny.run(placed, PROMPTS, SAMPLED if sampled else tiny.greedy(N))
        assert tiny.outs(requests) == alone(case, sampled)
        assert placed.counters.drafted > placed.counters.accepted > 0


def test_quest_reads_less() -> None:
    """The claim, on the counter: with 16 rows of hundreds, three layers of four read a fraction."""
    prompt = tiny.prompts(400)
    read = {}
    for verbs in ({}, {"attend": "quest:page=8,budget=48,dense_layers=1"}):
        placed = tiny.engine(verbs, prefix_cache=False)
        tiny.run(placed, prompt, tiny.greedy(1))
        prefill = placed.counters.kv_bytes_read
        placed = tiny.engine(verbs, prefix_cache=False)
        tiny.run(placed, prompt, tiny.greedy(41))
        read[bool(verbs)] = placed.counters.kv_bytes_read - prefill
    assert read[True] < 0.5 * read[False]
