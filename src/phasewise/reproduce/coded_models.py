"""The pocket model in learned codebooks, and in what these are compared with, by name.

`pocket-codebook-3` has levels of 3 bits. `kmeans` ones are neither learned nor reordered, `uniform` ones have even
levels and the best scales for them, and `even` ones learn levels and scales as codebooks do, but keep even levels.
Others have int4, its nearest levels or GPTQ's, or are expanded: NF4 and IQ4_NL, whose numbers then are bfloat16's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phasewise.load import files_of
from phasewise.model import compressed
from phasewise.model.codebook import CodebookForm
from phasewise.model.levels import matrices
from phasewise.model.lq_kinds import encode
from phasewise.model.parse import parse_config
from phasewise.model.shards import write_checkpoint
from phasewise.model.source import copy_vocabulary
from phasewise.model.weights_form import Calibration, WeightsForm
from phasewise.train import few_bits
from phasewise.train.codebook import Start
from phasewise.train.codebook_job import CodebookJob
from phasewise.train.codebook_job import convert as learn
from phasewise.train.few_bits import FewBitsJob

TOLD = "codebooks.json"  # beside a model: bits of a weight, errors of its layers' outputs before and after learning
BITS = (4, 3, 2)
GROUP = 128
QUICKLY = "pocket-codebook-quickly"


@contextmanager
def _silent(title: str, total: int) -> Iterator[Callable[..., object]]:
    """A bar that nobody sees."""
    yield lambda done, note="": None


# What NF4's levels are worth (arXiv 2305.14314), as bitsandbytes publishes them.
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip


def _clear(target: Path) -> None:
    """Takes away what a broken attempt left."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(target.with_name(f"{target.name}.parts"), ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)


def in_codebooks(form: CodebookForm, start: Start, target: Path) -> None:
    """The pocket model in codebooks; TOLD says what came out."""
    _clear(target)
    made = learn(CodebookJob("pocket", target, form, start=start), _silent)
    told = {"bits": made.bits, "before": made.before, "after": [each.outputs for each in made.errors]}
    (target / TOLD).write_text(json.dumps(told), encoding="utf-8")


def in_levels(how: Calibration, target: Path) -> None:
    """The pocket model in int4 with a scale for as many inputs as codebooks have."""
    _clear(target)
    few_bits.convert(FewBitsJob("pocket", target, WeightsForm("int4", GROUP), how), _silent)


def expanded(rounded: Callable[[Tensor], Tensor], target: Path) -> None:
    """The pocket model with its linear layers rounded and expanded again."""
    _clear(target)
    target.mkdir()
    files = files_of("pocket")
    config, tensors = parse_config(files.settings()), files.tensors()
    taken = {name: rounded(tensors.read(name, torch.float32).float()).bfloat16() for name in matrices(config)}
    copy_vocabulary(files, target)
    write_checkpoint(target, [*compressed.others(config, tensors, {}), taken], files.settings().values)


def iq4_nl(weight: Tensor) -> Tensor:
    """A matrix float32 [out, in] in IQ4_NL, of 4.5 bits: of several scales for 32 inputs the best."""
    return encode(weight, "IQ4_NL").values


def nf4(weight: Tensor) -> Tensor:
    """A matrix float32 [out, in] in NF4 (arXiv 2305.14314), of 4.25 bits: the largest of 64 inputs is their scale."""
    groups = weight.reshape(len(weight), -1, 64)
    scales = groups.abs().amax(2, keepdim=True).half().float()
    values = torch.tensor(NF4)
    levels = torch.bucketize(groups / scales.where(scales > 0, 1), (values[1:] + values[:-1]) / 2)
    return (values[levels] * scales).reshape(weight.shape)


CODED: dict[str, Callable[[Path], None]] = {
    **{f"pocket-codebook-{bits}": partial(in_codebooks, CodebookForm(bits, GROUP, True), "kmeans") for bits in BITS},
    **{f"pocket-kmeans-{bits}": partial(in_codebooks, CodebookForm(bits, GROUP, False, 0), "kmeans") for bits in BITS},
    **{f"pocket-uniform-{bits}": partial(in_codebooks, CodebookForm(bits, GROUP, False, 0), "uniform")
       for bits in BITS},
    **{f"pocket-even-{bits}": partial(in_codebooks, CodebookForm(bits, GROUP, False), "uniform") for bits in BITS},
    **{f"pocket-in-place-{bits}": partial(in_codebooks, CodebookForm(bits, GROUP, False), "kmeans") for bits in BITS},
    "pocket-int4": partial(in_levels, Calibration("rtn")),
    "pocket-int4-gptq": partial(in_levels, Calibration("gptq")),
    "pocket-nf4": partial(expanded, nf4),
    "pocket-iq4-nl": partial(expanded, iq4_nl),
    QUICKLY: partial(in_codebooks, CodebookForm(4, GROUP, False, 1), "kmeans"),
}  # fmt: skip
"""Name -> who writes it into a directory."""
