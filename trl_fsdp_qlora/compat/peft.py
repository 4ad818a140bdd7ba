"""The state of a model under PEFT, and LoRA on parameters of packed bytes.

PEFT is imported when it is used: it imports bitsandbytes, if that is installed.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..utils.replaced import replaced

if TYPE_CHECKING:
    from peft.tuners.lora.layer import ParamWrapper

# Types of adapters (PEFT's names) that change what a layer computes from one token, and look at no other token and at
# no row. Each was compared (tests/compat/test_peft.py). A type that is not here may average over a batch (Lily),
# choose by a whole row (X-LoRA) or put tokens before it (prompt tuning).
BY_TOKEN = {
    "ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3",
    "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "RANDLORA", "ROAD", "SHIRA",
    "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
}  # fmt: skip


def is_peft(model: nn.Module) -> bool:
    """Whether `model` is wrapped by PEFT. By class: transformers' models have an attribute `peft_config`, too."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def looks_beyond_tokens(model: nn.Module) -> str | None:
    """Why a forward of `model` needs the rows of its batch as they are: an adapter looks at more than single tokens.

    All adapters count, whether active or not, because any of them may become active.

    Args:
        model: a model without other wrappers than PEFT's; PEFT keeps the adapters' configs on the base model, too.

    Returns:
        The reason; `None` if all adapters, if any, compute each token by itself.
    """
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        adapter_type = config.peft_type.value
        if config.is_prompt_learning:
            return f"the adapter {name!r} ({adapter_type}) puts tokens or states of its own in front of every row"
        if getattr(config, "alora_invocation_tokens", None):
            return f"the adapter {name!r} (aLoRA) begins behind its invocation tokens, which it looks for in every row"
        if adapter_type not in BY_TOKEN:
            return f"the adapter {name!r} ({adapter_type}) is not known to compute each token by itself"
    return None


def card_written_by(model: nn.Module, write: Callable[[str], None]) -> AbstractContextManager:
    """In the block PEFT calls `write` with the folder of an adapter instead of writing its own card of it.

    `save_pretrained` has no argument for it, and changes a card that is there already.
    """
    if not is_peft(model):
        return nullcontext()
    return replaced(model, create_or_update_model_card=write)


def rows_have_adapters(model: nn.Module) -> bool:
    """Whether PEFT gives the layers of `model` something of each row in this forward (`adapter_names=[...]`).

    PEFT then hooks each of its layers but those of trainable tokens, so the first one is enough to look at.
    """
    if not getattr(model, "peft_config", None):
        return False
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
            return any(_is_of_peft(hook) for hook in module._forward_pre_hooks.values())
    return False


def _is_of_peft(hook) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, "__module__", "").startswith("peft.")


def is_reference(model: nn.Module) -> bool:
    """Whether `model` is the reference policy now: its adapter is off, or TRL's initial copy of the adapter is active.

    Args:
        model: wrapped or not.
    """
    # `accelerator.unwrap_model` would read package metadata from the disk each time (some 3 ms).
    peft_model = next((module for module in model.modules() if is_peft(module)), None)
    if peft_model is None:
        return False
    return not peft_model.has_active_enabled_adapter or peft_model.active_adapter == "ref"


def wraps_experts(module: nn.Module) -> bool:
    """Whether `module` is PEFT's wrapper around all experts of a layer, with an adapter of their parameters."""
    if not hasattr(module, "get_base_layer"):
        return False
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(module, ParamWrapper) and hasattr(module.get_base_layer(), "_is_expert_parallel")


def let_lora_adapt_packed_experts(model: nn.Module) -> None:
    """Let PEFT adapt parameters (`LoraConfig.target_parameters`) of `model` that hold packed bytes instead of numbers.

    PEFT's `ParamWrapper` reads the shape from the parameter, and adds the whole update to it. For each parameter in
    `layouts` of a layer of experts PEFT now reads the shape that the numbers have, and the layer gets the active
    adapters' factors in its attribute `lora` instead. PEFT's class stays as it is.
    """
    for block in model.modules():
        for experts in block.children():
            layouts = getattr(experts, "layouts", None)
            if not layouts:
                continue
            for name, layout in layouts.items():
                out_features, in_features = layout.shape
                shape = (in_features, out_features) if experts.is_transposed else (out_features, in_features)
                # PEFT prefers this attribute, which DeepSpeed gives to parameters that are not whole.
                experts.get_parameter(name).ds_shape = torch.Size((experts.num_experts, *shape))
            # The adapter comes later, and wraps `experts` as a child of `block`.
            block.register_forward_pre_hook(_pass_factors_to_packed_experts)


def _pass_factors_to_packed_experts(block: nn.Module, _inputs: tuple) -> None:
    for child in block.children():
        wrapper = child
        while wraps_experts(wrapper):  # one wrapper inside the other for each adapted parameter
            is_packed = wrapper.parameter_name in getattr(wrapper.get_base_layer(), "layouts", ())
            if is_packed and "_activate_lora" not in vars(wrapper):
                wrapper._activate_lora = MethodType(_with_factors, wrapper)
            wrapper = wrapper.base_layer


@contextmanager
def _with_factors(wrapper: "ParamWrapper", active_adapters: Sequence[str]) -> Iterator[None]:
    """Give the base layer the active adapters' factors inside the block, in place of `ParamWrapper._activate_lora`."""
    factors_by_parameter = wrapper.get_base_layer().lora
    name = wrapper.parameter_name
    factors_by_parameter[name] = [
        _factors(wrapper, adapter) for adapter in active_adapters if adapter in wrapper.lora_A
    ]
    try:
        yield
    finally:
        del factors_by_parameter[name]


def _factors(wrapper: "ParamWrapper", adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """`(experts, out, r)`, `(experts, r, in)` and the scaling: the weights that `get_delta_weight` multiplies."""
    a = wrapper.lora_A[adapter].weight
    b = wrapper.lora_B[adapter].weight
    rhs_ERI = a.reshape(wrapper.num_experts, -1, a.shape[-1])
    lhs_EOR = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    return lhs_EOR, rhs_ERI, wrapper.scaling[adapter]
