"""Products of groups of rows with a matrix each, for devices on which `torch.nn.functional.grouped_mm` is a loop.

On compute capability 9 and 10 and in bfloat16 `grouped_mm` is one kernel. On other cards (an A100, a 4090) and in
float16 torch reads the groups' sizes on the host, which waits for the device. It then calls one product per group: 128
for a projection of Qwen3-30B-A3B. The kernel in this module finds its group on the device.
"""

# A kernel's annotations are kept as text, because `tl` exists only if Triton is installed.
from __future__ import annotations

import torch

from ..compat.triton_kernels import jit, launch, runs, tl

# Largest size on a GPU of the experts that are dequantized at once. 128 experts of Qwen3-30B-A3B's larger projection
# are 0.75 GiB.
SCRATCH_BYTES = 2**30

# Rows, columns and depth of a program's tile, and the number of warps that compute it.
_TILE = {"ROWS": 64, "COLUMNS": 128, "DEPTH": 32, "num_warps": 4}


def grouped_mm_is_a_loop(x: torch.Tensor) -> bool:
    """Whether torch computes a grouped product of rows like these as one product per group.

    [`multiply_groups`] then replaces it. The kernel is written for half precision on a GPU.
    """
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return x.dtype == torch.float16 or torch.cuda.get_device_capability(x.device)[0] not in (9, 10)


def multiply_groups(x_SK, weight_EKN, ends: torch.Tensor, out_SN: torch.Tensor) -> bool:
    """Write `x @ weight` to the rows of `out` that belong to these groups, and to no other rows.

    Returns `False` if Triton cannot compute it.

    Args:
        x_SK: rows in order of their groups, contiguous.
        weight_EKN: a matrix per group, in any strides.
        ends: `(E + 1,)`, int32: the start of the first group, then the end of each group.
        out_SN: contiguous.
    """
    if not runs(_product_kernel, x_SK):
        return False
    groups, depth, columns = weight_EKN.shape
    rows = len(x_SK)
    # The last tile of each group may be partial.
    tiles = rows // _TILE["ROWS"] + min(groups, rows)
    programs = tiles * -(-columns // _TILE["COLUMNS"])
    sizes = groups, depth, columns, *weight_EKN.stride()
    return launch(
        _product_kernel, programs, x_SK, weight_EKN, out_SN, ends, *sizes, GROUPS=_power_of_two(groups), **_TILE
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@jit
def _product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    ends_ptr,
    groups,
    depth,
    columns,
    weight_group,
    weight_depth,
    weight_column,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # One program per tile of the output. A program finds its group by the cumulative number of tiles of the groups.
    blocks = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // blocks
    index = tl.arange(0, GROUPS)
    is_group = index < groups
    begin = tl.load(ends_ptr + index, mask=is_group, other=0)
    end = tl.load(ends_ptr + index + 1, mask=is_group, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, axis=0)
    group = tl.sum((last <= tile).to(tl.int32), axis=0)
    if group < groups:  # there may be more programs than tiles; the others have no group
        is_mine = index == group
        first = tl.sum(tl.where(is_mine, begin + (tile - last + tiles) * ROWS, 0), axis=0)
        stop = tl.sum(tl.where(is_mine, end, 0), axis=0)
        row = first + tl.arange(0, ROWS)
        column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
        is_row = (row < stop)[:, None]
        is_column = (column < columns)[None, :]
        x_row = x_ptr + row.to(tl.int64)[:, None] * depth
        weight_block = weight_ptr + group.to(tl.int64) * weight_group + column[None, :] * weight_column
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            k = start + tl.arange(0, DEPTH)
            inside = k < depth
            x = tl.load(x_row + k[None, :], mask=is_row & inside[None, :], other=0.0)
            weight = tl.load(weight_block + k[:, None] * weight_depth, mask=is_column & inside[:, None], other=0.0)
            total += tl.dot(x, weight, input_precision="ieee")  # float32 stays float32
        out = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row & is_column)
