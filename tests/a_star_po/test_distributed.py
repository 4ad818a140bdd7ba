"""Two real gloo processes against one: plain data parallelism, and FSDP2 with sharded parameters."""

import json

import pytest
import transformers
from packaging.version import Version

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch

pytestmark = pytest.mark.processes

WORKER = __file__.replace("test_distributed.py", "rank_worker.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(name, processes, *arguments)`: what rank 0 of a run with an empty cache measured; each run once."""
    from .tiny import tiny_model

    folder, results = tmp_path_factory.mktemp("ranks"), {}
    tiny_model().save_pretrained(folder / "model")

    def run(name, processes, *arguments):
        if name not in results:
            out = folder / f"{name}.json"
            environment = {}
            if "--fsdp" in arguments:
                environment = fsdp_environment(fsdp_transformer_layer_cls_to_wrap="Qwen3DecoderLayer")
            paths = map(str, (folder / "model", folder / f"{name}", out))
            launch(WORKER, *paths, *arguments, processes=processes, environment=environment)
            results[name] = json.loads(out.read_text())
        return results[name]

    return run


def without_seconds(metrics):
    return {name: value for name, value in metrics.items() if "runtime" not in name and "per_second" not in name}


@pytest.mark.slow
def test_two_ranks_give_the_values_and_the_accuracy_of_one(run):
    one, two = run("one", 1, "--batch", "16"), run("two", 2)
    assert one["table"] == two["table"] and len(one["table"]) == 48
    assert without_seconds(one["evaluation"]) == without_seconds(two["evaluation"])
    assert one["evaluation"]["eval_n"] == 13
    assert one["samples"] == [48 * 8]
    assert sum(two["samples"]) == 48 * 8 and min(two["samples"]) >= 48 * 8 // 4  # shared, no prompt twice
    for step in two["steps"]:
        assert step["advantage"] == pytest.approx(step["reward"] - step["v_star"], abs=1e-6)
    # Each global batch of 16 holds the same prompts, so the same mean V*.
    assert [step["v_star"] for step in one["steps"]] == pytest.approx([step["v_star"] for step in two["steps"]])


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_sharded_parameters_give_the_same_values_in_lockstep(run, full):
    if full and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("refused: transformers before 5.23 would leave a reference model of zeros on the second rank")
    one = run("one", 1, "--batch", "16")
    sharded = run(f"sharded {full}", 2, "--fsdp", *(["--full"] if full else []))
    assert sharded["sharded"], "accelerate fell back to data parallelism: nothing was tested"
    assert "only train() prepares it" in sharded["refused"]
    assert sharded["table"] == one["table"]
    assert sharded["evaluation_after"]["eval_n"] == 13
    assert [step["v_star"] for step in sharded["steps"]] == pytest.approx([step["v_star"] for step in one["steps"]])
