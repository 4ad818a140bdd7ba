"""Completions and rewards of a few prompts, on one rank alone: nothing here communicates.

Stage 1 and evaluation hand prompts out to ranks unevenly, so they cannot use TRL's own generation and scoring, which
end in collective operations.
"""

import asyncio
import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, TrainerState
from trl.data_utils import apply_chat_template, is_conversational

from ..compat.trl import is_async_callable, parse_response
from .config import AStarPOConfig


def decode(processing_class, prompts: list, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list:
    """Completions as `GRPOTrainer._generate` hands them to reward functions: text, or messages for conversations."""
    if not is_conversational({"prompt": prompts[0]}):
        return processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    if getattr(processing_class, "response_template", None) or getattr(processing_class, "response_schema", None):
        return [
            [parse_response(processing_class, ids, prefix=prefix)]
            for prefix, ids in zip(prompt_ids, completion_ids, strict=True)
        ]
    texts = processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]


@dataclass(frozen=True)
class LocalScorer:
    """Calls reward functions as `GRPOTrainer._calculate_rewards` does, without gathering.

    Attributes:
        functions, processing_classes: K reward functions or models, and the tokenizers of the models.
        state: of the trainer, as reward functions get it.
        device: where the models are.
        chat_template_kwargs: for the texts that reward models read.
        async_loop: runs the functions that are coroutines; `None` where there are none.
    """

    functions: list
    processing_classes: list
    state: TrainerState
    device: torch.device
    chat_template_kwargs: dict
    async_loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, rows: list[dict], completions: list, completion_ids: list[list[int]]) -> torch.Tensor:
        """Rewards of R completions by K functions: float32 of shape `(R, K)` on the CPU, NaN where one says `None`.

        Raises:
            trl_fsdp_qlora.run.input_checks.RewardError: a function that returned something that is no list of rewards.
        """
        prompts = [row["prompt"] for row in rows]
        columns = [name for name in rows[0] if name not in ("prompt", "completion", "completion_ids")]
        kwargs = {name: [row[name] for row in rows] for name in columns}
        # Values of stage 1 belong to no training step, so what a reward function logs here goes nowhere.
        kwargs |= {"trainer_state": self.state, "log_extra": _ignore, "log_metric": _ignore}
        kwargs |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        rewards_RK = torch.zeros(len(rows), len(self.functions))
        functions = zip(self.functions, self.processing_classes, strict=True)
        for k, (function, processing_class) in enumerate(functions):
            if isinstance(function, nn.Module):
                rewards_RK[:, k] = self._reward_model(function, processing_class, prompts, completions)
                continue
            if is_async_callable(function):
                values = asyncio.run_coroutine_threadsafe(_await(function, kwargs), self.async_loop).result()
            else:
                values = function(**kwargs)
            values = [math.nan if value is None else value for value in values]
            rewards_RK[:, k] = torch.tensor(values, dtype=torch.float32)
        return rewards_RK

    def _reward_model(self, model, processing_class, prompts, completions) -> torch.Tensor:
        if is_conversational({"prompt": prompts[0]}):
            texts = [
                apply_chat_template({"messages": p + c}, processing_class, **self.chat_template_kwargs)["text"]
                for p, c in zip(prompts, completions, strict=True)
            ]
        else:
            texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        inputs = processing_class(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(self.device)
        with torch.inference_mode():
            return model(**inputs).logits[:, 0].float().cpu()


def generation_config(
    args: AStarPOConfig, pad_token_id: int, eos_token_ids: list[int], sample: bool
) -> GenerationConfig:
    """How the reference policy is sampled, or the policy decodes greedily."""
    settings = {
        "max_new_tokens": args.max_completion_length,
        "pad_token_id": pad_token_id,
        "eos_token_id": eos_token_ids,
        "repetition_penalty": args.repetition_penalty,
        "do_sample": sample,
    }
    if sample:
        settings |= {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        settings |= args.generation_kwargs or {}
    return GenerationConfig(**settings, disable_compile=True)


def _ignore(*_args) -> None:
    """Stands in for the trainer's log hooks."""


async def _await(function, kwargs):
    return await function(**kwargs)
