"""Tiny random checkpoints, written without transformers, and engines around them: what most tests stand on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed

VOCAB = 64


def write_checkpoint(
    path: Path, *, layers: int = 4, vocab: int = VOCAB, hidden: int = 48, heads: int = 4, kv_heads: int = 2,
    experts: int = 0, seed: int = 0, sharp: float = 6.0, context: int = 1024,
) -> Path:  # fmt: skip
    """A Llama (or, with `experts`, a Mixtral) whose greedy output depends on every layer and on the whole prompt."""
    gen = torch.Generator().manual_seed(seed)
    dim, inner = hidden // heads, hidden * 2

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=gen) * gain / columns**0.5

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
    tensors["lm_head.weight"] = matrix(vocab, hidden, sharp)
    for i in range(layers):
        at = f"model.layers.{i}."
        tensors[at + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[at + "post_attention_layernorm.weight"] = torch.ones(hidden)
        tensors[at + "self_attn.q_proj.weight"] = matrix(heads * dim, hidden, 2.0)
        tensors[at + "self_attn.k_proj.weight"] = matrix(kv_heads * dim, hidden, 2.0)
        tensors[at + "self_attn.v_proj.weight"] = matrix(kv_heads * dim, hidden, 2.0)
        tensors[at + "self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        if experts:
            tensors[at + "block_sparse_moe.gate.weight"] = matrix(experts, hidden)
            for e in range(experts):
                for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
                    tensors[at + f"block_sparse_moe.experts.{e}.{name}.weight"] = matrix(*shape)
        else:
            tensors[at + "mlp.gate_proj.weight"] = matrix(inner, hidden)
            tensors[at + "mlp.up_proj.weight"] = matrix(inner, hidden)
            tensors[at + "mlp.down_proj.weight"] = matrix(hidden, inner)
    config = {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab,
        "max_position_embeddings": context, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2, "sliding_window": None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@cache
def checkpoint(**options: Any) -> Path:
    """The directory of a tiny checkpoint with these options; made once per test process."""
    return write_checkpoint(Path(tempfile.mkdtemp(prefix="phasewise-tiny-")), **options)


@cache
def model(**options: Any) -> Model:
    return Model.load(checkpoint(**options))


def load(name: str) -> Model:
    """Companion models by name: 'tiny-draft' is a smaller relative, 'tiny' the target itself, else a directory."""
    if name == "tiny":
        return model()
    return model(layers=2, seed=1) if name == "tiny-draft" else Model.load(name)


def engine(
    verbs: dict[str, str] | None = None, *, of: Model | None = None, clock: Callable[[], float] | None = None,
    **limits: Any,
) -> Placed:  # fmt: skip
    """An engine (placement) with the methods named in `verbs`, over a tiny model."""
    limits = {"kv_bytes": 64 << 20, **limits}
    extra = {"clock": clock} if clock else {}
    return Builder(of or model(), parse(verbs or {}), Limits(**limits), load=load, **extra).build()


def prompts(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Random prompts of the given lengths; ids from 3 up (0-2 are special)."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=gen).tolist() for n in lengths]


def greedy(n: int = 16) -> Params:
    return Params(max_tokens=n, ignore_eos=True)


def run(
    placed: Placed, given: Sequence[Sequence[int]], params: Params | Sequence[Params] | None = None
) -> list[Request]:
    """Add all prompts at once, step until all have left, and check that no KV byte is left behind."""
    each = params if isinstance(params, Sequence) else [params or greedy()] * len(given)
    requests = [Request(p, q) for p, q in zip(given, each)]
    for request in requests:
        placed.add(request)
    finish(placed, requests)
    return requests


def disturb(engine: Any, requests: Sequence[Request]) -> None:
    """Add the requests and take a dozen steps, in two of which all that run but the first are preempted."""
    for request in requests:
        engine.add(request)
    for step in range(12):
        engine.step()
        if step in (1, 7):
            for request in [each for each in requests if each in engine.running][1:]:
                engine.room.preempt(request)


def finish(placed: Placed, requests: Sequence[Request], most: int = 5000) -> None:
    """Step until all requests have left; then the engine must be empty."""
    for _ in range(most):
        if all(r.left is not None for r in requests):
            break
        placed.step()
    else:
        raise AssertionError(f"still running after {most} steps: {[r for r in requests if r.left is None]}")
    if placed.idle:
        placed.forget_prefixes()
        assert placed.kv_bytes == 0, f"{placed.kv_bytes} KV bytes are left behind"


def outs(requests: Sequence[Request]) -> list[list[int]]:
    failed = [r for r in requests if r.left is None or r.left.how == "failed"]
    assert not failed, failed
    return [r.out for r in requests]


_PLAIN: dict[tuple[Model, str], list[list[int]]] = {}


def plain(
    given: Sequence[Sequence[int]], params: Params | Sequence[Params] | None = None, verbs: dict[str, str] | None = None
) -> list[list[int]]:
    """The tokens that one engine with these methods gives, all prompts at once: what others are compared with. Run
    once per test process, for many tests ask for the same; what is itself under test must not be asked for here."""
    key = model(), repr((sorted((verbs or {}).items()), given, params))
    if key not in _PLAIN:
        _PLAIN[key] = outs(run(engine(verbs), given, params))
    return [list(tokens) for tokens in _PLAIN[key]]


def corrected(
    given: Sequence[Sequence[int]], params: Params | Sequence[Params] | None = None, verbs: dict[str, str] | None = None
) -> int:
    """Rows that one engine computes once more because a method asks for that; nobody else's are to be."""
    placed: Any = engine(verbs)
    if placed.parts.phases[-1].attend.again is None:
        return 0
    run(placed, given, params)
    return int(placed.counters.recomputed)
