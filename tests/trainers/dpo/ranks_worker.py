"""What one rank does in test_ranks.py: ranks_worker.py MODEL OUT label=scenario[:4bit] ...; weights and losses in a
file.
"""

import os
import zlib
from pathlib import Path

import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from tests.distributed.fsdp_on_gloo import force_fsdp
from tests.distributed.rank import forget_launch, run_rank
from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora import (
    EfficientDPOConfig,
    EfficientDPOTrainer,
    EfficientRLOOConfig,
    EfficientRLOOTrainer,
    share_prompts,
)
from trl_fsdp_qlora.fsdp2_qlora.adapters import gather_adapter
from trl_fsdp_qlora.prefix_sharing.sharing import causal_language_model

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class FixedCompletions:
    """Completions that depend on the prompt and its place in the group alone, not on weights or ranks."""

    def _generate_single_turn(self, prompt_ids, *_):
        seen = {}
        completions = []
        for key in map(tuple, prompt_ids):
            repetition = seen[key] = seen.get(key, 0) + 1
            draw = torch.Generator().manual_seed(zlib.crc32(repr((key, repetition)).encode()))
            length = int(torch.randint(3, 13, (1,), generator=draw))
            completions.append(torch.randint(3, 40, (length,), generator=draw).tolist())
        return completions


class StockRLOO(FixedCompletions, RLOOTrainer):
    pass


class OurRLOO(FixedCompletions, EfficientRLOOTrainer):
    pass


def reward(completions, **_columns):
    return [(zlib.crc32(str(completion).encode()) % 1000) / 1000 for completion in completions]


def pairs() -> Dataset:
    rows = [
        {"prompt": f"{i}+{i * 3} is", "chosen": f" {i * 4}.", "rejected": f" {i * 4 + 1} or {i}"} for i in range(32)
    ]
    return Dataset.from_list(rows)


def judged() -> Dataset:
    """KTO takes the completion of the row before for its KL term, within a rank's batch: every fourth one is the
    same.
    """
    rows = []
    for i in range(0, 32, 4):
        prompt = f"add: {i}+{i * 3} is"
        for j, completion in enumerate([f" {i * 4}.", f" {i * 4 + 1}", f" {i} or so", " many."]):
            rows.append({"prompt": prompt, "completion": completion, "label": j in (0, 3)})
    return Dataset.from_list(rows)


class FirstGradients(TrainerCallback):
    """Whole gradients of the first step, by name."""

    def __init__(self):
        self.gradients = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.gradients:
            return
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                self.gradients[name.removeprefix("module.")] = whole.clone()


def settings(out):
    return {
        "output_dir": str(out), "max_steps": 3, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "per_device_train_batch_size": 8 // WORLD_SIZE, "bf16": False,
        "gradient_checkpointing": False, "learning_rate": 5e-2, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "dataloader_pin_memory": False, "save_strategy": "no",
    }  # fmt: skip


def train(name: str, path: str, out: Path, quantized: bool) -> dict:
    is_trls_own = name.endswith(("kto", "sft"))
    # TRL's own trainers shard 4-bit weights that are stored as floats.
    storage = "float32" if is_trls_own else "uint8"
    model = tiny.load(path, storage=storage) if quantized else tiny.load_whole(path)
    common = {"peft_config": tiny.lora(init_lora_weights=False), "processing_class": tiny.make_tokenizer()}
    if is_trls_own:
        cls, config = (KTOTrainer, KTOConfig) if name.endswith("kto") else (SFTTrainer, SFTConfig)
        rows = judged() if name.endswith("kto") else judged().remove_columns("label")
        trainer = cls(model=model, args=config(**settings(out)), train_dataset=rows, **common)
        if not name.startswith("stock"):
            share_prompts(trainer.model)
    elif name.endswith("dpo"):
        cls, config = (DPOTrainer, DPOConfig) if name == "stock_dpo" else (EfficientDPOTrainer, EfficientDPOConfig)
        trainer = cls(model=model, args=config(**settings(out)), train_dataset=pairs(), **common)
    else:
        cls, config = (StockRLOO, RLOOConfig) if name == "stock_rloo" else (OurRLOO, EfficientRLOOConfig)
        args = config(**settings(out), num_generations=4, max_completion_length=16, shuffle_dataset=False, beta=0.1)
        trainer = cls(model=model, reward_funcs=reward, args=args, train_dataset=tiny.prompt_data(32), **common)
    tiny.as_reference(trainer.model)
    first = FirstGradients()
    trainer.add_callback(first)
    trainer.train()
    sharing = vars(causal_language_model(trainer.model)).get("prompt_sharing")
    # Before the model is saved: a few of its logits are computed as in stock TRL then.
    shared = sharing is not None and 0 < sharing.figures.tokens < sharing.figures.padded_tokens
    policy = trainer.accelerator.unwrap_model(trainer.model)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(str(out / "final"))
    trainer.accelerator.wait_for_everyone()
    return {
        "loss": [entry["loss"] for entry in history],
        "shared": shared,
        "gradients": first.gradients,
        "adapter": {name: value.float() for name, value in gather_adapter(policy).items()},
        "dtensors": all(isinstance(parameter, DTensor) for parameter in policy.parameters()),
        "saved": (out / "final" / "adapter_model.safetensors").is_file(),
    }


def main(path, out, *scenarios):
    force_fsdp()
    out = Path(out)
    results = {}
    for scenario in scenarios:
        label, _, rest = scenario.partition("=")
        name, _, quantized = rest.partition(":")
        results[label] = train(name, path, out / label, bool(quantized))
        torch.save(results, out / f"rank{RANK}.pt")
        forget_launch()


if __name__ == "__main__":
    run_rank(main)
