"""Wrong combinations of accelerate config, quantization and adapter, told before a model is loaded.

Each message names the value, the reason and the line of the accelerate or recipe YAML to change.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

# The oldest versions that this was run with. torch 2.11 is the first that shards integer parameters natively.
FLOORS = {"torch": "2.11", "accelerate": "1.15", "bitsandbytes": "0.50", "peft": "0.21"}


class LaunchError(ValueError):
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


def check_launch(accelerator_state, quantization_config=None, peft_config=None) -> None:
    """Refuse what is known not to work. Cheap; call it before the model is loaded.

    Args:
        accelerator_state: `trainer.accelerator.state` or an `AcceleratorState`; of a plugin that is not there nothing is
            checked.
        quantization_config: `BitsAndBytesConfig` of the run, or `None`.
        peft_config: `LoraConfig` of the run, or `None`.

    Raises:
        LaunchError: with the line to change.
    """
    fsdp = getattr(accelerator_state, "fsdp_plugin", None)
    deepspeed = getattr(accelerator_state, "deepspeed_plugin", None)
    four_bit = getattr(quantization_config, "load_in_4bit", False)
    eight_bit = getattr(quantization_config, "load_in_8bit", False)
    if fsdp is not None:
        _check_fsdp(fsdp, four_bit, eight_bit, peft_config)
    if deepspeed is not None:
        _check_deepspeed(deepspeed, four_bit, eight_bit)


def _check_fsdp(plugin, four_bit: bool, eight_bit: bool, peft_config) -> None:
    if not (four_bit or eight_bit):
        return
    if plugin.fsdp_version != 2:
        raise LaunchError(
            f"fsdp_version is {plugin.fsdp_version} (1 where the accelerate config does not say): FSDP1 flattens weights "
            "into one dtype and cannot shard a quantized base beside an adapter. In the accelerate config, under "
            "fsdp_config, set `fsdp_version: 2`"
        )
    if eight_bit:
        raise LaunchError(
            "load_in_8bit with FSDP2: int8 layers keep statistics that FSDP2 cannot shard. In the recipe set "
            "`load_in_4bit: true` instead of `load_in_8bit: true`, or launch with accelerate_configs/ddp.yaml"
        )
    check_versions()
    if plugin.ignored_modules is not None:
        raise LaunchError(
            f"fsdp_ignored_modules is {plugin.ignored_modules!r}: what is ignored is held whole by every rank. Remove "
            "`fsdp_ignored_modules` from fsdp_config in the accelerate config"
        )
    if peft_config is None:
        raise LaunchError(
            "a 4-bit base without an adapter has nothing to train. In the recipe set `use_peft: true` and "
            "`lora_target_modules: [all-linear]`"
        )
    modules = [*_names(getattr(peft_config, "target_modules", None)), *_names(peft_config.modules_to_save)]
    heads = sorted({name for name in modules if name.split(".")[-1] in ("lm_head", "embed_tokens", "embed_out")})
    if heads:
        raise LaunchError(
            f"{', '.join(heads)} as LoRA target or trained module: FSDP2 shards it in one unit with frozen weights of "
            "another dtype, and log-probabilities are taken from the bare head, past its adapter. In the recipe, leave it "
            "out of `lora_target_modules` and `lora_modules_to_save`; `[all-linear]` does"
        )


def _check_deepspeed(plugin, four_bit: bool, eight_bit: bool) -> None:
    stage = plugin.deepspeed_config.get("zero_optimization", {}).get("stage", 0)
    if stage == 3 and (four_bit or eight_bit):
        raise LaunchError(
            "zero_stage: 3 with a quantized base: ZeRO-3 does not partition the packed weights, so every rank keeps the "
            "whole base, and reloading the adapter was never verified. Launch with accelerate_configs/fsdp2_qlora.yaml "
            "(shards the base), or set `zero_stage: 2` in the accelerate config (every rank keeps the base)"
        )


def _names(modules) -> list[str]:
    if modules is None:
        return []
    return [modules] if isinstance(modules, str) else list(modules)
