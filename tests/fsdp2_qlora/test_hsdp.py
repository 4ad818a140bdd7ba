"""Four gloo ranks as two replicas of two shards against one process."""

import pytest
import torch

pytest.importorskip("bitsandbytes")

from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import difference, mesh_environment, scenarios_of

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("hsdp")
    model = tiny.make_checkpoint(root / "model")
    changed = tiny.load_whole(model)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    changed.save_pretrained(root / "other")
    common = {"grpo": "grpo:num_generations=2", "sft": "sft:steps=4,save=2", "by_name": "by_name"}
    (one,) = scenarios_of(model, root / "one", common, processes=1)
    scenarios = {
        **common,
        "moved": "sft:steps=2,accumulate=2",
        "from_one": f"sft:steps=4,resume={root}/one/sft/checkpoint-2",
        "differ": f"differ:other={root}/other",
        # Environment variables stay for what follows.
        "one_row": f"sft:steps=4,resume={root}/four/sft/checkpoint-2,PARALLELISM_CONFIG_DP_REPLICATE_SIZE=1,"
        "PARALLELISM_CONFIG_DP_SHARD_SIZE=4",
    }
    return one, scenarios_of(model, root / "four", scenarios, processes=4, environment=mesh_environment())


def test_training_equals_one_process(runs):
    one, four = runs
    for rank in four:
        found, expected = rank["grpo"], one["grpo"]
        assert found["dtensors"] and found["shared"]
        # Four ranks sum the same float32 terms in another order than one, and AdamW carries the rounding on.
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        for step in range(3):
            assert difference(expected["gradients"][step], found["gradients"][step]) <= 1e-5
    assert difference(one["grpo"]["adapter"], four[0]["grpo"]["adapter"]) <= 1e-5


def test_a_rank_holds_half_of_the_base_not_a_quarter(runs):
    for rank in runs[1]:
        base, of_one_row = rank["grpo"]["base"], rank["one_row"]["base"]
        assert base["world_size"] == 2 and 0.5 <= base["ratio"] <= 0.52
        assert of_one_row["world_size"] == 4 and 0.25 <= of_one_row["ratio"] <= 0.27


def test_one_rank_per_node_reads(runs):
    one, four = runs
    assert [rank["by_name"]["meta"] for rank in four] == [False, True, False, True]
    for rank in four:
        assert (rank["by_name"]["first_logits"] - one["by_name"]["first_logits"]).abs().max() <= 1e-5


@pytest.mark.parametrize("resumed", ["from_one", "one_row"])
def test_a_checkpoint_goes_on_with_any_mesh(runs, resumed):
    """One process to 2 x 2, and 2 x 2 to 1 x 4."""
    expected, four = runs[0]["sft"], runs[1]
    assert four[0]["sft"]["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    for rank in four:
        found = rank[resumed]
        assert found["dtensors"] and found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        for step in range(2):
            assert difference(expected["gradients"][2 + step], found["gradients"][step]) <= 1e-5
    assert difference(expected["adapter"], four[0][resumed]["adapter"]) <= 1e-5


def test_only_gradients_leave_a_node(runs):
    for rank in runs[1]:
        assert rank["moved"]["mesh"] == (2, 2)
        moved = rank["moved"]["traffic"][1]
        assert moved["gathered_bytes"] > 0 and moved["gathered_between_nodes"] == 0
        # Of G bytes of gradients the reduce-scatter sends half to the other shard, and the all-reduce, as a ring of
        # two, a rank's half twice by halves. All rows are even, so FSDP2 pads none.
        gradients = sum(value.nbytes for value in runs[0]["sft"]["adapter"].values())
        assert moved["reduced_bytes"] == pytest.approx(gradients / 2 + gradients / 2, rel=1e-12)
        assert moved["reduced_between_nodes"] == pytest.approx(gradients / 2, rel=1e-12)


def test_replicas_that_loaded_other_weights_are_refused_on_every_rank(runs):
    for rank in runs[1]:
        assert "1 of " in rank["differ"] and "up_proj" in rank["differ"], rank["differ"]
