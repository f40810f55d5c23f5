"""Options that several commands share, as dataclasses: the model, its limits, and one method per verb."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise import catalog, recipes
from phasewise.errors import UserError
from phasewise.model.weights_form import loaded_form

if TYPE_CHECKING:
    from phasewise.engine.limits import Limits
    from phasewise.llm import LLM

DRAFTER = "paced"  # what `serve` and `tune` draft with unasked: answers stay the model's own, and it rarely costs time
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """A number of bytes written as 536870912, 512M, 1.5G or 2GiB (powers of 1024). Raises UserError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if size <= 0:
        raise UserError(f"{text!r} is not a size: write a positive number of bytes such as 512M or 2G")
    return size


def parse_folder(text: str) -> tuple[str, int]:
    """A folder and its bound in bytes, written as DIR:SIZE. Raises UserError."""
    folder, colon, size = text.rpartition(":")
    if not (folder and colon):
        raise UserError(f"--kv-disk {text}: write a folder and its bound, such as /var/cache/kv:8G")
    return folder, parse_bytes(size)


def _method(verb: str) -> Any:
    """The option of one verb; its help lists the methods without importing any of them."""
    question = catalog.QUESTIONS[verb].rstrip("?")
    return typer.Option(
        f"--{verb}",
        metavar="METHOD",
        help=f"{question[0].upper()}{question[1:]}: {', '.join(catalog.names(verb))}.",
        rich_help_panel="One method per verb: NAME or NAME:KNOB=VALUE,... (see `phasewise methods`)",
        show_default=False,
    )


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine: a model, limits, and a method per verb (None: the verb's default)."""

    model: Annotated[
        str, typer.Option(help="A name (see `phasewise models`), a directory, a .gguf file or a hub id.")
    ] = "pocket"
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|bfloat16|float16|int8",
            help="Precision of the weights. Default: the checkpoint's own. int8 rounds the weights and "
            "computes in bfloat16.",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="Form that linear layers are rounded into and kept in, such as int4:group=64 or int8:group=32. "
            "Default: as the checkpoint has them. To calibrate it: `phasewise convert weights`.",
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda", help="Device to compute on. Workers in processes of their own use the CPU only."
        ),
    ] = "cpu"
    kv_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most memory for KV, such as 512M or 2G. Default: a quarter of memory, at most 4G."
        ),
    ] = None
    max_running: Annotated[int, typer.Option(min=1, help="Most requests in one step.")] = 64
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Do not reuse the KV of prompts with a common beginning.")
    ] = False
    kv_host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory beyond --kv-bytes for KV of prompts that found no more room there, such as 4G. Default: none.",
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        typer.Option(
            metavar="DIR:SIZE",
            help="Folder for KV of prompts, and its bound, such as /var/cache/kv:8G. It is found again after a "
            "restart by the same model with the same methods. One server has it at a time. Default: none.",
        ),
    ] = None
    cluster: Annotated[
        str,
        typer.Option(
            metavar="auto|processes|inline|ray[:KNOB=VALUE,...]",
            help="Where a placement's workers run: in processes of this machine, inline in this thread, or "
            "on the hosts of a Ray cluster. auto: in processes where the placement has several "
            "workers.",
        ),
    ] = "auto"
    exact: Annotated[bool, typer.Option("--exact", help="Refuse methods that may change answers, also in recipes.")] = (
        False
    )
    place: Annotated[str | None, _method("place")] = None
    schedule: Annotated[str | None, _method("schedule")] = None
    decode: Annotated[str | None, _method("decode")] = None
    draft: Annotated[str | None, _method("draft")] = None
    verify: Annotated[str | None, _method("verify")] = None
    attend: Annotated[str | None, _method("attend")] = None
    evict: Annotated[str | None, _method("evict")] = None
    store: Annotated[str | None, _method("store")] = None
    skip: Annotated[str | None, _method("skip")] = None
    sample: Annotated[str | None, _method("sample")] = None

    @property
    def verbs(self) -> dict[str, str]:
        """{verb: text} of the verbs that were given."""
        return recipes.chosen({verb: getattr(self, verb) for verb in catalog.VERBS})

    @property
    def speaks_of_drafts(self) -> bool:
        """Whether the user chose a decode method, a drafter (or none) or a verifier."""
        return any((self.decode, self.draft, self.verify))

    def limits(self) -> Limits:
        from phasewise.engine.limits import Limits

        budget = None if self.kv_bytes is None else parse_bytes(self.kv_bytes)
        host = 0 if self.kv_host is None else parse_bytes(self.kv_host)
        folder, size = (None, 0) if self.kv_disk is None else parse_folder(self.kv_disk)
        return Limits(budget, self.max_running, not self.no_prefix_cache, self.cluster, self.exact, host, folder, size)

    def on_the_processor(self, what: str) -> None:
        """Raise UserError if another device than the CPU was chosen for `what`, which concerns the CPU."""
        if self.device != "cpu":
            raise UserError(f"--device {self.device}: {what} of this machine's processor: leave --device out")

    def check(self, named: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """Raise UserError for a mistake, also in recipes, that shows before anything is loaded."""
        for size in (self.kv_bytes, self.kv_host):
            if size is not None:
                parse_bytes(size)
        if self.kv_disk is not None:
            parse_folder(self.kv_disk)
        loaded_form(self.weights)
        for verb, text in self.verbs.items():
            catalog.known(verb, text)
        if self.exact:
            self._refuse_lossy(named or {})

    def _refuse_lossy(self, named: Mapping[str, Mapping[str, str]]) -> None:
        from phasewise.options import parse, parse_recipes, refuse_lossy

        verbs, extra = self.verbs, {}
        if self.verify and not (self.draft or self.decode):  # its drafters are named elsewhere
            extra["verify"] = catalog.build("verify", verbs.pop("verify"))
        refuse_lossy({"": parse(verbs) | extra, **parse_recipes(self.verbs, named)})

    def llm(
        self, recipes: Mapping[str, Mapping[str, str]] | None = None, loras: Mapping[str, str] | None = None,
        **limits: Any,
    ) -> LLM:  # fmt: skip
        """The model with its methods, recipes and adapters; `limits`: what is said of them elsewhere. Raises UserError
        naming the option that does not fit."""
        self.check()
        from phasewise.cli.progress import say, working
        from phasewise.llm import LLM
        from phasewise.load import model_path

        model_path(self.model, say=say)  # what must be fetched has a bar of its own, which a spinner would spoil
        with working(f"loading {self.model}"):
            verbs: dict[str, Any] = dict(self.verbs)
            bounds = dataclasses.replace(self.limits(), **limits)
            return LLM(
                self.model, dtype=self.dtype, device=self.device, weights=self.weights, limits=bounds, recipes=recipes,
                loras=loras, **verbs,
            )  # fmt: skip

    def served(self) -> list[str]:
        """The same options as command-line words for `phasewise serve`, whose own model and drafter are others."""
        words = dataclasses.replace(self, model=DEFAULTS.model).arguments()
        return ["--model", self.model, *words, *([] if self.speaks_of_drafts else ["--draft", recipes.NO_DRAFT])]

    def arguments(self) -> list[str]:
        """The same options as command-line words, for a process of its own."""
        words: list[str] = []
        for field in dataclasses.fields(self):
            value, option = getattr(self, field.name), "--" + field.name.replace("_", "-")
            if value != field.default:
                words += [option] if value is True else [option, str(value)]
        return words


DEFAULTS = EngineOptions()


def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with each parameter whose type is a dataclass replaced by that dataclass's fields as options.

    The parameter's default has the options' defaults.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(_option(name, parameter.default, hints[name]))
            continue
        inner = typing.get_type_hints(groups[name], include_extras=True)
        fields = dataclasses.fields(groups[name])
        parameters += [_option(f.name, getattr(parameter.default, f.name), inner[f.name]) for f in fields]

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        return command(**given, **made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
