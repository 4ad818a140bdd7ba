"""Accuracy by a trainer's reward functions: every problem exactly once, on every rank."""

import time
from collections.abc import Callable

import torch

from ..recipe.stats import wilson_interval
from ..rollout.completions import over_ranks
from ..rollout.rewards import combine
from .sampling import LocalScorer, decode


def evaluate_rows(
    rows: list[dict],
    tokenize: Callable,
    generate: Callable[[list[list[int]]], list[list[int]]],
    processing_class,
    scorer: LocalScorer,
    reward_weights: torch.Tensor,
    solved_from: float,
    batch_size: int,
    lockstep: bool,
) -> dict[str, float]:
    """Reward and share of solved problems, the same for any number of ranks.

    (`Trainer`'s own loop repeats problems until the ranks have equal numbers.)

    Args:
        rows: all problems, on every rank.
        tokenize: prompts -> (token ids, ...), as `GRPOTrainer._tokenize_prompts`.
        generate: token ids of prompts -> completions.
        solved_from: reward from which a problem counts as solved.
        lockstep: see [`trl_fsdp_qlora.rollout.completions.over_ranks`].

    Returns:
        `reward`, `accuracy`, `accuracy_low`, `accuracy_high` (95% Wilson), `n`, `completion_length`, `runtime` (s).

    Raises:
        ValueError: no problems.
    """
    if not rows:
        raise ValueError("eval_dataset is empty")
    started = time.perf_counter()

    def complete(batch: range) -> tuple[list[list[int]], list[list[int]]]:
        prompt_ids = tokenize([rows[i]["prompt"] for i in batch])[0]
        return prompt_ids, generate(prompt_ids)

    def score(batch: range, generated: tuple[list[list[int]], list[list[int]]]) -> list[tuple[float, int]]:
        part, (prompt_ids, completion_ids) = [rows[i] for i in batch], generated
        completions = decode(processing_class, [row["prompt"] for row in part], prompt_ids, completion_ids)
        rewards = combine(scorer(part, completions, completion_ids), reward_weights).tolist()
        return list(zip(rewards, map(len, completion_ids), strict=True))

    results = over_ranks(len(rows), batch_size, complete, score, lockstep=lockstep)
    # In the problems' order, so that sums do not depend on the number of ranks.
    rewards = torch.tensor([reward for reward, _ in results], dtype=torch.float64)
    solved = int((rewards >= solved_from - 1e-6).sum())
    low, high = wilson_interval(solved, len(rows))
    return {
        "reward": rewards.nanmean().item(),
        "accuracy": solved / len(rows),
        "accuracy_low": low,
        "accuracy_high": high,
        "n": len(rows),
        "completion_length": sum(length for _, length in results) / len(rows),
        "runtime": time.perf_counter() - started,
    }
