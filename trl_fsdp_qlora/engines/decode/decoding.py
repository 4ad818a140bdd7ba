"""A decoding loop for `generate(custom_generate=...)`: a prompt is prefilled once, and finished rows leave the batch.

Transformers runs a repeated prompt, and the vision tower on its images, once for every row. It also runs every row
until the longest one ends. Here `generate` gets each distinct prompt once:

- A beginning that all prompts share is prefilled once ([`prefill`], [`common_beginning`]).
- The cache of a prompt is repeated for its rows.
- A later turn of an episode runs only its new tokens ([`turns`]).
- A row's token is drawn with one random number, which depends on the seed, the row and the step ([`draw`]).

Transformers still prepares everything around the loop. [`why_stock`] returns the reason if its own loop has to run.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from ...compat.fake_tensors import is_fake, real_tensors
from ...compat.peft import looks_beyond_tokens
from ...compat.transformers import CACHE, CACHE_NAMES
from ...compat.transformers_generation import (
    MISFIT,
    effective_config,
    foreign_generation,
    next_inputs,
    pad_token,
    prepares_inputs_itself,
    synced_by_default,
    takes_dynamic_cache,
    tuned_for_decoding,
    unfinished,
)
from ...compat.trl import images_by_row, rows_of_images
from ...prefix_sharing.batch import PER_IMAGE, PER_TOKEN
from ...prefix_sharing.facts import has_unknown_states, position_limit
from ...prefix_sharing.packed_model import images_of
from ...scoring.cpu_linear import fast_linears
from ...scoring.transfer import widest_float
from .cache import take_rows, unrepeatable
from .lora_products import joined_products
from .prefill import OF_IMAGES, Prefill, padding_of, rows_of
from .turns import KeptRow, KeptTurns, States, layer_states

if TYPE_CHECKING:
    from ...compat.trl import Vision

# Processors and criteria that treat each row by itself, so rows may leave the batch. Repetition penalties may hold one
# number per row; it is dropped together with the row.
_BY_ROW = {
    "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
    "TypicalLogitsWarper", "EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria",
}  # fmt: skip
# Finished rows are dropped once they are this share of the batch: dropping copies the cache of the others.
_DROP_SHARE = 1 / 16


def why_stock(model: nn.Module, config: GenerationConfig, vision: "Vision | None" = None) -> str | None:
    """Why transformers' own loop has to generate completions of an unwrapped `model`; `None` if ours is exact.

    `config` is the argument of `generate`. For `vision`, of a batch with images, see
    [`trl_fsdp_qlora.engines.decode.completions.complete`].
    """
    if MISFIT is not None:
        return MISFIT
    reason = looks_beyond_tokens(model)
    if reason is not None:
        return reason
    unwrapped = model
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} is not a PreTrainedModel"
    method = foreign_generation(unwrapped) or foreign_generation(model)
    if method is not None:
        return f"{method} is not transformers' own"
    if model.config.is_encoder_decoder:
        return "it has an encoder"
    config = effective_config(model, config)
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        return f"generation_config asks for {mode.value.replace('_', ' ')}"
    if config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation={config.cache_implementation!r}"
    for name, value in {"num_return_sequences": 1, "use_cache": True, "return_dict_in_generate": False}.items():
        if vars(config)[name] != value:
            return f"{name}={vars(config)[name]}"
    if config.stop_strings is not None:
        return "stop_strings need the tokenizer, which TRL does not pass"
    if has_unknown_states(model):
        return f"{type(model).__name__} has recurrent layers of a kind that is not known"
    if not takes_dynamic_cache(model):
        return f"{type(model).__name__} keeps no cache, or one of its own"
    reason = unrepeatable(model.config.get_text_config(decoder=True))
    if reason is None and vision:
        reason = _why_stock_with_images(model, vision)
    return reason


def _why_stock_with_images(model: PreTrainedModel, vision: "Vision") -> str | None:
    """[`why_stock`] for a batch with images: here only the prefill gets them, and each distinct prompt its own."""
    unknown = sorted(vision.keys() - {*PER_IMAGE, *PER_TOKEN, "num_images"})
    if unknown:
        return f"images come with {', '.join(unknown)}"
    counts = vision.get("num_images")
    if counts is None or "pixel_values" not in vision or len(images_by_row(vision)["pixel_values"]) != len(counts):
        return "the prompt of each image's pixels is not known"
    return None if position_limit(model) == float("inf") else "rotary tables that depend on the longest row"


@dataclass
class DecodingWork:
    """Counts of the work of one or more calls, and of `generate`'s own work for the same completions."""

    prefill_tokens: int = 0  # positions of the prefill, padding included
    row_steps: int = 0  # rows of all decoding forwards
    prefill_tokens_stock: int = 0
    row_steps_stock: int = 0

    def __add__(self, other: "DecodingWork") -> "DecodingWork":
        return DecodingWork(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class Decoding:
    """The decoding loop of one `generate` call, for its argument `custom_generate`.

    Args:
        synced_gpus: a forward is collective: this rank continues as long as any rank does. If `None`, transformers'
            own rule decides.
        turns: caches that rows keep from one turn of an episode to the next.
    """

    def __init__(self, synced_gpus: bool | None = None, turns: KeptTurns | None = None):
        self.synced_gpus = synced_gpus
        self.work = DecodingWork()
        self.turns = turns
        self.prompt_R: torch.Tensor | None = None  # the prompt of each row; one row per prompt if `None`
        self.has_images = False
        self._pixels: dict[str, torch.Tensor] = {}  # arguments of the prefill that `generate` did not get
        self._pixels_of_one_prompt: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs,
    ) -> torch.Tensor:
        """Token ids `(R, P + C)` of prompts and completions; finished rows are padded, as `_sample` returns them."""
        synced_gpus = synced_by_default(model) if self.synced_gpus is None else self.synced_gpus
        prompt_R = torch.arange(len(input_ids), device=input_ids.device) if self.prompt_R is None else self.prompt_R
        batch = DecodedRows(input_ids, prompt_R, generation_config, logits_processor, stopping_criteria, model_kwargs)
        # Some rotary tables depend on the longest row. It may have ended, so no row may be dropped then.
        batch.drops = batch.drops and batch.longest <= position_limit(model)
        keeps = self.turns is not None and not self.turns.is_last and not self.has_images
        with fast_linears(model), joined_products(model):
            with self._tower_on_every_rank(model, input_ids.device, synced_gpus):
                outputs = self.prefill(model, input_ids, prompt_R, batch, generation_config, synced_gpus)
            with tuned_for_decoding(model):
                while unfinished(model, batch.left == 0, synced_gpus, input_ids.device):
                    if outputs is None:
                        outputs = batch.forward(model)
                        self.work.row_steps += len(batch.ids_AL)
                        self.work.row_steps_stock += len(prompt_R)
                    batch.kwargs = next_inputs(model, outputs, batch.kwargs)
                    logits_AV = outputs.logits[:, -1]
                    outputs = None
                    if batch.left:
                        batch.append(logits_AV)
                        if keeps:
                            # Before the next forward: it would run these rows' padding through their states.
                            for row in batch.ended_rows():
                                self.turns.add(row)
                        batch.drop_finished(synced_gpus)
        return torch.cat([input_ids[prompt_R], torch.stack(batch.columns, 1)], 1)

    def with_images(self, batch: "Vision", chunked: bool) -> "Vision":
        """`generate`'s arguments for prompts with images.

        `generate` runs the vision tower before it calls this loop. In two cases the pixels therefore stay here, and
        `generate` only gets what positions are computed from: in a later turn, and if a forward may be collective,
        because other ranks may have no images.
        """
        if "pixel_values" not in batch:
            return batch
        self.has_images = True
        if chunked:
            self.turns = None  # transformers takes pixels in chunks from `generate` alone
        is_later_turn = self.turns is not None and self.turns.number > 0
        if chunked or (self.synced_gpus is False and not is_later_turn):
            return batch
        counts = batch["num_images"]
        self._pixels = {name: x for name, x in batch.items() if name in PER_IMAGE}
        with_an_image = next(row for row, count in enumerate(counts) if count)
        of_one_prompt = rows_of_images({**self._pixels, "num_images": counts}, [with_an_image])
        del of_one_prompt["num_images"]
        self._pixels_of_one_prompt = of_one_prompt
        needed = batch.keys() - self._pixels.keys() | {"image_grid_thw"}  # positions are computed from the grid
        return {name: x for name, x in batch.items() if name in needed}

    def prefill(
        self,
        model: PreTrainedModel,
        ids_UP: torch.Tensor,
        prompt_R: torch.Tensor,
        batch: "DecodedRows",
        config: GenerationConfig,
        synced_gpus: bool,
    ) -> ModelOutput:
        """Outputs as of a prefill of every row, from one of each prompt; the cache in `batch` serves every row."""
        prompts = Prefill(
            model, ids_UP, batch.kwargs, batch.cache_name, config, synced_gpus=synced_gpus, pixels=self._pixels
        )
        parts = prompts.parts(self.turns, self.has_images)
        outputs = prompts.run(parts)
        self.work.prefill_tokens += prompts.tokens
        self.work.prefill_tokens_stock += batch.ids_AL.numel()
        take_rows(outputs[batch.cache_name], prompt_R, batch.longest)
        outputs.logits = outputs.logits[prompt_R]
        batch.kwargs = {
            name: rows_of(name, value, prompt_R) for name, value in batch.kwargs.items() if name not in OF_IMAGES
        }
        # The last positions are enough for the next step, unless a model drops its cache and needs all of them again.
        if batch.kwargs.get("position_ids") is not None and not prepares_inputs_itself(model):
            batch.kwargs["position_ids"] = batch.kwargs["position_ids"][..., -1:]
        return outputs

    @contextmanager
    def _tower_on_every_rank(self, model: PreTrainedModel, device: torch.device, synced_gpus: bool) -> Iterator[None]:
        """Inside the block a rank without new images runs a sharded vision tower, too, on images of another rank.

        Its weights are gathered by all ranks at once. Prompts may have images on some ranks only, and so may the
        results of tools.
        """
        if not synced_gpus:
            yield
            return
        tower = images_of(model)
        if tower.reason is None:
            tower.share_images(lambda: self._pixels_of_one_prompt, device)
        with tower.in_every_forward():
            yield


def distinct_rows(keys_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each distinct row's first occurrence `(U,)`, ascending, and for each row `(R,)` the entry equal to it.

    The latter is `prompt_R` of [`Decoding`].
    """
    rows = len(keys_RN)
    distinct, prompt_R = torch.unique(keys_RN, dim=0, return_inverse=True)
    rows_R = torch.arange(rows, device=keys_RN.device)
    beyond_U = rows_R.new_full((len(distinct),), rows)
    first_U = beyond_U.scatter_reduce(0, prompt_R, rows_R, "amin")
    first_U, order_U = first_U.sort()
    place_U = order_U.argsort()
    return first_U, place_U[prompt_R]


class DecodedRows:
    """The rows still in the batch (A of R), the state of each row, and the completions of all rows.

    Attributes:
        ids_AL: prompts and generated tokens of the rows still in the batch.
        columns: the tokens of all R rows, step by step.
        kwargs: arguments of the model's next forward, including the cache.
        left: number of rows that have not ended.
        drops: whether rows that have ended leave the batch.
        longest: maximum length of a row, prompt included.
    """

    def __init__(
        self,
        ids_UP: torch.Tensor,
        prompt_R: torch.Tensor,
        config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        kwargs: dict[str, object],
    ):
        self.ids_AL = ids_UP[prompt_R]
        self.kwargs = kwargs
        self.cache_name = next((name for name in CACHE_NAMES if name in kwargs), CACHE)
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self._select_in_processors(prompt_R)
        self._padding_R = padding_of(ids_UP, kwargs)[prompt_R]
        self._rows = len(prompt_R)
        self.left = self._rows
        self._newly_ended = 0
        longest = stopping_criteria.max_length
        self.longest = sys.maxsize if longest is None else longest
        self._rows_A = torch.arange(self.left, device=ids_UP.device)
        self._open_A = torch.ones_like(self._rows_A, dtype=torch.bool)
        self._uniforms = RowUniforms(self.left, ids_UP.device) if config.do_sample else None
        self.columns: list[torch.Tensor] = []
        # Without an end-of-sequence token `generate` continues finished rows as they are.
        pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._pad = pad_token(config).to(ids_UP.device) if pads else None
        names = {type(item).__name__ for item in (*logits_processor, *stopping_criteria)}
        self.drops = pads and names <= _BY_ROW

    def forward(self, model: PreTrainedModel) -> ModelOutput:
        """The model's outputs for the last token of every row."""
        inputs = model.prepare_inputs_for_generation(self.ids_AL, next_sequence_length=1, **self.kwargs)
        return model(**inputs, return_dict=True)

    def append(self, logits_AV: torch.Tensor) -> None:
        """Pick every row's next token.

        Raises:
            RuntimeError: NaN or infinite probabilities, with the message of `torch.multinomial`.
        """
        logits_AV = logits_AV.to(self.ids_AL.device)
        if self.logits_processor:
            logits_AV = logits_AV.to(copy=True, dtype=torch.float32)
            logits_AV = self.logits_processor(self.ids_AL, logits_AV)
        if self._uniforms is None:
            next_A = logits_AV.argmax(-1)
        else:
            probs_AV = torch.softmax(logits_AV, -1, dtype=torch.float32)
            uniform_A = self._uniforms.next(self._rows_A)
            next_A = draw(probs_AV, uniform_A)
        if self._pad is not None and self.left < len(next_A):
            next_A = next_A.where(self._open_A, self._pad)
        if len(self._rows_A) == self._rows:
            self.columns.append(next_A)
        else:
            padding_R = self._pad.repeat(self._rows)
            self.columns.append(padding_R.index_copy(0, self._rows_A, next_A))
        self.ids_AL = torch.cat([self.ids_AL, next_A[:, None]], 1)
        was_open_A = self._open_A
        was_left = self.left
        ends_A = self.stopping_criteria(self.ids_AL, None)
        self._open_A = was_open_A & ~ends_A
        self._ended_A = was_open_A & ends_A
        # Both numbers in one transfer, so that the host waits for the device once.
        is_broken_A = next_A < 0
        counts = torch.stack([self._open_A.sum(), is_broken_A.sum()])
        if is_fake(counts):  # of a plan, in which every row is as long as it may be
            return
        self.left, broken = counts.tolist()
        self._newly_ended = was_left - self.left
        if broken:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def ended_rows(self) -> Iterator[KeptRow]:
        """Tokens and caches of the rows that ended with the last token.

        The last token itself is not included, because the model has not run on it.
        """
        if not self._newly_ended:
            return
        ended = self._ended_A.nonzero()[:, 0]
        padding = self._padding_R[self._rows_A[ended]].tolist()
        for row, padding_of_row in zip(ended.tolist(), padding, strict=True):
            length = self.ids_AL.shape[1] - 1 - padding_of_row
            ids = self.ids_AL[row, -1 - length : -1].tolist()
            yield KeptRow(ids, self._states_of(row, length))

    def _states_of(self, row: int, length: int) -> list[States]:
        """Copies of each layer's tensors for the `length` tokens of a row of A, without padding."""
        layers = []
        for layer in self.kwargs[self.cache_name].layers:
            states = {}
            for name, state in layer_states(layer).items():
                of_row = state[row]
                if name in ("keys", "values"):
                    # Padding is before the row. A sliding layer may have fewer columns than `length`.
                    of_row = of_row[:, -length:]
                states[name] = of_row.clone()
            layers.append(states)
        return layers

    def drop_finished(self, synced_gpus: bool) -> None:
        """Drop finished rows and their part of the cache, once there are enough of them to be worth the copy."""
        count = len(self._rows_A)
        finished = count - self.left
        least = max(1, _DROP_SHARE * count)
        is_over = not self.left and not synced_gpus
        if not self.drops or finished < least or is_over:
            return
        # If this rank has finished but other ranks need its forwards, one row stays.
        remaining = self._open_A.nonzero()[:, 0] if self.left else self._rows_A.new_zeros(1)
        self.ids_AL = self.ids_AL[remaining]
        self._rows_A = self._rows_A[remaining]
        self._open_A = self._open_A[remaining]
        take_rows(self.kwargs[self.cache_name], remaining)
        self.kwargs = {name: rows_of(name, value, remaining) for name, value in self.kwargs.items()}
        self._select_in_processors(remaining)

    def _select_in_processors(self, rows: torch.Tensor) -> None:
        for processor in self.logits_processor:
            if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
                processor.prompt_ignore_length = processor.prompt_ignore_length[rows]


# --- sampling --------------------------------------------------------------------------------------------------------
#
# One uniform number per row and step gives the same distribution as `torch.multinomial`. That function draws one for
# every entry of the vocabulary (5% of the CPU time of SmolLM2-135M, 16 rows x 24 tokens). Here a row's draw depends
# only on the seed, the row and the step, not on which other rows are still being generated.

_BLOCK = 128  # steps for which uniform numbers are drawn at once
_WIDTH = 256  # entries of a block of the vocabulary in the two-level search


class RowUniforms:
    """Uniform numbers in [0, 1) for row r and step t of a batch of `rows`, a function of the seed, r and t alone.

    The numbers are drawn on the CPU, so that every device gets the same. Without `seed`, one draw from the global
    state gives the seed.
    """

    def __init__(self, rows: int, device: torch.device, seed: int | None = None):
        if seed is None:
            with real_tensors():  # of a plan, which is made on fake ones
                seed = torch.randint(2**63 - 1, ()).item()
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = rows
        self._device = device
        self._step = 0

    def next(self, rows_A: torch.Tensor) -> torch.Tensor:
        """The next step's numbers `(A,)`, in [`widest_float`], for the rows `rows_A`, indices into the whole batch."""
        if self._step % _BLOCK == 0:
            block = torch.rand(_BLOCK, self._rows, dtype=torch.float64, generator=self._generator)
            self._block = block.to(widest_float(self._device)).to(self._device)
        self._step += 1
        return self._block[(self._step - 1) % _BLOCK, rows_A]


def draw(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The token at which each row's distribution function passes `uniform_B`; never a token of probability zero.

    The search has two levels: the sums of blocks of the vocabulary choose a block, and then a token inside the block
    is chosen. So the distribution function is accumulated in [`widest_float`] without a copy of `probs_BV` in that
    dtype. `probs_BV` are float32 and need not sum to one; a row with NaN or infinite weights gets -1.
    """
    size = probs_BV.shape[1]
    device = probs_BV.device
    dtype = widest_float(device)
    if size <= _WIDTH:
        weight_BV = probs_BV.to(dtype)
        token_B, _ = _invert(weight_BV, uniform_B)
        return token_B.where(weight_BV.sum(1).isfinite(), -1)
    whole = size - size % _WIDTH
    blocks_BNW = probs_BV[:, :whole].unflatten(1, (-1, _WIDTH))
    blocks_BN = blocks_BNW.sum(-1, dtype=dtype)
    if whole < size:
        last_B1 = probs_BV[:, whole:].sum(-1, keepdim=True, dtype=dtype)
        blocks_BN = torch.cat([blocks_BN, last_B1], 1)
    block_B, left_B = _invert(blocks_BN, uniform_B)
    first_B = block_B * _WIDTH
    token_BW = first_B[:, None] + torch.arange(_WIDTH, device=device)
    is_token_BW = token_BW < size  # the last block may be short
    weight_BW = probs_BV.gather(1, token_BW.clamp_max(size - 1))
    weight_BW = weight_BW.to(dtype) * is_token_BW
    inside_B, _ = _invert(weight_BW, left_B)
    token_B = first_B + inside_B
    return token_B.where(blocks_BN.sum(1).isfinite(), -1)


def _invert(weights_BN: torch.Tensor, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index at which the cumulated weights pass `uniform_B` of their total, and how far into that weight (0 to 1)."""
    last = weights_BN.shape[1] - 1
    upto_BN = weights_BN.cumsum(1)
    total_B1 = upto_BN[:, -1:]
    target_B1 = uniform_B[:, None] * total_B1
    index_B = (upto_BN <= target_B1).sum(1)
    # Rounding may lift the target to the total. The index is then the last one of positive weight.
    last_positive_B = (upto_BN < total_B1).sum(1)
    index_B = torch.minimum(index_B, last_positive_B).clamp_max(last)
    index_B1 = index_B[:, None]
    weight_B1 = weights_BN.gather(1, index_B1)
    before_B1 = upto_BN.gather(1, index_B1) - weight_B1
    into_B1 = (target_B1 - before_B1) / weight_B1
    return index_B, into_B1[:, 0].clamp(0, 1)
