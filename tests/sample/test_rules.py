"""Every sampling rule against the slow reference, and against transformers where it has the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.methods.sample.standard import Standard
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Context
from tests.sample import reference

VOCAB = 13

RULES = {
    "plain": Params(temperature=1.0),
    "cold": Params(temperature=0.3),
    "hot": Params(temperature=3.0),
    "top_k": Params(temperature=1.0, top_k=4),
    "top_k beyond the vocabulary": Params(temperature=1.0, top_k=1000),
    "top_p": Params(temperature=0.8, top_p=0.6),
    "tiny top_p": Params(temperature=1.0, top_p=1e-9),
    "min_p": Params(temperature=1.2, min_p=0.2),
    "all filters": Params(temperature=0.9, top_k=9, top_p=0.9, min_p=0.05),
    "repetition": Params(temperature=1.0, repetition_penalty=1.7),
    "presence": Params(temperature=1.0, presence_penalty=1.5),
    "frequency": Params(temperature=1.0, frequency_penalty=0.8),
    "rewards": Params(temperature=1.0, presence_penalty=-1.0, frequency_penalty=-0.5, repetition_penalty=0.6),
    "bias": Params(temperature=1.0, logit_bias={3: 4.0, 5: -100.0}),
    "greedy": Params(),
    "greedy with penalties": Params(repetition_penalty=3.0, frequency_penalty=2.0, logit_bias={1: 1.0}),
    "everything": Params(
        temperature=0.7, top_k=8, top_p=0.85, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.4,
        frequency_penalty=0.3, logit_bias={0: 2.0},
    ),
}  # fmt: skip


def told(prompt: Sequence[int], out: Sequence[int], params: Params) -> Request:
    request = Request(prompt, params)
    request.tokens.extend(out)
    return request


def probabilities(logits: torch.Tensor, contexts: Sequence[Context]) -> np.ndarray:
    dist = Standard()(logits.clone(), contexts)
    return torch.stack([dist.row(i) for i in range(len(contexts))]).double().numpy()


@pytest.mark.parametrize("name", RULES)
def test_rules_equal_the_reference(name: str) -> None:
    params, rng = RULES[name], np.random.default_rng(5)
    for _ in range(50):
        logits = torch.tensor(rng.normal(size=VOCAB) * 3, dtype=torch.float32)
        prompt, out = rng.integers(0, VOCAB, 6).tolist(), rng.integers(0, VOCAB, rng.integers(0, 9)).tolist()
        got = probabilities(logits[None], [Context(told(prompt, out, params))])[0]
        want = reference.distribution(logits.double().numpy(), prompt, out, params)
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_rows_of_one_call_do_not_touch_each_other() -> None:
    """One call over rows of every rule equals a call per row."""
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(len(RULES), VOCAB, generator=gen) * 3
    contexts = [Context(told([1, 2, 2, 7], [4, 4, 9], params)) for params in RULES.values()]
    together = probabilities(logits, contexts)
    for i, context in enumerate(contexts):
        np.testing.assert_array_equal(together[i], probabilities(logits[i : i + 1], [context])[0])


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "rewards", "everything"])
def test_a_draft_path_counts_as_output(name: str) -> None:
    """Tokens of a path not yet accepted weigh like emitted ones, for that row only."""
    params, gen = RULES[name], torch.Generator().manual_seed(1)
    logits = torch.randn(3, VOCAB, generator=gen)
    request = told([3, 5], [5, 8], params)
    paths = [(), (8,), (8, 8, 1)]
    got = probabilities(logits, [Context(request, path) for path in paths])
    for i, path in enumerate(paths):
        emitted = Context(told([3, 5], [5, 8, *path], params))
        np.testing.assert_allclose(got[i], probabilities(logits[i : i + 1], [emitted])[0], atol=1e-7)


def test_history_rolls_forward_and_is_rebuilt() -> None:
    """Token by token, in leaps, or from an emptied drawer: the same penalties."""
    params = RULES["everything"]
    gen = torch.Generator().manual_seed(2)
    stepwise = told([1, 2, 3], [], params)
    for n in range(12):
        logits = torch.randn(1, VOCAB, generator=gen)
        got = probabilities(logits, [Context(stepwise)])
        fresh = told([1, 2, 3], stepwise.out, params)
        np.testing.assert_array_equal(got, probabilities(logits, [Context(fresh)]))
        stepwise.tokens.extend([(5 * n) % VOCAB] * (1 + n % 3))
        if n == 6:
            stepwise.state.clear()  # preempted


def test_frequency_and_presence_follow_openai() -> None:
    """logit - count * frequency - (count > 0) * presence, over the output, never over the prompt."""
    params = Params(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    request = told([7, 7, 7], [2, 2, 4], params)
    got = probabilities(torch.zeros(1, VOCAB), [Context(request)])[0]
    logits = np.zeros(VOCAB)
    logits[2] -= 2 * 0.25 + 0.5
    logits[4] -= 1 * 0.25 + 0.5
    np.testing.assert_allclose(got, reference.softmax(logits), atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(1e-30, 100.0),
    top_k=st.integers(0, 20),
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 100.0, 1e30]),
)
def test_always_a_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    params = Params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    got = probabilities(logits, [Context(Request([1], params))] * 2)
    assert np.isfinite(got).all() and (got >= 0).all()
    np.testing.assert_allclose(got.sum(1), 1.0, atol=1e-5)


HUGGING_FACE = {
    "temperature": ("TemperatureLogitsWarper", (0.6,), Params(temperature=0.6)),
    "top_k": ("TopKLogitsWarper", (5,), Params(temperature=1.0, top_k=5)),
    "top_p": ("TopPLogitsWarper", (0.7,), Params(temperature=1.0, top_p=0.7)),
    "min_p": ("MinPLogitsWarper", (0.15,), Params(temperature=1.0, min_p=0.15)),
    "repetition": ("RepetitionPenaltyLogitsProcessor", (1.4,), Params(temperature=1.0, repetition_penalty=1.4)),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_rules_equal_transformers(name: str) -> None:
    processes = pytest.importorskip("transformers.generation.logits_process")
    kind, arguments, params = HUGGING_FACE[name]
    process = getattr(processes, kind)(*arguments)
    gen = torch.Generator().manual_seed(3)
    for _ in range(50):
        logits = torch.randn(1, VOCAB, generator=gen) * 3
        tokens = torch.randint(0, VOCAB, (1, 8), generator=gen)
        want = process(tokens, logits.clone()).softmax(-1)
        request = told(tokens[0, :5].tolist(), tokens[0, 5:].tolist(), params)
        np.testing.assert_allclose(probabilities(logits, [Context(request)]), want.numpy(), atol=2e-6)


def test_filters_in_a_row_equal_transformers() -> None:
    """Their order is part of the contract: temperature, top-k, top-p, min-p."""
    processes = pytest.importorskip("transformers.generation.logits_process")
    chain = [
        processes.TemperatureLogitsWarper(1.3),
        processes.TopKLogitsWarper(9),
        processes.TopPLogitsWarper(0.8),
        processes.MinPLogitsWarper(0.1),
    ]
    params = Params(temperature=1.3, top_k=9, top_p=0.8, min_p=0.1)
    gen = torch.Generator().manual_seed(4)
    for _ in range(50):
        logits = torch.randn(1, VOCAB, generator=gen) * 3
        want = logits.clone()
        for process in chain:
            want = process(torch.zeros(1, 1, dtype=torch.int64), want)
        got = probabilities(logits, [Context(Request([1], params))])
        np.testing.assert_allclose(got, want.softmax(-1).numpy(), atol=2e-6)


def test_top_k_keeps_ties_at_the_border() -> None:
    params = Params(temperature=1.0, top_k=2)
    got = probabilities(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), [Context(Request([1], params))])[0]
    assert (got > 0).tolist() == [True, True, True, False]


def test_params_differ_by_request_within_a_batch() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]] * 3)
    params = [replace(RULES["plain"], temperature=t) for t in (0.5, 1.0, 2.0)]
    got = probabilities(logits, [Context(Request([1], p)) for p in params])
    for row, p in zip(got, params):
        np.testing.assert_allclose(row, reference.softmax(np.array([1.0, 0.0, -1.0]) / p.temperature), atol=1e-6)
