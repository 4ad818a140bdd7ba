"""What is measured of a base that was not sharded, in one process; test_trainer.py has several ranks."""

import pytest
import torch

pytest.importorskip("bitsandbytes")

from tests.fsdp2_qlora.test_packed_linear import make_layer
from trl_fsdp_qlora.fsdp2_qlora.distribute import BaseNotSharded, measure_base
from trl_fsdp_qlora.fsdp2_qlora.packed_linear import pack_model


def test_a_replicated_base_is_an_error():
    model = torch.nn.ModuleDict({"q_proj": make_layer(), "k_proj": make_layer()})
    pack_model(model)
    base_bytes = measure_base(model, world_size=1)
    assert base_bytes.ratio == 1.0 and base_bytes.state_full == base_bytes.quantized_full - 2 * 96 * 128 // 2
    with pytest.raises(BaseNotSharded, match=r"2 ranks.*fsdp_version: 2"):
        measure_base(model, world_size=2)
