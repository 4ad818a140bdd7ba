"""Hashes of the images of a batch's rows: rows share a prompt if their tokens *and pixels* agree.

Suffixes of shapes: B rows of a batch, N entries of the images' tensors.
"""

import zlib

import torch

from ..compat import trl as trls
from ..compat.trl import Vision, is_padded_by_row
from ..scoring.transfer import to_device
from .batch import PER_IMAGE, on_host


def fingerprints(vision: Vision) -> torch.Tensor:
    """`(B, 1)` hashes of each row's images: of their pixels, of their order, and of their shapes.

    Two rows with equal hashes have the same images. A sum of the pixels would not do as a hash, because pictures with
    equal shapes in other places have equal sums. So each number is scrambled together with its index before it is
    added. The host reads only the numbers that TRL reads to cut the pixels into rows. A hash is not kept, because
    tensors can be written without a trace (`.data`, NumPy).
    """
    return row_keys({name: line_hashes(vision[name]) for name in hashed(vision)}, on_host(vision))


def hashed(vision: Vision) -> list[str]:
    """Names of the vision arguments that are hashed."""
    return [name for name in PER_IMAGE if isinstance(vision.get(name), torch.Tensor)]


def row_keys(lines: dict[str, torch.Tensor], vision: Vision) -> torch.Tensor:
    """Hashes `(B, 1)` of the rows, on the device of `lines`, the hashes of each entry of the tensors in `vision`."""
    # TRL reads from the grid how many patches an image has, so the grid itself is not replaced by hashes.
    hashes = {name: x for name, x in lines.items() if name != "image_grid_thw"}
    by_row = {**vision, **hashes}
    if not is_padded_by_row(vision):
        by_row = trls.split_pixel_values_by_grid(by_row)
    keys_B = torch.zeros(len(by_row["pixel_values"]), dtype=torch.int64, device=lines["pixel_values"].device)
    for name, lines_N in lines.items():
        sizes = torch.tensor([1 if isinstance(by_row[name], torch.Tensor) else len(part) for part in by_row[name]])
        row_N = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        index_N = torch.arange(len(row_N)) - (sizes.cumsum(0) - sizes)[row_N]
        row_N = to_device(row_N, keys_B.device)
        index_N = to_device(index_N, keys_B.device)
        sums_B = torch.zeros_like(keys_B).index_add_(0, row_N, _scrambled(lines_N + _scrambled(index_N)))
        keys_B = _scrambled(keys_B + sums_B)
    return keys_B.unsqueeze(1)


# Constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as signed numbers. Products of int64 wrap around.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_HASHED_AT_ONCE = 2**22


def _scrambled(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 whose results differ in about half of their bits if the arguments differ in any bit."""
    x = x * _STEP + _STEP
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # the shift of a signed number copies its sign
    return x ^ ((x >> 31) & (2**33 - 1))


def line_hashes(x: torch.Tensor) -> torch.Tensor:
    """A hash `(N,)` of each entry of a tensor's first dimension: of its bits, its shape and its dtype."""
    bits = x.detach().reshape(len(x), -1).contiguous()
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    bits = bits.view(dtype)
    shape = zlib.crc32(repr((tuple(x.shape[1:]), x.dtype)).encode())
    position_hash = _scrambled(torch.arange(bits.shape[1], device=x.device) + (shape << 30))
    # Scrambled numbers are int64; those of a whole batch would be twice as large as the pixels.
    parts = bits.split(max(1, _HASHED_AT_ONCE // max(bits.shape[1], 1)))
    return torch.cat([_scrambled(part.to(torch.int64) + position_hash).sum(1) for part in parts])
