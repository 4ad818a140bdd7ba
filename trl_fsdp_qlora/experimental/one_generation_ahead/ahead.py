"""`RolloutsAhead`: the next generation batch is drawn while this one is rewarded and trained on.

At the beginning of a generation, in this order:

1. wait for the batch in flight, on every rank,
2. send the policy as it is now to the server,
3. let a thread draw the next batch, for the rows that the data loader gives next,
4. reward, score and train on the batch that came.

So the server holds one version of the policy at a time, and a step takes as long as the slower of the two sides. A
batch comes from the policy of one generation ago. TRL's importance weights correct for that: the log-probabilities of
the server are kept with the batch, and the trainer's are computed by the policy that trains on it.

What is drawn is the whole of TRL's rollout: turns, tools, environments, a user's `rollout_func` (`drawing.py`), by the
methods of the trainer's class. Each rank draws its own episodes and asks the server by itself. Collectives are on the
main thread.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ...compat.trl_rollouts import Generated, log_rollout
from ...engines.vllm.adapter_sync import RolloutError
from ...errors import UserError
from ...trainers.rollouts.generation_batches import generate_every
from .drawing import Drawing, Drawn, Figures
from .upcoming import UpcomingRows

if TYPE_CHECKING:
    from trl import GRPOConfig

    from ...trainers.grpo.trainer import EfficientGRPOTrainer

logger = get_logger(__name__)

PATIENCE = 60.0  # a line about who waits for whom is logged every so many seconds
# Attributes of TRL's engine that change what is drawn.
_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length",
    "structured_outputs_regex", "generation_kwargs",
)  # fmt: skip
# Methods that draw. One that is set on a trainer's object may use the object, which a thread must not do.
_DRAWING_METHODS = ("_generate", "_generate_single_turn", "_tool_call_loop", "_tokenize_prompts")
# Methods that a generation batch passes on its way from the data loader.
_PASSING_METHODS = ("get_batch_samples", "training_step", "_prepare_inputs", "_generate_and_score_completions")


def check_config(args: "GRPOConfig") -> None:
    """Refuse what `rollouts_ahead` cannot be together with.

    Raises:
        ValueError: the message names the line to change.
    """
    if args.rollouts_ahead not in (0, 1):
        raise ValueError(
            f"rollouts_ahead={args.rollouts_ahead}: the server draws one generation batch ahead, since it holds one "
            "version of the policy; use 1, or 0 to wait for each batch"
        )
    if args.rollouts_ahead and (not args.use_vllm or args.vllm_mode != "server"):
        engine = f"vllm_mode={args.vllm_mode!r}" if args.use_vllm else "use_vllm=False"
        raise ValueError(
            f"rollouts_ahead=1 with {engine}: only a vLLM server draws while this process trains. Start one and set "
            "use_vllm: true and vllm_mode: server, or rollouts_ahead: 0"
        )
    if args.rollouts_ahead and args.accelerator_config.dispatch_batches:
        raise ValueError(
            "rollouts_ahead=1 with an accelerator_config of dispatch_batches=True: one process would read the rows of "
            "all, and accelerate passes tensors, not prompts. Use dispatch_batches: false, or leave it out"
        )


class GenerationBatch:
    """This rank's part of a generation batch that is drawn by a thread, or was drawn.

    Args:
        asked: digest of the rows and settings that it is drawn for.
        step: optimizer steps that the policy which draws it has behind it.

    Attributes:
        drawn: the batch; `None` as long as it is not there.
        error: why nothing was drawn.
        asked_at, answered_at: moments on the host's clock; `None` if another process drew the batch.
        is_forgotten: the thread asks the server for nothing more.
    """

    def __init__(self, asked: str, step: int):
        self.asked = asked
        self.step = step
        self.drawn: Drawn | None = None
        self.error: BaseException | None = None
        self.asked_at: float | None = None
        self.answered_at: float | None = None
        self.is_forgotten = False
        self._images_are_in_rows = False
        self._ended = threading.Event()

    def begin(self, drawing: Drawing, rows: list[dict]) -> None:
        """Let a thread draw it."""
        self.asked_at = time.perf_counter()
        self._images_are_in_rows = not rows[0].keys().isdisjoint(("image", "images"))
        drawer = drawing.drawer(rows, lambda: self.is_forgotten)

        def draw() -> None:
            try:
                self.drawn = drawing.draw(drawer, rows)
            # Raised on every rank when the batch is needed. So are the SystemExit of a tool's argparse and asyncio's
            # CancelledError, which are no `Exception` and end a run in turns, too.
            except BaseException as error:
                self.error = error
            self.answered_at = time.perf_counter()
            self._ended.set()

        threading.Thread(target=draw, name="rollouts-ahead", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether it was drawn, or has failed, after so many seconds at most."""
        return self._ended.wait(seconds)

    def text(self) -> str:
        """What a checkpoint keeps of it.

        Raises:
            TypeError: it holds something that JSON does not.
        """
        drawn = self.drawn
        generated = drawn.generated._asdict()
        if self._images_are_in_rows:
            del generated["images"]  # TRL then takes those of the rows
        return json.dumps(
            {
                "asked": self.asked,
                "step": self.step,
                "generated": generated,
                "figures": drawn.figures,
                "metrics": drawn.metrics,
                "pending": drawn.pending,
            }
        )

    @classmethod
    def kept(cls, kept: dict) -> "GenerationBatch":
        """The batch of which [`text`] has `kept`."""
        batch = cls(kept["asked"], kept["step"])
        batch.drawn = Drawn(
            generated=Generated(**{"images": None, **kept["generated"]}),
            prompts=None,
            environments=None,
            figures=[Figures(*figures) for figures in kept["figures"]],
            metrics=kept["metrics"],
            pending=kept["pending"],
            attributes={},
        )
        batch._ended.set()
        return batch


class RolloutsAhead:
    """Draws the batches of a trainer of GRPO's kind, each while the one before is trained on.

    It replaces the engine's `sync_weights`, so that nothing is sent to the server while it draws.

    Args:
        trainer: draws from a vLLM server, by TRL's engine or by
            [`trl_fsdp_qlora.engines.vllm.engine.AdapterEngine`].

    Attributes:
        batch: the batch in flight, or the one that was drawn and waits for its turn; on all ranks or on none.
    """

    def __init__(self, trainer: "EfficientGRPOTrainer"):
        self.trainer = trainer
        self.batch: GenerationBatch | None = None
        self.drawing = Drawing(trainer)
        self.upcoming: UpcomingRows | None = None
        self._send_weights = trainer.vllm_generation.sync_weights
        trainer.vllm_generation.sync_weights = self.sync_weights

    @contextmanager
    def run(self) -> Iterator[None]:
        """Inside the block batches are drawn ahead; what is in flight at its end, however it ends, is forgotten.

        Raises:
            UserError: a method by which a draw is made was replaced on the trainer itself.
        """
        names = [name for name in _DRAWING_METHODS if name in vars(self.trainer)]
        if names:
            raise UserError(
                f"rollouts_ahead=1 with {', '.join(names)} set on the trainer: a thread draws, and what is set on "
                "an object may use the object. Override it in a subclass of the trainer, or set rollouts_ahead: 0"
            )
        self.stop()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Forget the batch in flight, and close all environments; the server draws the current turn to its end."""
        if self.batch is not None:
            self.batch.is_forgotten = True
            if self.drawing.can_close:
                self.batch.wait(PATIENCE)  # a tool may run in one of them
        self.drawing.close()
        self.batch = None
        self.upcoming = None
        self.drawing = Drawing(self.trainer)

    def reading(self, micro_batches: Iterator) -> UpcomingRows:
        """The micro-batches of a data loader, at the beginning of an optimizer step; they can be looked at earlier."""
        if self.upcoming is None or self.upcoming.micro_batches is not micro_batches:
            self.upcoming = UpcomingRows(micro_batches, _digest_of_rows)
        self.upcoming.begin_step()
        return self.upcoming

    # --- a generation ------------------------------------------------------------------------------------------------

    def take(self, rows: list[dict]) -> tuple[Callable[[list], tuple], dict[str, object]]:
        """Take the batch for `rows` that was drawn, send the policy, and ask for the next batch. Collective.

        Returns:
            What TRL's `_generate_and_score_completions` calls in place of `_generate`, and its other values of the
            trainer's attributes, by name.
        """
        with self.trainer.clock.phase("generate"):
            batch = self._take(rows)
        of_trainer = {}
        if batch.drawn.environments is not None:
            # These have begun and ended their episodes, so TRL gets others to reset.
            of_trainer["_environment_pool"] = self.drawing.resting(len(rows))
        waiting = [batch]

        def generate(prompts: list) -> tuple:
            if not waiting:  # a further group of dynamic sampling
                return self.trainer._generate(prompts)
            return self._hand_in(waiting.pop(), prompts)

        return generate, of_trainer

    def _take(self, rows: list[dict]) -> GenerationBatch:
        """The batch for `rows`, and the next one is asked for. Collective."""
        trainer = self.trainer
        self._settle()
        if trainer.state.global_step != trainer._last_loaded_step:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        is_for_rows = self.batch is not None and self.batch.asked == self._digest(rows)
        by_rank = gather_object([(is_for_rows, self._why_rows_differ(rows))])
        reasons = [reason for _, reason in by_rank if reason is not None]
        if reasons:
            raise UserError(reasons[0])
        if not all(is_for_rows for is_for_rows, _ in by_rank):
            if self.batch is not None:
                logger.warning(
                    "the generation batch that was drawn ahead is for other prompts or other sampling settings than "
                    "are needed now, so it is drawn again"
                )
            self._begin(rows)
            self._settle()
        batch = self.batch
        self._take_attributes(batch.drawn)
        metrics = {"sampling/staleness": float(trainer.state.global_step - batch.step)}
        if batch.answered_at is not None:
            metrics["time/server_draw_s"] = batch.answered_at - batch.asked_at
        self.batch = None
        following = self._following_rows()
        if following is not None:
            self._begin(following)
            if batch.answered_at is not None:
                metrics["time/server_idle_s"] = self.batch.asked_at - batch.answered_at
        trainer._add_metrics(metrics)
        return batch

    def _why_rows_differ(self, rows: list[dict]) -> str | None:
        """Why a run cannot be drawn ahead: its first rows were changed on their way from the data loader."""
        trainer = self.trainer
        if self.upcoming is None or self.upcoming.digests is None:
            return None
        read = self.upcoming.digests[trainer._step - trainer.first_micro_batch]
        self.upcoming.digests = None  # the first generation of a run is looked at
        if read == _digest_of_rows(rows):
            return None
        methods = " or ".join(_users_methods(trainer, _PASSING_METHODS)) or type(trainer).__name__
        return (
            f"rollouts_ahead=1: {methods} changes the rows of the data loader, so each batch would be drawn twice, "
            "for the rows as they are read and for the changed ones. Change them in the dataset or by a data "
            "collator, or set rollouts_ahead: 0"
        )

    def _take_attributes(self, drawn: Drawn) -> None:
        """Set what the draw has set; before the next batch is asked for, whose draw then continues from it."""
        if not drawn.attributes:
            return
        names = ", ".join(f"{type(self.trainer).__name__}.{name}" for name in sorted(drawn.attributes))
        logger.warning_once(
            f"rollouts_ahead: a draw sets {names}; the value comes back with the batch, one generation after it was "
            "drawn (what is changed in place, such as a list, is seen at once)"
        )
        lost = self.drawing.take_attributes(drawn)
        if lost:
            logger.warning_once(
                f"rollouts_ahead: {', '.join(lost)} was set by a draw and by the training beside it; the value of the "
                "draw is lost"
            )

    def _begin(self, rows: list[dict]) -> None:
        self.batch = GenerationBatch(self._digest(rows), self.trainer.state.global_step)
        self.batch.begin(self.drawing, rows)

    def _following_rows(self) -> list[dict] | None:
        """This rank's rows of the generation batch after the one that begins now.

        It is `None` if the run or the data loader's epoch ends before. Every rank has to call this method, because
        some loaders read for all ranks.
        """
        trainer = self.trainer
        every = generate_every(trainer)
        # `_step` counts micro-batches over all runs of this trainer, so the place is counted from this optimizer step.
        begins_at = trainer._step - trainer._step % every + every
        place = begins_at - trainer.first_micro_batch
        steps_until = place // trainer.args.gradient_accumulation_steps
        is_over = trainer.state.global_step + steps_until >= trainer.state.max_steps
        return None if is_over else self.upcoming.peek(place)

    def _hand_in(self, batch: GenerationBatch, prompts: list) -> tuple:
        """TRL's `_generate`: its figures of all ranks are taken, and the batch is returned."""
        trainer = self.trainer
        drawn = batch.drawn
        if drawn.prompts is not None:
            prompts[:] = drawn.prompts  # TRL continues with this list
        trainer.environments = drawn.environments
        metrics = trainer._metrics["train"]
        before = {name: list(values) for name, values in metrics.items()}
        for figures in drawn.figures:
            self._log_figures(figures)
        logged = {name for name, values in metrics.items() if values != before.get(name)}
        self.drawing.take_metrics(drawn, logged)
        return tuple(drawn.generated)

    def _log_figures(self, figures: Figures) -> None:
        """Let TRL's `_generate` log the figures of a call that a thread has made, over all ranks. Collective."""
        count = len(figures.completion_ids)
        rollout = {
            "prompt_ids": figures.prompt_ids,
            "completion_ids": figures.completion_ids,
            "logprobs": None,
            "env_mask": figures.tool_mask,
        }
        calls_and_failures = (figures.tool_calls, figures.tool_failures)
        episodes = (figures.tool_mask, [""] * count, figures.completion_ids, None, *calls_and_failures, [])
        with self.trainer.clock.phase("generate"):
            log_rollout(self.trainer, rollout, episodes)

    def _digest(self, rows: list[dict]) -> str:
        engine = vars(self.trainer.vllm_generation)
        settings = json.dumps([engine.get(name) for name in _SETTINGS], default=str)
        return f"{settings} {_digest_of_rows(rows)}"

    # --- waiting -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Send the policy, once nothing is in flight that the policy before it draws. Collective."""
        self._settle()
        self._send_weights()

    def _settle(self) -> None:
        """Wait until every rank has drawn its part of the batch in flight; its error ends all ranks. Collective."""
        rank = self.trainer.accelerator.process_index
        error = None
        if self.batch is not None:
            with self.trainer.clock.phase("wait_for_server"):
                waited = 0.0
                while not self.batch.wait(PATIENCE):
                    waited += PATIENCE
                    logger.warning(
                        f"rank {rank} has waited {waited:.0f} s for its part of a generation batch (rollouts_ahead: "
                        "the vLLM server, tools, environments); other ranks wait for it",
                        main_process_only=False,
                    )
            error = self.batch.error
        errors = gather_object([None if error is None else f"rank {rank}: {type(error).__name__}: {error}"])
        if error is not None:
            raise error
        failed = [text for text in errors if text is not None]
        if failed:
            raise RolloutError(f"a generation batch was not drawn (rollouts_ahead): {failed[0]}")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> str | None:
        """This rank's part of the batch in flight as text, once every rank's is drawn; `None` without. Collective.

        It waits for `rollouts_ahead_save_timeout` seconds at most, and not at all with environments.
        """
        text = None
        reason = None
        if self.batch is not None:
            limit = self.trainer.args.rollouts_ahead_save_timeout
            with self.trainer.clock.phase("wait_for_server"):
                if self.trainer.has_environments:
                    reason = "the state of an environment cannot be written"
                elif not self.batch.wait(limit):
                    reason = f"it was not drawn within rollouts_ahead_save_timeout={limit:g} seconds"
                elif self.batch.error is not None:  # it is raised when the batch is needed
                    reason = f"{type(self.batch.error).__name__}: {self.batch.error}"
                elif self.batch.drawn.attributes:
                    reason = f"its draw has set {', '.join(self.batch.drawn.attributes)} on the trainer"
                else:
                    try:
                        text = self.batch.text()
                    except TypeError as error:
                        reason = str(error)
        reasons = [reason for reason in gather_object([reason]) if reason is not None]
        if not reasons:
            return text
        logger.warning(
            "the checkpoint lacks the generation batch in flight, and a run that resumes from it draws for the same "
            f"prompts again: {reasons[0]}"
        )
        return None

    def restore(self, state: str | None) -> None:
        """Continue with the batch that [`state`] kept."""
        self.stop()
        saved = {} if state is None else json.loads(state)
        if "figures" in saved:  # an earlier version kept something else, and the batch is drawn again
            self.batch = GenerationBatch.kept(saved)


def _users_methods(trainer: "EfficientGRPOTrainer", names: tuple[str, ...]) -> list[str]:
    """Which methods of these names are a user's: of classes before this package's, or set on the trainer."""
    methods = [f"{name} (set on the trainer)" for name in names if name in vars(trainer)]
    package = __name__.partition(".")[0]
    for cls in type(trainer).__mro__:
        if cls.__module__.partition(".")[0] == package:
            break
        overridden = [name for name in names if name in vars(cls)]
        methods += [f"{cls.__name__}.{name}" for name in overridden]
    return methods


def _digest_of_rows(rows: list[dict]) -> str:
    text = json.dumps(list(rows), default=_fingerprint)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _fingerprint(value: object) -> str:
    """Of something in a row that JSON does not hold, such as an image."""
    if not hasattr(value, "tobytes"):
        return str(value)
    shape = value.shape if hasattr(value, "shape") else (value.mode, value.size)
    return f"{shape} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
