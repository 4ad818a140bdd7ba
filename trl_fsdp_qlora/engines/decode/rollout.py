"""`Rollout`: draws training's completions, and prepares the model by which accuracy and stage 1 generate."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from transformers import GenerationConfig

from ...compat.trl_rollouts import Turn, unwrapped_for_generation
from ...errors import UserError
from ...fsdp2_qlora.generation import FREE_SHARE, free_bytes, gathered_as, is_gathered
from ...prefix_sharing.batch import PER_TOKEN
from ...scoring.cpu_linear import beats_mkl
from .completions import CompletionOptions, complete, vision_tensors
from .decoding import DecodingWork, why_stock
from .turns import KeptTurns, why_not_kept

if TYPE_CHECKING:
    from trl import GRPOConfig
    from trl.distributed import DistributedBackend

    from ...compat.trl import Vision

logger = get_logger(__name__)


class GenerateSettings(NamedTuple):
    """A trainer's settings for transformers' `generate`; a completion is cut after the first of `eos_token_ids`."""

    config: GenerationConfig
    overrides: dict[str, object]  # take precedence over the model's own generation config
    eos_token_ids: list[int]


class Rollout:
    """Draws completions from a model in any wrapper; `backend` is TRL's `DistributedBackend`."""

    def __init__(self, args: "GRPOConfig", accelerator: Accelerator, backend: "DistributedBackend"):
        self.args = args
        self.accelerator = accelerator
        self.backend = backend
        self._work = DecodingWork()
        self._turns: KeptTurns | None = None

    @contextmanager
    def episodes(self, turns: int) -> Iterator[None]:
        """Context in which rows keep their caches from one turn to the next; all caches are freed at its end.

        `turns`: how many turns may follow the first.
        """
        limit = FREE_SHARE * free_bytes(self.accelerator.device)
        self._turns = KeptTurns(limit, turns)
        try:
            yield
        finally:
            self._turns = None

    @property
    def is_sharded(self) -> bool:
        """Whether a forward is a collective operation, and possible only after `Trainer.train` prepared the model."""
        return self.accelerator.num_processes > 1 and (self.backend.is_fsdp or self.backend.is_zero3)

    def training_turn(
        self, stock: Callable, turn: Turn, wrapped: nn.Module, settings: GenerateSettings | None
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Completions of a generation batch, one per prompt row, and their log-probabilities if vLLM drew them.

        Args:
            stock, turn: `GRPOTrainer._generate_single_turn` and its arguments.
            wrapped: the policy as it was prepared.
            settings: settings of transformers' `generate`; `None` if another engine generates.

        Raises:
            UserError: the first prompt has no tokens. TRL pads a batch in the first row's dtype, which is then float.
        """
        if turn.prompt_ids and not len(turn.prompt_ids[0]):
            raise UserError(
                "a prompt of this batch has no tokens, and TRL cannot draw behind it; leave such rows out: "
                "dataset.filter(lambda row: row['prompt'])"
            )
        if self.args.use_transformers_continuous_batching and not self.args.use_vllm:
            with restore_weights(self.accelerator.unwrap_model(wrapped)):
                return stock(**turn._asdict())
        turns = None if settings is None else self._turns
        if turns is not None and turns.number > 0:
            self._any_rank_continues(True)
        try:
            return self._turn(stock, turn, wrapped, settings, turns)
        finally:
            if turns is not None:
                turns.number += 1

    def _turn(
        self,
        stock: Callable,
        turn: Turn,
        wrapped: nn.Module,
        settings: GenerateSettings | None,
        turns: KeptTurns | None,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """A turn by our loop if it is exact, else by `stock`; see [`training_turn`]."""
        if settings is None or self.why_stock(wrapped, settings) is not None:
            return stock(**turn._asdict())
        vision = _vision_of(turn)
        reason = self._why_stock_with_images(turn, wrapped, settings, vision)
        if reason is not None:
            logger.warning_once(reason)
            if turn.has_tool_images and turns is not None:
                turns.clear()  # the next turn's prompts have images that the kept rows lack
            return stock(**turn._asdict())
        if vision and turns is not None and turns.number > 0:
            logger.warning_once("rollouts: turns of a batch with images are prefilled whole, as in stock TRL")
        with self.generating(wrapped, settings.overrides) as (model, synced_gpus):
            completions, work = complete(
                model,
                turn.prompt_ids,
                settings.config,
                CompletionOptions(ends=settings.eos_token_ids, synced_gpus=synced_gpus, vision=vision, turns=turns),
            )
        self._work += work or DecodingWork()
        return completions, None

    def _why_stock_with_images(
        self, turn: Turn, wrapped: nn.Module, settings: GenerateSettings, vision: "Vision"
    ) -> str | None:
        """A line on why TRL itself draws a turn with images; `None` if it has none, or if they are known."""
        if turn.has_tool_images and not any(name in PER_TOKEN for name in turn.multimodal_fields):
            return (
                "rollouts: turns behind a tool's image are prefilled whole, as in stock TRL, which knows no "
                "placeholder token of this model's images"
            )
        if not vision:
            return None
        reason = self.why_stock(wrapped, settings, vision)
        return None if reason is None else f"decoding: a batch with images generates as in stock TRL ({reason})"

    def join_turns(
        self, stock: Callable, prompt: list[int], wrapped: nn.Module, settings: GenerateSettings | None
    ) -> None:
        """Take part in the further turns of other ranks, if a forward is collective and this rank's episodes are over.

        Args:
            stock: for a generation config, TRL's `_generate_single_turn` that draws by it.
            wrapped, settings: see `training_turn`.
            prompt: tokens of any prompt of this rank.
        """
        if settings is None or self._turns is None:
            return
        # This rank's token is not used; the decoding loop continues as long as any rank's loop does.
        turn = Turn([prompt[-1:]], None, {}, num_generations=1)
        config = copy.copy(settings.config)
        config.max_new_tokens = 1
        while self._any_rank_continues(False):
            self._turn(stock(config), turn, wrapped, settings._replace(config=config), self._turns)
            self._turns.clear()
            self._turns.number += 1

    def _any_rank_continues(self, this_one: bool) -> bool:
        """Whether any rank generates another turn.

        Collective if a forward is collective: every rank then has to generate equally often.
        """
        if not self.is_sharded:
            return this_one
        count = torch.tensor(int(this_one), device=self.accelerator.device)
        return bool(self.accelerator.reduce(count, reduction="sum"))

    def why_stock(self, wrapped: nn.Module, settings: GenerateSettings, vision: dict | None = None) -> str | None:
        """Why training's completions come from transformers' own decoding loop; `None` if they do not."""
        if not self.args.compact_generation:
            return "compact_generation=False"
        return why_stock(self.accelerator.unwrap_model(wrapped), settings.config, vision)

    def features(
        self, wrapped: nn.Module, settings: GenerateSettings | None, tools: bool = False
    ) -> list[tuple[str, str]]:
        """Headings and lines of the start-up block on transformers' `generate`; `tools`: whether the run has tools."""
        if settings is None and self.args.use_vllm:
            return []
        if settings is None:
            is_batching = self.args.use_transformers_continuous_batching
            engine = "transformers' continuous batching" if is_batching else "not by TRL's own _generate_single_turn"
            return [("as stock TRL", f"rollouts: {engine}")]
        reason = self.why_stock(wrapped, settings)
        if reason is not None:
            heading = "as stock TRL" if self.args.compact_generation else "off"
            return [(heading, f"rollouts: every completion prefills its prompt, no row leaves early ({reason})")]
        lines = [("on", "rollouts: each prompt prefilled once, finished rows leave the batch")]
        if tools:
            reason = why_not_kept(self.accelerator.unwrap_model(wrapped))
            if reason is None:
                lines.append(("on", "tools: a turn continues where the last one stopped"))
            else:
                lines.append(("as stock TRL", f"tools: every turn prefills its whole history ({reason})"))
        if self.accelerator.device.type == "cpu" and beats_mkl():
            lines.append(("on", "decoding: float32 products by oneDNN"))
        return lines

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the work of all ranks since the last call, and of transformers' own loop. Collective."""
        figures = torch.tensor(astuple(self._work), device=self.accelerator.device)
        figures = self.accelerator.reduce(figures, reduction="sum")
        self._work = DecodingWork()
        if not figures.any():
            return {}
        sums = zip(fields(DecodingWork), figures.tolist(), strict=True)
        return {f"generation/{field.name}": float(value) for field, value in sums}

    @contextmanager
    def generating(self, wrapped: nn.Module, overrides: dict | None = None) -> Iterator[tuple[nn.Module, bool]]:
        """A model for [`completions.generate`] outside of training's rollouts, without gradients.

        Every rank has to enter this context. Under FSDP2 the weights are gathered once for the whole block, if
        `args.fsdp_gather` and the free memory allow it, and each rank then generates on its own. Otherwise every
        forward is a collective operation.

        Args:
            wrapped: the policy or the reference model, as it was prepared.
            overrides: settings that replace those of the model's generation config inside the context.

        Yields:
            The unwrapped model, and whether a forward is collective. In that case every rank has to generate equally
            often, and with `synced_gpus=True`.
        """
        with (
            gathered_as(self.args.fsdp_gather, wrapped, self.accelerator.device),
            unwrapped_for_generation(
                wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=overrides,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self.backend.summon_full_params(wrapped, recurse=False),
        ):
            yield model, self.is_sharded and not is_gathered(wrapped)


def _vision_of(turn: Turn) -> "Vision":
    """A turn's images as the processor's tensors, with the number of images of each prompt; empty without images."""
    fields = turn.multimodal_fields
    if not turn.images and not any(name.startswith("pixel_values") for name in fields):
        return {}
    counts = [len(images or ()) for images in turn.images or ()]
    width = max(len(ids) for ids in turn.prompt_ids)
    return vision_tensors({**fields, "num_images": counts}, width)


@contextmanager
def restore_weights(model: nn.Module) -> Iterator[None]:
    """Restore the values and dtype of every parameter and buffer after the block, and the model's training mode.

    TRL casts the trained model to bf16 or fp16 for the engine and leaves it so: the adapter's float32 weights
    lose their low bits, and rotary frequencies are rounded. While completions are generated, the originals of cast
    tensors stay in memory.
    """
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = []
    for module in model.modules():
        buffers += [(module, name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    was_training = model.training
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        model.train(was_training)
