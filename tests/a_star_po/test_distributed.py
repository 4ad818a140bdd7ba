"""Two real gloo processes against one."""

import json

import pytest

from tests.distributed.launch import launch

from .tiny import problems

WORKER = __file__.replace("test_distributed.py", "rank_worker.py")


@pytest.fixture
def run(tmp_path, model_dir):
    def run(name, processes, *arguments):
        out = tmp_path / f"{name}.json"
        launch(WORKER, model_dir, str(tmp_path / f"{name}.sqlite"), str(out), *arguments, processes=processes)
        return json.loads(out.read_text())

    return run


@pytest.mark.slow
def test_two_ranks_give_the_values_and_the_accuracy_of_one(run):
    one, two = run("one", 1, "--batch", "16"), run("two", 2)
    assert one["table"] == two["table"] and len(one["table"]) == 48
    assert one["evaluation"] == two["evaluation"]
    assert one["evaluation"]["eval_n"] == len(problems(13))
    assert one["samples"] == [48 * 8]
    assert sum(two["samples"]) == 48 * 8 and min(two["samples"]) >= 48 * 8 // 4  # shared, no prompt twice
    for step in two["steps"]:
        assert step["advantage"] == pytest.approx(step["reward"] - step["v_star"], abs=1e-6)
    # Each global batch of 16 holds the same prompts, so the same mean V*.
    assert [step["v_star"] for step in one["steps"]] == pytest.approx([step["v_star"] for step in two["steps"]])


@pytest.mark.slow
def test_lockstep_for_sharded_models_gives_the_same_values(run):
    one, two = run("one", 1), run("lockstep", 2, "--lockstep")
    assert one["table"] == two["table"]
    assert one["evaluation"] == two["evaluation"]
    assert sum(two["samples"]) == 48 * 8
