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
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

RESULTS = Path(__file__).parent / "results"


def last_number_reward(completions, answer, **kwargs) -> list[float]:
    """1 for the right last number; else 0.2 for naming any number, less a little for length, so that groups differ."""
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion[0]["content"]
        numbers = [word.strip(".,$") for word in text.split() if word.strip(".,$").isdigit()]
        right = bool(numbers) and float(numbers[-1]) == gold
        rewards.append(1.0 if right else 0.2 * bool(numbers) - 0.001 * len(text))
    return rewards


def make_trainer(cls, args, folder: Path, **config):
    """LoRA on every linear layer, fp32, four completions a prompt, two prompts a step."""
    torch.manual_seed(0)
    problems = json.loads(Path(args.data).read_text())[: args.problems]
    prompts = [
        [{"role": "user", "content": f"{p['Body']} {p['Question']} Reason briefly, end with the number."}]
        for p in problems
    ]
    return cls(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=last_number_reward,
        args=EfficientGRPOConfig(
            output_dir=str(folder),
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
            **config,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [p["Answer"] for p in problems]}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )


def compare_batch(stock, ours) -> dict:
    """Differences on one batch of sampled completions."""
    stock.model.train()
    ours.model.train()
    for trainer in (stock, ours):
        trainer.current_gradient_accumulation_steps = 1
    batch = next(iter(stock.get_train_dataloader()))
    inputs = stock._generate_and_score_completions(batch)
    results = []
    for trainer in (stock, ours):
        start = time.perf_counter()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        seconds = time.perf_counter() - start
        results.append((loss.item(), [p.grad.clone() for p in trainer.model.parameters() if p.requires_grad], seconds))
        trainer.model.zero_grad(set_to_none=True)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        logps = [
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, inputs["completion_ids"].size(1))[0]
            for trainer in (stock, ours)
        ]
    largest = max(g.abs().max() for g in results[0][1])
    difference = max((a - b).abs().max() for a, b in zip(results[0][1], results[1][1], strict=True))
    return {
        "rows": list(ids.shape),
        "token_ratio": 1 / ours._metrics["train"]["prefix_sharing/policy/tokens_share"][-1],
        "largest_log_prob_difference": (logps[0] - logps[1]).abs().max().item(),
        "relative_loss_difference": abs(results[1][0] / results[0][0] - 1),
        "gradient_difference_over_largest": (difference / largest).item(),
        "packed": ours.prefix_sharing.active(),
    }


def train(cls, args, folder: Path, **config) -> dict:
    trainer = make_trainer(cls, args, folder, **config)
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
    parser.add_argument("--completion", type=int, default=24, help="new tokens a completion")
    parser.add_argument("--folder", type=Path, default=Path("outputs/prefix_sharing_smollm2"))
    args = parser.parse_args()
    report = {"setting": {"steps": args.steps, "completion": args.completion, "threads": torch.get_num_threads()}}
    report["batch"] = compare_batch(
        make_trainer(GRPOTrainer, args, args.folder), make_trainer(EfficientGRPOTrainer, args, args.folder)
    )
    print(json.dumps(report["batch"], indent=1))
    runs = {"stock": train(GRPOTrainer, args, args.folder), "packed": train(EfficientGRPOTrainer, args, args.folder)}
    report["runs"] = runs
    for name in ("loss", "reward", "grad_norm"):
        pairs = zip(runs["stock"][name], runs["packed"][name], strict=True)
        report[f"largest_{name}_difference"] = max(abs(a - b) for a, b in pairs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "prefix_sharing_smollm2.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(runs, RESULTS / "prefix_sharing_smollm2.png")
    print({key: value for key, value in report.items() if key.startswith("largest")})
    print({key: round(run["seconds"], 1) for key, run in runs.items()})


if __name__ == "__main__":
    main()
