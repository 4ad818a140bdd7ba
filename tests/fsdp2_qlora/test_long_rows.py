"""What makes rows longer, on two ranks: offloaded activations and tiles, next to one process without either."""

import pytest

pytest.importorskip("bitsandbytes")

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import difference, scenarios_of

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.exhaustive]

GRPO = "grpo:max_steps=2"
HYBRID = "model={root}/hybrid"
ROW_BY_ROW = "per_device_train_batch_size=1,gradient_accumulation_steps=4"
PLAIN = {"dense": GRPO, "hybrid": f"{GRPO},{HYBRID}"}
LONG = {
    "dense": f"{GRPO},{ROW_BY_ROW},offload=1,mlp_tokens_per_tile=5",
    "hybrid": f"{GRPO},{ROW_BY_ROW},{HYBRID},offload=1,mlp_tokens_per_tile=5",
}
TOLERANCE = 2e-5  # as of test_any_batch_size.py


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    tiny.make_checkpoint(root / "hybrid", **tiny.HYBRID)
    model = tiny.make_checkpoint(root / "model")
    one = scenarios_of(model, root / "one", PLAIN, 1)
    ddp = scenarios_of(model, root / "ddp", LONG, 2)
    fsdp2 = scenarios_of(model, root / "fsdp2", LONG, 2, environment=fsdp_environment())
    return {"one": one, "ddp": ddp, "fsdp2": fsdp2}


@pytest.mark.parametrize("scenario", LONG)
@pytest.mark.parametrize("run", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_process_does(runs, run, scenario):
    expected = runs["one"][0][scenario]
    assert expected["tiled"] == expected["copies"] == 0
    for rank in runs[run]:
        actual = rank[scenario]
        assert actual["copies"] > 0 and actual["tiled"] > 0 and actual["shared"]
        assert len(actual["gradients"]) == 2
        for wanted, gradients in zip(expected["gradients"], actual["gradients"], strict=True):
            assert difference(wanted, gradients) <= TOLERANCE
