"""What a plan reads of a recipe, of a parsed config and of accelerate's files.

Covers `tools/planning/table.py`.
"""

import json
from types import SimpleNamespace

import pytest

from tests.tools.planning.models import folder, settings, words
from tests.tools.planning.test_launches import ZERO_3, launch_of
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.planning.hardware import GIB, Hardware
from trl_fsdp_qlora.tools.planning.launches import Launch, read_launch
from trl_fsdp_qlora.tools.planning.model import BASE, BUCKETS, OPTIMIZER, TRAINED
from trl_fsdp_qlora.tools.planning.plan import GATHERED, make_plan, plan_recipe
from trl_fsdp_qlora.tools.planning.settings import from_config, from_words
from trl_fsdp_qlora.tools.planning.table import format_plan


def test_machines_share_the_ranks_of_a_launch(tmp_path):
    launch = launch_of(tmp_path, "distributed_type: MULTI_GPU\nnum_machines: 4\nnum_processes: 32\n")
    assert (launch.processes, launch.ranks_per_machine) == (32, 8)
    run = settings(folder(tmp_path / "base", num_hidden_layers=1), launch)
    assert make_plan(run, Hardware("a card", 24 * GIB, 8)).enough_cards
    few = make_plan(run, Hardware("a card", 24 * GIB, 4))
    assert not few.fits and "a machine has 4 cards for 8 ranks" in format_plan(few)
    line = words(tmp_path / "base")
    assert (
        plan_recipe(line, EfficientGRPOConfig, str(tmp_path / "launch.yaml"), "24GB x2").settings.launch.processes == 8
    )


def test_a_recipes_own_deepspeed_file_is_read(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps(ZERO_3))
    line = [*words(folder(tmp_path / "base")), "--deepspeed", str(tmp_path / "zero.json")]
    launch = from_words(line, EfficientGRPOConfig, Launch("ddp", 2)).launch
    assert (launch.kind, launch.processes, launch.offload) == ("zero3", 2, "all")
    with pytest.raises(UserError, match=r"deepspeed: none.json: there is no such file"):
        from_words([*line[:-1], "none.json"], EfficientGRPOConfig, Launch())


@pytest.mark.parametrize(("bucket", "elements"), [({}, 500_000_000), ({"reduce_bucket_size": "auto"}, 128 * 128)])
def test_the_bucket_of_deepspeed_is_counted_at_its_size(tmp_path, bucket, elements):
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2, **bucket}}))
    line = [*words(folder(tmp_path / "base", num_hidden_layers=1)), "--deepspeed", str(tmp_path / "zero.json")]
    plan = make_plan(from_words(line, EfficientGRPOConfig, Launch("ddp", 2)), Hardware("a card", 24 * GIB))
    assert plan.phases["forward_backward"][BUCKETS] == 4 * elements


@pytest.mark.parametrize("name", ["zero2", "zero3", "multi_node_zero2"])
def test_the_launches_of_deepspeed_in_this_package_are_planned(tmp_path, name):
    plan = plan_recipe(words(folder(tmp_path, num_hidden_layers=1)), EfficientGRPOConfig, name, "24GB x8")
    assert plan.fits and plan.settings.launch.kind == name[-5:]
    assert (GATHERED in plan.phases["forward_backward"]) == (name == "zero3")


def test_what_is_offloaded_is_not_on_the_device(tmp_path):
    path = folder(tmp_path, num_hidden_layers=1)
    card = Hardware("a card", 24 * GIB)
    for offload, on_host in (("", set()), ("optimizer", {OPTIMIZER}), ("all", {OPTIMIZER, BASE, TRAINED})):
        plan = make_plan(settings(path, Launch("zero3", 2, offload=offload)), card)
        parts = plan.phases["forward_backward"].keys() & {OPTIMIZER, BASE, TRAINED}
        assert parts == {OPTIMIZER, BASE, TRAINED} - on_host


def test_the_command_reads_a_recipe_as_its_script_does(tmp_path):
    """The same run from the YAML, in which `off` is a truth value, and from the config that the script builds."""
    arguments = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 40,
        "beta": 0.1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "prefix_sharing": "off",
    }
    args = EfficientGRPOConfig(str(tmp_path), **arguments)
    path = tmp_path / "recipe.yaml"
    path.write_text("prefix_sharing: off\nbf16: false\nuse_cpu: true\nmodel_name_or_path: m\nbeta: 0.1\n")
    line = f"--config {path} --per_device_train_batch_size 8 --num_generations=4 --max_completion_length 40"
    from_file = from_words(line.split(), EfficientGRPOConfig, read_launch(None))
    started = from_config(args, from_file.model, 256)
    names = ("rollout_rows", "rollout_batches", "rows", "mixed", "scores_again")
    for name in (*names, "gradient_checkpointing", "optim", "prefix_sharing"):
        assert getattr(from_file, name) == getattr(started, name), name


def test_a_plan_within_a_launch_of_fsdp2_reads_the_launch_itself(monkeypatch):
    """On GPUs the state is MULTI_GPU until the trainer has made its `Accelerator`, which is after the plan."""

    class EfficientGRPOConfig(SimpleNamespace):
        pass

    def config(device):
        of_device = SimpleNamespace(type=device)
        return EfficientGRPOConfig(deepspeed_plugin=None, world_size=2, device=of_device, bf16=True, fp16=False)

    assert from_config(config("cuda"), None, 256).launch.kind == "ddp"
    exported = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    launch = from_config(config("cuda"), None, 256).launch
    assert (launch.kind, launch.reshards) == ("fsdp2", False)
    assert from_config(config("cpu"), None, 256).launch.kind == "fsdp2"
