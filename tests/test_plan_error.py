"""What benchmarks/plan_error.py makes of what a case found: which bytes are compared with which, and what is counted."""

import pytest

from tests.benchmark_modules import benchmark
from trl_fsdp_qlora.planning import plan, static

MIB = 2**20


@pytest.fixture(scope="module")
def plan_error():
    return benchmark("plan_error")


@pytest.fixture(scope="module")
def cases():
    return benchmark("plan_error_cases")


def found(measured: float) -> dict:
    """A case of 400 MiB of process, 100 of weights and 300 that come and go, where `measured` MiB came."""
    process = {plan.PROCESS: 360 * MIB, plan.LIBRARIES: 40 * MIB}
    lying = {static.BASE: 90 * MIB, static.TRAINED: 5 * MIB, static.OPTIMIZER: 5 * MIB}
    forward = process | lying | {plan.ACTIVATIONS: 290 * MIB, static.GRADIENTS: 10 * MIB, static.BUCKETS: 7 * MIB}
    planned = {"forward_backward": forward, "optimizer": process | lying}
    resident = {phase: sum(parts.values()) / MIB for phase, parts in planned.items()}
    return {
        "planned": planned,
        "resident_planned": resident,
        "resident": {"forward_backward": 500 + measured, "optimizer": 500.0, "prepare": 9000.0},
        "lying": 100.0,
        "rises": {"forward_backward": measured, "optimizer": 1.0},
    }


def test_tensors_and_resident_sets_are_compared_with_their_own_parts_of_the_plan(plan_error):
    pairs = plan_error.pairs(found(200))
    assert pairs["components"] == {"lying": (100.0, 100.0), "forward_backward": (300.0, 200)}
    assert pairs["resident"] == {"forward_backward": (807.0, 700), "optimizer": (500.0, 500.0)}
    assert pairs["peak"] == {"peak": (807.0, 700)}


def test_the_worst_and_the_lowest_error_keep_their_signs_and_failures_count_for_nothing(plan_error):
    told = plan_error.summary({"a": found(300), "b": found(400), "c": {"failed": "exit codes [1]"}})
    components = told["components"]
    assert components["compared"] == 4 and components["median"] == 0.0
    assert components["worst"] == components["lowest"] == pytest.approx(300 / 400 - 1)
    assert told["peak"]["worst"] == pytest.approx(807 / 900 - 1)


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
