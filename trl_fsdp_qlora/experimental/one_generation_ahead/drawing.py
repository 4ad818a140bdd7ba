"""TRL's rollout in a thread: what a trainer changes while it draws is a copy, and no rank waits for another.

TRL's methods draw, or those of a user's subclass. They run on a copy of the trainer (a *drawer*), which has its own
engine, environments, metrics and tokenizer, and which is the only rank that it knows. What they write on the copy
comes back with the batch ([`Drawn`]).
"""

import asyncio
import copy
import inspect
import math
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...compat.trl import GRPOTrainer, VLLMClient
from ...compat.trl_rollouts import Generated, with_names
from ...engines.decode.rollout import Rollout
from ...engines.vllm.adapter_sync import RolloutError
from ...utils.nonfatal import nonfatal
from ...utils.substitute import Substitute

if TYPE_CHECKING:
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    from ...trainers.grpo.trainer import EfficientGRPOTrainer

# Lists by name that reward functions, tools and a `rollout_func` add to, through TRL's `log_metric` and `log_extra`.
_PENDING = ("_pending_metrics", "_pending_extra_logs")
_ABSENT = object()


class Figures(NamedTuple):
    """What a call of TRL's `_generate` logs its figures from, on this rank; a subclass may call it several times."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    tool_calls: int
    tool_failures: int


@dataclass
class Drawn:
    """A generation batch of this rank, and what its draw wrote on the drawer.

    Attributes:
        generated: the result of `_generate`.
        prompts: what TRL gave to `_generate`, with the environments' first observations; `None` if a checkpoint kept
            the batch, and TRL then makes them from the rows again.
        environments: one for each completion, for the rewards; `None` without.
        figures: of each call of TRL's own `_generate`.
        metrics: values that were added to the trainer's `_metrics`, those of `figures` among them.
        pending: values by the name of one of the attributes `_PENDING`, and by their own name.
        attributes: other attributes that were set: their values before the draw and after it.
    """

    generated: Generated
    prompts: list | None
    environments: list | None
    figures: list[Figures]
    metrics: dict[str, list]
    pending: dict[str, dict[str, list]]
    attributes: dict[str, tuple[object, object]]


class _Apart(Substitute):
    """A substitute in a thread: what is set on it stays here."""

    __setattr__ = object.__setattr__


class _Resting:
    """An environment whose episode was played in a thread. TRL resets it before it asks for completions."""

    def reset(self, **_columns) -> None:
        """Begin nothing."""


class _Drawn(Exception):
    """Ends `_generate_and_score_completions` of a drawer; has the arguments and the result of `_generate`."""


class Drawing:
    """What the drawers of a run share.

    Two batches have environments at the same time: the one in flight, and the one that is rewarded. The environments
    of a batch are used again by the batch after the next.
    """

    def __init__(self, trainer: "EfficientGRPOTrainer"):
        self.trainer = trainer
        self._client = vars(trainer.vllm_generation).get("vllm_client")
        self._tokenizers: tuple[object, object] | None = None  # the processor and its tokenizer
        self._environments = deque([defaultdict(list), defaultdict(list)])

    def drawer(self, rows: list[dict], is_forgotten: Callable[[], bool]) -> "EfficientGRPOTrainer":
        """A copy of the trainer as it is now, that draws for `rows`. Made on the main thread.

        Args:
            is_forgotten: whether the run no longer waits for the batch.
        """
        trainer = self.trainer
        if self._tokenizers is None:  # a fast tokenizer cannot be used by two threads
            self._tokenizers = copy.deepcopy((trainer.processing_class, trainer._tokenizer))
        drawer = copy.copy(trainer)
        drawer.processing_class, drawer._tokenizer = self._tokenizers
        drawer.model = _Apart(trainer.model, training=True)
        drawer.state = copy.copy(trainer.state)
        drawer.accelerator = _Apart(
            trainer.accelerator,
            device=torch.device("cpu"),
            gather=lambda tensor: tensor,
            reduce=lambda tensor, **_: tensor,
            gather_for_metrics=lambda values, **_: values,
            wait_for_everyone=lambda: None,
            is_main_process=True,
            process_index=0,
            num_processes=1,
        )
        # The model of this process draws nothing, and its passes and phases belong to the main thread.
        drawer.rollout = Rollout(trainer.args, drawer.accelerator, trainer._dist)
        drawer.sharing = _Apart(trainer.sharing, original_attention=nullcontext)
        drawer.clock = _Apart(trainer.clock, phase=lambda name: nullcontext())
        drawer._metrics = {mode: defaultdict(list) for mode in trainer._metrics}
        for name in vars(trainer).keys() & set(_PENDING):
            setattr(drawer, name, defaultdict(list))
        drawer._last_loaded_step = trainer.state.global_step  # so TRL sends nothing
        # A rank may hold a part of a group.
        drawer.num_generations = math.gcd(len(rows), trainer.num_generations)
        drawer.vllm_generation = self._engine(drawer.accelerator, is_forgotten)
        if trainer.has_environments:
            drawer._environment_pool = self._environments[0]
            self._environments.rotate()
        return drawer

    def _engine(self, accelerator: "Accelerator", is_forgotten: Callable[[], bool]) -> "VLLMGeneration":
        """A copy of TRL's engine by which this rank asks for its own prompts."""
        engine = copy.copy(self.trainer.vllm_generation)
        if self._client is None:  # TRL's client is on rank 0 alone
            url = engine.server_base_url or f"http://{engine.server_host}:{engine.server_port}"
            self._client = VLLMClient(base_url=url, connection_timeout=engine.server_timeout)
        engine.accelerator = accelerator
        engine.vllm_client = copy.copy(self._client)  # the name of the policy that answers stays what it is now
        stock = with_names(
            type(engine).generate.__get__(engine),
            gather_object=lambda values: values,
            broadcast_object_list=lambda *_, **__: None,
        )

        def generate(*args, **kwargs):
            url = engine.vllm_client.base_url
            if is_forgotten():
                raise RolloutError(f"the run no longer waits for what the vLLM server at {url} would draw")
            try:
                return stock(*args, **kwargs)
            except Exception as error:
                raise RolloutError(
                    f"the vLLM server at {url} did not draw a generation batch (rollouts_ahead): {error}. Once it "
                    "runs, the run can continue from its last checkpoint"
                ) from error

        engine.generate = generate
        return engine

    def draw(self, drawer: "EfficientGRPOTrainer", rows: list[dict]) -> Drawn:
        """Draw for `rows`, in any thread."""
        figures: list[Figures] = []
        metrics = drawer._metrics["train"]
        drawer._note_generated = lambda generated: figures.append(_figures_of(Generated(*generated), metrics))
        generate = drawer._generate  # by the trainer's class, which may be a user's

        before = {}

        def generate_alone(prompts: list):
            before.update(vars(drawer))  # here TRL has set environments and tools
            raise _Drawn(prompts, Generated(*generate(prompts)))

        drawer._generate = generate_alone
        try:
            GRPOTrainer._generate_and_score_completions(drawer, rows)
        except _Drawn as drawn:
            prompts, generated = drawn.args
        after = vars(drawer)
        return Drawn(
            generated=generated,
            prompts=prompts,
            environments=drawer.environments,
            figures=figures,
            metrics=dict(metrics),
            pending={name: dict(after[name]) for name in after.keys() & set(_PENDING)},
            attributes={
                name: (before.get(name, _ABSENT), value)
                for name, value in after.items()
                if before.get(name, _ABSENT) is not value
            },
        )

    def take_attributes(self, drawn: Drawn) -> list[str]:
        """Set on the trainer what a draw has set on the drawer; returns names that were set on both meanwhile."""
        current = vars(self.trainer)
        lost = []
        for name, (before, after) in drawn.attributes.items():
            if current.get(name, _ABSENT) is before:
                setattr(self.trainer, name, after)
            else:
                lost.append(name)
        return lost

    def take_metrics(self, drawn: Drawn, logged: set[str]) -> None:
        """Add what a draw has added to the trainer's metrics, except for those `logged`, of all ranks, already."""
        metrics = self.trainer._metrics["train"]
        for name in drawn.metrics.keys() - logged:
            metrics[name] += drawn.metrics[name]
        for attribute, by_name in drawn.pending.items():
            pending = getattr(self.trainer, attribute)
            for name, values in by_name.items():
                pending[name] += values

    @property
    def can_close(self) -> bool:
        """Whether there are environments that have a `close`."""
        pools = vars(self.trainer).get("_environment_pool") or {}
        return any(hasattr(environment, "close") for pool in pools.values() for environment in pool)

    def close(self) -> None:
        """Close the environments that have a `close`. TRL's own stay open, because an evaluation plays in them."""
        for pool in self._environments:
            for environment in chain.from_iterable(pool.values()):
                if hasattr(environment, "close"):
                    with nonfatal("closing an environment"):
                        closing = environment.close()
                        if inspect.isawaitable(closing):
                            asyncio.run_coroutine_threadsafe(closing, self.trainer.async_loop).result()

    def resting(self, count: int) -> dict[str | None, list[_Resting]]:
        """Environments for TRL to reset before it gets episodes that are over."""
        return dict.fromkeys(self.trainer._environment_pool, [_Resting()] * count)


def _figures_of(generated: Generated, metrics: dict[str, list]) -> Figures:
    """Of a call of TRL's `_generate` that has just ended; the lists are copies, since a subclass may change them."""
    calls_per_row = metrics.get("tools/call_frequency", [0.0])[-1]
    failures_per_call = metrics.get("tools/failure_frequency", [0.0])[-1]
    tool_calls = round(calls_per_row * len(generated.prompt_ids))
    tool_mask = generated.tool_mask
    if tool_mask is not None:
        tool_mask = [list(mask) for mask in tool_mask]
    return Figures(
        prompt_ids=[list(ids) for ids in generated.prompt_ids],
        completion_ids=[list(ids) for ids in generated.completion_ids],
        tool_mask=tool_mask,
        tool_calls=tool_calls,
        tool_failures=round(failures_per_call * tool_calls),
    )
