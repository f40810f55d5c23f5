"""The training decoder is the Llama of transformers, and its padding changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.train import dense
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.pocket import SHAPES
from tests.gguf.writer import Conversion
from tests.model.families import SIZES, hf
from tests.model.reference import save_random

SMALL = DenseShape(300, 48, 3, 4, 2, 80, head_dim=16, max_position_embeddings=128)


def awake(shape: DenseShape) -> DenseDecoder:
    """A model whose layers all do something: fresh ones start as the identity."""
    model = DenseDecoder(shape)
    for layer in model.layers:
        for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):  # type: ignore[union-attr]
            torch.nn.init.normal_(matrix, std=0.1)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("shape", [SMALL, SHAPES["draft"]])
def test_equals_transformers_on_the_exported_checkpoint(shape: DenseShape, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    dense.save(awake(shape), tmp_path, [1])
    mine = dense.load(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    ids = torch.randint(0, shape.vocab_size, (2, 70))
    with torch.no_grad():
        torch.testing.assert_close(mine(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    wanted = set(theirs.state_dict()) - {"lm_head.weight"}
    assert {f"model.{name}" for name in mine.state_dict()} == wanted


def test_load_returns_what_save_wrote(tmp_path: Path) -> None:
    model = DenseDecoder(SMALL)
    dense.save(model, tmp_path, [1, 2])
    again = dense.load(tmp_path)
    assert again.shape == SMALL
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value.bfloat16().float(), atol=0, rtol=0)


def test_a_twin_reads_todays_settings_and_gguf_files(tmp_path: Path) -> None:
    """The rotation has a section of its own in the former, and the latter say nothing of an activation."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    theirs = save_random(hf.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=rope), tmp_path)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 40))
    for files in tmp_path, Conversion().write(tmp_path, tmp_path / "model.gguf"):
        with torch.no_grad():
            torch.testing.assert_close(dense.load(files)(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ],
)
def test_what_a_twin_would_get_wrong_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    hf.LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **changes}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"plain Llamas with tied embeddings, this one has {named}$"):
        dense.load(tmp_path)


def test_right_padding_does_not_change_the_loss() -> None:
    model = awake(SMALL)
    ids = torch.randint(0, 300, (1, 20))
    padded = F.pad(ids, (0, 9))
    targets = torch.full_like(padded, -1)
    targets[:, 4:19] = padded[:, 5:20]
    with torch.no_grad():
        (alone,) = dense.losses(model, [TokenBlock.of(ids, targets[:, :20])])
        (beside,) = dense.losses(model, [TokenBlock.of(padded, targets)])
    assert len(alone) == len(beside) == 15
    torch.testing.assert_close(alone, beside)


def test_losses_are_the_cross_entropies_of_the_chosen_targets_block_by_block() -> None:
    model = awake(SMALL)
    blocks = []
    for rows, length in ((3, 12), (1, 30), (2, dense.SHORT + 3)):  # the last one takes the fused kernel
        targets = torch.randint(0, 300, (rows, length))
        targets[0, 2:5] = -1
        blocks.append(TokenBlock.of(torch.randint(0, 300, (rows, length)), targets))
    with torch.no_grad():
        together = dense.losses(model, blocks)
        for block, each in zip(blocks, together, strict=True):
            wanted = block.targets >= 0
            expected = F.cross_entropy(model(block.ids)[wanted], block.targets[wanted], reduction="none")
            torch.testing.assert_close(each, expected)


def test_only_differences_of_positions_matter_and_gaps_do() -> None:
    model = awake(SMALL)
    block = TokenBlock.of(torch.randint(0, 300, (2, 16)), torch.randint(0, 300, (2, 16)))
    with torch.no_grad():
        (plain,) = dense.losses(model, [block])
        (later,) = dense.losses(model, [block._replace(positions=block.positions + 40)])
        (gapped,) = dense.losses(model, [block._replace(positions=block.positions + 40 * (block.positions > 7))])
    torch.testing.assert_close(later, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gapped.view(2, 16)[:, :8], plain.view(2, 16)[:, :8])
    assert not torch.allclose(gapped, plain, atol=1e-3)


def test_at_first_layers_change_nothing_and_all_of_them_learn_from_the_first_step_on() -> None:
    torch.manual_seed(0)
    model, ids = DenseDecoder(SMALL), torch.randint(0, 300, (2, 12))
    with torch.no_grad():
        embedded = model.norm(model.embed_tokens(ids))
        torch.testing.assert_close(model.hidden([TokenBlock.of(ids, ids)]).view_as(embedded), embedded, atol=0, rtol=0)
    torch.autograd.backward(dense.losses(model, [TokenBlock.of(ids, ids)])[0].mean())
    for layer in model.layers:
        for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):  # type: ignore[union-attr]
            assert float(matrix.grad.norm()) > 1e-4  # type: ignore[union-attr, operator]
