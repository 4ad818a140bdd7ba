"""One rank of a real gloo run: stage 1, evaluation and a few steps on the tiny model; rank 0 writes the results.

`rank_worker.py MODEL CACHE OUT [--lockstep] [--shared-batch N]`
"""

import argparse
import json
import tempfile

import torch
from peft import LoraConfig

from tests.a_star_po.tiny import has_digit, problems, tiny_tokenizer
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer


class Lockstep(AStarPOTrainer):
    """Every rank draws whenever one does, as a model that is sharded over the ranks needs it."""

    _sharded = property(lambda self: True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("cache")
    parser.add_argument("out")
    parser.add_argument("--lockstep", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    args = AStarPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=arguments.batch,
        max_completion_length=8,
        value_cache=arguments.cache,
        value_batch_size=3,
        max_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        per_device_eval_batch_size=4,
        seed=3,
    )
    trainer = (Lockstep if arguments.lockstep else AStarPOTrainer)(
        arguments.model,
        has_digit,
        args,
        train_dataset=problems(48),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    report = trainer.estimate_values()
    samples = trainer.accelerator.gather(torch.tensor([report.samples])).tolist()
    table = {key.hex(): rewards.tolist() for key, rewards in trainer.stage_one.cache.get(trainer._values).items()}
    evaluation = trainer.evaluate(problems(13))
    trainer.train()
    if trainer.accelerator.is_main_process:
        del evaluation["eval_runtime"]
        steps = [
            {name: log[name] for name in ("loss", "v_star", "reward", "advantage")}
            for log in trainer.state.log_history
            if "loss" in log
        ]
        with open(arguments.out, "w") as file:
            json.dump({"samples": samples, "table": table, "evaluation": evaluation, "steps": steps}, file)


if __name__ == "__main__":
    main()
