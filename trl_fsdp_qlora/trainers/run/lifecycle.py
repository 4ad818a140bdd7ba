"""The run around the loss, the same for every trainer: clock, whole checkpoints, card, start-up block.

[`begin`] gives a trainer its collaborators after TRL's constructor:

- `clock` measures seconds and bytes of each phase, `telemetry` logs them as ordinary metrics;
- `checkpointing` writes whole checkpoints and ignores unfinished ones;
- `card_info` holds the entries of the card that a trainer cannot know by itself.

The other functions are what these do at one of TRL's methods, which a trainer overrides in its own file.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...compat.peft import adapted_parts
from ...compat.transformers import take_checkpointing_options_apart
from ...compat.trl import counts_experts
from ...engines.vllm.drawn_dtype import describe_dtype
from ...fsdp2_qlora.loading import experts_in_16_bit, keep_plain_kernel
from ...fsdp2_qlora.sharded import base_bytes_of
from ...long_rows import tiles as token_tiles
from ...prefix_sharing.sharing import causal_language_model
from ...utils.plain import counted
from .card import CardInfo, write_card, write_first_card
from .checkpoints import WholeCheckpoints, describe_rollouts, describe_training
from .logits import record
from .phases import PhaseTimer, TelemetryCallback
from .startup import StartupCallback
from .terminal import print_briefly

logger = get_logger(__name__)

# Of a trainer that was built without `__init__`, as in some tests of TRL.
NO_CLOCK = PhaseTimer(torch.device("cpu"), "off")
# What continues a run that was stopped; a recipe has a command.
GO_ON = 'trainer.train(resume_from_checkpoint="auto")'


def begin(trainer: Trainer, method: str) -> None:
    """Set up clock, checkpoints and card after TRL's constructor. `method` is the method's name on the card."""
    keep_plain_kernel(trainer.model)
    take_checkpointing_options_apart(causal_language_model(trainer.model))
    for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        token_tiles.install(model, trainer.args.mlp_tokens_per_tile)
    trainer.aux_loss_enabled = trainer.aux_loss_enabled and counts_experts(trainer.model.config.get_text_config())
    trainer.card_info = CardInfo(method=method)
    trainer.checkpointing = WholeCheckpoints(trainer.args, trainer.accelerator, partial(_describe_run, trainer))
    trainer.clock = PhaseTimer(trainer.accelerator.device, trainer.args.phase_metrics)
    trainer.telemetry = TelemetryCallback(trainer.clock, lambda: trainer._metrics["train"])
    trainer.add_callback(trainer.telemetry)


def report_start(trainer: Trainer, tokenize: Callable | None = None) -> None:
    """Register the start-up block, which shows the first prompt as `tokenize` returns it.

    A trainer's constructor calls this function last.
    """
    trainer.startup = StartupCallback(trainer.features, tokenize, lambda: trainer.sharing.figures)
    trainer.add_callback(trainer.startup)
    print_briefly(trainer)


def features_of_engine(trainer: Trainer) -> list[tuple[str, str]]:
    """Lines of the start-up block on vLLM; none if it does not draw."""
    if not trainer.use_vllm:
        return []
    sends_adapter = trainer.sync.mode == "adapter"
    lines = [("on" if sends_adapter else "as stock TRL", trainer.sync.describe())]
    if trainer.ahead is not None:
        lines.append(("on", "vLLM draws the next generation batch while this one is trained on"))
    if trainer.args.vllm_mode != "colocate":
        return lines
    lines.append(("on", describe_dtype(trainer.args, trainer.model, trainer.accelerator)))
    if sends_adapter:
        shared = trainer.vllm_generation.shared_base
        own = f"vLLM has a base of its own: {trainer.vllm_generation.own_base}"
        lines.append(("off", own) if shared is None else ("on", shared.describe()))
    return lines


def features_of_base(trainer: Trainer) -> list[tuple[str, str]]:
    """Lines of the start-up block on the base, its long rows and the adapter."""
    base_bytes = base_bytes_of(trainer.model)
    in_16_bit = experts_in_16_bit(trainer.model)
    return [
        token_tiles.describe(trainer.model, trainer.args.mlp_tokens_per_tile),
        *([] if base_bytes is None else [("on", str(base_bytes))]),
        *([] if in_16_bit is None else [("as stock TRL", in_16_bit)]),
        *adapted_parts(trainer.accelerator.unwrap_model(trainer.model)),
    ]


def is_finished(trainer: Trainer, max_steps: int) -> bool:
    """Whether a resumed run has no step left; it logs a line if so.

    Transformers checks only after a step whether a run is over, so a finished run would do one more step.
    """
    if trainer.state.global_step < max_steps:
        return False
    steps = counted(trainer.state.global_step, "step")
    finished = f"the run in {trainer.args.output_dir} is finished ({steps}): nothing is trained"
    logger.warning(f"{finished}. Raise max_steps or num_train_epochs, or set another output_dir")
    return True


@contextmanager
def writing_checkpoint(trainer: Trainer, trial: Any, rollouts: dict[str, Any] | None) -> Iterator[None]:
    """Inside the block the trainer writes a checkpoint, which gets its name, and is pushed, once it is whole.

    `rollouts` are the completions that this rank has drawn and not yet used; `None` if the trainer draws none.
    """
    folder = Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    checkpointing = trainer.checkpointing
    with checkpointing.writing(folder, trainer.state, rollouts):
        staging = str(checkpointing.staging)
        redirected = {"_get_output_dir": lambda trial: staging, "_push_from_checkpoint": lambda folder: None}
        with patch.multiple(trainer, **redirected):
            yield
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(str(folder))


def finish_saving(trainer: Trainer, output_dir: str | None, pushes: bool) -> None:
    """After a model was saved: record a few of its logits, unless it is part of a checkpoint, and push it."""
    if trainer.checkpointing.staging is None:
        with trainer.sharing.closed():  # one rank calls the model alone there, and stock's logits are wanted
            record(output_dir or trainer.args.output_dir, trainer)
    if trainer.args.push_to_hub and pushes:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def with_our_card(trainer: Trainer) -> AbstractContextManager:
    """Inside the block PEFT writes our card, because its own contains nothing about the run."""
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    # Only PEFT's models have this method; `create` is for the others.
    return patch.multiple(model, create=True, create_or_update_model_card=partial(write_first_card, trainer))


def create_card(trainer: Trainer, model_name: str | None, dataset_name: str | None, tags: Any) -> None:
    """Write the adapter's card from `card_info`; see [`trl_fsdp_qlora.trainers.run.card.card_of`]."""
    if trainer.is_world_process_zero():
        trainer.card_info.dataset = dataset_name or trainer.card_info.dataset
        write_card(trainer, trainer.args.output_dir, model_name, [tags] if isinstance(tags, str) else tags or [])


def _describe_run(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    names = getattr(trainer, "reward_func_names", []), type(trainer).__name__
    return (
        describe_rollouts(trainer.args, model, trainer.train_dataset, *names),
        describe_training(trainer.args, model),
    )
