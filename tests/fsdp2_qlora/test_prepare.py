"""What is prepared without several ranks; test_trainer.py prepares on them."""

from types import SimpleNamespace

import pytest
from torch import nn

pytest.importorskip("bitsandbytes")

from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora.fsdp2_qlora import prepare
from trl_fsdp_qlora.fsdp2_qlora.launch_checks import LaunchError
from trl_fsdp_qlora.fsdp2_qlora.packed_linear import pack_model


def test_another_release_of_torch_shards_no_4_bit_base(monkeypatch):
    monkeypatch.setattr(prepare, "misfit", lambda: "torch 9.9 has no FSDPState._lazy_init")
    accelerator = SimpleNamespace(is_fsdp2=True, prepare=lambda model: pytest.fail("it was sharded all the same"))
    prepare.shard_quantized_base(accelerator)
    quantized_layer = type("Linear4bit", (nn.Linear,), {})  # known by the name of its class
    with pytest.raises(LaunchError, match=r"torch 9\.9 has no FSDPState\._lazy_init.*ddp\.yaml"):
        accelerator.prepare(nn.Sequential(quantized_layer(2, 2)))


def test_shapes_of_packed_weights_are_those_of_the_unquantized_model(tmp_path):
    checkpoint = tiny.make_checkpoint(tmp_path)
    whole = dict(tiny.load_whole(checkpoint).named_parameters())
    model = tiny.load(checkpoint)
    pack_model(model)
    by_id = prepare.dense_shapes(model)
    shapes = {name: by_id[id(weight)] for name, weight in model.named_parameters() if id(weight) in by_id}
    assert len(shapes) == 7 * 2  # projections of two layers
    assert shapes == {name: tuple(whole[name].shape) for name in shapes}
