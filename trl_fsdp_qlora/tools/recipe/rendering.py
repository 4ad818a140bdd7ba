"""What renders a recipe's prompts, and its first prompts, rendered before a weight is loaded."""

from accelerate import PartialState
from datasets import Dataset
from jinja2 import TemplateError
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin
from transformers.integrations import is_deepspeed_zero3_enabled

from ..evaluation.drawing import MeasuringTrainer
from .arguments import ConfigError
from .checks import Recipe
from .script import say

# Number of training prompts that are rendered.
_PROMPTS = 64
_PROMPTS_WITH_IMAGES = 8


def load_processing(name: str, revision: str | None, images: bool) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The model's tokenizer, or its processor if the data has `images`; [`ConfigError`] if the model takes none."""
    auto_class = AutoProcessor if images else AutoTokenizer
    processing = auto_class.from_pretrained(name, revision=revision)
    if images and not isinstance(processing, ProcessorMixin):
        raise ConfigError(f"model_name_or_path={name!r} takes no images, and the data has some; leave the column out")
    return processing


def longest_prompt(recipe: Recipe, prompts: Dataset) -> int | None:
    """Number of tokens of the longest of a recipe's first prompts, with the tokens of its images and tools.

    Prompts of texts alone are rendered on every rank. Those with images need the model's processor, and those of
    environments a reset, so the main rank renders them, for the plan, and the others do when they train. An error in
    these is printed in one line.

    Returns:
        `None` if the prompts were not rendered.

    Raises:
        ConfigError: the chat template cannot render a prompt of texts alone.
    """
    has_images = "images" in prompts.column_names
    is_of_texts = recipe.code.agent is None and not has_images
    is_planned = PartialState().is_main_process and not is_deepspeed_zero3_enabled()
    if not is_of_texts and not is_planned:
        return None
    count = min(_PROMPTS_WITH_IMAGES if has_images else _PROMPTS, len(prompts))
    lengths = []
    try:
        processing = recipe.tokenizer
        if has_images:
            processing = load_processing(recipe.model.model_name_or_path, recipe.model.model_revision, images=True)
        trainer = MeasuringTrainer(processing, recipe.measurement)
        for row in prompts.select(range(count)):
            (ids,) = trainer.prompt_ids([row])
            lengths.append(len(ids))
    except Exception as error:
        if not is_of_texts:
            reason = " ".join(str(error).split())
            say(f"memory was not planned: {type(error).__name__}: {reason[:200]}")
            return None
        if isinstance(error, TemplateError):
            row = prompts[len(lengths)]
            row_number = row.get("row", len(lengths)) + 1  # pairs have no column of their place in a file
            raise ConfigError(
                f"the chat template cannot render the prompt of row {row_number}: {error}; its options are "
                "chat_template_kwargs"
            ) from error
        raise
    return max(lengths)
