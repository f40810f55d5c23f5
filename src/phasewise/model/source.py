"""A model's files, whatever their form: what its settings, tensors, tokenizer and templates are read from."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from phasewise.gguf import vocabulary
from phasewise.gguf.checkpoint import GGUFModel, shards
from phasewise.model import instead
from phasewise.model.directory import Directory
from phasewise.model.hub import resolve
from phasewise.model.raw import RawConfig
from phasewise.model.tuned import FILE, MergedLoRA
from phasewise.model.weights import Tensors


class Source(Protocol):
    """The files of one model. Everything raises UserError naming the file that is missing, broken or not supported."""

    path: Path  # a directory or a file; names the model in errors
    folder: Path  # where what was trained for the model may lie

    def settings(self) -> RawConfig:
        """The architecture as config.json has it."""
        ...

    def generation(self) -> dict[str, Any]:
        """Returns what generation_config.json says; empty where there is none."""
        ...

    def tensors(self) -> Tensors: ...

    def tokenizer(self) -> Backend: ...

    def special(self) -> dict[str, str]:
        """The texts of bos_token, eos_token and their like; those that are not set are left out."""
        ...

    def templates(self) -> dict[str, str]:
        """Chat templates by name."""
        ...

    def stamp(self) -> tuple[Any, ...]:
        """Changes when the files do."""
        ...


class GGUF:
    """A .gguf file, or all files of one in shards, given any of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent

    def _model(self) -> GGUFModel:
        return _opened(self.path, self.stamp())

    def settings(self) -> RawConfig:
        return RawConfig(self._model().settings, self.path)

    def generation(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> Tensors:
        return self._model()

    def tokenizer(self) -> Backend:
        return vocabulary.tokenizer(self._model().meta)

    def special(self) -> dict[str, str]:
        return vocabulary.special(self._model().meta)

    def templates(self) -> dict[str, str]:
        return vocabulary.templates(self._model().meta)

    def stamp(self) -> tuple[Any, ...]:
        found = [(path.name, path.stat()) for path in shards(self.path) if path.is_file()]
        return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)


@lru_cache(maxsize=2)  # settings, tensors and tokenizer are asked for one after the other
def _opened(path: Path, stamp: tuple[Any, ...]) -> GGUFModel:
    return GGUFModel(path)


def forget() -> None:
    """Keep no file open or mapped for whoever asks next."""
    _opened.cache_clear()


def source(path: str | Path) -> Source:
    """Opens a model at a path: a directory in Hugging Face layout, one with low-rank weights for the model beside it or
    with tensors instead of some of its own, a .gguf file; or the download of a hub id."""
    found = resolve(path)
    if found.is_file():
        return GGUF(found)
    if (found / instead.FILE).is_file():
        return instead.Instead(found)
    return MergedLoRA(found) if (found / FILE).is_file() else Directory(found)


def copy_vocabulary(files: Source, target: Path) -> None:
    """Write the tokenizer, its special tokens and chat templates into `target`. UserError where the model has none."""
    files.tokenizer().save(str(target / "tokenizer.json"))
    templates = files.templates()
    chat: Any = [{"name": name, "template": text} for name, text in templates.items()]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special()}
    if templates:
        config["chat_template"] = templates["default"] if list(templates) == ["default"] else chat
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
