"""Triton kernels for packed experts: dequantize many at once, and multiply each group of rows by a matrix of its own.

On compute capability 9 and 10 and in bfloat16 `torch.nn.functional.grouped_mm` is one kernel. On other cards (an A100,
a 4090) and in float16 torch reads the groups' sizes on the host, which waits for the device. It then calls one product
per group: 128 for a projection of Qwen3-30B-A3B. The kernels of [`multiply_groups`] and [`GroupedLinear`] find their
group on the device.

[`dequantize_experts`] is one launch, compared with eight of torch operations around bitsandbytes' kernel.

For a step of decoding [`multiply_packed`] reads the packed weights and writes nothing but the products. A dense copy
of 128 experts for 16 rows would be written and read again: nine times the bytes.

Suffixes of tensors in this module and in experts.py: `_S` rows, one per token and expert that computes it, in order of
the experts; `_E` experts, each a group of rows; `_I` and `_O` inputs and outputs of a layer; `_K` and `_N` depth and
columns of a product; `_B` bytes of an expert; `_R` LoRA's rank.
"""

# A kernel's annotations are kept as text, because `tl` exists only if Triton is installed.
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..compat.triton_kernels import jit, launch, runs, tl

if TYPE_CHECKING:
    from .packed_linear import ByteLayout

# Largest size on a GPU of the experts that are dequantized at once. 128 experts of Qwen3-30B-A3B's larger projection
# are 0.75 GiB.
SCRATCH_BYTES = 2**30

# Rows, columns and depth of a program's tile, and the number of warps that compute it.
_TILE = {"ROWS": 64, "COLUMNS": 128, "DEPTH": 32, "num_warps": 4}
# Of gradients of matrices, whose depth is the rows of a group.
_GRADIENT_TILE = {"ROWS": 32, "OUT": 64, "IN": 64, "num_warps": 4}
# Of products with packed weights, whose depth is a block of weights.
_PACKED_TILE = {"ROWS": 16, "COLUMNS": 64, "num_warps": 4}
# Packed bytes that a program dequantizes.
_DEQUANTIZED = 2048


def fake_dense(x: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Allocate what a product of all packed experts needs of their weights, on fake tensors: the form of a plan.

    As many experts as fit into the scratch memory are dense at once, next to a copy of their bytes (`experts.py:
    _multiply`). Returns the dense weight of one expert, of `shape`.
    """
    weights = math.prod(shape)
    in_a_byte = 2 if packed.dtype == torch.uint8 else 1
    experts = in_a_byte * packed.numel() // weights
    in_scratch = SCRATCH_BYTES // (weights * x.dtype.itemsize)
    at_once = max(1, min(experts, in_scratch))
    copied_bytes = packed.new_empty(at_once * weights // in_a_byte)
    dense = x.new_empty(at_once, *shape)
    del copied_bytes
    return dense[0]


def grouped_mm_is_a_loop(x: torch.Tensor) -> bool:
    """Whether torch computes a grouped product of rows like these as one product per group.

    [`multiply_groups`] then replaces it. The kernel is written for half precision on a GPU.
    """
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    major, _ = torch.cuda.get_device_capability(x.device)
    return x.dtype == torch.float16 or major not in (9, 10)


def multiply_groups(x_SK, weight_EKN, ends: torch.Tensor, out_SN: torch.Tensor, is_first: bool = True) -> bool:
    """Write `x @ weight` to the rows of `out` that belong to these groups, and to no others.

    It returns `False` and writes nothing if Triton cannot compute it.

    Args:
        x_SK: rows in order of their groups, contiguous.
        weight_EKN: a matrix per group, in any strides.
        ends: `(E,)`, int32: the end of each group.
        out_SN: contiguous.
        is_first: whether the first of these groups begins at row 0. Otherwise it begins at the end of the
            group before it, and that end is before `ends` in the same tensor.
    """
    if not runs(_product_kernel, x_SK):
        return False
    groups, depth, columns = weight_EKN.shape
    tiles = _tiles_of_rows(len(x_SK), groups, _TILE["ROWS"])
    programs = tiles * _ceil(columns, _TILE["COLUMNS"])
    sizes = groups, depth, columns, *weight_EKN.stride()
    constants = {"GROUPS": _power_of_two(groups), "IS_FIRST": is_first, **_TILE}
    tensors = x_SK, weight_EKN, out_SN, ends
    return launch(_product_kernel, programs, *tensors, *sizes, **constants)


class GroupedLinear(torch.autograd.Function):
    """`x @ weight.T` of every group of rows with its own matrix, by a kernel of ours or, without Triton, torch's loop.

    The inputs are `(S, in)` rows, `(E, out, in)` matrices and the int32 end of each group, `(E,)`. The output is
    `(S, out)`.
    """

    @staticmethod
    def forward(ctx, x_SI, weight_EOI, ends):
        ctx.save_for_backward(x_SI, weight_EOI, ends)
        return _grouped(x_SI, weight_EOI.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SO):
        x_SI, weight_EOI, ends = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_SO = grad_SO.contiguous()
        grad_x_SI = _grouped(grad_SO, weight_EOI, ends) if needs_x else None
        grad_weight_EOI = _grouped_gradients(grad_SO, x_SI, ends) if needs_weight else None
        return grad_x_SI, grad_weight_EOI, None


def _grouped(x_SK, weight_EKN, ends) -> torch.Tensor:
    x_SK = x_SK.contiguous()
    out_SN = x_SK.new_empty(len(x_SK), weight_EKN.shape[2])
    if multiply_groups(x_SK, weight_EKN, ends, out_SN):
        return out_SN
    return nn.functional.grouped_mm(x_SK, weight_EKN, offs=ends)


def _grouped_gradients(grad_SO, x_SI, ends) -> torch.Tensor:
    """`grad.T @ x` of every group of rows, `(E, out, in)`."""
    x_SI = x_SI.contiguous()
    groups = len(ends)
    out_features = grad_SO.shape[1]
    in_features = x_SI.shape[1]
    if runs(_gradient_kernel, x_SI):
        out_EOI = x_SI.new_empty(groups, out_features, in_features)
        tiles_out = _ceil(out_features, _GRADIENT_TILE["OUT"])
        tiles_in = _ceil(in_features, _GRADIENT_TILE["IN"])
        programs = groups * tiles_out * tiles_in
        tensors = grad_SO, x_SI, out_EOI, ends
        if launch(_gradient_kernel, programs, *tensors, out_features, in_features, **_GRADIENT_TILE):
            return out_EOI
    return nn.functional.grouped_mm(grad_SO.t(), x_SI, offs=ends)


def multiply_packed(x_SK, rows_EB, layout: ByteLayout, ends: torch.Tensor) -> torch.Tensor | None:
    """`x @ weight.T` of every group of rows, `(S, out)`, from the packed weights themselves.

    It is for few rows, so that weights are unpacked once or twice, and blocks of weights have to be parts of a row.
    Otherwise, and if Triton cannot compute it, the result is `None`.

    Args:
        x_SK: rows in order of their groups, contiguous.
        rows_EB: a row of bytes per expert.
        ends: `(E,)`, int32: the end of each group.
    """
    rows = len(x_SK)
    groups = len(rows_EB)
    columns, depth = layout.shape
    is_few = rows <= groups * _PACKED_TILE["ROWS"]
    has_whole_blocks = depth % layout.blocksize == 0
    if not is_few or not has_whole_blocks or not runs(_packed_product_kernel, x_SK):
        return None
    out_SN = x_SK.new_empty(rows, columns)
    tiles = _tiles_of_rows(rows, groups, _PACKED_TILE["ROWS"])
    programs = tiles * _ceil(columns, _PACKED_TILE["COLUMNS"])
    constants = {"GROUPS": _power_of_two(groups), **_constants(layout), **_PACKED_TILE}
    parts = _parts(rows_EB, layout)
    sizes = groups, depth, columns, rows_EB.stride(0)
    is_written = launch(_packed_product_kernel, programs, x_SK, out_SN, ends, *parts, *sizes, **constants)
    return out_SN if is_written else None


def dequantize_experts(rows_EB: torch.Tensor, layout: ByteLayout, dtype: torch.dtype) -> torch.Tensor | None:
    """The dense weights `(E, out, in)` of experts' bytes; `None` if Triton cannot compute them."""
    if not runs(_dequantize_kernel, rows_EB):
        return None
    out_EOI = torch.empty(len(rows_EB), *layout.shape, dtype=dtype, device=rows_EB.device)
    packed_bytes = math.prod(layout.shape) // 2
    programs = len(rows_EB) * _ceil(packed_bytes, _DEQUANTIZED)
    sizes = packed_bytes, rows_EB.stride(0)
    constants = {"BYTES": _DEQUANTIZED, **_constants(layout)}
    parts = _parts(rows_EB, layout)
    is_written = launch(_dequantize_kernel, programs, out_EOI, *parts, *sizes, **constants)
    return out_EOI if is_written else None


def _parts(rows_EB: torch.Tensor, layout: ByteLayout) -> tuple[torch.Tensor, ...]:
    """Weight, absmax, nested absmax, offset, code and nested code, as the kernels take them; views, no copies."""
    # `plan` reads this module's constants without bitsandbytes, which `packed_linear` needs.
    from .packed_linear import codebook

    weight, absmax, *nested = (rows_EB[:, section] for section in layout.sections)
    code = codebook(layout.code, rows_EB.device)
    if not layout.nested:
        absmax = absmax.view(torch.float32)
        return weight, absmax, absmax, absmax, code, code
    maxima, offset = (part.view(torch.float32) for part in nested)
    nested_code = codebook(layout.nested_code, rows_EB.device)
    return weight, absmax, maxima, offset, code, nested_code


def _constants(layout: ByteLayout) -> dict:
    nested_block = max(1, layout.nested_blocksize)  # a kernel that does not use it is compiled with it, too
    return {"BLOCK": layout.blocksize, "NESTED": layout.nested, "NESTED_BLOCK": nested_block}


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _tiles_of_rows(rows: int, groups: int, rows_of_tile: int) -> int:
    """The most tiles that the groups of `rows` rows have: the last tile of each group may be partial."""
    return rows // rows_of_tile + min(groups, rows)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@jit
def _rows_of_tile(ends_ptr, tile, groups, IS_FIRST: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    # A tile's group, and the rows [first, stop) from the tile's first row to the group's end. Tiles are numbered group
    # by group, so the group is the number of groups whose last tile comes before this one.
    index = tl.arange(0, GROUPS)
    is_group = index < groups
    has_begin = is_group & (index > 0) if IS_FIRST else is_group
    begin = tl.load(ends_ptr + index - 1, mask=has_begin, other=0)
    end = tl.load(ends_ptr + index, mask=is_group, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, axis=0)
    is_before = last <= tile
    group = tl.sum(is_before.to(tl.int32), axis=0)
    is_group_of_tile = index == group
    tile_of_group = tile - last + tiles
    first_of_group = begin + tile_of_group * ROWS
    first = tl.sum(tl.where(is_group_of_tile, first_of_group, 0), axis=0)
    stop = tl.sum(tl.where(is_group_of_tile, end, 0), axis=0)
    return group, first, stop


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
    IS_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # One program per tile of the output.
    tiles_of_columns = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // tiles_of_columns
    tile_of_columns = tl.program_id(0) % tiles_of_columns
    group, first, stop = _rows_of_tile(ends_ptr, tile, groups, IS_FIRST, GROUPS, ROWS)
    if group < groups:  # there are fewer tiles than programs: the rest have no group
        row = (first + tl.arange(0, ROWS))[:, None]
        column = (tile_of_columns * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        is_row = row < stop
        is_column = column < columns
        x_row = x_ptr + row.to(tl.int64) * depth
        weight_of_group = weight_ptr + group.to(tl.int64) * weight_group
        weight_block = weight_of_group + column * weight_column
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            k = start + tl.arange(0, DEPTH)
            k_of_x = k[None, :]
            k_of_weight = k[:, None]
            x = tl.load(x_row + k_of_x, mask=is_row & (k_of_x < depth), other=0.0)
            is_weight = is_column & (k_of_weight < depth)
            weight = tl.load(weight_block + k_of_weight * weight_depth, mask=is_weight, other=0.0)
            total += tl.dot(x, weight, input_precision="ieee")  # float32 stays float32
        out_row = out_ptr + row.to(tl.int64) * columns
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_row + column, out, mask=is_row & is_column)


@jit
def _gradient_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    ends_ptr,
    out_features,
    in_features,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
):
    # One program per tile of a group's matrix.
    tiles_in = tl.cdiv(in_features, IN)
    tiles = tl.cdiv(out_features, OUT) * tiles_in
    group = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    tile_out = tile // tiles_in
    tile_in = tile % tiles_in
    out_feature = tile_out * OUT + tl.arange(0, OUT)
    in_feature = tile_in * IN + tl.arange(0, IN)
    is_out_feature = out_feature < out_features
    is_in_feature = in_feature < in_features
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends_ptr + group)
    total = tl.zeros((OUT, IN), dtype=tl.float32)
    for start in range(begin, stop, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        is_row = row < stop
        grad_row = grad_ptr + row.to(tl.int64) * out_features
        is_grad = is_row & is_out_feature[None, :]
        grad = tl.load(grad_row + out_feature[None, :], mask=is_grad, other=0.0)
        x_row = x_ptr + row.to(tl.int64) * in_features
        is_x = is_row & is_in_feature[None, :]
        x = tl.load(x_row + in_feature[None, :], mask=is_x, other=0.0)
        total += tl.dot(tl.trans(grad), x, input_precision="ieee")
    out_group = out_ptr + group.to(tl.int64) * out_features * in_features
    out_row = out_group + out_feature[:, None] * in_features
    is_out = is_out_feature[:, None] & is_in_feature[None, :]
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_row + in_feature[None, :], out, mask=is_out)


@jit
def _scale(
    absmax_ptr, maxima_ptr, offset_ptr, nested_code_ptr, expert, row_bytes, block, is_block, NESTED: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    # The absolute maximum of each block of an expert's weights.
    if NESTED:
        byte = expert * row_bytes + block
        index = tl.load(absmax_ptr + byte, mask=is_block, other=0)
        code = tl.load(nested_code_ptr + index.to(tl.int32))
        first_float = expert * (row_bytes // 4)
        nested_block = block // NESTED_BLOCK
        maximum = tl.load(maxima_ptr + first_float + nested_block, mask=is_block, other=0.0)
        offset = tl.load(offset_ptr + first_float)
        scale = code * maximum + offset
    else:
        first_float = expert * (row_bytes // 4)
        scale = tl.load(absmax_ptr + first_float + block, mask=is_block, other=0.0)
    return scale


@jit
def _dequantize_kernel(
    out_ptr,
    weight_ptr,
    absmax_ptr,
    maxima_ptr,
    offset_ptr,
    code_ptr,
    nested_code_ptr,
    packed_bytes,
    row_bytes,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
):
    pieces = tl.cdiv(packed_bytes, BYTES)
    expert = (tl.program_id(0) // pieces).to(tl.int64)
    first_byte = (tl.program_id(0) % pieces) * BYTES
    byte = first_byte + tl.arange(0, BYTES)
    is_byte = byte < packed_bytes
    packed_row = weight_ptr + expert * row_bytes
    packed = tl.load(packed_row + byte, mask=is_byte, other=0)
    packed = packed.to(tl.int32)
    block = byte // (BLOCK // 2)
    scale = _scale(
        absmax_ptr, maxima_ptr, offset_ptr, nested_code_ptr, expert, row_bytes, block, is_byte, NESTED, NESTED_BLOCK
    )
    # The first of two weights is in a byte's upper half.
    upper = tl.load(code_ptr + (packed >> 4)) * scale
    lower = tl.load(code_ptr + (packed & 15)) * scale
    weights = tl.interleave(upper, lower).to(out_ptr.dtype.element_ty)
    column = 2 * first_byte + tl.arange(0, 2 * BYTES)
    out_row = out_ptr + expert * packed_bytes * 2
    tl.store(out_row + column, weights, mask=column < 2 * packed_bytes)


@jit
def _packed_product_kernel(
    x_ptr,
    out_ptr,
    ends_ptr,
    weight_ptr,
    absmax_ptr,
    maxima_ptr,
    offset_ptr,
    code_ptr,
    nested_code_ptr,
    groups,
    depth,
    columns,
    row_bytes,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
):
    # One program per tile of the output, a block of weights of each of its columns at a time.
    tiles_of_columns = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // tiles_of_columns
    tile_of_columns = tl.program_id(0) % tiles_of_columns
    group, first, stop = _rows_of_tile(ends_ptr, tile, groups, True, GROUPS, ROWS)
    if group < groups:  # there are fewer tiles than programs: the rest have no group
        row = (first + tl.arange(0, ROWS))[:, None]
        column = tile_of_columns * COLUMNS + tl.arange(0, COLUMNS)
        is_row = row < stop
        is_column = column < columns
        expert = group.to(tl.int64)
        half = tl.arange(0, BLOCK // 2)[None, :]
        x_row = x_ptr + row.to(tl.int64) * depth
        x_upper = x_row + 2 * half
        weight_of_expert = weight_ptr + expert * row_bytes
        weight_row = weight_of_expert + column[:, None] * (depth // 2) + half
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, depth, BLOCK):
            packed = tl.load(weight_row + start // 2, mask=is_column[:, None], other=0)
            packed = packed.to(tl.int32)
            block = (column * depth + start) // BLOCK
            scale_of_column = _scale(
                absmax_ptr, maxima_ptr, offset_ptr, nested_code_ptr, expert, row_bytes, block, is_column, NESTED,
                NESTED_BLOCK,
            )  # fmt: skip
            scale = scale_of_column[:, None]
            # The first of two weights is in a byte's upper half.
            upper = tl.load(code_ptr + (packed >> 4)) * scale
            lower = tl.load(code_ptr + (packed & 15)) * scale
            # Rounded like the dense weights.
            upper = upper.to(x_ptr.dtype.element_ty)
            lower = lower.to(x_ptr.dtype.element_ty)
            x_first = tl.load(x_upper + start, mask=is_row, other=0.0)
            x_second = tl.load(x_upper + start + 1, mask=is_row, other=0.0)
            total += tl.dot(x_first, tl.trans(upper), input_precision="ieee")  # float32 stays float32
            total += tl.dot(x_second, tl.trans(lower), input_precision="ieee")
        out_row = out_ptr + row.to(tl.int64) * columns
        is_out = is_row & is_column[None, :]
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_row + column[None, :], out, mask=is_out)
