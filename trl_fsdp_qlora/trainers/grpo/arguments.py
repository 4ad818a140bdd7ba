"""Refuse arguments of `EfficientGRPOTrainer` that would end a run later."""

from collections.abc import Sized

from ..starting.arguments import TrainerArguments, check_prompts
from ..starting.input_checks import columns_of


def check_call(call: TrainerArguments) -> None:
    """Refuse a dataset from which a trainer cannot draw, and dynamic sampling of what it cannot draw again.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset, or rows that `dynamic_sampling` cannot draw.
    """
    dataset = call.get("train_dataset")
    check_prompts(call, needs_prompt=call.get("environment_factory") is None)
    not_single_turn_text = [name for name in ("tools", "environment_factory", "rollout_func") if call.get(name)]
    not_single_turn_text += [name for name in ("image", "images") if name in columns_of(dataset)]
    not_indexed = ["a streaming dataset"] if dataset is not None and not isinstance(dataset, Sized) else []
    if call["args"].dynamic_sampling and (not_single_turn_text or not_indexed):
        raise ValueError(
            "dynamic_sampling draws single-turn completions of further text prompts, by their index in the "
            f"dataset, and there is {', '.join(not_single_turn_text + not_indexed)}: set dynamic_sampling=False"
        )
