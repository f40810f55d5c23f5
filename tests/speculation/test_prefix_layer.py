"""Hydra++: heads behind a prefix layer say what their own forward says, written a second time in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.prefixed import CHUNK, PrefixedDrafter
from phasewise.verbs.draft import Draft
from tests import oracle, tiny
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.draft.fitted import PROMPTS, N
from tests.laws.scenario import preempt
from tests.speculation.eagle_files import block, matrices, normed
from tests.speculation.one_pass_files import PlainPass
from tests.speculation.test_pickled import HEADS, WIDTH, Hydra

NODES = 7


@cache
def tensors() -> dict[str, Tensor]:
    """The prefix layer by its own names."""
    layer = block(4, "layers.0", WIDTH, WIDTH, inner=2 * WIDTH)
    return layer | matrices(5, layers__0__input_layernorm__weight=(WIDTH,), norm__weight=(WIDTH,))


def saved(path: Path) -> Path:
    """Hydra++'s file as its own code writes it, with what else the class of its layer has."""
    prefix = {f"prefix_embeding_layer.{name}": tensor for name, tensor in tensors().items()}
    prefix["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(3, WIDTH)
    torch.save(Hydra(True).state_dict() | prefix, path)
    return path


class Plain(PlainPass):
    """All of it for one text at a time, without a cache."""

    def __init__(self) -> None:
        self.target, self.w = tiny.checkpoint(), tensors()
        self.theta, self.heads, self.hydra = 10000.0, 4, Hydra(True)
        self.embeddings = load_file(self.target / "model.safetensors")["model.embed_tokens.weight"]

    @torch.inference_mode()
    def said(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Logits of the head that guesses after the pending token and so many guesses."""
        x = oracle.last(self.target, oracle.states(self.target, text[:-1])[-1])
        n = len(x)
        h = normed(x, self.w["layers.0.input_layernorm.weight"])
        sees = torch.ones(n, n, dtype=torch.bool).tril()
        x = self.after(0, x, self.attention(0, h, h, sees, range(n), range(n)))
        state = normed(x[-1:], self.w["norm.weight"])
        embedded = self.embeddings[[text[-1], *path, *[0] * (HEADS - len(path) - 1)]]
        logits: Tensor = self.hydra(state, embedded[None])[len(path)][0]
        return logits


def drafted(placed: Any, prompts: Sequence[Sequence[int]], **events: int) -> dict[tuple[int, ...], Draft]:
    """What is drafted after each text, while these are answered alone, one after the other."""
    drafter = placed.recipes[""].phases[-1].decode.drafter
    assert isinstance(drafter, PrefixedDrafter)
    found, draft = dict[tuple[int, ...], Draft](), drafter.draft

    def looked(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        drafts = draft(requests, budgets)
        found.update({tuple(r.tokens): each for r, each in zip(requests, drafts) if each is not None})
        return drafts

    drafter.draft = looked  # type: ignore[method-assign]
    for prompt in prompts:
        request = Request(prompt, tiny.greedy(N))
        placed.add(request)
        for step in range(1000):
            if request.left is not None:
                break
            placed.step()
            if step == events.get("preempted"):
                assert preempt(placed, lambda i, request: True)
        assert request.out == tiny.plain(PROMPTS, tiny.greedy(N))[PROMPTS.index(prompt)]
    drafter.draft = draft  # type: ignore[method-assign]
    return found


def same(a: dict[tuple[int, ...], Draft], b: dict[tuple[int, ...], Draft]) -> bool:
    return a.keys() == b.keys() and all(
        (a[text].tokens, a[text].parents) == (b[text].tokens, b[text].parents) for text in a
    )


def test_guesses_are_those_of_the_plain_forward(cli: Cli, tmp_path: Path) -> None:
    assert cli("convert", "heads", saved(tmp_path / "hydra_lm_head.pt"), tmp_path / "out").code == 0
    found, plain = (
        drafted(tiny.engine({"draft": f"hydra:heads={tmp_path / 'out'},nodes={NODES}"}), PROMPTS[2:]),
        Plain(),
    )
    full = [(text, draft) for text, draft in found.items() if len(draft.tokens) == NODES]
    assert len(full) > N / 2
    for text, draft in full[::4]:
        for parent in {-1, *draft.parents}:
            path = draft.path(parent) if parent >= 0 else ()
            children = [token for token, above in zip(draft.tokens, draft.parents) if above == parent]
            assert children == plain.said(text, path).topk(len(children)).indices.tolist()


def test_the_prefix_layer_is_read(cli: Cli, tmp_path: Path) -> None:
    """Without it the same heads guess otherwise, and the drafter is another."""
    out = tmp_path / "out"
    assert cli("convert", "heads", saved(tmp_path / "hydra_lm_head.pt"), out).code == 0
    with_it = drafted(tiny.engine({"draft": f"hydra:heads={out}"}), PROMPTS[2:])
    other = load_file(out / "model.safetensors")
    other["prefix_layer.layers.0.mlp.down_proj.weight"] *= -1
    save_file(other, out / "model.safetensors")
    assert not same(with_it, drafted(tiny.engine({"draft": f"hydra:heads={out}"}), PROMPTS[2:]))


def test_prefix_hits_and_preemption_change_no_guess(cli: Cli, tmp_path: Path) -> None:
    assert cli("convert", "heads", saved(tmp_path / "hydra_lm_head.pt"), tmp_path / "out").code == 0
    placed = tiny.engine({"draft": f"hydra:heads={tmp_path / 'out'}"})
    cold, hits = drafted(placed, PROMPTS), placed.counters.prefix_hits
    assert same(cold, drafted(placed, PROMPTS)) and placed.counters.prefix_hits - hits == 96
    again = drafted(placed, PROMPTS, preempted=4)
    assert all(same({text: again[text]}, {text: cold[text]}) for text in again.keys() & cold.keys()) and again
    placed.forget_prefixes()
    assert placed.kv_bytes == 0


def test_a_long_prompt_is_read_in_pieces(cli: Cli, tmp_path: Path) -> None:
    """Nothing is guessed before all of it is."""
    assert cli("convert", "heads", saved(tmp_path / "hydra_lm_head.pt"), tmp_path / "out").code == 0
    prompts = tiny.prompts(CHUNK + 70)
    placed = tiny.engine({"draft": f"hydra:heads={tmp_path / 'out'}"})
    assert tiny.outs(tiny.run(placed, prompts, tiny.greedy(6))) == tiny.plain(prompts, tiny.greedy(6))
    assert placed.counters.drafted > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefix_layer.norm.weight": None}, "norm.weight is missing"),
        ({"prefix_layer.more": torch.ones(1)}, "more is left over"),
        ({"prefix_layer.norm.weight": torch.ones(5)}, r"norm.weight has shape \[5\]"),
    ],
)
def test_a_prefix_layer_that_does_not_fit(change: dict[str, Any], said: str, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("convert", "heads", saved(tmp_path / "hydra_lm_head.pt"), out).code == 0
    held = load_file(out / "model.safetensors") | change
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, out / "model.safetensors")
    with pytest.raises(UserError, match=said):
        tiny.engine({"draft": f"hydra:heads={out}"})
