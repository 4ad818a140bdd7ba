"""The table of seams: every undocumented method and attribute of TRL's trainers that this package names.

`trl.py` has the names that are imported ([`trl.BORROWED`]); what TRL documents (classes, arguments, fields of configs)
is no seam. A TRL that nobody has run us with is compared with the table when a trainer is made ([`check`]).
"""

import logging
from typing import TYPE_CHECKING, NamedTuple

from .trl import INSTALL, MissingName

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)


class Seam(NamedTuple):
    """A name of TRL's trainers.

    Attributes:
        of: the trainers that have it.
        use: what is done with it; `"substituted"` if a method of TRL's finds another value of it, see
            [`trl_fsdp_qlora.utils.substitute.Substitute`].
        without: what is off without it, while TRL's own code runs; empty if nothing can be trained without it.
    """

    of: str
    use: str
    without: str = ""


METHODS = {
    "_calculate_rewards": Seam("GRPO RLOO", "override, call", "seconds of rewards, dynamic_sampling"),
    "_compute_loss": Seam("GRPO RLOO DPO", "override", "one look ahead over a step, skipped completions"),
    "_generate": Seam("GRPO RLOO", "override, call", "seconds of generation, dynamic_sampling, rollouts_ahead"),
    "_generate_and_score_completions": Seam(
        "GRPO RLOO", "override, call", "seconds of preparation, rollouts_ahead, accuracy"
    ),
    "_generate_single_turn": Seam("GRPO RLOO", "override", "prompts prefilled once (compact_generation)"),
    "_get_per_token_logps_and_entropies": Seam("GRPO RLOO", "override, call", "one look ahead over a step"),
    "_tokenize_prompts": Seam(
        "GRPO RLOO", "override, call", "history: template, the prompt in the start-up block, A*-PO"
    ),
    "_tool_call_loop": Seam("GRPO", "override", "episodes of different length on sharded ranks"),
    "compute_ref_log_probs": Seam("DPO", "override", "packed rows in precomputed reference passes"),
}
ATTRIBUTES = {
    "_async_tool_dicts": Seam("GRPO", "substituted", "tool_timeout"),
    "_buffered_inputs": Seam("GRPO RLOO", "read, written"),
    "_dist": Seam("GRPO RLOO", "read"),
    "_environment_pool": Seam("GRPO", "read, substituted", "environments with rollouts_ahead"),
    "_image_pad_token_id": Seam("GRPO", "read", "images that tools return"),
    "_last_loaded_step": Seam("GRPO RLOO", "read, written", "vLLM's draws outside of training"),
    "_log_completion_extra": Seam("GRPO", "substituted", "A*-PO's estimates of values"),
    "_log_metric": Seam("GRPO", "substituted", "A*-PO's estimates of values"),
    "_logs": Seam("GRPO RLOO", "read"),
    "_metrics": Seam("GRPO RLOO DPO", "read"),
    "_pending_extra_logs": Seam("GRPO", "read", "dynamic_sampling"),
    "_pending_metrics": Seam("GRPO", "read", "log_metric in draws of rollouts_ahead"),
    "_step": Seam("GRPO RLOO", "read, written"),
    "_sync_tool_dicts": Seam("GRPO", "substituted", "tool_timeout"),
    "_tokenizer": Seam("GRPO RLOO", "read, substituted", "a tokenizer for each thread, with rollouts_ahead"),
    "async_loop": Seam("GRPO", "read", "closing environments by a coroutine, with rollouts_ahead"),
    "aux_loss_enabled": Seam("GRPO RLOO DPO", "read, written"),
    "environments": Seam("GRPO", "read, written", "environments with rollouts_ahead"),
    "eos_token_ids": Seam("GRPO RLOO", "read"),
    "generation_config": Seam("GRPO RLOO", "read", "prompts prefilled once (compact_generation)"),
    "reward_func_names": Seam("GRPO RLOO", "read"),
    "vllm_generation": Seam("GRPO RLOO", "read", "vLLM"),
}

# Methods of TRL's that get or return values of single tokens. A user who overrides one may read every token's.
METHODS_OF_LOSS = (
    "compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "get_high_entropy_mask",
    "get_off_policy_mask", "get_gamma_weights",
)  # fmt: skip

# Names in TRL's modules in whose place others are found while a function of TRL's runs.
REPLACED = {
    "gather": ("trl.trainer.grpo_trainer", "A*-PO's estimates of values"),
    "LLM": ("trl.generation.vllm_generation", "vllm_engine_kwargs"),
    "_addmm_fp32": ("trl.kernels.chunked_logprob", "bfloat16 on GPUs that lack it"),
}


def check(trainer: "Trainer", stock: type) -> None:
    """Log a line for each seam that `stock`, TRL's class of the trainer, lacks.

    Raises:
        MissingName: nothing can be trained without it.
    """
    method = stock.__name__.removesuffix("Trainer")
    attributes = vars(trainer)
    # TRL sets some attributes only if they are used: of those with a feature of their own that is the feature's check.
    missing = [name for name in METHODS if not hasattr(stock, name)]
    missing += [name for name, seam in ATTRIBUTES.items() if not seam.without and name not in attributes]
    for name in missing:
        of, _, without = (METHODS | ATTRIBUTES)[name]
        if method not in of.split():
            continue
        if not without:
            raise MissingName(f"this TRL's {stock.__name__} has no {name}, which every step needs: {INSTALL}")
        logger.warning("this TRL's %s has no %s: as in stock TRL without %s", stock.__name__, name, without)
