"""Counting what FSDP2 moves between ranks."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..upstream.fsdp import DefaultAllGather, DefaultReduceScatter


@dataclass
class Traffic:
    """What this rank received since the counters were last taken.

    Attributes:
        gathers: all-gathers of weights.
        gathered_bytes: bytes of weights that came from other ranks.
        reduced_bytes: bytes of gradients that went to other ranks.
    """

    gathers: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0

    def take(self) -> "Traffic":
        """The counts so far; counting starts anew."""
        taken = Traffic(self.gathers, self.gathered_bytes, self.reduced_bytes)
        self.gathers = self.gathered_bytes = self.reduced_bytes = 0
        return taken


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _CountingAllGather(DefaultAllGather):
    def __init__(self, traffic: Traffic):
        self.traffic = traffic

    def __call__(self, output_tensor, input_tensor, *args, **kwargs):
        self.traffic.gathers += 1
        self.traffic.gathered_bytes += _bytes(output_tensor) - _bytes(input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class _CountingReduceScatter(DefaultReduceScatter):
    def __init__(self, traffic: Traffic):
        self.traffic = traffic

    def __call__(self, output_tensor, input_tensor, *args, **kwargs):
        self.traffic.reduced_bytes += _bytes(input_tensor) - _bytes(output_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def count_traffic(model: nn.Module) -> Traffic:
    """Count every all-gather and reduce-scatter of an FSDP2 model from now on. The collectives stay torch's own."""
    traffic = Traffic()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_CountingAllGather(traffic))
            module.set_custom_reduce_scatter(_CountingReduceScatter(traffic))
    return traffic
