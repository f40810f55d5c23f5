"""Special and added tokens: what the files beside tokenizer.json say of them, read as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from phasewise.errors import UserError
from phasewise.model.raw import read_json

CONFIG, MAP, ADDED, TOKENIZER = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json",
)  # fmt: skip
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass
class SpecialTokens:
    """The special tokens by name (`named`), others without one (`extra`), and tokens to be in the vocabulary in the
    order of the ids they were saved under (`added`)."""

    named: dict[str, AddedToken | str] = field(default_factory=dict)
    extra: list[AddedToken | str] = field(default_factory=list)
    added: dict[int, AddedToken] = field(default_factory=dict)
    split: bool = False  # special tokens in a text are spelled as other text is

    def texts(self) -> dict[str, str]:
        """The text of each named token: variables of a chat template."""
        return {name: _text(token) for name, token in self.named.items()}

    def add_to(self, backend: Backend) -> None:
        """Adds what the vocabulary lacks, or has with other flags, in the order in which transformers does: ids follow
        from it."""
        new: list[AddedToken | str] = [token for _, token in sorted(self.added.items())]
        known = {str(token.content) for token in backend.get_added_tokens_decoder().values()} | set(map(_text, new))
        for token in (*self.named.values(), *self.extra):
            if _text(token) not in known:
                known.add(_text(token))
                new.append(token)
        names = set(self.texts().values())
        backend.add_tokens([_special(token) if _text(token) in names else _as_added(token) for token in new])
        backend.encode_special_tokens = self.split


def _add_older(found: SpecialTokens, folder: Path) -> None:
    """Added tokens as files have them that are older than `added_tokens_decoder`."""
    usual = [token for name, token in found.named.items() if name in NAMED]
    special = set(map(_text, (*usual, *found.extra)))
    for text, key in _read(folder / ADDED).items():
        marked = text in special
        found.added[_id(key, folder / ADDED)] = AddedToken(text, normalized=not marked, special=marked)
    for entry in _entries(folder / TOKENIZER):
        found.added[_id(entry.get("id"), folder / TOKENIZER)] = _as_added(_token(entry, folder / TOKENIZER))


def read_special(folder: Path) -> SpecialTokens:
    """The special tokens of the tokenizer in a folder. `added_tokens_decoder` of tokenizer_config.json goes before the
    older special_tokens_map.json and added_tokens.json, which are read where it is absent. UserError for what is no
    token."""
    config = _read(folder / CONFIG)
    if config.get("additional_special_tokens") and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    own = config.pop("extra_special_tokens") if isinstance(config.get("extra_special_tokens"), dict) else {}
    found = SpecialTokens(split=config.get("split_special_tokens") is True)
    saved = config.get("added_tokens_decoder")
    if saved is None:
        config |= _mapped(folder / MAP, config)
    _name(found, config, own, folder / CONFIG)
    if saved is None:
        _add_older(found, folder)
    elif isinstance(saved, dict):
        for key, token in saved.items():
            found.added[_id(key, folder / CONFIG)] = _as_added(_token(token, folder / CONFIG))
    else:
        raise UserError(f"{folder / CONFIG}: added_tokens_decoder must be an object of tokens by id")
    # of the older file; transformers too reads added_tokens.json before it
    if not isinstance(config.get("extra_special_tokens"), list):
        found.extra += [_token(value, folder / MAP) for value in config.get("additional_special_tokens") or []]
    flags = {str(token.content): token for token in found.added.values()}
    found.named = {name: flags.get(_text(token), token) for name, token in found.named.items()}
    return found


def _name(found: SpecialTokens, config: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> None:
    """Sorts a configuration's tokens into those with a name, which `own` are as well, and others."""
    extra = config.get("extra_special_tokens") or []
    named = {key: value for key, value in config.items() if key in NAMED or _own_name(key, value)} | dict(own)
    if isinstance(extra, dict):
        named, extra = {**named, **extra}, []
    if not isinstance(extra, list):
        raise UserError(f"{path}: extra_special_tokens must be a list of tokens, or tokens by name")
    found.named = {key: _token(value, path) for key, value in named.items() if value is not None}
    found.extra = [_token(value, path) for value in extra]


def _own_name(key: str, value: Any) -> bool:
    """True for a token under a name of the model's own, such as image_token."""
    return key.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))


def _mapped(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of special_tokens_map.json, which override the configuration's; every token there is special."""
    given = {key: _marked(value) for key, value in _read(path).items() if value is not None}
    extra, own = given.get("extra_special_tokens"), config.get("extra_special_tokens")
    if isinstance(extra, list) and isinstance(own, list):
        given["extra_special_tokens"] = [*own, *(each for each in extra if each not in own)]
    return given


def _marked(value: Any) -> Any:
    return {**value, "special": True} if isinstance(value, dict) and "content" in value else value


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _entries(path: Path) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer.json."""
    found = _read(path).get("added_tokens") or []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _token(value: Any, path: Path) -> AddedToken | str:
    """A token as a text, or with its flags."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise UserError(f'{path}: {value!r:.80} is no token: give its text, or an object with its "content"')
    flags = {name: value[name] for name in FLAGS if isinstance(value.get(name), bool)}
    return AddedToken(value["content"], **flags)


def _id(value: Any, path: Path) -> int:
    """A token's id."""
    try:
        found = int(value)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found < 1 << 31:
        raise UserError(f"{path}: {value!r:.40} is no token id")
    return found


def _text(token: AddedToken | str) -> str:
    return token if isinstance(token, str) else str(token.content)


def _as_added(token: AddedToken | str) -> AddedToken:
    return AddedToken(token, special=True) if isinstance(token, str) else token


def _special(token: AddedToken | str) -> AddedToken:
    """The token, marked special."""
    found = _as_added(token)
    found.special = True
    return found
