"""Medusa's and Hydra's own files become folders of heads; files with anything else in them are refused unread."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from phasewise.speculation.heads import folder
from phasewise.speculation.heads.hydra import HydraHeads
from phasewise.speculation.heads.medusa import MedusaHeads
from tests import tiny
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli

WIDTH, VOCAB, HEADS = 48, 64, 3  # of the tiny model


class ResBlock(nn.Module):
    """The block of both papers' code: the residual path is a linear map where the input is wider."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, WIDTH)
        self.res_connection = nn.Linear(inputs, WIDTH) if inputs > WIDTH else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + silu(self.linear(x))


def medusa(blocks: int, own: bool) -> nn.ModuleList:
    """Its list of heads. One block is repeated, as in the published code, so a file names the same memory twice."""
    torch.manual_seed(1)
    outputs = [[nn.Linear(WIDTH, VOCAB, bias=False)] if own else [] for _ in range(HEADS)]
    return nn.ModuleList(nn.Sequential(*([ResBlock(WIDTH)] * blocks), *output) for output in outputs)


class Hydra(nn.Module):
    """Its heads, with dropout between the blocks or without."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        drop = [nn.Dropout(0.0)] if dropout else []
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(*drop, ResBlock((head + 2) * WIDTH), *drop, ResBlock(WIDTH)) for head in range(HEADS)
        )
        self.hydra_lm_head = nn.ModuleList(
            nn.Sequential(*drop, nn.Linear(WIDTH, VOCAB)) if dropout else nn.Linear(WIDTH, VOCAB) for _ in range(HEADS)
        )

    def forward(self, h: Tensor, path: Tensor) -> list[Tensor]:
        inputs = [torch.cat((h, path[:, : head + 1].flatten(1)), 1) for head in range(HEADS)]
        return [out(mlp(x)) for mlp, out, x in zip(self.hydra_mlp, self.hydra_lm_head, inputs)]


def unasked(state: Tensor) -> Tensor:
    raise AssertionError("these heads have output matrices of their own")


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
def test_medusas_file(blocks: int, own: bool, cli: Cli, tmp_path: Path) -> None:
    source, h, output = medusa(blocks, own), torch.randn(5, WIDTH), torch.randn(VOCAB, WIDTH)
    torch.save(source.state_dict(), tmp_path / "medusa_lm_head.pt")
    said = cli("convert", "heads", tmp_path / "medusa_lm_head.pt", tmp_path / "out", "--for", tiny.checkpoint())
    assert said.code == 0 and f"Use it with --draft medusa:heads={tmp_path / 'out'}" in said.out
    made = MedusaHeads.of(folder.read(tmp_path / "out"))
    for head in range(HEADS):
        got = made.logits(head, made.state(head, h, None), unasked if own else lambda state: state @ output.T)
        torch.testing.assert_close(got, source[head](h) if own else source[head](h) @ output.T)
    tiny.engine({"draft": f"medusa:heads={tmp_path / 'out'}"})


@pytest.mark.parametrize("dropout", [True, False])
def test_hydras_file(dropout: bool, cli: Cli, tmp_path: Path) -> None:
    source, h, path = Hydra(dropout), torch.randn(5, WIDTH), torch.randn(5, HEADS, WIDTH)
    torch.save(source.half().state_dict(), tmp_path / "hydra_lm_head.pt")
    assert cli("convert", "heads", tmp_path, tmp_path / "out").code == 0
    stored = folder.read(tmp_path / "out")
    assert stored.config["torch_dtype"] == "float16" and stored.config["num_hidden_layers"] == 2
    made = HydraHeads.of(stored)
    for head, wanted in enumerate(source.float()(h, path)):
        torch.testing.assert_close(made.logits(head, made.state(head, h, path), unasked), wanted)
    tiny.engine({"draft": f"hydra:heads={tmp_path / 'out'}"})


def test_eagles_file_keeps_its_names_and_its_configuration(cli: Cli, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    tensors = {"fc.weight": torch.randn(4, 8).half(), "layers.0.mlp.up_proj.weight": torch.randn(4, 4).half()}
    torch.save(tensors, source / "pytorch_model.bin")
    said = cli("convert", "heads", source, out)
    assert said.code == 2 and "it has no config.json" in said.err
    (source / "config.json").write_text('{"hidden_size": 4}')
    said = cli("convert", "heads", source, out)
    assert said.code == 0 and f"--draft eagle:heads={out}" in said.out
    stored = folder.read(out)
    assert stored.config == {"hidden_size": 4} and stored.tensors.keys() == tensors.keys()
    assert all(torch.equal(stored.tensors[name], value) for name, value in tensors.items())


class Hostile:
    """Pickled, it runs a command when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def plain(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_files_that_are_no_heads_are_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    whole = medusa(1, True).state_dict()
    (tmp_path / "cut.pt").write_bytes(plain(tmp_path / "whole.pt", whole).read_bytes()[:2000])
    with (tmp_path / "old.pt").open("wb") as file:
        pickle.dump(Hostile(ran), file)
    less = {name: value for name, value in whole.items() if name != "1.0.linear.weight"}
    cases = (
        (tmp_path / "absent.pt", "there is no such file"),
        (tmp_path / "cut.pt", "cannot be read"),
        (tmp_path / "old.pt", "holds more than tensors, and is not read"),
        (plain(tmp_path / "hostile.pt", {"a": Hostile(ran)}), "holds more than tensors, and is not read"),
        (plain(tmp_path / "list.pt", [torch.zeros(2)]), "holds no table of tensors by name"),
        (
            plain(tmp_path / "model.pt", {"model.norm.weight": torch.zeros(2)}),
            "neither Medusa's nor Hydra's nor EAGLE's heads",
        ),
        (plain(tmp_path / "less.pt", less), "blocks.1.layers.0.weight would be (48, 48) and is absent"),
        (plain(tmp_path / "more.pt", {**whole, "extra": torch.zeros(2)}), "extra is no part of Medusa's heads"),
        (plain(tmp_path / "legacy.pt", medusa(1, False).state_dict()), "add --for MODEL"),
    )
    for path, says in cases:
        said = cli("convert", "heads", path, tmp_path / "out")
        assert said.code == 2 and says in said.err, (path, said)
    said = cli("convert", "heads", tmp_path / "whole.pt", tmp_path / "out", "--for", "pocket")
    assert said.code == 2 and "over 64 tokens, the model has 4,096" in said.err
    said = cli("convert", "heads", tmp_path / "whole.pt", tmp_path)
    assert said.code == 2 and "must be new or empty" in said.err
    assert not ran.exists() and not (tmp_path / "out").exists()
