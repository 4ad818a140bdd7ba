"""What is borrowed from vLLM's CPU backend. Importing this needs vLLM, so only what starts an engine on CPUs does."""

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from .signatures import misfits

__all__ = ["FITS", "PunicaWrapperCPU", "current_platform"]

EXPECTED = {
    "PunicaWrapperCPU.update_metadata": (
        PunicaWrapperCPU.update_metadata,
        "self mapping lora_index_to_id max_loras vocab_size kwargs",
    ),
    "PunicaWrapperCPU.add_lora_linear": (
        PunicaWrapperCPU.add_lora_linear,
        "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs",
    ),
    "PunicaWrapperCPU.add_lora_logits": (
        PunicaWrapperCPU.add_lora_logits,
        "self y x lora_a_stacked lora_b_stacked scale buffer kwargs",
    ),
}
# Where this vLLM has them otherwise, its own way of computing is kept.
FITS = not misfits(EXPECTED) and current_platform.get_punica_wrapper().endswith(".PunicaWrapperCPU")
