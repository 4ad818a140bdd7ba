"""Values of tokens as in TRL's padded batch: equal contexts have equal values."""

import torch


def share_values(
    values_BC: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    image_keys_B1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Give all tokens with equal contexts the value of the first of them; only completion tokens in the mask count.

    A padded batch computes values of equal contexts by the same operations in the same order, so they tie to the last
    bit. A quantile may fall on the tie: all tokens of the tie are then selected. On a packed row the values differ in
    the last bit. Outside of the mask (a completion that was masked because it was cut off) nothing was computed, so
    the zero there is not a value.

    Args:
        values_BC: a number for each completion token, such as the entropy of the distribution that predicted it.
        input_ids, attention_mask: `(B, P + C)`.
        logits_to_keep: C.
        image_keys_B1: equal for rows with the same images; `None` for a batch without images. Equal words about
            different images are different contexts.
    """
    columns = input_ids.shape[1] - logits_to_keep
    # Token ids under the padding do not matter. Token t is predicted from the tokens before it.
    is_padding = attention_mask == 0
    tokens = input_ids.masked_fill(is_padding, -1)
    prompts = tokens[:, :columns]
    if image_keys_B1 is not None:
        image_keys_B1 = image_keys_B1.to(prompts.device)
        prompts = torch.cat([image_keys_B1, prompts], dim=1)
    contexts = tokens[:, columns:-1]
    computed_BC = attention_mask[:, columns:].bool()
    first_BC = torch.zeros(values_BC.shape, dtype=torch.long, device=values_BC.device)
    for row in range(len(tokens)):
        up_to_row = slice(row + 1)
        same_prompt_token = prompts[up_to_row] == prompts[row]
        same_prompt = same_prompt_token.all(1, keepdim=True)
        same_token = contexts[up_to_row] == contexts[row]
        same = torch.cat([same_prompt, same_token], dim=1)
        same_so_far = same.int().cumprod(1)
        candidates = same_so_far.bool() & computed_BC[up_to_row]
        first_BC[row] = candidates.int().argmax(0)  # a computed token is equal to itself
    first_values_BC = values_BC.gather(0, first_BC)
    return torch.where(computed_BC, first_values_BC, values_BC)


def fill_masked_rows(values_B1: torch.Tensor, completion_mask_B1: torch.Tensor) -> torch.Tensor:
    """Give each row outside of the mask the mean of the rows in the mask.

    If the values have one column, TRL reads them as one value per completion and divides their sum by the number of
    all rows. A packed row computes nothing for a masked completion, so its zero would lower TRL's mean.
    """
    mask_B1 = completion_mask_B1.bool()
    total = (values_B1 * mask_B1).sum()
    count = mask_B1.sum().clamp(min=1)
    return torch.where(mask_B1, values_B1, total / count)
