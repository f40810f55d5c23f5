"""Matrices in blocks stay as their file has them: what a model then gives, and what it holds in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from phasewise.gguf.checkpoint import GGUFModel
from phasewise.model.mlp import MoE
from phasewise.model.model import Model
from phasewise.ops import native
from tests.gguf.writer import Conversion, add, finish
from tests.model.families import make
from tests.model.reference import holds_near, run, save_random

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

# where a block has its float16: what levels are multiplied with, and how much of its size a level's largest is
D = {"Q4_0": (0, 8), "Q4_1": (0, 8), "Q5_0": (0, 16), "Q5_1": (0, 16), "Q8_0": (0, 128), "Q4_K": (0, 8 * 32),
     "Q5_K": (0, 16 * 32), "Q6_K": (208, 32 * 64)}  # fmt: skip
MINIMA = {"Q4_1": 1.0, "Q5_1": 1.0, "Q4_K": 1 / 32, "Q5_K": 1 / 32}  # likewise, at byte 2
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 256, 512, 4, 2, 100


def blocks(kind: str, rows: int, inputs: int, seed: int) -> NDArray[np.uint8]:
    """Random blocks of weights of ordinary size, [rows, bytes of a row]."""
    draw = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = draw.integers(0, 256, (rows * inputs // values, size), dtype=np.uint8)
    at, largest = D[kind]
    worth = draw.uniform(0.5, 2, len(raw)) * 1.5 / inputs**0.5
    raw[:, at : at + 2] = (worth / largest).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind in MINIMA:
        sign = -1 if kind.endswith("_1") else 1
        raw[:, 2:4] = (sign * worth * MINIMA[kind]).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def write(path: Path, kinds: Mapping[str, str], *, layers: int = 2, hidden: int = HIDDEN, inner: int = INNER,
          vocab: int = VOCAB) -> Path:  # fmt: skip
    """A model in llama's layout. `kinds`: the type of matrices by their names, "" for all others."""
    writer, wide = GGUFWriter(path, "llama"), hidden * KV_HEADS // HEADS
    keys = {"block_count": layers, "context_length": 128, "embedding_length": hidden, "feed_forward_length": inner,
            "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 2.0**-20}  # fmt: skip
    for key, value in keys.items():
        add(writer, f"llama.{key}", value)
    shapes = {"attn_q": (hidden, hidden), "attn_k": (wide, hidden), "attn_v": (wide, hidden),
              "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
              "ffn_down": (hidden, inner)}  # fmt: skip
    every: dict[str, tuple[int, ...]] = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    if "output" in kinds:
        every["output"] = (vocab, hidden)
    for i in range(layers):
        every |= {f"blk.{i}.attn_norm": (hidden,), f"blk.{i}.ffn_norm": (hidden,)}
        every |= {f"blk.{i}.{name}": shape for name, shape in shapes.items()}
    for seed, (name, shape) in enumerate(every.items()):
        kind = kinds.get(name.rpartition(".")[2], kinds[""])
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(np.float32))
        elif kind in ("F32", "F16", "BF16"):
            drawn = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / shape[1] ** 0.5
            if kind != "BF16":
                writer.add_tensor(f"{name}.weight", drawn.astype(np.float32 if kind == "F32" else np.float16))
            else:
                raw = torch.from_numpy(drawn).bfloat16().view(torch.uint8).numpy()
                writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType.BF16)
        else:
            raw = blocks(kind, *shape, seed)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType[kind])
    return finish(writer, path)


MIXED = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "ffn_up": "F32"}
EVERY: dict[str, dict[str, str]] = {**{kind: {"": kind} for kind in D}, "mixed": MIXED}


@pytest.mark.parametrize("name", EVERY)
def test_a_model_is_what_its_numbers_are(name: str, tmp_path: Path) -> None:
    """Rows of queries and keys among them, which a file has in pairs. Logits differ by what activations are rounded."""
    path = write(tmp_path / "model.gguf", EVERY[name])
    exact, tokens = Model.load(path, dtype=torch.float32), [3 + i * 37 % 90 for i in range(40)]
    want = run(exact, tokens)
    for dtype, worst in ((None, 0.04), (torch.int8, 0.06)):
        model = Model.load(path, dtype=dtype)
        assert model.stack is not None and model.weight_bytes <= 1.04 * stored(path) + 2**12
        own = model.layers[0].qkv.native
        assert own is not None and {form.partition("/")[0] for form in own.forms} <= set(EVERY[name].values())
        if name != "mixed" or dtype is None:  # a matrix in single precision is rounded otherwise in int8
            for a, b in zip(linears(model), linears(exact)):
                assert torch.equal(a, b.bfloat16())
        holds_near(run(model, tokens), want, worst)


PROBE = """
import sys
from pathlib import Path
from phasewise.model.mlp import MoE
from phasewise.model.model import Model
from phasewise.ops.native.room import let_go

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

Model.load(sys.argv[1])  # a first one leaves what any does
let_go()  # as LLM does behind each
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
model = Model.load(sys.argv[2])
let_go()
print(status("VmRSS") - before, status("VmHWM") - status("VmRSS"), model.weight_bytes)
"""


LARGE = [
    ({"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}, 11),
    ({"": "Q4_K", "token_embd": "BF16"}, 9),
    ({"": "Q4_K", "token_embd": "Q6_K", "output": "BF16"}, 5),
    ({"": "F16"}, 3),
]


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kinds, layers", LARGE, ids=["blocks", "bfloat16, tied", "bfloat16, a head", "float16"])
def test_nothing_is_expanded_or_held_twice(kinds: dict[str, str], layers: int, tmp_path: Path) -> None:
    """Of a file of 130 to 160 MB: what stays, and what loading takes beyond that."""
    small = write(tmp_path / "small.gguf", {"": "Q4_K", "token_embd": "Q6_K"})
    large = write(tmp_path / "large.gguf", kinds, layers=layers, hidden=1024, inner=4096, vocab=32_000)
    done = subprocess.run([sys.executable, "-c", PROBE, small, large], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stays, beyond, told = map(int, done.stdout.split())
    size = stored(large)
    assert size > 130e6 and abs(told - size) < 0.001 * size
    assert stays <= 1.04 * size, f"{stays:,} bytes for {size:,}"
    assert beyond <= 40e6, f"{beyond:,} bytes at most beside what stays"


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.mark.parametrize("merged", [True, False])
def test_the_matrices_of_experts(merged: bool, tmp_path: Path) -> None:
    """Each is a part of a tensor of all experts, or in older files one of its own."""
    config = make("MixtralConfig", **WIDE, num_local_experts=5, num_experts_per_tok=2, sliding_window=None)
    save_random(config(), tmp_path / "directory")
    conversion = Conversion(quantise=GGMLQuantizationType.Q8_0, merged=merged)
    path = conversion.write(tmp_path / "directory", tmp_path / "model.gguf")
    model, exact = Model.load(path), Model.load(path, dtype=torch.float32)
    mlp = model.layers[0].mlp
    assert model.stack is not None and isinstance(mlp, MoE) and mlp.experts[3].down.native is not None
    assert mlp.experts[3].down.native.forms == ("Q8_0/bfloat16",)
    for a, b in zip(linears(model), linears(exact)):
        assert torch.equal(a, b.bfloat16())


def linears(model: Model) -> list[torch.Tensor]:
    tokens = torch.arange(model.config.vocab)
    every = [model.embed(tokens), model.unembed.dense()]
    for layer in model.layers:
        mlps = layer.mlp.experts if isinstance(layer.mlp, MoE) else (layer.mlp,)
        products = [linear for mlp in mlps for linear in (mlp.gate_up, mlp.down)]
        every += [linear.dense() for linear in (layer.qkv, layer.o, *products)]
    return every


def stored(path: Path) -> int:
    """Bytes of a file's tensors."""
    return sum(info.bytes for _, info in GGUFModel(path)._tensors.values())
