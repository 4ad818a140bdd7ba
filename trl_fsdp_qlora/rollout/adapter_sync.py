"""How the policy gets into a vLLM engine: decided, and refused where it cannot work, before a model is loaded; and the adapter's way.

vLLM takes a LoRA adapter from a folder. Every version gets a name and a folder of its own: the engine keys its prefix cache by the
adapter's name, so one that is used twice may answer from the policy before.
"""

import os
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import save_file

from ..checkpoints.disk import written_whole
from ..compat.vllm import adapter_misfits, trl_starts
from ..errors import UserError
from ..fsdp2_qlora.adapters import gather_adapter
from ..fsdp2_qlora.launch_checks import is_fsdp_launch
from ..run.ranks import on_main

CHOICES = ("auto", "adapter", "merge")
# Where a completion is longer than this, a factor exp(Σ of the tokens' differences) leaves every clip.
LONG_COMPLETION = 512
# Full fine-tuning's learning rates teach an adapter almost nothing; LoRA wants ten to a hundred times as much.
LOW_ADAPTER_RATE = 5e-6
# Initialisations that move part of the base's weights into the adapter: an engine that serves the untouched base with such
# an adapter counts that part twice.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
_MEMORY = Path("/dev/shm")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's `max_lora_rank` can be


class RolloutError(UserError):
    """Completions could not be drawn from the policy; says what to do."""


class Sync(NamedTuple):
    """`"adapter"`, `"merge"` or `"off"` (no vLLM), and why."""

    mode: str
    reason: str

    def describe(self) -> str:
        """A line for a start-up report."""
        sent = "the adapter alone" if self.mode == "adapter" else "all weights, the adapter merged"
        return f"vLLM gets {sent}: {self.reason}"


def choose_sync(args: Any, peft_config: Any, quantized: bool, ask: bool = False) -> Sync:
    """What `rollout_sync` comes to for a run.

    Args:
        args: of the trainer.
        peft_config: of the adapter that is trained, or `None`.
        quantized: the base is quantized.
        ask: the server what it was started with, once for all ranks, instead of taking it for one that takes adapters.

    Raises:
        RolloutError: the choice cannot work; names the line to change.
    """
    if not args.use_vllm:
        return Sync("off", "use_vllm is off")
    if args.rollout_sync == "adapter" and peft_config is None:
        raise RolloutError("rollout_sync='adapter' without an adapter: set use_peft: true, or rollout_sync: merge")
    if args.rollout_sync == "merge" or peft_config is None:
        if quantized:
            raise RolloutError(
                "rollout_sync='merge' with a quantized base: merging into packed weights is not possible "
                "(trl#4973). Remove rollout_sync, or load the base unquantized"
            )
        return Sync("merge", "asked for" if args.rollout_sync == "merge" else "there is no adapter to send alone")
    try:
        served_rank(peft_config)
        if problems := adapter_misfits():
            raise RolloutError("the installed TRL differs from 1.16 in " + "; ".join(problems))
    except RolloutError as error:
        if args.rollout_sync == "adapter" or quantized:
            raise
        return Sync("merge", str(error))
    if args.rollout_sync == "adapter":
        return Sync("adapter", "asked for")
    if quantized:
        return Sync("adapter", "the base is quantized")
    on_gpu = torch.cuda.is_available()
    if args.vllm_mode == "server" and ask:
        from .engine import server_info

        info = on_main(lambda: server_info(args))
        if info["lora_config"] is None:
            return Sync("merge", "the server was started without --enable-lora")
        if info["weight_transfer_config"] is not None and on_gpu:
            return Sync("merge", "the server was started with --weight-transfer-config")
    if is_fsdp_launch() or getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", None) == 3:
        return Sync("adapter", "the base is sharded")
    if args.vllm_mode == "server":
        return Sync("adapter", "the engine is a server" + ("" if ask else " (if it was started to take them)"))
    if not on_gpu:
        return Sync("adapter", "there is no GPU, where pushing whole weights does not work")
    return Sync("merge", "one unquantized device: merged weights decode faster than LoRA kernels")


def trl_starts_engine(args: Any, sync: Sync) -> AbstractContextManager:
    """Inside, TRL's trainer starts the engine of `sync`, with an adapter [`trl_fsdp_qlora.rollout.engine.start_engine`]'s."""
    if sync.mode == "off":
        return nullcontext()
    from . import engine

    return trl_starts(partial(engine.start_engine, args) if sync.mode == "adapter" else None, args.vllm_engine_kwargs)


def served_rank(config: LoraConfig) -> int:
    """The `max_lora_rank` under which vLLM serves an adapter. Needs no model, so it can be asked before one is loaded.

    vLLM holds lora_A and lora_B beside linear layers, and leaves out in silence whatever else a folder has.

    Raises:
        RolloutError: vLLM cannot serve such an adapter; names the line to change.
    """
    if not isinstance(config, LoraConfig):
        raise RolloutError(f"vLLM cannot serve this adapter by itself: a {type(config).__name__} is no LoraConfig")
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules or ()
    experts = config.target_parameters and sorted(config.target_parameters)
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    refused = {
        "use_dora=True adds a magnitude; use use_dora=False": config.use_dora,
        f"modules_to_save={config.modules_to_save} are trained whole": config.modules_to_save,
        f"bias={config.bias!r} trains biases; use bias='none'": config.bias != "none",
        f"target_parameters={experts} are adapters of whole parameters, as PEFT makes of `all-linear` on a mixture of experts; name "
        "linear layers: target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']": experts,
        f"target_modules={config.target_modules} has the LM head or the embeddings, where vLLM's LoRA is not PEFT's": any(
            name in target for target in targets for name in ("lm_head", "embed_tokens")
        ),
        f"init_lora_weights={config.init_lora_weights!r} moves part of the base into the adapter, and vLLM serves the whole base "
        "beside it; use init_lora_weights=True": str(config.init_lora_weights).lower().startswith(_CHANGES_BASE),
        f"its rank {rank} is above {_RANKS[-1]}": rank > _RANKS[-1],
    }
    for reason, found in refused.items():
        if found:
            raise RolloutError(f"vLLM cannot serve this adapter by itself: {reason}")
    return next(served for served in _RANKS if served >= rank)


def truncations(args: Any) -> dict[str, Any]:
    """Settings under which vLLM leaves tokens out of the distribution that it draws from, by name."""
    kwargs = args.generation_kwargs or {}
    given = {name: kwargs.get(name, getattr(args, name)) for name in ("top_p", "top_k", "min_p")}
    kept = {"top_p": given["top_p"] in (None, 1.0), "top_k": (given["top_k"] or 0) <= 0, "min_p": not given["min_p"]}
    return {name: value for name, value in given.items() if not kept[name]}


def low_adapter_rate(rate: float) -> str | None:
    """Why an adapter learns little at a learning rate; `None` where it may learn."""
    if rate >= LOW_ADAPTER_RATE:
        return None
    return f"learning_rate={rate:g} is one for full fine-tuning; adapters usually need 1e-5 to 1e-4"


def warnings_for(args: Any, sync: Sync) -> list[str]:
    """What is likely to go wrong in a run with vLLM, each with the line to change; for the log before the first step."""
    if sync.mode == "off":
        return []
    mode, longest = args.vllm_importance_sampling_mode, args.max_completion_length or 0
    cuts = ", ".join(f"{name}={value}" for name, value in truncations(args).items())
    found = {
        f"vllm_importance_sampling_mode={mode!r} with completions of up to {longest} tokens: the weight is exp(sum of all "
        "differences), which long completions push out of any clip; consider token_truncate": (
            args.vllm_importance_sampling_correction and mode.startswith("sequence") and longest > LONG_COMPLETION
        ),
        f"under {cuts} vLLM's log-probabilities are of the tokens that are left, and the trainer's of all tokens: importance "
        "weights are too small by the probability of what was left (trl#6789). Leave them out, or set "
        "vllm_importance_sampling_correction: false": args.vllm_importance_sampling_correction and cuts,
        "vllm_engine_kwargs is for an engine in this process; give a server its options where it is started": (
            args.vllm_engine_kwargs and args.vllm_mode == "server"
        ),
        low_adapter_rate(args.learning_rate): sync.mode == "adapter",
    }
    return [warning for warning, holds in found.items() if warning and holds]


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

    The prefix is unique to a run, so that two can share a server. `in_memory` takes `/dev/shm` where it has room for four versions.
    """

    def __init__(self, prefix: str, folder: str | Path, in_memory: bool = False):
        self.prefix, self.folder, self.in_memory = prefix, Path(folder), in_memory
        self.root: Path | None = None
        self.bytes = 0

    def publish(self, version: int, weights: dict[str, torch.Tensor], peft_config: LoraConfig) -> Path:
        """Write version `version` and return its folder."""
        self.bytes = sum(tensor.nbytes for tensor in weights.values())
        if self.root is None:
            memory = self.in_memory and os.access(_MEMORY, os.W_OK)
            memory = memory and shutil.disk_usage(_MEMORY).free > 4 * self.bytes
            place = _MEMORY if memory else self.folder
            place.mkdir(parents=True, exist_ok=True)
            self._scratch = tempfile.TemporaryDirectory(prefix=".adapters-", dir=place, ignore_cleanup_errors=True)
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
