"""What ZeRO-3 makes of a parameter is recognised by the attribute that DeepSpeed gives it.

Parameters of a real ZeRO-3 are those of `tests/prefix_sharing/test_ranks.py` and `tests/fsdp2_qlora`.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from trl_fsdp_qlora.compat.deepspeed import gathered_by_zero3, is_zero3, zero_stage


def test_the_stage_is_that_of_the_plugin():
    assert zero_stage(None) is None
    assert zero_stage(SimpleNamespace(zero_stage=2)) == 2


def test_a_plain_parameter_is_not_gathered():
    weight = torch.nn.Parameter(torch.ones(2))
    assert not is_zero3(weight)
    assert isinstance(gathered_by_zero3(weight, None), nullcontext)
    weight.ds_id = 0
    assert is_zero3(weight)
