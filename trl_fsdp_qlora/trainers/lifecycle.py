"""`EfficientTraining`: the parts around the loss that every trainer of this package shares.

They are phase timing, whole checkpoints, model cards and the start-up block.
"""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoints.checkpoints import WholeCheckpoints, describe_rollouts, describe_training
from ..checkpoints.stopping import stopping_after_step
from ..compat.older_gpus import casting_wide_sums
from ..compat.peft import adapted_parts
from ..compat.transformers import take_checkpointing_options_apart
from ..compat.trl import counts_experts
from ..cpu.linear import fast_linears
from ..fsdp2_qlora.loading import experts_in_16_bit, keep_plain_kernel
from ..prefix_sharing.sharing import causal_language_model
from ..publishing.card import CardInfo, write_card, write_first_card
from ..publishing.logits import record
from ..run.plain import counted
from ..telemetry.phases import PhaseTimer, TelemetryCallback
from ..telemetry.startup import StartupCallback
from ..telemetry.terminal import print_briefly

logger = get_logger(__name__)


class EfficientTraining:
    """Mixin for a trainer's timing, checkpoints, card and start-up block.

    In a trainer's bases it stands before [`trl_fsdp_qlora.fsdp2_qlora.trainer.ShardedQLoRAMixin`] and TRL's class.

    - `clock` logs seconds and bytes of each phase as ordinary metrics;
    - `checkpointing` writes whole checkpoints and ignores unfinished ones;
    - `card_info` holds the entries of the card that a trainer cannot know by itself.
    """

    # Default for a trainer that was built without `__init__`, as in some tests of TRL.
    clock = PhaseTimer(torch.device("cpu"), "off")
    # What continues a run that was stopped; a recipe has a command.
    go_on = 'trainer.train(resume_from_checkpoint="auto")'

    def begin(self, method: str) -> None:
        """Set up clock, checkpoints and card after TRL's constructor. `method` is the method's name on the card."""
        keep_plain_kernel(self.model)
        take_checkpointing_options_apart(causal_language_model(self.model))
        self.aux_loss_enabled = self.aux_loss_enabled and counts_experts(self.model.config.get_text_config())
        self.card_info = CardInfo(method=method)
        self.checkpointing = WholeCheckpoints(self.args, self.accelerator, self._describe_run)
        self.clock = PhaseTimer(self.accelerator.device, self.args.phase_metrics)
        self.telemetry = TelemetryCallback(self.clock, lambda: self._metrics["train"])
        self.add_callback(self.telemetry)

    def report_start(self, tokenize=None) -> None:
        """Register the start-up block, which shows the first prompt as `tokenize` returns it.

        A trainer's constructor calls this method last.
        """
        self.startup = StartupCallback(self.features, tokenize, lambda: self.sharing.figures)
        self.add_callback(self.startup)
        print_briefly(self)

    # --- phases ------------------------------------------------------------------------------------------------------

    def training_step(self, model, *args, **kwargs):
        with self.clock.phase("forward_backward"), fast_linears(self.model), casting_wide_sums():
            return super().training_step(model, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        with self.clock.phase("evaluate"), fast_linears(self.model):
            return super().evaluate(*args, **kwargs)

    def log(self, logs, *args, **kwargs):
        self.telemetry.flush()
        return super().log(logs, *args, **kwargs)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as [`transformers.Trainer.train`]; `"auto"` resumes from the newest whole checkpoint, if any.

        SIGINT and SIGTERM end it between two steps, see [`trl_fsdp_qlora.checkpoints.stopping.stopping_after_step`].

        Raises:
            trl_fsdp_qlora.checkpoints.disk.CheckpointError: see
            [`trl_fsdp_qlora.checkpoints.checkpoints.WholeCheckpoints`].
        """
        with self.checkpointing.alone(), stopping_after_step(self, self.go_on):
            return super().train(self.checkpointing.resume_from(resume_from_checkpoint), *args, **kwargs)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *further):
        begins = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *further)
        # Transformers checks only after a step whether a run is over, so a finished run would do one more step.
        if self.state.global_step < max_steps:
            return begins
        steps = counted(self.state.global_step, "step")
        finished = f"the run in {self.args.output_dir} is finished ({steps}): nothing is trained"
        logger.warning(f"{finished}. Raise max_steps or num_train_epochs, or set another output_dir")
        return num_train_epochs, 0

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.checkpointing.writing(folder, self.state, self._rollouts_to_keep()):
            super()._save_checkpoint(model, trial)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _rollouts_to_keep(self) -> dict[str, Any] | None:
        """The completions that this rank has drawn and not yet used; `None` if a trainer draws none."""
        return None

    def _get_output_dir(self, trial):
        return str(self.checkpointing.staging or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder):
        if self.checkpointing.staging is None:  # a checkpoint is pushed once it is whole
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call=True)
        if self.checkpointing.staging is None:
            record(output_dir or self.args.output_dir, self)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir=None, state_dict=None):
        model = self.accelerator.unwrap_model(self.model)
        # PEFT's own card contains nothing about the run.
        # Only PEFT's models have this method; `create` is for the others.
        with patch.multiple(model, create=True, create_or_update_model_card=partial(write_first_card, self)):
            super()._save(output_dir, state_dict)

    def _describe_run(self):
        model = self.accelerator.unwrap_model(self.model)
        names = getattr(self, "reward_func_names", []), type(self).__name__
        return describe_rollouts(self.args, model, self.train_dataset, *names), describe_training(self.args, model)

    # --- the start-up block and the card -----------------------------------------------------------------------------

    def features(self) -> list[tuple[str, str]]:
        """Lines of the start-up block under `"on"`, `"off"` (by a setting) or `"as stock TRL"` (with the reason)."""
        in_16_bit = experts_in_16_bit(self.model)
        return [
            self.sharing.feature(),
            *([] if self.base_bytes is None else [("on", str(self.base_bytes))]),
            *([] if in_16_bit is None else [("as stock TRL", in_16_bit)]),
            *adapted_parts(self.accelerator.unwrap_model(self.model)),
        ]

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write the adapter's card from `card_info`; see [`trl_fsdp_qlora.publishing.card.card_of`]."""
        if self.is_world_process_zero():
            self.card_info.dataset = dataset_name or self.card_info.dataset
            write_card(self, self.args.output_dir, model_name, [tags] if isinstance(tags, str) else tags or [])
