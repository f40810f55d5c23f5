"""Double Sparsity: a few channels of every key say which rows are worth reading whole."""

from __future__ import annotations

from phasewise.methods.attend.double_sparsity import ENDS
from phasewise.reproduce import loads
from phasewise.reproduce.panel import long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

CHANNELS, K, DENSE, NEW = 8, 96, 2, 40
TEXT = 1024  # tokens of which K rows are read; of longer texts as large a share


def chosen(tokens: int, weights: str = "auto", bits: int = 16) -> Setting:
    k = K * tokens // TEXT
    more = f",weights={weights}" * (weights != "auto") + f",bits={bits}" * (bits != 16)
    return Setting({"attend": f"double_sparsity:channels={CHANNELS}.0,k={k},dense_layers={DENSE}{more}"})


def any_channels(tokens: int) -> Setting:
    return chosen(tokens, "random:0")


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


def in_four_bits(tokens: int) -> Setting:
    return chosen(tokens, bits=4)


def fetched(tokens: int) -> Setting:
    return Setting({"attend": chosen(tokens).verbs["attend"] + ",offload=true"})


def crossing(case: Case) -> int:
    """Bytes over the link: a token fetches the rows that it chooses, all that there are if these are fewer, and sends
    its own; of the layers between the dense ones and the last."""
    prompt, hosted = loads.prompt_rows(case), case.config.layers - DENSE - 1
    rows = sum(min(K - 1, n) + 1 for n in range(prompt, prompt + NEW - 1))
    return rows * hosted * case.row_bytes // case.config.layers


def closed(case: Case, bits: int = 16) -> int:
    """`k` rows, the labels of all before, and the keys of which labels are made, each once. A label of four bits a
    number has two ends of 16 bits besides."""
    layers, prompt = case.config.layers, loads.prompt_rows(case)
    key = case.row_bytes // layers // 2  # bytes of a row's keys in a layer
    label = key * CHANNELS // case.config.head_dim
    label = label if bits == 16 else case.config.kv_heads * (CHANNELS * bits // 8 + ENDS)
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
    method=chosen(TEXT),
    baseline=Setting(),
    control=any_channels(TEXT),
    control_is="as many channels, drawn at random instead of by calibration",
    line="a sixteenth of rows and channels: equal answers, 1.9 times as fast",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("time with rows on the host, which takes a device with memory of its own",),
    counters=(
        Counter("KV bytes read while decoding", "k rows + r channels of every row before + keys that get labels, once",
                lambda case: read(case, case.method), closed),
        Counter("KV bytes read while decoding, labels in four bits", "as above; a label: r / 2 bytes, and 4 of ends",
                lambda case: read(case, case.method), lambda case: closed(case, 4), load=loads.lone(768, NEW),
                who=in_four_bits(TEXT)),
        Counter("bytes between host and device while decoding, rows fetched a layer ahead",
                "k - 1 rows fetched and one sent, in all layers but the dense ones and the last",
                lambda case: case.work.link_bytes, crossing, load=loads.lone(768, NEW), who=fetched(TEXT)),
    ),
    arithmetic=(KnobRatio("KV bytes read while decoding", read),),
    quality=long_texts(chosen, any_channels,
                       beside={"labels in four bits": in_four_bits, "fetched a layer ahead": fetched}),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192,
                    settings={"method": any_channels(8192)}),),
)  # fmt: skip
