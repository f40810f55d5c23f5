"""`phasewise run`: a conversation in the terminal, or a prompt to text on stdout."""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import console
from phasewise.errors import UserError
from phasewise.known.models import every

if TYPE_CHECKING:
    from phasewise.llm import LLM
    from phasewise.request.params import Params


@spread
def run(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="A model (known name, .gguf file, directory), then a prompt. One word that names a model is one.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation that remembers its turns.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of sampling; 0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling. The same seed gives the same text.")] = 0,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Talk to a model in the terminal, or continue a prompt. The text streams to stdout.

    A model alone begins a conversation. A prompt alone is continued by --model.

    [bold]Examples[/]

      phasewise run smollm2
      phasewise run path/to/model.gguf --temperature 0.7
      phasewise run smollm2 "The capital of France is"
      phasewise run "def fibonacci(n):"
      git diff | phasewise run --max-tokens 64
      phasewise run --chat --temperature 0.7
      phasewise run "import os" --draft prompt_lookup:k=6
    """
    source = context.get_parameter_source("model")
    model, prompt = _split(words or [], named=source is not None and source.name == "COMMANDLINE")
    if model is not None:
        engine = dataclasses.replace(engine, model=model)
        chat = chat or prompt is None
    if prompt is None and not chat:
        prompt = _piped()
    llm = engine.llm()
    from phasewise.request.params import Params

    params = Params(max_tokens=max_tokens, temperature=temperature, seed=seed)
    if chat:
        _check_chats(llm)
        Conversation(llm, params).hold(prompt)
    else:
        assert prompt is not None
        _show(llm, prompt, params)


def _split(words: list[str], named: bool) -> tuple[str | None, str | None]:
    """The model and the prompt among the arguments. `named`: --model says which model, so that all is the prompt."""
    if len(words) > 2 or (named and len(words) > 1):
        raise UserError(f"there are {len(words)} arguments {words}: quote a prompt as one")
    if named or not words:
        return None, words[0] if words else None
    if len(words) == 2:
        return words[0], words[1]
    only = words[0]
    if only in every() or _is_model(Path(only).expanduser()):
        return only, None
    if only.lower().endswith(".gguf"):
        raise UserError(f"there is no file {only}: check the path")
    return None, only


def _check_chats(llm: LLM) -> None:
    """Raise UserError for a model without a chat template before anything is typed."""
    try:
        llm.encode_chat([{"role": "user", "content": "Hello!"}])
    except UserError as error:
        raise UserError(f"{error} Or have it continue a prompt: phasewise run {llm.name} 'Once upon a time'") from error


def _is_model(path: Path) -> bool:
    """True for a GGUF file, and for a directory with a checkpoint."""
    try:
        if path.is_dir():
            return (path / "config.json").is_file() or next(path.glob("*.gguf"), None) is not None
        return path.suffix.lower() == ".gguf" and path.is_file()
    except OSError:  # a prompt that is too long for a name
        return False


def _piped() -> str:
    """stdin as a prompt, without the newline that ends it."""
    if sys.stdin.isatty():
        raise UserError("there is no prompt: write one (phasewise run 'def f():'), pipe one in, or add --chat")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UserError("the prompt on stdin is empty: pipe some text in, or write the prompt as an argument")
    return text


def _show(llm: LLM, prompt: str | list[dict[str, str]], params: Params) -> str:
    """Stream a continuation to stdout, then the counters of the work to stderr. Returns the text."""
    before, start = copy.copy(llm.engine.counters), time.perf_counter()
    parts: list[str] = []
    try:
        for text in llm.stream(prompt, params):
            parts.append(text)
            print(text, end="", flush=True)
    finally:
        print(flush=True)
    seconds, work = time.perf_counter() - start, llm.engine.counters - before
    note = f"{work.emitted} tokens in {seconds:.2f} s ({work.emitted / seconds:.0f}/s), {work.forwards} forwards"
    if work.drafted:
        note += f", {work.accepted} of {work.drafted} drafted tokens accepted"
    if sys.stderr.isatty():
        console().print(note, style="dim")
    return "".join(parts)


class Conversation:
    """Turns through the model's chat template. The oldest turns are forgotten when the context is full."""

    def __init__(self, llm: LLM, params: Params) -> None:
        self.llm, self.params = llm, params
        self.messages: list[dict[str, str]] = []

    def hold(self, first: str | None) -> None:
        """Answer `first`, if given, then every line typed, until the end of input or Ctrl-C at the prompt."""
        if first is not None:
            self.say(first)
        for line in _lines():
            self.say(line)

    def say(self, text: str) -> None:
        """Add the user's words, stream the answer, and remember it. Ctrl-C stops the answer only."""
        self.messages.append({"role": "user", "content": text})
        self._forget()
        try:
            answer = _show(self.llm, self.messages, self.params)
        except KeyboardInterrupt:
            self.messages.pop()  # an answer cut short is no example to follow
            return
        self.messages.append({"role": "assistant", "content": answer})

    def _forget(self) -> None:
        """Drop the oldest turns until an answer has room in the context."""
        context = min(self.llm.model.config.max_positions, self.llm.engine.reach(""))
        answer = min(self.params.max_tokens, context // 4)
        while len(self.messages) > 2 and len(self.llm.encode_chat(self.messages)) + answer > context:
            del self.messages[:2]
            console().print("(the oldest turn no longer fits the context and is forgotten)", style="dim")


def _lines() -> Iterator[str]:
    """Non-empty lines of stdin, with a prompt when somebody types them."""
    typed = sys.stdin.isatty()
    if typed:
        import readline  # noqa: F401  (line editing and history for input())

        console().print("Ctrl-D or Ctrl-C leaves; Ctrl-C during an answer stops it.", style="dim")
    try:
        while True:
            line = input("> ") if typed else sys.stdin.readline()
            if not line and not typed:
                return
            if line.strip():
                yield line.rstrip("\n")
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
