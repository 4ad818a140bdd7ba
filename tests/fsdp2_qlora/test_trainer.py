"""Ranks with a sharded 4-bit base compared with one process with the whole one: two, and four as two replicas of two
shards.

Covers `trainer.py`, and with several ranks `prepare.py`, `distribute.py`, `generation.py`, `adapters.py` and
`loading.py`.
"""

import signal

import pytest

pytest.importorskip("bitsandbytes")

from peft import PeftModel

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import WORKER, difference, mesh_environment, scenarios_of
from tests.tiny import save_tiny_model, these_first
from tests.trainers.grpo.test_resume import assert_equal_runs
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.trainers.saving.checkpoints import last_complete_checkpoint, why_not_whole

pytestmark = [pytest.mark.slow, pytest.mark.processes]

GRPO = {
    "grpo": "grpo",
    "pairs": "grpo:num_generations=2",
    "kl": "grpo:beta=0.1,evaluate=1,gradient_accumulation_steps=2",
    "checkpointing": "grpo:gradient_checkpointing=true",
    "trained_head": "grpo:head=1",
    "trained_head_no_sharing": "grpo:head=1,prefix_sharing=off",
    "hybrid": "grpo:model={root}/hybrid",
}
SFT = {"sft": "sft:max_steps=4,save_steps=2", "lora": "sft:max_steps=4,save_steps=2,quantized=0"}
# What TRL restores in addition to the optimizer is restored, too: the entropy bonus's coefficient.
IN_MEMORY = "grpo:model=made,save_steps=1,use_adaptive_entropy=true,entropy_target=10"
ALONE = {
    **GRPO,
    **SFT,
    "bf16": "grpo:bf16=1",
    "by_name": "by_name:base={root}/tied",
    "in_memory": IN_MEMORY + ",max_steps=1",
    "in_memory_resumed": IN_MEMORY + ",max_steps=2,resume={run}/in_memory/checkpoint-1",
    "publish": "publish",
}
DDP = {
    "bf16": "grpo:bf16=1",
    "whole_base": "grpo:model=whole",
    "empty_rank": "empty_rank:base={root}/small,quantized=0",
}
TWO = {
    **ALONE,
    # A row a pass, and groups cut in two (more in test_any_batch_size.py).
    "row_by_row": "grpo:per_device_train_batch_size=1,gradient_accumulation_steps=4",
    "cut": "grpo:tokens_per_pass=20",
    "whole_base": "grpo:model=whole",
    "whole_bf16": "grpo:model=whole,bf16=1,max_steps=1",
    "whole_bf16_padded": "grpo:model=whole,bf16=1,prefix_sharing=off,max_steps=1",
    "empty_rank": "empty_rank:base={root}/small",
    "empty_rank_padded": "empty_rank:base={root}/small,quantized=0,sharing=off",
    "lora_resumed": SFT["lora"] + ",resume={run}/lora/checkpoint-2",
    "resumed": SFT["sft"] + ",resume={run}/sft/checkpoint-2",
    "from_one": SFT["sft"] + ",resume={root}/one/sft/checkpoint-2",
    "per_layer": "by_name:base={root}/tied,gather=per_layer",
    "kept": "by_name:base={root}/tied,gather=per_layer,keep=1",
    "stored": "by_name:stored={root}/stored",
    "context": "gather_context",
    "memory": "memory:big={root}/big",
    # Environment variables stay for what follows.
    "full_state_dict": "sft:max_steps=1,save_steps=1,double=0,FSDP_STATE_DICT_TYPE=FULL_STATE_DICT",
    "in_memory_full": IN_MEMORY + ",max_steps=1,full=1",
}
FOUR = {
    "pairs": GRPO["pairs"],  # a rank has two completions of a prompt
    "sft": SFT["sft"],
    "by_name": ALONE["by_name"],
    "moved": "sft:max_steps=2,gradient_accumulation_steps=2",
    "from_one": SFT["sft"] + ",resume={root}/one/sft/checkpoint-2",
    "one_row": SFT["sft"] + ",resume={run}/sft/checkpoint-2,PARALLELISM_CONFIG_DP_REPLICATE_SIZE=1,"
    "PARALLELISM_CONFIG_DP_SHARD_SIZE=4",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the models that the scenarios name."""
    folder = tmp_path_factory.mktemp("sharded")
    save_tiny_model(folder / "small")
    tiny.make_checkpoint(folder / "hybrid", **tiny.HYBRID)
    tiny.load(tiny.make_checkpoint(folder / "tied", tie_word_embeddings=True)).save_pretrained(folder / "stored")
    tiny.make_checkpoint(folder / "big", hidden=768, layers=6, intermediate=3072)
    tiny.make_checkpoint(folder / "model")
    return folder


RUNS = {
    "one": (ALONE, 1, {}),
    "ddp": (DDP, 2, {}),
    "two": (TWO, 2, fsdp_environment()),
    "again": ({"from_two": SFT["sft"] + ",resume={root}/two/sft/checkpoint-2"}, 1, {}),
    "four": (FOUR, 4, mesh_environment()),
}
# What `make test` runs of each; `make test-exhaustive` runs the others.
FIRST = {
    "one": ("grpo", "sft", "by_name"),
    "two": ("grpo", "cut", "sft", "resumed", "by_name"),
}


def of_make_test(run: str, scenario: str) -> bool:
    return scenario in FIRST.get(run, ())


def cases(table: list[tuple]) -> list:
    """A table whose rows begin with a run and a scenario, for `parametrize`."""
    return these_first(table, *(case for case in table if of_make_test(*case[:2])))


class Runs(dict):
    """What each rank found, by run and scenario.

    A run is launched when a result of it is first asked for: the scenarios of `make test` at once, and the others at
    once.
    """

    def __init__(self, root):
        self.root = root

    def __missing__(self, key: tuple[str, str]) -> list[dict]:
        run, asked = key
        if not of_make_test(run, asked):
            for run_before in ("one", "two"):
                self[run_before, "sft"]  # some of the others continue from checkpoints of these
        scenarios, processes, environment = RUNS[run]
        part = {
            name: scenario
            for name, scenario in scenarios.items()
            if of_make_test(run, name) == of_make_test(run, asked)
        }
        ranks = scenarios_of(self.root / "model", self.root / run, part, processes, environment=environment)
        for scenario in part:
            self[run, scenario] = [rank[scenario] for rank in ranks]
        return self[key]


@pytest.fixture(scope="module")
def runs(root):
    return Runs(root)


@pytest.mark.parametrize(
    ("run", "scenario"), cases([(run, name) for run, (names, *_) in RUNS.items() for name in names])
)
def test_parameters_are_dtensors_where_they_are_sharded(runs, run, scenario):
    sharded = run in ("two", "four")
    assert runs["one", "sft"][0]["base"] is None
    for result in runs[run, scenario]:
        assert result.get("dtensors", sharded) == sharded
        assert result.get("adapter_dtypes", ["torch.float32"]) == ["torch.float32"]
    if (run, scenario) in (("ddp", "bf16"), ("two", "whole_base")):  # nothing in it is quantized
        assert runs[run, scenario][0]["base"] is None


@pytest.mark.parametrize(
    ("run", "scenario", "shards", "most"),
    cases(
        [
            ("two", "sft", 2, 0.52),
            ("two", "by_name", 2, 0.52),
            ("two", "full_state_dict", 2, 0.56),  # without double quantization the state is larger
            ("four", "pairs", 2, 0.52),
            ("four", "one_row", 4, 0.27),
        ]
    ),
)
def test_a_rank_holds_its_part_of_packed_bytes_and_states(runs, run, scenario, shards, most):
    for base in (result["base"] for result in runs[run, scenario]):
        assert base["world_size"] == shards and 1 / shards <= base["ratio"] <= most


# Ranks sum the same float32 terms in another order, and AdamW carries the rounding on. One process is no reference for
# the unquantized base: its larger batches round otherwise, and one of the gradients is ill-conditioned.
@pytest.mark.parametrize(
    ("run", "scenario", "reference", "steps", "near"),
    cases(
        [
            *(("two", scenario, ("one", scenario), 3, 1e-5) for scenario in GRPO),
            *(("two", scenario, ("one", scenario), 4, 1e-5) for scenario in SFT),
            *(("two", scenario, ("one", "grpo"), 3, 1e-5) for scenario in ("row_by_row", "cut")),
            ("two", "whole_base", ("ddp", "whole_base"), 3, 1e-6),
            ("two", "in_memory_resumed", ("one", "in_memory_resumed"), 1, 3e-5),
            ("two", "resumed", ("two", "sft"), 2, 1e-5),
            ("two", "from_one", ("one", "sft"), 2, 1e-5),
            ("two", "lora_resumed", ("one", "lora"), 2, 1e-5),
            ("again", "from_two", ("two", "sft"), 2, 1e-5),
            # Half of the vocabulary ends a completion: ranks wait for each other if each layer is gathered for every
            # token.
            *(("two", scenario, ("two", "by_name"), 2, 1e-5) for scenario in ("per_layer", "kept", "stored")),
            ("four", "pairs", ("one", "pairs"), 3, 1e-5),
            ("four", "from_one", ("one", "sft"), 2, 1e-5),
            ("four", "one_row", ("one", "sft"), 2, 1e-5),  # saved by 2 x 2, continued by 1 x 4
        ]
    ),
)
def test_training_is_that_of_the_reference(runs, run, scenario, reference, steps, near):
    expected = runs[reference][0]
    for actual in runs[run, scenario]:
        assert actual["shared"] == expected["shared"]
        assert actual["loss"] == pytest.approx(expected["loss"], abs=near) and actual["loss"]
        # Before training, at step 2, and after training.
        assert actual["eval"] == pytest.approx(expected["eval"], abs=near)
        assert len(actual["eval"]) == (3 if scenario == "kl" else 0)
        assert len(actual["gradients"]) == steps
        for wanted, gradients in zip(expected["gradients"][-steps:], actual["gradients"], strict=True):
            assert difference(wanted, gradients) <= near
            # A and B of seven projections in two layers (eight in a recurrent one), and the head if it is trained.
            assert len(gradients) == 2 * 7 * 2 + ("head" in scenario) + 2 * (scenario == "hybrid")
    assert difference(expected["adapter"], runs[run, scenario][0]["adapter"]) <= near
    if scenario in GRPO:
        assert expected["shared"] == (scenario != "trained_head_no_sharing")


@pytest.mark.exhaustive
def test_bf16_is_as_close_to_one_process_as_ddp_is(runs):
    one, two, ddp = (runs[run, "bf16"][0] for run in ("one", "two", "ddp"))
    assert one["shared"] and two["shared"] and ddp["shared"]
    scale = max(gradient.abs().max().item() for gradient in one["gradients"][0].values())
    # A unit or two of bfloat16's 2^-8, before AdamW turns rounding into signs; and no further from DDP than rounding
    # to another order of two terms.
    assert difference(one["gradients"][0], two["gradients"][0]) <= 2 * 2**-8 * scale
    assert difference(ddp["gradients"][0], two["gradients"][0]) <= 1e-6 * scale
    assert difference(one["adapter"], two["adapter"]) <= 1.01 * difference(one["adapter"], ddp["adapter"])
    # FSDP2 rounds what modules return, if accelerate's policy is left as it is.
    for scenario in ("whole_bf16", "whole_bf16_padded", "bf16"):
        unrounded = runs["two", scenario][0]["unrounded"]
        assert unrounded and min(unrounded) > 0.9, scenario


@pytest.mark.parametrize(
    ("scenario", "step"), these_first([("sft", 4), ("lora", 4), ("full_state_dict", 1)], ("sft", 4))
)
def test_a_saved_adapter_loads_as_plain_peft_in_one_process(runs, root, scenario, step):
    folder = root / "two" / scenario / f"checkpoint-{step}"
    files = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= files
    # Nothing of the base was written: the tiny adapter and a tokenizer are all there is.
    assert not [name for name in files if name.startswith(("model", "pytorch_model"))]
    loaded = PeftModel.from_pretrained(tiny.load_whole(root / "model"), folder)
    plain = {name: value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert difference(plain, runs["two", scenario][0]["adapter"]) == 0
    assert any(value.any() for name, value in plain.items() if "lora_B" in name)


@pytest.mark.exhaustive
def test_a_model_object_without_a_folder_is_saved_and_resumed(runs, root):
    """The base's weight files were once looked for; without any, one rank alone sliced sharded weights."""
    one, two = (runs[run, "in_memory_resumed"][0]["entropy_coef"] for run in ("one", "two"))
    for folder in ("in_memory/checkpoint-1", "in_memory_resumed/checkpoint-2", "in_memory_full/checkpoint-1"):
        assert why_not_whole(root / "two" / folder) is None
    assert one == two != EfficientGRPOConfig.entropy_coef


@pytest.mark.parametrize(
    ("run", "scenario"), cases([("two", "by_name"), ("two", "per_layer"), ("two", "stored"), ("four", "by_name")])
)
def test_one_reader_per_node_gives_the_logits_of_one_process(runs, run, scenario):
    expected = runs["one", "by_name"][0]["first_logits"]
    assert expected.std() > 0.01
    for rank, actual in enumerate(runs[run, scenario]):
        assert actual["meta"] == bool(rank % 2)
        assert (actual["first_logits"] - expected).abs().max() <= 1e-5


@pytest.mark.exhaustive
def test_gathering_once_moves_less(runs):
    results = {name: runs["two", name] for name in ("by_name", "per_layer", "kept")}
    gathers = {name: ranks[0]["traffic"][1]["gathers"] for name, ranks in results.items()}
    # Two micro-batches: forward and backward of two layers each gather four times a micro-batch; kept, two in all.
    assert gathers["by_name"] < gathers["per_layer"] and gathers["kept"] <= gathers["per_layer"] - 4
    assert results["per_layer"][0]["longest"] != results["per_layer"][1]["longest"]  # one rank waits for the other


@pytest.mark.exhaustive
def test_only_gradients_leave_a_node(runs):
    for result in runs["four", "moved"]:
        assert result["mesh"] == (2, 2)
        traffic = result["traffic"][1]
        assert traffic["gathered_bytes"] > 0 and traffic["gathered_between_nodes"] == 0
        # Of G bytes of gradients the reduce-scatter sends half to the other shard, and the all-reduce, as a ring of
        # two, a rank's half twice by halves. All rows are even, so FSDP2 pads none.
        gradients = sum(value.nbytes for value in runs["one", "sft"][0]["adapter"].values())
        assert traffic["reduced_bytes"] == pytest.approx(gradients, rel=1e-12)
        assert traffic["reduced_between_nodes"] == pytest.approx(gradients / 2, rel=1e-12)


def train_killed(root, folder, kills="+", resume=""):
    """Exit codes of two ranks that train in `folder`."""
    words = root / "small", root, f"run=killed:kills={kills},resume={resume},into={folder}"
    # A rank whose peer is gone has to end by itself, well within a minute.
    ranks = launch(WORKER, *words, timeout=240, grace=60, environment=fsdp_environment(), check=False)
    print(*(text for _, text in ranks))  # shown if the test fails
    return [code for code, _ in ranks]


@pytest.fixture(scope="module")
def uninterrupted(root):
    assert train_killed(root, root / "whole_run") == [0, 0]
    return root / "whole_run"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kills", "resumes_at"), [("+step", 6), ("saving+", 4)])
def test_killed_and_resumed_equals_uninterrupted(root, uninterrupted, tmp_path, kills, resumes_at):
    """`kill -9` of one rank: the other ends by itself, and the resumed run equals the uninterrupted one."""
    run = tmp_path / "run"
    for code, cause in zip(train_killed(root, run, kills), kills.split("+"), strict=True):
        if cause:
            assert code == -signal.SIGKILL
        else:  # the launcher would kill a rank that hangs
            assert code not in (0, -signal.SIGKILL)
    assert last_complete_checkpoint(run).name == f"checkpoint-{resumes_at}"
    assert train_killed(root, run, resume="auto") == [0, 0]
    assert_equal_runs(run, uninterrupted)  # two ranks' sums have one order: no tolerance
