"""Completions to measure, drawn by TRL's own rollout, so that accuracy measures what is trained.

`GRPOTrainer` renders prompts with the chat template's options, resets environments, parses calls, runs tools and draws
the next turn. [`MeasuringTrainer`] lets it, with the settings of a measurement, on every rank by itself, and without a
trace in the metrics of a run.
"""

import asyncio
import functools
import inspect
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple, NoReturn

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOTrainer

from ...compat import trl_rollouts
from ...compat.transformers import tokenizer_of
from ...engines.decode.completions import CompletionOptions, generate
from ...engines.decode.history import RenderedHistory
from ...engines.decode.tools import limited_tools
from ...engines.decode.turns import KeptTurns
from ...fsdp2_qlora.generation import FREE_SHARE, free_bytes
from ...utils.substitute import Substitute
from .measurement import Agent, Measurement


class Answer(NamedTuple):
    """A model's answer to a row.

    Attributes:
        completion: as rewards get it, a text or messages.
        ids: tokens after the prompt.
        tokens: how many of them the model wrote; the others are results of tools.
        environment: the row's, when its episode is over.
    """

    completion: str | list[dict]
    ids: list[int]
    tokens: int
    environment: object = None


class Draw(NamedTuple):
    """How completions are drawn; greedy decoding has no `seed`. `synced_gpus`: a forward is collective."""

    model: nn.Module
    config: GenerationConfig
    seed: int | None = None
    synced_gpus: bool = False


@functools.cache
def _loop_of_tools() -> asyncio.AbstractEventLoop:
    """The loop on which TRL runs tools that are coroutines, in a thread of its own until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
    return loop


class _Done(Exception):
    """Ends TRL's method when it has what is asked for: what follows prepares a loss."""


class MeasuringTrainer(GRPOTrainer):
    """`GRPOTrainer` as far as it draws completions. It trains nothing and holds no model.

    `__init__` sets the attributes that TRL's methods for drawing read, and no other.

    Args:
        processing: a tokenizer, or a processor if rows have `images`.
        measurement: its template options, limits and agent.
    """

    def __init__(self, processing: PreTrainedTokenizerBase | ProcessorMixin, measurement: Measurement):
        agent = measurement.agent
        device = PartialState().device
        # TRL gathers figures for its metrics. Here they are of this rank alone, because ranks have different batches.
        self.accelerator = SimpleNamespace(device=device, gather=lambda figures: figures)
        self.model = SimpleNamespace(training=False, config=None)  # TRL reads the longest row of its config
        self.state = SimpleNamespace(num_input_tokens_seen=0)
        self._metrics = {"eval": defaultdict(list)}  # thrown away
        self.rollout_func = None
        self.use_vllm = False
        self.num_generations_eval = 1
        self.processing_class = processing
        self._tokenizer = tokenizer_of(processing)
        self._is_vlm = isinstance(processing, ProcessorMixin)
        self.eos_token_ids = [self._tokenizer.eos_token_id]
        self.chat_template = None
        self.chat_template_kwargs = measurement.template_options
        self.max_completion_length = measurement.max_new_tokens
        limit = measurement.max_tool_turns
        self.max_tool_calling_iterations = sys.maxsize if limit is None else limit
        self.environments = None
        self.environment_factories = None
        self.tools = []
        self.draw_settings: Draw | None = None
        self._tool_timeout = None
        self._history = "append"
        self._turns: KeptTurns | None = None
        self._outcome: Sequence = ()
        if agent is not None:
            self._use(agent)

    def _use(self, agent: Agent) -> None:
        """Set up tools and environment as `GRPOTrainer.__init__` does."""
        self._standalone_tools = agent.tools
        self._tool_timeout = agent.tool_timeout
        self._history = agent.history
        self._multi_environment = False
        environment = None
        if agent.environment is not None:
            environment = agent.environment()
            self.environment_factories = {None: agent.environment}
            self._environment_pool = {None: [environment]}
        self.tools = agent.tools_of(environment)
        self._env_tools = {None: self.tools}
        self.processing_class = trl_rollouts.with_response_schema(self.processing_class)
        self.chat_template = trl_rollouts.training_chat_template(self.processing_class)
        if any(map(inspect.iscoroutinefunction, self.tools)):
            self.async_loop = _loop_of_tools()

    def prompt_ids(self, rows: Sequence[dict]) -> list[list[int]]:
        """The tokens of each row's prompt, with those of its tools and images."""
        self.draw_settings = None
        return self._outcome_of(rows)

    def draw(self, rows: Sequence[dict], draw_settings: Draw) -> list[Answer]:
        """Draw one completion for every row; with tools an episode.

        Under `synced_gpus` every rank has to call it equally often. A rank whose episodes are over takes part in the
        turns of the others.
        """
        self.draw_settings = draw_settings
        self.model.config = getattr(draw_settings.model, "config", None)
        self._turns = None
        if self.tools:
            limit = FREE_SHARE * free_bytes(self.accelerator.device)
            turns = self.max_tool_calling_iterations
            self._turns = KeptTurns(limit, math.inf if turns == sys.maxsize else turns)
        _, ids, tool_mask, completions, *_ = self._outcome_of(rows)
        self._turns = None
        masks = tool_mask or [[1] * len(row) for row in ids]
        environments = self.environments or [None] * len(rows)
        return [
            Answer(completion, row, sum(mask), environment)
            for completion, row, mask, environment in zip(completions, ids, masks, environments, strict=True)
        ]

    def _outcome_of(self, rows: Sequence[dict]) -> Sequence:
        """The prompts' tokens, or what TRL's `_generate` returns of `rows`."""
        try:
            self._generate_and_score_completions(list(rows))
        except _Done:
            return self._outcome
        raise RuntimeError("TRL's _generate_and_score_completions has not called _generate")

    # --- TRL's methods, in the order in which they are called --------------------------------------------------------

    def _generate(self, prompts: list) -> NoReturn:
        self._outcome = super()._generate(prompts)
        raise _Done

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if self.draw_settings is None:
            self._outcome = prompt_ids
            raise _Done
        vision = {}
        if images is not None:
            vision = {**multimodal_fields, "num_images": [len(of_row or ()) for of_row in images]}
        if self._turns is not None and self._turns.number > 0:
            self._any_rank_continues(True)
        return self._next_turn(prompt_ids, vision), None

    def _tokenize_prompts(self, prompts):
        if self._history == "append":
            return super()._tokenize_prompts(prompts)
        # A server renders by the tokenizer's own chat template, and not by TRL's for training.
        served = Substitute(self, chat_template=None)
        return super(MeasuringTrainer, served)._tokenize_prompts(prompts)

    def _tool_call_loop(self, prompts, prompt_ids, *arguments):
        of_loop = limited_tools(self, self._tool_timeout)
        if self._history == "template":
            history = RenderedHistory(self, prompts, prompt_ids)
            of_loop["_generate_single_turn"] = history.turn_of(self._generate_single_turn)
        trainer = Substitute(self, **of_loop)
        result = super(MeasuringTrainer, trainer)._tool_call_loop(prompts, prompt_ids, *arguments)
        # In TRL a rank leaves the loop when its own episodes are over. It takes part in the turns of the other ranks
        # with a prompt whose completion is not used.
        while self._any_rank_continues(False):
            self._next_turn(prompt_ids[:1], {})
        return result

    def _next_turn(self, prompt_ids: list[list[int]], vision: dict[str, object]) -> list[list[int]]:
        settings = self.draw_settings
        seed = settings.seed
        turns = self._turns
        if turns is not None and seed is not None:
            seed += turns.number << 40
        completions = generate(
            settings.model,
            prompt_ids,
            settings.config,
            seed,
            CompletionOptions(synced_gpus=settings.synced_gpus, vision=vision, turns=turns),
        )
        if turns is not None:
            turns.number += 1
        return completions

    def _any_rank_continues(self, this_one: bool) -> bool:
        """Whether any rank draws another turn; collective if a forward is."""
        if not self.draw_settings.synced_gpus:
            return this_one
        flag = torch.tensor(int(this_one), device=self.accelerator.device)
        return bool(reduce(flag, reduction="sum"))
