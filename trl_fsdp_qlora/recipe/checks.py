"""What can be told to be wrong with a recipe's arguments before a weight is loaded."""

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import get_reporting_integration_callbacks, is_deepspeed_zero3_enabled
from trl import ModelConfig, get_peft_config

from ..checkpoints.checkpoints import resolve_resume
from ..prefix_sharing.sharing import CHOICES
from ..run.input_checks import explained_lora_targets
from ..run.nearest import did_you_mean, nearest_path
from .answers import extract_answer
from .arguments import ConfigError, ScriptArguments
from .rewards import get_reward

# Integrations of `report_to` whose package is called otherwise.
_PACKAGES = {"azure_ml": "azureml", "flyte": "flytekit", "kubeflow": "kubeflow"}

# Of TRL 1.16, which looks at the name in the first step only.
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")

# Smallest value of a count; `None` stands for a limit that is not set.
_SCRIPT_COUNTS = {
    "held_out": (0, "0 reads another split"),
    "validation": (0, "0 takes none out"),
    "eval_problems": (1, "leave it out for all of them"),
    "accuracy_steps": (0, "0 measures before and after only"),
    "accuracy_samples": (0, "0 decodes greedily only"),
    "accuracy_batch_size": (1, "try 64"),
}
_TRAINING_COUNTS = {
    "per_device_train_batch_size": (1, "a multiple of num_generations keeps groups whole"),
    "gradient_accumulation_steps": (1, "1 does not accumulate"),
    "num_generations": (1, "try 8"),
    "num_iterations": (1, "1 uses each completion once"),
    "max_completion_length": (1, "try 256"),
    "save_steps": (0, "try 500"),
}


def check_counts(values: Any, limits: dict[str, tuple[int, str]]) -> None:
    """Refuse counts of `values` below their limits.

    Args:
        values: object with the fields named in `limits`.
        limits: field -> (smallest value, what to write instead).

    Raises:
        ConfigError: names the field.
    """
    for name, (smallest, instead) in limits.items():
        value = getattr(values, name, None)
        if value is not None and value < smallest:
            raise ConfigError(f"{name}={value} must be at least {smallest}; {instead}")


def check_script(script: ScriptArguments) -> None:
    """Refuse counts, rewards, an answer format or a template that cannot be used.

    Raises:
        ConfigError: names the field, the value and the known ones.
    """
    check_counts(script, _SCRIPT_COUNTS)
    if script.max_train_seconds is not None and not script.max_train_seconds > 0:
        raise ConfigError(f"max_train_seconds={script.max_train_seconds} must be positive; leave it out for no limit")
    if not script.rewards:
        raise ConfigError("rewards is empty; set rewards: [exact_answer]")
    try:
        extract_answer("", script.answer_format)
        for name in script.rewards:
            get_reward(name, script.answer_format)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if "{question}" not in script.prompt_template:
        raise ConfigError(f"prompt_template={script.prompt_template!r} has no {{question}} in it")


def check_training(config: Any, model: ModelConfig) -> None:
    """Refuse settings of a trainer that end in an error, or in nothing, only after the model is loaded.

    Raises:
        ConfigError: names the field and what to write.
    """
    check_counts(config, _TRAINING_COUNTS)
    if config.max_steps == 0 or config.max_steps < -1:
        raise ConfigError(
            f"max_steps={config.max_steps} trains nothing; leave it out for num_train_epochs, or set 1 or more"
        )
    if config.max_steps < 0 and config.num_train_epochs <= 0:
        raise ConfigError(f"num_train_epochs={config.num_train_epochs} trains nothing; set 1 or more, or max_steps")
    _check_numbers(config)
    if config.loss_type not in LOSS_TYPES:
        raise ConfigError(f"loss_type={config.loss_type!r} is not known; use one of {', '.join(LOSS_TYPES)}")
    if config.prefix_sharing not in CHOICES:
        raise ConfigError(f"prefix_sharing={config.prefix_sharing!r} is not known; use one of {', '.join(CHOICES)}")
    if config.prefix_sharing == "flex" and config.device.type != "cuda":
        raise ConfigError(
            f"prefix_sharing='flex' needs a CUDA device, and this run is on {config.device.type}: FlexAttention has no "
            "backward there; use auto, cascade or two_part"
        )
    _check_reporting(config.report_to)
    _check_quantization(model)
    if model.use_peft and model.lora_r < 1:
        raise ConfigError(f"lora_r={model.lora_r} must be at least 1: it is the rank of the adapter; try 16")
    if model.use_peft and not 0 <= model.lora_dropout < 1:
        raise ConfigError(f"lora_dropout={model.lora_dropout} is outside [0, 1); try 0.05")


def _check_numbers(config: Any) -> None:
    if config.learning_rate < 0:
        raise ConfigError(f"learning_rate={config.learning_rate} is negative; try 1.0e-5")
    for name in ("learning_rate", "temperature", "beta"):
        if not math.isfinite(getattr(config, name)):
            raise ConfigError(f"{name}={getattr(config, name)} is not a finite number")
    if config.temperature <= 0:
        raise ConfigError(f"temperature={config.temperature} must be positive: completions are sampled; try 1.0")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p={config.top_p} is outside (0, 1]; 1.0 draws from all tokens")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed={config.seed} is outside 0 to 2**32 - 1; try 42")
    if config.model_init_kwargs is not None and not isinstance(config.model_init_kwargs, dict):
        raise ConfigError(f"model_init_kwargs={config.model_init_kwargs!r} must hold `name: value` lines")


def _check_reporting(report_to: list[str] | str | None) -> None:
    for name in [report_to] if isinstance(report_to, str) else report_to or []:
        if name in ("none", "all"):
            continue
        try:
            get_reporting_integration_callbacks([name])
        except ValueError as error:
            raise ConfigError(f"report_to: {error}") from None
        package = _PACKAGES.get(name, name)
        if not any(map(_installed, (package, "tensorboardX") if name == "tensorboard" else (package,))):
            raise ConfigError(
                f"report_to={name!r} needs a package that is not installed: pip install {package}; or set none"
            )


def _check_quantization(model: ModelConfig) -> None:
    quantized = next((name for name in ("load_in_4bit", "load_in_8bit") if getattr(model, name)), None)
    if quantized is None:
        return
    check_installed("bitsandbytes", f"{quantized}: true")
    if not model.use_peft:
        raise ConfigError(
            f"{quantized}: true trains no weight of the base; add use_peft: true, or leave {quantized} out"
        )


def check_installed(package: str, setting: str) -> None:
    """Raises [`ConfigError`] where `package`, which `setting` needs, is not installed."""
    if not _installed(package):
        raise ConfigError(f"{setting} needs {package}, which is not installed: pip install {package}")


def check_adapter(name: str) -> PeftConfig:
    """The config of the PEFT adapter `name`, in a folder or on the Hub; raises [`ConfigError`] where it is none."""
    path = Path(name)
    if path.is_dir() and not (path / "adapter_config.json").is_file():
        raise ConfigError(f"adapter={name!r} is a folder without adapter_config.json, so no adapter")
    try:
        return PeftConfig.from_pretrained(name)
    except (OSError, ValueError, TypeError) as error:
        where = "" if path.is_dir() else " is not a folder here and"
        raise ConfigError(
            f"adapter={name!r}{where} cannot be loaded: {_first_line(error)}{did_you_mean(nearest_path(path))}"
        ) from error


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def load_tokenizer(
    name: str | None, revision: str | None, chat: bool, field: str = "model_name_or_path"
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`, which is looked at without its weights.

    Raises:
        ConfigError: there is no such model, it has no tokenizer, or no chat template where `chat` needs one.
    """
    if not name:
        raise ConfigError(f"{field} is not set; name a folder or a model on the Hub, e.g. Qwen/Qwen2.5-0.5B-Instruct")
    _model_config(name, revision, field)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
        # Transformers makes an empty one where the folder holds none.
        empty = len(tokenizer) <= len(tokenizer.all_special_ids)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError(f"{field}={name!r} has no tokenizer that can be loaded: {_first_line(error)}") from error
    if empty:
        raise ConfigError(f"{field}={name!r} has no tokenizer; save it there: tokenizer.save_pretrained({name!r})")
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{field}={name!r} has no chat template; set chat: false for prompts as plain text, or take the model's "
            "instruction-tuned version"
        )
    return tokenizer


def _model_config(name: str, revision: str | None, field: str):
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ConfigError(f"{field}={name!r} is an adapter, not a model; name the base that it was trained on")
        raise ConfigError(f"{field}={name!r} is a folder without config.json, so no model{_checkpoints_in(path)}")
    if path.is_file():
        raise ConfigError(f"{field}={name!r} is a file; name the folder that it lies in")
    if not path.exists() and (name.startswith(("/", "./", "../", "~")) or name.count("/") > 1):
        raise ConfigError(
            f"{field}={name!r}: no such folder here, and no Hub id (owner/name){did_you_mean(nearest_path(path))}"
        )
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        where = "" if path.is_dir() else " is not a folder here and"
        raise ConfigError(
            f"{field}={name!r}{where} cannot be loaded: {_first_line(error)}{did_you_mean(nearest_path(path))}"
        ) from error


def _checkpoints_in(path: Path) -> str:
    inside = sorted(folder.parent.name for folder in path.glob("*/config.json"))
    return f"; did you mean {str(path / inside[0])!r}?" if inside else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def lora_config(model: ModelConfig) -> PeftConfig | None:
    """`trl.get_peft_config`, with one target as the list that it was.

    `ModelConfig` unpacks a list of one (for `all-linear`), and PEFT takes a bare string as a regular expression for the
    whole name of a module. A string with the characters of an expression stays one.
    """
    config = get_peft_config(model)
    if (
        config is not None
        and isinstance(config.target_modules, str)
        and re.fullmatch(r"[\w.]+", config.target_modules)
    ):
        config.target_modules = {config.target_modules}
    return config


def check_skeleton(model: ModelConfig) -> None:
    """Refuse an attention implementation that is not there and LoRA targets that match nothing, without weights.

    Not under ZeRO-3, where transformers fills every model that it builds, which one without memory does not survive.

    Raises:
        ConfigError: names the layers that there are.
    """
    if is_deepspeed_zero3_enabled():
        return
    name = model.model_name_or_path
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(name, revision=model.model_revision)
        try:
            skeleton = AutoModelForCausalLM.from_config(config, attn_implementation=model.attn_implementation)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"model_name_or_path={name!r} cannot be built: {_first_line(error)}") from error
        peft_config = lora_config(model)
        if peft_config is None:
            return
        try:
            with explained_lora_targets(skeleton):
                get_peft_model(skeleton, peft_config)
        except ValueError as error:
            raise ConfigError(f"lora_target_modules: {error}") from None


def check_recipe(script: ScriptArguments, config: Any, model: ModelConfig) -> PreTrainedTokenizerBase:
    """All of the above for a recipe that trains.

    Returns:
        The model's tokenizer, which was looked at.

    Raises:
        ConfigError: names the field, the value and what to write.
        trl_fsdp_qlora.run.errors.CheckpointError: there is nothing to resume from.
    """
    check_script(script)
    check_training(config, model)
    if config.resume_from_checkpoint:
        resolve_resume(config.output_dir, config.resume_from_checkpoint)
    tokenizer = load_tokenizer(model.model_name_or_path, model.model_revision, script.chat)
    check_skeleton(model)
    return tokenizer
