"""The head of verify.judge, mined and fitted as AutoJudge has it (arXiv 2504.20039).

Questions are functions of the library to complete (train/completions.py), for there two models may differ and both be
right. Three of four questions are learned from; the others choose C, and the threshold that refuses nine of ten
important guesses, which goes into the bias. Files that completions are judged on are never mined.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.load import config_of, model_path
from phasewise.methods.verify.judge import JudgeDecoding
from phasewise.model.artefacts import fingerprint
from phasewise.model.tokenizer import Tokenizer, begun
from phasewise.request.params import Params
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.completions import Completion, drawn
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.logistic import LinearScore, area, border, chosen
from phasewise.train.mining import MinedLabels, MinedToken, MiningQuestion, mine
from phasewise.train.trainer import bar

KEPT = "mined.jsonl"
TOKENS = 20_000  # of the target's first answers
ROOM, JUDGED = 32, 24  # tokens of an answer, and those at which guesses are judged: what is wrong later is cut off
TOGETHER = 50  # questions at a time, after each of which labels are saved
AT_ONCE = 32  # texts of a pass of the draft
RECALL = 0.9
VALIDATING_ONE_IN = 4  # questions
FEWEST = 20  # labels of a kind in either part


def train(method: JudgeDecoding, job: ArtefactJob) -> Path:
    """Mine, fit and write. `job.out` gets mined.jsonl, which a run that goes on starts from, judge.json (labels, area
    under the curve, what the threshold accepts) and the artefact.

    Raises UserError for a draft with another vocabulary, states that are no numbers, and too few labels of a kind.
    """
    tokens = job.tokens or TOKENS
    models = EngineAndDraft(job.model, method.mined)
    path, count = job.out / KEPT, max(1, tokens // ROOM)
    settings = {"base": fingerprint(models.llm.model), "mined": models.draft.fingerprint, "seed": job.seed,
                "room": ROOM, "judged": JUDGED}  # fmt: skip
    labels = MinedLabels.read(path, settings) if job.resume else MinedLabels(settings)
    questions = [models.question(one) for one in drawn(count, job.seed, evaluation=False)]
    with bar() as shown:
        task = shown.add_task("questions", total=len(questions), completed=labels.done, note="")
        while labels.done < len(questions):
            some = questions[labels.done : labels.done + TOGETHER]
            labels.take(mine(some, models, ROOM, JUDGED, models.ends), len(some))
            labels.save(path)
            note = f"{labels.count(True)} unimportant, {labels.count(False)} important"
            shown.update(task, completed=labels.done, note=note)
    tensors = fit(labels.tokens, job.out / "judge.json")
    return job.save(models.llm.model, method.artefact(models.llm.model.config), tensors, tokens)


class EngineAndDraft:
    """The models of `mine`: an engine for the target, whose cached prefixes serve the answers that go on from them,
    and the draft's layers."""

    def __init__(self, model: str, draft: str) -> None:
        ours, theirs = config_of(model), config_of(draft)
        if ours.vocab != theirs.vocab:
            raise UserError(f"mined={draft} has {theirs.vocab} tokens and {model} {ours.vocab}: choose a draft of the "
                            "same tokenizer, as in verify.judge:mined=DIR")  # fmt: skip
        self.llm, self.draft = LLM(model), FrozenTarget(draft, "bfloat16")
        self.text, self.ends = Tokenizer.load(model_path(model)), frozenset(ours.eos)

    def question(self, one: Completion) -> MiningQuestion:
        ids = begun(self.text.encode(one.prompt, False), self.text.begin)
        return MiningQuestion(ids, partial(_right, one, self.text))

    def answers(self, prompts: Sequence[list[int]], rooms: Sequence[int]) -> list[list[int]]:
        outputs = self.llm.generate(list(prompts), [Params(room) for room in rooms]) if prompts else []
        broken = next((output.left for output in outputs if output.left.how != "finished"), None)
        if broken is not None:
            raise UserError(f"the model cannot answer a question: {broken.reason}")
        return [list(output.tokens) for output in outputs]

    def states(self, texts: Sequence[list[int]]) -> list[list[float]]:
        return self.llm.embed(texts, pooling="last", normalise=False) if texts else []

    def guesses(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[int]]:
        found: list[list[int]] = []
        for at in range(0, len(prompts), AT_ONCE):
            pairs = list(zip(prompts[at : at + AT_ONCE], answers[at : at + AT_ONCE]))
            ids = torch.zeros(len(pairs), max(len(a) + len(b) for a, b in pairs), dtype=torch.int64)
            for row, (prompt, answer) in zip(ids, pairs):
                row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            seen = self.draft.see(TokenBlock.of(ids, ids))
            for h, (prompt, answer) in zip(seen.h, pairs):
                rows = h[len(prompt) - 1 : len(prompt) + len(answer) - 1]
                found.append(self.draft.unembed(rows).argmax(-1).tolist())
        return found


def fit(tokens: Sequence[MinedToken], about: Path | None = None) -> dict[str, Tensor]:
    """The tensors of the artefact; `about` gets what was found. Raises UserError as `train` does."""
    states = torch.tensor([one.state for one in tokens], dtype=torch.float64).reshape(len(tokens), -1 if tokens else 1)
    if not bool(torch.isfinite(states).all()):
        raise UserError("verify.judge: states of the model are no numbers (NaN or infinity): nothing can be learned "
                        "from them. Does the model answer at all?")  # fmt: skip
    fine = torch.tensor([one.fine for one in tokens], dtype=torch.bool)
    late = torch.tensor([one.question % VALIDATING_ONE_IN == 0 for one in tokens], dtype=torch.bool)
    for part, which in (("learn from", ~late), ("choose by", late)):
        for kind, of in (("unimportant", fine), ("important", ~fine)):
            if (n := int((of & which).sum())) < FEWEST:
                raise UserError(f"verify.judge: {n} {kind} guesses to {part}, and {FEWEST} are needed: mine more "
                                "(--tokens), or name another draft (verify.judge:mined=DIR)")  # fmt: skip
    best = chosen((states[~late], fine[~late]), (states[late], fine[late]))
    weight = best.score.weight.bfloat16()  # as it is stored
    scores = LinearScore(weight.double(), 0.0)(states[late])
    bias = -border(scores, fine[late], RECALL)
    first = torch.tensor(bias).bfloat16()
    tensors = {"weight": weight.float(), "bias": torch.stack((first.float(), torch.tensor(bias - float(first))))}
    if about is not None:
        above = scores > -bias
        about.write_text(json.dumps({
            "labels": len(tokens), "unimportant": int(fine.sum()), "validating": int(late.sum()), "C": best.strength,
            "area": area(scores, fine[late]), "areas": best.areas,
            "unimportant accepted": float(above[fine[late]].double().mean()),
            "important accepted": float(above[~fine[late]].double().mean()),
        }, indent=1) + "\n", encoding="utf-8")  # fmt: skip
    return tensors


def _right(one: Completion, text: Tokenizer, answer: Sequence[int]) -> bool:
    return one.right(text.decode(list(answer)))
