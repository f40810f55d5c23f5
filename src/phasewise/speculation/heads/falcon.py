"""Falcon's heads: a recurrent input and a block whose rows see one another, k at a time (arXiv 2412.12639).

Pair p is the target's state at token p with the embedding of token p + 1. An LSTM of two layers turns pairs into rows,
which one decoder block reads. Rows stand in groups of k. A row sees all rows before its group and its whole group,
later rows too; the paper calls this relaxed causal attention. What comes out at pair p stands for the state at token
p + k. So the last k pairs of a text foretell its next k tokens in one pass.

Module names are those of the authors' code (github.com/Bestpay-inc/Falcon).
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from phasewise.model.config import ModelConfig
from phasewise.ops.linear import Linear
from phasewise.speculation.heads.block import AttendRows, Block, FeatureHeads

RECURRENT_LAYERS = 2
Recurrence = tuple[Tensor, Tensor]
"""The hidden and the cell state [RECURRENT_LAYERS, n, d] of n sequences."""


class PackedRecurrence:
    """An LSTM's layers by matrices in the engine's own form, which reads memory faster (`ops/linear.py`)."""

    def __init__(self, lstm: nn.LSTM) -> None:
        self.layers = [tuple(_packed(lstm, of, layer) for of in "ih") for layer in range(lstm.num_layers)]

    def __call__(self, x: Tensor, before: Recurrence) -> tuple[Tensor, Recurrence]:
        """What `FalconHeads.enter` gives. Gates and cells are float32 on the way."""
        n, length, _ = x.shape
        states = list[tuple[Tensor, Tensor]]()
        for (read, again), hidden, cell in zip(self.layers, *before):
            given, rows, cell = read(x.reshape(n * length, -1)).view(n, length, -1), list[Tensor](), cell.float()
            for at in range(length):
                opened, kept, new, shown = (given[:, at] + again(hidden)).float().chunk(4, -1)
                cell = kept.sigmoid() * cell + opened.sigmoid() * new.tanh()
                hidden = (shown.sigmoid() * cell.tanh()).to(x.dtype)
                rows.append(hidden)
            x = torch.stack(rows, 1)
            states.append((hidden, cell.to(x.dtype)))
        hiddens, cells = zip(*states)
        return x, (torch.stack(hiddens), torch.stack(cells))


def _packed(lstm: nn.LSTM, of: str, layer: int) -> Linear:
    bias = lstm.get_parameter(f"bias_{of}h_l{layer}").data if lstm.bias else None
    return Linear(lstm.get_parameter(f"weight_{of}h_l{layer}").data, bias)


class FalconHeads(FeatureHeads):
    """An LSTM over pairs [..., 2 d] and a block without a first norm over what it gives, [..., d]. The target's own
    output head reads the outputs. `together`: the guesses of a pass, k."""

    kind: ClassVar[str] = "falcon"

    def __init__(self, config: ModelConfig, together: int, *, bias: bool = True, embeddings: bool = False) -> None:
        super().__init__(config)
        self.together, self.row_width = together, config.hidden
        self.recurrence: PackedRecurrence | None = None
        self.lstm = nn.LSTM(2 * config.hidden, config.hidden, RECURRENT_LAYERS, bias=bias, batch_first=True)
        self.layers = nn.ModuleList([Block(config, config.hidden)])
        if embeddings:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)

    @property
    def block(self) -> Block:
        return cast(Block, self.layers[0])

    def pack(self) -> None:
        """Lets the LSTM run by packed matrices where linear layers do: in 16 bits on a CPU."""
        weight = self.get_parameter("lstm.weight_hh_l0")
        if weight.dtype == torch.bfloat16 and not weight.is_cuda:
            self.recurrence = PackedRecurrence(self.lstm)

    def fresh(self, n: int) -> Recurrence:
        """The state of n sequences before their first pair: zeros."""
        like = self.get_parameter("lstm.weight_hh_l0")
        zero = like.new_zeros(RECURRENT_LAYERS, n, self.config.hidden)
        return zero, zero

    def enter(self, pairs: Tensor, before: Recurrence) -> tuple[Tensor, Recurrence]:
        """Pairs [n, length, 2 d] of n sequences, and their states before these -> the rows [n, length, d] that enter
        the block, and the states after the last pair."""
        rows, after = (self.recurrence or self.lstm)(pairs, before)
        return rows, after

    def layer(self, i: int, x: Tensor, attend: AttendRows) -> Tensor:
        return self.block.run(x, x, attend)

    def forward(self, embedded: Tensor, feature: Tensor, attend: AttendRows) -> Tensor:
        """Pairs of embeddings and features [n, length, d] each, of n whole texts -> outputs [n, length, d]."""
        rows, _ = self.enter(self.inputs(embedded, feature), self.fresh(len(feature)))
        return self.layer(0, rows, attend)
