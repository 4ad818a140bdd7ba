"""Folders as TRL 1.16 leaves them, and as the recipes of this package do."""

import json
import math
from pathlib import Path

import pandas as pd


def logged(steps: int, every: int = 10, **further) -> list[dict]:
    """A log history whose rewards rise."""
    history = []
    for step in range(every, steps + 1, every):
        part = step / steps
        history.append(
            {
                "step": step,
                "epoch": part,
                "loss": 0.01 * math.sin(step),
                "grad_norm": 0.5 + 0.2 * math.sin(step / 3),
                "learning_rate": 1e-5 * (1 - part),
                "reward": 0.3 + 0.6 * part + 0.05 * math.sin(step),
                "reward_std": 0.3 - 0.2 * part,
                "rewards/correct/mean": 0.3 + 0.6 * part,
                "rewards/correct/std": 0.2,
                "frac_reward_zero_std": 0.2 + 0.5 * part,
                "completions/mean_length": 40 - 10 * part,
                "completions/min_length": 10,
                "completions/max_length": 64,
                "completions/clipped_ratio": 0.2 * (1 - part),
                "entropy": 1.2 - 0.8 * part,
                "kl": 0.01 * part,
                "step_time": 2.0,
                **further,
            }
        )
    history.append({"step": steps, "train_runtime": 100.0, "train_loss": 0.0})
    return history


def write_state(folder: Path, history: list[dict], max_steps: int = 100) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": max_steps, "max_steps": max_steps, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def write_completions(folder: Path, step: int, rows: list[dict]) -> Path:
    """Write one of TRL's files, as TRL does: `GRPOTrainer.log` makes a DataFrame of lists."""
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([{"step": step, **row} for row in rows]).to_parquet(path)
    return path


def group(prompt, completions: list, rewards: list[float], **columns) -> list[dict]:
    """Rows of one prompt, with one reward function and advantages."""
    mean = sum(rewards) / len(rewards)
    rows = []
    for i, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
        row = {"prompt": prompt, "completion": completion, "correct": reward, "advantage": reward - mean}
        rows.append({**row, **{name: values[i] for name, values in columns.items()}})
    return rows


def trl_run(folder: Path, steps: int = 100, prompts: int = 4, size: int = 4) -> Path:
    """A run of stock TRL with `log_completions=True`."""
    write_state(folder, logged(steps), steps)
    for step in range(10, steps + 1, 10):
        rows = []
        for i in range(prompts):
            texts = [f"step {step}, prompt {i}: the answer is {i + j}" for j in range(size)]
            rows += group(f"What is {i} + 0?", texts, [1.0 if j == 0 else 0.0 for j in range(size)])
        write_completions(folder, step, rows)
    return folder
