"""Committed rows as plain tensors: what a hand-off carries, and how a KV is filled from it."""

from __future__ import annotations

from typing import Any

import torch

from phasewise.kv.blocks import Sealed
from phasewise.kv.buffer import Buffer, rounded
from phasewise.kv.layer_kv import LayerKV, Slab
from phasewise.kv.wire import Dump


def _by_layer(dumped: Dump) -> list[Dump]:
    layers: list[Dump] = [[]]
    for piece in dumped:
        layers[-1].append(piece)
        if piece.get("last"):
            layers.append([])
    return layers[:-1]


def _fill(layer: LayerKV, pieces: list[dict[str, Any]]) -> int:
    layer.close()
    moved = 0
    for piece in pieces:
        if not piece["planes"] and not piece.get("lent"):
            continue  # freed before it was dumped
        if piece["planes"]:
            heads, n = piece["planes"][0].shape[:2]
            lent, cap = None, rounded(n + 1)
        else:
            lent, heads, cap, n = piece["lent"]
        buffer = Buffer(layer.codec, layer.shape, heads, cap, layer.ledger, lent)
        layer.slabs.append(slab := Slab(buffer, n, piece["heads"], None))  # at once: `close` must find it
        for plane, rows in zip(buffer.planes, piece["planes"]):
            plane[:, :n] = rows
            moved += rows.numel() * rows.element_size()
        slab.base = (piece.get("sealed") or {}).get("base", 0)
        layer.sealed = Sealed.of(layer.codec, layer.shape, layer.ledger, rounded(slab.base + n + 1))
        if slab.base or piece.get("sealed"):
            assert layer.sealed is not None, "a dump of another codec"
            moved += layer.sealed.load(**piece["sealed"]["blocks"])
        positions = piece["positions"]
        if positions is not None:
            slab.positions = torch.empty((positions.shape[0], cap), dtype=torch.int64, device=layer.shape.device)
            slab.positions[:, :n] = positions
    return moved
