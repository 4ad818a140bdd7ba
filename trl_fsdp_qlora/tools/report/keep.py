"""What a run keeps of its completions for its page: `_completions/`, which nothing uploads.

TRL's own files (`log_completions`) lack lengths, whether a completion was cut, and images; and a conversation whose
tools take arguments of different types cannot be written as its columns. Here messages are JSON.
"""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ...utils.files import written_whole

FOLDER = "_completions"
THUMBNAIL = 128  # pixels


def write_completions(folder: Path, step: int, drawn: dict[str, Any]) -> None:
    """Write the columns of a generation batch as the completions of `step`.

    They are those of [`trl_fsdp_qlora.trainers.rollouts.generation_batches.drawn_rows`].
    """
    tokens, cut = drawn["lengths"].T.tolist()
    columns: dict[str, list] = {
        "step": [step] * len(tokens),
        "prompt_json": list(map(_as_json, drawn["prompt"])),
        "completion_json": list(map(_as_json, drawn["completion"])),
        "advantage": drawn["advantage"],
        "tokens": tokens,
        "cut": list(map(bool, cut)),
    }
    for name, values in drawn["rewards"].items():
        columns.setdefault(name, values)
    for name, values in drawn["extra"].items():
        columns.setdefault(name, [None if value is None else str(value) for value in values])
    columns["images"] = _thumbnails(drawn["images"])
    whole = {name: values for name, values in columns.items() if len(values) == len(tokens)}
    path = folder / FOLDER / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as scratch:
        pyarrow.parquet.write_table(pyarrow.table(whole), scratch, compression="zstd")


def _as_json(value: Any) -> str:
    """A text or messages; images and other objects in messages become the names of their classes."""
    return json.dumps(value, default=lambda object_: f"<{type(object_).__name__}>")


def jpeg(image: Any) -> bytes:
    """A small JPEG of an image of pillow."""
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    small.save(content, "JPEG", quality=85)
    return content.getvalue()


def _thumbnails(images: list) -> list[list[bytes] | None]:
    """JPEGs of the images of each row; an image that several rows share is made small once."""
    small: dict[int, bytes] = {}
    thumbnails = []
    for of_row in images:
        of_this_row = []
        for image in of_row or []:
            if not hasattr(image, "thumbnail"):
                continue
            if id(image) not in small:
                small[id(image)] = jpeg(image)
            of_this_row.append(small[id(image)])
        thumbnails.append(of_this_row or None)
    return thumbnails
