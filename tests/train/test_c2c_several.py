"""Fusers of decode.c2c that were trained apart: with two sharers, a model says what each of them knows."""

from __future__ import annotations

from dataclasses import replace

import torch

from phasewise.methods.decode._second import Rows
from phasewise.methods.decode.c2c import C2C, fuse
from phasewise.methods.decode.c2c import Fuser as Serving
from phasewise.train.artefacts.decode_c2c import Fuser, noisy, reply_loss, start
from phasewise.train.dense import Dense
from phasewise.train.passes import Past
from phasewise.train.trainer import update
from tests import tiny as engines
from tests.train.test_c2c_training import BASE, KEYS, SMALL, facts, moved, right, split, taught

OWN, FIRST, SECOND = list(range(3, 3 + KEYS)), list(range(23, 33)), list(range(33, 43))


def fuser(receiver: Dense, sharer: Dense, learned: list[int], seed: int) -> Fuser:
    """Trained on what the sharer knows, and on what the receiver knows itself; the other sharer it never meets."""
    config = [engines.model(layers=layers, hidden=hidden, heads=heads, kv_heads=kv).config
              for layers, hidden, heads, kv in ((3, 64, 4, 2), (3, 48, 3, 3))]  # fmt: skip
    torch.manual_seed(seed)
    run, gen = start(Fuser(C2C("small", width=32).artefact(*config))), torch.Generator().manual_seed(seed + 1)
    run.optimizers[0].param_groups[0]["lr"] = 4e-3
    for step in range(200):
        gates = noisy(run.model, step / 200, 0, step)
        pairs = ([split(facts(keys, gen, rows))] for keys, rows in ((learned, 16), (OWN, 8)))
        update(run, reply_loss(receiver, sharer, run.model, gates, tuple(pairs)))  # type: ignore[arg-type]
    return run.model


def together(fusers: list[Fuser], own: Past, others: list[Past]) -> list[Past]:
    """The receiver's own rows, fused by the engine's arithmetic with those of all sharers."""
    three = engines.model(layers=3)  # so many layers have all of them
    rows = fuse([Serving(three, three, learns.tensors()) for learns in fusers], flat(own), [flat(x) for x in others])
    layers = {}
    for layer, pair in enumerate(rows):
        k, v = (fused.transpose(0, 1).reshape(mine.shape) for fused, mine in zip(pair, own.layers[layer], strict=True))
        layers[layer] = (k, v)
    return [Past(own.real, layers)]


def flat(past: Past) -> Rows:
    """Rows of all prompts one after the other: each is fused by itself."""
    return [(k.flatten(0, 1).transpose(0, 1), v.flatten(0, 1).transpose(0, 1)) for k, v in past.layers.values()]


def test_with_two_sharers_a_model_says_what_each_of_them_knows() -> None:
    receiver = taught(replace(BASE, num_hidden_layers=3), OWN, 0)
    shape = replace(SMALL, num_hidden_layers=3, num_key_value_heads=3)
    sharers = [taught(shape, keys, seed) for keys, seed in ((FIRST, 1), (SECOND, 2))]
    fusers = [fuser(receiver, sharer, keys, 3 + i) for i, (sharer, keys) in enumerate(zip(sharers, (FIRST, SECOND)))]
    found = {}
    with torch.no_grad():
        for name, keys in (("first", FIRST), ("second", SECOND), ("own", OWN)):
            asked = split(facts(keys, torch.Generator().manual_seed(9), 100))
            own, *others = (model.prefill([asked.prompts], [asked.real])[0] for model in (receiver, *sharers))
            found[name] = [
                right(receiver, None, asked),
                *(right(receiver, together([fusers[i]], own, [others[i]]), asked) for i in (0, 1)),
                right(receiver, together(fusers, own, others), asked),
                right(receiver, together(fusers, own, [moved(past, 7) for past in others]), asked),
            ]
    for name, its in (("first", 0), ("second", 1)):
        alone, *single, both, strangers = found[name]
        assert single[its] > 0.9 and single[1 - its] < 0.4 and alone < 0.4, found
        assert both > 0.7 and strangers < 0.4, found
    assert found["own"][3] > 0.9, "what it knows itself it still says"
