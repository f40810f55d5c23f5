"""Tiny EAGLE heads as files of each published layout, and their forward written a second time in plain torch.

Nothing of phasewise is imported here but the target's oracle, which imports nothing either.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from tests import oracle, tiny

INNER, HEADS, KV_HEADS = 80, 4, 2


def matrices(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Random tensors by name (`__` is a dot), of variance 1 / columns; vectors are near 1."""
    gen = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): 1 + 0.2 * torch.randn(shape, generator=gen)
        if len(shape) == 1
        else torch.randn(shape, generator=gen) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def block(
    seed: int, at: str, d: int, inputs: int, *, dim: int = 0, qk_norm: bool = False, inner: int = INNER
) -> dict[str, Tensor]:
    dim = dim or d // HEADS
    shapes = {
        "self_attn.q_proj": (HEADS * dim, inputs), "self_attn.k_proj": (KV_HEADS * dim, inputs),
        "self_attn.v_proj": (KV_HEADS * dim, inputs), "self_attn.o_proj": (d, HEADS * dim),
        "mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner),
        "post_attention_layernorm": (d,),
    }  # fmt: skip
    if qk_norm:
        shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    made = matrices(seed, **{f"{name}.weight": shape for name, shape in shapes.items()})
    return {f"{at}.{name}": tensor for name, tensor in made.items()}


def settings(d: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": d, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": tiny.VOCAB, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 500.0,
    } | more  # fmt: skip


def vocabulary(draft: int, seed: int = 5) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a draft vocabulary."""
    ids = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(seed))[:draft].sort().values
    t2d = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(draft), "t2d": t2d}


def save(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def eagle1(path: Path, d: int, *, bias: bool = True, embeddings: bool = False, seed: int = 1) -> Path:
    """EAGLE's own layout, first and second version."""
    tensors = block(seed, "layers.0", d, d) | matrices(seed + 1, fc__weight=(d, 2 * d))
    if bias:
        tensors["fc.bias"] = torch.randn(d, generator=torch.Generator().manual_seed(seed)) * 0.1
    if embeddings:
        tensors |= matrices(seed + 2, embed_tokens__weight=(tiny.VOCAB, d))
    return save(path, settings(d, architectures=["LlamaForCausalLM"], bias=bias), tensors)


def eagle3(path: Path, target: int, *, d: int = 0, draft: int = 20, embeddings: bool = False, seed: int = 1) -> Path:
    """EAGLE's own layout, third version: of width d for a target of another width where it is given."""
    d, wide = d or target, target
    tensors = block(seed, "midlayer", d, 2 * d) | vocabulary(draft)
    tensors |= matrices(
        seed + 1, fc__weight=(d, 3 * wide), midlayer__hidden_norm__weight=(d,), midlayer__input_layernorm__weight=(d,),
        norm__weight=(d,), lm_head__weight=(draft, d),
    )  # fmt: skip
    if embeddings or d != target:
        tensors |= matrices(seed + 2, embed_tokens__weight=(tiny.VOCAB, d))
    more = {} if d == target else {"target_hidden_size": target}
    return save(path, settings(d, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=draft, **more), tensors)


def speculators(
    path: Path, d: int, *, aux: Sequence[int] | None = (1, 3, 4), draft: int = tiny.VOCAB, family: str = "llama",
    seed: int = 1, **flags: bool,
) -> Path:  # fmt: skip
    """vLLM's layout; `flags`: norm_before_residual, norm_before_fc, fc_norm, norm_output."""
    count = 3 if aux is None else len(aux)
    dim = 16 if family == "qwen3" else 0
    tensors = block(seed, "layers.0", d, 2 * d, dim=dim, qk_norm=family == "qwen3")
    tensors |= matrices(
        seed + 1, fc__weight=(d, count * d), layers__0__hidden_norm__weight=(d,), norm__weight=(d,),
        layers__0__input_layernorm__weight=(d,), lm_head__weight=(draft, d), verifier_norm__weight=(d,),
    )  # fmt: skip
    if draft != tiny.VOCAB:
        tensors |= vocabulary(draft)
    if flags.get("norm_before_fc"):
        tensors |= matrices(seed + 3, input_norm__weight=(count * d,))
    if flags.get("fc_norm"):
        tensors |= matrices(seed + 3, **{f"fc_norm__{i}__weight": (d,) for i in range(count)})
    layer = settings(d, model_type=family) | ({"head_dim": dim} if dim else {})
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "draft_vocab_size": draft, "eagle_aux_hidden_state_layer_ids": None if aux is None else list(aux),
        "target_hidden_size": None,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target", "architectures": []}},
    } | flags  # fmt: skip
    return save(path, config, tensors)


QWEN = {
    "input_proj": "mtp.fc", "token_layernorm": "mtp.pre_fc_norm_embedding",
    "hidden_layernorm": "mtp.pre_fc_norm_hidden", "final_layernorm": "mtp.norm",
}  # fmt: skip
DEEPSEEK = {
    "input_proj": "eh_proj", "token_layernorm": "enorm", "hidden_layernorm": "hnorm",
    "final_layernorm": "shared_head.norm",
}  # fmt: skip


def mtp(path: Path, d: int, *, names: str = "speculators", seed: int = 1) -> Path:
    """An MTP module, by the names of `speculators`, `qwen`, `deepseek` or `mimo`, which has the state first."""
    own = matrices(
        seed + 1, input_proj__weight=(d, 2 * d), token_layernorm__weight=(d,), hidden_layernorm__weight=(d,),
        final_layernorm__weight=(d,),
    )  # fmt: skip
    layer = {name.removeprefix("x."): tensor for name, tensor in block(seed, "x", d, d).items()}
    layer |= matrices(seed + 2, input_layernorm__weight=(d,))
    known = {"qwen": QWEN, "deepseek": DEEPSEEK}.get(names, {})
    at = {"qwen": "mtp.layers.0.", "deepseek": "model.layers.8.", "mimo": "model.mtp_layers.0."}.get(
        names, "mtp_layers.0."
    )
    front = at if names != "qwen" else ""
    tensors = {f"{at}{name}": tensor for name, tensor in layer.items()}
    for name, tensor in own.items():
        stem = name.removesuffix(".weight")
        tensors[f"{front}{known.get(stem, stem)}.weight"] = tensor
    config = settings(d, architectures=["Model"])
    if names == "speculators":
        config = {"speculators_model_type": "mtp", "transformer_layer_config": config, "num_nextn_predict_layers": 1}
    return save(path, config, tensors)


# ---- the forward, once more
def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _plainly(name: str) -> str:
    """The name of an MTP module's tensor without the layout's own words."""
    for ours, theirs in (*QWEN.items(), *DEEPSEEK.items()):
        if name.endswith(f"{theirs}.weight"):
            return f"{ours}.weight"
    short = name.removeprefix("model.").removeprefix("mtp_layers.0.").removeprefix("mtp.layers.0.")
    short = short.removeprefix("layers.8.")
    inside = short.startswith(("self_attn", "mlp", "post_", "input_layernorm"))
    return f"layers.0.{short}" if inside else short


class Plain:
    """The heads of a folder beside the target of another, without a cache: every pair is computed anew."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.target = target
        self.config = json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.w = {name.replace("midlayer.", "layers.0."): tensor.float() if tensor.is_floating_point() else tensor
                  for name, tensor in load_file(folder / "model.safetensors").items()}  # fmt: skip
        self.third = "lm_head.weight" in self.w
        self.mtp = not self.third and "fc.weight" not in self.w
        self.state_first = any(name.startswith("model.mtp_layers.") for name in self.w)
        if self.mtp:
            self.w = {_plainly(name): tensor for name, tensor in self.w.items()}
        embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        self.embeddings = self.w.get("embed_tokens.weight", embeddings)

    def features(self, tokens: Sequence[int]) -> Tensor:
        states = oracle.states(self.target, tokens)
        if not self.third:
            return oracle.last(self.target, states[-1])
        layers = len(states) - 1
        aux = self.config.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
        parts = [states[i] for i in aux]
        if self.config.get("fc_norm"):
            parts = [normed(part, self.w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.config.get("norm_before_fc"):
            joined = normed(joined, self.w["input_norm.weight"])
        return joined @ self.w["fc.weight"].T

    def run(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Outputs [n, d] of n pairs, each of which sees those before it."""
        w, at = self.w, "layers.0."
        if self.third:
            h = normed(features, w[at + "hidden_norm.weight"])
            x = torch.cat((normed(embedded, w[at + "input_layernorm.weight"]), h), -1)
            residual = h if self.config.get("norm_before_residual") else features
        elif self.mtp:
            parts = (normed(embedded, w["token_layernorm.weight"]), normed(features, w["hidden_layernorm.weight"]))
            residual = torch.cat(parts[::-1] if self.state_first else parts, -1) @ w["input_proj.weight"].T
            x = normed(residual, w[at + "input_layernorm.weight"])
        else:
            x = residual = torch.cat((embedded, features), -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(1))
        x = residual + self.attention(x)
        h = normed(x, w[at + "post_attention_layernorm.weight"])
        gate, up, down = (w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (silu(h @ gate.T) * (h @ up.T)) @ down.T

    def attention(self, x: Tensor) -> Tensor:
        w, n = {name: self.w[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkvo"}, len(x)
        dim = w["q"].shape[0] // HEADS
        q, k, v = ((x @ w[name].T).view(n, -1, dim) for name in "qkv")
        if "layers.0.self_attn.q_norm.weight" in self.w:
            q = normed(q, self.w["layers.0.self_attn.q_norm.weight"])
            k = normed(k, self.w["layers.0.self_attn.k_norm.weight"])
        angles = torch.arange(n)[:, None, None] / self.layer["rope_theta"] ** (torch.arange(0, dim, 2) / dim)

        def turned(each: Tensor) -> Tensor:
            a, b = each.chunk(2, -1)
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        q, k = turned(q), turned(k)
        out = torch.empty(n, HEADS, dim)
        for row in range(n):
            for head in range(HEADS):
                its = head // (HEADS // KV_HEADS)
                weights = (k[: row + 1, its] @ q[row, head] / dim**0.5).softmax(0)
                out[row, head] = weights @ v[: row + 1, its]
        return out.flatten(1) @ w["o"].T

    def said(self, output: Tensor) -> Tensor:
        """Logits over the target's vocabulary; -inf where a token is not in the draft vocabulary."""
        if self.mtp:
            output = normed(output, self.w["final_layernorm.weight"])
        if not self.third:
            return oracle.unembedded(self.target, output)
        own = normed(output, self.w["norm.weight"]) @ self.w["lm_head.weight"].T
        if "d2t" not in self.w:
            return own
        logits = torch.full((*own.shape[:-1], tiny.VOCAB), float("-inf"))
        logits[..., torch.arange(own.shape[-1]) + self.w["d2t"]] = own
        return logits

    @torch.inference_mode()
    def logits(self, text: Sequence[int], guesses: Sequence[int]) -> Tensor:
        """[1 + guesses, V]: what follows the text, and each guess after it."""
        features = self.features(text[:-1])
        embedded = self.embeddings[list(text[1:])]
        found = []
        for guess in (*guesses, None):
            output = self.run(embedded, features)[-1]
            found.append(self.said(output))
            if guess is not None:
                again = "norm.weight" if self.config.get("norm_output") else ""
                again = "final_layernorm.weight" if self.mtp else again
                on = normed(output, self.w[again]) if again else output
                features = torch.cat((features, on[None]))
                embedded = torch.cat((embedded, self.embeddings[guess][None]))
        return torch.stack(found)
