"""Values of tokens as TRL reads them: equal ones of equal contexts, and those of completions of one token."""

import torch


def share_values(
    values_BC: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
) -> torch.Tensor:
    """`values_BC` with that of the first of all equal contexts for each of them, among completion tokens of the mask.

    A padded batch computes values of equal contexts by the same operations in the same order, so they tie to the last
    bit. A quantile may fall on the tie: all tokens of the tie are then selected. On a packed row the values differ in
    the last bit. Outside of the mask (a completion that was masked because it was cut off) nothing was computed, and
    the zero there is no value.

    Args:
        values_BC: what each completion token was predicted with, such as the entropy.
        input_ids, attention_mask: `(B, P + C)`.
        logits_to_keep: C.
    """
    columns = input_ids.shape[1] - logits_to_keep
    # What stands under the padding does not matter, and token t is predicted from what is in front of it.
    tokens = input_ids.masked_fill(attention_mask == 0, -1)
    contexts = tokens[:, columns : columns + logits_to_keep - 1]
    computed_BC = attention_mask[:, columns:].bool()
    first_BC = torch.zeros(values_BC.shape, dtype=torch.long, device=values_BC.device)
    for row in range(len(tokens)):
        same_prompt = (tokens[: row + 1, :columns] == tokens[row, :columns]).all(1, keepdim=True)
        same = torch.cat([same_prompt, contexts[: row + 1] == contexts[row]], dim=1).int().cumprod(1).bool()
        first_BC[row] = (same & computed_BC[: row + 1]).int().argmax(0)  # a computed token is equal to itself
    return torch.where(computed_BC, values_BC.gather(0, first_BC), values_BC)


def fill_masked_rows(values_B1: torch.Tensor, completion_mask_B1: torch.Tensor) -> torch.Tensor:
    """`values_B1` with the mean of the rows in the mask for each of the others.

    TRL takes values of one column for one per completion, and divides their sum by all rows. On a packed row nothing
    is computed of a masked one, so its zero would count.
    """
    mask_B1 = completion_mask_B1.bool()
    return torch.where(mask_B1, values_B1, (values_B1 * mask_B1).sum() / mask_B1.sum().clamp(min=1))
