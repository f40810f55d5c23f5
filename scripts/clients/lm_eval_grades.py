"""How lm-eval grades the tasks that lm_eval_tasks.py writes: as `phasewise eval` does. Needs nothing but Python."""

from __future__ import annotations

import json
import math
from typing import Any


def generated(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether a reply is right: after trimming; of JSON the value; of sums the result; of code the next line."""
    reply, answer = results[0], doc["answer"]
    match doc["row"]:
        case "json":
            right = _parsed(reply) == json.loads(answer)
        case "arithmetic":
            right = reply.rpartition("so ")[2].strip() == answer.rpartition("so ")[2]
        case "next line":
            right = next((line.rstrip() for line in reply.splitlines() if line.strip()), "") == answer
        case _:
            right = reply.strip() == answer
    return {"exact": float(right)}


def likely(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """The loss of a text, per token and per byte."""
    value = results[0] if isinstance(results, list | tuple) else results
    value = value[0] if isinstance(value, list | tuple) else value
    return {"nats_per_token": -value / doc["tokens"], "bits_per_byte": -value / math.log(2) / doc["bytes"]}


def _parsed(reply: str) -> object:
    try:
        return json.loads(reply)
    except ValueError:
        return None
