"""Groups of tokens that share a row of KV, against a slow twin that computes every text anew from its groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.methods.decode._groups import MOST, GroupModules, segments, tapped
from phasewise.methods.decode.hamburger import Hamburger
from phasewise.model import artefacts
from phasewise.request.header import request_of
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Purpose, pick, uniform
from tests import oracle, tiny

N, SEED, HALF = 24, 0, 0.45
WEIGHTS = f"weights=random:{SEED}"


@cache
def modules() -> GroupModules:
    made = GroupModules(tiny.model().config)
    made.load_state_dict({name: tensors()[name] for name in made.shapes()})
    return made.requires_grad_(False)


@cache
def tensors() -> dict[str, Tensor]:
    return artefacts.random(Hamburger().artefact(tiny.model().config), str(SEED))


@cache
def tuned() -> Path:
    """The tiny checkpoint with the low-rank weights added to its own."""
    base = tiny.checkpoint()
    weights, folder = load_file(base / "model.safetensors"), base.parent / f"{base.name}-tuned"
    for i in range(tiny.model().config.layers):
        for linear, parts in {
            "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "o": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"],
        }.items():  # fmt: skip
            change, at = tensors()[f"{i}.{linear}.b"] @ tensors()[f"{i}.{linear}.a"], 0
            for part in parts:
                own = weights[f"model.layers.{i}.{part}.weight"]
                own += change[at : at + len(own)]
                at += len(own)
            assert at == len(change)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def embedded(group: Sequence[int]) -> Tensor:
    """The row [d] that a group enters as."""
    e = tiny.model().embed(torch.tensor(group)).clone()
    if len(group) == 1:
        return e[0]
    its = modules().embedder
    mean, placed = e.mean(0), torch.cat((e, its.places[: len(group)]), -1)
    q, k, v = its.q.weight @ mean, placed @ its.k.weight.T, placed @ its.v.weight.T
    return mean + its.out.weight @ ((k @ q * len(q) ** -0.5).softmax(0) @ v)


def twin(
    prompt: list[int], most: int, confidence: float, temperature: float = 0.0, seed: int = 0, n: int = N
) -> tuple[list[list[int]], list[float]]:
    """The groups of a text, and the log-probability of each token: every group from a pass over all rows before it."""

    def drawn(row: Tensor, position: int) -> int:
        likely.append(row.log_softmax(-1))
        if not temperature:
            return int(row.argmax())
        return pick((row / temperature).softmax(-1), uniform(seed, position, Purpose.SAMPLE))

    def said(x: Tensor) -> Tensor:
        return oracle.unembedded(tuned(), oracle.last(tuned(), x[None]))[0]

    rows, positions = [embedded([token]) for token in prompt], [*range(len(prompt))]
    groups, likely, left = list[list[int]](), list[Tensor](), n
    while left:
        found = oracle.onward(tuned(), torch.stack(rows), 0, positions)
        states = torch.stack([found[tap + 1][-1] for tap in tapped(len(found) - 1)])
        at = positions[-1] + 1
        group, state = [drawn(said(states[-1]), at)], states[-1]
        while len(group) < min(most, left):
            e = tiny.model().embed(torch.tensor(group)).clone()
            if 1 - float(modules().stop(state[None], e[-1:]).sigmoid()) < confidence:
                break
            state = modules().micro(states[None], e[None])[0, -1]
            group.append(drawn(said(state), at + len(group)))
        groups.append(group)
        left -= len(group)
        rows.append(embedded(group))
        positions.append(at + len(group) - 1)
    tokens = [token for group in groups for token in group]
    return groups, [float(row[token]) for row, token in zip(likely, tokens)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("most", "confidence"), [(4, HALF), (4, 0.0), (2, 0.5), (3, 0.52), (4, 1.0)])
def test_equals_the_uncached_twin(most: int, confidence: float, temperature: float) -> None:
    """Tokens, groups and log-probabilities; and the KV has a row for each group, at the position of its last token."""
    prompts = tiny.prompts(12, 3, 30)
    params = Params(max_tokens=N, ignore_eos=True, temperature=temperature, seed=5, logprobs=0)
    placed: Any = tiny.engine({"decode": f"hamburger:most={most},confidence={confidence},{WEIGHTS}"})
    requests, sizes = [Request(prompt, params) for prompt in prompts], set[int]()
    for request in requests:
        placed.add(request)
    while not placed.idle:
        for request in placed.running:
            if not request.prefilling:
                ends = [request.prompt_len - 1]
                for size in request.groups[:-1]:
                    ends.append(ends[-1] + size)
                for layer in request.kv.layers:
                    (slab,) = layer.slabs
                    there = [*range(slab.n)] if slab.positions is None else slab.positions[0, : slab.n].tolist()
                    assert there == [*range(request.prompt_len - 1), *ends]
        placed.step()
    for request, prompt in zip(requests, prompts):
        groups, likely = twin(prompt, most, confidence, temperature, 5)
        assert request.out == [token for group in groups for token in group]
        assert request.groups == [len(group) for group in groups]
        told = [request.scores[at].logprob for at in range(request.prompt_len, request.known)]
        assert told == pytest.approx(likely, abs=2e-4)
        sizes |= set(request.groups)
    assert sizes == {0.0: {most}, 1.0: {1}}.get(confidence, {*range(1, most + 1)})


def test_a_confidence_of_one_is_plain_decoding_with_the_same_weights() -> None:
    prompts = tiny.prompts(12, 3, 30)
    mine = tiny.engine({"decode": f"hamburger:confidence=1,{WEIGHTS}"})
    plain = tiny.engine(of=type(tiny.model()).load(tuned()))
    assert tiny.outs(tiny.run(mine, prompts, tiny.greedy(N))) == tiny.outs(tiny.run(plain, prompts, tiny.greedy(N)))
    assert mine.counters.rows == plain.counters.rows
    alone = tiny.engine({"decode": "hamburger:most=1"})
    assert tiny.outs(tiny.run(alone, prompts, tiny.greedy(N))) == tiny.plain(prompts, tiny.greedy(N))


@pytest.mark.parametrize("schedule", ["sarathi:budget=3", "splitfuse:budget=5", "prefill_first"])
def test_load_and_preemption_change_no_token(schedule: str) -> None:
    """A replay computes the rows of the same groups; what is computed once more is counted in rows."""
    prompts = tiny.prompts(12, 3, 30)
    placed: Any = tiny.engine({"decode": f"hamburger:confidence={HALF},{WEIGHTS}", "schedule": schedule})
    requests, lost = [Request(prompt, tiny.greedy(N)) for prompt in prompts], 0
    for request in requests:
        placed.add(request)
    for step in range(40):
        if step % 5 == 4:
            for request in placed.running[1:]:
                lost += sum(layer.n for layer in request.kv.layers[:1])
                placed.room.preempt(request)
        placed.step()
    tiny.finish(placed, requests)
    assert placed.counters.preemptions > 0
    once = 0
    for request, prompt in zip(requests, prompts):
        groups, _ = twin(prompt, MOST, HALF)
        assert request.out == [token for group in groups for token in group]
        assert request.groups == [len(group) for group in groups]
        once += len(prompt) + len(groups) - 1
    assert placed.counters.rows == once + lost - placed.counters.prefix_hits
    assert placed.counters.recomputed == lost - placed.counters.prefix_hits


def test_what_a_lone_request_costs() -> None:
    """A row and a forward for each group, whatever its size."""
    (prompt,) = tiny.prompts(20)
    placed = tiny.engine({"decode": f"hamburger:confidence={HALF},{WEIGHTS}"})
    (request,) = tiny.run(placed, [prompt], tiny.greedy(N))
    groups, _ = twin(prompt, MOST, HALF)
    assert placed.counters.forwards == len(groups) < N - 4
    assert placed.counters.rows == len(prompt) + len(groups) - 1
    assert placed.counters.accepted == N - len(groups)
    assert placed.counters.head_rows == N
    assert request.known_rows == len(prompt) + len(groups)


def test_a_text_may_end_inside_a_group() -> None:
    """By its length, by a stop token, and by what watches its text."""
    (prompt,) = tiny.prompts(20)
    whole = [token for group in twin(prompt, MOST, 0.0)[0] for token in group]

    def said(params: Params, watch: Any = None) -> Request:
        placed = tiny.engine({"decode": f"hamburger:confidence=0,{WEIGHTS}"})
        request = Request(prompt, params, watch=watch)
        placed.add(request)
        tiny.finish(placed, [request])
        assert sum(request.groups) == request.n_out
        return request

    assert said(tiny.greedy(6)).out == whole[:6] and said(tiny.greedy(6)).groups == [4, 2]
    first = next(i for i, token in enumerate(whole) if i % 4 in (1, 2) and token not in whole[:i])
    stopped = said(Params(max_tokens=N, ignore_eos=True, stop_tokens=(whole[first],)))
    assert stopped.out == whole[: first + 1] and stopped.left is not None and stopped.left.reason == "stop"
    seen: list[int] = []
    watched = said(tiny.greedy(N), lambda token: seen.append(token) or len(seen) == 7)  # type: ignore[func-returns-value]
    assert watched.out == whole[:7] == seen


def test_groups_travel_with_a_request() -> None:
    """As JSON; and a caller in another process, who is told of tokens in pieces, knows them too."""
    (prompt,) = tiny.prompts(20)
    (request,) = tiny.run(tiny.engine({"decode": f"hamburger:confidence={HALF},{WEIGHTS}"}), [prompt], tiny.greedy(N))
    there = request_of(json.loads(json.dumps(request.header())))
    assert there.groups == request.groups and there.known_rows == request.known_rows
    caller, ends = Request(prompt, tiny.greedy(N)), [sum(request.groups[:i]) for i in (2, 5, len(request.groups))]
    for told, end in zip([0, *ends], ends):
        caller.tokens += request.out[told:end]
        said = [size for i, size in enumerate(request.groups) if told < sum(request.groups[: i + 1]) <= end]
        caller.note_groups(said)
        caller.note_groups(said)  # heard twice
    assert caller.groups == request.groups
    assert request.groups_from(request.known) == []


@pytest.mark.parametrize(
    ("verbs", "says"),
    [
        ({"store": "kivi"}, "has several tokens share a row"),
        ({"attend": "quest"}, "brings its own attend"),
        ({"evict": "streaming"}, "brings its own evict"),
        ({"skip": "unified:weights=none"}, "brings its own skip"),
    ],
)
def test_methods_that_need_a_row_for_each_token_are_refused(verbs: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        tiny.engine({"decode": f"hamburger:{WEIGHTS}", **verbs})


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"most": 0}, "most=0 must be from 1"),
        ({"most": 5}, "most=5"),
        ({"confidence": 1.1}, "confidence=1.1 must be from 0"),
        ({"confidence": -0.1}, "confidence=-0.1"),
    ],
)
def test_knobs_are_refused_by_name(knobs: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Hamburger(**knobs)  # type: ignore[arg-type]


def test_segments_follow_the_rule() -> None:
    """A token joins where its entropy is below 0.05, or below 0.3 of the group's largest, and the group has room."""
    assert segments([2.0, 0.5, 0.7, 0.01, 0.2], 4, 0.05, 0.3) == [2, 3]
    assert segments([2.0, 0.59, 0.61], 4, 0.05, 0.3) == [2, 1], "0.61 is above 0.3 of 2.0"
    assert segments([0.0] * 9, 4, 0.05, 0.3) == [4, 4, 1]
    assert segments([0.1, 0.04, 0.2, 0.06], 4, 0.05, 0.3) == [2, 1, 1], "0.06 is just not below 0.3 of 0.2"
    assert segments([1.0, 0.2, 0.2], 1, 0.05, 0.3) == [1, 1, 1] and segments([], 4, 0.05, 0.3) == []


def test_the_modules_do_what_they_say() -> None:
    """The embedder of a padded group, and the small decoder against an attention written out."""
    made, model = modules(), tiny.model()
    e = model.embed(torch.tensor([[5, 9, 7, 7], [8, 3, 4, 6]]).flatten()).view(2, 4, -1).clone()
    rows = made.embedder(e, torch.tensor([3, 4]))
    torch.testing.assert_close(rows, torch.stack([embedded([5, 9, 7]), embedded([8, 3, 4, 6])]))
    states, its = torch.randn(2, 2, model.config.hidden, generator=torch.Generator().manual_seed(0)), made.micro
    said = its(states, e[:, :3])
    for n in range(2):
        inputs = torch.cat(
            (F.rms_norm(states[n], (48,)) * its.state_gains, F.rms_norm(e[n, :3], (48,)) * its.token_gain)
        )
        inputs = inputs + its.places
        x, h = inputs[2:] * its.carry, F.rms_norm(inputs, (48,))
        for j in range(3):
            q, k, v = its.q.weight @ h[2 + j], h[: 3 + j] @ its.k.weight.T, h[: 3 + j] @ its.v.weight.T
            own = x[j] + its.o.weight @ ((k @ q * len(q) ** -0.5).softmax(0) @ v)
            normed = F.rms_norm(own, (48,))
            own = own + its.down.weight @ (F.silu(its.gate.weight @ normed) * (its.up.weight @ normed))
            torch.testing.assert_close(said[n, j], own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("after", [1, 6, 15])
def test_a_worker_that_starts_again_knows_the_groups(after: int) -> None:
    """Of tokens that the one before it has told the caller."""
    prompts = tiny.prompts(12, 30)
    verbs = {"decode": f"hamburger:confidence={HALF},{WEIGHTS}", "place": "disaggregated"}
    placed: Any = tiny.engine(verbs)
    requests = [Request(prompt, tiny.greedy(N)) for prompt in prompts]
    for request in requests:
        placed.add(request)
    while requests[0].n_out < after:
        placed.step()
    assert [sum(request.groups) for request in requests] == [request.n_out for request in requests]
    for request in requests:
        placed.restart(placed.flights[request.id], "this is a test")
    tiny.finish(placed, requests)
    assert placed.counters.restarts == 2
    for request, prompt in zip(requests, prompts):
        groups, _ = twin(prompt, MOST, HALF)
        assert request.out == [token for group in groups for token in group]
        assert request.groups == [len(group) for group in groups]
