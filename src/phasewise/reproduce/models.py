"""The models that systems are tried on, by name: those that phasewise knows, and checkpoints made from them or at
random.

`pocket-wide` is the pocket model padded with zeros to four times its width: the same tokens, at the price of a model
with sixteen times the weights. Random ones are for what text does not decide: expert loads, and bytes of KV.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.errors import UserError, near
from phasewise.known.models import every
from phasewise.load import files_of, load_model, model_path
from phasewise.model import kv_heads
from phasewise.model.fingerprint import fingerprint
from phasewise.model.lq import LQForm
from phasewise.model.nm import PATTERNS
from phasewise.model.parse import parse_config
from phasewise.model.source import copy_vocabulary
from phasewise.model.widen import widen
from phasewise.reproduce import trigram_heads
from phasewise.reproduce.aligned_heads import LEARNED, QUICKLY, eagle_beside_pocket
from phasewise.reproduce.coded_models import CODED
from phasewise.reproduce.glancing_heads import plain_beside_pocket
from phasewise.reproduce.knowers import KEYS, knowing
from phasewise.reproduce.wide_heads import widen_acceptance, widen_all, widen_exits
from phasewise.train.kv_heads import KVHeadsJob, looked_at, recover
from phasewise.train.lq_job import LQJob
from phasewise.train.lq_job import convert as split
from phasewise.train.memory import tiny_numbers_as_zero
from phasewise.train.mixture import of_model
from phasewise.train.prune import PruneJob, prune
from phasewise.train.sparsify import STEP_TOKENS, Recipe, SparsifyJob
from phasewise.train.sparsify import train as sparsify

WIDER = 4
VOCAB = 512  # of random models
CALIBRATED = 32_768  # tokens by which heads are joined
RECOVERED = 120_000  # tokens that joined heads and averaged ones learn, to be held against one another


def untrained(source: Path, target: Path, factor: int = 1) -> None:
    """The checkpoint at `source` with every matrix drawn anew, as large as it was."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    gen = torch.Generator().manual_seed(0)
    made = {}
    for name, tensor in load_file(str(source / "model.safetensors")).items():
        if tensor.ndim > 1:
            deviation = tensor.float().std()
            tensor = (torch.randn(tensor.shape, generator=gen) * deviation).to(tensor.dtype)
        made[name] = tensor
    _write(target, config, made, source)


def random_llama(target: Path, *, layers: int, hidden: int, context: int, experts: int = 0) -> None:
    """Random weights, bfloat16: a Llama, or with experts (two of them per token) a Mixtral.

    Embeddings are large and what layers add to them is small, so that rows stay apart and routers choose evenly.
    """
    gen = torch.Generator().manual_seed(0)
    heads, kv_heads = hidden // 64, max(1, hidden // 128)
    inner, small = hidden * (1 if experts else 2), 1 / math.sqrt(2 * layers)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=gen) * gain / math.sqrt(columns)).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    made = {"model.embed_tokens.weight": matrix(VOCAB, hidden, math.sqrt(hidden)), "model.norm.weight": ones.clone()}
    made["lm_head.weight"] = matrix(VOCAB, hidden)
    for i in range(layers):
        at = f"model.layers.{i}."
        made[at + "input_layernorm.weight"] = ones.clone()
        made[at + "post_attention_layernorm.weight"] = ones.clone()
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            made[at + f"self_attn.{name}_proj.weight"] = matrix(rows * 64, hidden)
        made[at + "self_attn.o_proj.weight"] = matrix(hidden, heads * 64, small)
        if experts:
            made[at + "block_sparse_moe.gate.weight"] = matrix(experts, hidden)
            for e in range(experts):
                for name in ("w1", "w3"):
                    made[at + f"block_sparse_moe.experts.{e}.{name}.weight"] = matrix(inner, hidden)
                made[at + f"block_sparse_moe.experts.{e}.w2.weight"] = matrix(hidden, inner, small)
        else:
            for name in ("gate", "up"):
                made[at + f"mlp.{name}_proj.weight"] = matrix(inner, hidden)
            made[at + "mlp.down_proj.weight"] = matrix(hidden, inner, small)
    config: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
        "vocab_size": VOCAB, "max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2, "sliding_window": None}
    _write(target, config, made, None)


def _write(target: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], beside: Path | None) -> None:
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(target / "model.safetensors"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if beside is not None and (beside / name).is_file():
            shutil.copy(beside / name, target / name)


def widened(source: Path, target: Path, factor: int) -> None:
    """The checkpoint at `source`, `factor` times as wide; what a broken attempt left is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    files = files_of(str(source))
    widen(files, target, factor)
    copy_vocabulary(files, target)


def joined(by: str, target: Path, tokens: int = 0) -> None:
    """The pocket model with one KV head for two: by what its caches use, by its weights alone, or with its heads
    averaged. Then it learns so many tokens, as `phasewise convert kv_heads` has it."""
    files = files_of("pocket")
    config = kv_heads.check(files, 1)
    shutil.rmtree(target, ignore_errors=True)
    if by == "mean":
        basis = kv_heads.means(config, 1)
    elif by == "weights":
        basis = kv_heads.bases(config, kv_heads.of_weights(files, config, 1))
    else:
        texts = list(looked_at(of_model(files, config.eos, 0), config.max_positions, CALIBRATED))
        seen = kv_heads.calibrate(load_model("pocket", dtype=torch.float32), texts, 1, lambda done: None)
        basis = kv_heads.bases(config, seen)
    kv_heads.convert(files, 1, basis, target)
    copy_vocabulary(files, target)
    if tokens:
        recover(KVHeadsJob("pocket", 1, target, tokens), files, of_model(files, config.eos, 0))


LOW_RANK = LQForm(rank=4, bits=5.0, fisher=True, finetune=24)
"""What the pocket model becomes with low-rank pairs: these take 0.33 bits of the 5."""
ALLOCATED = "allocated.json"


def low_rank(form: LQForm, start: Literal["split", "zero", "random"], target: Path) -> None:
    """The pocket model in few bits with pairs beside them, by LQ-LoRA or by what it is compared with.

    ALLOCATED says what errors its kinds have, and what the best single kind has.
    """
    shutil.rmtree(target, ignore_errors=True)
    aside = target.with_name(f"{target.name}.parts")
    shutil.rmtree(aside, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    gradients = target.with_name("pocket-gradients.safetensors") if form.fisher else None
    made = split(LQJob("pocket", target, form, start=start, gradients=gradients), silent)
    told = {"error": made.error, "chosen": made.choice.error, "same": made.same and made.same.error,
            "kind": made.same and made.same.kinds[0], "bits": made.bits}  # fmt: skip
    (target / ALLOCATED).write_text(json.dumps(told), encoding="utf-8")


SPARSE_STEPS = 100
"""Training steps of N:M sparse models, to be held against one another."""


def pruned(pattern: str, target: Path) -> None:
    """The pocket model with its largest weights alone, in N:M groups; nothing is trained."""
    shutil.rmtree(target, ignore_errors=True)
    prune(PruneJob("pocket", target, PATTERNS[pattern]), silent)


def sparse(pattern: str, recipe: Recipe, by_chance: bool, target: Path) -> None:
    """The pocket model in N:M groups, trained by a recipe; `by_chance`: with masks drawn by chance."""
    shutil.rmtree(target, ignore_errors=True)
    with TemporaryDirectory() as room:
        job = SparsifyJob("pocket", Path(room), PATTERNS[pattern], recipe, SPARSE_STEPS * STEP_TOKENS,
                          by_chance=by_chance)  # fmt: skip
        with tiny_numbers_as_zero():
            shutil.copytree(sparsify(job), target)


@contextmanager
def silent(title: str, total: int) -> Iterator[Callable[..., object]]:
    """A bar that nobody sees."""
    yield lambda done, note="": None


def pocket_wide(target: Path) -> None:
    """The pocket model, widened, with its drafting heads and drafts with exits, and the acceptance head for the widened
    draft model."""
    widened(Path(model_path("pocket")), target, WIDER)
    widen_all(target, WIDER)
    widen_exits(target, WIDER)
    with TemporaryDirectory() as room:
        draft = Path(room) / "draft"
        widened(Path(model_path("pocket-draft")), draft, WIDER)
        files = files_of(str(draft))
        widen_acceptance(
            target, WIDER, "pocket-draft-wide", fingerprint(parse_config(files.settings()), files.tensors())
        )


def _from_pocket(make: Callable[[Path, Path, int], None], name: str, target: Path) -> None:
    make(Path(model_path(name)), target, WIDER)


MADE: dict[str, Callable[[Path], None]] = {
    "pocket-wide": pocket_wide,
    "pocket-draft-wide": partial(_from_pocket, widened, "pocket-draft"),
    "untrained-draft": partial(_from_pocket, untrained, "pocket-draft"),
    "pocket-eagle": partial(eagle_beside_pocket, LEARNED),
    "pocket-eagle-quickly": partial(eagle_beside_pocket, QUICKLY),
    "pocket-trigram-rivals": partial(trigram_heads.rivals_beside_pocket, trigram_heads.LEARNED),
    "pocket-trigram-rivals-quickly": partial(trigram_heads.rivals_beside_pocket, trigram_heads.QUICKLY),
    "pocket-falcon-plain": partial(plain_beside_pocket, LEARNED),
    "pocket-falcon-plain-quickly": partial(plain_beside_pocket, QUICKLY),
    "pocket-1kv-caches": partial(joined, "caches"),
    "pocket-1kv-weights": partial(joined, "weights"),
    "pocket-1kv-mean": partial(joined, "mean"),
    "pocket-1kv-caches-taught": partial(joined, "caches", tokens=RECOVERED),
    "pocket-1kv-mean-taught": partial(joined, "mean", tokens=RECOVERED),
    "pocket-lq": partial(low_rank, LOW_RANK, "split"),
    "pocket-lq-zero": partial(low_rank, LOW_RANK, "zero"),
    "pocket-lq-split": partial(low_rank, replace(LOW_RANK, finetune=0), "split"),
    "pocket-lq-random": partial(low_rank, replace(LOW_RANK, finetune=0), "random"),
    "pocket-lq-levels": partial(low_rank, replace(LOW_RANK, rank=0, finetune=0), "split"),
    "pocket-lq-quickly": partial(low_rank, replace(LOW_RANK, fisher=False, finetune=0), "split"),
    **CODED,
    **{f"pocket-{pattern.replace(':', '-')}": partial(pruned, pattern) for pattern in PATTERNS},
    "pocket-1-8-decay": partial(sparse, "1:8", "decay", False),
    "pocket-1-8-sr-ste": partial(sparse, "1:8", "sr-ste", False),
    "pocket-1-8-magnitude": partial(sparse, "1:8", "magnitude", False),
    "pocket-1-8-chance": partial(sparse, "1:8", "magnitude", True),
    "pocket-2-4-decay": partial(sparse, "2:4", "decay", False),
    "pocket-2-4-sr-ste": partial(sparse, "2:4", "sr-ste", False),
    **{name: partial(knowing, name) for name in KEYS},
    "random-experts": partial(random_llama, layers=8, hidden=256, context=4096, experts=16),
    "random-dense": partial(random_llama, layers=8, hidden=512, context=32768),
    "tiny-experts": partial(random_llama, layers=4, hidden=128, context=1024, experts=8),
    "tiny-dense": partial(random_llama, layers=4, hidden=128, context=4096),
}
"""Name -> who writes it into a directory."""


class Shelf:
    """Directories of models by name; what has to be made is made once, under `room`."""

    def __init__(self, room: Path) -> None:
        self.room = room

    def path(self, name: str) -> str:
        """Raises UserError for an unknown name."""
        if name in every():
            return model_path(name)
        if name not in MADE:
            raise UserError(f"unknown model {name!r}. {near(name, (*every(), *MADE))}")
        target = self.room / name
        if not (target / "config.json").is_file():
            MADE[name](target)
        return str(target)
