"""A run of the laws against one server: a verdict for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal

import httpx

from phasewise.check.client import Busy, Client, Malformed, Refused, models
from phasewise.check.laws import LAWS, Asked, Broken, Law, Skipped
from phasewise.errors import UserError, near

Verdict = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class CheckSettings:
    """What is asked. `seed`: of the prompts; None: others each time, so that nothing of them is cached."""

    model: str | None = None
    tokens: int = 48
    mates: int = 8
    seed: int | None = None


@dataclass(frozen=True)
class Result:
    """The verdict of one law; `why` says what differed, or why it could not be asked."""

    law: str
    says: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True)
class Checked:
    """What a server was asked, and what came of it."""

    url: str
    model: str
    tokens: int
    mates: int
    seed: int
    compared: str  # by what answers were compared: tokens or text
    results: Sequence[Result]

    @property
    def holds(self) -> bool:
        """True if no law is broken."""
        return all(result.verdict != "fail" for result in self.results)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "holds": self.holds}


async def check(
    http: httpx.AsyncClient,
    settings: CheckSettings,
    laws: Sequence[Law] = LAWS,
    tell: Callable[[Result], Any] = lambda result: None,
) -> Checked:
    """Asks a server about each law; `tell` hears of every verdict. Raises UserError where nothing can be asked."""
    names = await models(http)
    model = settings.model or names[0]
    if settings.model is not None and model not in names and "*" not in names:
        raise UserError(f"{http.base_url} has no model {model!r}. {near(model, names)}")
    seed = Random().randrange(1 << 31) if settings.seed is None else settings.seed
    client = Client(http, model)
    try:
        await client.complete("The first word", 4)
    except (Refused, Busy, Malformed) as error:
        raise UserError(f"{http.base_url} does not complete a prompt with {model!r}: {error}") from error
    try:
        scored = (await client.complete("The first word", 4, logprobs=1)).only.tokens is not None
    except (Refused, Busy, Malformed):
        scored = False
    results = []
    for law in laws:
        random = Random(f"{seed} {law.name}")
        asked = Asked(Client(http, model, scored), names, random, settings.tokens, settings.mates)
        results.append(await _one(law, asked))
        tell(results[-1])
    compared = "tokens" if scored else "text"
    return Checked(str(http.base_url), model, settings.tokens, settings.mates, seed, compared, results)


async def _one(law: Law, asked: Asked) -> Result:
    try:
        await law.ask(asked)
    except (Skipped, Busy) as reason:
        return Result(law.name, law.says, "skip", str(reason))
    except Refused as error:
        if law.optional:
            return Result(law.name, law.says, "skip", f"the server does not offer {law.optional} ({error})")
        return Result(law.name, law.says, "fail", str(error))
    except (Broken, Malformed) as error:
        return Result(law.name, law.says, "fail", str(error))
    return Result(law.name, law.says, "pass")
