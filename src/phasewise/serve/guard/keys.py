"""API keys from a file: who may ask, found in constant time, and read again while the server runs.

[keys.alice]
sha256 = "9f86d0..."            # `phasewise keys new alice` prints it; a list while an old key is still in use
requests_per_minute = 60
tokens_per_minute = 100000      # prompt and output
concurrent = 4
max_tokens = 1024               # of one answer
max_prompt = 4096               # tokens
max_n = 4                       # answers of one request
timeout = 60                    # seconds that a request may take
models = ["smollm2@fast"]       # names as /v1/models lists them; without it, all
metrics = true                  # may read /metrics
loras = true                    # may load and unload adapters, where --lora-dir lets anybody
priority = -10                  # its requests go before those of larger ones (0); each may ask to go later

The keys themselves are nowhere: only their hashes are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import secrets
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phasewise.errors import UserError, near
from phasewise.serve.failures import ApiError
from phasewise.serve.guard.policy import Caps
from phasewise.serve.guard.quota import Clock, Key, Quota

log = logging.getLogger(__name__)
PREFIX = "pw-"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
DIGEST = re.compile(r"[0-9a-f]{64}")
RATES = ("requests_per_minute", "tokens_per_minute", "concurrent")
CAPS = ("max_prompt", "max_n", "max_tokens")
FIRST_LAST = 1000  # a priority lies between this below and above 0
FIELDS = ("sha256", "models", "metrics", "loras", "timeout", "priority", *RATES, *CAPS)


def new_key() -> tuple[str, str]:
    """A key of 256 random bits, and its hash for the file."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, hashlib.sha256(secret.encode()).hexdigest()


def check_name(name: str) -> None:
    """Raise UserError for what is no name of a key: it stands in logs and metrics."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name for a key: use up to 64 letters, digits, dots, dashes and underscores")


class KeyRing(Collector):
    """The keys of a file, and what each has used; their names and use are metrics. `models`: what the server has."""

    def __init__(self, path: Path, models: Collection[str], clock: Clock = time.monotonic) -> None:
        self._path, self._models, self._clock = path, models, clock
        self._quotas: dict[str, Quota] = {}
        self._digests: list[tuple[bytes, Quota]] = []
        self.load()

    def load(self) -> None:
        """Read the file; keys that were there keep what they have used. Raises UserError, which changes nothing."""
        keys = read(self._path, self._models)
        quotas = {}
        for key in keys:
            quotas[key.name] = self._quotas.get(key.name) or Quota(key, self._clock)
            quotas[key.name].change(key)
        self._quotas = quotas
        self._digests = [(digest, quotas[key.name]) for key in keys for digest in key.digests]

    def reload(self) -> None:
        """Read the file again while requests are served; with a broken one, the old keys stay."""
        try:
            self.load()
        except UserError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.warning("%s has been read again: %d keys", self._path.name, len(self._quotas))

    def named(self, name: str) -> Quota | None:
        """The quota of the key of this name; None if the file has it no longer."""
        return self._quotas.get(name)

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> Quota:
        """The quota of the key that a request's headers carry; every hash is compared, whichever it is. Raises ApiError
        401."""
        given = credentials(headers)
        if len(given) != 1:
            what = "two different API keys came" if given else "there is no API key"
            raise ApiError(
                401, f"{what}: send one, as Authorization: Bearer KEY or as x-api-key", code="invalid_api_key"
            )
        digest = hashlib.sha256(given.pop()).digest()
        found = None
        for known, quota in self._digests:
            if hmac.compare_digest(known, digest):
                found = quota
        if found is None:
            raise ApiError(401, "this API key is not known here", code="invalid_api_key")
        return found

    def collect(self) -> Iterator[Metric]:
        """Use by key, for `/metrics`."""
        used = CounterMetricFamily("phasewise_key_requests", "Requests let in, by key", labels=["key"])
        tokens = CounterMetricFamily("phasewise_key_tokens", "Tokens used, by key and kind", labels=["key", "kind"])
        refused = CounterMetricFamily(
            "phasewise_key_refused", "Requests refused, by key and what was used up", labels=["key", "limit"]
        )
        running = GaugeMetricFamily("phasewise_key_requests_running", "Requests under way, by key", labels=["key"])
        for name, quota in self._quotas.items():
            used.add_metric([name], quota.used["requests"])
            running.add_metric([name], quota.running)
            for kind in ("prompt", "output"):
                tokens.add_metric([name, kind], quota.used[kind])
            for limit in ("requests", "tokens", "concurrent"):
                refused.add_metric([name, limit], quota.refused[limit])
        yield from (used, tokens, refused, running)


def credentials(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """The different keys that headers carry."""
    found = set()
    for name, value in headers:
        scheme, _, secret = value.strip().partition(b" ")
        if name == b"x-api-key":
            found.add(value.strip())
        elif name == b"authorization" and scheme.lower() == b"bearer":
            found.add(secret.strip())
    return found - {b""}


def read(path: Path, models: Collection[str] | None = None) -> list[Key]:
    """The keys in a file; None: which models there are is not known yet. Raises UserError naming what is wrong."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    table = said.pop("keys", None)
    if said or not isinstance(table, Mapping) or not all(isinstance(each, Mapping) for each in table.values()):
        raise UserError(f"{path} must hold tables [keys.NAME] and nothing else; `phasewise keys new NAME` prints one")
    try:
        keys = [_key(name, fields, models) for name, fields in table.items()]
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    owners: dict[bytes, str] = {}
    for key in keys:
        for digest in key.digests:
            if owners.setdefault(digest, key.name) != key.name:
                raise UserError(f"{path}: {owners[digest]!r} and {key.name!r} have the same key: make another for one")
    return keys


def _key(name: str, fields: Mapping[str, Any], models: Collection[str] | None) -> Key:
    check_name(name)
    for field, value in fields.items():
        if field not in FIELDS:
            raise UserError(f"key {name!r}: unknown field {field!r}. {near(field, FIELDS)}")
        if field in RATES + CAPS and not (type(value) is int and value > 0):
            raise UserError(f"key {name!r}: {field} = {value!r} is not a positive whole number")
    timeout = fields.get("timeout")
    if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout < math.inf):
        raise UserError(f"key {name!r}: timeout = {timeout!r} is not a positive number of seconds")
    for field in ("metrics", "loras"):
        if not isinstance(fields.get(field, False), bool):
            raise UserError(f"key {name!r}: {field} must be true or false")
    priority = fields.get("priority", 0)
    if not (type(priority) is int and -FIRST_LAST <= priority <= FIRST_LAST):
        raise UserError(
            f"key {name!r}: priority = {priority!r} is not a whole number from {-FIRST_LAST} to {FIRST_LAST}"
        )
    return Key(
        name, _digests(name, fields.get("sha256")), **{field: fields.get(field) for field in RATES},
        caps=Caps(**{field: fields.get(field) for field in CAPS}, timeout=timeout), loras=fields.get("loras", False),
        models=_allowed(name, fields.get("models"), models), metrics=fields.get("metrics", False), priority=priority,
    )  # fmt: skip


def _digests(name: str, said: Any) -> tuple[bytes, ...]:
    """The hashes of the texts that are this key: one, or a list of them."""
    digests = [said] if isinstance(said, str) else said
    if not (isinstance(digests, list) and digests and all(isinstance(d, str) and DIGEST.fullmatch(d) for d in digests)):
        raise UserError(f"key {name!r}: sha256 must be 64 digits of 0-9 and a-f, or a list of such hashes")
    return tuple(map(bytes.fromhex, digests))


def _allowed(name: str, said: Any, models: Collection[str] | None) -> tuple[str, ...] | None:
    """The models that a key may ask for; None: all. `models`: those that there are, if that is known yet."""
    if said is None:
        return None
    if not (isinstance(said, list) and all(isinstance(each, str) for each in said)):
        raise UserError(f"key {name!r}: models must be a list of names")
    unknown = None if models is None else next((each for each in said if each not in models), None)
    if models is not None and unknown is not None:
        raise UserError(f"key {name!r}: there is no model {unknown!r} here. {near(unknown, models)}")
    return tuple(said)
