"""Trainers that roll out with vLLM, small enough for seconds."""

import torch
from peft import LoraConfig

from tests import tiny
from tests.fsdp2_qlora import tiny as qlora
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.fsdp2_qlora.loading import keep_plain_kernel

SETTINGS = {
    "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128, "vllm_gpu_memory_utilization": 0.3,
    "max_completion_length": 16, "max_grad_norm": 1.0, "optim": "adamw_torch",
    "model_init_kwargs": {"dtype": "float32"},
}  # fmt: skip
TRAINER_ARGUMENTS = ("eval_dataset", "quantization_config")


def grpo(
    model,
    folder,
    trainer_class=EfficientGRPOTrainer,
    config_class=EfficientGRPOConfig,
    dataset=None,
    tokenizer=None,
    **changes,
):
    """A trainer on sums; colocated unless `changes` have another mode."""
    torch.manual_seed(0)
    arguments = {name: changes.pop(name, None) for name in TRAINER_ARGUMENTS}
    reward = changes.pop("reward", tiny.digit_share)
    args = tiny.config(config_class, folder, **{**SETTINGS, **changes})
    arguments["processing_class"] = tokenizer or tiny.character_tokenizer()
    arguments["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    return trainer_class(model, reward, args, dataset or tiny.prompts(), **arguments)


def on_quantized(checkpoint: str, folder, quantized: bool = True, **changes):
    """A trainer on the tiny checkpoint of the sharding tests, in 4 bits or (a dense copy) as it is."""
    trainer = grpo(
        checkpoint,
        folder,
        quantization_config=qlora.quantization() if quantized else None,
        dataset=qlora.prompt_data(32),
        tokenizer=qlora.make_tokenizer(),
        **changes,
    )
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL makes the adapter of a 4-bit base bfloat16
            parameter.data = parameter.data.float()
    keep_plain_kernel(trainer.model)
    return trainer


def on_server(url: str) -> dict:
    return {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 5.0}


def figures(trainer, name: str) -> list[float]:
    """A metric's values by logging step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
