"""A model in Hugging Face layout: a directory with config.json, safetensors, tokenizer.json and their like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from phasewise.errors import UserError
from phasewise.model.raw import RawConfig, read_json
from phasewise.model.weights import Checkpoint


class Directory:
    """The files of one model. Each is read when it is asked for; UserError when it is missing or broken."""

    def __init__(self, path: Path) -> None:
        self.path = self.folder = path

    def settings(self) -> RawConfig:
        path = self.path / "config.json"
        if not path.is_file():
            raise UserError(f"{self.path} has no config.json. Pass a directory in Hugging Face layout: config.json, "
                            "*.safetensors and tokenizer.json.")  # fmt: skip
        values = read_json(path)
        generation = self.path / "generation_config.json"
        extra = read_json(generation) if generation.is_file() else {}
        ends = [*_ids(extra.get("eos_token_id")), *_ids(values.get("eos_token_id"))]
        return RawConfig({**values, "eos_token_id": list(dict.fromkeys(ends))}, path)

    def tensors(self) -> Checkpoint:
        return Checkpoint(self.path)

    def tokenizer(self) -> Backend:
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{self.path} has no tokenizer.json. Save one there with "
                            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...).")  # fmt: skip
        try:
            return Backend.from_file(str(file))
        except Exception as error:  # the backend raises bare Exception
            raise UserError(f"{file} is not a valid tokenizer ({error}). Download or export it again.") from error

    def special(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            file = self.path / name
            values = read_json(file) if file.is_file() else {}
            for key, value in values.items():
                text = value.get("content") if isinstance(value, dict) else value
                if key.endswith("_token") and not key.startswith("add_") and isinstance(text, str):
                    found[key] = text
        return found

    def templates(self) -> dict[str, str]:
        """Files of their own go before the entry in tokenizer_config.json."""
        config = self.path / "tokenizer_config.json"
        entry = read_json(config).get("chat_template") if config.is_file() else None
        if isinstance(entry, str):
            found = {"default": entry}
        elif isinstance(entry, list):
            found = {str(each.get("name")): str(each.get("template")) for each in entry if isinstance(each, dict)}
        else:
            found = {}
        for file in sorted((self.path / "additional_chat_templates").glob("*.jinja")):
            found[file.stem] = file.read_text(encoding="utf-8")
        own = self.path / "chat_template.jinja"
        if own.is_file():
            found["default"] = own.read_text(encoding="utf-8")
        return found

    def stamp(self) -> tuple[Any, ...]:
        found = [(path.name, path.stat()) for path in sorted(self.path.glob("*.safetensors"))]
        return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _ids(value: Any) -> list[int]:
    return [int(each) for each in value] if isinstance(value, list) else [] if value is None else [int(value)]
