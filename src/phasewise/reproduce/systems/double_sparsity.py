"""Double Sparsity: a few channels of every key say which rows are worth reading whole."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Quality, Saving, Setting, System, Timing

CHANNELS, K, DENSE, NEW = 8, 96, 2, 40
KNOBS = f"channels={CHANNELS}.0,k={K},dense_layers={DENSE}"


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


def closed(case: Case) -> int:
    """`k` rows, the labels of all before, and the keys of which labels are made, each once."""
    layers, prompt = case.config.layers, loads.prompt_rows(case)
    key = case.row_bytes // layers // 2  # bytes of a row's keys in a layer
    label = key * CHANNELS // case.config.head_dim
    total = labelled = 0
    for n in range(prompt + 1, prompt + NEW):  # rows that a token sees, itself included
        total += DENSE * n * 2 * key
        total += (layers - DENSE) * (K * 2 * key + (n - 1) * label + (n - 1 - labelled) * key)
        labelled = n - 1
    return total


SYSTEM = System(
    title="Double Sparsity",
    paper=Paper("Post-Training Sparse Attention with Double Sparsity", "2408.07092"),
    claim="with a sixteenth of the rows and of the channels, chosen once by calibration, quality stays: attention is "
    "up to 14.1 times, decoding 1.9 times as fast.",
    conditions=("models of billions of weights on GPUs", "contexts up to 256K", "channels for each query head"),
    method=Setting({"attend": f"double_sparsity:{KNOBS}"}),
    baseline=Setting(),
    control=Setting({"attend": f"double_sparsity:{KNOBS},weights=random:0"}),
    control_is="as many channels, drawn at random instead of by calibration",
    load=loads.lone(768, NEW),
    missing=("rows that lie on the host and are fetched a layer ahead",),
    counters=(
        Counter("KV bytes read while decoding", "k rows + r channels of every row before + keys that get labels, once",
                lambda case: read(case, case.method), closed),
    ),
    savings=(Saving("KV bytes read while decoding", read, "baseline", 1.5),),
    quality=Quality(("recall@1k", "passkey@1k"), allowed=0.1, examples=150),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192,
                    settings={"method": Setting({"attend": f"double_sparsity:{KNOBS},weights=random:0"})}),),
)  # fmt: skip
