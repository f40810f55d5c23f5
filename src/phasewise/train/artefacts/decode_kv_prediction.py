"""Maps for decode.kv_prediction (arXiv 2410.08391, section on training): the base reads predicted keys and values in
the place of its own. Learned are the maps and what is added to the auxiliary; the base stays frozen.

The loss is the base's cross-entropy over what was predicted, the auxiliary's own, and how far predictions are from the
base's true keys and values, layer by layer. It begins with maps of least squares, which the paper does not, and so
needs far fewer tokens. Left out: the paper's z-loss, and tuning all of the auxiliary's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.load import load_model
from phasewise.methods.decode.kv_prediction import AUX, KVPrediction, layer_map
from phasewise.model.artefacts import Artefact, fingerprint
from phasewise.train.artefacts import ArtefactJob, frozen
from phasewise.train.dense import DenseDecoder, TokenBlock, of_layers, rotate
from phasewise.train.device import halved, moved
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Stage, unpadded
from phasewise.train.passes import Pass, Past
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, weighed

TOKENS = 1_000_000  # padding included
RATE = 2e-3
FIRST = 8  # steps whose tokens the maps are fitted to at first
RIDGE = 1e-3  # of the mean square of what is mapped
STAGES = (
    Stage(0.7, 512, 4096, code=0.4, long=0.2, copies=0.3),
    Stage(1.0, 1024, 6144, code=0.35, long=0.25, copies=0.3),
)
DECAY = ((0.4, 1.0), (1.0, 0.02))


class Predictor(nn.Module):
    """Trained tensors, by the names of the artefact; at first all of it is zero, or changes nothing."""

    def __init__(self, made: Artefact) -> None:
        super().__init__()
        sizes = {name: shape for name, shape in made.shapes.items() if not name.startswith(AUX)}
        self.maps = nn.ParameterDict({name.replace(".", "_"): torch.zeros(shape) for name, shape in sizes.items()})
        self.names = tuple(sizes)
        added = {name.removeprefix(AUX): shape for name, shape in made.shapes.items() if name.startswith(AUX)}
        self.added = LowRank(added)

    def mapped(self, side: str, layer: int, x: Tensor) -> Tensor:
        """[tokens, inner] -> [tokens, width]"""
        return F.linear(x, self.maps[f"{side}_weight"][layer], self.maps[f"{side}_bias"][layer])

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by their names in the artefact."""
        own = {name: self.maps[name.replace(".", "_")] for name in self.names}
        return own | {AUX + name: tensor for name, tensor in self.added.tensors().items()}


def train(method: KVPrediction, job: ArtefactJob) -> Path:
    """Train for one pair of models; `job.out` gets checkpoint.pt, losses.csv and the artefact."""
    base, twin = job.base()
    if method.share is None:
        small = load_model(method.model, dtype=torch.float32)
        aux = frozen(method.model)
        made = method.artefact(base.config, small.config, fingerprint(small))
    else:
        aux = of_layers(twin, method.kept(base.config.layers))
        made = method.artefact(base.config)
    torch.manual_seed(job.seed)
    tokens, mixture = job.tokens or TOKENS, job.mixture()
    run = start(Predictor(made))
    if job.resume:
        run.read(job.checkpoint)
    else:
        first = [moved(mixture.step(step, STAGES[0]), run.device) for step in range(FIRST)]
        begin(twin, aux, run.model, first, mixture.pad)

    def save(run: TrainingRun[Predictor]) -> None:
        job.save(base, made, run.model.tensors(), tokens)

    def loss(stage: Stage, batch: tuple[list[TokenBlock], list[TokenBlock]]) -> StepLoss:
        return predicted_loss(twin, aux, run.model, batch, mixture.pad)

    fit(run, loss, mixture, TrainingRecipe(tokens, STAGES, decay=DECAY), job.out, save)
    return job.save(base, made, run.model.tensors(), tokens)


def start(learns: Predictor) -> TrainingRun[Predictor]:
    """A fresh run; both frozen models are no part of it."""
    return TrainingRun(learns, [AdamW(learns.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


@torch.no_grad()
def begin(
    twin: DenseDecoder, aux: DenseDecoder, learns: Predictor,
    batches: Sequence[tuple[list[TokenBlock], list[TokenBlock]]], pad: int,
) -> None:  # fmt: skip
    """Fit the maps to these batches, by least squares."""
    of = layer_map(len(twin.layers), len(aux.layers))
    sums: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for block in (block for batch in batches for part in batch for block in part):
        real = unpadded(block.ids, pad)
        (mine,), (true,) = aux.prefill([block], [real]), twin.prefill([block], [real])
        wanted, ones = real.flatten(), real.new_ones(int(real.sum()), 1, dtype=torch.float64)
        for layer, j in enumerate(of):
            pairs = {"k": (_back(aux, mine.layers[j][0], block), _back(twin, true.layers[layer][0], block))}
            pairs["v"] = mine.layers[j][1].flatten(0, 1), true.layers[layer][1].flatten(0, 1)
            for side, both in pairs.items():
                x, y = (each.flatten(1)[wanted].double() for each in both)
                x = torch.cat((x, ones), 1)
                a, b = sums.get((side, layer), (0.0, 0.0))
                sums[side, layer] = a + x.T @ x, b + x.T @ y
    for (side, layer), (a, b) in sums.items():
        found = torch.linalg.solve(a + RIDGE * a.diagonal().mean() * torch.eye(len(a)).to(a), b).T
        learns.maps[f"{side}_weight"][layer], learns.maps[f"{side}_bias"][layer] = found[:, :-1], found[:, -1]


def predicted_loss(
    twin: DenseDecoder, aux: DenseDecoder, learns: Predictor, batch: tuple[list[TokenBlock], list[TokenBlock]], pad: int
) -> StepLoss:  # fmt: skip
    """Cross-entropies of base and auxiliary, tasks weighing more, and the distance of what is predicted."""
    blocks = [*batch[0], *batch[1]]
    tokens = sum(block.ids.numel() for block in blocks)
    real = [unpadded(block.ids, pad) for block in blocks]
    with halved(twin.embed_tokens.weight.device):
        truth = twin.prefill(blocks, real)
        kept = [Past(some) for some in real]
        own = _weighed(aux, aux.hidden(blocks, Pass(kept=kept, delta=learns.added)), batch, tokens)
        flat = predicted(twin, aux, learns, blocks, kept)
        said = _weighed(twin, twin.hidden(blocks, Pass(instead=placed(twin, blocks, flat))), batch, tokens)
        apart = torch.stack([_apart(flat[i], truth[i], twin, block) for i, block in enumerate(blocks)]).sum(0)
        apart = apart / sum(int(some.sum()) for some in real)
    parts = {**said.parts, "aux": float(own.total.detach()), "apart": float(apart.detach())}
    return StepLoss(said.total + own.total + apart, parts, tokens)


def predicted(
    twin: DenseDecoder, aux: DenseDecoder, learns: Predictor, blocks: Sequence[TokenBlock], kept: Sequence[Past]
) -> list[dict[int, tuple[Tensor, Tensor]]]:
    """For every block and layer of the base, keys before rotation and values [tokens, kv_heads, D]."""
    of = layer_map(len(twin.layers), len(aux.layers))
    shape = (-1, twin.shape.num_key_value_heads, twin.shape.head_dim)
    out = []
    for block, past in zip(blocks, kept, strict=True):
        flat = {j: (_back(aux, k, block).flatten(1), v.flatten(0, 1).flatten(1)) for j, (k, v) in past.layers.items()}
        pairs = {layer: zip("kv", flat[j], strict=True) for layer, j in enumerate(of)}
        out.append({i: _two(learns.mapped(side, i, x).view(shape) for side, x in pair) for i, pair in pairs.items()})
    return out


def _two(pair: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    k, v = pair
    return k, v


def placed(
    twin: DenseDecoder, blocks: Sequence[TokenBlock], flat: Sequence[dict[int, tuple[Tensor, Tensor]]]
) -> list[Past]:  # fmt: skip
    """The KV that the base reads: keys at their positions."""
    out = []
    for block, layers in zip(blocks, flat, strict=True):
        turn = _rope(twin, block)
        size = (*block.ids.shape, twin.shape.num_key_value_heads, twin.shape.head_dim)
        rows = {layer: (rotate(k, turn).to(v.dtype).view(size), v.view(size)) for layer, (k, v) in layers.items()}
        out.append(Past(torch.ones_like(block.ids, dtype=torch.bool), rows))
    return out


def _apart(flat: dict[int, tuple[Tensor, Tensor]], truth: Past, twin: DenseDecoder, block: TokenBlock) -> Tensor:
    """The mean distance of a token's numbers, keys before rotation, summed over layers, both sides, and the tokens."""
    total = torch.zeros((), device=block.ids.device)
    wanted = truth.real.flatten()
    for layer, (k, v) in flat.items():
        for mine, true in ((k, _back(twin, truth.layers[layer][0], block)), (v, truth.layers[layer][1].flatten(0, 1))):
            total = total + (mine.float() - true.float())[wanted].abs().mean((1, 2)).sum()
    return total


def _back(model: DenseDecoder, k: Tensor, block: TokenBlock) -> Tensor:
    """Rotated keys [rows, length, heads, D] as they were before, [tokens, heads, D]."""
    cos, sin = _rope(model, block)
    return rotate(k.flatten(0, 1).float(), (cos, -sin))


def _rope(model: DenseDecoder, block: TokenBlock) -> tuple[Tensor, Tensor]:
    return model.rope(block.positions.flatten())


def _weighed(
    model: DenseDecoder, hidden: Tensor, batch: tuple[list[TokenBlock], list[TokenBlock]], tokens: int
) -> StepLoss:
    targets = [torch.cat([block.targets.flatten() for block in part]) for part in batch]
    both = torch.cat(targets)
    logits = F.linear(hidden[both >= 0], model.embed_tokens.weight).float()
    each = F.cross_entropy(logits, both[both >= 0], reduction="none")
    of_code = int((targets[0] >= 0).sum())
    return weighed(each[:of_code], each[of_code:], tokens)
