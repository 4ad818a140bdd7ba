"""Transformers' continuous batching without what TRL's use of it leaves behind in the model."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Give every parameter and buffer back the values and dtype it had, and the model its mode.

    TRL casts the model that is trained to bf16 or fp16 for the engine and leaves it so: the float32 master weights of the
    adapter lose their low bits in the first step and every update below them later, and rotary frequencies are rounded,
    which moves the positions of long prompts. Costs a copy of what is cast while completions are generated.
    """
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    was_training = model.training
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        model.train(was_training)
