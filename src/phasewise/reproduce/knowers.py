"""Three tiny models that know different facts, and fusers between them, all made in seconds: what Cache-to-Cache needs.

A fact is a key and its value. Each model is taught its own keys from scratch, so that whoever says another's values can
only have them from that one's cache. A fuser is trained on what its sharer knows and on what the receiver knows, and
never meets the other sharer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from phasewise.methods.decode.c2c import C2C
from phasewise.model import artefacts
from phasewise.model.model import Model
from phasewise.train import dense
from phasewise.train.artefacts.decode_c2c import TrainedFuser, noisy, reply_loss, start
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.exchanges import Pair, PromptReplyBatch, exchange
from phasewise.train.trainer import update

RECEIVER, SHARERS = "knows-own", ("knows-first", "knows-second")
KEYS = {RECEIVER: range(3, 23), SHARERS[0]: range(23, 33), SHARERS[1]: range(33, 43)}
VALUES, FIRST_VALUE = 10, 43
FILLERS, AFTER, ASK, END = range(54, 58), 58, 59, 2
LARGE = DenseShape(64, 64, 3, 4, 2, 96, head_dim=16, max_position_embeddings=512)
SMALL = DenseShape(64, 48, 3, 3, 3, 64, head_dim=16, max_position_embeddings=512)
WIDTH, STEPS, AT_ONCE = 32, 200, 32


def value(key: int) -> int:
    """The meaning of a key."""
    return FIRST_VALUE + (key * 7 + key // 10) % VALUES


def facts(keys: Sequence[int], gen: torch.Generator, n: int) -> list[Pair]:
    """Questions, a few fillers and a key, and their answers; only who has learned the key can know."""
    found = []
    for _ in range(n):
        key = keys[int(torch.randint(len(keys), (), generator=gen))]
        fill = torch.randint(FILLERS.start, FILLERS.stop, (3,), generator=gen).tolist()
        found.append(([*fill, key, AFTER, ASK], [value(key)]))
    return found


def split(pairs: Sequence[Pair]) -> PromptReplyBatch:
    """Prompts but for their last token, which the receiver reads over what was fused."""
    return exchange([(prompt[:-1], [prompt[-1], *reply]) for prompt, reply in pairs], 0)


def taught(shape: DenseShape, keys: Sequence[int], seed: int) -> DenseDecoder:
    """A model that says what these keys mean."""
    torch.manual_seed(seed)
    model = DenseDecoder(shape)
    torch.nn.init.ones_(model.norm.weight)  # type: ignore[arg-type]
    optimizer, gen = torch.optim.AdamW(model.parameters(), lr=5e-3), torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        ids = torch.tensor([prompt + reply for prompt, reply in facts(keys, gen, AT_ONCE)])
        targets = torch.full_like(ids, -1)
        targets[:, 3:-1] = ids[:, -1:]  # from the key on, so that what it means is in the cache
        torch.autograd.backward(torch.cat(dense.losses(model, [TokenBlock.of(ids, targets)])).mean())
        optimizer.step()
        optimizer.zero_grad()
    return model.requires_grad_(False)


def knowing(name: str, target: Path) -> None:
    """Write the model of this name."""
    shape = LARGE if name == RECEIVER else SMALL
    dense.save(taught(shape, KEYS[name], list(KEYS).index(name)), target, [END])


def tuned(
    learns: TrainedFuser, receiver: DenseDecoder, sharer: DenseDecoder, keys: Sequence[int], seed: int
) -> TrainedFuser:
    """The fuser, trained on these keys of the sharer's and on all of the receiver's."""
    run, gen = start(learns), torch.Generator().manual_seed(seed)
    run.optimizers[0].param_groups[0]["lr"] = 4e-3
    for step in range(STEPS):
        pairs = facts(keys, gen, AT_ONCE // 2), facts(KEYS[RECEIVER], gen, AT_ONCE // 4)
        gates = noisy(run.model, step / STEPS, 0, step)
        update(run, reply_loss(receiver, sharer, run.model, gates, tuple([split(each)] for each in pairs)))  # type: ignore[arg-type]
    return run.model


def fuser(sharer: str, models: Sequence[Model], target: Path) -> Path:
    """Train what fuses the second of these models, called `sharer`, into the first, and write it."""
    base, small = models
    made = C2C(sharer, width=WIDTH).artefact(base.config, small.config, artefacts.fingerprint(small))
    seed = 3 + SHARERS.index(sharer)
    torch.manual_seed(seed)
    twins = [dense.load(model.files.path).requires_grad_(False) for model in models]
    learned = tuned(TrainedFuser(made), twins[0], twins[1], KEYS[sharer], seed + 1)
    artefacts.save(target, made, learned.tensors(), artefacts.fingerprint(base), "phasewise reproduce c2c")
    return target
