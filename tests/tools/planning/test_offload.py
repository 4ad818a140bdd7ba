"""Activations that wait on the host, and tiles, in a plan."""

import json

import pytest

from tests.tools.planning.models import config, folder, settings
from trl_fsdp_qlora.tools.planning.fake_run import FakeRun
from trl_fsdp_qlora.tools.planning.hardware import GIB, Hardware
from trl_fsdp_qlora.tools.planning.plan import ACTIVATIONS, make_plan

CARD = Hardware("a card", 24 * GIB)
OFFLOADED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": json.dumps({"offload": True})}


def planned(path, **changes):
    one_row = {"per_device_train_batch_size": 1, "num_generations": 4, "gradient_accumulation_steps": 4}
    return make_plan(settings(path, **one_row, max_completion_length=256, **changes), hardware=CARD)


def activations(plan) -> int:
    return plan.phases["forward_backward"][ACTIVATIONS]


@pytest.mark.exhaustive
def test_offloaded_activations_are_on_the_host(tmp_path):
    models = {layers: folder(tmp_path / str(layers), num_hidden_layers=layers) for layers in (4, 12)}
    on_card = {layers: planned(path, gradient_checkpointing=True) for layers, path in models.items()}
    on_host = {layers: planned(path, **OFFLOADED) for layers, path in models.items()}
    hidden = on_card[4].config.hidden_size
    tokens = 256  # of the completion alone: the prompt is a trunk's
    of_layers = activations(on_card[12]) - activations(on_card[4])
    of_layers_on_host = activations(on_host[12]) - activations(on_host[4])
    assert of_layers - of_layers_on_host >= 8 * tokens * hidden * 2
    assert activations(on_host[12]) < activations(on_card[12])


@pytest.mark.exhaustive
def test_with_tiles_a_wider_mlp_takes_no_more_bytes_per_token(tmp_path):
    models = {width: folder(tmp_path / str(width), intermediate_size=width) for width in (512, 1024)}
    long_row = {"prompt_tokens": 1024, "max_completion_length": 1025, "num_generations": 1}
    differences = {}
    for tile in ("off", 16):
        tiled = {"gradient_checkpointing": True, "mlp_tokens_per_tile": tile, **long_row}
        runs = [(settings(path, **tiled), config(intermediate_size=width)) for width, path in models.items()]
        narrow, wide = (FakeRun(run, shape, True).step_bytes(1, 1) for run, shape in runs)
        differences[tile] = wide - narrow
    assert differences["off"] > 2048 * 512 * 4 * 3  # three intermediates
    assert differences[16] < differences["off"] / 4
