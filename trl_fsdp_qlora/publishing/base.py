"""The base model that a card names, as a reader finds it on the Hub."""

import hashlib
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from .folder import PublishError

_WEIGHTS = ".safetensors"


def holds_the_same(api: HfApi, base: str, folder: Path | None) -> bool:
    """Whether the Hub's `base` has the very weights of `folder`, so that loading one is loading the other.

    The Hub says the SHA-256 of what it holds, so nothing is downloaded.

    Args:
        api: client.
        base: Hub id.
        folder: of a base model; `None` only looks whether `base` is there.

    Raises:
        PublishError: there is no such model.
    """
    try:
        info = api.model_info(base, files_metadata=folder is not None)
    except RepositoryNotFoundError:
        raise PublishError(
            f"the base {base} is not on the Hub, or hidden from this token, so no reader could load the adapter; publish it "
            "first, or name another: --base owner/name"
        ) from None
    if folder is None:
        return False
    theirs = {
        file.rfilename: file.lfs.sha256
        for file in info.siblings or []
        if file.lfs is not None and file.rfilename.endswith(_WEIGHTS)
    }
    ours = {path.name: path for path in folder.glob(f"*{_WEIGHTS}")}
    return bool(ours) and ours.keys() == theirs.keys() and all(_sha256(ours[name]) == theirs[name] for name in ours)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
