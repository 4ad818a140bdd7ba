"""A padded batch as the host sees it, and where it is cut to be packed."""

from dataclasses import dataclass

import numpy as np
import torch


class UnpackableBatch(ValueError):
    """The masks do not describe left-padded prompts followed by right-padded completions."""


@dataclass
class BatchFacts:
    """The padded batch as the host sees it, read from the device in one transfer."""

    prompt_lengths_B: np.ndarray
    completion_lengths_B: np.ndarray
    scored_BC: np.ndarray
    new_prompt_B: np.ndarray  # row b has another prompt than row b - 1
    completion_ids_BC: np.ndarray | None = None  # where they were asked for
    image_keys_BN: np.ndarray | None = None  # what rows with the same images have in common

    @property
    def starts_group_B(self) -> np.ndarray:
        """`new_prompt_B`, and the first row whatever stands before it in a larger batch."""
        return self.new_prompt_B | (np.arange(len(self.new_prompt_B)) == 0)

    def rows(self, part: slice, scored: bool = True) -> "BatchFacts":
        """The facts of a stretch of rows; with `scored=False` as if nothing in them were to be scored."""
        scored_BC = self.scored_BC[part]
        return BatchFacts(
            self.prompt_lengths_B[part],
            self.completion_lengths_B[part],
            scored_BC if scored else np.zeros_like(scored_BC),
            self.new_prompt_B[part],
            None if self.completion_ids_BC is None else self.completion_ids_BC[part],
            None if self.image_keys_BN is None else self.image_keys_BN[part],
        )


def read_batch(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    score_mask_BC: torch.Tensor | None,
    with_ids: bool = False,
    images: tuple[torch.Tensor, int] | None = None,
) -> BatchFacts:
    """Lengths, scored positions and equal neighbouring prompts of a padded batch `(B, P + C)`; one host sync.

    Args:
        input_ids, attention_mask, logits_to_keep, score_mask_BC: as in [`layout.pack`].
        with_ids: completions' tokens as well, which nested rows are made from.
        images: numbers `(B, N)` that rows with the same images have in common, and the token that stands for an image.

    Raises:
        UnpackableBatch: a mask has holes, a row has no prompt token, or an image's token stands where completions begin.
    """
    rows, width = input_ids.shape
    prompt_width = width - logits_to_keep
    mask = attention_mask.bool()
    # Two rows share their prompt when padding and tokens agree; what stands under the padding does not matter.
    prompt = input_ids[:, :prompt_width].masked_fill(~mask[:, :prompt_width], -1)
    new_prompt = torch.ones(rows, 1, dtype=torch.bool, device=mask.device)
    new_prompt[1:, 0] = (prompt[1:] != prompt[:-1]).any(1)
    parts = {"mask": mask, "new_prompt": new_prompt}
    if images is not None:
        new_prompt[1:, 0] |= (images[0][1:] != images[0][:-1]).any(1)
        # Each completion has a copy of the prompt's last token, and no pixels of its own.
        parts["misplaced"] = ((input_ids == images[1]) & mask)[:, prompt_width - 1 :]
        parts["image_keys"] = images[0]
    if score_mask_BC is not None:
        parts["scored"] = score_mask_BC.bool()
    if with_ids:
        parts["ids"] = input_ids[:, prompt_width:]
    # In one transfer; what is true or false becomes a number beside others.
    host = torch.cat(list(parts.values()), dim=1).cpu().numpy()
    ends = np.cumsum([part.shape[1] for part in parts.values()])
    read = dict(zip(parts, np.split(host, ends[:-1], axis=1), strict=True))
    if images is not None and read["misplaced"].any():
        raise UnpackableBatch("an image's token stands at a prompt's end or in a completion")
    host_mask, new_prompt_B = read["mask"].astype(bool), read["new_prompt"][:, 0].astype(bool)
    prompt_mask, completion_mask = host_mask[:, :prompt_width], host_mask[:, prompt_width:]
    if (prompt_mask[:, 1:] < prompt_mask[:, :-1]).any() or (completion_mask[:, 1:] > completion_mask[:, :-1]).any():
        raise UnpackableBatch("the attention mask is not left padding, prompt, completion, right padding")
    prompt_lengths_B = prompt_mask.sum(1)
    if (prompt_lengths_B == 0).any():
        raise UnpackableBatch("a row has no prompt token to predict its first completion token from")
    scored_BC = completion_mask if score_mask_BC is None else completion_mask & read["scored"].astype(bool)
    return BatchFacts(
        prompt_lengths_B, completion_mask.sum(1), scored_BC, new_prompt_B, read.get("ids"), read.get("image_keys")
    )


def cut_rows(facts: BatchFacts, budget: int, completion_width: int, rows_at_once: int | None) -> list[tuple[int, int]]:
    """Cut a batch into stretches of rows whose packed tokens stay within `budget`, between groups where possible.

    With `rows_at_once` the stretches are just that many rows each (a router loss is a mean over stock's stretches).
    """
    rows = len(facts.new_prompt_B)
    if rows_at_once is not None:
        return [(i, min(i + rows_at_once, rows)) for i in range(0, rows, rows_at_once)]
    scored = facts.scored_BC
    forward_B = np.where(scored.any(1), completion_width - scored[:, ::-1].argmax(1), 0)
    group_starts = np.flatnonzero(facts.starts_group_B)
    cuts, first, used = [], 0, 0
    for start, end in zip(group_starts, [*group_starts[1:], rows], strict=True):
        prompt = int(facts.prompt_lengths_B[start])
        if used and used + prompt + forward_B[start:end].sum() > budget:
            cuts.append((first, start))
            first, used = start, 0
        used += prompt
        for row in range(start, end):
            if row > first and used + forward_B[row] > budget:
                cuts.append((first, row))
                first, used = row, prompt
            used += int(forward_B[row])
    cuts.append((first, rows))
    return [(int(a), int(b)) for a, b in cuts]
