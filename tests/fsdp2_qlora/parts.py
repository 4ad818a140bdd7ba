"""What the scenarios of worker.py are made of: trainers, settings, what is recorded of a run."""

import os
import zlib

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import SFTTrainer

from tests.benchmark_modules import benchmark
from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.fsdp2_qlora.adapters import gather_adapter
from trl_fsdp_qlora.fsdp2_qlora.trainer import ShardedQLoRAMixin

# Set by the tests that need CUDA.
ON_GPU = os.environ.get("ON_GPU") == "1"


class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
    pass


class FixedCompletions(EfficientGRPOTrainer):
    """GRPO on completions that depend on the prompt and its place in the group alone, not on weights or ranks.

    `unrounded` has for each pass the share of log-probabilities that bfloat16 could not hold.
    """

    unrounded = ()

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        seen, completions = {}, []
        for ids in prompt_ids:
            key = tuple(ids)
            place = seen[key] = seen.get(key, 0) + 1
            generator = torch.Generator().manual_seed(zlib.crc32(repr((key, place)).encode()))
            length = int(torch.randint(3, 13, (1,), generator=generator))
            completions.append(torch.randint(3, 40, (length,), generator=generator).tolist())
        return completions, None

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        values = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        logps = values[0].detach()[values[0] != 0]
        self.unrounded = (*self.unrounded, (logps != logps.bfloat16()).float().mean().item())
        return values


def reward(completions, **kwargs):
    return [(zlib.crc32(str(completion).encode()) % 1000) / 1000 for completion in completions]


class CountTraffic(TrainerCallback):
    """What FSDP2 moved in each step, see benchmarks/traffic.py."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.steps, self.traffic = (
            [],
            benchmark("traffic").count_traffic(model) if isinstance(model, FSDPModule) else None,
        )

    def on_step_end(self, args, state, control, **kwargs):
        if self.traffic is not None:
            self.steps.append(self.traffic.take())


class Record(TrainerCallback):
    """Gradients of every adapter weight at every optimizer step, gathered."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        step = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                gradient = parameter.grad
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                step[name.removeprefix("module.")] = gradient.detach().float().cpu().clone()
        self.gradients.append(step)


class FirstLogits(TrainerCallback):
    """What the model says before the first step, sharded or not."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            self.logits = model(input_ids=torch.arange(3, 35).view(2, 16)).logits.float()


class Fail(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise RuntimeError("this rank dies in the third step")


def common(out, world_size, **overrides):
    values = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8 // world_size,
        "per_device_eval_batch_size": 8 // world_size,
        "max_steps": 5,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": not ON_GPU,
        "bf16": ON_GPU,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "learning_rate": 5e-4,
        "max_grad_norm": 1e6,  # so that recorded gradients are the unclipped ones
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return {**values, **overrides}


def grpo_trainer(cls, model, arguments, **more):
    """A GRPO trainer of class `cls` on 32 sums, with an adapter that is no start at zero."""
    data = {"train_dataset": tiny.prompt_data(32), "processing_class": tiny.make_tokenizer()}
    more = {"peft_config": tiny.lora(init_lora_weights=False), **more}
    return cls(model=model, reward_funcs=reward, args=EfficientGRPOConfig(**arguments), **data, **more)


def result(trainer, record):
    model = trainer.accelerator.unwrap_model(trainer.model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # an evaluation leaves the last group gathered until the next training step
            module.reshard()
    adapter = gather_adapter(model)
    history = trainer.state.log_history
    base = getattr(trainer, "base_bytes", None)
    return {
        "loss": [entry["loss"] for entry in history if "loss" in entry],
        "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "grad_norm": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "gradients": record.gradients,
        "unrounded": getattr(trainer, "unrounded", None),
        "shared": any("prefix_sharing/policy/tokens_fraction" in entry for entry in history),
        "adapter": {name: value.float() for name, value in adapter.items()},
        "base": base.to_dict() if base else None,
        "devices": sorted({parameter.device.type for parameter in model.parameters()}),
        "dtensors": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "adapter_dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
    }


def as_reference(model):
    """Undo two things that would make the unsharded references another computation than the sharded run."""
    for parameter in model.parameters():
        if parameter.requires_grad:  # TRL casts the adapters of quantized models to bfloat16
            parameter.data = parameter.data.float()
    # In a trainer's reference, its forward in later training steps would have no backward either.
    tiny.without_repacking(model)
