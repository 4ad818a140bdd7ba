"""What benchmarks/plan_error.py makes of what a case found: which bytes are compared with which, and what is counted."""

import pytest

from tests.benchmark_modules import benchmark


@pytest.fixture(scope="module")
def plan_error():
    return benchmark("plan_error")


@pytest.fixture(scope="module")
def cases():
    return benchmark("plan_error_cases")


def found(measured: float) -> dict:
    """A case of 100 MiB that lie there and 300 planned to come and go in a step, where `measured` MiB came."""
    return {
        "planned": {"lying": 100.0, "generate": 2.0, "score": 50.0, "forward_backward": 300.0, "optimizer": 1.0},
        "lying": 100.0,
        "rises": {"forward_backward": measured, "old_policy_pass": 40.0, "reference_pass": 50.0, "prepare": 9000.0},
    }


def test_phases_are_compared_with_their_own_parts_of_the_plan(plan_error):
    # The larger of two passes that score; no phase that was not measured, and none that the plan does not have.
    compared = {"lying": (100.0, 100.0), "score": (50.0, 50.0), "forward_backward": (300.0, 200)}
    assert plan_error.pairs(found(200)) == compared


def test_the_worst_and_the_lowest_error_keep_their_signs_and_failures_count_for_nothing(plan_error):
    told = plan_error.summary({"a": found(250), "b": found(400), "c": {"failed": "exit codes [1]"}})
    assert (told["compared"], told["within 5%"], told["median"]) == (6, 4, 0.0)
    assert told["lowest"] == pytest.approx(300 / 400 - 1)
    assert told["worst"] == pytest.approx(-0.25)
    assert plan_error.summary({"a": found(100), "b": found(400)})["worst"] == pytest.approx(2.0)


def test_every_case_differs_and_there_are_enough(cases):
    assert len(cases.CASES) >= 20
    assert len({repr(case) for case in cases.CASES.values()}) == len(cases.CASES)
    for model, _, spreading, changes in cases.CASES.values():
        fields = cases.BASE | changes
        assert model in {*cases.SHAPES, "smollm2"} and spreading in {"1", "2 ddp", "2 fsdp2"}
        assert fields["per_device_train_batch_size"] % fields["num_generations"] == 0


def test_every_completion_has_an_advantage(cases):
    """In groups of every size that cases have: one without is left out of a run, and counted by its plan."""
    for group in {(cases.BASE | changes)["num_generations"] for *_, changes in cases.CASES.values()}:
        rewards = cases.spread([""] * 2 * group)
        for first in (0, group):
            mean = sum(rewards[first : first + group]) / group
            assert mean not in rewards
