"""What layered prefill is for: in a mixture of experts a prompt loads each expert once, not once per chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phasewise.model.mlp import MoE
from phasewise.model.model import Model
from tests import tiny


class Routed:
    """A model whose routers are watched: `passes` has the (layer, expert) pairs chosen by each call of a layer."""

    def __init__(self, of: Model, patch: pytest.MonkeyPatch) -> None:
        self.of = of
        self.passes: list[set[tuple[int, int]]] = []
        layer_of = {id(layer.mlp): layer.index for layer in of.layers}
        route = MoE.route

        def spy(moe: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, chosen = route(moe, x)
            self.passes.append({(layer_of[id(moe)], expert) for expert in chosen.flatten().tolist()})
            return weights, chosen

        patch.setattr(MoE, "route", spy)

    def loads(self, schedule: str, given: list[list[int]], new: list[int]) -> tuple[int, list[list[int]]]:
        """What the counter says, which is what was seen; and the tokens."""
        self.passes = []
        placed = tiny.engine({"schedule": schedule}, of=self.of, prefix_cache=False)
        out = tiny.outs(tiny.run(placed, given, [tiny.greedy(n) for n in new]))
        assert placed.counters.expert_loads == sum(map(len, self.passes))
        return placed.counters.expert_loads, out


def qwen(path: Path) -> Model:
    """16 experts in four of five layers; the second is dense."""
    transformers = pytest.importorskip("transformers", reason="transformers writes the checkpoint")
    from tests.model.reference import save_random

    config = transformers.Qwen3MoeConfig(
        vocab_size=tiny.VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=512, num_experts=16, num_experts_per_tok=2,
        moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1], bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save_random(config, path)
    return Model.load(path)


@pytest.fixture(params=["mixtral", "qwen3_moe"])
def routed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Routed:
    return Routed(tiny.model(experts=8) if request.param == "mixtral" else qwen(tmp_path), monkeypatch)


def test_a_prompt_loads_each_of_its_experts_once(routed: Routed) -> None:
    """Four chunks use nearly all experts of every layer each; four groups of layers load them once."""
    given = tiny.prompts(64)
    whole, out = routed.loads("prefill_first", given, [1])
    assert whole == len(set.union(*routed.passes))
    grouped, same = routed.loads("layered:rows_per_group=16", given, [1])
    assert grouped == whole == len(set.union(*routed.passes)), "a pair is loaded twice"
    chunked, too = routed.loads("sarathi:budget=16", given, [1])
    assert chunked > 2.5 * whole
    assert out == same == too


def test_beside_decodes_fewer_experts_are_loaded_than_with_chunks(routed: Routed) -> None:
    """One stream decodes while two prompts come; both ways take about as many steps."""
    given, new = tiny.prompts(2, 64, 61), [30, 2, 2]
    grouped, out = routed.loads("layered:rows_per_group=16", given, new)
    chunked, same = routed.loads("sarathi:budget=17", given, new)
    assert out == same
    alone, _ = routed.loads("sarathi", given[:1], new[:1])
    assert grouped - alone < 0.6 * (chunked - alone)


def test_a_chunk_uses_about_as_many_experts_as_independent_choices_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """E (1 - (1 - k / E)^T) of E experts for T rows that choose k each: why chunks save nothing."""
    routed = Routed(tiny.model(experts=8), monkeypatch)
    for rows in (2, 8):
        n = 128 // rows
        loads, _ = routed.loads(f"sarathi:budget={rows}", tiny.prompts(128), [1])
        expected = 8 * (1 - (1 - 2 / 8) ** rows)
        assert loads / (n * routed.of.config.layers) == pytest.approx(expected, rel=0.2)
