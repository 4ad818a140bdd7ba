"""This package's names for the keys of `trl grpo`'s and Axolotl's configs.

A config of one of these tools is answered with all its differing keys at once.
"""

from collections.abc import Callable
from typing import Any

_TRL_REWARDS = {
    "accuracy_reward": "exact_answer",
    "reasoning_accuracy_reward": "exact_answer",
    "think_format_reward": "trl.rewards:think_format_reward",
}


def _rewards(value: Any) -> str:
    """The line for rewards: `rewards.accuracy` is `rewards.py:accuracy` here."""
    names = []
    for name in value if isinstance(value, list) else [value]:
        module, _, function = str(name).rpartition(".")
        import_path = f"{module.replace('.', '/') or 'my_rewards'}.py:{function}"
        names.append(import_path if module else _TRL_REWARDS.get(function, import_path))
    return f"rewards: [{', '.join(names)}]"


def _datasets(value: Any) -> str:
    """The line for the first dataset of a mixture, in its parts."""
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, dict):
        return "dataset: a Hub id or a file"
    names = (("path", "dataset"), ("name", "dataset_config"), ("split", "dataset_split"))
    line = ", ".join(f"{ours}: {first[theirs]}" for theirs, ours in names if theirs in first)
    return f"{line}; question_column and answer_column name its columns, system_prompt and prompt_template the prompt"


def _adapter(value: Any) -> str:
    return "use_peft: true, load_in_4bit: true" if value == "qlora" else "use_peft: true"


def _val_set_size(value: Any) -> str:
    return "leave it out, and set held_out or eval_split" if not value else "held_out: a number of problems"


# A text with the line to write, in which `{value}` stands for the value of the config, or a function of the value.
_WHOLE_DATASET = "leave it out: recipes read the whole dataset; a script of your own takes a streaming one"
_TRL = {
    "dataset_name": "dataset: {value}",
    "dataset_train_split": "dataset_split: {value}",
    "dataset_test_split": "eval_split: {value}",
    "dataset_streaming": _WHOLE_DATASET,
    "streaming": _WHOLE_DATASET,
    "test_split_size": "held_out: a number of problems",
    "ignore_bias_buffers": "leave it out",
    "reward_model_name_or_path": "no key here: give a reward model to EfficientGRPOTrainer in a script of your own",
    "reward_funcs": _rewards,
    "datasets": _datasets,
}

_NOT_NEEDED = "leave it out: rows are packed, and no padding is computed"
_AXOLOTL = {
    "base_model": "model_name_or_path: {value}",
    "rl": "leave it out: the command names it (trl-fsdp-qlora grpo, dpo, ...)",
    "adapter": _adapter,
    "lora_target_linear": "lora_target_modules: [all-linear]",
    "peft_use_dora": "use_dora: {value}",
    "peft_use_rslora": "use_rslora: {value}",
    "micro_batch_size": "per_device_train_batch_size: {value} (completions; whole groups if it is a multiple of "
    "num_generations)",
    "num_epochs": "num_train_epochs: {value}",
    "optimizer": "optim: {value}",
    "lr_scheduler": "lr_scheduler_type: {value}",
    "warmup_ratio": "warmup_steps: {value} (below 1 it is a fraction)",
    "sequence_len": "max_completion_length, of the completion alone; prompts are not cut",
    "rl_beta": "beta: {value}",
    "val_set_size": _val_set_size,
    "saves_per_epoch": "save_steps: a number of optimizer steps",
    "evals_per_epoch": "accuracy_steps: a number of optimizer steps",
    "chat_template": "leave it out: the tokenizer's own is used (chat: false for none)",
    "special_tokens": "leave it out: the tokenizer's own are used",
    "tokens": "leave it out: the tokenizer's own are used",
    "datasets": _datasets,
    "test_datasets": "eval_dataset: a Hub id or a file, eval_split: its split",
    "dataset_prepared_path": "leave it out",
    "skip_prepare_dataset": "leave it out",
    "dataset_processes": "leave it out",
    "sample_packing": _NOT_NEEDED,
    "eval_sample_packing": _NOT_NEEDED,
    "pad_to_sequence_len": _NOT_NEEDED,
    "group_by_length": _NOT_NEEDED,
    "train_on_inputs": "leave it out: prompts are never trained",
    "flash_attention": "attn_implementation: flash_attention_2",
    "sdp_attention": "attn_implementation: sdpa",
    "model_type": "leave it out: the checkpoint has it",
    "tokenizer_type": "leave it out: the checkpoint has it",
    "revision_of_model": "model_revision: {value}",
    "wandb_project": "report_to: [wandb], env: {{WANDB_PROJECT: {value}}}",
    "wandb_name": "run_name: {value}",
    "wandb_entity": "env: {{WANDB_ENTITY: {value}}}",
    "wandb_watch": "env: {{WANDB_WATCH: {value}}}",
    "wandb_log_model": "env: {{WANDB_LOG_MODEL: {value}}}",
    "fsdp_version": "--accelerate_config fsdp2 (or fsdp2_qlora) of the command",
    "strict": "leave it out: an unknown key is always an error",
    "plugins": "leave it out: nothing is plugged in",
    "cut_cross_entropy": "leave it out: no logits are kept (docs/token_selection.md)",
    "liger_fused_linear_cross_entropy": "leave it out: no logits are kept (docs/token_selection.md)",
    "context_parallel_size": "no key here: a sequence is never split over GPUs",
    "sequence_parallel_degree": "no key here: a sequence is never split over GPUs",
    "tensor_parallel_size": "no key here: weights are sharded by FSDP2 (--accelerate_config fsdp2_qlora)",
}
# Keys inside Axolotl's `trl:` that are not GRPOConfig's.
_AXOLOTL_TRL = {
    "reward_funcs": _rewards,
    "use_liger_loss": "leave it out: the frozen head has a kernel of its own (lm_head_kernel)",
    "vllm_lora_sync": "leave it out: with LoRA vLLM always gets the adapter alone",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex: {value}",
    "rollout_func": "no key here: give rollout_func to EfficientGRPOTrainer in a script of your own",
    "reward_num_workers": "leave it out",
    **dict.fromkeys(
        ("use_data_producer", "async_prefetch", "prefetch_depth", "vllm_sync_interval"),
        "leave it out: completions are drawn by the policy that is trained, not ahead of it",
    ),
    **dict.fromkeys(
        ("streaming_partial_batch", "streaming_min_groups", "replay_buffer_size"), "leave it out: nothing like it here"
    ),
}
_AXOLOTL_VLLM = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization: {value}",
    "tensor_parallel_size": "vllm_tensor_parallel_size: {value}",
    "max_model_len": "vllm_max_model_length: {value}",
    "host": "vllm_server_host: {value}",
    "port": "vllm_server_port: {value}",
}
_ONLY_AXOLOTL = {"base_model", "rl", "adapter", "micro_batch_size", "sequence_len", "trl", "vllm"}


def _line(template: str | Callable[[Any], str], value: Any) -> str:
    if value is None or value is False:
        return "leave it out: it is empty or off"
    return template(value) if callable(template) else template.format(value=_as_yaml(value))


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_our_words(key: str, value: Any, known: Any, is_axolotl: bool) -> list[str]:
    """Lines with the replacement of a key of another tool's config; none if the key is no key of such a config.

    Args:
        known: names of this package's fields.
        is_axolotl: whether the config is one of Axolotl's; otherwise it is one of `trl grpo`.
    """
    if is_axolotl and key in ("trl", "vllm") and isinstance(value, dict):
        table = _AXOLOTL_TRL if key == "trl" else _AXOLOTL_VLLM
        lines = []
        for inner, inner_value in value.items():
            if inner in table:
                lines.append(f"{key}.{inner} -> {_line(table[inner], inner_value)}")
            elif key == "trl" and inner in known and inner_value is not None:
                lines.append(f"{key}.{inner} -> {inner}: {_as_yaml(inner_value)} (not indented)")
            else:
                missing = "nothing like it here" if inner_value is not None else "it is empty or off"
                lines.append(f"{key}.{inner} -> leave it out: {missing}")
        return lines
    table = _AXOLOTL if is_axolotl else _TRL
    return [f"{key} -> {_line(table[key], value)}"] if key in table else []


def is_axolotl(config: dict[str, Any]) -> bool:
    return not _ONLY_AXOLOTL.isdisjoint(config)
