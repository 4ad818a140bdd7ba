"""Four gloo ranks as two replicas of two shards against one process."""

import pytest
import torch

pytest.importorskip("bitsandbytes")

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import scenarios_of
from tests.fsdp2_qlora.test_sharded_training import difference
from trl_fsdp_qlora.fsdp2_qlora.loading import reads_checkpoint

RANKS = range(4)


def mesh_environment(replicate: int = 2, shard: int = 2, **others: str) -> dict[str, str]:
    """What `accelerate launch` makes of accelerate_configs/multi_node_hsdp_qlora.yaml on two nodes of two ranks."""
    return {
        **fsdp_environment(accelerate_use_parallelism_config="true"),
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(replicate),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(shard),
        "LOCAL_WORLD_SIZE": "2",
        **others,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("hsdp")
    model = tiny.make_checkpoint(root / "model")
    torch.manual_seed(1)
    changed = tiny.load_whole(model)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    changed.save_pretrained(root / "other")
    resume = f"resume={root}/four/sft/checkpoint-3"
    one_row = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE=1,PARALLELISM_CONFIG_DP_SHARD_SIZE=4"
    common = {"grpo": "grpo:num_generations=2", "sft": "sft:steps=6,save=3", "by_name": "by_name"}
    (one,) = scenarios_of(model, root / "one", common, processes=1)
    scenarios = {
        **common,
        "per_layer": "by_name:gather=per_layer",
        "moved": "moved",
        "from_one": f"sft:steps=6,resume={root}/one/sft/checkpoint-3",
        "differ": f"differ:other={root}/other",
        # Environment variables stay for what follows.
        "one_row": f"sft:steps=6,{resume},{one_row}",
        "moved_one_row": f"moved:{one_row}",
        "ddp": f"sft:steps=6,{resume},ACCELERATE_USE_FSDP=false,ACCELERATE_USE_PARALLELISM_CONFIG=false",
    }
    four = scenarios_of(model, root / "four", scenarios, processes=4, environment=mesh_environment())
    (again,) = scenarios_of(model, root / "again", {"resumed": f"sft:steps=6,{resume}"}, processes=1)
    return {"one": one, "four": four, "again": again}


@pytest.mark.slow
@pytest.mark.processes
class TestFourRanks:
    def test_training_equals_one_process(self, runs):
        one = runs["one"]["grpo"]
        for rank in runs["four"]:
            found = rank["grpo"]
            assert found["dtensors"] and found["shared"]
            # Four ranks sum the same float32 terms in another order than one, and AdamW carries the rounding on.
            assert found["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert len(found["gradients"]) == len(one["gradients"]) == 5
            for expected, gradients in zip(one["gradients"], found["gradients"], strict=True):
                assert difference(expected, gradients) <= 1e-5
        assert difference(one["adapter"], runs["four"][0]["grpo"]["adapter"]) <= 1e-5

    def test_a_rank_holds_half_of_the_base_not_a_quarter(self, runs):
        for rank in runs["four"]:
            base = rank["grpo"]["base"]
            assert base["world_size"] == 2 and 0.5 <= base["ratio"] <= 0.52
            assert rank["one_row"]["base"]["world_size"] == 4 and 0.25 <= rank["one_row"]["base"]["ratio"] <= 0.27

    def test_one_rank_per_node_reads(self, runs):
        assert [rank["by_name"]["meta"] for rank in runs["four"]] == [False, True, False, True]
        logits = runs["one"]["by_name"]["first_logits"]
        assert logits.std() > 0.01
        for rank in runs["four"]:
            assert (rank["by_name"]["first_logits"] - logits).abs().max() <= 1e-5

    def test_generation_gathered_once_or_layer_by_layer_is_the_same(self, runs):
        once, per_layer = (runs["four"][0][name] for name in ("by_name", "per_layer"))
        assert once["adapter"].keys() and difference(once["adapter"], per_layer["adapter"]) <= 1e-5
        assert once["gathers"][1] < per_layer["gathers"][1] - 8  # up to eight tokens, two layers each

    @pytest.mark.parametrize("resumed", ["from_one", "one_row", "ddp", "resumed"])
    def test_a_checkpoint_goes_on_with_any_mesh(self, runs, resumed):
        """One process to 2 x 2, and 2 x 2 to 1 x 4, to DDP and to one process."""
        ranks = [runs["again"]] if resumed == "resumed" else runs["four"]
        expected = runs["one"]["sft"]
        assert runs["four"][0]["sft"]["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        for rank in ranks:
            found = rank[resumed]
            assert found["dtensors"] == (resumed in ("from_one", "one_row"))
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            for step in range(3):
                assert difference(expected["gradients"][3 + step], found["gradients"][step]) <= 1e-5
        assert difference(expected["adapter"], ranks[0][resumed]["adapter"]) <= 1e-5

    def test_only_gradients_leave_a_node(self, runs):
        for rank in runs["four"]:
            moved = rank["moved"]
            assert moved["mesh"] == (2, 2) and moved["placements"] == ["Replicate", "Shard"]
            assert moved["gathered_bytes"] > 0 and moved["gathered_between_nodes"] == 0
            # Of G bytes of gradients the reduce-scatter sends half to the other shard, and the all-reduce, as a ring of
            # two, a rank's half twice by halves.
            gradients = moved["padded"]
            assert moved["reduced_bytes"] == pytest.approx(gradients / 2 + gradients / 2, rel=1e-12)
            assert moved["reduced_between_nodes"] == pytest.approx(gradients / 2, rel=1e-12)

    def test_a_replica_of_all_ranks_gathers_over_the_network(self, runs):
        for number, rank in enumerate(runs["four"]):
            moved = rank["moved_one_row"]
            assert moved["mesh"] == (4,)
            # In the ring 0 1 2 3 over nodes {0, 1} and {2, 3}, ranks 0 and 2 receive from another node, 1 and 3 send.
            between = moved["gathered_bytes"] if number in (0, 2) else 0
            assert moved["gathered_between_nodes"] == between
            between = moved["reduced_bytes"] if number in (1, 3) else 0
            assert moved["reduced_between_nodes"] == between

    def test_replicas_that_loaded_other_weights_are_refused_on_every_rank(self, runs):
        for rank in runs["four"]:
            assert "1 of " in rank["differ"] and "up_proj" in rank["differ"], rank["differ"]
            assert "`model_name_or_path`" in rank["differ"]


@pytest.mark.parametrize(("replicate", "shard"), [(2, 2), (1, 4)])
def test_the_first_rank_of_each_replica_reads(monkeypatch, replicate, shard):
    assert [reads_checkpoint(rank) for rank in RANKS] == [True, False, False, False]
    for name, value in mesh_environment(replicate, shard).items():
        monkeypatch.setenv(name, value)
    assert [reads_checkpoint(rank) for rank in RANKS] == [rank % shard == 0 for rank in RANKS]
