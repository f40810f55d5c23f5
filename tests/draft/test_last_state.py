"""Medusa's and Hydra's heads: modules, trees of ranks, what a drafter makes of states, and folders that do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phasewise.errors import Untrained, UserError
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.hydra import HydraHeads, HydraShape
from phasewise.speculation.heads.last_state import (
    LastStateDrafter,
    LastStateHeads,
    RankPath,
    expected_tokens,
    random_weights,
    rank_tree,
)
from phasewise.speculation.heads.medusa import MedusaHeads, MedusaShape
from tests import tiny
from tests.draft import successor
from tests.draft.successor import DEPTH

KINDS = ("medusa", "hydra")


# ---- modules, against the papers' formulas written a second time
def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def test_a_head_of_medusa() -> None:
    heads = MedusaHeads(MedusaShape(8, 30, heads=3, layers=2, own_head=True))
    random_weights(heads, 0)
    h, w = torch.randn(5, 8), heads.state_dict()
    for head in range(3):
        z = h
        for layer in range(2):
            at = f"blocks.{head}.layers.{layer}"
            z = z + silu(z @ w[f"{at}.weight"].T + w[f"{at}.bias"])
        got = heads.logits(head, heads.state(head, h, None), lambda x: pytest.fail("the model's is not asked"))
        torch.testing.assert_close(got, z @ w[f"lm_heads.{head}.weight"].T)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_head_of_hydra(rank: int) -> None:
    heads = HydraHeads(HydraShape(8, 30, heads=3, layers=2, rank=rank))
    random_weights(heads, 0)
    h, path, output, w = torch.randn(5, 8), torch.randn(5, 3, 8), torch.randn(30, 8), heads.state_dict()
    for head in range(3):
        x = torch.cat((h, *path.unbind(1)[: head + 1]), 1)  # [5, (head + 2) * 8]
        both = []
        for part in ("residual", "linear"):
            at = f"wide.{head}.{part}"
            inner = x @ w[f"{at}.down.weight"].T if rank else x
            both.append(inner @ w[f"{at}.up.weight"].T + w[f"{at}.up.bias"])
        z = both[0] + silu(both[1]) + (h if rank else 0)
        z = z + silu(z @ w[f"blocks.{head}.layers.0.weight"].T + w[f"blocks.{head}.layers.0.bias"])
        got = heads.logits(head, heads.state(head, h, path), lambda x: x @ output.T)
        torch.testing.assert_close(got, z @ output.T)


@pytest.mark.parametrize("kind", [MedusaHeads, HydraHeads])
def test_untrained_heads_say_again_what_the_model_says(kind: type[LastStateHeads]) -> None:
    heads, h = kind.untrained(8, 30), torch.randn(4, 8)
    for head in range(heads.depth):
        torch.testing.assert_close(heads.state(head, h, torch.randn(4, head + 1, 8)), h)


def test_without_embeddings_hydra_is_medusa() -> None:
    """Of width d: R's and W's first columns, the rest of the input being zero."""
    heads = HydraHeads(HydraShape(8, 30, heads=2))
    random_weights(heads, 1)
    h, w = torch.randn(3, 8), heads.state_dict()
    for head in range(2):
        r, m = (w[f"wide.{head}.{part}.up.weight"][:, :8] for part in ("residual", "linear"))
        b, c = (w[f"wide.{head}.{part}.up.bias"] for part in ("residual", "linear"))
        torch.testing.assert_close(heads.state(head, h, torch.zeros(3, 2, 8)), h @ r.T + b + silu(h @ m.T + c))


# ---- trees
def weight(table: list[list[float]], path: RankPath) -> float:
    return math.prod(table[head][rank] for head, rank in enumerate(path))


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_the_likeliest_paths(seed: int) -> None:
    rng = Random(seed)
    table = [sorted((rng.random() for _ in range(4)), reverse=True) for _ in range(3)]
    every = sorted((p for n in (1, 2, 3) for p in product(range(4), repeat=n)), key=lambda p: -weight(table, p))
    for nodes in (1, 7, 30, 84, 200):
        tree = rank_tree(table, nodes)
        assert len(set(tree)) == len(tree) == min(nodes, len(every))
        assert all(path[:-1] in tree[:i] for i, path in enumerate(tree) if len(path) > 1), "parents come first"
        assert sum(weight(table, p) for p in tree) == pytest.approx(sum(weight(table, p) for p in every[:nodes]))


def test_what_a_tree_should_accept_is_what_independent_heads_have_accepted() -> None:
    table = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.1, 0.1]]
    tree = rank_tree(table, 9)
    rng, runs, total = Random(0), 20_000, 0
    for _ in range(runs):
        ranks = tuple(rng.choices(range(4), [*row, 1 - sum(row)])[0] for row in table)
        total += 1 + sum(ranks[: n + 1] in tree for n in range(3))
    assert expected_tokens(table, tree) == pytest.approx(total / runs, abs=0.03)


# ---- drafters
def run(kind: str, out: Path, params: Params | None = None, **more: Any) -> tuple[list[list[int]], Any]:
    verbs = {"draft": f"{kind}:heads={successor.stored(kind, out)},nodes={DEPTH}", "schedule": "prefill_first"}
    placed = tiny.engine(verbs | more.pop("verbs", {}), of=successor.model(), **more)
    prompts = [[5, 9, 3], [7, 7], [11, 2, 4, 8]]
    return tiny.outs(tiny.run(placed, prompts, params or tiny.greedy(17))), placed


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_know_take_a_pass_for_every_depth_plus_one(kind: str, tmp_path: Path) -> None:
    """The first token comes with the prompt; then each pass accepts a whole chain."""
    outs, placed = run(kind, tmp_path)
    assert outs == [successor.said(last, 17) for last in (3, 7, 8)]
    assert placed.counters.forwards == 1 + math.ceil(16 / (DEPTH + 1))
    assert placed.counters.accepted == placed.counters.drafted == 3 * 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "verbs",
    [{"place": "disaggregated"}, {"schedule": "sarathi:budget=3"}, {"sample": "standard:coupling=gumbel"}],
    ids=lambda verbs: next(iter(verbs)),
)
def test_states_outlast_hand_offs_and_slices(kind: str, verbs: dict[str, str], tmp_path: Path) -> None:
    outs, placed = run(kind, tmp_path, verbs=verbs)
    assert outs == [successor.said(last, 17) for last in (3, 7, 8)]
    assert placed.counters.accepted == placed.counters.drafted >= 3 * 12


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_there_after_prefix_hits(kind: str, tmp_path: Path) -> None:
    verbs = {"draft": f"{kind}:heads={successor.stored(kind, tmp_path)},nodes={DEPTH}"}
    placed = tiny.engine(verbs, of=successor.model(), prefix_cache=True)
    requests = [Request([5, 9, 3] * 60, tiny.greedy(17)) for _ in range(2)]
    for i, request in enumerate(requests, 1):
        placed.add(request)
        while request.left is None:
            placed.step()
        assert request.out == successor.said(3, 17) and placed.counters.accepted == 12 * i
    assert placed.counters.prefix_hits
    tiny.finish(placed, requests)


@pytest.mark.parametrize("kind", [MedusaHeads, HydraHeads])
def test_a_tree_is_filled_in_node_by_node(kind: type[LastStateHeads]) -> None:
    """Of several requests at once, each node the rank that its path says, behind the tokens of the nodes above it."""
    model, heads = tiny.model(), kind.untrained(tiny.model().config.hidden, tiny.VOCAB)
    random_weights(heads, 3)
    tree = rank_tree([[0.5, 0.3, 0.1]] * heads.depth, 20)
    drafter = LastStateDrafter(SimpleNamespace(model=model), heads, tree)  # type: ignore[arg-type]
    requests = [Request(prompt, Params(max_tokens=9)) for prompt in tiny.prompts(5, 9, 4)]
    requests[1].params = Params(max_tokens=3)  # room for two tokens and one more
    states = torch.randn(3, model.config.hidden)
    for request, state in zip(requests, states):
        request.state[heads.kind] = (request.known, state)
    requests[2].state[heads.kind] = (requests[2].known + 1, states[2])  # of another place in the text
    *drafts, nothing = drafter.draft(requests, [20, drafter.size(requests[1]), 20])
    assert nothing is None
    for request, state, draft, levels in zip(requests, states, drafts, (heads.depth, 2)):
        assert draft is not None
        paths: list[RankPath] = []
        for node, parent in enumerate(draft.parents):
            above = () if parent < 0 else paths[parent]
            tokens = torch.tensor([[request.tokens[-1], *(() if parent < 0 else draft.path(parent))]])
            h, path = model.norm(state[None]), model.embed(tokens.flatten()).view(1, tokens.shape[1], -1)
            logits = heads.logits(len(above), heads.state(len(above), h, path), model.unembed)
            order = logits[0].argsort(descending=True).tolist()
            paths.append((*above, order.index(draft.tokens[node])))
        assert paths == [path for path in tree if len(path) <= levels]


# ---- folders
@pytest.mark.parametrize("kind", KINDS)
def test_auto_looks_beside_the_model_and_says_what_trains_some(kind: str) -> None:
    with pytest.raises(Untrained, match=f"{kind} needs heads trained .*phasewise train heads {kind} --for .*heads=DIR"):
        tiny.engine({"draft": kind})


def _config(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        config = json.loads((path / folder.CONFIG).read_text()) | changes
        (path / folder.CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def _pickled(path: Path) -> None:
    (path / folder.WEIGHTS).rename(path / "medusa_lm_head.pt")


def _cut(path: Path) -> None:
    whole = (path / folder.WEIGHTS).read_bytes()
    (path / folder.WEIGHTS).write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: (path / folder.CONFIG).unlink(), "it has no config.json"),
        (lambda path: (path / folder.CONFIG).write_text("{"), "cannot be read as JSON"),
        (lambda path: (path / folder.CONFIG).write_text("[]"), "must hold a JSON object"),
        (lambda path: (path / folder.WEIGHTS).unlink(), "it has no model.safetensors"),
        (_pickled, r"medusa_lm_head.pt is pickled.*phasewise convert heads .*medusa_lm_head.pt OUT"),
        (_cut, "model.safetensors is not a readable safetensors file"),
        (_config(hidden_size=64), r"hidden_size=64, the one in .* has 48.*phasewise train heads medusa"),
        (_config(vocab_size=9), "vocab_size=9, the one in .* has 24"),
        (_config(num_heads=None), "num_heads=None must be a whole number"),
        (_config(num_heads=4), r"blocks.3.layers.0.weight is absent"),
        (_config(num_hidden_layers=2), "blocks.0.layers.1.weight is absent"),
        (_config(truncated_vocab_size=9), "truncated vocabulary"),
        (_config(phasewise={"base": "f00"}), r"trained for another model \(f00\)"),
        (_config(phasewise={"accuracy": [[0.5]]}), '"accuracy" must hold a list of numbers for each of the 3 heads'),
    ],
    ids=range(14),
)
def test_folders_that_do_not_fit_are_refused_by_name(
    change: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    change(successor.stored("medusa", tmp_path))
    with pytest.raises(UserError, match=says):
        tiny.engine({"draft": f"medusa:heads={tmp_path}"}, of=successor.model())


def test_names_that_are_no_folder_and_seeds_that_are_no_number(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.pt")
    for heads, says in (
        (tmp_path / "absent", "there is no such folder"),
        (tmp_path / "a.pt", "is a file: name the folder.*phasewise convert heads"),
        ("random:x", "random:x: the seed must be a whole number"),
    ):
        with pytest.raises(UserError, match=says):
            tiny.engine({"draft": f"hydra:heads={heads}"})


@pytest.mark.parametrize("text", ["medusa:nodes=0", "hydra:nodes=64"])
def test_wrong_knobs_are_named(text: str) -> None:
    with pytest.raises(UserError, match=r"nodes=\d+ must be from 1 to 63"):
        tiny.engine({"draft": text})
