"""Committed rows as plain tensors: what a hand-off carries, and how a KV is filled from it."""

from __future__ import annotations

from typing import Any

from phasewise.kv.blocks import LayerBlocks
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
        said = 0 if piece["positions"] is None else len(piece["positions"])
        if piece["planes"]:
            heads, n = piece["planes"][0].shape[:2]
            lent, cap, wide = None, rounded(n + 1), max(said, min(layer.wide, heads))
        else:
            lent, heads, cap, n, wide = piece["lent"]
        buffer = Buffer(layer.kinds, heads, cap, layer.ledger, layer.shape.device, lent).placed(wide)
        layer.slabs.append(slab := Slab(buffer, n, piece["heads"], said))  # at once: `close` must find it
        for plane, rows in zip(buffer.planes, piece["planes"]):
            plane[:, :n] = rows
            moved += rows.numel() * rows.element_size()
        slab.base = (piece.get("sealed") or {}).get("base", 0)
        layer.blocks = LayerBlocks.of(layer.format, layer.shape, layer.ledger, rounded(slab.base + n + 1))
        if slab.base or piece.get("sealed"):
            assert layer.blocks is not None, "a dump of another format"
            moved += layer.blocks.load(**piece["sealed"]["blocks"])
        if said:
            buffer.positions[:said, :n] = piece["positions"]
    return moved
