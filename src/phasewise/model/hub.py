"""From what the user typed to a directory with a checkpoint: a local path, or a hub id that is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from phasewise.errors import UserError
from phasewise.gguf.checkpoint import shards
from phasewise.gguf.container import MAGIC

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# No pickle: nothing that could run code is even downloaded.
WANTED = ["*.safetensors", "*.json", "*.jinja"]
UNWANTED = ["consolidated*", "original/*", "onnx/*"]  # second copies of the weights


def resolve(path: str | Path) -> Path:
    """Resolves `path`: a directory, a GGUF file of any name or a folder of one, else the download of a hub id such as
    `org/name`.

    Raises UserError naming the value and the fix when there is no such directory and it cannot be downloaded.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return _gguf_in(directory) or directory
    if directory.is_file() and (directory.suffix.lower() == ".gguf" or _begins_as_gguf(directory)):
        return directory
    if directory.exists():
        raise UserError(f"{directory} is a file; pass a .gguf file, or the directory that holds config.json and the "
                        "weights.")  # fmt: skip
    name = str(path)
    if isinstance(path, Path) or not HUB_ID.fullmatch(name):
        raise UserError(f"There is no directory {name!r}. Pass the path of a checkpoint, or a hub id like org/name.")
    return _download(name)


def _begins_as_gguf(file: Path) -> bool:
    """True if the file's first bytes say that it is one, as of blobs that Ollama names by their hash."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a folder without other weights: one, or the first of its shards. UserError where there are
    several models."""
    if next(directory.glob("*.safetensors"), None) is not None:
        return None
    found = sorted(path for path in directory.iterdir() if path.is_file() and path.suffix.lower() == ".gguf")
    models = [path for path in found if path == shards(path)[0] or shards(path)[0] not in found]
    models = [path for path in models if not path.name.startswith("mmproj")]  # of images, beside a model
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:5]) + (" ..." if len(models) > 5 else "")
        raise UserError(f"{directory} holds {len(models)} GGUF models ({names}): pass the path of one of them.")
    return models[0] if models else None


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
