"""Forms that the weights of linear layers can be rounded into, such as `int4:group=64`, and how they are written.

So many consecutive inputs of an output share a scale, and a weight is `scale * (level - zero)` with levels of 4 or 8
bits. The zero is the middle level, or one of each group's own (`zeros=true`). What a matrix becomes: `levels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from phasewise.errors import UserError, near
from phasewise.spelling import Spelled, parse_value, read

BITS = {"int4": 4, "int8": 8}
MADE_ONCE = ("lq", "codebook", "nm")  # forms that only `phasewise convert weights` makes: their modules' names
SHORTEST = 32  # inputs of a group: kernels have no block of fewer


@dataclass(frozen=True)
class WeightsForm:
    """Levels of `name`'s bits, with a scale for every `group` inputs. `zeros`: each group has a level of its own that
    stands for 0."""

    name: str = "int4"
    group: int = 64
    zeros: bool = False

    @property
    def bits(self) -> int:
        return BITS[self.name]

    @property
    def middle(self) -> int:
        """The level that stands for 0 where none is chosen."""
        return 1 << (self.bits - 1)

    @property
    def block(self) -> int:
        """Inputs of a block of the kernels' kind: the most that always lie within one group."""
        return 32 if self.bits == 8 else next(size for size in (128, 64, 32) if self.group % size == 0)

    @property
    def kind(self) -> str:
        """The kind of blocks that hold exactly these numbers (`ops/native/levels.py`)."""
        return "Q8_0" if self.bits == 8 else f"INT4_{self.block}" + ("_ZEROS" if self.zeros else "")

    def __str__(self) -> str:
        return f"{self.name}:group={self.group}" + (",zeros=true" if self.zeros else "")


Calibrator = Literal["rtn", "gptq", "awq"]


@dataclass(frozen=True)
class Calibration:
    """How levels are chosen: `rtn` the nearest ones, else by what a calibration text brings to each layer. `act_order`:
    GPTQ takes inputs by how large they are, not as they lie."""

    calibrate: Calibrator = "rtn"
    act_order: bool = False


def parse_form(text: str, option: str = "--weights") -> tuple[WeightsForm, Calibration]:
    """What `int4:group=64,calibrate=gptq` asks for. Raises UserError naming the value that is wrong, and the fix."""
    spelled = _named(text, option)
    kinds = {"group": int, "zeros": bool, "calibrate": Calibrator, "act_order": bool}
    given: dict[str, object] = {}
    for knob, value in spelled.knobs.items():
        if knob not in kinds:
            raise UserError(f"{option} {text}: {spelled.name} has no knob {knob!r}. {near(knob, kinds)}")
        given[knob] = parse_value(str(value), kinds[knob], f"{option} {text}: {knob}")
    own = {field.name for field in fields(Calibration)}
    form = WeightsForm(spelled.name, **{name: value for name, value in given.items() if name not in own})  # type: ignore[arg-type]
    how = Calibration(**{name: value for name, value in given.items() if name in own})  # type: ignore[arg-type]
    if form.group < SHORTEST or form.group % SHORTEST:
        raise UserError(f"{option} {text}: group={form.group} is no multiple of {SHORTEST}, and kernels have no "
                        "shorter blocks: choose 32, 64 or 128")  # fmt: skip
    if form.zeros and form.bits != 4:
        raise UserError(f"{option} {text}: zeros are for int4; levels of 8 bits lie around 0: leave zeros out")
    if how.act_order and how.calibrate != "gptq":
        raise UserError(f"{option} {text}: act_order is GPTQ's: add calibrate=gptq, or leave act_order out")
    return form, how


def _named(text: str, option: str) -> Spelled:
    """The form that is named, and its knobs. Raises UserError for a name that there is not."""
    spelled = read(text, option)
    if spelled.name in MADE_ONCE:
        raise UserError(f"{option} {text}: {spelled.name} is not made while a model is loaded. Make it once, with "
                        f"`phasewise convert weights MODEL OUT --weights {text}`, and load OUT")  # fmt: skip
    if spelled.name not in BITS:
        raise UserError(f"{option} {text}: no form of weights is called {spelled.name!r}. "
                        f"{near(spelled.name, BITS)} As in int4:group=64.")  # fmt: skip
    return spelled


def loaded_form(text: str | None, option: str = "--weights") -> WeightsForm | None:
    """The form that weights are rounded into while they are loaded; None: they stay as they are. Raises UserError."""
    if text is None:
        return None
    form, how = parse_form(text, option)
    if how.calibrate != "rtn":
        raise UserError(f"{option} {text}: while a model is loaded, levels are the nearest ones. Calibrate once, with "
                        f"`phasewise convert weights MODEL OUT --weights {text}`, and load OUT; or leave calibrate "
                        "out")  # fmt: skip
    return form
