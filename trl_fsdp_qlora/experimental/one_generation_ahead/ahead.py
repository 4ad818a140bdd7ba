"""`RolloutsAhead`: a vLLM server draws the next generation batch while this one is rewarded and trained on.

At the beginning of a generation, in this order:

1. wait for the batch in flight,
2. send the policy as it is now to the server,
3. ask for the next batch, with the prompts that the sampler will give,
4. reward, score and train on the batch that came.

So the server holds one version of the policy at a time, and a step takes as long as the slower of the two sides. A
batch comes from the policy of one generation ago. TRL's importance weights correct for that: the log-probabilities of
the server are kept with the batch, and the trainer's are computed by the policy that trains on it.

Rank 0 asks, as in TRL. A thread of its own waits for the answer.
"""

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import xxhash
from accelerate.logging import get_logger

from ...engines.vllm.adapter_sync import RolloutError
from ...trainers.run.phases import PhaseTimer
from ...utils.ranks import on_main

logger = get_logger(__name__)

PATIENCE = 60.0  # a line about who waits for whom is logged every so many seconds


def check_config(args: Any) -> None:
    """Refuse what `rollouts_ahead` cannot be together with, as far as the config shows it.

    Raises:
        ValueError: the message names the line to change.
    """
    if args.rollouts_ahead not in (0, 1):
        raise ValueError(
            f"rollouts_ahead={args.rollouts_ahead}: the server draws one generation batch ahead, since it holds one "
            "version of the policy; use 1, or 0 to wait for each batch"
        )
    if not args.rollouts_ahead:
        return
    if not args.use_vllm or args.vllm_mode != "server":
        engine = f"vllm_mode={args.vllm_mode!r}" if args.use_vllm else "use_vllm=False"
        raise ValueError(
            f"rollouts_ahead=1 with {engine}: only a vLLM server draws while this process trains. Start one and set "
            "use_vllm: true and vllm_mode: server, or rollouts_ahead: 0"
        )
    if getattr(args, "dynamic_sampling", False):
        raise ValueError(
            "rollouts_ahead=1 with dynamic_sampling, which draws until enough groups of this batch differ, so no "
            "prompts of the next batch are known: set dynamic_sampling: false, or rollouts_ahead: 0"
        )


def check_call(call: dict[str, Any]) -> None:
    """The same for a trainer's arguments, by name. The config is looked at again, since fields can be set later.

    Raises:
        ValueError: the message names the line to change.
    """
    args = call["args"]
    check_config(args)
    if not args.rollouts_ahead:
        return
    reasons = {
        "tools": "a turn begins with what a tool returned",
        "environment_factory": "a turn begins with what the environment returned",
        "rollout_func": "it draws by itself",
    }
    for name, reason in reasons.items():
        if call.get(name):
            raise ValueError(
                f"rollouts_ahead=1 with {name}: {reason}, so the server cannot be asked ahead. Leave {name} out, or "
                "set rollouts_ahead: 0"
            )
    dataset = call.get("train_dataset")
    if dataset is not None and not isinstance(dataset, Sized):
        raise ValueError(
            "rollouts_ahead=1 with a streaming dataset: the next prompts are looked up by their index. Load it "
            "whole, or set rollouts_ahead: 0"
        )


class Batch:
    """A generation batch that the server has drawn or is drawing.

    Args:
        asked: what the server was asked for, as text.
        step: optimizer steps that the policy which draws it has behind it.

    Attributes:
        answer: of TRL's client; `None` as long as there is none.
        error: why there will be none.
        images: digests of each prompt's images, if there are any.
        features: what the server made of them; `None` if there are none, or if another process asked.
        asked_at, answered_at: moments on the host's clock; `None` if another process asked.
    """

    def __init__(self, asked: str, step: int):
        self.asked = asked
        self.step = step
        self.answer: dict[str, Any] | None = None
        self.error: Exception | None = None
        self.images: list[str] = []
        self.features: list | None = None
        self.asked_at: float | None = None
        self.answered_at: float | None = None
        self._ended = threading.Event()

    def ask(self, client: Any, arguments: dict[str, Any]) -> None:
        """Let a thread ask the server."""
        own_client = copy.copy(client)  # the name of the policy that answers stays what it is now
        self.asked_at = time.perf_counter()

        def wait_for_answer() -> None:
            try:
                self.answer = own_client.generate(**arguments)
            except Exception as error:  # raised on every rank when the batch is needed
                self.error = error
            self.answered_at = time.perf_counter()
            self._ended.set()

        threading.Thread(target=wait_for_answer, name="rollouts-ahead", daemon=True).start()

    def arrive(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Whether there is an answer or an error after so many seconds at most."""
        return self._ended.wait(seconds)


class RolloutsAhead:
    """Lets a vLLM engine of TRL's (or [`trl_fsdp_qlora.engines.vllm.engine.AdapterEngine`]) draw one batch ahead.

    It replaces the engine's `generate` and `sync_weights`, which a trainer calls as before. Only training's own
    batches are asked for ahead.

    Args:
        engine: in server mode.
        clock: gets the phase `wait_for_server`.
        step: returns the optimizer steps that the policy has behind it.
        is_training: returns whether `generate` draws a generation batch of training.
        upcoming: returns this rank's prompts of the next generation batch as token ids, and their images; `None`, on
            every rank, if no batch follows.
        add_metrics: logs values by name.

    Attributes:
        batch: on rank 0, the batch in flight, or the one that has come and waits for its turn.
    """

    def __init__(
        self,
        engine: Any,
        clock: PhaseTimer,
        step: Callable[[], int],
        is_training: Callable[[], bool],
        upcoming: Callable[[], tuple[list[list[int]], list | None] | None],
        add_metrics: Callable[[dict[str, float]], None],
    ):
        self.engine = engine
        self.clock = clock
        self.upcoming = upcoming
        self.batch: Batch | None = None
        self._step = step
        self._is_training = is_training
        self._add_metrics = add_metrics
        self._free_since: float | None = None  # when the server had drawn what it was asked for last
        self._stock_generate = engine.generate
        self._stock_sync_weights = engine.sync_weights
        engine.generate = self.generate
        engine.sync_weights = self.sync_weights

    def sync_weights(self) -> None:
        """Send the policy, once the server has nothing in flight that the policy before it draws. Collective."""

        def settle() -> None:
            self._wait()
            if self.batch is not None and self.batch.error is not None:
                raise self.error(self.batch.error)

        on_main(settle)
        self._stock_sync_weights()

    def generate(self, prompts, images, num_generations, profiler=None):
        """The engine's `generate`. In training: the batch in flight, after the next one was asked for. Collective."""
        if not self._is_training():
            return self._stock_generate(prompts, images, num_generations, profiler)
        taking = _Client(self, takes=True)
        with self._client_is(taking):
            answer = self._stock_generate(prompts, images, num_generations, profiler)
        metrics = on_main(taking.metrics)
        upcoming = self.upcoming()
        if upcoming is not None:
            asking = _Client(self, takes=False)
            with self._client_is(asking):
                self._stock_generate(*upcoming, num_generations)
            metrics.update(on_main(asking.metrics))
        self._add_metrics(metrics)
        return answer

    def _client_is(self, stand_in: "_Client") -> AbstractContextManager:
        """A context in which TRL's engine has `stand_in` as its client of the server; rank 0 alone uses it."""
        if not self.engine.accelerator.is_main_process:
            return nullcontext()
        return patch.object(self.engine, "vllm_client", stand_in)

    def error(self, cause: Exception) -> RolloutError:
        """What every rank raises if the server has not drawn a batch."""
        return RolloutError(
            f"the vLLM server at {self.engine.vllm_client.base_url} did not draw a generation batch (rollouts_ahead): "
            f"{cause}. Once it runs, the run can continue from its last checkpoint"
        )

    def _wait(self) -> None:
        """Wait until the batch in flight has come, or its error has. Rank 0 calls it."""
        if self.batch is None:
            return
        with self.clock.phase("wait_for_server"):
            waited = 0.0
            while not self.batch.wait(PATIENCE):
                waited += PATIENCE
                logger.warning(
                    f"rank 0 has waited {waited:.0f} s for the vLLM server to draw a generation batch "
                    "(rollouts_ahead); the other ranks wait for rank 0"
                )

    @contextmanager
    def run(self) -> Iterator[None]:
        """Inside the block batches are drawn ahead; what is in flight at its end, however it ends, is forgotten."""
        self.stop()
        try:
            yield
        finally:
            self.stop()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> str | None:
        """On rank 0 the batch in flight as text, once it is drawn; `None` if there is none. Collective."""

        def text() -> str | None:
            self._wait()
            batch = self.batch
            if batch is None:
                return None
            if batch.error is not None:  # it is raised when the batch is needed
                logger.warning(f"the checkpoint lacks the generation batch in flight: {batch.error}")
                return None
            return json.dumps({"asked": batch.asked, "step": batch.step, "answer": batch.answer})

        kept = on_main(text)
        return kept if self.engine.accelerator.is_main_process else None

    def restore(self, state: str | None) -> None:
        """Continue with the batch that [`state`] kept."""
        self.stop()
        if state is not None:
            kept = json.loads(state)
            self.batch = Batch(kept["asked"], kept["step"])
            self.batch.arrive(kept["answer"])

    def stop(self) -> None:
        """Forget the batch in flight; the server draws it to its end."""
        self.batch = None
        self._free_since = None


class _Client:
    """Replaces the client of the server while TRL's engine prepares a request, on rank 0.

    With `takes` it answers with the batch that was asked for ahead, otherwise it asks for one and does not wait. An
    error is kept for [`metrics`], because the other ranks wait for what the engine broadcasts next.
    """

    def __init__(self, ahead: RolloutsAhead, takes: bool):
        self.ahead = ahead
        self.takes = takes
        self._client = getattr(ahead.engine, "vllm_client", None)
        self._images: list[str] = []
        self._features: list | None = None
        self._batch: Batch | None = None
        self._error: Exception | None = None

    def image_features(self, images: list[list | None]) -> list:
        self._images = [_fingerprint(images_of_prompt or []) for images_of_prompt in images]
        waiting = self.ahead.batch if self.takes else None
        if waiting is not None and waiting.features is not None and waiting.images == self._images:
            return waiting.features
        try:
            self._features = self._client.image_features(images)
        except Exception as error:
            self._error = error
        return self._features or [None] * len(images)

    def generate(self, **arguments) -> dict[str, Any]:
        if self._error is None:
            try:
                self._generate(arguments)
            except Exception as error:
                self._error = error
        if self.takes and self._error is None:
            return self._batch.answer
        return {"prompt_ids": [], "completion_ids": [], "logprobs": None, "logprob_token_ids": None}

    def _generate(self, arguments: dict[str, Any]) -> None:
        asked = json.dumps([{**arguments, "features": None}, self._images], sort_keys=True)
        waiting = self.ahead.batch
        if self.takes and waiting is not None and waiting.asked != asked:
            logger.warning(
                "the generation batch that was drawn ahead is for other prompts or other sampling settings than are "
                "needed now, so it is drawn again"
            )
            self.ahead.stop()
        if self.ahead.batch is None:
            batch = Batch(asked, self.ahead._step())
            batch.images = self._images
            batch.features = self._features
            batch.ask(self._client, arguments)
            self.ahead.batch = batch
        self._batch = self.ahead.batch
        if self.takes:
            self.ahead._wait()
            self.ahead.batch = None
            self._error = self._batch.error

    def metrics(self) -> dict[str, float]:
        """Metrics of the request; raises its error, for every rank to raise it."""
        if self._error is not None:
            raise self.ahead.error(self._error) from self._error
        batch = self._batch
        free_since = self.ahead._free_since
        if not self.takes:
            return {} if free_since is None else {"time/server_idle_s": batch.asked_at - free_since}
        self.ahead._free_since = batch.answered_at
        metrics = {"sampling/staleness": float(self.ahead._step() - batch.step)}
        if batch.answered_at is not None:
            metrics["time/server_draw_s"] = batch.answered_at - batch.asked_at
        return metrics


def _fingerprint(images: list) -> str:
    """A digest of a prompt's images."""
    hasher = xxhash.xxh3_128()
    for image in images:
        hasher.update(f"{image.mode} {image.size} ".encode())
        hasher.update(image.tobytes())
    return hasher.hexdigest()
