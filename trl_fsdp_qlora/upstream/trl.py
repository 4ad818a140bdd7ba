"""The one place that touches private names of TRL.

Every private function or method this package calls or overrides is listed here with the parameters it is written for,
and checked once at import. An upstream release that renames or reshapes one of them is then a message that says which,
instead of a wrong number somewhere in a loss.
"""

import inspect
from collections.abc import Callable

import trl
from packaging.version import Version
from trl.chat_template_utils import parse_response
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.models import unwrap_model_for_generation
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import (
    FusedCausalLMOutput,
    RepeatSampler,
    ensure_master_addr_port,
    get_callable_name,
    is_async_callable,
    maybe_gather_lm_head_ctx,
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
    use_adapter,
)

__all__ = [
    "VISION_ARGUMENTS",
    "ChunkedLogProbFunction",
    "FusedCausalLMOutput",
    "RepeatSampler",
    "UnsupportedTRLVersion",
    "ensure_master_addr_port",
    "get_callable_name",
    "is_async_callable",
    "maybe_gather_lm_head_ctx",
    "parse_response",
    "shuffle_sequence_dict",
    "split_pixel_values_by_grid",
    "split_tensor_dict",
    "unsplit_pixel_values_by_grid",
    "unwrap_model_for_generation",
    "use_adapter",
]

TESTED_TRL = "1.16"


class UnsupportedTRLVersion(ImportError):
    """The installed TRL differs from the one this package was written for, in a place that matters."""


# What is overridden or called -> its parameters, in order, as of TRL 1.16.
_VISION = (
    "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
    "mm_token_type_ids image_position_ids"
)
VISION_ARGUMENTS = tuple(_VISION.split())
EXPECTED: dict[str, tuple[Callable, str]] = {
    "GRPOTrainer._prepare_inputs": (GRPOTrainer._prepare_inputs, "self generation_batch"),
    "GRPOTrainer._generate_and_score_completions": (GRPOTrainer._generate_and_score_completions, "self inputs"),
    "GRPOTrainer._generate": (GRPOTrainer._generate, "self prompts"),
    "GRPOTrainer._calculate_rewards": (
        GRPOTrainer._calculate_rewards,
        "self inputs prompts completions completion_ids_list",
    ),
    "GRPOTrainer._get_per_token_logps_and_entropies": (
        GRPOTrainer._get_per_token_logps_and_entropies,
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss " + _VISION,
    ),
    "GRPOTrainer._compute_loss": (GRPOTrainer._compute_loss, "self model inputs"),
    "GRPOTrainer._tokenize_prompts": (GRPOTrainer._tokenize_prompts, "self prompts"),
    "GRPOTrainer._get_train_sampler": (GRPOTrainer._get_train_sampler, "self dataset"),
    "GRPOTrainer._save_checkpoint": (GRPOTrainer._save_checkpoint, "self model trial"),
    "GRPOTrainer.create_accelerator_and_postprocess": (GRPOTrainer.create_accelerator_and_postprocess, "self"),
    "GRPOTrainer._save": (GRPOTrainer._save, "self output_dir state_dict"),
    "GRPOTrainer._save_optimizer_and_scheduler": (GRPOTrainer._save_optimizer_and_scheduler, "self output_dir"),
    "GRPOTrainer._load_from_checkpoint": (GRPOTrainer._load_from_checkpoint, "self resume_from_checkpoint model"),
    "GRPOTrainer._load_best_model": (GRPOTrainer._load_best_model, "self"),
    "GRPOTrainer._load_optimizer_and_scheduler": (GRPOTrainer._load_optimizer_and_scheduler, "self checkpoint"),
    "ChunkedLogProbFunction.forward": (
        ChunkedLogProbFunction.forward,
        "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs",
    ),
    "RepeatSampler.__init__": (
        RepeatSampler.__init__,
        "self data_source mini_repeat_count batch_size repeat_count shuffle seed",
    ),
    "get_callable_name": (get_callable_name, "func"),
    "is_async_callable": (is_async_callable, "func"),
    "shuffle_sequence_dict": (shuffle_sequence_dict, "seq_dict"),
    "split_tensor_dict": (split_tensor_dict, "tensor_dict num_chunks"),
    "split_pixel_values_by_grid": (split_pixel_values_by_grid, "batch"),
    "unsplit_pixel_values_by_grid": (unsplit_pixel_values_by_grid, "batch"),
    "maybe_gather_lm_head_ctx": (maybe_gather_lm_head_ctx, "params"),
    "parse_response": (parse_response, "tokenizer ids prefix tools"),
    "unwrap_model_for_generation": (
        unwrap_model_for_generation,
        "model accelerator gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs",
    ),
    "use_adapter": (use_adapter, "model adapter_name"),
}


def misfits(expected: dict[str, tuple[Callable, str]]) -> list[str]:
    """The private names in `expected` whose signature is not the one they were written for, each with both."""
    problems = []
    for name, (function, parameters) in expected.items():
        found = " ".join(inspect.signature(inspect.unwrap(function)).parameters)
        if found != parameters:
            problems.append(f"{name}: expected ({parameters}), found ({found})")
    return problems


def check_seams(expected: dict[str, tuple[Callable, str]] = EXPECTED) -> None:
    """Compare every private name of TRL in `expected` with the signature it was written for.

    Raises:
        UnsupportedTRLVersion: names each seam that differs, what was expected, and what to install.
    """
    if problems := misfits(expected):
        raise UnsupportedTRLVersion(
            f"trl_fsdp_qlora is written for TRL {TESTED_TRL}.x; the installed TRL {trl.__version__} differs in\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + f"\nInstall a version that fits: pip install 'trl~={TESTED_TRL}.0'"
        )


if Version(trl.__version__).release[:2] != Version(TESTED_TRL).release:
    raise UnsupportedTRLVersion(
        f"trl_fsdp_qlora is written for TRL {TESTED_TRL}.x and found TRL {trl.__version__}, which it was never tested "
        f"with. Install a version that fits: pip install 'trl~={TESTED_TRL}.0'"
    )
check_seams()
