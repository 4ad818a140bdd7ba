"""The number of threads that a model gets on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 10_000_000  # parameters


def fit_threads(model: torch.nn.Module) -> None:
    """Give a small model on a CPU one thread.

    Torch's threads wait for each other in a loop after each of the model's short operations.
    While other processes use the machine, that is most of the time: 40 steps of the quickstart's base of 0.6M
    parameters took 33 to 49 s with one thread, and 225 to 243 s with two, on two busy cores (dev/LOG.md).
    """
    parameters = list(model.parameters())
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    if is_on_cpu and sum(parameter.numel() for parameter in parameters) < SMALL:
        torch.set_num_threads(1)


@contextmanager
def fitted_threads(model: torch.nn.Module) -> Iterator[None]:
    """[`fit_threads`] in the block; afterwards torch has as many threads as before."""
    before = torch.get_num_threads()
    fit_threads(model)
    try:
        yield
    finally:
        torch.set_num_threads(before)
