"""The choice of how the policy gets into a vLLM engine. An impossible choice raises before a model is loaded."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from peft import PeftModel

from ...compat.deepspeed import zero_stage
from ...compat.trl_rollouts import weighs_as_1_16
from ...compat.vllm import trl_starts
from ...fsdp2_qlora.launch_checks import is_fsdp_launch
from ...utils.ranks import on_main
from .adapter_sync import RolloutError, cannot_share, check_trained, served_rank
from .drawn_dtype import engine_options, other_dtype

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from trl import GRPOConfig

WEIGHS_AS_1_16 = weighs_as_1_16()
_ASKED_FOR = "asked for"
T = TypeVar("T")


class Sync(NamedTuple):
    """`"adapter"`, `"merge"` or `"off"` (no vLLM), and why."""

    mode: str
    reason: str

    def describe(self) -> str:
        """A line for a start-up report."""
        sent = "the adapter alone" if self.mode == "adapter" else "all weights, the adapter merged"
        return f"vLLM gets {sent}: {self.reason}"


class Place(NamedTuple):
    """The ranks and devices of a run: whether each rank holds a part of the base, and whether it computes on GPUs."""

    is_sharded: bool
    on_gpu: bool


def this_place(args: "GRPOConfig") -> Place:
    """The place of this process, for a trainer's arguments."""
    return Place(is_fsdp_launch() or zero_stage(args.deepspeed_plugin) == 3, torch.cuda.is_available())


def choose_sync(
    args: "GRPOConfig",
    peft_config: "PeftConfig | None",
    quantized: bool,
    ask: bool = False,
    model: "nn.Module | str | None" = None,
    place: Place | None = None,
) -> Sync:
    """Resolve `rollout_sync` for a run.

    Args:
        args: the trainer's arguments.
        peft_config: config of the adapter that is trained, or `None`.
        quantized: whether the base is quantized.
        ask: ask the server how it was started, once for all ranks, instead of assuming that it takes adapters.
        model: the model or its name; of one that has its adapter already, more may be trained.
        place: the ranks and devices of the run; those of this process if absent.

    Raises:
        RolloutError: the choice cannot work; the message names the line to change.
    """
    if not args.use_vllm:
        return Sync("off", "use_vllm is off")
    asked_for = args.rollout_sync
    if asked_for == "adapter" and peft_config is None:
        raise RolloutError("rollout_sync='adapter' without an adapter: set use_peft: true, or rollout_sync: merge")
    if quantized and (asked_for == "merge" or peft_config is None):
        raise RolloutError(
            "rollout_sync='merge' with a quantized base: merging into packed weights is not possible "
            "(trl#4973). Remove rollout_sync, or load the base unquantized"
        )
    not_servable = None if peft_config is None else _why_not_servable(peft_config, model)
    if not_servable is not None and (asked_for == "adapter" or quantized):
        raise not_servable
    by_settings = (
        (asked_for == "merge", Sync("merge", _ASKED_FOR)),
        (peft_config is None, Sync("merge", "there is no adapter to send alone")),
        (not_servable is not None, Sync("merge", str(not_servable))),
        (asked_for == "adapter", Sync("adapter", _ASKED_FOR)),
        (args.vllm_share_base == "on", Sync("adapter", "the base is shared")),
        (quantized, Sync("adapter", "the base is quantized")),
    )
    chosen = _first(by_settings)
    if chosen is not None:
        return chosen
    place = place or this_place(args)
    is_server = args.vllm_mode == "server"
    server = _answer_of_server(args) if is_server and ask else _TAKES_ADAPTERS
    by_place = (
        (server["lora_config"] is None, Sync("merge", "the server was started without --enable-lora")),
        (
            server["weight_transfer_config"] is not None and place.on_gpu,
            Sync("merge", "the server was started with --weight-transfer-config"),
        ),
        (place.is_sharded, Sync("adapter", "the base is sharded")),
        (is_server and ask, Sync("adapter", "the engine is a server")),
        (is_server, Sync("adapter", "the engine is a server (if it was started to take them)")),
        (not place.on_gpu, Sync("adapter", "pushing whole weights does not work without a GPU")),
    )
    merged = Sync("merge", "one unquantized device: merged weights decode faster than LoRA kernels")
    return _first(by_place) or merged


# What is assumed of a server that is not asked.
_TAKES_ADAPTERS = {"lora_config": {}, "weight_transfer_config": None}


def _first(rows: Iterable[tuple[bool, T]]) -> T | None:
    """The second entry of the first row whose first entry holds."""
    return next((result for holds, result in rows if holds), None)


def _why_not_servable(peft_config: "PeftConfig | None", model: "nn.Module | str | None") -> RolloutError | None:
    """The error that says why vLLM cannot serve an adapter alone; `None` if it can."""
    try:
        served_rank(peft_config)
        if isinstance(model, PeftModel):
            check_trained(model)
    except RolloutError as error:
        return error
    return None


def _answer_of_server(args: "GRPOConfig") -> dict[str, dict | None]:
    """How the server was started, asked by one rank for all."""
    from .engine import server_info

    return on_main(lambda: server_info(args))


def why_own_base(
    args: "GRPOConfig", sync: Sync, quantization: Any, model: Any, place: Place | None = None
) -> str | None:
    """Why engine and trainer each hold a copy of the base; `None` if they share one, by what is known before loading.

    Args:
        args, sync, place: see [`choose_sync`].
        quantization: the base's quantization config, an object or a dict, or `None`.
        model: the model or its name.

    Raises:
        RolloutError: sharing was asked for and cannot be; the message names the line to change.
    """
    if args.vllm_share_base == "off":
        return "vllm_share_base is off"
    held = str((args.model_init_kwargs or {}).get("dtype", "float32")).removeprefix("torch.")  # TRL's default
    of_autocast = "float16" if args.fp16 else "bfloat16" if args.bf16 else held
    drawn = str((args.vllm_engine_kwargs or {}).get("dtype", of_autocast)).removeprefix("torch.")
    place = place or this_place(args)
    other_weights = {"load_format", "quantization", "model"}.intersection(args.vllm_engine_kwargs or ())
    field = quantization.get if isinstance(quantization, dict) else partial(getattr, quantization)
    is_dense = quantization is None
    # The reason why something cannot be sent alone names the line to change.
    merged = "; set rollout_sync: adapter" if sync.reason == _ASKED_FOR else f" ({sync.reason})"
    reasons = (
        (args.vllm_mode == "server", "the engine is a server; set vllm_mode: colocate"),
        (sync.mode == "merge", f"vLLM gets all weights, those of an adapter merged{merged}"),
        (
            not is_dense and not field("load_in_4bit", False),
            "the base is quantized in another way than bitsandbytes' 4 bits",
        ),
        (place.is_sharded, "each rank has a part of the base; DDP shares it"),
        (args.vllm_tensor_parallel_size > 1, "each engine has a part of the base; set vllm_tensor_parallel_size: 1"),
        (other_weights, f"vllm_engine_kwargs has {min(other_weights, default='')}, so vLLM holds other weights"),
        (
            is_dense and isinstance(model, str) and held not in ("auto", "None", drawn),
            other_dtype(held, drawn),
        ),
    )
    reason = _first(reasons)
    if reason is not None:
        raise cannot_share(reason)
    return None


def trl_starts_engine(
    args: "GRPOConfig", sync: Sync, own_base: str | None, one_base: Callable[[], ModuleType]
) -> AbstractContextManager:
    """A context in which TRL's trainer starts the engine that `sync` needs.

    It is TRL's own, or [`trl_fsdp_qlora.engines.vllm.engine.start_engine`]'s if the adapter alone is sent. `own_base`:
    why it loads a base of its own; `None` if it shares the trainer's. `one_base` imports the module that shares it.
    """
    if sync.mode == "off":
        return nullcontext()
    from .engine import start_engine

    make_engine = partial(start_engine, args, own_base, one_base=one_base) if sync.mode == "adapter" else None
    return trl_starts(make_engine, partial(engine_options, args))


def truncations(args: "GRPOConfig") -> dict[str, float | None]:
    """Settings under which vLLM leaves tokens out of the distribution that it draws from, by name."""
    kwargs = args.generation_kwargs or {}
    values = {name: kwargs.get(name, getattr(args, name)) for name in ("top_p", "top_k", "min_p")}
    keeps_all = {
        "top_p": values["top_p"] in (None, 1.0),
        "top_k": (values["top_k"] or 0) <= 0,
        "min_p": not values["min_p"],
    }
    return {name: value for name, value in values.items() if not keeps_all[name]}


def warnings_for(args: "GRPOConfig", sync: Sync) -> list[str]:
    """Warnings about a run with vLLM, each with the line to change; the trainer logs them before the first step."""
    if sync.mode == "off":
        return []
    warnings = []
    settings = vars(args)
    corrects = settings.get("vllm_importance_sampling_correction", False)  # TRL's RLOO has no importance weights
    if settings.get("rollouts_ahead") and not corrects:
        warnings.append(
            "rollouts_ahead=1 without vllm_importance_sampling_correction: completions come from the policy of one "
            "generation ago, and nothing corrects for it. Set vllm_importance_sampling_correction: true"
        )
    cuts = ", ".join(f"{name}={value}" for name, value in truncations(args).items())
    if corrects and cuts and WEIGHS_AS_1_16:
        warnings.append(
            f"under {cuts} vLLM's log-probabilities are of the tokens that are left, and the trainer's of all tokens: "
            "importance weights are too small by the probability of what was left (trl#6789). Leave them out, or set "
            "vllm_importance_sampling_correction: false"
        )
    if args.vllm_engine_kwargs and args.vllm_mode == "server":
        warnings.append(
            "vllm_engine_kwargs is for an engine in this process; give a server its options when you start it"
        )
    return warnings
