"""What one rank does in the tests of this folder: named scenarios, several per launch, results in a file per rank.

worker.py MODEL OUT scenario[:option=value,...] ...
"""

import contextlib
import os
import sys
import traceback
import zlib
from pathlib import Path

from tests.distributed.fsdp_on_gloo import force_fsdp

force_fsdp()

import torch  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from tests.fsdp2_qlora import tiny  # noqa: E402
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora.adapters import gather_adapter  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora.trainer import ShardedQLoRAMixin  # noqa: E402


class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
    pass


class FixedCompletions(EfficientGRPOTrainer):
    """GRPO on completions that depend on the prompt and its place in the group alone, not on weights or ranks."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        seen, completions = {}, []
        for ids in prompt_ids:
            key = tuple(ids)
            place = seen[key] = seen.get(key, 0) + 1
            generator = torch.Generator().manual_seed(zlib.crc32(repr((key, place)).encode()))
            length = int(torch.randint(3, 13, (1,), generator=generator))
            completions.append(torch.randint(3, 40, (length,), generator=generator).tolist())
        return completions, None


def reward(completions, **kwargs):
    return [(zlib.crc32(str(completion).encode()) % 1000) / 1000 for completion in completions]


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


def common(out, world_size, **overrides):
    values = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8 // world_size,
        "per_device_eval_batch_size": 8 // world_size,
        "max_steps": 5,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "learning_rate": 5e-4,
        "max_grad_norm": 1e6,  # so that recorded gradients are the unclipped ones
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return {**values, **overrides}


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
        "adapter": {name: value.float() for name, value in adapter.items()},
        "base": base.to_dict() if base else None,
        "dtensors": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "adapter_dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
    }


def as_reference(trainer):
    """Undo two things that would make the unsharded references another computation than the sharded run."""
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL casts the adapters of quantized models to bfloat16
            parameter.data = parameter.data.float()
    for module in trainer.model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes repacks the base in evaluation mode and its forward then has no
        # backward, in later training steps too.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def sft(model_path, out, world_size, steps=5, resume="", save=0, final="", double=1):
    arguments = common(out, world_size, max_steps=int(steps), max_length=32)
    if save:
        arguments.update(save_strategy="steps", save_steps=int(save))
    record = Record()
    trainer = ShardedSFTTrainer(
        model=tiny.load(model_path, double=bool(int(double))),
        args=SFTConfig(**arguments),
        train_dataset=tiny.text_data(64),
        peft_config=tiny.lora(init_lora_weights=False),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record],
    )
    as_reference(trainer)
    trainer.train(resume_from_checkpoint=resume or None)
    if final:
        trainer.save_model(final)
    return result(trainer, record)


def grpo(model_path, out, world_size, evaluate=0, bf16=0, dtype="float32", sharing="", **options):
    options = {name: type_(options[name]) for name, type_ in GRPO_OPTIONS.items() if name in options}
    if bf16:
        options["bf16"] = True
    if evaluate:
        options.update(eval_strategy="steps", eval_steps=2)
    if sharing:
        options["prefix_sharing"] = sharing
    arguments = common(
        out, world_size, num_generations=4, max_completion_length=16, temperature=1.0, shuffle_dataset=False, **options
    )
    record = Record()
    trainer = FixedCompletions(
        model=tiny.load(model_path, dtype=getattr(torch, dtype), compute=dtype),
        reward_funcs=reward,
        args=EfficientGRPOConfig(**arguments),
        train_dataset=tiny.prompt_data(32),
        eval_dataset=tiny.prompt_data(8) if evaluate else None,
        peft_config=tiny.lora(init_lora_weights=False),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record],
    )
    as_reference(trainer)
    trainer.train()
    return result(trainer, record)


GRPO_OPTIONS = {
    "beta": float,
    "gradient_checkpointing": lambda value: bool(int(value)),
    "gradient_accumulation_steps": int,
    "num_iterations": int,
    "loss_type": str,
}
SCENARIOS = {"sft": sft, "grpo": grpo}


def main(model_path, out, *specifications):
    out = Path(out)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    results = {}
    for specification in specifications:
        label, _, rest = specification.partition("=")
        name, _, text = rest.partition(":")
        options = dict(item.split("=", 1) for item in text.split(",") if item)
        os.environ.update({name: options.pop(name) for name in list(options) if name.isupper()})
        results[label] = SCENARIOS[name](model_path, out / label, world_size, **options)
        torch.save(results, out / f"rank{rank}.pt")
        # Each scenario brings its own mixed precision, which accelerate keeps for the life of a process.
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        # Leave at once: the other rank may wait in a collective that this one will never join.
        os._exit(1)
