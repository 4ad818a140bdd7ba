"""Apple's GPUs have no float64: counters and draws on a device that refuses it. The meta device stands for it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_fsdp_qlora.rollout.decoding import RowUniforms, draw
from trl_fsdp_qlora.scoring import token_selection, transfer
from trl_fsdp_qlora.telemetry.phases import token_counts


class NoFloat64(TorchDispatchMode):
    """Raises where float64 comes to lie on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and x.device.type == "meta" and x.dtype is torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return found


META = torch.device("meta")


def test_draws_and_counters():
    mask = torch.empty(4, 6, dtype=torch.long, device=META)
    with NoFloat64():
        numbers = RowUniforms(4, META, seed=0).next(torch.zeros(4, dtype=torch.long, device=META))
        for size in (7, 700):
            assert draw(torch.empty(4, size, device=META), numbers).shape == (4,)
        counts = token_counts({"prompt_mask": mask, "completion_mask": mask, "advantages": mask[:, 0].float()}, 2)
    assert counts.dtype is torch.int64  # exact, and known to every device


@pytest.mark.parametrize("strategy", ["s_grpo", "prefix_cut"])
def test_token_selection_is_drawn_on_the_host(strategy, monkeypatch):
    """`meta` plays the device, and what the host would have computed is what it gets."""
    mask, moved = torch.ones(3, 40, dtype=torch.long), []
    options = {"rate": 0.6, "max_tokens": None if strategy == "prefix_cut" else 16}
    wanted = token_selection.select_tokens(mask, strategy, generator=torch.Generator().manual_seed(1), **options)
    to = torch.Tensor.to
    monkeypatch.setattr(token_selection, "widest_float", lambda device: torch.float32)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args: moved.append(args[0]) or to(self, *args))
    found = token_selection.select_tokens(mask, strategy, generator=torch.Generator().manual_seed(1), **options)
    assert torch.equal(found.keep, wanted.keep) and torch.equal(found.weight, wanted.weight) and moved[0] == "cpu"
    assert transfer.widest_float(torch.device("mps")) is torch.float32
