"""A decoding loop for `generate(custom_generate=...)`: a prompt is prefilled once, and finished rows leave the batch.

Transformers runs a prompt, and a vision tower on its images, as often as it is repeated, and every row until the longest one
ends. Here `generate` is given each distinct prompt once, and decoding attends to it once for all its rows
([`shared_prompts`]); where that is not exact the cache is repeated. A row that has ended is dropped, with its part of the
cache. The library still prepares everything around the loop: processors, stopping criteria, masks, positions, the cache.
"""

import sys
from dataclasses import dataclass, fields

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from ..compat.generation import (
    next_inputs,
    pad_token,
    prefill,
    prepares_inputs_itself,
    synced_by_default,
    tuned_for_decoding,
    unfinished,
)
from ..prefix_sharing.images import PER_IMAGE
from ..prefix_sharing.support import position_limit
from ..scoring.cpu_linear import fast_linears
from .cache import repeat_rows, take_rows
from .draws import RowUniforms, draw
from .shared_prompts import PrefillWatch, SharedPrompts, watched_attention

# What treats each row by itself, so that it does not matter which others are still there. Repetition penalties may hold
# one number per row, which is dropped with it.
_BY_ROW = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.MinPLogitsWarper,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
)
# Finished rows are dropped once they are this share of the batch: dropping copies the cache of the others.
_DROP_SHARE = 1 / 16


@dataclass
class DecodingWork:
    """What one or more calls ran, and what `generate` alone would have run for the same completions.

    Attributes:
        prefill_tokens: positions of the prefill, padding included.
        row_steps: rows of all decoding forwards.
    """

    prefill_tokens: int = 0
    row_steps: int = 0
    prefill_tokens_stock: int = 0
    row_steps_stock: int = 0

    def __add__(self, other: "DecodingWork") -> "DecodingWork":
        return DecodingWork(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(DecodingWork)))


class Decoding:
    """The decoding loop of one `generate` call, to be given as `custom_generate`.

    Args:
        synced: a forward is collective: this rank goes on as long as any. By transformers' own rule if `None`.

    Attributes:
        place_R: which of the prompts that `generate` is given each row has; a row for each if `None`.
        work: what was run.
        per_row: why the last call attended to prompts in each row; `None` where it did so once per prompt.
        found: whether that reason was seen in the prefill only, and nobody could have said it before.
    """

    def __init__(self, synced: bool | None = None):
        self.synced = synced
        self.place_R: torch.Tensor | None = None
        self.work = DecodingWork()
        self.per_row: str | None = None
        self.found = False

    @torch.no_grad()
    def __call__(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs,
    ) -> torch.Tensor:
        """Token ids `(R, P + C)`: prompts and completions, finished rows filled up with padding, as `_sample` gives."""
        synced = synced_by_default(model) if self.synced is None else self.synced
        place_R = torch.arange(len(input_ids), device=input_ids.device) if self.place_R is None else self.place_R
        batch = _Batch(input_ids, place_R, generation_config, logits_processor, stopping_criteria, model_kwargs)
        # Rotary tables that follow the longest row are those of rows that have ended, too.
        batch.drops = batch.drops and batch.longest <= position_limit(model)
        with fast_linears(model, decoding=True), watched_attention(model) as self.per_row:
            outputs = self._prefill(model, input_ids, place_R, batch, generation_config)
            with tuned_for_decoding(model):
                while unfinished(model, batch.left == 0, synced, input_ids.device):
                    if outputs is None:
                        outputs = model(**batch.inputs(model), return_dict=True)
                        self.work.row_steps += len(batch.ids_AL)
                        self.work.row_steps_stock += len(place_R)
                    if batch.shared is None:
                        batch.kwargs = next_inputs(model, outputs, batch.kwargs)
                    logits_AV, outputs = outputs.logits[:, -1], None
                    if batch.left:
                        batch.append(logits_AV)
                        batch.drop_finished(synced)
        return torch.cat([input_ids[place_R], batch.completions()], 1)

    def _prefill(self, model, ids_UP, place_R: torch.Tensor, batch: "_Batch", config: GenerationConfig):
        """Outputs as of a prefill of every row, from one of each prompt; the cache in `batch` serves every row."""
        once = batch.kwargs
        known = self.per_row
        watch = PrefillWatch(once.get("past_key_values"), once) if known is None else None
        seen = {} if watch is None else {"shared_prompts": watch}
        outputs = prefill(model, ids_UP, config, {**once, **seen})
        self.per_row = known if watch is None else watch.why_not()
        self.found = self.per_row != known
        if self.per_row is None:
            batch.shared = SharedPrompts(outputs.past_key_values, place_R, once, batch.longest)
        else:
            repeat_rows(outputs[batch.cache_name], place_R, batch.longest)
        outputs.logits = outputs.logits[:, -1:][place_R]
        self.work.prefill_tokens += ids_UP.numel()
        self.work.prefill_tokens_stock += batch.ids_AL.numel()
        kwargs = batch.kwargs = {
            name: _rows(name, value, place_R)
            for name, value in once.items()
            if name not in (*PER_IMAGE, "mm_encoder_outputs")
        }
        # The next positions follow from the last; but a model may throw its cache away and want all of them again.
        if kwargs.get("position_ids") is not None and not prepares_inputs_itself(model):
            kwargs["position_ids"] = kwargs["position_ids"][..., -1:]
        return outputs


def distinct_rows(keys_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of every kind of row `(U,)`, in their order, and which of these each row is: a [`Decoding`]'s `place_R`."""
    distinct, place_R = torch.unique(keys_RN, dim=0, return_inverse=True)
    rows_R = torch.arange(len(keys_RN), device=keys_RN.device)
    first_U = rows_R.new_full((len(distinct),), len(keys_RN)).scatter_reduce(0, place_R, rows_R, "amin")
    first_U, order_U = first_U.sort()
    return first_U, order_U.argsort()[place_R]


class _Batch:
    """The rows still being generated (A of R), the completions of all, and what belongs to a row.

    Attributes:
        ids_AL: prompts and what was generated of the rows still in the batch.
        kwargs: of the model's next forward; the cache among them.
        shared: the cache where prompts are attended to once; its own arguments then take the place of `kwargs`.
        left: rows that have not ended.
        longest: length of a row at which it ends, prompt included.
        drops: rows that have ended leave.
    """

    def __init__(self, ids_UP, place_R, config: GenerationConfig, logits_processor, stopping_criteria, kwargs: dict):
        self.ids_AL, self.kwargs = ids_UP[place_R], kwargs
        self.cache_name = "cache_params" if "cache_params" in kwargs else "past_key_values"
        self.shared: SharedPrompts | None = None
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        self._select_in_processors(place_R)
        self.left = self._rows = len(place_R)
        self.longest = sys.maxsize if stopping_criteria.max_length is None else stopping_criteria.max_length
        self._rows_A = torch.arange(self.left, device=ids_UP.device)
        self._open_A = torch.ones_like(self._rows_A, dtype=torch.bool)
        self._uniforms = RowUniforms(self.left, ids_UP.device) if config.do_sample else None
        self._columns: list[torch.Tensor] = []
        # Without an end-of-sequence token `generate` lets finished rows go on as they are.
        pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._pad = pad_token(config).to(ids_UP.device) if pads else None
        self.drops = pads and all(type(item) in _BY_ROW for item in (*logits_processor, *stopping_criteria))

    def inputs(self, model) -> dict:
        """Arguments of the forward for the next tokens."""
        if self.shared is not None:
            return self.shared.next_inputs(self.ids_AL[:, -1])
        return model.prepare_inputs_for_generation(self.ids_AL, next_sequence_length=1, **self.kwargs)

    def append(self, logits_AV: torch.Tensor) -> None:
        """Pick every row's next token.

        Raises:
            RuntimeError: NaN or infinite probabilities, in the words of `torch.multinomial`.
        """
        next_A = self._pick(logits_AV)
        if self._pad is not None and self.left < len(next_A):
            next_A = next_A.where(self._open_A, self._pad)
        if len(self._rows_A) == self._rows:
            self._columns.append(next_A)
        else:
            self._columns.append(self._pad.repeat(self._rows).index_copy(0, self._rows_A, next_A))
        self.ids_AL = torch.cat([self.ids_AL, next_A[:, None]], 1)
        self._open_A = self._open_A & ~self.stopping_criteria(self.ids_AL, None)
        self.left, broken = torch.stack([self._open_A.sum(), (next_A < 0).sum()]).tolist()
        if broken:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def _pick(self, logits_AV: torch.Tensor) -> torch.Tensor:
        logits_AV = logits_AV.to(self.ids_AL.device)
        if self.logits_processor:
            logits_AV = self.logits_processor(self.ids_AL, logits_AV.to(copy=True, dtype=torch.float32))
        if self._uniforms is None:
            return logits_AV.argmax(-1)
        return draw(torch.softmax(logits_AV, -1, dtype=torch.float32), self._uniforms.next(self._rows_A))

    def drop_finished(self, synced: bool) -> None:
        """Let finished rows leave, with their part of the cache, once they are enough to be worth the copy."""
        finished = len(self._rows_A) - self.left
        if not self.drops or finished < max(1, _DROP_SHARE * len(self._rows_A)) or not (self.left or synced):
            return
        # One row stays where other ranks need the forwards of this one, which has finished.
        kept = self._open_A.nonzero()[:, 0] if self.left else self._rows_A.new_zeros(1)
        self.ids_AL, self._rows_A, self._open_A = self.ids_AL[kept], self._rows_A[kept], self._open_A[kept]
        if self.shared is not None:
            self.shared.select(kept)
        else:
            take_rows(self.kwargs[self.cache_name], kept)
            self.kwargs = {name: _rows(name, value, kept) for name, value in self.kwargs.items()}
        self._select_in_processors(kept)

    def _select_in_processors(self, rows: torch.Tensor) -> None:
        for processor in self.logits_processor:
            if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
                processor.prompt_ignore_length = processor.prompt_ignore_length[rows]

    def completions(self) -> torch.Tensor:
        """Completions of all rows, `(R, C)`."""
        return torch.stack(self._columns, 1)


def _rows(name: str, value, rows: torch.Tensor):
    """The given rows of a tensor among the model's arguments; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    # Classes that take images have positions on several axes, `(axes, rows, tokens)`.
    return value[:, rows] if name == "position_ids" and value.ndim == 3 else value[rows]
