"""Names borrowed from TRL's vLLM code and from vLLM."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from trl.trainer import grpo_trainer

from ..utils.replaced import replaced


@contextmanager
def trl_starts(
    make_engine: Callable[..., Any] | None, engine_kwargs: Callable[[Any, Any], dict[str, Any]]
) -> Iterator[None]:
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


def _start_trls_own(stock: Callable[..., Any], engine_kwargs: Callable[[Any, Any], dict[str, Any]], **options) -> Any:
    with llm_with(engine_kwargs(options["model"], options["accelerator"])):
        return stock(**options)


def llm_with(further: dict[str, Any], wrap: Callable[[Any], Any] = lambda llm: llm) -> AbstractContextManager:
    """A context in which TRL's engine makes `vllm.LLM` with `further` arguments, which take precedence.

    `wrap` returns what the engine uses in its place.
    """
    from trl.generation import vllm_generation

    start = getattr(vllm_generation, "LLM", None)  # exists only if vLLM is installed
    if start is None:
        return nullcontext()

    return replaced(vllm_generation, LLM=lambda **trls: wrap(start(**(trls | further))))


def skip_destroyed_groups(llm: Any) -> None:
    """Let vLLM's `LLM` in this process end without a traceback after `torch.distributed.destroy_process_group()`.

    When the engine is collected, or the process ends, vLLM destroys its own process groups, which
    `destroy_process_group()` has destroyed already.
    """
    client = getattr(llm.llm_engine, "engine_core", None)
    finalizer = getattr(client, "_finalizer", None)
    ending = None if finalizer is None else finalizer.detach()
    if ending is not None:
        _, shut_down, args, kwargs = ending
        client._finalizer = weakref.finalize(client, _if_groups_exist, shut_down, *args, **kwargs)


def _if_groups_exist(shut_down: Callable, *args, **kwargs) -> None:
    if torch.distributed.is_initialized():
        shut_down(*args, **kwargs)
