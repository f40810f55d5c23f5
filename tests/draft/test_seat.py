"""A desk says what a draft model would say that reads everything anew, wherever it stands; and whoever is killed, no
token changes."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from phasewise.child import Channel
from phasewise.methods.draft import _seat
from phasewise.methods.draft._desk import Desk, Order
from phasewise.methods.draft._seat import LIVES, Furniture, Inline, Process, Seat, serve
from phasewise.methods.draft.pearl import PEARL, _Pearl
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Purpose, pick, uniform
from tests import tiny
from tests.draft.relatives import relative

PROMPTS = tiny.prompts(30, 7, 55)
N = 24  # tokens of each
RULES = [
    {"temperature": 0.0}, {"temperature": 0.9, "seed": 1, "frequency_penalty": 1.0},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.2},
]  # fmt: skip


def params(n: int) -> list[Params]:
    return [Params(max_tokens=n, ignore_eos=True, **rules) for rules in RULES]  # type: ignore[arg-type]


def order(key: int, prompt: int, tokens: Sequence[int], guesses: int, rules: dict[str, Any]) -> Order:
    about = Request(tokens[:prompt], Params(**rules)).header() | {"tokens": []}
    return Order(key, about, list(tokens), guesses)


def desk() -> Desk:
    return Desk(tiny.load("tiny-draft"), "standard")


# ---- the desk
def wandering(rounds: int) -> Iterator[list[Order]]:
    """Texts that go on as was guessed, otherwise, or not at all; some leave, and are nobody's."""
    rng, texts = Random(0), {key: list(prompt) for key, prompt in enumerate(PROMPTS)}
    for _ in range(rounds):
        orders = []
        for key, text in texts.items():
            if rng.random() < 0.2:
                continue
            least = len(PROMPTS[key])
            del text[max(least, len(text) - rng.choice([0, 0, 1, 2, 4])) :]
            text += [rng.randrange(3, tiny.VOCAB) for _ in range(rng.choice([0, 0, 1, 3]))]
            orders.append(order(key, least, text, rng.choice([0, 1, 2, 4]), RULES[key]))
        if orders:
            yield orders


def test_guesses_are_those_of_a_model_that_reads_everything_anew() -> None:
    """Greedy ones and drawn ones with penalties, together, over texts that are taken back and go on otherwise; also
    where they go on with what was guessed."""
    here, known = desk(), dict[int, list[int]]()
    for step, orders in enumerate(wandering(25)):
        if step % 2:  # accept some of what was guessed
            orders = [
                order(o.key, len(PROMPTS[o.key]), known.get(o.key, o.tokens), o.guesses, RULES[o.key]) for o in orders
            ]
        found = here.work(orders)
        assert found == [desk().work([each])[0] for each in orders]
        assert [len(guesses.tokens) for guesses in found] == [each.guesses for each in orders]
        known = {each.key: each.tokens + guesses.tokens[: 1 + step % 3] for each, guesses in zip(orders, found)}


def test_what_guesses_were_drawn_from_comes_with_them_and_through_a_message() -> None:
    """Of drawn ones; each row is the draft model's distribution there, and the guess is the number's draw from it."""
    orders = [order(key, len(prompt), prompt, 3, RULES[key]) for key, prompt in enumerate(PROMPTS)]
    plain, told = desk().work(orders), Desk(tiny.load("tiny-draft"), "standard", tells=True).work(orders)
    assert [guesses.tokens for guesses in told] == [guesses.tokens for guesses in plain]
    assert told[0].q is None and all(guesses.q is None for guesses in plain)
    for guesses, rules in zip(told[1:], RULES[1:]):
        assert guesses.q is not None and guesses.q.shape == (3, tiny.VOCAB)
        torch.testing.assert_close(guesses.q.sum(-1), torch.ones(3))
        at = len(PROMPTS[rules["seed"]])
        us = [uniform(rules["seed"], at + i, Purpose.SAMPLE) for i in range(3)]
        assert [pick(q, u) for q, u in zip(guesses.q, us)] == guesses.tokens
        there = _seat._read(*json.loads(json.dumps(_seat._written(guesses))))
        assert there.tokens == guesses.tokens and there.q is not None and torch.equal(there.q, guesses.q)


def test_no_token_is_read_twice_while_guesses_hold() -> None:
    here, tokens = desk(), list(PROMPTS[0])
    for _ in range(6):
        before = here.companion.own.rows
        (guesses,) = here.work([order(0, 30, tokens, 4, RULES[0])])
        assert here.companion.own.rows - before == (4 if before else 30 + 3)
        tokens += guesses.tokens
    assert here.passes == 6 * 4
    here.work([order(0, 30, [*tokens[:-2], 5], 1, RULES[0])])
    assert here.companion.own.rows - before == 4 + 1, "a rejection costs the row of the token that came instead"


def test_forgotten_texts_leave_nothing() -> None:
    here = desk()
    here.work([order(key, len(prompt), prompt, 3, RULES[0]) for key, prompt in enumerate(PROMPTS)])
    assert here.held > 0
    for key in (0, 1, 2, 2, 7):
        here.forget(key)
    assert here.held == 0 and not here.texts


# ---- seats
class _Thread:
    """Stands for a child: serves until its channel ends."""

    pid = 0

    def __init__(self, desk: Desk) -> None:
        ours, theirs = socket.socketpair()
        self.channel, self.sock = Channel(ours), ours
        self.thread = threading.Thread(target=self.serve, args=(Channel(theirs), desk), daemon=True)
        self.thread.start()

    @staticmethod
    def serve(channel: Channel, desk: Desk) -> None:
        serve(channel, desk)
        channel.close()

    def hang_up(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        with suppress(OSError):
            self.hang_up()
        self.channel.close()
        self.thread.join()


class Threaded(Process):
    """The messages of `Process`, to a desk in another thread."""

    def __init__(self, model: str) -> None:
        super().__init__(Furniture("", "", "", "", 1))
        self.model, self.started = model, 0

    def _start(self) -> Any:
        self.started += 1
        self.desk = Desk(tiny.load(self.model), "standard")
        return _Thread(self.desk)

    def kill(self) -> None:
        for child in self._children:
            child.hang_up()


def placed(seat: Seat, **knobs: Any) -> Placed:
    """An engine whose drafter sits there."""
    made = tiny.engine(
        {"draft": f"pearl:model={relative()},where=inline" + "".join(f",{k}={v}" for k, v in knobs.items())}
    )
    drafter = made.recipes[""].phases[1].decode.drafter
    assert isinstance(drafter, _Pearl)
    drafter.seat.close()
    drafter.seat = seat
    return made


@cache
def inline(**knobs: int) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens and counters of the twin."""
    engine = placed(Inline(Desk(tiny.load(str(relative())), "standard")), **knobs)
    outs = tiny.outs(tiny.run(engine, PROMPTS, params(N)))
    assert 0 < engine.counters.accepted < engine.counters.drafted
    return outs, engine.counters.as_dict()


def test_tokens_are_those_of_plain_decoding() -> None:
    assert inline()[0] == tiny.plain(PROMPTS, params(N))


@pytest.mark.parametrize("knobs", [{}, {"k": 2, "chunk": 9}])
def test_messages_say_what_the_twin_is_told(knobs: dict[str, int]) -> None:
    seat = Threaded(str(relative()))
    engine = placed(seat, **knobs)
    requests = tiny.run(engine, PROMPTS, params(N))
    assert (tiny.outs(requests), engine.counters.as_dict()) == inline(**knobs)
    engine.close()
    assert not seat.desk.texts and seat.desk.held == 0, "whoever has left is forgotten"


def test_killed_before_every_step() -> None:
    """It is started again and told everything anew: the same guesses, so the same rounds."""
    outs, counters = inline()
    seat = Threaded(str(relative()))
    engine = placed(seat)
    requests = [Request(prompt, rules) for prompt, rules in zip(PROMPTS, params(N))]
    for request in requests:
        engine.add(request)
    while any(request.left is None for request in requests):
        engine.step()
        seat.kill()
    seen = engine.counters.as_dict()
    assert tiny.outs(requests) == outs and seat.started > 10
    assert {name for name in seen if seen[name] != counters[name]} <= {"draft_forwards"}


def test_one_that_always_dies_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After a few attempts the engine goes on without guesses, and says so once."""
    want = inline()[0]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    engine = placed(seat := Process(Furniture("", "", "", "", 1)))
    assert tiny.outs(tiny.run(engine, PROMPTS, params(N))) == want
    assert engine.counters.drafted == 0 and seat.pid is None
    words = [
        record.getMessage() for record in caplog.records if "draft model's process was lost" in record.getMessage()
    ]
    assert len(words) == LIVES and "nothing is guessed" in words[-1]


def test_one_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(mute))
    monkeypatch.setattr(_seat, "LOADING", 0.02)
    engine = placed(Process(Furniture("", "", "", "", 1)))
    assert tiny.outs(tiny.run(engine, PROMPTS[:1], tiny.greedy(6)))
    assert engine.counters.drafted == 0


def gone(pid: int) -> bool:
    """No process, and no zombie that nobody has waited for."""
    return not Path(f"/proc/{pid}").exists()


def test_a_seat_that_nobody_holds_takes_its_process_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(mute))
    seat = Process(Furniture("", "", "", "", 1))
    seat.post([order(0, 7, PROMPTS[1], 2, RULES[0])])
    pid = seat.pid
    assert pid is not None and not gone(pid)
    del seat
    gc.collect()
    assert gone(pid)


# ---- a real process
@pytest.fixture
def real() -> Iterator[Placed]:
    engine = tiny.engine({"draft": f"pearl:model={relative()},where=process"})
    yield engine
    engine.close()


def test_a_process_of_its_own(real: Placed) -> None:
    """The twin's tokens and counters; killed in the midst of a run, it is replaced, and tokens and rounds are the
    same; with the engine it is gone, and so are those that were killed."""
    want = inline()
    assert (tiny.outs(tiny.run(real, PROMPTS, params(N))), real.counters.as_dict()) == want
    drafter = real.recipes[""].phases[1].decode.drafter
    assert drafter.knobs == PEARL(str(relative())) and isinstance(drafter.seat, Process)
    first = drafter.seat.pid
    requests = [Request(prompt, rules) for prompt, rules in zip(PROMPTS, params(N))]
    for request in requests:
        real.add(request)
    while requests[0].n_out < 10:
        real.step()
    os.kill(first, signal.SIGKILL)
    tiny.finish(real, requests)
    second = drafter.seat.pid
    assert tiny.outs(requests) == want[0] and first != second
    assert real.counters.drafted == 2 * want[1]["drafted"] and real.counters.accepted == 2 * want[1]["accepted"]
    real.close()
    assert gone(first) and gone(second) and drafter.seat.pid is None
