"""Accelerate's configs as a plan reads them: which keys change a launch, and which are refused."""

import json
from dataclasses import replace

import pytest

from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.planning.launches import Launch, read_launch

FSDP = "distributed_type: FSDP\nfsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"


ZERO_3 = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "train_batch_size": "auto"}


def launch_of(tmp_path, text: str) -> Launch:
    (tmp_path / "zero.json").write_text(json.dumps(ZERO_3))
    path = tmp_path / "launch.yaml"
    path.write_text(text.replace("FOLDER", str(tmp_path)))
    return read_launch(str(path))


@pytest.mark.parametrize(
    ("text", "kind", "offload"),
    [
        ("distributed_type: MULTI_GPU", "ddp", ""),
        (f"{FSDP}, fsdp_version: 2}}", "fsdp2", ""),
        (f"{FSDP}}}", "fsdp1", ""),
        (f"{FSDP}, fsdp_version: 2, fsdp_offload_params: true}}", "fsdp2", "all"),
        (f"{FSDP}, fsdp_version: 2, fsdp_offload_params: 'false'}}", "fsdp2", ""),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}", "zero1", ""),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {offload_optimizer_device: cpu}", "zero2", "optimizer"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: FOLDER/zero.json}", "zero3", "all"),
    ],
)
def test_a_launch_is_read_as_accelerate_reads_it(tmp_path, text, kind, offload):
    assert launch_of(tmp_path, f"num_processes: 8\n{text}\n") == Launch(kind, 8, 1, offload)


FIELDS = [
    ("fsdp_version: 2, fsdp_reshard_after_forward: false", {"reshards": False}),
    ("fsdp_version: 2, fsdp_reshard_after_forward: 'True'", {}),
    ("fsdp_sharding_strategy: SHARD_GRAD_OP", {"kind": "fsdp1", "reshards": False}),
    ("fsdp_sharding_strategy: 2", {"kind": "fsdp1", "reshards": False}),
    ("fsdp_reshard_after_forward: shard_grad_op", {"kind": "fsdp1", "reshards": False}),
    ("fsdp_sharding_strategy: HYBRID_SHARD", {"kind": "fsdp1", "replicas": 2}),
    ("fsdp_sharding_strategy: HYBRID_SHARD_ZERO2", {"kind": "fsdp1", "replicas": 2, "reshards": False}),
    ("fsdp_sharding_strategy: NO_SHARD", {"kind": "ddp"}),
    ("fsdp_version: 2, fsdp_transformer_layer_cls_to_wrap: 'A,B'", {"units": ("A", "B")}),
    ("fsdp_version: 2, fsdp_activation_checkpointing: true", {"checkpoints": True}),
]


@pytest.mark.parametrize(("keys", "fields"), FIELDS)
def test_the_keys_of_fsdp_that_change_bytes_are_read(tmp_path, keys, fields):
    launch = launch_of(tmp_path, f"num_processes: 4\nnum_machines: 2\n{FSDP}, {keys}}}\n")
    assert launch == replace(Launch("fsdp2", 4, 2), **fields)


@pytest.mark.parametrize(
    ("keys", "units"), [("NO_WRAP", "model"), ("SIZE_BASED_WRAP, fsdp_min_num_params: 1000", 1000)]
)
def test_units_follow_the_policy(tmp_path, keys, units):
    text = f"num_processes: 2\ndistributed_type: FSDP\nfsdp_config: {{fsdp_auto_wrap_policy: {keys}}}\n"
    assert launch_of(tmp_path, text).units == units


@pytest.mark.parametrize(
    "text",
    [
        f"{FSDP}, fsdp_ignored_modules: 'model.embed_tokens'}}",
        "distributed_type: MEGATRON_LM",
        "distributed_type: MULTI_GPU\nmixed_precision: fp8",
        f"{FSDP}}}\nparallelism_config: {{parallelism_config_tp_size: 2}}",
    ],
)
def test_what_is_not_counted_is_not_planned(tmp_path, text):
    with pytest.raises(UserError, match="is not planned"):
        launch_of(tmp_path, f"num_processes: 4\n{text}\n")


def test_replicas_of_hsdp_hold_a_copy_each(tmp_path):
    launch = read_launch("multi_node_hsdp_qlora")
    assert (launch.processes, launch.replicas, launch.ranks_per_copy) == (16, 2, 8)


def test_a_file_that_accelerate_refuses_is_one_line(tmp_path):
    for text in ("num_processes: 2\n", "- 1\n", "distributed_type: NO\nmine: 1\n", "a: ["):
        with pytest.raises(UserError, match=r"launch.yaml cannot be read"):
            launch_of(tmp_path, text)
