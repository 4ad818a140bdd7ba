"""Wrong combinations of accelerate config, quantization and adapter, told before a model is loaded.

Each message names the value, the reason and the line of the accelerate or recipe YAML to change.
"""

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from ..errors import UserError
from .mesh import launch_mesh

# The oldest versions that this was run with. torch 2.12 is the first that shards integer parameters by itself; for 2.11
# see `compat.fsdp.integer_shards`.
FLOORS = {"torch": "2.11", "accelerate": "1.15", "bitsandbytes": "0.50", "peft": "0.21"}


class LaunchError(UserError):
    """The accelerate config, the quantization and the adapter do not go together."""


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Compare the installed versions with the floors that were verified.

    Args:
        installed: version by package; read from the environment by default.

    Raises:
        LaunchError: a package is missing or too old.
    """
    for package, floor in FLOORS.items():
        try:
            found = version(package) if installed is None else installed[package]
        except (PackageNotFoundError, KeyError):
            raise LaunchError(
                f"4-bit training needs {package}>={floor}, which is not installed: pip install '{package}>={floor}'"
            ) from None
        if Version(found.split("+")[0]) < Version(floor):
            raise LaunchError(
                f"{package} {found} is older than {floor}, the oldest version that sharded 4-bit training was verified "
                f"with: pip install '{package}>={floor}'"
            )


def is_fsdp_launch() -> bool:
    """Whether `accelerate launch` was given a config with FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def is_fsdp2_launch() -> bool:
    """Whether the processes of this launch are to share one model by FSDP2."""
    return is_fsdp_launch() and os.environ.get("FSDP_VERSION") == "2" and int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_launch(quantization_config=None, peft_config=None, zero_stage: int | None = None) -> None:
    """Refuse what is known not to work. Reads the environment that `accelerate launch` made of its config.

    Args:
        quantization_config: `BitsAndBytesConfig` of the run, or `None`.
        peft_config: `LoraConfig` of the run, or `None`.
        zero_stage: DeepSpeed's ZeRO stage, or `None` where DeepSpeed is not used.

    Raises:
        LaunchError: with the line to change.
    """
    check_mesh()
    four_bit = getattr(quantization_config, "load_in_4bit", False)
    eight_bit = getattr(quantization_config, "load_in_8bit", False)
    if not (four_bit or eight_bit):
        return
    if is_fsdp_launch():
        _check_fsdp(eight_bit, peft_config)
    if zero_stage == 3:
        raise LaunchError(
            "zero_stage: 3 with a quantized base: ZeRO-3 does not partition the packed weights, so every rank keeps the "
            "whole base, and reloading its adapter was never verified. Launch with "
            "--accelerate_config fsdp2_qlora (shards the base), or set `zero_stage: 2` in the accelerate config "
            "(every rank keeps the base)"
        )


def check_mesh() -> None:
    """Refuse a mesh that does not fit the ranks of this launch, or that this package does not train on.

    Raises:
        LaunchError: with the line to change.
    """
    mesh, ranks = launch_mesh(), int(os.environ.get("WORLD_SIZE", "1"))
    if mesh is None or ranks == 1:
        return
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    where = "In the accelerate config, under parallelism_config, set"
    fitting = f"`parallelism_config_dp_replicate_size: {ranks // per_node}` and `parallelism_config_dp_shard_size: {per_node}`"
    if mesh.others:
        raise LaunchError(
            f"parallelism_config asks for {', '.join(f'{name}_size {size}' for name, size in mesh.others.items())}: bases are "
            f"replicated and sharded here, never cut by tensors or sequences. {where} {fitting}, and the others to 1"
        )
    if mesh.replicate * mesh.shard != ranks:
        raise LaunchError(
            f"a mesh of dp_replicate_size {mesh.replicate} x dp_shard_size {mesh.shard} holds {mesh.replicate * mesh.shard} "
            f"ranks, and this launch has {ranks}. {where} {fitting}"
        )
    if is_fsdp_launch() and mesh.shard == 1:
        raise LaunchError(
            f"dp_shard_size is 1 under FSDP: every rank would keep the whole base. {where} {fitting}, or launch with "
            "--accelerate_config ddp"
        )
    if mesh.replicate > 1 and per_node % mesh.shard and mesh.shard % per_node:
        raise LaunchError(
            f"dp_shard_size {mesh.shard} on nodes of {per_node} ranks: some replicas would lie in one node and others across "
            f"two, and gather their weights over the network. {where} {fitting}"
        )


def check_reference(needs_reference: bool, transformers_version: str | None = None) -> None:
    """Refuse a separate reference model across replicas, or where the other ranks' copy of it would be zeros.

    With rank-0 loading, transformers before 5.23 leaves zeros on the other ranks and counts on a broadcast, which TRL
    does for the policy and not for the reference model.

    Args:
        needs_reference: the trainer will load a reference model of its own (full fine-tuning with a KL term).
        transformers_version: read from the environment by default.

    Raises:
        LaunchError: with the line to change.
    """
    mesh = launch_mesh()
    if needs_reference and is_fsdp2_launch() and mesh is not None and mesh.replicate > 1:
        raise LaunchError(
            f"dp_replicate_size {mesh.replicate} and a reference model of its own: TRL shards that model by itself, and full "
            "fine-tuning on replicas was never verified. Train an adapter (its reference is the base itself), set `beta: 0` "
            f"in the recipe, or in the accelerate config `parallelism_config_dp_replicate_size: 1` and "
            f"`parallelism_config_dp_shard_size: {mesh.replicate * mesh.shard}`"
        )
    found = transformers_version or version("transformers")
    loads_on_rank_0 = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() == "true"
    if needs_reference and is_fsdp2_launch() and loads_on_rank_0 and Version(found) < Version("5.23"):
        raise LaunchError(
            f"transformers {found} with FSDP2, rank-0 loading and a reference model: on all ranks but the first the "
            "reference model would consist of zeros. In the accelerate config, under fsdp_config, set "
            "`fsdp_cpu_ram_efficient_loading: false`, or pip install 'transformers>=5.23', or train an adapter (its "
            "reference is the base itself)"
        )


def _check_fsdp(eight_bit: bool, peft_config) -> None:
    fsdp_version = os.environ.get("FSDP_VERSION", "1")
    if fsdp_version != "2":
        raise LaunchError(
            f"fsdp_version is {fsdp_version} (which is the default): FSDP1 flattens weights into one dtype and cannot "
            "shard a quantized base beside an adapter. In the accelerate config, under fsdp_config, set `fsdp_version: 2`"
        )
    if eight_bit:
        raise LaunchError(
            "load_in_8bit with FSDP2: int8 layers keep statistics that FSDP2 cannot shard. In the recipe set "
            "`load_in_4bit: true` instead of `load_in_8bit: true`, or launch with --accelerate_config ddp"
        )
    check_versions()
    ignored = os.environ.get("FSDP_IGNORED_MODULES")
    if ignored:
        raise LaunchError(
            f"fsdp_ignored_modules is {ignored!r}: what is ignored is held whole by every rank. Remove "
            "`fsdp_ignored_modules` from fsdp_config in the accelerate config"
        )
    targets = _names(getattr(peft_config, "target_modules", None))
    heads = sorted({name for name in targets if name.split(".")[-1] in ("lm_head", "embed_out")})
    if heads:
        raise LaunchError(
            f"{', '.join(heads)} in lora_target_modules: log-probabilities are computed from the head's own weight, past "
            "its adapter, and FSDP2 shards the head in one unit with frozen weights. In the recipe leave it out of "
            "`lora_target_modules`; `[all-linear]` does"
        )


def _names(modules) -> list[str]:
    if modules is None:
        return []
    return [modules] if isinstance(modules, str) else list(modules)
