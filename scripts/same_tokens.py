"""The same tokens alone, in a batch, after a prefix hit and with drafts: counts the answers that are equal.

    python scripts/same_tokens.py [MODEL] [--dtype float32] [--questions 12] [--tokens 64]

Every question is asked by itself in an engine without a prefix cache, then all at once in one engine, then all at once
again, so that every prompt is found in the prefix cache, and once more in an engine that drafts. Greedy. Exits with 1
where an answer differs.
"""

from __future__ import annotations

import argparse
import sys

from phasewise import LLM
from phasewise.engine.limits import Limits

SYSTEM = "You are a helpful assistant. Answer in one or two sentences."
QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "What is 17 + 25?", "List the planets.",
    "Name three rivers of Europe.", "What is a prime number?", "Who wrote Hamlet?", "What do bees make?",
    "Translate 'good morning' into Spanish.", "What is the boiling point of water?", "Why do leaves fall in autumn?",
    "Write a sentence about a lighthouse.",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()

    alone = LLM(args.model, dtype=args.dtype, limits=Limits(prefix_cache=False))
    prompts = [
        alone.encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        for question in QUESTIONS[: args.questions]
    ]
    want = [alone.generate([prompt], max_tokens=args.tokens)[0].tokens for prompt in prompts]
    engine = LLM(args.model, dtype=args.dtype)
    drafting = LLM(args.model, dtype=args.dtype, draft="prompt_lookup")
    differ = 0
    for way, llm in (("in a batch", engine), ("after a prefix hit", engine), ("with drafts", drafting)):
        got = [output.tokens for output in llm.generate(prompts, max_tokens=args.tokens)]
        same = sum(mine == theirs for mine, theirs in zip(got, want, strict=True))
        differ += len(want) - same
        print(f"{way}: {same} of {len(want)} answers have the tokens they have alone")
    hits, drafted = engine.engine.counters.prefix_hits, drafting.engine.counters.accepted
    print(f"{args.model} in {args.dtype}: {hits} prompt tokens from the prefix cache, {drafted} accepted drafts")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
