"""The prefill of a decoding loop: each distinct prompt once, behind what earlier forwards have computed of it.

The prompts are computed in *parts*, each by a forward: rows that continue from kept caches of about equal length. The
caches of the parts are then joined in the order of the prompts. Most batches have one part, whole prompts.

Letters: U distinct prompts, P columns of the padded prompts.
"""

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ...compat.fake_tensors import list_of
from ...compat.transformers_generation import prefill, unfinished
from ...prefix_sharing.batch import PER_IMAGE, PER_TOKEN
from .common_beginning import prefill_beginning
from .turns import Continuation, KeptTurns, filled_cache, joined_cache

# A prefill's arguments that are not per row: images, or their features, which `generate` computes for some classes.
OF_IMAGES = (*PER_IMAGE, "mm_encoder_outputs")


class Prefill:
    """The prefill of U prompts.

    Args:
        ids_UP: tokens of the prompts, padded on the left.
        arguments: `generate`'s for the forward of these prompts, the empty cache among them.
        cache_name: the cache's name in `arguments`.
        synced_gpus: a forward is collective.
        pixels: images that `generate` did not get.

    Attributes:
        tokens: positions that were computed, padding included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids_UP: torch.Tensor,
        arguments: dict[str, object],
        cache_name: str,
        config: GenerationConfig,
        *,
        synced_gpus: bool,
        pixels: dict[str, torch.Tensor],
    ):
        self.model = model
        self.ids_UP = ids_UP
        self.arguments = arguments
        self.cache_name = cache_name
        self.config = config
        self.synced_gpus = synced_gpus
        self.tokens = 0
        self._pixels = pixels
        self._lengths = list_of(ids_UP.shape[1] - padding_of(ids_UP, arguments))

    def parts(self, turns: KeptTurns | None, has_images: bool) -> list[Continuation]:
        """The parts: behind what `turns` keep of the last turn, behind a common beginning, or whole prompts."""
        count, width = self.ids_UP.shape
        every_row = list(range(count))
        whole = Continuation(every_row, [None] * count, width)
        prompts = []
        for row, length in zip(list_of(self.ids_UP), self._lengths, strict=True):
            prompts.append(row[width - length :])
        if turns is not None and turns.number > 0:
            if not has_images:
                return turns.plan_prefill(prompts)
            turns.clear()
            return [whole]
        beginning = prefill_beginning(self.model, prompts, self.ids_UP, self.arguments, self.config, self.synced_gpus)
        if beginning is None:
            return [whole]
        shared = len(beginning.ids)
        self.tokens += shared
        return [Continuation(every_row, [beginning] * count, width - shared)]

    def run(self, parts: list[Continuation]) -> ModelOutput:
        """The model's outputs with logits `(U, 1, V)` of each prompt's last token, and one cache of all prompts."""
        waiting = list(parts)
        caches = []
        logits = []
        rows = []  # of `ids_UP`, in the order of their prefill
        outputs = None
        while unfinished(self.model, not waiting, self.synced_gpus, self.ids_UP.device):
            if not waiting:
                # Other ranks have a part left. This one takes part in their forward with a token that is not used.
                self._forward(Continuation([0], [None], 1), lengths=[1])
                continue
            part = waiting.pop(0)
            rows += part.rows
            self.tokens += len(part.rows) * part.new
            outputs = self._forward(part, self._lengths)
            caches.append(outputs[self.cache_name])
            logits.append(outputs.logits[:, -1:])
        order_U = torch.tensor(rows, device=self.ids_UP.device).argsort()
        outputs.logits = torch.cat(logits)[order_U]
        if len(caches) > 1:
            width = self.ids_UP.shape[1]
            outputs[self.cache_name] = joined_cache(self.model.config, caches, order_U, width)
        return outputs

    def _forward(self, part: Continuation, lengths: list[int]) -> ModelOutput:
        """The model's outputs for the last `part.new` columns of some prompts, which continue from kept caches.

        Args:
            lengths: tokens of every prompt.
        """
        lengths_of_part = [lengths[row] for row in part.rows]
        width = max(lengths_of_part)
        used = [max(0, length - part.new) for length in lengths_of_part]
        rows = torch.tensor(part.rows, device=self.ids_UP.device)
        new_ids = self.ids_UP[rows, -part.new :]
        is_text = part.new == 1  # or a token that is not used
        arguments = self._arguments_of(rows, width, with_images=not is_text)
        arguments[self.cache_name] = filled_cache(self.model.config, part.kept, used, width - part.new)
        part.kept.clear()  # frees the kept rows' memory before the forward
        return prefill(self.model, new_ids, self.config, arguments)

    def _arguments_of(self, rows: torch.Tensor, width: int, with_images: bool) -> dict[str, object]:
        """The forward's arguments for the last `width` columns of some prompts."""
        arguments = {}
        images = {}
        for name, value in self.arguments.items():
            if name in OF_IMAGES:
                images[name] = value
            else:
                arguments[name] = rows_of(name, value, rows)
        for name in ("attention_mask", "position_ids", *PER_TOKEN):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name][..., -width:]
        return {**arguments, **(self._pixels or images)} if with_images else arguments


def padding_of(ids_UP: torch.Tensor, arguments: dict[str, object]) -> torch.Tensor:
    """Columns of padding before each prompt, `(U,)`; `generate` passes no mask if there is no padding."""
    mask_UP = arguments.get("attention_mask")
    return ids_UP.new_zeros(len(ids_UP)) if mask_UP is None else (mask_UP == 0).sum(1)


def rows_of(name: str, value: object, rows: torch.Tensor) -> object:
    """The rows `rows` of the model's argument `name`; an argument that is no tensor is returned unchanged."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    # Classes that take images have positions on several axes, `(axes, rows, tokens)`.
    return value[:, rows] if name == "position_ids" and value.ndim == 3 else value[rows]
