"""From what the user typed to a directory with a checkpoint: a local path, or a hub id that is downloaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from phasewise.errors import UserError
from phasewise.gguf.checkpoint import shards
from phasewise.gguf.container import MAGIC

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# No pickle: nothing that could run code is even downloaded.
WANTED = ["*.safetensors", "*.json", "*.jinja"]
UNWANTED = ["consolidated*", "original/*", "onnx/*"]  # second copies of the weights
FIRST_SHARD = re.compile(r"-00001-of-\d{5}\.gguf$")
FURTHER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


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


def wanted(names: Sequence[str], file: str | None, of: str) -> list[str]:
    """The files of a hub repository `of` that make one model: its safetensors with their settings, or one GGUF file.

    `names` are all files that it has, `file` is the GGUF file the user asks for. Raises UserError where there are
    several models to choose from, or none.
    """
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if file is not None:
        if file not in ggufs:
            raise UserError(f"{of} has no GGUF file {file!r}; it has {', '.join(ggufs) or 'no .gguf file'}")
        return [file]
    found = [name for name in names if _any(name, WANTED) and not _any(name, UNWANTED)]
    if any(name.endswith(".safetensors") for name in found):
        return found
    return _only_gguf(ggufs, of)


def _only_gguf(ggufs: Sequence[str], of: str) -> list[str]:
    """The one GGUF model among these files, with its shards. Raises UserError where there are several, or none."""
    models = [name for name in ggufs if not Path(name).name.startswith("mmproj") and not FURTHER_SHARD.search(name)]
    if not models:
        raise UserError(f"{of} has neither safetensors nor GGUF files; other weights are not read, for they may run "
                        "code. Choose another repository of this model")  # fmt: skip
    if len(models) > 1:
        raise UserError(f"{of} holds {len(models)} GGUF models: choose one with --file: {', '.join(models)}")
    stem = FIRST_SHARD.sub("", models[0])
    return [name for name in ggufs if name == models[0] or (stem != models[0] and name.startswith(f"{stem}-0"))]


def pull(name: str, *, file: str | None = None, revision: str | None = None) -> Path:
    """Downloads the model of a hub id into the hub's cache, and returns its folder, or its GGUF file.

    Files that are there whole are not downloaded again, and a connection that breaks goes on where it stopped. Raises
    UserError naming what failed, and what could be passed instead.
    """
    if not HUB_ID.fullmatch(name):
        raise UserError(f"{name!r} is no hub id: write one like org/name")
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise UserError("pulling from the hub needs the extra: pip install 'phasewise[hub]'") from error
    try:
        there = HfApi().model_info(name, revision=revision).siblings or ()  # asked once: without a network it says so
        files = wanted([each.rfilename for each in there], file, name)
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except UserError:
        raise
    except Exception as error:  # of the hub's client, and of the HTTP library beneath it, which changes
        raise UserError(
            f"{name} could not be pulled ({_first_line(error)}): check the name and the network (HF_ENDPOINT names "
            "another hub), or pass the path of a .gguf file, or of a folder with config.json and *.safetensors, to run "
            "and serve"
        ) from error
    models = [each for each in files if each.lower().endswith(".gguf")]
    return folder / models[0] if models else folder


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _download(name: str) -> Path:
    local = "or pass a local directory that holds config.json, *.safetensors and tokenizer.json"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(f"There is no directory {name!r}, and downloading it as a hub id needs the extra: "
                        f"pip install 'phasewise[hub]', {local}.") from error  # fmt: skip
    try:
        folder = Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
        return _gguf_in(folder) or folder  # pulled before
    except HFValidationError as error:
        raise UserError(f"There is no directory {name!r}, and it is not a valid hub id ({error}). Check the "
                        f"name, {local}.") from error  # fmt: skip
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(f"There is no directory {name!r}, and the hub id could not be downloaded "
                        f"({_first_line(error)}). Check the "
                        f"name and the network, {local}.") from error  # fmt: skip
