"""Nodes that read different files under one name are refused before training; nodes with the same files are not."""

import pytest
import torch

from tests.distributed.launch import launch
from tests.tiny import save_tiny_model, tiny_model
from trl_fsdp_qlora.trainers.starting.same_weights import frozen_sums

WORKER = "tests/trainers/starting/nodes_worker.py"


@pytest.mark.processes
def test_two_nodes_with_other_weights_are_refused_on_both(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    other = save_tiny_model(tmp_path / "other")
    model.save_pretrained(other)

    def lines(*bases) -> list[str]:
        # Each rank is the first of its node, as on two machines.
        launch(WORKER, tmp_path, *bases, environment={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        return [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(2)]

    assert lines(base, base) == ["", ""]
    first, second = lines(base, other)
    assert first == second and "layers.1.mlp.up_proj" in first and "different weights" in first


def test_a_swap_of_two_bytes_changes_the_sum():
    model = tiny_model().requires_grad_(False)
    before = frozen_sums(model)
    weight = model.model.layers[0].mlp.down_proj.weight.view(torch.uint8)
    first, second = weight[0, :2].clone()
    assert first != second
    weight[0, 0], weight[0, 1] = second, first
    changed = {name for name, value in frozen_sums(model).items() if value != before[name]}
    assert changed == {"model.layers.0.mlp.down_proj.weight"}
