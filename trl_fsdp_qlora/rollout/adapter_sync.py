"""One adapter on its way from the trainer to an inference engine: what can be served, and versions of it on disk.

vLLM takes a LoRA adapter from a folder. Every version gets a name and a folder of its own: the engine keys its prefix cache
by the adapter's name, and loading in place is sticky before vLLM 0.33, so a name that is used twice may answer from the
policy before.
"""

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import LoraConfig, PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..checkpoints.disk import written_whole
from ..fsdp2_qlora.adapters import gather_adapter

# Initialisations that move part of the base's weights into the adapter: an engine that serves the untouched base with such
# an adapter counts that part twice.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
_MEMORY = Path("/dev/shm")
# How an error ends behind which there is nothing to repair in this process.
RESUME = "What was trained is in the last checkpoint: resume_from_checkpoint goes on from it"


class RolloutError(RuntimeError):
    """Completions could not be drawn from the policy; says what to do."""


def served_rank(peft_config: LoraConfig | None) -> int:
    """The `max_lora_rank` under which vLLM serves `peft_config`. Needs no model, so it can be asked before one is loaded.

    Raises:
        RolloutError: vLLM cannot serve such an adapter; names the line to change.
    """
    from ..compat.vllm import round_lora_rank, validate_lora_for_vllm_sync

    if peft_config is None:
        raise RolloutError("rollout_sync='adapter' without an adapter: set use_peft: true, or rollout_sync: merge")
    initialisation = str(getattr(peft_config, "init_lora_weights", True)).lower()
    try:
        if getattr(peft_config, "use_dora", False):
            raise ValueError(
                "`use_dora=True` adds a magnitude that vLLM's adapters have no place for. Use `use_dora=False`."
            )
        # The check reads nothing of a model but its active adapter's config.
        validate_lora_for_vllm_sync(SimpleNamespace(active_adapters=["default"], peft_config={"default": peft_config}))
        if initialisation.startswith(_CHANGES_BASE):
            raise ValueError(
                f"`init_lora_weights={peft_config.init_lora_weights!r}` moves part of the base into the adapter, and the "
                "engine serves the whole base beside it. Use `init_lora_weights=True`."
            )
        return round_lora_rank(max([peft_config.r, *(peft_config.rank_pattern or {}).values()]))
    except ValueError as error:
        raise RolloutError(f"vLLM cannot serve this adapter by itself: {error}") from None


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
    """Folders `<prefix>-v1`, `-v2`, … under one scratch folder, each written whole before it has its name.

    The scratch folder is in memory (`/dev/shm`) where there is room for four versions, else under `fallback`.

    Args:
        prefix: of the names; unique to this run, so that two runs can share a server.
        fallback: folder of the run.
    """

    def __init__(self, prefix: str, fallback: str | Path):
        self.prefix = prefix
        self.fallback = Path(fallback)
        self.root: Path | None = None
        self.bytes = 0
        self._cleanup = None

    def name(self, version: int) -> str:
        return f"{self.prefix}-v{version}"

    def publish(self, version: int, weights: dict[str, torch.Tensor], peft_config: LoraConfig) -> Path:
        """Write version `version` and return its folder.

        Raises:
            RolloutError: there is no room, neither in memory nor on disk.
        """
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        if self.root is None:
            self.root = self._scratch()
        try:
            return self._write(version, weights, peft_config)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk in its own class
            in_memory = self.root.is_relative_to(_MEMORY)
            self.close()
            if not in_memory:
                raise RolloutError(
                    f"the adapter ({self.bytes / 2**20:.1f} MiB) could not be written under {self.fallback}: "
                    f"{error}. Free disk there, or choose another output_dir"
                ) from error
        # The memory file system filled up since the run began: go on from disk.
        self.root = self._scratch(in_memory=False)
        return self.publish(version, weights, peft_config)

    def forget_before(self, version: int) -> None:
        """Remove the folders of versions older than `version`."""
        for folder in self.root.glob(f"{self.prefix}-v*") if self.root is not None else ():
            if int(folder.name.rpartition("-v")[2]) < version:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove every version; happens by itself when the process ends."""
        if self.root is not None:
            self._cleanup()
            self.root = None

    def _write(self, version: int, weights: dict[str, torch.Tensor], peft_config: LoraConfig) -> Path:
        folder = self.root / self.name(version)
        with written_whole(folder) as scratch:
            scratch.mkdir()
            save_file(weights, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
            peft_config.save_pretrained(scratch)
        return folder

    def _scratch(self, in_memory: bool = True) -> Path:
        if in_memory and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 * self.bytes:
            root = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-", dir=_MEMORY))
        else:
            self.fallback.mkdir(parents=True, exist_ok=True)
            root = Path(tempfile.mkdtemp(prefix=".adapters-", dir=self.fallback)).resolve()
        self._cleanup = weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        return root
