"""Requests made from the server's own OpenAPI document, good ones and bad ones: none may get a 5xx, a status that the
document does not name, or a body of another shape.

    python scripts/fuzz_api.py URL [--cases 10000] [--seed 0]

The server should be one whose answers are short: `phasewise serve --model pocket --max-tokens 4 --max-n 2`. Prints how
often each endpoint answered with which status, and the first failure with the request that caused it (exit code 1).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy, integers, sets
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

USER = [{"role": "user", "content": "the"}]
PATIENCE = 900  # seconds: where others use the machine, processes may stand still for minutes
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


def fuzz(url: str, cases: int, start: int = 0) -> Counter[tuple[str, int]]:
    """Send about so many requests; {(endpoint, status): how often}. Raises what a check says of the first failure."""
    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    seen: Counter[tuple[str, int]] = Counter()
    plan = [(op, GenerationMode.POSITIVE) for op in operations]
    plan += [(op, GenerationMode.NEGATIVE) for op in operations if op.method == "post" and len(op.body)]
    posts = sum(op.method == "post" for op, _ in plan)
    for operation, mode in plan:
        wanted = cases // posts if operation.method == "post" else max(1, cases // 100)
        sent = _sender(operation.as_strategy(generation_mode=mode), url, seen)
        rules = settings(
            max_examples=wanted, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        seed(start)(rules(sent))()
    return seen


def _sender(cases: SearchStrategy[Case], url: str, seen: Counter[tuple[str, int]]) -> Callable[[], None]:
    @given(case=cases, kept=sets(integers(0, 40), max_size=3))
    def send(case: Case, kept: set[int]) -> None:
        if kept and isinstance(case.body, dict):
            case.body = _thinned(case.body, kept)
        answer = case.call(base_url=url, timeout=PATIENCE)
        seen[case.operation.label, answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    return send


def _thinned(body: dict[str, Any], kept: set[int]) -> dict[str, Any]:
    """A good request with a few of the body's fields: one that has them all is hardly ever good, or bad in one way."""
    good: dict[str, Any] = {"prompt": "the"} if "prompt" in body else {"messages": USER}
    return good | {name: value for at, (name, value) in enumerate(sorted(body.items())) if at in kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seen = fuzz(args.url, args.cases, args.seed)
    for (label, status), count in sorted(seen.items()):
        print(f"{count:>7}  {status}  {label}")
    print(f"{sum(seen.values()):>7}  requests, none with a status or a body that the document does not name")
    return 0


if __name__ == "__main__":
    sys.exit(main())
