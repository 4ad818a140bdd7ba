"""What a run keeps of its completions for its page: `_completions/`, which nothing uploads.

TRL's own files (`log_completions`) lack lengths, whether a completion was cut, and images; and a conversation whose
tools take arguments of different types cannot be written as its columns. Here messages are JSON.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet

from ...utils.files import written_whole

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "_completions"
THUMBNAIL = 128  # pixels


def write_completions(folder: Path, step: int, drawn: Mapping) -> None:
    """Write the columns of a generation batch as the completions of `step`.

    They are those of [`trl_fsdp_qlora.trainers.rollouts.generation_batches.drawn_rows`].
    """
    tokens, is_cut = drawn["lengths"].T.tolist()
    count = len(tokens)
    prompts = map(_as_json, drawn["prompt"])
    completions = map(_as_json, drawn["completion"])
    columns: dict[str, list] = {
        "step": [step] * count,
        "prompt_json": list(prompts),
        "completion_json": list(completions),
        "advantage": drawn["advantage"],
        "tokens": tokens,
        "cut": list(map(bool, is_cut)),
    }
    for name, values in drawn["rewards"].items():
        columns.setdefault(name, values)
    for name, values in drawn["extra"].items():
        texts = [None if value is None else str(value) for value in values]
        columns.setdefault(name, texts)
    columns["images"] = _thumbnails(drawn["images"])
    whole = {name: values for name, values in columns.items() if len(values) == count}
    path = folder / FOLDER / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(whole)
    with written_whole(path) as scratch:
        pyarrow.parquet.write_table(table, scratch, compression="zstd")


def _as_json(value: str | list[dict]) -> str:
    """A text or messages; images and other objects in messages become the names of their classes."""
    return json.dumps(value, default=_class_name)


def _class_name(value: object) -> str:
    name = type(value).__name__
    return f"<{name}>"


def jpeg(image: "Image") -> bytes:
    """A small JPEG of an image of pillow."""
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    small.save(content, "JPEG", quality=85)
    return content.getvalue()


def _thumbnails(images: Sequence[list | None]) -> list[list[bytes] | None]:
    """JPEGs of the images of each row; an image that several rows share is made small once."""
    small: dict[int, bytes] = {}
    thumbnails = []
    for images_of_row in images:
        files = []
        for image in images_of_row or []:
            if not hasattr(image, "thumbnail"):
                continue
            key = id(image)
            if key not in small:
                small[key] = jpeg(image)
            files.append(small[key])
        thumbnails.append(files or None)
    return thumbnails
