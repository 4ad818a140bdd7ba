"""One rank of a real gloo run: stage 1, evaluation and a few steps on the tiny model; rank 0 writes the results.

`rank_worker.py MODEL CACHE OUT [--batch N] [--fsdp] [--full]`
"""

import argparse
import json
import tempfile

import torch
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from tests.a_star_po.tiny import has_digit, problems, tiny_tokenizer
from tests.distributed.fsdp_on_gloo import force_fsdp
from tests.tiny import config
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("cache")
    parser.add_argument("out")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    force_fsdp()  # where the environment asks for it
    args = config(
        AStarPOConfig, tempfile.mkdtemp(), num_generations=1, per_device_train_batch_size=arguments.batch, max_completion_length=8,
        value_cache=arguments.cache, value_batch_size=3, max_steps=2, per_device_eval_batch_size=4, seed=3, optim="adamw_torch",
    )  # fmt: skip
    trainer = AStarPOTrainer(
        arguments.model,
        has_digit,
        args,
        train_dataset=problems(48),
        processing_class=tiny_tokenizer(),
        peft_config=None if arguments.full else LoraConfig(r=4, target_modules="all-linear"),
    )
    result = {}
    if arguments.fsdp:
        try:
            trainer.estimate_values()
        except RuntimeError as error:
            result["refused"] = str(error)
    else:
        counts, draw = [], trainer.values.draw
        trainer.values.draw = lambda items, n, seed: counts.extend(n) or draw(items, n, seed)
        assert trainer.estimate_values().samples == 48 * 8
        result["samples"] = trainer.accelerator.gather(torch.tensor([sum(counts)])).tolist()
        result["evaluation"] = trainer.evaluate(problems(13))
    trainer.train()
    result["sharded"] = all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    result["evaluation_after"] = trainer.evaluate(problems(13))
    table = trainer.values.read()
    result["table"] = {key: rewards.tolist() for key, rewards in table.items()}
    result["steps"] = [
        {name: log[name] for name in ("loss", "v_star", "reward", "advantage")}
        for log in trainer.state.log_history
        if "loss" in log
    ]
    if trainer.accelerator.is_main_process:
        with open(arguments.out, "w") as file:
            json.dump(result, file)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
