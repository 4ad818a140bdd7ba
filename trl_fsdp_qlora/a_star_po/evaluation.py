"""Accuracy by a trainer's reward functions: every problem exactly once, on every rank."""

import time
from collections.abc import Callable

import torch
from accelerate.utils import gather_object

from ..stats import wilson_interval
from .sampling import LocalScorer, combine, decode


def evaluate_rows(
    rows: list[dict],
    tokenize: Callable,
    generate: Callable[[list[list[int]]], list[list[int]]],
    processing_class,
    scorer: LocalScorer,
    reward_weights: torch.Tensor,
    solved_from: float,
    batch_size: int,
    rank: int,
    world: int,
    even: bool,
) -> dict[str, float]:
    """Reward and share of solved problems, the same for any number of ranks.

    Batches are fixed by the dataset and dealt to the ranks in turn; results come back with their index, so nothing is
    padded or counted twice. (`Trainer`'s own loop repeats problems until the ranks have equal numbers.)

    Args:
        rows: all problems, on every rank.
        tokenize: prompts -> (token ids, ...), as `GRPOTrainer._tokenize_prompts`.
        generate: token ids of prompts -> completions.
        solved_from: reward from which a problem counts as solved.
        even: let every rank generate equally often (a forward is collective); surplus results are dropped.

    Returns:
        `reward`, `accuracy`, `accuracy_low`, `accuracy_high` (95% Wilson), `n`, `completion_length`, `runtime` (s).

    Raises:
        ValueError: no problems.
    """
    if not rows:
        raise ValueError("eval_dataset is empty")
    started = time.perf_counter()
    batches = [range(i, min(i + batch_size, len(rows))) for i in range(0, len(rows), batch_size)]
    mine = batches[rank::world]
    surplus = -(-len(batches) // world) - len(mine) if even else 0
    results = []
    for batch in mine:
        part = [rows[i] for i in batch]
        prompts = [row["prompt"] for row in part]
        prompt_ids = tokenize(prompts)[0]
        completion_ids = generate(prompt_ids)
        completions = decode(processing_class, prompts, prompt_ids, completion_ids)
        rewards = combine(scorer(part, completions, completion_ids), reward_weights).tolist()
        results += list(zip(batch, rewards, map(len, completion_ids), strict=True))
    for _ in range(surplus):
        generate(tokenize([rows[0]["prompt"]])[0])
    if world > 1:
        results = gather_object(results)
    if sorted(index for index, _, _ in results) != list(range(len(rows))):
        raise RuntimeError(f"{len(results)} results for {len(rows)} problems: the ranks disagree about the dataset")
    # In the problems' order, so that sums do not depend on the number of ranks.
    rewards = torch.tensor([reward for _, reward, _ in sorted(results)], dtype=torch.float64)
    solved = int((rewards >= solved_from - 1e-6).sum())
    low, high = wilson_interval(solved, len(rows))
    return {
        "reward": rewards.nanmean().item(),
        "accuracy": solved / len(rows),
        "accuracy_low": low,
        "accuracy_high": high,
        "n": len(rows),
        "completion_length": sum(length for _, _, length in results) / len(rows),
        "runtime": time.perf_counter() - started,
    }
