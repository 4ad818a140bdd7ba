"""`share_prompts`, the one line for any trainer of TRL's, and for a model without a trainer."""

import logging
from typing import TypeVar

from torch import nn
from transformers import Trainer

from ..experimental.losses_in_tiles import pairs, self_distillation
from ..experimental.losses_in_tiles.heads import WithoutLogits
from ..experimental.losses_in_tiles.pairs import PairsByFusedHead
from ..experimental.losses_in_tiles.self_distillation import LossInTiles
from .sharing import install_sharing

logger = logging.getLogger(__name__)

Shared = TypeVar("Shared", nn.Module, Trainer)

# Methods that hold no logits of a batch, by the module of TRL's trainer. Nothing imports these modules here: TRL warns
# whoever imports an experimental one.
_WITHOUT_LOGITS = {
    **dict.fromkeys(self_distillation.MODULES, LossInTiles),
    **dict.fromkeys(pairs.MODULES, PairsByFusedHead),
}


def share_prompts(
    shared: Shared,
    *,
    attention: str = "auto",
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs", "entropy"),
    lm_head_kernel: str = "auto",
) -> Shared:
    """Compute equal beginnings of a batch's rows once.

        trainer = trl.DPOTrainer(...)
        share_prompts(trainer)

    This changes every call of a model with `fused_lm_head=True`, and every call of a model or of its backbone for
    logits, classes, a loss or last hidden states, that neither reads a cache nor returns one.

    Such a call returns what it returned before, equal up to rounding at every position that the attention mask keeps.
    Last hidden states are zero at the others. A call that asks for more (`generate`, a cache, all hidden states) runs
    the model's own forward. Calling `share_prompts` twice changes nothing, and `attention="off"` takes everything
    back: the forwards, the head if it was added here, the attention implementation, the recurrent layers' forwards,
    the hooks, the trainer's methods and `config.use_cache`.

    Args:
        shared: a trainer of TRL's, or a model: a causal language model or a classifier as TRL's trainers hold it, with
            or without PEFT, before or after it was wrapped. A language model without TRL's fused head gets one. Of a
            trainer, its model is shared, and a reference or teacher that is a model of its own; `config.use_cache` of
            that one becomes `False`, because a call that returns a cache is not shared. SDPO, SDFT, CPO and ORPO then
            hold no logits of a batch ([`self_distillation`], [`pairs`]).
        attention: `"auto"`, `"off"`, or the name of an attention backend
            ([`trl_fsdp_qlora.prefix_sharing.attention.backends.BACKENDS`]). `"auto"` packs rows if that is exact;
            otherwise the pass runs as in stock TRL, and the reason is logged once. A backend that is named is used, or
            an error is raised; except that a call without `fused_lm_head` which cannot be packed runs as in stock TRL.
        temperature: divisor of the logits in the head that a model without TRL's fused head gets.
        outputs: the fields of `FusedCausalLMOutput` that this head computes, as in TRL; in CPO and ORPO always those
            of their losses.
        lm_head_kernel: the kernel that scores the tokens: `"trl"`, `"frozen"` or `"auto"`, see
            [`trl_fsdp_qlora.scoring.logprobs.choose_head_kernel`].

    Returns:
        `shared`.

    Raises:
        PrefixSharingError: `attention` is not known, or the backend that it names cannot serve this model.
    """
    models = [shared]
    if isinstance(shared, Trainer):
        models = models_of(shared)
        _hold_logits(shared)
        if attention != "off":
            outputs = _hold_no_logits(shared) or outputs
    for model in models:
        sharing = install_sharing(
            model, attention=attention, temperature=temperature, outputs=outputs, lm_head_kernel=lm_head_kernel
        )
        if attention != "off" and model is not models[0]:
            sharing.return_no_cache()
    return shared


def models_of(trainer: Trainer) -> list[nn.Module]:
    """The model that trains, and a reference or a teacher that is a model of its own."""
    further = map(vars(trainer).get, ("ref_model", "teacher_model"))
    return [trainer.model, *(x for x in further if isinstance(x, nn.Module) and x is not trainer.model)]


def _hold_no_logits(trainer: Trainer) -> tuple[str, ...]:
    """Give a trainer methods that hold no logits of a batch, if there are any; returns outputs that they need."""
    cls = type(trainer)
    trls = next((each for each in cls.__mro__ if each.__module__ in _WITHOUT_LOGITS), None)
    if trls is None:
        return ()
    methods = _WITHOUT_LOGITS[trls.__module__]
    own = [name for name in methods.replaced if getattr(cls, name) is not getattr(trls, name)]
    if own:
        logger.warning(
            "The logits of a batch are held whole, as in stock TRL: %s has its own %s.", cls.__name__, ", ".join(own)
        )
        return ()
    trainer.__class__ = type(cls.__name__, (methods, cls), {"__module__": cls.__module__, "trls": trls})
    return methods.outputs


def _hold_logits(trainer: Trainer) -> None:
    """Take [`_hold_no_logits`] back."""
    if isinstance(trainer, WithoutLogits):
        trainer.__class__ = type(trainer).__bases__[1]
