"""From what the user typed to a directory with a checkpoint: a local path, or a hub id that is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from phasewise.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# No pickle: nothing that could run code is even downloaded.
WANTED = ["*.safetensors", "*.json", "*.jinja"]
UNWANTED = ["consolidated*", "original/*", "onnx/*"]  # second copies of the weights


def resolve(path: str | Path) -> Path:
    """Resolves `path`: a directory, a .gguf file, else the download of a hub id such as `org/name`.

    Raises UserError naming the value and the fix when there is no such directory and it cannot be downloaded.
    """
    directory = Path(path).expanduser()
    if directory.is_dir() or (directory.is_file() and directory.suffix == ".gguf"):
        return directory
    if directory.exists():
        raise UserError(f"{directory} is a file; pass a .gguf file, or the directory that holds config.json and the "
                        "weights.")  # fmt: skip
    name = str(path)
    if isinstance(path, Path) or not HUB_ID.fullmatch(name):
        raise UserError(f"There is no directory {name!r}. Pass the path of a checkpoint, or a hub id like org/name.")
    return _download(name)


def _download(name: str) -> Path:
    local = "or pass a local directory that holds config.json, *.safetensors and tokenizer.json"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(f"There is no directory {name!r}, and downloading it as a hub id needs the extra: "
                        f"pip install 'phasewise[hub]', {local}.") from error  # fmt: skip
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except HFValidationError as error:
        raise UserError(f"There is no directory {name!r}, and it is not a valid hub id ({error}). Check the "
                        f"name, {local}.") from error  # fmt: skip
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"There is no directory {name!r}, and the hub id could not be downloaded ({reason}). Check the "
                        f"name and the network, {local}.") from error  # fmt: skip
