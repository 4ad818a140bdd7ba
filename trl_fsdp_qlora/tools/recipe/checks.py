"""Checks of a recipe's arguments before a weight is loaded, and the code of the user's own that they name."""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftConfig, get_peft_model
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.integrations import INTEGRATION_TO_CALLBACK, is_deepspeed_zero3_enabled
from transformers.integrations.integration_utils import get_available_reporting_integrations
from trl import ModelConfig, get_peft_config

from ...compat import trl as compat
from ...compat import trl_rollouts
from ...compat.transformers import model_class
from ...errors import did_you_mean, mistyped_path
from ...fsdp2_qlora.launch_checks import is_fsdp_launch
from ...prefix_sharing.sharing import CHOICES
from ...trainers.saving.checkpoints import resolve_resume
from ...trainers.starting.input_checks import check_processes, language_model_only, mistakes
from ...utils.plain import counted
from ..data.import_path import is_missing_path, load_function
from ..data.rewards import get_reward
from ..evaluation.measurement import Agent, Judge, Measurement
from ..publishing.adapted_base import TOKENIZER, has_own
from .arguments import ConfigError, ScriptArguments

OWN_REWARD = "environment"  # the name in `rewards` of the environment's own `get_reward`


class UserCode(NamedTuple):
    """What a recipe names of code: its rewards, and functions and classes of the user's own, imported.

    Attributes:
        rewards: by name; that of the environment itself is not among them.
        judge: what decides whether a measured answer is right; `None` compares answers.
        agent: the tools and the environment, if there are any.
        tool_format: changes a tokenizer so that its chat template knows tools.
    """

    rewards: list[Callable]
    judge: Judge | None
    agent: Agent | None
    tool_format: Callable[[PreTrainedTokenizerBase], PreTrainedTokenizerBase]


def user_code(script: ScriptArguments, settings: Mapping[str, object] | None = None) -> UserCode:
    """Import what `script` names; `settings` may have `tool_timeout` and `history`.

    Raises:
        UserError: an import path leads nowhere, a reward is unknown, the environment has no `reset`, or it has no
            `get_reward` although `rewards` names it.
    """
    rewards = [get_reward(name, script.answer_format) for name in script.rewards if name != OWN_REWARD]
    paths = (script.accuracy_function, script.tool_format, script.environment, *script.tools)
    functions = {path: load_function(path) for path in filter(None, paths)}
    judge = None
    if script.accuracy_function:
        judge = Judge(functions[script.accuracy_function])
    tool_format = functions.get(script.tool_format, _as_it_is)
    environment = functions.get(script.environment)
    owns_reward = OWN_REWARD in script.rewards
    if not script.tools and script.environment is None:
        if owns_reward:
            raise ConfigError(f"rewards: {OWN_REWARD} is an environment's get_reward, and no environment is set")
        return UserCode(rewards, judge, None, tool_format)
    methods = ("reset", "get_reward") if owns_reward else ("reset",)
    for method in methods:
        if environment is not None and not hasattr(environment, method):
            raise ConfigError(f"environment={script.environment!r} has no method {method}")
    if not script.chat:
        raise ConfigError("tools and environments are shown to the model by its chat template; leave chat: false out")
    tools = [functions[path] for path in script.tools]
    settings = settings or {}
    timeout = settings.get("tool_timeout")
    history = settings.get("history") or "append"
    agent = Agent(tools, environment, owns_reward, timeout, history)
    return UserCode(rewards, judge, agent, tool_format)


def _as_it_is(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The `tool_format` of a recipe that names none."""
    return tokenizer


def check_tool_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a chat template that TRL would refuse, or whose calls TRL could not read, before a weight is loaded."""
    hint = "name a function in tool_format that gives it one, for one examples/agents/calculator.py:json_calls"
    if not compat.supports_tool_calling(tokenizer):
        raise ConfigError(f"the chat template of {name!r} knows no tools; {hint}")
    try:
        trl_rollouts.with_response_schema(tokenizer)
    except ValueError as error:
        raise ConfigError(f"TRL does not know how {name!r} writes its calls; {hint}") from error


def check_training(config: TrainingArguments, model: ModelConfig) -> None:
    """Refuse values that can only be a mistake, or that would end in an error after the model is loaded.

    The [`ConfigError`] has the line to write.
    """
    lines = [*mistakes(config), *mistakes(model)]
    if lines:
        raise ConfigError(lines[0])
    if config.save_strategy == "steps" and not config.save_steps > 0:
        raise ConfigError(f"save_steps={config.save_steps} saves nothing; save_strategy: no leaves checkpoints out")
    settings = vars(config)  # not every trainer has every field
    check_loss(config)
    check_reports(config.report_to)
    if settings.get("use_liger_kernel"):
        check_installed("liger_kernel", "use_liger_kernel: true", "liger-kernel")
    if settings.get("token_selection") == "all" and settings.get("token_selection_rate") is not None:
        rate = settings["token_selection_rate"]
        raise ConfigError(f"token_selection_rate={rate} needs token_selection: s_grpo, uniform or prefix_cut")
    prefix_sharing = settings.get("prefix_sharing", "auto")
    if prefix_sharing not in CHOICES:
        choices = ", ".join(CHOICES)
        raise ConfigError(f"prefix_sharing={prefix_sharing!r} is not known; use one of {choices}")
    if settings.get("use_vllm"):
        check_installed("vllm", "use_vllm: true")
    if model.load_in_4bit:
        check_installed("bitsandbytes", "load_in_4bit: true")
    elif model.load_in_8bit:
        check_installed("bitsandbytes", "load_in_8bit: true")


def check_launch_environment(config: TrainingArguments, model: ModelConfig) -> None:
    """Refuse a launch whose processes would not know of each other, or that would not write the trained model."""
    check_processes(config.world_size)
    # An adapter is gathered with any type. Transformers' `save_model` writes other weights only as a full state dict.
    version = os.environ.get("FSDP_VERSION")
    default = "SHARDED_STATE_DICT" if version == "2" else "FULL_STATE_DICT"
    state_dict_type = os.environ.get("FSDP_STATE_DICT_TYPE", default)
    if is_fsdp_launch() and not model.use_peft and "FULL" not in state_dict_type:
        raise ConfigError(
            f"fsdp_state_dict_type: {state_dict_type} without an adapter: the trained model is not written at the "
            "run's end. In the accelerate config set it to FULL_STATE_DICT"
        )


def check_installed(module: str, setting: str, package: str | None = None) -> None:
    """Raises [`ConfigError`] if `module`, which `setting` needs, is not installed; `package` is its name for pip."""
    is_installed = importlib.util.find_spec(module) is not None
    if not is_installed:
        name = package or module
        raise ConfigError(f"{setting} needs {name}, which is not installed: pip install {name}")


def check_loss(config: TrainingArguments) -> None:
    """Refuse a `loss_type` that TRL's trainer does not know; TRL itself refuses it in the first step."""
    stock_config = getattr(config, "STOCK", type(config)).__name__
    stock_trainer = stock_config.replace("Config", "Trainer")
    its_words = compat.words_of(stock_trainer)
    names = vars(config).get("loss_type") or []
    if isinstance(names, str):
        names = [names]
    for name in names:
        if its_words and name not in its_words:
            hint = did_you_mean(name, its_words, 0.75)
            raise ConfigError(
                f"loss_type={name!r} is none that {stock_config} knows{hint}; its documentation lists them"
            )


def check_reports(report_to: Sequence[str] | str) -> None:
    """Refuse a tracker that transformers does not know, or whose package is not installed."""
    names = [report_to] if isinstance(report_to, str) else report_to
    usable = ("none", "all", *get_available_reporting_integrations())
    for name in names:
        if name in usable:
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            all_names = ", ".join(INTEGRATION_TO_CALLBACK)
            hint = did_you_mean(name, INTEGRATION_TO_CALLBACK) or f"; known: {all_names}"
            raise ConfigError(f"report_to={name!r} is no tracker that transformers knows{hint}")
        raise ConfigError(f"report_to: {name} needs its package, which is not installed; install it, or set none")


def check_reward_weights(script: ScriptArguments, config: TrainingArguments) -> None:
    """Refuse `reward_weights` that are not one for each reward."""
    weights = vars(config).get("reward_weights")
    if weights is None or len(weights) == len(script.rewards):
        return
    names = ", ".join(script.rewards)
    raise ConfigError(
        f"reward_weights has {counted(len(weights), 'weight')} for {counted(len(script.rewards), 'reward')} "
        f"({names}); give each its own"
    )


def check_adapter(name: str) -> PeftConfig:
    """The config of the PEFT adapter `name`, in a folder or on the Hub; raises [`ConfigError`] if it is no adapter."""
    if Path(name).is_dir() and not Path(name, "adapter_config.json").is_file():  # PEFT would ask the Hub for minutes
        raise ConfigError(f"adapter={name!r} cannot be loaded: the folder has no adapter_config.json")
    return _loaded(PeftConfig, name, None, "adapter")


def _loaded(
    auto_class: type, name: str | None, revision: str | None, field: str
) -> PeftConfig | PretrainedConfig | PreTrainedTokenizerBase:
    """What `auto_class` reads of the model or adapter `name`; a [`ConfigError`] names the recipe's `field`."""
    if not name:
        raise ConfigError(f"{field} is not set; name a folder or a model on the Hub")
    if is_missing_path(name):
        hint = mistyped_path(name)
        if not hint and field == "model_name_or_path":
            hint = "; the head of a recipe has the command that makes its base"
        raise ConfigError(f"{field}={name!r}: there is no such folder{hint}")
    try:
        return auto_class.from_pretrained(name, revision=revision)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError(f"{field}={name!r} cannot be loaded: {_first_line(error)}{mistyped_path(name)}") from error


def check_weights(name: str) -> None:
    """Raises [`ConfigError`] if a file of weights in the folder `name` is cut off; only the files' heads are read."""
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise ConfigError(f"the weights of {name} cannot be loaded: {path.name}: {error}") from error


def read_config(name: str | None, revision: str | None = None, field: str = "model_name_or_path") -> PretrainedConfig:
    """The config of a model, in a folder or on the Hub, without its weights; `field` has its name in a recipe.

    If the config cannot be read, a [`ConfigError`] has the reason.
    """
    return _loaded(AutoConfig, name, revision, field)


def load_tokenizer(
    name: str | None,
    revision: str | None,
    chat: bool,
    field: str = "model_name_or_path",
    adapter: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`, or of the `adapter` on it if that has its own; no weights are read.

    Raises:
        ConfigError: there is no such model, it has no tokenizer, a file of its weights is cut off, or `chat` needs a
            chat template and there is none.
    """
    if name and Path(name, "adapter_config.json").is_file() and not Path(name, "config.json").is_file():
        raise ConfigError(
            f"{field}={name!r} is an adapter, not a model. Merge it first, and name the merged model: trl-fsdp-qlora "
            f"merge --adapter {name} --output {name.rstrip('/')}-merged"
        )
    _loaded(AutoConfig, name, revision, field)
    check_weights(name)
    if has_own(adapter, TOKENIZER):
        name, revision, field = adapter, None, "adapter"
    tokenizer = _loaded(AutoTokenizer, name, revision, field)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # Transformers makes these up if the folder has no tokenizer
        raise ConfigError(f"{field}={name!r} has no tokenizer; save it there: tokenizer.save_pretrained({name!r})")
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"{field}={name!r} has no chat template; set chat: false, or take the tuned version")
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def lora_config(model: ModelConfig) -> PeftConfig | None:
    """`trl.get_peft_config`, with a single target as the list that the user wrote.

    `ModelConfig` unpacks a list of one target. PEFT takes a bare string as a regular expression for a module's whole
    name.
    """
    config = get_peft_config(model)
    targets = None if config is None else config.target_modules
    if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets):
        config.target_modules = {targets}
    return config


def build_bare(name: str, config: PretrainedConfig, **options: object) -> nn.Module:
    """Build the class that TRL loads for `config` on the meta device; `options` go to `from_config`.

    Raises:
        ConfigError: it cannot be built, for example if the attention implementation is not installed.
    """
    try:
        with torch.device("meta"):
            return model_class(config).from_config(config, **options)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model_name_or_path={name!r} cannot be built: {_first_line(error)}") from error


def with_adapter(bare: nn.Module, model: ModelConfig) -> nn.Module:
    """A model of [`build_bare`] with the adapter that `model` asks for, if any.

    Raises:
        ConfigError: the adapter's targets match nothing.
    """
    adapter = lora_config(model)
    try:
        with torch.device("meta"):
            return bare if adapter is None else get_peft_model(bare, language_model_only(adapter, bare))
    except ValueError as error:
        layers = {name.rpartition(".")[2] for name, layer in bare.named_modules() if isinstance(layer, nn.Linear)}
        raise ConfigError(
            f"lora_target_modules: {_first_line(error)}. This model has {', '.join(sorted(layers))}; all-linear takes "
            "all but the head"
        ) from None


def wrapped_here() -> tuple[str, ...]:
    """The classes that FSDP wraps in this process, by the accelerate config's `fsdp_transformer_layer_cls_to_wrap`."""
    if not is_fsdp_launch():
        return ()
    names = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    return tuple(filter(None, names.split(",")))


def check_wrapped(bare: nn.Module, names: Sequence[str]) -> None:
    """Refuse classes to wrap of which `bare` has no module; accelerate refuses them when training begins."""
    classes = {type(module).__name__ for module in bare.modules()}
    for name in names:
        if name not in classes:
            to_wrap = ", ".join(sorted(bare._no_split_modules or ()))
            raise ConfigError(
                f"fsdp_transformer_layer_cls_to_wrap: this model has no {name}, but {to_wrap}; in the accelerate "
                "config write that, or leave the line out"
            )


def check_model(model: ModelConfig, wrapped: Sequence[str] = ()) -> None:
    """Build the model that a recipe trains, with its adapter and without data or quantization.

    `wrapped` are names of the classes that FSDP is to wrap.

    It skips ZeRO-3, under which transformers fills every model that it builds, and classes that TRL loads by name.

    Raises:
        ConfigError: see [`build_bare`], [`check_wrapped`] and [`with_adapter`].
    """
    if is_deepspeed_zero3_enabled():
        return
    config = read_config(model.model_name_or_path, model.model_revision)
    # `in` imports only the class of this config.
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        bare = build_bare(model.model_name_or_path, config, attn_implementation=model.attn_implementation)
        check_wrapped(bare, wrapped)
        with_adapter(bare, model)


@dataclass(frozen=True)
class Recipe:
    """A recipe that can be run: its parsed arguments, and what they name that was loaded to check them.

    Attributes:
        script, config, model: the parsed arguments.
        code: rewards, and functions and classes of the user's own.
        tokenizer: the model's; with tools its chat template knows them.
    """

    script: ScriptArguments
    config: TrainingArguments
    model: ModelConfig
    code: UserCode
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def measurement(self) -> Measurement:
        """How accuracy is measured: with the prompts and the limits of the training."""
        settings = vars(self.config)  # not every trainer has every field
        # Trainers that draw no completions have no such field; the scripts of theirs have one for the measurement.
        length = settings.get("max_completion_length") or vars(self.script)["max_completion_length"]
        return Measurement(
            max_new_tokens=length,
            batch_size=self.script.accuracy_batch_size,
            seed=self.config.seed,
            answer_format=self.script.answer_format,
            template_options=settings.get("chat_template_kwargs") or {},
            agent=self.code.agent,
            max_tool_turns=settings.get("max_tool_calling_iterations"),
            judge=self.code.judge,
        )


def check_recipe(
    script: ScriptArguments, config: TrainingArguments, model: ModelConfig, wrapped: Sequence[str] | None = None
) -> Recipe:
    """Run all checks of this module for a recipe that trains.

    `wrapped` are names of classes that FSDP is to wrap, by default those of this launch.

    Raises:
        UserError: the message has the field, the value and the line to write.
    """
    code = user_code(script, vars(config))
    check_training(config, model)
    check_reward_weights(script, config)
    check_launch_environment(config, model)
    if config.resume_from_checkpoint:
        resolve_resume(config.output_dir, config.resume_from_checkpoint, read_contents=False)
    tokenizer = load_tokenizer(model.model_name_or_path, model.model_revision, script.chat)
    if code.agent is not None:
        tokenizer = code.tool_format(tokenizer)
        check_tool_template(tokenizer, model.model_name_or_path)
    check_model(model, wrapped_here() if wrapped is None else wrapped)
    return Recipe(script, config, model, code, tokenizer)
