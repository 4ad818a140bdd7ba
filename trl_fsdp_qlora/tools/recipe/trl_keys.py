"""What the keys of TRL's configs, through its versions, are called here.

The table has each key that TRL's `grpo`, `rloo`, `dpo` or `sft` commands took in some version since 0.12 and that no
field here has; those that transformers' `TrainingArguments` lost with version 5; and those that open-r1 adds.
`tests/tools/recipe/test_trl_keys.py` compares it with TRL and with open-r1's recipes.
"""

from collections.abc import Callable, Mapping
from typing import Any


def _rewards(value: Any) -> str:
    """The line for rewards; `rewards.accuracy` is `rewards:accuracy` here."""
    names = []
    for name in value if isinstance(value, list) else [value]:
        module, _, function = str(name).rpartition(".")
        if module:
            names.append(f"{module}:{function}")
        else:
            names.append(_REWARDS.get(function, f"my_rewards.py:{function}"))
    return f"rewards: [{', '.join(names)}]"


def _datasets(value: Any) -> str:
    """The line for the first dataset of a mixture, in its parts."""
    if isinstance(value, dict):  # open-r1's `dataset_mixture`
        value = value.get("datasets")
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, dict):
        return "dataset: a Hub id or a file"
    names = {
        "path": "dataset",
        "id": "dataset",
        "name": "dataset_config",
        "config": "dataset_config",
        "split": "dataset_split",
    }
    parts = [f"{ours}: {first[theirs]}" for theirs, ours in names.items() if first.get(theirs) is not None]
    return f"{', '.join(parts)} (one dataset; a function of your own mixes several: dataset: my_data.py:load)"


# Names of rewards that need no file of the user's.
_REWARDS = {
    "accuracy": "exact_answer",
    "accuracy_reward": "exact_answer",
    "reasoning_accuracy_reward": "trl.rewards:reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards:think_format_reward",
}
_WHOLE_DATASET = "leave it out: recipes read the whole dataset; a script of your own takes a streaming one"
_COLLATED = "leave it out: rows are packed by their tokens"
_OF_REWARDS = "leave it out: it belongs to a reward of open-r1; give your own function its value"
_TOKENIZERS = "leave it out: the tokenizer's own is used; save another with it (tokenizer.save_pretrained)"
_OLD_RLOO = "leave it out: RLOO has been GRPO's loop with another advantage since TRL 0.22"
_LEAVE = "leave it out: the libraries have no such setting any more"
# By key, the line to write, in which `{value}` stands for the value; or a function of the value that returns the line.
KEYS: Mapping[str, str | Callable[[Any], str]] = {
    # The script's arguments.
    "dataset_name": "dataset: {value}",
    "config": "dataset_config: {value}",
    "dataset_train_split": "dataset_split: {value}",
    "dataset_test_split": "eval_split: {value}",
    "dataset_prompt_column": "question_column: {value}",
    "dataset_streaming": _WHOLE_DATASET,
    "streaming": _WHOLE_DATASET,
    "datasets": _datasets,
    "dataset_mixture": _datasets,
    "test_split_size": "held_out: a number of problems",
    "reward_funcs": _rewards,
    "reward_model_name_or_path": "no key here: give a reward model to EfficientGRPOTrainer in a script of your own",
    "reward_model_path": "no key here: give a reward model to EfficientRLOOTrainer in a script of your own",
    "ignore_bias_buffers": "leave it out",
    "gradient_checkpointing_use_reentrant": "gradient_checkpointing_kwargs: {{use_reentrant: {value}}}",
    # The model's.
    "torch_dtype": "dtype: {value}",
    # GRPO's.
    "max_prompt_length": "leave it out: prompts are not cut; shorten or leave out those that are too long",
    "use_liger_loss": "use_liger_kernel: {value}",
    "vllm_device": "vllm_mode: colocate (or server, which runs on other GPUs)",
    "vllm_dtype": "leave it out: vLLM takes the model's dtype",
    "vllm_max_model_len": "vllm_max_model_length: {value}",
    "vllm_enable_prefix_caching": "leave it out: it is on",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex: {value}",
    "wandb_log_unique_prompts": "log_unique_prompts: {value}",
    # RLOO's.
    "rloo_k": "num_generations: {value}",
    "kl_coef": "beta: {value}",
    "cliprange": "epsilon: {value}",
    "num_ppo_epochs": "num_iterations: {value}",
    "response_length": "max_completion_length: {value}",
    "normalize_advantage": "normalize_advantages: {value}",
    "whiten_rewards": "leave it out; normalize_advantages: true is near it",
    "normalize_reward": "leave it out; normalize_advantages: true is near it",
    "total_episodes": "max_steps: {value} / completions of an optimizer step",
    "num_mini_batches": "steps_per_generation: {value}",
    "exp_name": "run_name: {value}",
    "missing_eos_penalty": "leave it out: a reward of your own can subtract it",
    "stop_token": "leave it out: a completion ends with the model's end-of-sequence token",
    "stop_token_id": "leave it out: a completion ends with the model's end-of-sequence token",
    "token_level_kl": _OLD_RLOO,
    "local_rollout_forward_batch_size": _OLD_RLOO,
    "num_sample_generations": "log_completions: true",
    # DPO's.
    "rpo_alpha": "loss_type: [sigmoid, sft], loss_weights: [1.0, {value}]",
    "reference_free": "leave it out: the reference is the base without its adapter, which costs no memory",
    "force_use_ref_model": "leave it out: with an adapter the reference is the base without it",
    "model_adapter_name": "leave it out: the adapter is made by use_peft",
    "ref_adapter_name": "leave it out: the reference is the base without its adapter",
    "ref_model_init_kwargs": "leave it out: the reference is loaded like the model",
    "generate_during_eval": "leave it out: `trl-fsdp-qlora evaluate` generates",
    "max_target_length": "max_length: {value} (prompt and answer together)",
    "use_logits_to_keep": _COLLATED,
    "use_num_logits_to_keep": _COLLATED,
    "label_pad_token_id": _COLLATED,
    "padding_value": _COLLATED,
    "is_encoder_decoder": "leave it out: the model is a decoder",
    "base_model_attribute_name": "leave it out",
    # SFT's.
    "max_seq_length": "max_length: {value}",
    "use_liger": "use_liger_kernel: {value}",
    "chars_per_token": "leave it out",
    "dataset_batch_size": "leave it out",
    "num_of_sequences": "leave it out",
    # transformers' TrainingArguments before version 5.
    "warmup_ratio": "warmup_steps: {value} (below 1 it is a fraction)",
    "evaluation_strategy": "eval_strategy: {value}",
    "no_cuda": "use_cpu: {value}",
    "adafactor": "optim: adafactor",
    "include_inputs_for_metrics": "include_for_metrics: [inputs]",
    "per_gpu_train_batch_size": "per_device_train_batch_size: {value}",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size: {value}",
    "push_to_hub_model_id": "hub_model_id: {value}",
    "push_to_hub_organization": "hub_model_id: {value}/<name>",
    "push_to_hub_token": "leave it out: log in with `hf auth login`",
    "overwrite_output_dir": "leave it out: a folder with another run is refused; name another output_dir",
    "logging_dir": "leave it out; env: {{TENSORBOARD_LOGGING_DIR: {value}}} moves TensorBoard's files",
    "group_by_length": "leave it out: rows are packed, and no padding is computed",
    "fsdp_min_num_params": "--accelerate_config fsdp2 of the command",
    "fsdp_transformer_layer_cls_to_wrap": "--accelerate_config fsdp2 of the command",
    "sharded_ddp": "--accelerate_config fsdp2 of the command",
    **dict.fromkeys(
        ("save_safetensors", "use_mps_device", "jit_mode_eval", "use_ipex", "half_precision_backend", "fp16_backend",
         "fp16_opt_level", "tpu_num_cores", "tpu_metrics_debug", "past_index", "mp_parameters", "ray_scope",
         "torchdynamo", "include_tokens_per_second", "dispatch_batches", "split_batches", "xpu_backend"),
        _LEAVE,
    ),
    # open-r1's own.
    "chat_template": _TOKENIZERS,
    "eos_token": _TOKENIZERS,
    "hub_model_revision": "hub_revision: {value}",
    "wandb_entity": "env: {{WANDB_ENTITY: {value}}}",
    "wandb_project": "env: {{WANDB_PROJECT: {value}}}",
    "wandb_run_group": "env: {{WANDB_RUN_GROUP: {value}}}",
    **dict.fromkeys(
        ("callbacks", "benchmarks", "overwrite_hub_revision", "push_to_hub_revision"),
        "leave it out: it runs open-r1's own scripts",
    ),
    **dict.fromkeys(
        ("code_language", "code_eval_test_batch_size", "code_eval_scoring_mode", "parallel_code_exec_per_proc",
         "code_provider", "ioi_provider", "e2b_router_url", "morph_router_url", "cosine_min_value_wrong",
         "cosine_max_value_wrong", "cosine_min_value_correct", "cosine_max_value_correct", "cosine_max_len",
         "repetition_n_grams", "repetition_max_penalty", "max_completion_len", "soft_punish_cache"),
        _OF_REWARDS,
    ),
}  # fmt: skip


def in_our_words(key: str, value: Any) -> str | None:
    """The line to write in place of a key that no field here has; `None` if TRL has never had the key."""
    line = KEYS.get(key)
    if line is None:
        return None
    if value is None:
        return f"{key} -> leave it out: it is empty"
    if callable(line):
        return f"{key} -> {line(value)}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    short = text if len(text) <= 100 else f"{text[:100]}…"
    return f"{key} -> {line.format(value=short)}"
