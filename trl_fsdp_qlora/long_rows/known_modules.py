"""Which modules are known to compute each token by itself: classes of transformers, by name.

A class that is not here runs as before, and so does a class of the user's own that extends one of these with another
forward. `tests/long_rows/test_tiles.py` compares the forwards of all these classes with those that were proven.
"""

from collections.abc import Callable

from torch import nn

from ..compat.peft import wraps_experts
from ..compat.transformers import is_experts

# Families of language models with a known `...MLP` and a known `...RMSNorm`, in transformers.models.
_WITH_BOTH = (
    "Afmoe", "Apertus", "Arcee", "AXK1", "BailingHybrid", "Bamba", "Cohere2Moe", "Cwm", "DeepseekV2", "DeepseekV3",
    "DeepseekV32", "DiffLlama", "Doge", "Dots1", "Ernie4_5", "Ernie4_5_Moe", "Ernie4_5_VLMoe", "Exaone4", "ExaoneMoe",
    "FalconH1", "FlexOlmo", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "Glm4Moe", "Glm4MoeLite", "Glm4vMoeText",
    "GlmMoeDsa", "Granite", "GraniteMoeHybrid", "GraniteMoeShared", "GraniteMoeSWA", "GraniteSWA", "HunYuanDenseV1",
    "HunYuanMoEV1", "HunYuanVL", "HyperCLOVAX", "HYV3", "Jamba", "KimiLinear", "Laguna", "Lfm2", "Lfm2Moe", "Lfm3",
    "Llama", "LongcatFlash", "Mellum", "MiMoV2Flash", "MiniCPM3", "Ministral", "Ministral3", "Mistral", "Mistral4",
    "MllamaText", "Molmo2", "Olmo2", "Olmo3", "OlmoHybrid", "Olmoe", "Ovis2", "Phi3", "Phi4Multimodal", "Qwen2",
    "Qwen2_5_VL", "Qwen2_5Omni", "Qwen2Moe", "Qwen3", "Qwen3_5", "Qwen3_5Moe", "Qwen3Moe", "Qwen3Next",
    "Qwen3OmniMoeThinkerText", "Qwen3VLMoeText", "Qwen3VLText", "SmolLM3", "SolarOpen", "VaultGemma", "Youtu", "Zamba",
)  # fmt: skip
_WITH_MLP = (
    "AriaSharedExperts", "Cohere", "Cohere2", "Gemma4Text", "Gemma4UnifiedText", "Glm4vText", "GlmOcrText", "Helium",
    "Jais2", "MistralLarge4Text", "NanoChat", "Nemotron", "NemotronH", "Olmo", "Phi", "StableLm",
)  # fmt: skip
_WITH_NORM = (
    "AriaText", "BitNet", "DeepseekV4", "FalconMamba", "Glm4v", "GptOss", "GraniteMoe", "JetMoe", "Mamba", "Mamba2",
    "MiniMax", "MiniMaxM2", "Mistral3", "MistralLarge4", "Mixtral", "Qwen2VL", "RecurrentGemma", "SeedOss", "Zamba2",
    "Zaya",
)  # fmt: skip
# The part of a layer that a class is, by its name. The tokens are the first two dimensions of its argument.
LAYER_PARTS: dict[str, str] = {}
for _family in (*_WITH_BOTH, *_WITH_MLP):
    LAYER_PARTS[f"{_family}MLP"] = "MLP"
for _family in (*_WITH_BOTH, *_WITH_NORM):
    LAYER_PARTS[f"{_family}RMSNorm"] = "norm"


def per_token(layer_part: str) -> Callable[[Callable], Callable]:
    """Decorator: a module that has this function as its own forward computes each token by itself.

    The tokens are the first dimension of all arguments of two dimensions, and the first two of others.

    Args:
        layer_part: `"MLP"`, `"norm"` or `"experts"`.
    """

    def mark(function: Callable) -> Callable:
        vars(function)["computes_each_token"] = layer_part
        return function

    return mark


def layer_part(module: nn.Module) -> str | None:
    """The part of a layer that a module is, if it is known to compute each token by itself; `None` if it is not."""
    if wraps_experts(module):
        return "experts"
    own_forward = vars(module).get("forward")
    if own_forward is not None:  # on the module itself: a wrapper of the user's, or a forward that is marked
        return getattr(own_forward, "computes_each_token", None)
    # Transformers calls every class of experts by one contract: `(tokens, hidden)`, and the experts of each token.
    if is_experts(module) and not module._is_expert_parallel:  # all experts are on this rank
        return "experts"
    # FSDP2 gives a module a class that extends the module's, with the same forward.
    cls = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    if not cls.__module__.startswith("transformers.models."):
        return None
    return LAYER_PARTS.get(cls.__name__)
