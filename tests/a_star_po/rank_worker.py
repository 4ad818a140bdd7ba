"""One rank of a real gloo run: stage 1, evaluation and a few steps on the tiny model; rank 0 writes the results.

rank_worker.py MODEL CACHE OUT BATCH [lora | full], of a sharded model where the environment asks for FSDP
"""

import json
import sys
import tempfile

import torch
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from tests.a_star_po.tiny import has_digit, problems
from tests.distributed.fsdp_on_gloo import force_fsdp
from tests.tiny import character_tokenizer, config
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer


def main(model, cache, out, batch, kind):
    force_fsdp()
    args = config(
        AStarPOConfig, tempfile.mkdtemp(), num_generations=1, per_device_train_batch_size=int(batch), max_completion_length=8,
        value_cache=cache, value_batch_size=3, max_steps=2, per_device_eval_batch_size=4, seed=3, optim="adamw_torch",
    )  # fmt: skip
    adapter = None if kind == "full" else LoraConfig(r=4, target_modules="all-linear")
    data = {"train_dataset": problems(48), "processing_class": character_tokenizer()}
    trainer = AStarPOTrainer(model, has_digit, args, **data, peft_config=adapter)
    result, counts, draw = {}, [], trainer.values.draw
    trainer.values.draw = lambda items, n, seed: counts.extend(n) or draw(items, n, seed)
    try:
        assert trainer.estimate_values().samples == 48 * 8
        result["samples"] = trainer.accelerator.gather(torch.tensor([sum(counts)])).tolist()
        result["evaluation"] = trainer.evaluate(problems(13))
    except RuntimeError as error:
        result["refused"] = str(error)
    trainer.train()
    result["sharded"] = all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    result["evaluation_after"] = trainer.evaluate(problems(13))
    result["table"] = {key: rewards.tolist() for key, rewards in trainer.values.read().items()}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    result["steps"] = [{name: log[name] for name in ("loss", "v_star", "reward", "advantage")} for log in logs]
    if trainer.accelerator.is_main_process:
        with open(out, "w") as file:
            json.dump(result, file)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
