"""Stored tensors become modules: held to their names and shapes, their draft vocabulary and their model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.artefacts import fingerprint
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.folder import CONFIG, WEIGHTS, StoredHeads, train_command

T = TypeVar("T", bound=FeatureHeads)
OFTEN = ("rotary_emb.inv_freq",)  # endings of tensors that follow from the settings
UNREAD = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # for training; `t2d` is checked
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # settings that name the token of a mask


def named(stored: StoredHeads) -> dict[str, Tensor]:
    """The tensors by the names of the modules here."""
    found: dict[str, Tensor] = {}
    for name, tensor in stored.tensors.items():
        if name in UNREAD or name.endswith(OFTEN):
            continue
        found[f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name] = tensor
    return found


def filled(made: T, tensors: Mapping[str, Tensor], stored: StoredHeads) -> T:
    """Heads that take these tensors as their own. Raises UserError naming those that are missing, left over or of
    another shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    given = dict(tensors)
    if "d2t" not in wanted:
        given.pop("d2t", None)
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - given.keys())]
    problems += [f"{name} is left over" for name in sorted(given.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {list(given[name].shape)}, {CONFIG} asks for {list(wanted[name])}"
        for name in sorted(wanted.keys() & given.keys())
        if tuple(given[name].shape) != wanted[name]
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        said = "; ".join(problems[:4]) + more
        raise UserError(f"{stored.path / WEIGHTS} does not hold heads of kind {made.kind}: {said}")
    made.load_state_dict(given, assign=True)
    return made


def on_paper(make: Callable[[], T]) -> T:
    """A module whose parameters have shapes alone."""
    with torch.device("meta"):
        return make()


def mask_of(stored: StoredHeads, config: ModelConfig, said: Mapping[str, Any]) -> int:
    """The token that masks are embedded as. Raises UserError where none is named, or one that is no token."""
    mask = next((said[name] for name in MASKS if said.get(name) is not None), None)
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < config.vocab:
        raise UserError(f"{stored.path / CONFIG}: mask_token_id={mask!r} must be a token from 0 to {config.vocab - 1}")
    return mask


def draft_vocabulary(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor]) -> int:
    """The number of tokens that an output head of the heads' own foretells. Raises UserError."""
    draft = stored.config.get("draft_vocab_size") or config.vocab
    if not isinstance(draft, int) or not 0 < draft <= config.vocab:
        raise UserError(f"{stored.path / CONFIG}: draft_vocab_size={draft!r} must be from 1 to {config.vocab}")
    if draft != config.vocab:
        _check_vocabulary(stored, tensors, draft, config.vocab)
    return draft


def _check_vocabulary(stored: StoredHeads, tensors: Mapping[str, Tensor], draft: int, vocab: int) -> None:
    """Raise UserError unless `d2t` says of each draft token which of the target's it is, none twice."""
    d2t, t2d = tensors.get("d2t"), stored.tensors.get("t2d")
    if d2t is None or d2t.shape != (draft,) or d2t.is_floating_point():
        found = "absent" if d2t is None else f"{d2t.dtype} {list(d2t.shape)}"
        raise UserError(
            f"{stored.path / WEIGHTS}: d2t is {found}, wanted int64 [{draft}]: offsets from draft tokens to the model's"
        )
    ids = torch.arange(draft) + d2t
    different = len(set(ids.tolist()))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or different < draft:
        raise UserError(
            f"{stored.path / WEIGHTS}: d2t must lead to {draft} different tokens below {vocab}; it leads to "
            f"{different} from {int(ids.min())} to {int(ids.max())}"
        )
    if t2d is not None and (t2d.shape != (vocab,) or not torch.equal(t2d.nonzero().flatten(), ids.sort().values)):
        raise UserError(f"{stored.path / WEIGHTS}: t2d and d2t name different draft vocabularies")


def same_base(stored: StoredHeads, model: Model, kind: str) -> None:
    base = stored.own.get("base")
    if base is not None and base != fingerprint(model):
        raise UserError(f"{stored.path}: these heads were trained for another model ({base}) than the one in "
                        f"{model.files.path} ({fingerprint(model)}). Train some for it: "
                        f"{train_command(kind, str(model.files.path))}")  # fmt: skip


def other_width(stored: StoredHeads, said: str, model: Model) -> UserError:
    return UserError(f"{stored.path}: these heads are for a model with {said}, the one in {model.files.path} has "
                     f"{model.config.hidden}: give heads made for this model")  # fmt: skip


def digest(stored: StoredHeads) -> str:
    """Names the weights: a few numbers of each tensor, its shape and its name."""
    parts = [f"{name} {list(tensor.shape)} {tensor.reshape(-1)[:: max(1, tensor.numel() // 8)].tolist()}"
             for name, tensor in sorted(stored.tensors.items())]  # fmt: skip
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
