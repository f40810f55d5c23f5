"""A model in Hugging Face layout: a directory with config.json, safetensors, tokenizer.json and their like."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from phasewise.errors import UserError
from phasewise.model import generation
from phasewise.model.codebook import CodebookQuantised
from phasewise.model.joined_experts import JoinedExperts
from phasewise.model.lq import LowRankQuantised
from phasewise.model.nm import NMSparse
from phasewise.model.quantisation import CODEBOOK, GPT_OSS, LQ, NM, quantisation
from phasewise.model.quantised import Quantised
from phasewise.model.quantised_tables import LAYOUTS, TableQuantised
from phasewise.model.raw import RawConfig, read_json
from phasewise.model.special import CONFIG, TOKENIZER, read_special
from phasewise.model.weights import Checkpoint, Tensors, head_of_its_own


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
        ends = [*_ids(self.generation().get("eos_token_id")), *_ids(values.get("eos_token_id")), *self.ends()]
        values = {**values, "eos_token_id": list(dict.fromkeys(ends))}
        if values.get("tie_word_embeddings") is not False and head_of_its_own(self.path):
            values["tie_word_embeddings"] = False
        return RawConfig(values, path)

    def generation(self) -> dict[str, Any]:
        file = self.path / generation.FILE
        return read_json(file) if file.is_file() else {}

    def ends(self) -> list[int]:
        """The id of the tokenizer's end token: it ends answers as those do that the settings name. None where there is
        no tokenizer."""
        if not (self.path / TOKENIZER).is_file() or not (self.path / CONFIG).is_file():
            return []
        stamps = tuple((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns)
                       for file in sorted(self.path.glob("*token*.json")))  # fmt: skip
        return list(_ends(self.path, stamps))

    def tensors(self) -> Tensors:
        config = self.path / "config.json"
        raw = RawConfig(read_json(config), config) if config.is_file() else None
        said = None if raw is None else quantisation(raw)
        if raw is not None and raw.get("model_type") == "gpt_oss" and (said is None or said.layout == GPT_OSS):
            return JoinedExperts(Checkpoint(self.path))
        if raw is None or said is None:
            return Checkpoint(self.path)
        if said.layout == LQ:
            return LowRankQuantised(Checkpoint(self.path), raw)
        if said.layout == CODEBOOK:
            return CodebookQuantised(Checkpoint(self.path), raw)
        if said.layout == NM:
            return NMSparse(Checkpoint(self.path), raw)
        return (TableQuantised if said.layout in LAYOUTS else Quantised)(Checkpoint(self.path), said)

    def tokenizer(self) -> Backend:
        """The pipeline of tokenizer.json with the tokens that other files add or mark as special. Truncation and
        padding saved in it are off: a prompt is all of its text."""
        file = self.path / TOKENIZER
        if not file.is_file():
            raise UserError(f"{self.path} has no tokenizer.json. Save one there with "
                            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...).")  # fmt: skip
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the backend raises bare Exception
            raise UserError(f"{file} is not a valid tokenizer ({error}). Download or export it again.") from error
        backend.no_truncation()
        backend.no_padding()
        read_special(self.path).add_to(backend)
        return backend

    def special(self) -> dict[str, str]:
        return read_special(self.path).texts()

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


@lru_cache(maxsize=8)  # settings are asked for several times, and a vocabulary takes long to read
def _ends(path: Path, stamps: tuple[tuple[str, int, int], ...]) -> tuple[int, ...]:
    files = Directory(path)
    end = files.special().get("eos_token")
    found = None if end is None else files.tokenizer().token_to_id(end)
    return () if found is None else (int(found),)
