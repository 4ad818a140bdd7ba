"""What a run keeps of its completions for its page: `_completions/`, which nothing uploads.

TRL's own files (`log_completions`) lack lengths, whether a completion was cut, and images; and a conversation whose
tools take arguments of different types cannot be written as its columns. Here messages are JSON.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from ...utils.files import written_whole

FOLDER = "_completions"
THUMBNAIL = 128  # pixels


def lengths_and_ends(batch: Mapping[str, torch.Tensor], ends: list[int]) -> torch.Tensor:
    """`(rows, 2)`: each completion's tokens, and whether it was cut, because its last token is none of `ends`."""
    tokens_B = batch["completion_mask"].sum(1)
    last_B1 = (tokens_B - 1).clamp(min=0).unsqueeze(1)
    last_token_B = batch["completion_ids"].gather(1, last_B1).squeeze(1)
    has_ended_B = torch.isin(last_token_B, torch.tensor(ends, device=last_token_B.device)) & (tokens_B > 0)
    return torch.stack([tokens_B, (~has_ended_B).to(tokens_B.dtype)], dim=1)


def drawn_rows(logs: Mapping[str, Any], lengths_N2: torch.Tensor, has_images: bool) -> dict[str, Any]:
    """Columns of the generation batch that TRL has just put at the end of its `_logs`, with lengths and ends.

    If the batch has no images, those in `logs` are of an earlier one.
    """
    count = len(lengths_N2)
    last = {name: list(logs[name])[-count:] for name in ("prompt", "completion", "advantages")}
    rows = {
        "prompt": last["prompt"],
        "completion": last["completion"],
        "advantage": last["advantages"],
        "images": list(logs["images"])[-count:] if has_images else [None] * count,
        "lengths": lengths_N2,
    }
    for kind in ("rewards", "extra"):
        rows[kind] = {name: list(values)[-count:] for name, values in logs[kind].items()}
    return rows


def write_completions(folder: Path, step: int, drawn: dict[str, Any]) -> None:
    """Write the columns of [`drawn_rows`] as the completions of `step`."""
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
    return json.dumps(value, default=_class_name)


def _class_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _thumbnails(images: list) -> list[list[bytes] | None]:
    """JPEGs of the images of each row; an image that several rows share is made small once."""
    made: dict[int, bytes] = {}
    rows = []
    for of_row in images:
        for image in of_row or []:
            if hasattr(image, "thumbnail") and id(image) not in made:
                small = image.convert("RGB")
                small.thumbnail((THUMBNAIL, THUMBNAIL))
                content = io.BytesIO()
                small.save(content, "JPEG", quality=85)
                made[id(image)] = content.getvalue()
        rows.append([made[id(image)] for image in of_row or [] if id(image) in made] or None)
    return rows
