"""One softmax attention out of two, over different keys, by their log-sum-exps."""

import torch


def merge(own_out, own_lse, prompt_out, prompt_lse) -> torch.Tensor:
    """The output over both parts, from `(…, D)` outputs and their log-sum-exps `(…)`, in at least float32.

    A weight rounded to bfloat16 is off by up to 1 in 256, for all of a head's numbers alike.
    """
    dtype = torch.promote_types(own_out.dtype, torch.float32)
    share = torch.sigmoid(prompt_lse.to(dtype) - own_lse.to(dtype)).unsqueeze(-1)
    return torch.lerp(own_out.to(dtype), prompt_out.to(dtype), share)
