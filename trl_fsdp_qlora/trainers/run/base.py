"""Which model lies under a name: a folder may be renamed, and other weights may be put in its place."""

import json
from pathlib import Path

import xxhash
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_NO_WEIGHTS = ("adapter_", "optimizer", "training_args")  # how other files with these suffixes begin
# Entries of a model's config that depend on where and by which version it was saved.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
_SAMPLES = 64  # pieces that are read of each weight file
_SAMPLE = 64  # bytes of a piece


def fingerprint(base: str | Path, revision: str | None = None) -> str | None:
    """A digest of a model's config and index, of its weight files' sizes, and of a few bytes of each weight file.

    The same files have the same fingerprint under any name. It takes milliseconds whatever the size, and asks nobody
    on the network. Two models that differ in very few of their weights may have the same fingerprint.

    Args:
        base: a folder, or a model on the Hub that is in the local cache.
        revision: of a model on the Hub.

    Returns:
        16 hexadecimal digits, or `None` if there are no such files here.
    """
    folder = _folder_of(str(base), revision)
    if folder is None or not (folder / _CONFIG).is_file():
        return None
    hasher = xxhash.xxh3_64()
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        for name in _NOT_THE_MODEL:
            config.pop(name, None)
        hasher.update(json.dumps(config, sort_keys=True).encode())
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".index.json"):
                hasher.update(path.read_bytes())
            elif path.suffix in _WEIGHTS and not path.name.startswith(_NO_WEIGHTS):
                hasher.update(f"{path.name} {path.stat().st_size}".encode())
                _update_with_samples(hasher, path)
    except (OSError, ValueError, TypeError, AttributeError):  # a config that is no JSON, or no mapping
        return None
    return hasher.hexdigest()


def _folder_of(base: str, revision: str | None) -> Path | None:
    """The folder with the files of `base`: itself, or its snapshot in the Hub's cache."""
    if not base or Path(base).is_dir():
        return Path(base) if base else None
    try:
        config = try_to_load_from_cache(base, _CONFIG, revision=revision)
    except HFValidationError:  # a path that is not there
        return None
    return Path(config).parent if isinstance(config, str) else None


def _update_with_samples(hasher: xxhash.xxh3_64, path: Path) -> None:
    """Add evenly spaced pieces of a file, its first and its last bytes among them."""
    last = max(0, path.stat().st_size - _SAMPLE)
    with path.open("rb", buffering=0) as file:
        for place in range(_SAMPLES):
            file.seek(last * place // (_SAMPLES - 1))
            hasher.update(file.read(_SAMPLE))


def find_base(base: str, adapter: str | Path) -> str:
    """Where the base lies that the config of `adapter` names.

    A relative path counts from the working directory. If there is nothing, it counts from the adapter's folder or one
    of the folders above it, because a run writes the path as its user typed it.

    Returns:
        The path of the folder; `base` as it is if it names no folder.
    """
    if not base or Path(base).is_absolute() or Path(base).exists():
        return base
    folder = Path(adapter).resolve()
    for above in (folder, *folder.parents) if folder.is_dir() else ():
        if (above / base / _CONFIG).is_file():
            return str((above / base).resolve())
    return base
