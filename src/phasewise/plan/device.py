"""Devices as files: each number with its unit, and with its source or how it was inferred."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phasewise.errors import UserError, near

HERE = Path(__file__).parent / "devices"
UNITS = {  # what a file may say of a device, in which unit; True = it must
    "flops": ("FLOP/s", True),
    "bandwidth": ("B/s", True),
    "memory": ("B", True),
    "kv_bandwidth": ("B/s", False),
    "kv_memory": ("B", False),
    "link": ("B/s", False),
    "latency": ("s", False),
    "overhead": ("s", False),
    "flops_share": ("1", False),
    "bandwidth_share": ("1", False),
    "tile": ("row", False),
    "power": ("W", False),
    "idle": ("W", False),
    "price": ("$/h", False),
}


@dataclass(frozen=True)
class Number:
    """One number of a device file. `source` is where it was published; None where it was inferred, `why`."""

    value: float
    unit: str
    source: str | None
    why: str | None

    @property
    def inferred(self) -> bool:
        return self.source is None


@dataclass(frozen=True)
class Device:
    """The rates and sizes of one device.

    `flops` and `bandwidth` are peaks, of which `flops_share` and `bandwidth_share` are reached. KV lies elsewhere where
    there is a `kv_bandwidth`. `link` and `latency`: to another such device. `overhead`: seconds of any step. `tile`:
    prompt rows come in multiples of so many. `power` at full load, `idle` with none; `price` of an hour.
    """

    name: str
    about: str
    flops: float
    bandwidth: float
    memory: float
    kv_bandwidth: float = 0.0
    kv_memory: float = 0.0
    link: float = 0.0
    latency: float = 0.0
    overhead: float = 0.0
    flops_share: float = 1.0
    bandwidth_share: float = 1.0
    tile: float = 1.0
    power: float = 0.0
    idle: float = 0.0
    price: float = 0.0
    numbers: dict[str, Number] = field(default_factory=dict, compare=False)


def names() -> list[str]:
    """The devices that the package knows."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def device(name: str) -> Device:
    """A device by name, or by the path of a file of one's own. Raises UserError."""
    if name.endswith(".toml"):
        return read(Path(name).expanduser())
    if name.lower() not in names():
        raise UserError(f"unknown device {name!r}. {near(name, names())} Or give a file of your own: FILE.toml")
    return read(HERE / f"{name.lower()}.toml")


def read(path: Path) -> Device:
    """A device file. Raises UserError naming what it lacks or has wrong."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the device {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the device {str(path)!r} is not TOML: {error}") from error
    where = f"device {path.name}"
    unknown = raw.keys() - UNITS.keys() - {"name", "about"}
    if unknown:
        raise UserError(f"{where}: unknown number {min(unknown)!r}. {near(min(unknown), UNITS)}")
    missing = [name for name, (_, must) in UNITS.items() if must and name not in raw]
    if missing or not isinstance(raw.get("name"), str):
        raise UserError(f"{where} lacks {missing[0] if missing else 'name'}: see {HERE.name}/h100.toml for a whole one")
    numbers = {name: _number(f"{where}: {name}", raw[name], UNITS[name][0]) for name in UNITS if name in raw}
    for share in ("flops_share", "bandwidth_share"):
        if share in numbers and numbers[share].value > 1:
            raise UserError(f"{where}: {share}={numbers[share].value:g} must be at most 1, a share of the peak")
    values = {name: number.value for name, number in numbers.items()}
    return Device(raw["name"], str(raw.get("about", "")), **values, numbers=numbers)


def _number(what: str, plain: Any, unit: str) -> Number:
    if not isinstance(plain, dict) or isinstance(plain.get("value"), bool):
        raise UserError(f"{what} must be a table with value, unit, and source or inferred")
    value = plain.get("value")
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UserError(f"{what}: value={value!r} is not a number of at least 0")
    if plain.get("unit") != unit:
        raise UserError(f"{what}: the unit is {plain.get('unit')!r}, but it must be {unit!r}: convert the value")
    source, why = plain.get("source"), plain.get("inferred")
    if (source is None) == (why is None):
        raise UserError(f"{what} needs a source, or else a word on how it was inferred: one of the two")
    if value == 0 and unit in ("FLOP/s", "B/s", "row", "1"):
        raise UserError(f"{what}: value=0 {unit} would make every step endless: give a value above 0")
    return Number(float(value), unit, source, why)
