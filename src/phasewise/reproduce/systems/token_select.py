"""TokenSelect: all heads of a layer vote on which rows it reads."""

from __future__ import annotations

from functools import partial
from random import Random
from statistics import fmean

from phasewise.bench.judge import Judge
from phasewise.bench.stats import means, shares
from phasewise.engine.limits import Limits
from phasewise.llm import LLM
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.reproduce import loads
from phasewise.reproduce.answers import right
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import long_texts
from phasewise.reproduce.play import LoadEntry, PlayedRun, finish
from phasewise.reproduce.selected import RandomChunks, RandomTokens
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Paper,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import STRANGER, code_ids, examples, pocket_text, stretch
from phasewise.request.params import Params
from phasewise.request.request import Request

K, FIRST, LOCAL, DENSE, NEW = 96, 8, 24, 1, 40
MOST = FIRST + K + LOCAL
TEXT = 1024  # tokens that these numbers are for; of longer texts as large a share is read
THETA = 0.9


def sized(tokens: int) -> tuple[int, int, int]:
    """Rows that votes choose, first ones and last ones, of a text of so many tokens."""
    return K * tokens // TEXT, FIRST * tokens // TEXT, LOCAL * tokens // TEXT


def chosen(tokens: int) -> Setting:
    k, first, local = sized(tokens)
    return Setting({"attend": f"token_select:k={k},first={first},local={local},dense_layers={DENSE}"})


def drawn(tokens: int) -> Setting:
    k, first, local = sized(tokens)
    return Setting(objects={"attend": RandomTokens(first, local, float(k + first + local), DENSE)})


KNOBS = f"k={K},first={FIRST},local={LOCAL},dense_layers={DENSE}"
ANEW = chosen(TEXT)
AGAIN = Setting({"attend": f"token_select:{KNOBS},theta={THETA}"})
CHUNKED = Setting({"attend": f"token_select:{KNOBS},chunk=128"})
DRAWN = Setting(objects={"attend": RandomChunks(TokenSelect(K, FIRST, LOCAL, DENSE, chunk=128))})
FAR = "first=16,k=512,local=256"  # of texts beyond the context, and as many rows of a window
LISTED = Setting({"attend": f"token_select:{FAR},chunk=512,positions=list"})
WINDOW = Setting({"evict": "streaming:sinks=16,window=768"})
LONG = Setting({"attend": "token_select:k=768,first=64,local=192,chunk=512"})  # 8,192 tokens, the same share
BEYOND, SHORT, KEYS = "passkey-english@12k", "passkey-english@1k", 6
TASKS, EXAMPLES = ("recall@1k", "passkey@1k"), 60
TOLD = 24  # answers of each task that are a part of a prompt
STRETCH, SAID = 512, 64  # tokens of a stretch of code, and of what follows


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


def closed(case: Case) -> int:
    """The listed rows, a key of every row that is ranked, and the keys that are turned back, each once: all that there
    are, whenever one of them is ranked for the first time."""
    layers, prompt = case.config.layers, loads.prompt_rows(case)
    key = case.row_bytes // layers // 2  # bytes of a row's keys in a layer
    total = turned = 0
    for n in range(prompt + 1, prompt + NEW):  # rows that a token sees, itself included
        missing = n - 1 - turned if turned < n - LOCAL else 0
        total += DENSE * n * 2 * key + (layers - DENSE) * key * (2 * MOST + n - FIRST - LOCAL + missing)
        turned += missing
    return total


def used_again(lab: Lab) -> AttemptOutcome:
    """Lists made for what follows four stretches of code, and the bytes read for it, with and without a threshold."""
    rng, ids = Random(f"{lab.scale.seed} again"), list(code_ids())
    starts = [rng.randrange(len(ids) - STRETCH) for _ in range(1 if lab.scale.quick else 4)]
    entries = [LoadEntry(stretch(start, STRETCH), 8 if lab.scale.quick else SAID) for start in starts]
    anew, again = (lab.play(setting, entries, "pocket") for setting in (ANEW, AGAIN))
    made = again.work.choices / anew.work.choices
    saved = 1 - sum(step.read for step in again.decoding) / sum(step.read for step in anew.decoding)
    return AttemptOutcome(made < 1, f"{made:.1%} of them are made anew, {saved:.1%} fewer bytes are read")


def answers(lab: Lab, ours: Setting, theirs: Setting) -> AttemptOutcome:
    """About as many right answers."""
    n = min(lab.scale.examples or EXAMPLES, 4 if lab.scale.quick else EXAMPLES)
    gain = shares(*([g for task in TASKS for g in right(lab, each, task, n)] for each in (ours, theirs)))
    return AttemptOutcome(gain.low > -0.1, gain.text(True))


def told(lab: Lab, setting: Setting) -> list[float]:
    """Log-likelihood per token of right answers that are a part of the prompt: its own rows have to look them up."""
    text, requests, stretches = pocket_text(), list[Request](), list[range]()
    for task in TASKS:
        for item in examples(task, 2 if lab.scale.quick else TOLD, lab.scale.seed):
            prompt, answer = text.chat(item.messages), text.encode(item.answer)
            stretches.append(range(len(prompt), len(prompt) + len(answer)))
            requests.append(Request([*prompt, *answer], Params(max_tokens=1, prompt_logprobs=1)))
    with lab.engine(setting) as engine:
        finish(engine, requests)
    return [fmean(one.scores[at].logprob for at in stretch) for one, stretch in zip(requests, stretches)]


def told_apart(lab: Lab, theirs: Setting, allowed: float) -> AttemptOutcome:
    """Checks that prompts that choose answer as well."""
    gain = means(told(lab, CHUNKED), told(lab, theirs))
    return AttemptOutcome(gain.low > -allowed, f"{gain.text(False)} per token")


def beyond(lab: Lab) -> AttemptOutcome:
    """Keys found in texts of one and a half contexts, and how many the last rows show: as many of them, without end."""
    row, n = (SHORT, 1) if lab.scale.quick else (BEYOND, min(lab.scale.examples or KEYS, KEYS))
    found = []
    for setting in (LISTED, WINDOW):
        judge = Judge(LLM(STRANGER, dtype="bfloat16", limits=Limits(max_running=1)), setting.verbs)
        judge.measure(row, n, lab.scale.seed, lambda done: None)
        found.append(sum(judge.found[row][0].values))
    chosen, window = found
    said = f"{chosen:.0f} of {n}, {window:.0f} with a window of as many rows"
    return AttemptOutcome(chosen > window and chosen >= 0.5 * n, said)


SYSTEM = System(
    title="TokenSelect",
    paper=Paper("TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic "
                "Token-Level KV Cache Selection", "2411.02886"),
    claim="one list of rows per layer, by soft votes of all heads, keeps answers: attention is up to 23.84 times, the "
    "whole 2.28 times as fast, and texts may be longer than the model was trained for.",
    conditions=("models of billions of weights on A100", "InfiniteBench, RULER, LongBench",
                "lists are used again while queries are alike; prompts choose in chunks of 512"),
    method=ANEW,
    baseline=Setting(),
    control=drawn(TEXT),
    control_is="as many rows, first and last ones among them, the others drawn at random per head",
    line="one list of rows a layer by votes: equal answers, 2.28 times as fast, texts beyond the context",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes read while decoding",
                "first + k + local rows + an unrotated key of every row that is ranked + keys turned back, once",
                lambda case: read(case, case.method), closed),
    ),
    arithmetic=(KnobRatio("KV bytes read while decoding", read),),
    quality=long_texts(chosen, drawn),
    attempts=(
        Attempt("cost", f"lists of layers after stretches of code, theta={THETA} against none", "fewer are made",
                used_again),
        Attempt("answers", f"right answers, theta={THETA} less none", "all of it above -10 points",
                partial(answers, ours=AGAIN, theirs=ANEW), model="pocket"),
        Attempt("answers", "right answers, prompts that choose in chunks of 128 less dense ones",
                "all of it above -10 points", partial(answers, ours=CHUNKED, theirs=Setting()), model="pocket"),
        Attempt("answers", "likelihood of right answers that stand in such a prompt, less that in dense ones",
                "all of it above -0.1 nats", partial(told_apart, theirs=Setting(), allowed=0.1), model="pocket"),
        Attempt("control", "likelihood of right answers in such a prompt, less that with chunks drawn at random",
                "all of it above 0", partial(told_apart, theirs=DRAWN, allowed=0.0), "answers", "pocket"),
        Attempt("answers", f"pass keys in texts of 12,000 tokens, {STRANGER}, whose context is 8,192",
                "half of them at least, and more than a window finds", beyond, model=STRANGER),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192, settings={"method": chosen(8192)}),
             Timing("seconds per prompt of 8,192 tokens that chooses in chunks of 512 (the same)", 1.0,
                    seconds=loads.per_token, load=loads.lone(8192, 1), model="random-dense",
                    settings={"method": LONG})),
)  # fmt: skip
