"""compressed-tensors' own library, where it is installed, reads what is written as the numbers that were meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from phasewise.load import load_model
from phasewise.model.compressed import packed
from phasewise.model.levels import rounded_to_nearest
from phasewise.model.weights_form import WeightsForm, parse_form
from phasewise.train.few_bits import FewBitsJob, convert
from tests.model.reference import holds_near, run, save_random
from tests.model.test_levels import MODELS, TOKENS, weight
from tests.serve.tiny_chat import write_tokenizer
from tests.train.test_few_bits import silent

library: Any = pytest.importorskip("compressed_tensors")


@pytest.mark.parametrize("form", ["int4:group=32", "int4:group=64,zeros=true", "int8:group=32"])
def test_scales_are_the_librarys_but_for_their_last_bits(form: str) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    ours = rounded_to_nearest(weight()[10:], parse_form(form)[0])
    groups = weight()[10:].reshape(*ours.scales.shape, -1)
    args = QuantizationArgs(num_bits=ours.form.bits, symmetric=not ours.form.zeros, strategy="group",
                            group_size=ours.form.group)  # fmt: skip
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    large = scales > 2**-14  # below, float16 has fewer bits
    assert torch.allclose(ours.scales.float()[large], scales[large], rtol=2**-7 if ours.form.zeros else 2**-8)
    assert ours.zeros is None or bool(((zeros.int() + 8 - ours.zeros.int()).abs() <= 1).all())


@pytest.mark.parametrize("form", ["int4:group=32", "int4:group=64,zeros=true", "int8:group=32"])
def test_the_library_unpacks_the_same_numbers(form: str) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    ours = rounded_to_nearest(weight(), parse_form(form)[0])
    args = QuantizationArgs(num_bits=ours.form.bits, symmetric=not ours.form.zeros, strategy="group",
                            group_size=ours.form.group)  # fmt: skip
    made = packed("weight", ours) | {"weight_scale": ours.scales.float()}
    found = PackedQuantizationCompressor.decompress(made, QuantizationScheme(targets=["Linear"], weights=args))
    assert torch.equal(found["weight"].float(), ours.values())


@pytest.mark.parametrize("form", ["int4:group=32", "int8:group=32"])  # with zeros it expects them unpacked, a slip
def test_transformers_reads_it(form: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save_random(MODELS["llama"](), base)
    write_tokenizer(base)
    convert(FewBitsJob(str(base), out, parse_form(form)[0]), silent)
    read = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        theirs = read(torch.tensor([TOKENS])).logits[0]
    ours = load_model(str(base), dtype=torch.float32, weights=form)
    holds_near(run(ours, TOKENS), theirs, 0.02)  # theirs has embeddings and norms in bfloat16


def test_the_form_is_what_the_library_says(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    base, out = tmp_path / "base", tmp_path / "out"
    save_random(MODELS["mixtral"](), base)
    write_tokenizer(base)
    convert(FewBitsJob(str(base), out, WeightsForm("int4", 32)), silent)
    config = transformers.AutoConfig.from_pretrained(out).quantization_config
    told = QuantizationConfig.model_validate(config if isinstance(config, dict) else config.to_dict())
    assert told.format == "pack-quantized" and told.config_groups["group_0"].weights.group_size == 32
