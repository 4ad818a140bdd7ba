"""What one rank does in test_evaluation_metrics.py: evaluation_worker.py OUT ROWS; its metrics in a file."""

import os
from pathlib import Path

import torch

from tests.distributed.rank import run_rank
from tests.tiny import character_tokenizer, config, digit_share, prompts, tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer


def main(out, rows):
    calls = []

    def metrics(completions, rewards, answer, **columns):
        calls.append(answer)
        return {"rows": len(completions), "reward": sum(rewards["digit_share"])}

    args = config(EfficientGRPOConfig, out, per_device_eval_batch_size=2, num_generations_eval=2)
    grpo = EfficientGRPOTrainer(
        tiny_model(),
        digit_share,
        args,
        eval_dataset=prompts(int(rows)),
        train_dataset=prompts(),
        processing_class=character_tokenizer(),
        compute_metrics=metrics,
    )
    logged = grpo.evaluate()
    found = {name: logged[name] for name in ("eval_rows", "eval_reward")}
    results = {"metrics": found, "calls": len(calls), "answers": calls[0] if calls else None}
    torch.save(results, Path(out, f"rank{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    run_rank(main)
