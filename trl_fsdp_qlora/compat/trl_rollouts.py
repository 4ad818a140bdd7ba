"""TRL's rollouts: what its trainers hand from turn to turn, and what they do with prompts, tools and rewards."""

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from . import trl as trls


def rewards_of_rank(trainer: Any, rows: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
    """TRL's rewards of R completions by K functions, `(R, K)`, of this rank alone and not logged.

    TRL itself gathers the rewards at the end.
    """
    from trl.trainer import grpo_trainer

    unlogged = patch.multiple(trainer, _log_completion_extra=lambda *_: None, _log_metric=lambda *_: None)
    with patch.multiple(grpo_trainer, gather=lambda rewards: rewards), unlogged:
        return grpo_trainer.GRPOTrainer._calculate_rewards(trainer, rows, prompts, completions, ids)


def prompts_of(rows: list[dict[str, Any]]) -> list:
    """The prompts of rows, with their images, as `_generate_and_score_completions` gives them to `_generate`."""
    prompts = [row["prompt"] for row in rows]
    if "images" in rows[0]:
        images = [row.get("images") for row in rows]
    elif "image" in rows[0]:
        images = [None if row.get("image") is None else [row["image"]] for row in rows]
    else:
        return prompts
    if all(of_row == [] for of_row in images):
        return prompts
    prepare = trls.prepare_multimodal_messages
    return [prepare(*pair) for pair in zip(prompts, images, strict=True)]


def has_response_format(tokenizer: Any) -> bool:
    """Whether `parse_response` can read a completion's parts, such as tool calls."""
    return bool(getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None))


def with_response_schema(tokenizer: Any) -> Any:
    """`tokenizer`, changed as in `GRPOTrainer` to read tool calls; a `response_template` of its own stays."""
    return tokenizer if has_response_format(tokenizer) else trls.add_response_schema(tokenizer)


def training_chat_template(tokenizer: Any) -> str | None:
    """The chat template that `GRPOTrainer` uses for episodes instead of the tokenizer's own.

    It is `None` if `GRPOTrainer` uses the tokenizer's own.
    """
    if trls.is_chat_template_prefix_preserving(tokenizer):
        return None
    return trls.get_training_chat_template(tokenizer)


def tool_suffix_ids(tokenizer: Any, chat_template: str | None, options: dict, messages: list[dict]) -> list[int]:
    """Token ids that `GRPOTrainer` puts between a turn's last token and the next turn.

    They are the tool results and the opening of the next turn.
    """
    trainer = SimpleNamespace(
        _is_vlm=False,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=chat_template,
        chat_template_kwargs=options,
    )
    from trl import GRPOTrainer

    return GRPOTrainer._get_tool_suffix_ids(trainer, messages)


def token_types_of_images(trainer: Any, prompt_ids: list[list[int]], fields: dict) -> dict[str, list[list[int]]]:
    """The field by which a model distinguishes an image's tokens from text, for prompts that got images from tools.

    `GRPOTrainer._generate_single_turn` makes it too, inside of its own call of `generate`. Nothing if no prompt has an
    image, or if TRL did not find the placeholder token of the model's images.
    """
    image = vars(trainer).get("_image_pad_token_id")
    if "pixel_values" not in fields or image is None:
        return {}
    types = {image: 1}
    video = vars(trainer).get("_video_pad_token_id")
    if video is not None:
        types[video] = 2
    name = "mm_token_type_ids" if "image_grid_thw" in fields else "token_type_ids"
    return {name: [[types.get(token, 0) for token in ids] for ids in prompt_ids]}


class Turn(NamedTuple):
    """The arguments of `GRPOTrainer._generate_single_turn`, which gets them by name; RLOO's takes the first three."""

    prompt_ids: list[list[int]]
    images: list[list | None] | None
    multimodal_fields: dict[str, Any]
    num_generations: int
    has_tool_images: bool = False


class Generated(NamedTuple):
    """What `GRPOTrainer._generate` returns, in TRL's order; lists have an entry for each completion of this rank."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list
    logprobs: list[list[float]] | None
    extra_fields: dict[str, list]
    images: list[list | None] | None
    tool_images: list[list]
