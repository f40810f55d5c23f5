"""Which checkpoint tensors make up each of the decoder's tensors: the one place that knows checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phasewise.model.config import ModelConfig, MoeSpec

Shape = tuple[int, ...]
Part = tuple[str, Shape]  # a checkpoint tensor and the shape it must have
Layout = Mapping[str, tuple[Part, ...]]  # the decoder's tensor -> its parts, concatenated along dimension 0
Entry = tuple[str, tuple[Part, ...]]


def layout(config: ModelConfig) -> Layout:
    """All tensors of the decoder, as `embed`, `norm`, `head` (unless tied) and `<layer>.<name>`."""
    entries: dict[str, tuple[Part, ...]] = {
        "embed": (("model.embed_tokens.weight", (config.vocab, config.hidden)),),
        "norm": (("model.norm.weight", (config.hidden,)),),
    }
    if not config.tied:
        entries["head"] = (("lm_head.weight", (config.vocab, config.hidden)),)
    for i in range(config.layers):
        entries.update((f"{i}.{key}", parts) for key, parts in _layer(config, i))
    return entries


def _layer(config: ModelConfig, i: int) -> Iterator[Entry]:
    root = f"model.layers.{i}"
    names = config.norms
    places = {"before_attention": names.before_attention, "after_attention": names.after_attention,
              "before_mlp": names.before_mlp, "after_mlp": names.after_mlp}  # fmt: skip
    for place, name in places.items():
        if name is not None:
            yield place, ((f"{root}.{name}.weight", (config.hidden,)),)
    yield from _attention(config, f"{root}.self_attn")
    spec = config.moe[i]
    if spec is None:
        up_names = ("gate_up_proj",) if config.fused else ("gate_proj", "up_proj")
        size = config.intermediate * (2 if config.fused else 1)
        yield from _linear("gate_up", f"{root}.mlp", [(name, size) for name in up_names], config.hidden,
                           config.mlp_bias)  # fmt: skip
        yield from _linear("down", f"{root}.mlp", [("down_proj", config.hidden)], config.intermediate, config.mlp_bias)
    else:
        yield from _experts(config, spec, f"{root}.{spec.prefix}")


def _attention(config: ModelConfig, root: str) -> Iterator[Entry]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = [("qkv_proj", q + 2 * kv)] if config.fused else [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    yield from _linear("qkv", root, parts, config.hidden, config.qkv_bias)
    yield from _linear("o", root, [("o_proj", config.hidden)], q, config.o_bias)
    if config.sink_scores:
        yield "sink_scores", ((f"{root}.sinks", (config.heads,)),)
    if config.qk_norm is not None:
        full = config.qk_norm == "full"
        yield "q_norm", ((f"{root}.q_norm.weight", (q if full else config.head_dim,)),)
        yield "k_norm", ((f"{root}.k_norm.weight", (kv if full else config.head_dim,)),)


def _experts(config: ModelConfig, spec: MoeSpec, root: str) -> Iterator[Entry]:
    yield from _linear("router", root, [(spec.router, spec.experts)], config.hidden, spec.bias)
    gate, up, down = spec.names
    for e in range(spec.experts):
        expert = f"{root}.experts.{e}"
        both = [(gate, spec.intermediate), (up, spec.intermediate)]
        yield from _linear(f"expert.{e}.gate_up", expert, both, config.hidden, spec.bias)
        yield from _linear(f"expert.{e}.down", expert, [(down, config.hidden)], spec.intermediate, spec.bias)


def _linear(key: str, root: str, parts: list[tuple[str, int]], inputs: int, bias: bool) -> Iterator[Entry]:
    """A weight [sum of rows, inputs] under `key`, and its bias under `key`.bias."""
    yield key, tuple((f"{root}.{name}.weight", (rows, inputs)) for name, rows in parts)
    if bias:
        yield f"{key}.bias", tuple((f"{root}.{name}.bias", (rows,)) for name, rows in parts)
