"""Names borrowed from TRL's vLLM code and from vLLM."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger
from torch import nn
from trl.trainer import grpo_trainer

from ..utils.replaced import replaced
from .trl import INSTALL, MissingName
from .trl_rollouts import reads, with_names

logger = get_logger(__name__)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm import LLM
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    # Further arguments of `vllm.LLM`, by their names.
    EngineArguments = Callable[[PreTrainedModel, Accelerator], dict[str, object]]


@contextmanager
def trl_starts(make_engine: Callable[..., VLLMGeneration] | None, engine_kwargs: EngineArguments) -> Iterator[None]:
    """Make a trainer of TRL's start another engine inside the block, or its own engine with further options.

    TRL has no argument for either. Its trainers and its engine look the classes up by name in their modules, so these
    names are replaced.

    Args:
        make_engine: takes the arguments of `VLLMGeneration`; `None` for TRL's own engine.
        engine_kwargs: gets the model and the accelerator, and returns further arguments of `vllm.LLM` for TRL's own
            engine in this process.
    """
    if make_engine is None:
        make_engine = partial(_start_trls_own, grpo_trainer.VLLMGeneration, engine_kwargs)
    modules = grpo_trainer, sys.modules.get("trl.trainer.rloo_trainer")  # the latter if a trainer of RLOO starts
    with ExitStack() as stack:
        for module in modules:
            if module is not None:
                stack.enter_context(replaced(module, VLLMGeneration=make_engine))
        yield


def _start_trls_own(stock: type[VLLMGeneration], engine_kwargs: EngineArguments, **options) -> VLLMGeneration:
    further = engine_kwargs(options["model"], options["accelerator"])

    class WithFurtherArguments(stock):
        """TRL's engine with further arguments of `vllm.LLM`."""

        def _init_vllm(self) -> None:
            stock = super()._init_vllm
            asked_for = further.keys() - {"dtype"}  # the trainer's dtype is this package's own choice
            if reads(stock, "LLM") or (asked_for and options["mode"] == "colocate"):
                init_with(stock, further)
                return
            logger.warning_once("vLLM's dtype is its own choice: this TRL starts vLLM otherwise than TRL 1.16")
            stock()

    return WithFurtherArguments(**options)


def init_with(
    init_vllm: MethodType, further: dict[str, object], wrap: Callable[[LLM], object] = lambda llm: llm
) -> None:
    """Call `init_vllm`, of TRL's engine, which makes `vllm.LLM` with `further` arguments; these take precedence.

    `wrap` returns what the engine uses in the place of the `LLM`.

    Raises:
        MissingName: `init_vllm` makes no `LLM` itself.
    """
    if not reads(init_vllm, "LLM"):
        raise MissingName(f"this TRL starts vLLM otherwise, which its options need: {INSTALL}")
    from trl.generation import vllm_generation

    def start(**of_trl: object) -> object:
        return wrap(vllm_generation.LLM(**(of_trl | further)))

    with_names(init_vllm, LLM=start)()


@contextmanager
def weights_created_in(
    block_for: Callable[[int], AbstractContextManager], methods: Iterable[type[QuantizeMethodBase]]
) -> Iterator[None]:
    """Let vLLM create the weights of some kinds of layers inside `block_for(inputs of the layer)`.

    vLLM's layers ask these classes for their weights, and vLLM has no argument for others.
    """

    def created_in_block(create: Callable) -> Callable:
        def create_weights(method, layer, input_size_per_partition, *args, **kwargs):
            with block_for(input_size_per_partition):
                create(method, layer, input_size_per_partition, *args, **kwargs)

        return create_weights

    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(replaced(method, create_weights=created_in_block(method.create_weights)))
        yield


def plain_weights_on_cpu() -> AbstractContextManager[None]:
    """A context in which vLLM leaves the weights of its linear layers as they were loaded, on CPUs, too.

    On CPUs it repacks a layer's weight for its kernels and drops the plain one, and has no option against it.
    """
    from vllm.model_executor.layers import utils as linears

    repack = linears.dispatch_cpu_unquantized_gemm

    def keep_plain(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.dim() == 2:
            layer.cpu_linear = nn.functional.linear
        else:  # of a convolution
            repack(layer, remove_weight)

    return replaced(linears, dispatch_cpu_unquantized_gemm=keep_plain)


def skip_destroyed_groups(llm: LLM) -> None:
    """Let vLLM's `LLM` in this process end without a traceback after `torch.distributed.destroy_process_group()`.

    When the engine is collected, or the process ends, vLLM destroys its own process groups, which
    `destroy_process_group()` has destroyed already.
    """
    client = getattr(llm.llm_engine, "engine_core", None)
    finalizer = getattr(client, "_finalizer", None)
    if client is None or finalizer is None:
        return
    ending = finalizer.detach()
    if ending is not None:
        _, shut_down, args, kwargs = ending
        client._finalizer = weakref.finalize(client, _if_groups_exist, shut_down, *args, **kwargs)


def _if_groups_exist(shut_down: Callable, *args, **kwargs) -> None:
    if torch.distributed.is_initialized():
        shut_down(*args, **kwargs)
