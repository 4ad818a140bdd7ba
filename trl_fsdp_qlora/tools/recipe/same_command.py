"""A command that is typed again goes on with the run that it began; another command does not overwrite that run."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate import PartialState
from trl import ModelConfig

from ...trainers.run import checkpoints
from ...utils import files as disk
from ...utils.nonfatal import nonfatal
from ...utils.plain import plain
from ...utils.redaction import without_secrets
from .arguments import ScriptArguments

# The arguments of the run in a folder. Transformers uploads nothing that begins with an underscore.
ARGUMENTS = "_arguments.json"
# Fields that say where a run is, how it goes on, how long it is, which process this one is, and whether it prints bars
# (by default TRANSFORMERS_VERBOSITY decides).
_NOT_COMPARED = {
    "output_dir", "resume_from_checkpoint", "max_steps", "num_train_epochs", "local_rank",
    "ddp_local_rank", "run_name", "disable_tqdm", "stage",
}  # fmt: skip


def _arguments(*parts: Any) -> dict[str, Any]:
    """The fields of a recipe's parsed arguments, as plain values without secrets."""
    values = {}
    for part in parts:
        names = [item.name for item in fields(part) if item.init and item.name not in _NOT_COMPARED]
        values.update({name: vars(part).get(name) for name in names})
    return plain(without_secrets(values))


def changed_arguments(script: ScriptArguments, config: Any, model: ModelConfig) -> list[str] | None:
    """The arguments in which the run in `config.output_dir` differs from these, as `name: old -> new`.

    An empty list means that the same command began that run; its length may differ. `None` means that it is not known.
    """
    path = Path(config.output_dir) / ARGUMENTS
    if not path.is_file():
        return None
    try:
        return checkpoints.differences(disk.read_json(path), _arguments(script, config, model))
    except disk.CheckpointError:  # the file is damaged
        return None


def check_output_dir(script: ScriptArguments, config: Any, model: ModelConfig) -> None:
    """Refuse a folder that holds another run, and let a command that began the run in it go on with that run.

    In the second case `config.resume_from_checkpoint` becomes `auto`.

    Raises:
        CheckpointError: see [`~trl_fsdp_qlora.trainers.run.checkpoints.check_output_dir`].
    """
    changed = changed_arguments(script, config, model)
    if changed == [] and config.resume_from_checkpoint is None:
        config.resume_from_checkpoint = "auto"
    checkpoints.check_output_dir(config.output_dir, config.resume_from_checkpoint, changed or ())
    if PartialState().is_main_process:
        with nonfatal("the record of the command's arguments"):
            disk.write_json(Path(config.output_dir) / ARGUMENTS, _arguments(script, config, model))
