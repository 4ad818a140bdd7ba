"""A real model on real problems: SmolLM2-135M-Instruct on SVAMP, stock TRL beside this package, from one seed.

    python benchmarks/prefix_sharing_smollm2.py --model DIR --data SVAMP.json

First one batch (log-probabilities, loss and gradients of both trainers on the same sampled completions), then a short
LoRA run of each, whose reward and loss curves must lie on each other. Writes
`benchmarks/results/prefix_sharing_smollm2.{json,png}`.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from synthetic import RESULTS, logged
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer


def last_number_reward(completions, answer, **kwargs) -> list[float]:
    """1 for the right last number; else 0.2 for naming any number, less a little for length, so that groups differ."""
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion[0]["content"]
        numbers = [word.strip(".,$") for word in text.split() if word.strip(".,$").isdigit()]
        right = bool(numbers) and float(numbers[-1]) == gold
        rewards.append(1.0 if right else 0.2 * bool(numbers) - 0.001 * len(text))
    return rewards


def recording(cls):
    """`cls` with the batch and the log-probabilities of the last loss in `batch` and `log_probs`."""

    class Recording(cls):
        def _compute_loss(self, model, inputs):
            self.batch = inputs
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.log_probs = result[0].detach()
            return result

    return Recording


def make_trainer(cls, args, dtype=torch.float32):
    """LoRA on every linear layer, four completions per prompt, two prompts per step."""
    torch.manual_seed(0)
    problems = json.loads(Path(args.data).read_text())[: args.problems]
    prompts = [
        [{"role": "user", "content": f"{p['Body']} {p['Question']} Reason briefly, end with the number."}]
        for p in problems
    ]
    return cls(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
        reward_funcs=last_number_reward,
        args=EfficientGRPOConfig(
            output_dir=str(args.folder),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=args.completion,
            max_steps=args.steps,
            learning_rate=5e-5,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            seed=7,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [p["Answer"] for p in problems]}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )


def compare_batch(args) -> dict:
    """Differences on one batch of sampled completions, and how far both are from stock TRL in float64."""
    trainers = {
        "stock": make_trainer(recording(GRPOTrainer), args),
        "packed": make_trainer(recording(EfficientGRPOTrainer), args),
        "float64": make_trainer(recording(GRPOTrainer), args, torch.float64),
    }
    stock = trainers["stock"]
    stock.model.train()
    stock.current_gradient_accumulation_steps = 1
    stock.training_step(stock.model, next(iter(stock.get_train_dataloader())))  # samples the batch of all three
    inputs = stock.batch
    # Away from the policy that sampled, so that the loss depends on every log-probability.
    inputs["old_per_token_logps"] = stock.log_probs + 0.1 * torch.randn_like(stock.log_probs)
    logps, loss, gradient = {}, {}, {}
    for name, trainer in trainers.items():
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        if name == "float64":  # PEFT makes adapters float32
            trainer.model.double()
        trainer.model.zero_grad()
        value = trainer.compute_loss(trainer.model, inputs)
        value.backward()
        logps[name], loss[name] = trainer.log_probs, value.item()
        gradient[name] = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])

    def distance(a, b):
        return {
            "log_prob": (logps[a] - logps[b]).abs().max().item(),
            "loss_relative": abs(loss[a] / loss[b] - 1),
            "gradient_over_largest": ((gradient[a] - gradient[b]).abs().max() / gradient[b].abs().max()).item(),
        }

    return {
        "rows": list(torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1).shape),
        "token_ratio": 1 / logged(trainers["packed"])["prefix_sharing/policy/tokens_fraction"],
        "loss": loss,
        "packed_from_stock": distance("packed", "stock"),
        "packed_from_float64": distance("packed", "float64"),
        "stock_from_float64": distance("stock", "float64"),
    }


def train(cls, args) -> dict:
    """Loss, reward and gradient norm of every step."""
    trainer = make_trainer(cls, args)
    start = time.perf_counter()
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "seconds": time.perf_counter() - start,
        "loss": [row["loss"] for row in rows],
        "reward": [row["reward"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
    }


def plot(runs: dict, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    for panel, name in zip(axes, ("reward", "loss"), strict=True):
        panel.plot(runs["stock"][name], color="lightgray", linewidth=6, label="stock TRL")
        panel.plot(runs["packed"][name], color="C0", linewidth=1.5, label="each prompt once")
        panel.set_xlabel("optimizer step")
        panel.set_title(name)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", required=True, help="SVAMP.json")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--completion", type=int, default=24, help="new tokens per completion")
    parser.add_argument("--folder", type=Path, default=Path("outputs/prefix_sharing_smollm2"))
    parser.add_argument("--parts", nargs="+", default=["batch", "runs"], choices=["batch", "runs"])
    args = parser.parse_args()
    path = RESULTS / "prefix_sharing_smollm2.json"
    RESULTS.mkdir(exist_ok=True)
    report = json.loads(path.read_text()) if path.exists() else {}
    if "batch" in args.parts:
        report["batch"] = compare_batch(args)
        print(json.dumps(report["batch"], indent=1))
    if "runs" in args.parts:
        runs = {"stock": train(GRPOTrainer, args), "packed": train(EfficientGRPOTrainer, args)}
        report["runs"] = {
            "steps": args.steps,
            "completion": args.completion,
            "threads": torch.get_num_threads(),
            **runs,
        }
        for name in ("loss", "reward", "grad_norm"):
            pairs = zip(runs["stock"][name], runs["packed"][name], strict=True)
            report["runs"][f"largest_{name}_difference"] = max(abs(a - b) for a, b in pairs)
        plot(runs, path.with_suffix(".png"))
        print({key: value for key, value in report["runs"].items() if key.startswith("largest")})
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
