"""Two ranks with micro-batches smaller than a group against one process with whole groups."""

import pytest

pytest.importorskip("bitsandbytes")

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import difference, scenarios_of

pytestmark = [pytest.mark.slow, pytest.mark.processes]

HYBRID = "model={root}/hybrid"
WHOLE = {
    "grpo": "grpo",
    "kl": "grpo:beta=0.1",
    "hybrid": f"grpo:{HYBRID}",
}
CUT = {
    "grpo": "grpo:per_device_train_batch_size=1,gradient_accumulation_steps=4",
    "merged": "grpo:per_device_train_batch_size=1,gradient_accumulation_steps=4,tokens_per_pass=1000",
    "too_long": "grpo:tokens_per_pass=20,max_completion_length=12",
    "kl": "grpo:per_device_train_batch_size=2,gradient_accumulation_steps=2,beta=0.1",
    "hybrid": f"grpo:{HYBRID},per_device_train_batch_size=1,gradient_accumulation_steps=4",
}
CHECKPOINTED = "grpo:per_device_train_batch_size=1,gradient_accumulation_steps=4,gradient_checkpointing=true"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("cut")
    tiny.make_checkpoint(root / "hybrid", **tiny.HYBRID)
    model = tiny.make_checkpoint(root / "model")
    found = {}
    for run, scenarios, processes, environment in (
        ("one", WHOLE, 1, {}),
        ("ddp", CUT, 2, {}),
        ("fsdp2", {**CUT, "checkpointed": CHECKPOINTED}, 2, fsdp_environment()),
    ):
        ranks = scenarios_of(model, root / run, scenarios, processes, environment=environment)
        found |= {(run, scenario): [rank[scenario] for rank in ranks] for scenario in scenarios}
    return found


@pytest.mark.parametrize(
    ("run", "scenario"),
    [*((run, scenario) for run in ("ddp", "fsdp2") for scenario in CUT), ("fsdp2", "checkpointed")],
)
def test_cut_groups_train_as_whole_ones(runs, run, scenario):
    whole = scenario if scenario in WHOLE else "grpo"
    expected = runs["one", whole][0]
    for found in runs[run, scenario]:
        assert found["shared"] and (found["trunks"] > 0 or scenario == "merged")
        assert len(found["gradients"]) == 3
        for wanted, gradients in zip(expected["gradients"], found["gradients"], strict=True):
            assert difference(wanted, gradients) <= 1e-5
    assert difference(expected["adapter"], runs[run, scenario][0]["adapter"]) <= 1e-5
