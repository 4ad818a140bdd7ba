"""This package's names for the keys of `trl grpo`'s, Axolotl's and verl's configs.

A config of one of these tools is answered with all its differing keys at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

AXOLOTL = "Axolotl"
TRL = "trl grpo"
VERL = "verl"

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


def _lora_rank(value: Any) -> str:
    return f"use_peft: true, lora_r: {value}" if value else "leave it out: without use_peft every weight is trained"


def _engine(value: Any) -> str:
    return "use_vllm: true, vllm_mode: colocate" if value == "vllm" else "leave it out: transformers generates"


def _reward_file(value: Any) -> str:
    return f"rewards: [{value}:the function's name]"


# Keys inside verl's sections, which its users also write as words: `data.train_files=train.parquet`.
_VERL = {
    "algorithm.adv_estimator": "leave it out: the command names it (trl-fsdp-qlora grpo, rloo)",
    "data.train_files": "dataset: {value}",
    "data.val_files": "eval_dataset: {value}",
    "data.train_batch_size": "gradient_accumulation_steps: {value} x num_generations / per_device_train_batch_size / "
    "number of processes",
    "data.max_prompt_length": "leave it out: prompts are not cut",
    "data.max_response_length": "max_completion_length: {value}",
    "data.shuffle": "shuffle_dataset: {value}",
    "actor_rollout_ref.model.path": "model_name_or_path: {value}",
    "actor_rollout_ref.model.lora_rank": _lora_rank,
    "actor_rollout_ref.model.lora_alpha": "lora_alpha: {value}",
    "actor_rollout_ref.model.target_modules": "lora_target_modules: [{value}]",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing: {value}",
    "actor_rollout_ref.actor.optim.lr": "learning_rate: {value}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "per_device_train_batch_size: {value} (whole groups if it "
    "is a multiple of num_generations)",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "leave it out: an optimizer step takes the generation batch "
    "(steps_per_generation divides it)",
    "actor_rollout_ref.actor.use_kl_loss": "leave it out: beta above 0 switches it on",
    "actor_rollout_ref.actor.kl_loss_coef": "beta: {value}",
    "actor_rollout_ref.actor.entropy_coeff": "entropy_coef: {value}",
    "actor_rollout_ref.actor.clip_ratio": "epsilon: {value}",
    "actor_rollout_ref.rollout.name": _engine,
    "actor_rollout_ref.rollout.n": "num_generations: {value}",
    "actor_rollout_ref.rollout.temperature": "temperature: {value}",
    "actor_rollout_ref.rollout.top_p": "top_p: {value}",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization: {value}",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "vllm_tensor_parallel_size: {value}",
    "custom_reward_function.path": _reward_file,
    "trainer.total_epochs": "num_train_epochs: {value}",
    "trainer.total_training_steps": "max_steps: {value}",
    "trainer.n_gpus_per_node": "--num_processes {value} of the command",
    "trainer.save_freq": "save_steps: {value}",
    "trainer.test_freq": "accuracy_steps: {value}",
    "trainer.logger": "report_to: [wandb] or another tracker",
    "trainer.project_name": "env: {{WANDB_PROJECT: {value}}}",
    "trainer.experiment_name": "run_name: {value}",
    "trainer.default_local_dir": "output_dir: {value}",
    "trainer.resume_mode": "--resume_from_checkpoint auto of the command",
}
_VERL_SECTIONS = {
    "actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "ray_kwargs", "reward_model",
    "trainer",
}  # fmt: skip


def _line(template: str | Callable[[Any], str], value: Any) -> str:
    if value is None or value is False:
        return "leave it out: it is empty or off"
    return template(value) if callable(template) else template.format(value=_as_yaml(value))


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _of_verl(key: str, value: Any) -> list[str]:
    """A line for each setting inside the section `key`."""
    if isinstance(value, dict):
        return [line for inner, inner_value in value.items() for line in _of_verl(f"{key}.{inner}", inner_value)]
    if key in _VERL:
        return [f"{key} -> {_line(_VERL[key], value)}"]
    return [f"{key} -> leave it out: nothing like it here"]


def verl_words(words: Sequence[str]) -> dict[str, str]:
    """Value by setting of the words that are written as verl's: `trainer.save_freq=20`, `+data.seed=1`."""
    settings = {}
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        section, is_inside, _ = name.partition(".")
        if value and is_inside and section in _VERL_SECTIONS:
            settings[name] = value
    return settings


def in_our_words(key: str, value: Any, known: Any, tool: str) -> list[str]:
    """Lines with the replacement of a key of another tool's config; none if the key is no key of such a config.

    Args:
        known: names of this package's fields.
        tool: the tool whose config it is, see [`tool_of`].
    """
    if tool == VERL:
        return _of_verl(key, value) if key.partition(".")[0] in _VERL_SECTIONS else []
    if tool == AXOLOTL and key in ("trl", "vllm") and isinstance(value, dict):
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
    table = _AXOLOTL if tool == AXOLOTL else _TRL
    return [f"{key} -> {_line(table[key], value)}"] if key in table else []


def tool_of(config: Mapping[str, Any]) -> str:
    """The tool whose keys a config has: [`AXOLOTL`], [`VERL`], or [`TRL`] for any other."""
    if not _ONLY_AXOLOTL.isdisjoint(config):
        return AXOLOTL
    return VERL if "actor_rollout_ref" in config else TRL
