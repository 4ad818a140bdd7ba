"""The adapter's way into a vLLM engine: which adapters it can serve, and a folder for each version.

vLLM loads a LoRA adapter from a folder. Every version gets a name and a folder of its own: the engine keys its prefix
cache by the adapter's name, so a name that is used twice may answer from the previous policy.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import save_file

from ..checkpoints.disk import written_whole
from ..errors import UserError
from ..fsdp2_qlora.adapters import gather_adapter

# Initialisations that move part of the base's weights into the adapter: an engine that serves the untouched base with
# such an adapter counts that part twice.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
_MEMORY = Path("/dev/shm")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's `max_lora_rank` can be


class RolloutError(UserError):
    """Completions could not be drawn from the policy; the message names the change to make."""


def served_rank(config: LoraConfig) -> int:
    """The `max_lora_rank` under which vLLM serves an adapter. Needs no model, so it can be asked before one is loaded.

    vLLM holds lora_A and lora_B next to linear layers, and silently ignores everything else in a folder.

    Raises:
        RolloutError: vLLM cannot serve such an adapter; the message names the line to change.
    """
    if not isinstance(config, LoraConfig):
        raise RolloutError(f"vLLM cannot serve this adapter by itself: a {type(config).__name__} is no LoraConfig")
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules or ()
    experts = sorted(config.target_parameters or ())
    rank = max([config.r, *(config.rank_pattern or {}).values()])

    adapts_head = any(name in target for target in targets for name in ("lm_head", "embed_tokens"))
    changes_base = str(config.init_lora_weights).lower().startswith(_CHANGES_BASE)
    reasons = (
        (config.use_dora, "use_dora=True adds a magnitude; use use_dora=False"),
        (config.modules_to_save, f"modules_to_save={config.modules_to_save} are trained whole"),
        (config.bias != "none", f"bias={config.bias!r} trains biases; use bias='none'"),
        (
            experts,
            f"target_parameters={experts} are adapters of whole parameters, as PEFT makes of `all-linear` on a "
            "mixture of experts; name linear layers: target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']",
        ),
        (
            adapts_head,
            f"target_modules={config.target_modules} has the LM head or the embeddings, for which vLLM's LoRA differs "
            "from PEFT's",
        ),
        (
            changes_base,
            f"init_lora_weights={config.init_lora_weights!r} moves part of the base into the adapter, and vLLM serves "
            "the whole base next to it; use init_lora_weights=True",
        ),
        (rank > _RANKS[-1], f"its rank {rank} is above {_RANKS[-1]}"),
    )
    for holds, reason in reasons:
        if holds:
            raise RolloutError(f"vLLM cannot serve this adapter by itself: {reason}")
    return next(served for served in _RANKS if served >= rank)


def adapter_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's weights on the CPU under PEFT's file names, on rank 0; `{}` elsewhere. Collective under FSDP2.

    Only adapter shards are gathered, nothing of the base. Under ZeRO-3 call it with the adapter's parameters gathered.
    """
    gathered = gather_adapter(model)
    if not gathered:
        return {}
    weights = get_peft_model_state_dict(model, state_dict=gathered, save_embedding_layers=False)
    return {name: tensor.contiguous() for name, tensor in weights.items()}


class AdapterVersions:
    """Folders `<prefix>-v1`, `-v2`, … under a scratch folder in `folder`, each written whole before it has its name.

    The prefix is unique to a run, so that two can share a server. `in_memory` takes `/dev/shm` if it has room for
    four versions.
    """

    def __init__(self, prefix: str, folder: str | Path, in_memory: bool = False):
        self.prefix = prefix
        self.folder = Path(folder)
        self.in_memory = in_memory
        self.root: Path | None = None
        self.bytes = 0

    def publish(self, version: int, weights: dict[str, torch.Tensor], peft_config: LoraConfig) -> Path:
        """Write version `version` and return its folder."""
        self.bytes = sum(tensor.nbytes for tensor in weights.values())
        if self.root is None:
            parent = self.folder
            if self.in_memory and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 * self.bytes:
                parent = _MEMORY
            parent.mkdir(parents=True, exist_ok=True)
            self._scratch = tempfile.TemporaryDirectory(prefix=".adapters-", dir=parent, ignore_cleanup_errors=True)
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
            if int(folder.name.rpartition("-v")[2]) < version:
                shutil.rmtree(folder, ignore_errors=True)
