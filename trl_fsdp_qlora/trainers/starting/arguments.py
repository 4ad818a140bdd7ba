"""Prepare a trainer's arguments for TRL: complete the config, check the arguments, load a base that FSDP2 shards."""

from collections.abc import Sized
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedConfig

from ...compat.deepspeed import zero_stage
from ...compat.signatures import parameters_of
from ...compat.transformers import model_name, quantization_of
from ...errors import UserError
from ...fsdp2_qlora import launch_checks
from ...fsdp2_qlora.loading import load_quantized_base
from . import input_checks as checks

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import TrainingArguments
    from transformers.utils.quantization_config import QuantizationConfigMixin

logger = get_logger(__name__)

Config = TypeVar("Config", bound="TrainingArguments")
TrainerArguments = dict[str, Any]  # the arguments of a trainer's constructor, by the names that they have in TRL


def bound_to(stock: type, positional: tuple, named: TrainerArguments, ours: tuple[str, ...] = ()) -> TrainerArguments:
    """The arguments of a constructor call by the names that they have in TRL's trainer `stock`.

    `ours` are names of arguments that this package's trainer takes in addition.

    Raises:
        TypeError: there is no such argument, or one was given twice.
        UserError: there is no model.
    """
    names = parameters_of(stock, "__init__")
    for name in named:
        if name not in names and name not in ours:
            hint = ": the reference is made of `model` itself, and beta weighs it" if name == "ref_model" else ""
            raise TypeError(f"{stock.__name__} has no argument {name!r}{hint}")
    if len(positional) > len(names):
        raise TypeError(f"{stock.__name__} takes {len(names)} arguments by their places, and got {len(positional)}")
    by_place = dict(zip(names, positional, strict=False))
    twice = by_place.keys() & named.keys()
    if twice:
        raise TypeError(f"{stock.__name__} got {', '.join(sorted(twice))} twice")
    call = by_place | named
    if call.get("model") is None:
        raise UserError("model is None, or was left out: give the name of a model, a folder, or a model")
    return call


def adapter_and_base(call: TrainerArguments) -> "tuple[PeftConfig | None, QuantizationConfigMixin | dict | None]":
    """The config of the adapter to train, and that of the base's quantization; `None` if there is none."""
    model = call["model"]
    peft_config = call.get("peft_config")
    args = call.get("args")
    if isinstance(model, str):
        options = getattr(args, "model_init_kwargs", None) or {}
        stored = options.get("quantization_config")
        if stored is None and getattr(args, "use_vllm", False):  # without vLLM nothing depends on the checkpoint
            # If the checkpoint is missing or unreadable, loading it later raises the full error.
            with suppress(OSError, ValueError):
                stored = PreTrainedConfig.get_config_dict(model, **options)[0].get("quantization_config")
    else:
        if peft_config is None and is_peft_model(model):
            peft_config = model.peft_config[model.active_adapters[0]]
        stored = _stored_with(model)
    return peft_config, call.get("quantization_config") or stored


def _stored_with(model: nn.Module | str) -> "QuantizationConfigMixin | dict | None":
    """How the weights of a model object are quantized; `None` for a model's name, and if they are not."""
    return quantization_of(model.config) if isinstance(model, nn.Module) else None


def config_or_default(
    cls: type[Config], args: "TrainingArguments | None", model: nn.Module | str, suffix: str
) -> Config:
    """`args`; if it is `None`, a config of class `cls` with a folder that is named after `model` and the method.

    Raises:
        TypeError: `args` is of another class.
    """
    if args is None:
        return cls(f"{model_name(model).rstrip('/').split('/')[-1]}-{suffix}")
    if not isinstance(args, cls):
        raise TypeError(f"{suffix} needs args of class {cls.__name__}; got {type(args).__name__}")
    return args


def completed(call: TrainerArguments, cls: type, suffix: str) -> TrainerArguments:
    """A trainer's arguments with a complete config of `cls`. Logs a warning for numbers that can only be a mistake.

    Raises:
        UserError: the config is of another trainer, or a number in it is text; the dataset has no rows; several
            processes were launched, and each of them believes that it is the only one.
    """
    model = call["model"]
    config = call.get("args")
    if config is not None and not isinstance(config, cls.STOCK):
        raise UserError(f"args is a {type(config).__name__}; for {suffix} make a {cls.__name__} of the same fields")
    args = cls.complete(config) or config_or_default(cls, None, model, suffix)
    for item in fields(args):
        value = vars(args)[item.name]
        if item.type is float and isinstance(value, str):
            raise UserError(f"{item.name}={value!r} is text, and a number is needed: write {item.name}={value}")
    dataset = call.get("train_dataset")
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise UserError("the training dataset has no rows")
    for line in checks.mistakes(args):
        logger.warning(line)  # not an error, because TRL accepts these values
    revision = (args.model_init_kwargs or {}).get("revision")
    peft_config = checks.language_model_only(call.get("peft_config"), model, revision, dataset)
    checks.check_processes(args.world_size)
    return {**call, "args": args, "peft_config": peft_config}


def check_prompts(call: TrainerArguments, needs_prompt: bool = True) -> None:
    """Refuse a dataset for which a trainer cannot draw completions, see [`checks.check_dataset`]."""
    args = call["args"]
    dataset = call.get("train_dataset")
    if dataset is None:
        return
    checks.check_dataset(dataset, args.generation_batch_size // args.num_generations, needs_prompt)
    if needs_prompt and call.get("rollout_func") is None:  # which may read prompts of any type
        checks.check_texts(dataset, "prompt")


def check_pairs(call: TrainerArguments) -> None:
    """Refuse a dataset without preference pairs, and a reference model by its name, which TRL does not load."""
    dataset = call.get("train_dataset")
    if dataset is not None:
        checks.check_pairs(dataset)
    reference = call.get("ref_model")
    if isinstance(reference, str):
        raise UserError(
            f"ref_model={reference!r} is a name, and DPO takes a model: load it by from_pretrained, or leave it out "
            "(with an adapter the reference is the base without it)"
        )


def check_rewards(call: TrainerArguments) -> None:
    """Refuse what is no reward, before the policy is loaded.

    Raises:
        UserError: the name of a model that cannot be loaded, or something that cannot be called.
    """
    rewards = call.get("reward_funcs")
    for reward in rewards if isinstance(rewards, list) else [rewards]:
        if isinstance(reward, str):
            try:
                PreTrainedConfig.get_config_dict(reward)
            except OSError:
                raise UserError(
                    f"reward_funcs has {reward!r}, and there is no such reward model: give the function itself"
                ) from None
        elif reward is not None and not callable(reward):
            raise UserError(
                f"reward_funcs has {reward!r} ({type(reward).__name__}): give a function, a reward model or its name"
            )


def with_base_loaded(call: TrainerArguments, needs_reference: bool) -> TrainerArguments:
    """A trainer's arguments, with the base loaded if it is named, in 4 bits and sharded by FSDP2.

    Args:
        needs_reference: whether the loss needs a reference model. Without an adapter to switch off, the reference is
            a second model next to the policy.

    Raises:
        ValueError: a wrong combination of launch and model.
    """
    model = call["model"]
    args = call["args"]
    quantization_config = call.get("quantization_config")
    options = args.model_init_kwargs or {}
    stored = _stored_with(model)
    launch_checks.check_launch(
        quantization_config or options.get("quantization_config") or stored,
        zero_stage(args.deepspeed_plugin),
    )
    launch_checks.check_reference(needs_reference and adapter_and_base(call)[0] is None)
    is_four_bit = getattr(quantization_config, "load_in_4bit", False)
    if isinstance(model, str) and launch_checks.is_fsdp2_launch() and is_four_bit:
        # The base is loaded once per node, in TRL's default dtype, so that a script computes the same numbers.
        options = {"dtype": "float32", **options}
        model = load_quantized_base(model, quantization_config, **options)
        quantization_config = None
    return {**call, "model": model, "quantization_config": quantization_config}
