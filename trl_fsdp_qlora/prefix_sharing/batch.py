"""The padded rows of one call of a model: [`Batch`] on the device, [`Sequences`] on the host.

A row of the batch may be padded on either side. Tokens are counted from the row's first real token. The last token
that has a label is only ever a target, so a row is computed up to the token before it. A call without labels wants
the last hidden state of every token.

Suffixes of shapes: B rows of a batch, L columns of it or tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..compat.peft import rows_have_adapters
from ..compat.trl import Vision, rows_of_images
from ..scoring.transfer import to_device, to_host
from .status import CannotPack

if TYPE_CHECKING:
    from .passes import Forward

# The arguments of a call of a model, by name.
Arguments = dict[str, Any]

IGNORED_LABEL = -100
# Arguments of models with an entry per image, and per token of a row.
PER_IMAGE = (
    "pixel_values", "image_grid_thw", "image_position_ids", "pixel_attention_mask", "spatial_shapes", "image_sizes",
)  # fmt: skip
PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
# Vision arguments that the host reads.
READ_ON_HOST = ("image_grid_thw", *PER_TOKEN)


def on_host(vision: Vision) -> Vision:
    """Vision arguments, with those that the host reads copied there in one transfer."""
    to_read = {}
    for name in READ_ON_HOST:
        x = vision.get(name)
        if isinstance(x, torch.Tensor):
            to_read[name] = x
    return {**vision, **to_host(to_read)}


@dataclass(frozen=True, eq=False)
class Instructions:
    """What a trainer passes to prompt sharing by the keyword `sharing` of a fused call.

    Attributes:
        num_images: number of images of each row, if known.
        tokens_per_pass: run in passes of no more tokens than this.
        forward: the [`passes.Forward`] of a plan that is to be run.
        of_trainer: whether a trainer passed them. All ranks then make the same calls.
    """

    num_images: list[int] | None = None
    tokens_per_pass: int | None = None
    forward: Forward | None = None
    of_trainer: bool = True


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a model's fused forward, or of its backbone.

    Attributes:
        stock: the forward as in stock TRL.
        arguments: of the call, by name.
        of_backbone: whether the backbone is called, which takes no labels.
        instructions: of the trainer.
    """

    stock: Callable[..., ModelOutput]
    arguments: Arguments
    of_backbone: bool = False
    instructions: Instructions = Instructions(of_trainer=False)

    def stock_output(self, batch: Batch) -> ModelOutput:
        """Returns what the forward of stock TRL computes for a batch: scores, or last hidden states without labels."""
        arguments = batch.arguments()
        if batch.labels is None:
            return self.stock(use_cache=False, **arguments)
        return self.stock(fused_lm_head=True, **arguments)


@dataclass(eq=False)
class Batch:
    """A call of the fused forward, or of the backbone: B padded rows of L tokens.

    Attributes:
        input_ids, attention_mask, labels: `(B, L)`; the mask may be absent. Without labels the last hidden states of
            all tokens are wanted, and not the scores of some.
        vision: the model's further arguments, those for images and those with one entry per token.
        num_images: number of images of each row, if the caller counted them.
        router_loss: whether the router loss of a mixture of experts is needed.
        num_items: divisor of the loss; the number of labels if absent.
        last_columns: without labels, number of last columns whose hidden states are needed; 0 for all.
        from_padding: whether the model's own loss predicts a label from a column without a token (bool, no dimension),
            if a forward without `fused_lm_head` computes a loss.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    labels: torch.Tensor | None
    vision: Vision = field(default_factory=dict)
    num_images: list[int] | None = None
    router_loss: bool = False
    num_items: torch.Tensor | int | None = None
    last_columns: int = 0
    from_padding: torch.Tensor | None = None

    @property
    def has_images(self) -> bool:
        return any(name.startswith("pixel_values") for name in self.vision)

    def is_wanted(self) -> torch.Tensor:
        """Returns the wanted results: `(B, L - 1)`, whether the next token has a label; without labels `(B, L)`,
        whether there is a token.
        """
        if self.labels is not None:
            return self.labels[:, 1:] != IGNORED_LABEL
        if self.attention_mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.attention_mask.bool()

    def arguments(self) -> Arguments:
        """Returns the arguments of the forward call for this batch."""
        arguments: Arguments = dict(self.of_tokens())
        if self.labels is None:
            del arguments["labels"]
        # After `rows` some tensors of images are on the host.
        device = self.input_ids.device
        for name, x in self.vision.items():
            if isinstance(x, torch.Tensor):
                x = to_device(x, device)
            arguments[name] = x
        if self.router_loss:
            arguments["output_router_logits"] = True
        return arguments

    def of_tokens(self) -> dict[str, torch.Tensor | None]:
        """Returns the tensors `(B, L)` by name."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": self.labels}

    @classmethod
    def joined(cls, batches: list[Batch]) -> Batch:
        """Returns batches of equal width joined into one."""
        if len(batches) == 1:
            return batches[0]
        parts_of_vision: dict[str, list[torch.Tensor]] = {}
        num_images: list[int] = []
        for batch in batches:
            for name, x in batch.vision.items():
                parts_of_vision.setdefault(name, []).append(x)
            none_counted = [0] * len(batch.input_ids)
            num_images += batch.num_images or none_counted
        is_counted = any(batch.num_images is not None for batch in batches)
        return cls(
            input_ids=torch.cat([batch.input_ids for batch in batches]),
            attention_mask=_joined([batch.attention_mask for batch in batches]),
            labels=_joined([batch.labels for batch in batches]),
            vision={name: torch.cat(parts) for name, parts in parts_of_vision.items()},
            num_images=num_images if is_counted else None,
            router_loss=any(batch.router_loss for batch in batches),
        )

    def rows(self, rows: np.ndarray) -> Batch:
        """Returns a batch of the rows with these indices."""
        tensors: dict = {}
        for name, x in self.of_tokens().items():
            if x is not None:
                index = to_device(torch.from_numpy(rows), x.device)
                x = x[index]
            tensors[name] = x
        vision = self.vision
        num_images = None
        if vision:
            counted = dict(vision)
            if self.num_images is not None:
                counted["num_images"] = self.num_images
            vision = rows_of_images(on_host(counted), rows)
            num_images = vision.pop("num_images", None)
        return replace(self, vision=vision, num_images=num_images, from_padding=None, **tensors)


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Returns the tensors of batches as one; `None` if a batch has none."""
    tensors = [part for part in parts if part is not None]
    if len(tensors) < len(parts):
        return None
    return torch.cat(tensors)


@dataclass
class Sequences:
    """A batch as the host sees it: B rows of up to L tokens, each counted from its first real token.

    Attributes:
        tokens_BL: token ids, and other numbers for tokens that must not count as equal.
        offsets_B, lengths_B: column of the first real token, and number of tokens.
        scored_BL: whether a token has a label.
        width: number of columns of the padded batch.
        code_BL: the batch itself, in its columns: two times the token, plus one if it has a label; -1 for padding.
        image_keys_B: numbers that are equal for rows with the same images; `None` for a batch without images.
        spans_B2: first and last placeholder token of an image, (0, -1) for none; `None` for a batch without images.
        needs_all: whether all tokens are needed, and not only those up to the last label of a row.
        router_loss: whether router losses are needed, for which all tokens are.
    """

    tokens_BL: np.ndarray
    offsets_B: np.ndarray
    lengths_B: np.ndarray
    scored_BL: np.ndarray
    width: int
    code_BL: np.ndarray
    image_keys_B: np.ndarray | None = None
    spans_B2: np.ndarray | None = None
    needs_all: bool = False
    router_loss: bool = False

    @property
    def has_images(self) -> bool:
        """Whether any row has an image."""
        return self.spans_B2 is not None and bool((self.spans_B2[:, 1] >= 0).any())

    @property
    def needed_B(self) -> np.ndarray:
        """Number of tokens of each row up to the one that predicts its last label, or of the whole row."""
        if self.needs_all:
            return self.lengths_B
        return np.maximum(last_true(self.scored_BL), 0)

    def rows(self, rows: np.ndarray) -> Sequences:
        """Returns the rows with these indices."""
        parts = {}
        for name, x in vars(self).items():
            if isinstance(x, np.ndarray):
                parts[name] = x[rows]
        return replace(self, **parts)


def last_true(is_BL: np.ndarray) -> np.ndarray:
    """Returns the index of the last true column of each row; -1 for a row without any."""
    width = is_BL.shape[1]
    columns_behind_B = is_BL[:, ::-1].argmax(1)
    return np.where(is_BL.any(1), width - 1 - columns_behind_B, -1)


def from_column(x_BL: np.ndarray, first_B: np.ndarray) -> np.ndarray:
    """Returns each row from its column `first_B` on. The columns behind its end repeat the last one."""
    width = x_BL.shape[1]
    columns_BL = np.arange(width) + first_B[:, None]
    inside_BL = np.minimum(columns_BL, width - 1)
    return np.take_along_axis(x_BL, inside_BL, axis=1)


def encode(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor | None) -> torch.Tensor:
    """Returns all that the host has to know of a batch of text as one tensor `(B, L)` of int64."""
    if labels is None:
        is_scored = torch.zeros_like(input_ids, dtype=torch.bool)
    else:
        is_scored = labels != IGNORED_LABEL
    is_scored[:, 0] = False  # no token predicts the first one, and stock leaves its label out as well
    code = input_ids.long() * 2 + is_scored
    if attention_mask is None:
        return code
    code_of_padding = -1 - is_scored.long()
    return torch.where(attention_mask.bool(), code, code_of_padding)


def decode(code_BL: np.ndarray) -> Sequences:
    """Returns the sequences that [`encode`] encoded, from its result on the host.

    Raises:
        CannotPack: a mask has holes, or a label has no token of its row before it.
    """
    if (code_BL == -2).any():
        raise CannotPack("a label is at a place at which the attention mask has no token")
    is_token = code_BL >= 0
    width = code_BL.shape[1]
    lengths_B = is_token.sum(1)
    offsets_B = np.where(lengths_B > 0, is_token.argmax(1), 0)
    ends_B = last_true(is_token) + 1  # 0 for a row without tokens
    if (ends_B - offsets_B != lengths_B).any():
        raise CannotPack("the attention mask of a row has holes")
    from_first_token_BL = code_BL
    if offsets_B.any():
        from_first_token_BL = from_column(code_BL, offsets_B)
    is_inside_BL = np.arange(width) < lengths_B[:, None]
    token_BL = from_first_token_BL // 2
    has_label_BL = from_first_token_BL % 2 == 1
    scored_BL = is_inside_BL & has_label_BL
    if scored_BL[:, 0].any():
        raise CannotPack("a row begins with a label, which no token of it predicts")
    return Sequences(
        tokens_BL=np.where(is_inside_BL, token_BL, -1),
        offsets_B=offsets_B,
        lengths_B=lengths_B,
        scored_BL=scored_BL,
        width=width,
        code_BL=code_BL,
    )


# --- the arguments of a call -----------------------------------------------------------------------------------------

# Arguments of a forward that do not change its values.
_NEUTRAL = {"use_cache", "return_dict"}
# Arguments of a model that its backbone gets and does not use. RewardTrainer passes the margin of its loss.
_NEUTRAL_IN_BACKBONE = {"logits_to_keep", "num_items_in_batch", "margin"}
# Outputs of a backbone that have no counterpart on a packed row, by the arguments that ask for them.
_FURTHER_OUTPUTS = ("output_hidden_states", "output_attentions")


@torch.compiler.disable
def from_padding(arguments: Arguments) -> torch.Tensor | None:
    """Whether the loss in a model's own forward predicts a label from padding, of which a packed row has no states.

    Returns:
        A bool without dimensions on the device; `None` if the arguments of the call have no loss, or no mask.
    """
    labels = arguments.get("labels")
    mask = arguments.get("attention_mask")
    if not isinstance(labels, torch.Tensor) or not isinstance(mask, torch.Tensor):
        return None
    if labels.shape != mask.shape:
        return None
    is_predicted = labels[:, 1:] != IGNORED_LABEL
    is_padding = ~mask[:, :-1].bool()
    return (is_predicted & is_padding).any()


@torch.compiler.disable
def batch_of(base: PreTrainedModel, call: Call) -> Batch:
    """Returns the arguments of a call as a batch.

    Args:
        base: the model, without wrappers.
        call: of the model or of its backbone.

    Raises:
        CannotPack: the meaning of an argument on a packed row is not known.
    """
    if rows_have_adapters(base):
        raise CannotPack("its rows have adapters of their own (adapter_names)")
    further = further_output(base, call.arguments) if call.of_backbone else None
    if further is not None:
        raise CannotPack(f"its caller asks for {further}")
    neutral = _NEUTRAL | _NEUTRAL_IN_BACKBONE if call.of_backbone else _NEUTRAL
    arguments = {}
    for name, x in call.arguments.items():
        if x is not None and x is not False and name not in neutral:
            arguments[name] = x
    batch = Batch(
        input_ids=arguments.pop("input_ids", None),
        attention_mask=arguments.pop("attention_mask", None),
        labels=arguments.pop("labels", None),
        num_images=call.instructions.num_images,
        num_items=arguments.pop("num_items_in_batch", None),
        router_loss=_needs_router_loss(base, arguments.pop("output_router_logits", False)),
    )
    # Of a model of text alone, types of tokens are no marks of images.
    if base.config.get_text_config() is not base.config:
        for name in (*PER_IMAGE, *PER_TOKEN):
            if name in arguments:
                batch.vision[name] = arguments.pop(name)
    unknown = sorted(name for name, x in arguments.items() if not _is_setting(base, name, x))
    if unknown:
        raise CannotPack(f"its forward takes {unknown}, whose meaning on a packed row is not known")
    reason = _misfit(batch, call.of_backbone)
    if reason is not None:
        raise CannotPack(reason)
    if call.instructions.tokens_per_pass is not None:  # a part of a batch has no router loss
        batch.router_loss = False
    return batch


def _needs_router_loss(base: PreTrainedModel, asked: object) -> bool:
    """Whether a call asks for router logits, or the config does."""
    return bool(asked or getattr(base.config.get_text_config(), "output_router_logits", False))


def _is_setting(base: PreTrainedModel, name: str, x: object) -> bool:
    """Whether an argument is a setting of the config, which some models pass to their backbone."""
    if isinstance(x, torch.Tensor) or not hasattr(base.config, name):
        return False
    return getattr(base.config, name) == x


def _misfit(batch: Batch, of_backbone: bool) -> str | None:
    """Returns which tensor of a batch is missing or has another shape than expected; `None` if all are as expected."""
    ids, mask, labels = batch.input_ids, batch.attention_mask, batch.labels
    if ids is None or ids.ndim != 2:
        return "it takes input_ids of the shape (rows, tokens)"
    if of_backbone and labels is not None:
        return "its backbone takes labels, whose meaning is not known"
    if not of_backbone and (labels is None or labels.shape != ids.shape):
        return "it takes labels of the shape of input_ids"
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
        return f"its attention mask has the shape {tuple(getattr(mask, 'shape', ()))}"
    return None


def further_output(base: PreTrainedModel, arguments: Arguments) -> str | None:
    """Returns what a call of a backbone asks for next to last hidden states and router logits; `None` for nothing.

    Args:
        base: the model, without wrappers.
        arguments: of the call.
    """
    config = base.config

    def chosen(name: str, default: bool) -> bool:
        """Returns an argument of the call; the config's setting if it is absent."""
        value = arguments.get(name)
        if value is None:
            value = getattr(config, name, default)
        return value

    for name in _FURTHER_OUTPUTS:
        if chosen(name, default=False):
            return name
    if chosen("return_dict", default=True) is False:
        return "return_dict=False"
    use_cache = arguments.get("use_cache")
    if use_cache is None and not (torch.is_grad_enabled() and base.training):
        # A step of training does not decode, so it needs no cache, which models return by default.
        text = config.get_text_config(decoder=True)
        use_cache = getattr(config, "use_cache", getattr(text, "use_cache", True))
        if use_cache is not False:
            return "a cache, by default (config.use_cache=False avoids that)"
    return "use_cache=True" if use_cache else None
