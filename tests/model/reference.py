"""The slow, obvious twin of a serving step: per-request key lists and one masked softmax per request and head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phasewise.model.config import AttentionSpec
from phasewise.model.model import Model
from tests.lazy import lazy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

hf: Any = lazy("transformers")
VOCAB = 128


@dataclass
class Held:
    """One request: its tokens so far, and each layer's keys and values [n, Hkv, D]."""

    layers: int
    length: int = 0
    keys: list[Tensor | None] = field(default_factory=list)
    values: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys, self.values = [None] * self.layers, [None] * self.layers


class ReferenceContext:
    """`ctx` for Model.layer: `rows` holds (request, number of rows), in the order of the batch."""

    def __init__(self, model: Model, rows: Sequence[tuple[Held, int]]) -> None:
        self.specs, self.sinks = model.config.attention, model.sink_scores
        self.rows = rows
        self.counters: Counter[str] = Counter()
        positions = [torch.arange(seq.length, seq.length + n) for seq, n in rows]
        self.rotary = model.rotary(torch.cat(positions))

    def count(self, counter: str, n: int) -> None:
        self.counters[counter] += n

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        start = 0
        for seq, n in self.rows:
            part = slice(start, start + n)
            seq.keys[layer] = _join(seq.keys[layer], k[part])
            seq.values[layer] = _join(seq.values[layer], v[part])
            out[part] = masked_attention(q[part], seq.keys[layer], seq.values[layer], self.specs[layer],
                                         self.sinks(layer))  # fmt: skip
            start += n
        return out


def _join(old: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if old is None else torch.cat((old, new))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:  # fmt: skip
    """q [n, Hq, D] are the last n of the len(k) positions; k, v [m, Hkv, D] -> [n, Hq, D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * spec.scale  # [Hq, n, m]
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    i = torch.arange(len(k) - len(q), len(k))[:, None]
    j = torch.arange(len(k))[None]
    visible = j <= i if spec.window is None else (j <= i) & (i - j < spec.window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:  # one more column, without a value
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hij,jhd->ihd", weights, v.float()).to(q.dtype)


class Runner:
    """Drives a model step by step, many requests per step; keeps every row's logits."""

    def __init__(self, model: Model, requests: int = 1) -> None:
        self.model = model
        self.requests = [Held(model.config.layers) for _ in range(requests)]
        self.logits: list[list[Tensor]] = [[] for _ in range(requests)]
        self.counters: Counter[str] = Counter()

    @torch.inference_mode()
    def step(self, tokens: Sequence[Sequence[int]]) -> None:
        """`tokens[r]` are the next tokens of request r; none is fine."""
        rows = [(seq, len(part)) for seq, part in zip(self.requests, tokens) if part]
        flat = torch.tensor([token for part in tokens for token in part])
        ctx = ReferenceContext(self.model, rows)
        x = self.model.embed(flat)
        for i in range(self.model.config.layers):
            x = self.model.layer(i, x, ctx)
        logits = self.model.head(x)
        self.counters += ctx.counters
        start = 0
        for r, part in enumerate(tokens):
            if part:
                self.logits[r].append(logits[start : start + len(part)])
                self.requests[r].length += len(part)
                start += len(part)

    def result(self, r: int = 0) -> Tensor:
        return torch.cat(self.logits[r])  # [n, V]


def run(model: Model, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
    """Logits [n, V] of one prompt, in chunks of `chunk` tokens or whole."""
    runner = Runner(model)
    size = chunk or len(tokens)
    for start in range(0, len(tokens), size):
        runner.step([tokens[start : start + size]])
    return runner.result()


def theirs(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_random(config: PreTrainedConfig, directory: Path, **options: object) -> PreTrainedModel:
    """A random checkpoint whose every tensor matters: norms and biases away from their neutral values."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif name.endswith("bias") or "embed" in name or "lm_head" in name:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory, **options)
    return model


def holds_near(got: Tensor, want: Tensor, worst: float) -> None:
    """Raises AssertionError unless logits [T, V] differ by less than `worst` of their spread, in the root of the mean
    square, and greedy tokens are equal wherever the best two lie three times as far apart."""
    assert (got - want).square().mean().sqrt() < worst * want.std()
    best, other = want.topk(2).values.T
    sure = best - other > 3 * worst * want.std()
    assert torch.equal(got.argmax(1)[sure], want.argmax(1)[sure]) and sure.any()
