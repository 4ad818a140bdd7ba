"""The adapter's way into a vLLM engine: which adapters it can serve, and a folder for each version.

vLLM loads a LoRA adapter from a folder. Every version gets a name and a folder of its own: the engine keys its prefix
cache by the adapter's name, so a name that is used twice may answer from the previous policy.
"""

import shutil
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import save_file

from ...errors import UserError
from ...fsdp2_qlora.adapters import gather_adapter
from ...utils.files import written_whole

# What vLLM's reader of adapters takes from a `LoraConfig`.
_READ = {"r", "lora_alpha", "use_rslora", "target_modules"}
# Which layers are adapted, how they are trained, and the source of files. The products of `lora_A` and
# `lora_B` are the same with it.
_CHANGES_NO_PRODUCT = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core", "runtime_config",
    "eva_config",
}  # fmt: skip
# Others move part of the base's weights into the adapter: an engine that serves the untouched base with such an
# adapter counts that part twice.
_LEAVES_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")
_WHY = {
    "use_dora": "adds a magnitude; use use_dora=False",
    "modules_to_save": "are trained whole",
    "bias": "trains biases; use bias='none'",
    "rank_pattern": "has ranks by module, and vLLM takes one rank of all; leave it out",
    "alpha_pattern": "has scalings by module, and vLLM takes one of all; leave it out",
    "target_parameters": "are adapters of whole parameters, as PEFT makes of `all-linear` on a mixture of experts; "
    "name linear layers: target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']",
    "init_lora_weights": "moves part of the base into the adapter, and vLLM serves the whole base next to it; use "
    "init_lora_weights=True",
}
_SCRATCH = ".adapters-"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's `max_lora_rank` can be


class RolloutError(UserError):
    """Completions could not be drawn from the policy; the message names the change to make."""


def cannot_share(reason: str) -> RolloutError:
    """The error of a run that asks for one base and cannot have it."""
    return RolloutError(f"vllm_share_base: true cannot be: {reason}, or leave vllm_share_base out")


def served_rank(config: LoraConfig) -> int:
    """The `max_lora_rank` under which vLLM serves an adapter. Needs no model, so it can be asked before one is loaded.

    vLLM holds lora_A and lora_B next to linear layers, and silently ignores everything else in a folder. So a field
    that is not known to be read, or to change no product, has to be at its default.

    Raises:
        RolloutError: vLLM cannot serve such an adapter; the message names the line to change.
    """
    reason = _why_not_served(config)
    if reason is not None:
        raise RolloutError(f"vLLM cannot serve this adapter by itself: {reason}")
    return next(served for served in _RANKS if served >= config.r)


def _why_not_served(config: LoraConfig) -> str | None:
    if type(config) is not LoraConfig:
        return f"a {type(config).__name__} is no LoraConfig"
    unread = _fields_that_count(config)
    if unread:
        # The cause before what follows from it: PEFT writes the ranks of adapted parameters into `rank_pattern`.
        name = "target_parameters" if "target_parameters" in unread else next(iter(unread))
        value, default = unread[name]
        unknown = f"is not read by vLLM, which would ignore it; leave it at {default!r}"
        return f"{name}={value!r} {_WHY.get(name, unknown)}"
    targets = config.target_modules or ()
    names = [targets] if isinstance(targets, str) else targets
    if any(layer in name for name in names for layer in ("lm_head", "embed_tokens")):
        return (
            f"target_modules={config.target_modules} has the LM head or the embeddings, for which vLLM's LoRA differs "
            "from PEFT's"
        )
    return f"its rank {config.r} is above {_RANKS[-1]}" if config.r > _RANKS[-1] else None


def _fields_that_count(config: LoraConfig) -> dict[str, tuple[object, object]]:
    """The fields of which vLLM reads nothing and that may change a product, by name: their values and defaults."""
    unread = {}
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        is_default = value == default or not (value or default)
        leaves_base = field.name == "init_lora_weights" and value in _LEAVES_BASE
        if not is_default and not leaves_base and field.name not in _READ | _CHANGES_NO_PRODUCT:
            unread[field.name] = (sorted(value) if isinstance(value, set) else value, default)
    return unread


def check_trained(model: PeftModel) -> None:
    """Refuse a model of which more is trained than vLLM is sent: lora_A and lora_B of one adapter, on linear layers.

    Raises:
        RolloutError: naming what is trained and not sent.
    """
    if len(model.active_adapters) != 1:
        raise RolloutError(
            f"vLLM cannot serve the adapters {model.active_adapters} together: activate one of them, or set "
            "rollout_sync: merge"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_A." not in name and ".lora_B." not in name:
            raise RolloutError(
                f"vLLM is sent the adapter alone, and {name} is trained too: freeze it, or set rollout_sync: merge"
            )
    for layer in (model.get_output_embeddings(), model.get_input_embeddings()):
        if isinstance(layer, BaseTunerLayer):
            raise RolloutError(
                "vLLM cannot serve this adapter by itself: it adapts the LM head or the embeddings, for which vLLM's "
                "LoRA differs from PEFT's. Leave them out of target_modules, or set rollout_sync: merge"
            )


def adapter_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's weights on the CPU under PEFT's file names, on rank 0; `{}` elsewhere. Collective under FSDP2.

    Only adapter shards are gathered, nothing of the base. Under ZeRO-3 call it with the adapter's parameters gathered.
    """
    gathered = gather_adapter(model)
    if not gathered:
        return {}
    weights = get_peft_model_state_dict(
        model, state_dict=gathered, adapter_name=model.active_adapters[0], save_embedding_layers=False
    )
    return {name: tensor.contiguous() for name, tensor in weights.items()}


class AdapterVersions:
    """Folders `<prefix>-v1`, `-v2`, … under a scratch folder in `folder`, each written whole before it has its name.

    The prefix is unique to a run, so that two can share a server. `owns_folder`: `folder` belongs to the output
    folder, in which one run trains at a time, so what killed runs left there is removed.
    """

    def __init__(self, prefix: str, folder: str | Path, owns_folder: bool = False):
        self.prefix = prefix
        self.folder = Path(folder)
        self.owns_folder = owns_folder
        self.root: Path | None = None
        self.bytes = 0

    def publish(self, version: int, weights: dict[str, torch.Tensor], peft_config: LoraConfig) -> Path:
        """Write version `version` and return its folder."""
        self.bytes = sum(tensor.nbytes for tensor in weights.values())
        if self.root is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.owns_folder:
                for leftover in self.folder.glob(f"{_SCRATCH}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            self._scratch = tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self.folder, ignore_cleanup_errors=True)
            self.root = Path(self._scratch.name).resolve()
        folder = self.root / f"{self.prefix}-v{version}"
        with written_whole(folder) as scratch:
            scratch.mkdir()
            save_file(weights, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
            peft_config.save_pretrained(scratch)
        return folder

    def forget_before(self, version: int) -> None:
        """Remove the folders of versions older than `version`."""
        for folder in self.root.glob(f"{self.prefix}-v*"):
            _, _, number = folder.name.rpartition("-v")
            if int(number) < version:
                shutil.rmtree(folder, ignore_errors=True)
