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
    lines = {}
    for name in hashed(vision):
        lines[name] = line_hashes(vision[name])
    return row_keys(lines, on_host(vision))


def hashed(vision: Vision) -> list[str]:
    """Names of the vision arguments that are hashed."""
    names = []
    for name in PER_IMAGE:
        if isinstance(vision.get(name), torch.Tensor):
            names.append(name)
    return names


def row_keys(lines: dict[str, torch.Tensor], vision: Vision) -> torch.Tensor:
    """Hashes `(B, 1)` of the rows, on the device of `lines`, the hashes of each entry of the tensors in `vision`."""
    by_row = {**vision, **lines}
    # TRL reads from the grid how many patches an image has, so the grid itself is not replaced by hashes.
    if "image_grid_thw" in vision:
        by_row["image_grid_thw"] = vision["image_grid_thw"]
    if not is_padded_by_row(vision):
        by_row = trls.split_pixel_values_by_grid(by_row)
    device = lines["pixel_values"].device
    rows = len(by_row["pixel_values"])
    keys_B = torch.zeros(rows, dtype=torch.int64, device=device)
    for name, lines_N in lines.items():
        size_B = _entries_by_row(by_row[name])
        row_N = torch.repeat_interleave(torch.arange(rows), size_B)
        first_B = size_B.cumsum(0) - size_B
        index_N = torch.arange(len(row_N)) - first_B[row_N]
        row_N = to_device(row_N, device)
        index_N = to_device(index_N, device)
        placed_N = _scrambled(lines_N + _scrambled(index_N))
        sums_B = torch.zeros_like(keys_B)
        sums_B.index_add_(0, row_N, placed_N)
        keys_B = _scrambled(keys_B + sums_B)
    return keys_B.unsqueeze(1)


def _entries_by_row(by_row: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Returns how many entries each row has `(B,)`: a tensor has one for each row, a list has a tensor for each."""
    if isinstance(by_row, torch.Tensor):
        return torch.ones(len(by_row), dtype=torch.int64)
    return torch.tensor([len(entries) for entries in by_row])


# Constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as signed numbers. Products of int64 wrap around.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_HASHED_AT_ONCE = 2**22
# The dtype of integers with as many bytes.
_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}


def _scrambled(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 whose results differ in about half of their bits if the arguments differ in any bit."""
    x = x * _STEP + _STEP
    x = _with_high_bits(x, 30) * _FIRST
    x = _with_high_bits(x, 27) * _SECOND
    return _with_high_bits(x, 31)


def _with_high_bits(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Returns `x ^ (x >> shift)` of numbers without a sign."""
    # The shift of a signed number copies its sign, so the copies are taken away.
    without_sign = 2 ** (64 - shift) - 1
    high = (x >> shift) & without_sign
    return x ^ high


def line_hashes(x: torch.Tensor) -> torch.Tensor:
    """A hash `(N,)` of each entry of a tensor's first dimension: of its bits, its shape and its dtype."""
    numbers = x.detach().reshape(len(x), -1).contiguous()
    bits = numbers.view(_INTEGERS[numbers.element_size()])
    count = bits.shape[1]
    shape_and_dtype = repr((tuple(x.shape[1:]), x.dtype))
    shape_hash = zlib.crc32(shape_and_dtype.encode())
    index = torch.arange(count, device=x.device)
    position_hash = _scrambled(index + (shape_hash << 30))
    # Scrambled numbers are int64; those of a whole batch would be twice as large as the pixels.
    lines_at_once = max(1, _HASHED_AT_ONCE // max(count, 1))
    hashes = []
    for part in bits.split(lines_at_once):
        # Without a name, so that the scrambled numbers are freed before those of the next part are computed.
        hashes.append(_scrambled(part.to(torch.int64) + position_hash).sum(1))
    return torch.cat(hashes)
