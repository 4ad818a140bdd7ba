"""Which models see positions only by their differences, so that rows in different columns may share tokens.

That is known, not guessed: a model is one of these if its layers are code of a family in [`FAMILIES`], and its rotary
tables have no setting but those of [`ROTARY_SETTINGS`]. Rotary embeddings alone are no proof. HunYuan has a norm with
weights behind the rotation, Ministral 3 a scale by position, RecurrentGemma a state that begins again at position 0,
and in Beam positions that are further apart than a limit count as absolute ones. Of every other model only rows that
begin in the same column share tokens.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

# Folders of transformers' models. For each a small model in float64 with random norms gave the same hidden states
# after all positions were moved by 1, 7, 3,000 and 40,000 (dev/LOG.md, 2026-11-26). `test_relative_positions.py` does
# that again.
_FAMILIES = """
afmoe apertus arcee aria axk1 axk2 bailing_hybrid bamba bitnet cohere cohere2 cohere2_moe cosmos3_edge cwm
deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 dots3_note ernie4_5 ernie4_5_moe exaone4 exaone_moe
falcon falcon_h1 flex_olmo gemma gemma2 gemma3 gemma3n gemma4 gemma4_unified glm glm4 glm4_moe glm4_moe_lite
glm4v glm4v_moe glm_moe_dsa glm_ocr gpt_neox gpt_neox_japanese gpt_oss granite granite_docling granite_swa
granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hy_v3 hy_v4 hyperclovax jais2 jamba
jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama longcat_flash mellum minicpm3 minimax minimax_m2
ministral mistral mixtral mllama moshi muse_glimmer nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
olmoe paddleocr_vl persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5
qwen3_5_moe qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open stablelm
starcoder2 step3p7 vaultgemma youtu zamba2
"""
FAMILIES = frozenset(_FAMILIES.split())
# Rotary settings whose tables depend on the position alone, and multiply queries and keys by no more than a constant.
# Tables that change with the longest row are dealt with by `facts.position_limit`.
_ROTARY_SETTINGS = """
attention_factor beta_fast beta_slow factor high_freq_factor long_factor low_freq_factor max_position_embeddings
mrope_interleaved mrope_section mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor
rope_theta rope_type short_factor truncate type
"""
ROTARY_SETTINGS = frozenset(_ROTARY_SETTINGS.split())
# Folders of the models whose decoders count the tokens in the mask, if they get no positions.
_COUNT_TOKENS = {"idefics", "opt"}


def sees_distances(model: PreTrainedModel) -> bool:
    """Whether only differences of positions are known to matter to `model`."""
    decoder = model.get_decoder()
    layers = [module for module in decoder.modules() if "layer_idx" in vars(module)]
    families = {family_of(type(module)) for module in (decoder, *layers)}
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    settings = set()
    for name, value in rope.items():
        settings |= set(value) if isinstance(value, dict) else {name}  # one table per type of layer, or one
    is_known = bool(layers and rope) and families <= FAMILIES and settings <= ROTARY_SETTINGS
    return is_known and stock_positions(model) is None


def family_of(module_class: type[nn.Module]) -> str | None:
    """Returns the folder in transformers' `models` that has the code of a class; `None` if it is no code of theirs."""
    if issubclass(module_class, FSDPModule):  # FSDP2 puts a class of its own in front
        module_class = next(cls for cls in module_class.__mro__ if cls.__module__.startswith("transformers."))
    parts = module_class.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] else None


def stock_positions(model: PreTrainedModel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The function by which `model` derives positions `(B, L)` from ids and mask; `None` if it counts columns.

    The model uses it if it gets no positions. OPT and Idefics count the tokens in the mask; RoBERTa, and models that
    are built like it, count the tokens whose id is not that of the padding token.
    """
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(
            getattr(module, "position_embeddings", None), nn.Embedding
        ):
            return lambda ids, _mask: module.create_position_ids_from_input_ids(ids, module.padding_idx)
    if family_of(type(model.get_decoder())) in _COUNT_TOKENS:
        return lambda _ids, mask: mask.cumsum(1) * mask - 1
    return None
