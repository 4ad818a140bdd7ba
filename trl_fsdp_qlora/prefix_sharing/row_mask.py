"""`RowMask`: the packed row travels to a model's layers as their attention mask.

Every attention and recurrent layer of transformers gets a mask, and a mask of four dimensions reaches it unchanged.
So the row is an argument of the layer that computes it, and nothing of a call is in a global: two threads, two
models and a nested call do not meet, and an exception leaves nothing behind. Whatever recomputes a layer in the
backward (transformers' checkpointing, torch's `checkpoint_wrapper`, a wrapper of the user's own) passes the same mask
again, and so the same row.

A model's forward passes options to its backbone in the same way ([`with_options`]): a mask gets through every wrapper
of the backbone.
"""

import torch

from ..compat.fake_tensors import real_tensors
from .batch import Arguments
from .row import PackedRow


class RowMask(torch.Tensor):
    """A mask that carries a packed row, `mask.packed_row`; its values are not used. Or one with `mask.options`.

    A copy of the mask (detached for reentrant checkpointing, moved to another device, sliced) carries the same.
    """

    packed_row: PackedRow | None = None
    options: Arguments | None = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if not isinstance(result, RowMask):
            return result
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if len(tensors) != 1:  # the result is no mask, but was computed with one
            return result.as_subclass(torch.Tensor)
        (mask,) = tensors
        result.packed_row = mask.packed_row
        result.options = mask.options
        return result


def with_row(mask: torch.Tensor, packed_row: PackedRow) -> RowMask:
    """Returns `mask` as a mask that carries a row."""
    mask = mask.as_subclass(RowMask)
    mask.packed_row = packed_row
    return mask


def carries_row(mask: object) -> bool:
    """Whether an argument is a mask that carries a packed row."""
    return isinstance(mask, RowMask) and mask.packed_row is not None


def row_of(mask: RowMask) -> PackedRow:
    """Returns the row of a mask that carries one."""
    assert mask.packed_row is not None
    return mask.packed_row


def no_mask(device: torch.device) -> torch.Tensor:
    """Returns a mask of four dimensions and one element, which transformers passes through unchanged.

    Without a mask transformers would take positions that start again for separate sequences.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def masks_of(packed_row: PackedRow, mask_names: frozenset[str], is_recurrent: bool) -> RowMask | dict[str, RowMask]:
    """Returns the attention mask by which each layer of a model gets a packed row.

    Args:
        packed_row: the row.
        mask_names, is_recurrent: see [`facts.ModelFacts`].
    """
    device = packed_row.input_ids.device
    with real_tensors():  # a fake tensor cannot be a `RowMask`
        mask = with_row(no_mask(device), packed_row)
        if not is_recurrent:
            return mask
        if mask_names:
            # A model with both types of layers takes a finished mask for each type, as `generate` prepares them.
            return dict.fromkeys(mask_names, mask)
        # A model with recurrent layers alone may drop a mask of four dimensions, and a mask of ones. The host would
        # wait for its look for ones if the mask were on a device.
        return with_row(torch.zeros(1, packed_row.tokens, dtype=torch.bool), packed_row)


@torch.compiler.disable
def with_options(arguments: Arguments, **options: object) -> Arguments:
    """Returns the arguments of a model's call with a mask that carries options to its backbone.

    Args:
        arguments: of the call.
        options: `as_stock=True`: the backbone has to run as in stock TRL. `last_columns=n`: only the last n hidden
            states of each row are needed. `from_padding=...`: see [`batch.Batch`].
    """
    mask = arguments.get("attention_mask")
    has_mask = mask is not None
    if not has_mask:
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments["inputs_embeds"]
        mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    if not isinstance(mask, torch.Tensor):
        return arguments  # masks by type of layer are no rows of a batch, which the backbone sees
    mask_with_options = mask.as_subclass(RowMask)
    mask_with_options.options = {**options, "has_mask": has_mask}
    return {**arguments, "attention_mask": mask_with_options}


def options_of(mask: object) -> Arguments | None:
    """The options that a mask carries to the backbone, see [`with_options`]; `None` if there are none."""
    return mask.options if isinstance(mask, RowMask) else None


@torch.compiler.disable
def as_before(arguments: Arguments) -> Arguments:
    """Returns the arguments of a call as they were before [`with_options`]."""
    mask_with_options = arguments["attention_mask"]
    mask = None
    if mask_with_options.options["has_mask"]:
        mask = mask_with_options.as_subclass(torch.Tensor)
    return {**arguments, "attention_mask": mask}
