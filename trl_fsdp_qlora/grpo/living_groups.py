"""Dynamic sampling around TRL's own method: completions and rewards are drawn before it, and it is handed the best."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from ..rollout.dynamic_sampling import DynamicSampling, ScoredRows, alive_groups
from .config import EfficientGRPOConfig


@dataclass
class DrawnRow:
    """One completion of `GRPOTrainer._generate`, and what its reward functions logged for it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion: str | list[dict]
    logprobs: list[float] | None
    extras: dict[str, Any]


def to_rows(generated: tuple, extras: dict[str, list]) -> list[DrawnRow]:
    """What `GRPOTrainer._generate` returned for text prompts, by row.

    Args:
        generated: prompt ids, completion ids, tool mask, completions, log-probabilities, fields of a rollout function,
            images, images of tools.
        extras: columns that reward functions logged, one value for each row.
    """
    prompt_ids, completion_ids, _, completions, logprobs, *_ = generated
    logprobs = [None] * len(prompt_ids) if logprobs is None else logprobs
    columns = {name: values for name, values in extras.items() if len(values) == len(prompt_ids)}
    logged = [{name: values[i] for name, values in columns.items()} for i in range(len(prompt_ids))]
    return [DrawnRow(*row) for row in zip(prompt_ids, completion_ids, completions, logprobs, logged, strict=True)]


def as_generated(rows: list[DrawnRow]) -> tuple:
    """The rows as `GRPOTrainer._generate` would return them."""
    logprobs = None if rows[0].logprobs is None else [row.logprobs for row in rows]
    completions = [row.completion for row in rows]
    return [r.prompt_ids for r in rows], [r.completion_ids for r in rows], None, completions, logprobs, {}, None, []


def logged_columns(rows: list[DrawnRow]) -> dict[str, list]:
    """Columns that reward functions logged, with `None` for rows without."""
    names = sorted({name for row in rows for name in row.extras})
    return {name: [row.extras.get(name) for row in rows] for name in names}


class LivingGroups:
    """Groups with different rewards in place of dead ones, for a GRPO trainer; nothing where it is not asked for.

    Args:
        args: of the trainer.
        dataset: of the training prompts, by index.
        accelerator: of the trainer.
        weights_K: of the reward functions.
    """

    def __init__(self, args: EfficientGRPOConfig, dataset, accelerator: Accelerator, weights_K: torch.Tensor):
        self.sampling = None
        if args.dynamic_sampling:
            rounds = args.dynamic_sampling_max_rounds
            self.sampling = DynamicSampling(len(dataset), args.num_generations, rounds, args.seed, accelerator)
        self.dataset = dataset
        self.alive = partial(
            alive_groups,
            weights_K=weights_K,
            group_size=args.num_generations,
            each=args.multi_objective_aggregation == "normalize_then_sum",
        )
        self._held: ScoredRows | None = None

    def draw(
        self, inputs: list[dict], generate: Callable, rewards: Callable, extras: dict[str, list]
    ) -> tuple[list[dict], dict[str, float]]:
        """Rows to train on in place of `inputs`, and metrics. Their completions are held for TRL until [`release`].

        Args:
            inputs: this rank's rows.
            generate: `GRPOTrainer._generate`.
            rewards: `GRPOTrainer._calculate_rewards`.
            extras: columns that reward functions log; emptied with every draw, and filled with those of the result.
        """

        def draw_once(rows: list[dict]) -> ScoredRows:
            prompts = [row["prompt"] for row in rows]
            generated = generate(prompts)
            rewards_NK = rewards(rows, prompts, generated[3], generated[1])
            drawn = to_rows(generated, extras)
            extras.clear()
            return ScoredRows(rows, drawn, rewards_NK)

        self._held, metrics = self.sampling.fill(draw_once(inputs), self.dataset, draw_once, self.alive)
        extras.update(logged_columns(self._held.drawn))
        return self._held.inputs, metrics

    def release(self) -> None:
        self._held = None

    def generated(self) -> tuple | None:
        """What `_generate` is to return while rows are held."""
        return None if self._held is None else as_generated(self._held.drawn)

    def rewards(self) -> torch.Tensor | None:
        """What `_calculate_rewards` is to return while rows are held."""
        return None if self._held is None else self._held.rewards_NK

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps; the same on every rank."""
        return {} if self.sampling is None else self.sampling.state()

    def load_state(self, state: dict[str, int]) -> None:
        if self.sampling is not None and state:
            self.sampling.load_state(state)
