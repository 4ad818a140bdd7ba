"""TRL's rollout in a thread: what a trainer changes while it draws is a copy, and no rank waits for another.

TRL's own methods draw. They run on a copy of the trainer (a *drawer*), which has its own engine, environments, metrics
and tokenizer, and which is the only rank that it knows.
"""

import asyncio
import copy
import inspect
import math
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from ...compat.trl import GRPOTrainer, VLLMClient
from ...compat.trl_rollouts import Generated, with_names
from ...engines.vllm.adapter_sync import RolloutError
from ...utils.nonfatal import nonfatal


class _Instead:
    """Another object, with other values under some names."""

    def __init__(self, original: Any, **values: Any):
        self._original = original
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


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

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._client = vars(trainer.vllm_generation).get("vllm_client")
        self._tokenizers: tuple[Any, Any] | None = None
        self._environments = deque([defaultdict(list), defaultdict(list)])

    def drawer(self, rows: list[dict[str, Any]], is_forgotten: Callable[[], bool]) -> Any:
        """A copy of the trainer as it is now, that draws for `rows`. Made on the main thread.

        Args:
            is_forgotten: whether nobody waits for the batch any more.
        """
        trainer = self.trainer
        if self._tokenizers is None:  # a fast tokenizer cannot be used by two threads
            self._tokenizers = copy.deepcopy((trainer.processing_class, trainer._tokenizer))
        drawer = copy.copy(trainer)
        drawer.processing_class, drawer._tokenizer = self._tokenizers
        drawer.model = _Instead(trainer.model, training=True)
        drawer.state = copy.copy(trainer.state)
        drawer.accelerator = _Instead(
            trainer.accelerator,
            device=torch.device("cpu"),
            gather=lambda tensor: tensor,
            is_main_process=True,
            process_index=0,
            num_processes=1,
        )
        drawer._metrics = {mode: defaultdict(list) for mode in trainer._metrics}
        drawer._last_loaded_step = trainer.state.global_step  # so TRL sends nothing
        # A rank may hold a part of a group.
        drawer.num_generations = math.gcd(len(rows), trainer.num_generations)
        drawer.vllm_generation = self._engine(drawer.accelerator, is_forgotten)
        if trainer.has_environments:
            drawer._environment_pool = self._environments[0]
            self._environments.rotate()
        return drawer

    def _engine(self, accelerator: Any, is_forgotten: Callable[[], bool]) -> Any:
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
                raise RolloutError(f"nobody waits for what the vLLM server at {url} would draw")
            try:
                return stock(*args, **kwargs)
            except Exception as error:
                raise RolloutError(
                    f"the vLLM server at {url} did not draw a generation batch (rollouts_ahead): {error}. Once it "
                    "runs, the run can continue from its last checkpoint"
                ) from error

        engine.generate = generate
        return engine

    def draw(self, drawer: Any, rows: list[dict[str, Any]]) -> tuple[Generated, tuple[int, int], list, list | None]:
        """Draw for `rows`: the result of `_generate`, tool calls and their failures, prompts, environments."""

        def generate(prompts: list):
            draw = GRPOTrainer._generate.__get__(drawer)
            raise _Drawn(prompts, Generated(*drawer.draw_episodes(draw, prompts)))

        drawer._generate = generate
        try:
            GRPOTrainer._generate_and_score_completions(drawer, rows)
        except _Drawn as drawn:
            prompts, generated = drawn.args
        shares = {name: values[-1] for name, values in drawer._metrics["train"].items()}
        calls = round(shares.get("tools/call_frequency", 0.0) * len(prompts))
        failures = round(shares.get("tools/failure_frequency", 0.0) * calls)
        return generated, (calls, failures), prompts, drawer.environments

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
