"""Every name borrowed from TRL.

Functions and methods that this package calls or overrides are listed with the parameters they are written for, and compared
once at import: a warning names those that an upstream release has renamed or reshaped.
"""

import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
import trl
from packaging.version import Version
from transformers import PretrainedConfig
from trl.chat_template_utils import parse_response
from trl.kernels import chunked_logprob
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.models import unwrap_model_for_generation
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import (
    FusedCausalLMOutput,
    RepeatSampler,
    ensure_master_addr_port,
    maybe_gather_lm_head_ctx,
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
    use_adapter,
)

from .replaced import replaced
from .signatures import warn_of_misfits

logger = logging.getLogger(__name__)

TESTED_TRL = "1.16"
# What is overridden or called -> its parameters, in order, as of TRL 1.16.
EXPECTED = {
    "GRPOTrainer._prepare_inputs": "self generation_batch",
    "GRPOTrainer._generate_and_score_completions": "self inputs",
    "GRPOTrainer._generate": "self prompts",
    "GRPOTrainer._generate_single_turn": "self prompt_ids images multimodal_fields num_generations has_tool_images",
    "GRPOTrainer._calculate_rewards": "self inputs prompts completions completion_ids_list",
    "GRPOTrainer._log_completion_extra": "self column values",
    "GRPOTrainer._log_metric": "self name value",
    "grpo_trainer.gather": "tensor",
    "GRPOTrainer._get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep batch_size "
    "compute_entropy compute_aux_loss pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles "
    "image_sizes token_type_ids mm_token_type_ids image_position_ids",
    "GRPOTrainer._compute_loss": "self model inputs",
    "GRPOTrainer._tokenize_prompts": "self prompts",
    "GRPOTrainer._get_train_sampler": "self dataset",
    "GRPOTrainer._save_checkpoint": "self model trial",
    "GRPOTrainer._load_optimizer_and_scheduler": "self checkpoint",
    "ChunkedLogProbFunction.forward": "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping "
    "logit_scale outputs",
    "chunked_logprob._addmm_fp32": "acc a b",  # see `older_gpus.py`
    "RepeatSampler.__init__": "self data_source mini_repeat_count batch_size repeat_count shuffle seed",
    "shuffle_sequence_dict": "seq_dict",
    "split_tensor_dict": "tensor_dict num_chunks",
    "split_pixel_values_by_grid": "batch",
    "unsplit_pixel_values_by_grid": "batch",
    "maybe_gather_lm_head_ctx": "params",
    "parse_response": "tokenizer ids prefix tools",
    "unwrap_model_for_generation": "model accelerator gather_deepspeed3_params generation_kwargs "
    "gradient_checkpointing_kwargs",
    "use_adapter": "model adapter_name",
}
# What a micro-batch may hold for the log-probabilities to be compared with.
OLD_LOGPS, REFERENCE_LOGPS, SAMPLED_LOGPS = "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"
COMPARED = (OLD_LOGPS, REFERENCE_LOGPS, SAMPLED_LOGPS)
IMPORTANCE_RATIO = "importance_sampling_ratio"  # of vLLM's samples, one per token or per completion
# What TRL logs of them.
SAMPLING_METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    *(f"sampling/{IMPORTANCE_RATIO}/{figure}" for figure in ("min", "mean", "max")),
)
# Metrics that TRL averages over all tokens of the loss: those of scored tokens, and those of learning completions.
SCORED_MEANS = ("entropy",)
LEARNING_MEANS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
PHI_MEAN = "vespo/phi_seq_mean"  # over completions
GROUP_SPREAD = "frac_reward_zero_std"


if Version(trl.__version__).release[:2] != Version(TESTED_TRL).release:
    logger.warning("trl_fsdp_qlora is written for TRL %s and was never run with TRL %s", TESTED_TRL, trl.__version__)
warn_of_misfits("TRL", trl.__version__, sys.modules[__name__], EXPECTED)


def rewards_of_rank(trainer: GRPOTrainer, rows: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
    """TRL's rewards of R completions by K functions, `(R, K)`, of this rank alone and unlogged: TRL gathers them in the end."""
    unlogged = replaced(trainer, _log_completion_extra=lambda *_: None, _log_metric=lambda *_: None)
    with replaced(grpo_trainer, gather=lambda rewards: rewards), unlogged:
        return GRPOTrainer._calculate_rewards(trainer, rows, prompts, completions, ids)


def rows_of_images(vision: dict[str, Any], rows: Iterable[int]) -> dict[str, Any]:
    """TRL's vision arguments for some rows of a batch: pixels and grids per image, everything else per row."""
    apart, rows = split_pixel_values_by_grid(vision), [int(row) for row in rows]
    chosen = {n: x[rows] if isinstance(x, torch.Tensor) else [x[row] for row in rows] for n, x in apart.items()}
    return joined_images(chosen)


def joined_images(batch: dict[str, Any]) -> dict[str, Any]:
    """`unsplit_pixel_values_by_grid`; without pixels where no row has an image, which a vision tower does not take."""
    if batch.get("num_images") is not None and not any(batch["num_images"]):
        return {n: x for n, x in batch.items() if not n.startswith(("pixel_", "image_", "num_", "spatial_"))}
    return unsplit_pixel_values_by_grid(batch)


def counts_experts(text_config: PretrainedConfig) -> bool:
    """Whether there is a router to take a loss of; the number of experts is then where TRL's fused forward looks for it.

    Granite's, among others, call it otherwise (an AttributeError in TRL 1.16), and dense ones of theirs have a coefficient too.
    """
    if not hasattr(text_config, "num_experts"):
        names = ("num_local_experts", "n_routed_experts")
        text_config.num_experts = next(filter(None, (getattr(text_config, name, None) for name in names)), 0)
    return bool(text_config.num_experts)
