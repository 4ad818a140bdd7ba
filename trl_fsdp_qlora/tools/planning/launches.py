"""The launch of a run: the ranks, and how they share the model; from an accelerate config or from this process.

Each key of `fsdp_config` and `parallelism_config` that changes the bytes of a rank is read here. A launch that has a
key whose bytes are not counted is refused by name.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import BaseConfig, load_config_from_file
from accelerate.utils import DeepSpeedPlugin, str_to_bool
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

from ...errors import UserError
from ...utils.resources import accelerate_config

# Types of launches that keep the whole model on each rank.
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA")
# By strategy of FSDP1: whether weights are freed after their forward, and whether a machine has a copy of its own.
_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
_OTHER_PARALLELISM = ("tp_size", "cp_size", "sp_size")

# A part of an accelerate config by key, from its file or from the variables that the launcher exports.
Keys = Mapping[str, str | int | float | bool | list[str] | None]
# Fields of a [`Launch`], by name.
Fields = dict[str, str | int | bool | tuple[str, ...] | None]


@dataclass(frozen=True)
class Launch:
    """The processes of a run, and the way in which they share the model.

    Attributes:
        kind: single, ddp, fsdp1, fsdp2, or zero0 to zero3 of DeepSpeed.
        processes: ranks, one per card, on all machines together.
        machines: number of machines; each has as many ranks.
        offload: what is held in host memory: "optimizer", "all" (weights, gradients and optimizer), or nothing.
        use_cpu: the ranks compute on the host.
        mixed_precision: bf16, fp16 or no; `None` if the accelerate config does not set it.
        replicas: of a sharded launch, how many copies of the model its ranks hold together.
        reshards: whether gathered weights are freed after their forward, and not only after their backward.
        units: what is gathered at once: `None` for a layer, names of classes, a least number of weights, or "model".
        checkpoints: whether FSDP itself checkpoints the layers' activations.
        offloads_checkpoints: whether they wait for the backward in host memory.
        bucket: of DeepSpeed, the number of gradients that are reduced at once; 0 for the square of the hidden size.
    """

    kind: str = "single"
    processes: int = 1
    machines: int = 1
    offload: str = ""
    use_cpu: bool = False
    mixed_precision: str | None = None
    replicas: int = 1
    reshards: bool = True
    units: tuple[str, ...] | int | str | None = None
    checkpoints: bool = False
    offloads_checkpoints: bool = False
    bucket: int = 500_000_000

    @property
    def ranks_per_machine(self) -> int:
        return -(-self.processes // self.machines)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the weights."""
        return self.kind in ("fsdp1", "fsdp2", "zero3")

    @property
    def is_deepspeed(self) -> bool:
        return self.kind.startswith("zero")

    @property
    def ranks_per_copy(self) -> int:
        """The number of ranks that hold one copy of the model together, if it is sharded."""
        return max(1, self.processes // self.replicas)


def read_launch(path: str | None, processes: int | None = None) -> Launch:
    """The launch that an accelerate config describes, with `processes` if given.

    `path` is a file or the name of one of this package's configs; `None` is one machine without sharding.

    Raises:
        UserError: there is no such file or name, accelerate cannot read it, or a value of it is not planned.
    """
    if path is None:
        return Launch("single" if (processes or 1) == 1 else "ddp", processes or 1)
    file = str(path if Path(path).exists() else accelerate_config(path))
    try:
        config = load_config_from_file(file)
        ranks = processes or max(1, int(getattr(config, "num_processes", 1)))
        machines = int(config.num_machines or 1)
        by_size = _without_prefix(config.parallelism_config, "parallelism_config_")
        return Launch(
            processes=ranks,
            machines=machines,
            use_cpu=_is_true(config.use_cpu),
            mixed_precision=_planned_precision(config.mixed_precision),
            **_sharing_of(config, by_size, ranks, machines),
        )
    except UserError as error:
        raise UserError(f"--accelerate_config {path}: {error}") from None
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"--accelerate_config {path} cannot be read: {error}") from None


def fsdp_of_process(machines: int) -> Fields:
    """The fields of the [`Launch`] of FSDP in which this process runs, from what accelerate's launcher exported."""
    sharding = _exported("FSDP_")
    if "transformer_cls_to_wrap" in sharding:  # the only key that the launcher exports under another name
        sharding["transformer_layer_cls_to_wrap"] = sharding["transformer_cls_to_wrap"]
    sizes = _exported("PARALLELISM_CONFIG_")
    return _fsdp(sharding, sizes, machines)


def _exported(prefix: str) -> dict[str, str]:
    """The environment's variables with a prefix, without it, in lower case."""
    values = {}
    for name, value in os.environ.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix)
            values[key.lower()] = value
    return values


def deepspeed_of_file(file: str) -> Fields:
    """The fields of the [`Launch`] of a DeepSpeed config file, as in a recipe's field `deepspeed`.

    Raises:
        UserError: there is no such file, or accelerate cannot read it.
    """
    return _zero({"deepspeed_config_file": file}, "deepspeed")


def deepspeed_of_plugin(plugin: DeepSpeedPlugin) -> Fields:
    """The fields of the [`Launch`] of a run that has this plugin of accelerate's."""
    stage = plugin.zero_stage
    off_device = ("cpu", "nvme")
    offload = ""
    if stage == 3 and plugin.offload_param_device in off_device:
        offload = "all"
    elif stage and plugin.offload_optimizer_device in off_device:
        offload = "optimizer"
    bucket = plugin.get_value("zero_optimization.reduce_bucket_size")
    if bucket is None:
        bucket = Launch.bucket
    elif bucket == "auto":
        bucket = 0
    return {"kind": f"zero{stage}", "offload": offload, "bucket": int(bucket)}


def _sharing_of(config: BaseConfig, sizes: Keys, ranks: int, machines: int) -> Fields:
    """The fields of [`Launch`] that state how ranks share the model, from accelerate's config."""
    kind = config.distributed_type.value
    if kind == "DEEPSPEED":
        return _zero(config.deepspeed_config, "deepspeed_config_file")
    if kind == "FSDP":
        return _fsdp(_without_prefix(config.fsdp_config, "fsdp_"), sizes, machines)
    if kind not in _REPLICATED:
        raise UserError(f"distributed_type: {kind} is not planned")
    return {"kind": "single" if ranks == 1 else "ddp"}


def _zero(content: Keys, field_name: str) -> Fields:
    """The fields of [`Launch`] from a `deepspeed_config`, which may be a file of DeepSpeed's."""
    file = content.get("deepspeed_config_file")
    if file and not Path(file).is_file():
        raise UserError(f"{field_name}: {file}: there is no such file")
    plugin = DeepSpeedPlugin(
        file or "none",
        zero_stage=content.get("zero_stage"),
        offload_optimizer_device=content.get("offload_optimizer_device"),
        offload_param_device=content.get("offload_param_device"),
    )
    return deepspeed_of_plugin(plugin)


def _fsdp(sharding: Keys, sizes: Keys, machines: int) -> Fields:
    """The fields of [`Launch`] from the keys of `fsdp_config`, without their prefix, read as accelerate reads them.

    `sizes` are those of `parallelism_config`.
    """
    for name in _OTHER_PARALLELISM:
        if int(sizes.get(name) or 1) > 1:
            raise UserError(f"{name}: {sizes[name]} is not planned")
    if sharding.get("ignored_modules") not in (None, "", "None"):
        raise UserError(f"fsdp_ignored_modules: {sharding['ignored_modules']} is not planned")
    kind = f"fsdp{int(sharding.get('version') or 1)}"
    replicas = int(sizes.get("dp_replicate_size") or 1)
    if kind == "fsdp2":
        reshards = _is_true(sharding.get("reshard_after_forward"), True)
    else:
        strategy = _strategy(sharding)
        if strategy == "NO_SHARD":  # as DDP, in other buffers
            return {"kind": "ddp"}
        reshards, copy_on_machine = _STRATEGIES[strategy]
        replicas = machines if copy_on_machine else 1
    return {
        "kind": kind,
        "offload": "all" if _is_true(sharding.get("offload_params")) else "",
        "replicas": replicas,
        "reshards": reshards,
        "units": _units(sharding),
        "checkpoints": _is_true(sharding.get("activation_checkpointing")),
        "offloads_checkpoints": _is_true(sharding.get("activation_checkpointing_offload")),
    }


def _strategy(sharding: Keys) -> str:
    """The sharding strategy of FSDP1 by name. Releases of accelerate differ in which of two keys has it."""
    for key in ("sharding_strategy", "reshard_after_forward"):
        name = str(sharding.get(key) or "FULL_SHARD").upper()
        if name.isdigit():
            name = FSDP_SHARDING_STRATEGY[int(name) - 1]
        if name in FSDP_SHARDING_STRATEGY and name != "FULL_SHARD":
            return name
    return "FULL_SHARD"


def _units(sharding: Keys) -> tuple[str, ...] | int | str | None:
    """See [`Launch`]."""
    policy = str(sharding.get("auto_wrap_policy") or "NO_WRAP").upper()
    if policy == "SIZE_BASED_WRAP":
        return int(sharding.get("min_num_params") or 0) or "model"
    if policy != "TRANSFORMER_BASED_WRAP":
        return "model"
    names = sharding.get("transformer_layer_cls_to_wrap") or ()
    if isinstance(names, str):
        names = names.split(",")
    return tuple(name.strip() for name in names) or None


def _planned_precision(value: str | None) -> str | None:
    if value == "fp8":
        raise UserError("mixed_precision: fp8 is not planned")
    return value


def _without_prefix(values: Keys, prefix: str) -> Keys:
    return {name.removeprefix(prefix): value for name, value in values.items()}


def _is_true(value: str | bool | None, default: bool = False) -> bool:
    """A truth value, which a file may have as a text."""
    if value is None:
        return default
    return bool(str_to_bool(str(value)))
