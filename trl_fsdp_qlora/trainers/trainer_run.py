"""`TrainerRun`: starting, saving, loading and logging, the same for every trainer of this package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..compat.older_gpus import casting_wide_sums
from ..compat.peft import card_written_by
from ..compat.signatures import users_code
from ..compat.transformers import take_checkpointing_options_apart
from ..compat.trl import counts_experts, is_tested
from ..compat.trl_seams import METHODS_OF_LOSS
from ..fsdp2_qlora.loading import experts_in_4bit, experts_in_16_bit, keep_plain_kernel
from ..fsdp2_qlora.trainer import ShardedQLoRAMixin
from ..long_rows import tiles as token_tiles
from ..prefix_sharing.sharing import PromptSharing, SharingOptions, causal_language_model, install_sharing
from ..prefix_sharing.status import Status
from ..utils.files import naming_full_disk
from ..utils.plain import counted
from ..utils.threads import fitted_threads
from .reporting.card_info import CardInfo
from .reporting.phases import PhaseTimer, TelemetryCallback
from .reporting.startup import StartupCallback
from .reporting.terminal import print_once
from .saving.checkpoints import Rollouts, Settings, WholeCheckpoints, describe_rollouts, describe_training
from .saving.running import marked_as_running
from .saving.stopping import stopping_after_step
from .starting.same_weights import check_nodes

logger = get_logger(__name__)


class TrainerRun(ShardedQLoRAMixin):
    """Starting, saving, loading and logging of a trainer; put it before TRL's trainer in the bases.

    Attributes:
        clock: measures seconds and bytes of each phase; `telemetry` logs them as ordinary metrics.
        sharing, reference_sharing: the sharing of prompts in the policy and in the reference model, which is `None`
            without a reference model.
        checkpointing: writes whole checkpoints and ignores unfinished ones.
        card_info: the entries of the card that a trainer cannot know by itself.
        startup: prints the start-up block.
        resume_command: what continues a run that was stopped; a recipe has a command.
    """

    method_on_card: str
    resume_command = 'trainer.train(resume_from_checkpoint="auto")'
    own_loss = False  # whether the loss is not TRL's
    runs_as_stock = False
    why_stock: str | None = None  # why it does, or why its loss is computed with every token
    _awaits_comparison = False  # of the first step, on a TRL that was not tested
    sharing: PromptSharing | None = None
    reference_sharing: PromptSharing | None = None

    def __init__(self, **call):
        self.has_environments = call.get("environment_factory") is not None  # of GRPO
        with experts_in_4bit():
            super().__init__(**call)
        check_nodes(self.model, self.accelerator)
        keep_plain_kernel(self.model)
        checkpointing_kwargs = self.args.gradient_checkpointing_kwargs
        take_checkpointing_options_apart(causal_language_model(self.model), checkpointing_kwargs)
        for model in filter(None, (self.model, getattr(self, "ref_model", None))):
            token_tiles.install(model, self.args.mlp_tokens_per_tile)
        self.aux_loss_enabled = self.aux_loss_enabled and counts_experts(self.model.config.get_text_config())
        self.card_info = CardInfo(method=self.method_on_card)
        self.checkpointing = WholeCheckpoints(self.args, self.accelerator, self._describe_run)
        self.clock = PhaseTimer(self.accelerator.device, self.args.phase_metrics)
        self.telemetry = TelemetryCallback(self.clock, lambda: self._metrics["train"])
        self.startup = StartupCallback(self.features, self._tokenize_for_display())
        self._share_prompts()
        if not is_tested():
            from .starting.first_step import is_to_be_compared

            self._awaits_comparison = is_to_be_compared(self)
        self.add_callback(self.telemetry)
        self.add_callback(self.startup)

    def _share_prompts(self) -> None:
        """Share prompts in the policy and in the reference model."""
        options = SharingOptions(
            attention=self.args.prefix_sharing,
            lm_head_kernel=self.args.lm_head_kernel,
            entropy_gradient=self._needs_entropy_gradient(),
        )
        self.sharing = install_sharing(self.accelerator.unwrap_model(self.model), options)
        if self.ref_model is not None:
            self.reference_sharing = install_sharing(self.accelerator.unwrap_model(self.ref_model), options)

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss has a term in the entropy now, which only GRPO's may have."""
        names = ("entropy_coef", "use_adaptive_entropy")
        return any(getattr(self, name, getattr(self.args, name, False)) for name in names)

    @property
    def users_loss(self) -> str | None:
        """The method of the user's own that may read the value of every token, as `Class.method`."""
        return users_code(self, METHODS_OF_LOSS)

    def _needs_entropy_gradient(self) -> bool:
        """Whether a loss may have a term in the entropy: one of the user's own may, too."""
        return self.has_entropy_bonus or self.users_loss is not None

    def _tokenize_for_display(self) -> Callable | None:
        """What tokenizes a prompt for the start-up block; `None` if no prompt is shown."""
        return None

    def _describe_run(self) -> tuple[Settings, Settings]:
        model = self.accelerator.unwrap_model(self.model)
        names = getattr(self, "reward_func_names", []), type(self).__name__
        rollouts = describe_rollouts(self.args, model, self.train_dataset, *names)
        return rollouts, describe_training(self.args, model)

    # --- a run -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as [`transformers.Trainer.train`]; `"auto"` resumes from the newest whole checkpoint, if any.

        A small model on a CPU trains on one thread, see [`trl_fsdp_qlora.utils.threads.fit_threads`].

        SIGINT and SIGTERM end it between two steps, see
        [`trl_fsdp_qlora.trainers.saving.stopping.stopping_after_step`].

        Raises:
            trl_fsdp_qlora.utils.files.CheckpointError: see
            [`trl_fsdp_qlora.trainers.saving.checkpoints.WholeCheckpoints`].
        """
        print_once(self)
        saves = self.args.process_index == 0 and self.args.save_strategy != SaveStrategy.NO
        mark = marked_as_running(self.args.output_dir) if saves else nullcontext()
        with mark, fitted_threads(self.model), stopping_after_step(self, self.resume_command):
            return super().train(self.checkpointing.resume_from(resume_from_checkpoint), *args, **kwargs)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *further):
        begins = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *further)
        if self.state.global_step < max_steps:
            return begins
        # Transformers checks only after a step whether a run is over, so a finished run would do one more step.
        steps = counted(self.state.global_step, "step")
        finished = f"the run in {self.args.output_dir} is finished ({steps}): nothing is trained"
        logger.warning(f"{finished}. Raise max_steps or num_train_epochs, or set another output_dir")
        return num_train_epochs, 0

    def run_as_stock(self, reason: str) -> None:
        """Compute everything as TRL does from now on."""
        self.runs_as_stock = True
        self.why_stock = reason
        for sharing in filter(None, (self.sharing, self.reference_sharing)):
            sharing.status = Status.as_stock(reason)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self._awaits_comparison and self.model.training:
            from .starting.first_step import compare_first_step

            self._awaits_comparison = False
            compare_first_step(self, model, inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, model, *args, **kwargs):
        with self.clock.phase("forward_backward"), casting_wide_sums():
            loss = super().training_step(model, *args, **kwargs)
            self._finish_backward(model)
        return loss

    def _finish_backward(self, model) -> None:
        """Called after the backward of a micro-batch's loss; runs what is left of it if the micro-batch was cut."""

    def evaluate(self, *args, **kwargs):
        print_once(self)
        with self.clock.phase("evaluate"), fitted_threads(self.model):
            return super().evaluate(*args, **kwargs)

    # --- saving ------------------------------------------------------------------------------------------------------

    def _rollouts_to_keep(self) -> Rollouts | None:
        """The completions that this rank has drawn and not yet used; `None` if the trainer draws none."""
        return None

    def _save_checkpoint(self, model, trial):
        with self._writing_checkpoint(trial):
            super()._save_checkpoint(model, trial)

    @contextmanager
    def _writing_checkpoint(self, trial: object) -> Iterator[None]:
        """Inside the block the trainer writes a checkpoint, which gets its name, and is pushed, once it is whole."""
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.checkpointing.writing(folder, self.state, self._rollouts_to_keep()):
            yield
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _get_output_dir(self, trial):
        # A checkpoint is renamed when it is whole.
        staging = self.checkpointing.staging
        return super()._get_output_dir(trial) if staging is None else str(staging)

    def _push_from_checkpoint(self, checkpoint_folder):
        if self.checkpointing.staging is None:  # otherwise the checkpoint has no name yet
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir=None, state_dict=None):
        from .reporting.card import write_first_card

        # PEFT writes our card, because its own contains nothing about the run.
        model = self.accelerator.unwrap_model(self.model)
        write = partial(write_first_card, self)
        with card_written_by(model, write), naming_full_disk(output_dir or self.args.output_dir):
            super()._save(output_dir, state_dict)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write the adapter's card from `card_info`; see [`trl_fsdp_qlora.trainers.reporting.card.card_of`]."""
        from .reporting.card import write_card

        if self.is_world_process_zero():
            self.card_info.dataset = dataset_name or self.card_info.dataset
            write_card(self, self.args.output_dir, model_name, [tags] if isinstance(tags, str) else tags or [])

    # --- logs and the start-up block ---------------------------------------------------------------------------------

    def log(self, logs, *args, **kwargs):
        self.telemetry.flush()
        return super().log(logs, *args, **kwargs)

    def _features_of_method(self) -> list[tuple[str, str]]:
        """Further lines of the start-up block, of this trainer's method."""
        return []

    def features(self) -> list[tuple[str, str]]:
        """Lines of the start-up block under `"on"`, `"off"` (by a setting) or `"as stock TRL"` (with the reason)."""
        in_16_bit = experts_in_16_bit(self.model)
        return [
            self.sharing.feature(),
            *self._features_of_method(),
            token_tiles.describe(self.model, self.args.mlp_tokens_per_tile),
            *([] if self.base_bytes is None else [("on", str(self.base_bytes))]),
            *([] if in_16_bit is None else [("as stock TRL", in_16_bit)]),
        ]
