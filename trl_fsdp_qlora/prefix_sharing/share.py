"""`share_prompts` and `unshare_prompts`: one line for a model, or for a trainer's models.

`sharing.py` does it for one model.
"""

from dataclasses import replace
from typing import TypeVar

from torch import nn

from ..errors import PrefixSharingError
from .sharing import SharingOptions, install_sharing

Shared = TypeVar("Shared")


def share_prompts(
    shared: Shared,
    *,
    attention: str = "auto",
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs", "entropy"),
    lm_head_kernel: str = "auto",
) -> Shared:
    """Compute equal beginnings of a batch's rows once.

    This changes every call of a model with `fused_lm_head=True`, and every call of a model or of its backbone for
    logits, classes, a loss or last hidden states, that neither reads a cache nor returns one. It changes nothing of a
    trainer.

    Such a call returns what it returned before, equal up to rounding at every position that the attention mask keeps.
    Last hidden states are zero at the others. A call that asks for more (`generate`, a cache, all hidden states) runs
    the model's own forward. Calling `share_prompts` twice changes nothing. [`unshare_prompts`], or
    `attention="off"`, takes everything back: the forwards, the head if it was added here, the attention
    implementation, the recurrent layers' forwards and the hooks. The first training pass of a trainer's model is
    logged: how many of the padded tokens it computed.

    Args:
        shared: a model, or a trainer of transformers' or TRL's. A model is a causal language model or a classifier as
            TRL's trainers hold it, with or without PEFT, before or after it was wrapped. A language model without
            TRL's fused head gets one, for which TRL is imported. Of a trainer, its model is shared, and a reference or
            teacher that is a model of its own; a call of that one returns no cache unless it asks for one, because a
            call that returns a cache is not shared.
        attention: `"auto"`, `"off"`, or the name of an attention backend
            ([`trl_fsdp_qlora.prefix_sharing.attention.backends.BACKENDS`]). `"auto"` packs rows if that is exact;
            otherwise the pass runs as in stock TRL, and the reason is logged once. A backend that is named is used, or
            an error is raised; except that a call without `fused_lm_head` which cannot be packed runs as in stock TRL.
        temperature: divisor of the logits in the head that a model without TRL's fused head gets.
        outputs: the fields of `FusedCausalLMOutput` that this head computes, as in TRL.
        lm_head_kernel: the kernel that scores the tokens: `"trl"`, `"frozen"` or `"auto"`, see
            [`trl_fsdp_qlora.scoring.logprobs.choose_head_kernel`].

    Returns:
        `shared`.

    Raises:
        PrefixSharingError: `shared` is neither a model nor a trainer, `attention` is not known, or the backend that it
            names cannot serve this model.

    Example:

    ```python
    from trl import DPOTrainer
    from trl_fsdp_qlora import share_prompts

    trainer = DPOTrainer("Qwen/Qwen3-0.6B", train_dataset=dataset)
    share_prompts(trainer)
    trainer.train()
    ```
    """
    options = SharingOptions(attention, temperature, outputs, lm_head_kernel)
    trained_model, *references = models_of(shared)
    install_sharing(trained_model, replace(options, reports=trained_model is not shared))
    for reference in references:
        install_sharing(reference, replace(options, returns_no_cache=True))
    return shared


def unshare_prompts(shared: Shared) -> Shared:
    """Take back what [`share_prompts`] put on a model, or on a trainer's models. A wrapper put on later stays.

    Returns:
        `shared`, which computes what it computed before.

    Raises:
        PrefixSharingError: `shared` is neither a model nor a trainer.
    """
    return share_prompts(shared, attention="off")


def models_of(shared: object) -> list[nn.Module]:
    """A model; or the model that a trainer trains, and a reference or a teacher that is a model of its own.

    Raises:
        PrefixSharingError: `shared` is neither a model nor a trainer.
    """
    if isinstance(shared, nn.Module):
        return [shared]
    model = getattr(shared, "model", None)
    if not isinstance(model, nn.Module):
        raise PrefixSharingError(
            f"share_prompts({shared!r:.80}): {type(shared).__name__} is neither a model nor a trainer with a model; "
            "pass the model (an nn.Module) or the trainer that holds it"
        )
    references = (getattr(shared, name, None) for name in ("ref_model", "teacher_model"))
    return [model, *(ref for ref in references if isinstance(ref, nn.Module) and ref is not model)]
