"""EAGLE heads that are often right, without training: a random block whose output head is solved for.

The block's outputs along what the tiny target wrote are random features of the text; the head is the least-squares fit
of the token after the next to them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.speculation import eagle_files as files

PROMPTS = tiny.prompts(41, 70, 26)
N = 24  # tokens that the target has written after each of them


@cache
def heads(seed: int = 1) -> Path:
    """The folder of heads for `tiny.model()` that know what it writes after `PROMPTS`."""
    folder = files.speculators(Path(tempfile.mkdtemp(prefix="phasewise-heads-")), 48, aux=(1, 2, 4), seed=seed)
    plain = files.Plain(folder, tiny.checkpoint())
    rows, said = [], []
    for prompt, answer in zip(PROMPTS, tiny.plain(PROMPTS, tiny.greedy(N))):
        x, y = pairs(plain, [*prompt, *answer], len(prompt))
        rows.append(x)
        said += y
    x = torch.cat(rows)
    wanted = torch.nn.functional.one_hot(torch.tensor(said), tiny.VOCAB).float() * 12
    solved = torch.linalg.solve(x.T @ x + 0.05 * torch.eye(x.shape[1]), x.T @ wanted)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": solved.T.contiguous()}, folder / "model.safetensors")
    return folder


def pairs(plain: files.Plain, text: Sequence[int], start: int) -> tuple[torch.Tensor, list[int]]:
    """What the output head reads [n, d] where it is to say the tokens of a text from `start` on, and these."""
    outputs = plain.run(plain.embeddings[list(text[1:-1])], plain.features(text[:-2]))
    return files.normed(outputs, plain.w["norm.weight"])[start - 2 :], list(text[start:])
