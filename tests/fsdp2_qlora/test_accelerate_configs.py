"""Every accelerate config for one node, launched for real as its CPU twin: `accelerate launch`, two gloo processes."""

import json
import math
import os
import re
import runpy
import sys
import time

import pytest
import torch
import yaml

pytest.importorskip("bitsandbytes")

from peft import PeftModel

from tests.distributed.launch import REPOSITORY, accelerate_launch, free_port, run_launcher
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import WORKER, difference
from trl_fsdp_qlora.fsdp2_qlora.loading import keep_plain_kernel
from trl_fsdp_qlora.tools.data.datasets import hold_out, read_problems, to_prompts
from trl_fsdp_qlora.tools.evaluation.accuracy import evaluate
from trl_fsdp_qlora.tools.evaluation.measurement import Measurement
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.problems import load_held_out

pytestmark = [pytest.mark.slow, pytest.mark.processes]

CONFIGS = REPOSITORY / "accelerate_configs"


def accelerate(config, model, out, *scenarios):
    """Results of both ranks."""
    out.mkdir()
    run = accelerate_launch(config, WORKER, model, out, *scenarios, cwd=REPOSITORY, timeout=180)
    assert run.returncode == 0, run.stdout + run.stderr
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The model, and what DDP makes of it: whole weights on both ranks."""
    root = tmp_path_factory.mktemp("configs")
    model = tiny.make_checkpoint(root / "model")
    result, _ = accelerate("ddp_cpu", model, root / "ddp", "sft=sft", "lora=sft:quantized=0")
    assert not result["sft"]["dtensors"]
    return model, result


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """A base that answers with numbers, and by whether it is quantized the problems of which it solves half."""
    root = tmp_path_factory.mktemp("problems")
    base = tiny.make_checkpoint(root / "base", likes_digits=True)
    return base, {quantized: tiny.make_problems(root / str(quantized), base, quantized) for quantized in (True, False)}


def recipe(problems, quantized, gather="auto"):
    """The last scenario of a launch: at its end a recipe destroys the process group, and there is no second one."""
    return f"recipe=recipe:base={problems[0]},data={problems[1][quantized]},quantized={int(quantized)},gather={gather}"


def check_accuracy(problems, quantized, out):
    """What the ranks measured together is what one ordinary process measures, without and with the adapter."""
    record = json.loads((out / "metrics.json").read_text())
    assert [entry["step"] for entry in record["history"] if "accuracy" in entry] == [2]
    held_out = load_held_out(ScriptArguments(problems[1][quantized], held_out=10, eval_problems=9, chat=False))
    model = tiny.load(problems[0]) if quantized else tiny.load_whole(problems[0])
    keep_plain_kernel(model)
    # What is sampled depends on the seed and the batches, not on the ranks.
    settings = {"max_new_tokens": 3, "batch_size": 2, "seed": 42}
    before = evaluate(model, tiny.make_tokenizer(), held_out, Measurement(**settings))
    adapted = PeftModel.from_pretrained(model, out)
    after = evaluate(adapted, tiny.make_tokenizer(), held_out, Measurement(samples=2, **settings))
    for when, alone in (("before", before), ("after", after)):
        expected = {**alone.as_dict(), "interval": list(alone.interval)}
        assert {**record[when], "seconds": 0} == {**expected, "seconds": 0}, when
    assert 0 < record["before"]["correct"] < 9
    assert record["after"]["correct"] != record["before"]["correct"]  # the adapter does something


def test_the_evaluation_script_measures_a_4_bit_base(problems, tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    arguments = (
        f"--model_name_or_path {problems[0]} --load_in_4bit true --use_bnb_nested_quant true --dtype float32 "
        "--chat false"
    )
    arguments += (
        f" --dataset {problems[1][True]} --held_out 10 --max_completion_length 3 --accuracy_batch_size 4 "
        f"--output {out}"
    )
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments.split()])
    runpy.run_path(str(REPOSITORY / "recipes" / "evaluate.py"), run_name="__main__")
    held_out = to_prompts(hold_out(read_problems(problems[1][True], "train"), 10)[1], chat=False)
    model = tiny.load(problems[0])
    keep_plain_kernel(model)
    alone = evaluate(model, tiny.make_tokenizer(), held_out, Measurement(max_new_tokens=3, batch_size=4))
    measured = json.loads(out.read_text())
    assert measured["correct"] == alone.correct > 0 and measured["n"] == 10


@pytest.mark.parametrize(
    ("config", "kinds", "reason"),
    [
        ("fsdp2_qlora_cpu", ["sft"], "the base is quantized"),
        pytest.param("fsdp2_qlora_offload_cpu", ["sft"], "the base is quantized", marks=pytest.mark.exhaustive),
        pytest.param("fsdp2_cpu", ["lora"], "the base is sharded", marks=pytest.mark.exhaustive),
        pytest.param("zero2_cpu", ["sft", "lora"], None, marks=pytest.mark.exhaustive),
        pytest.param("zero3_cpu", ["lora"], "the base is sharded", marks=pytest.mark.exhaustive),
    ],
)
def test_a_config_trains_as_ddp_does_syncs_measures_and_saves(reference, problems, tmp_path, config, kinds, reason):
    """`kinds` are with a 4-bit base and with a whole one; `reason` is why the adapter alone is sent to an engine."""
    fsdp2 = config.startswith("fsdp2")
    quantized = "qlora" in config
    out = tmp_path / "out"
    if not fsdp2:
        pytest.importorskip("deepspeed")
    model, ddp = reference
    scenarios = [f"{kind}=sft:quantized={int(kind == 'sft')},final={out}/{kind}" for kind in kinds]
    scenarios += [f"synced_gpus=synced_gpus:quantized={int(quantized)},reason={reason}"] if reason else []
    gather = "per_layer" if config == "fsdp2_qlora_cpu" else "auto"
    ranks = accelerate(config, model, out, *scenarios, recipe(problems, quantized, gather))
    for rank, kind in ((rank, kind) for rank in ranks for kind in kinds):
        actual = rank[kind]
        expected = ddp[kind]
        near = 1e-5 if fsdp2 else 1e-4
        assert actual["dtensors"] == fsdp2 and actual["loss"] == pytest.approx(expected["loss"], abs=near)
        assert (actual["base"] is not None and actual["base"]["ratio"] <= 0.52) == quantized
        loaded = PeftModel.from_pretrained(tiny.load(model) if kind == "sft" else tiny.load_whole(model), out / kind)
        plain = {name: value.float() for name, value in loaded.state_dict().items() if "lora_" in name}
        assert difference(plain, expected["adapter"]) <= near
    check_accuracy(problems, quantized, out / "recipe")
    if quantized:  # the start-up block has what was measured, and counts parameters, not bytes
        block = ranks[0]["recipe"]
        assert "ratio 0.500 on 2 ranks" in block and "weights sharded over them by FSDP" in block
        count = sum(p.numel() for p in tiny.load_whole(model).parameters())
        assert re.search(rf"frozen parameters: +{count:,} \(", block)


def test_a_rank_that_dies_ends_the_run_with_its_traceback(reference, tmp_path):
    start = time.monotonic()
    run = accelerate_launch("fsdp2_qlora_cpu", WORKER, reference[0], tmp_path, "sft=sft:fails=1", cwd=REPOSITORY)
    assert run.returncode != 0 and time.monotonic() - start < 60
    assert "Traceback" in run.stderr and "this rank dies in the third step" in run.stderr


CONFIGS_OF_GPUS = ["fsdp2", "fsdp2_qlora", "fsdp2_qlora_offload", "zero2", "zero3", "ddp"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: NCCL and the bf16 of the configs themselves")
@pytest.mark.parametrize("config", CONFIGS_OF_GPUS)
def test_the_config_itself_trains_on_gpus(problems, tmp_path, config):
    """On every GPU that there is; with the sharded base the recipe too: drawing, scoring, accuracy, and what is
    saved.
    """
    if config.startswith("zero"):
        pytest.importorskip("deepspeed")
    model = tiny.make_checkpoint(tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    quantized = config not in ("fsdp2", "zero3")
    with_recipe = config.startswith("fsdp2_qlora")
    words = ["accelerate", "--config_file", CONFIGS / f"{config}.yaml", "--num_processes", torch.cuda.device_count()]
    words += ["--main_process_port", free_port(), WORKER, model, out]
    words += [f"sft=sft:quantized={int(quantized)},final={out}/final", *[recipe(problems, True)] * with_recipe]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    variables = {"ON_GPU": "1", "CUDA_VISIBLE_DEVICES": devices}
    run = run_launcher(*words, cwd=REPOSITORY, environment=variables, from_shell=True)
    assert run.returncode == 0, run.stdout + run.stderr
    result = torch.load(out / "rank0.pt", weights_only=False)["sft"]
    assert len(result["loss"]) == 3 and torch.tensor(result["loss"]).isfinite().all()
    assert result["dtensors"] == config.startswith("fsdp2")
    if result["dtensors"]:
        assert result["devices"] == ["cpu" if config.endswith("offload") else "cuda"]
    for base, folder in ((model, "final"), *([(problems[0], "recipe")] * with_recipe)):
        loaded = PeftModel.from_pretrained(tiny.load(base) if quantized else tiny.load_whole(base), out / folder)
        assert any(parameter.any() for name, parameter in loaded.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(
    ("config", "twin"),
    [
        *((config, f"{config}_cpu") for config in CONFIGS_OF_GPUS),
        ("ddp", "multi_node_ddp"),
        ("fsdp2_qlora", "multi_node_hsdp_qlora"),
        ("zero2", "multi_node_zero2"),
    ],
)
def test_twins_differ_in_the_machines_alone(config, twin):
    free = {"use_cpu", "gpu_ids", "mixed_precision", "num_machines", "num_processes", "main_process_port"}
    free |= {"parallelism_config"} | ({"distributed_type"} if twin == "ddp_cpu" else set())
    compared = []
    for name in (config, twin):
        settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        mesh = settings.get("parallelism_config", {"all": settings["num_processes"]})
        assert math.prod(mesh.values()) == settings["num_processes"]
        for option in ("zero3_init_flag", "deepspeed_multinode_launcher"):
            settings.get("deepspeed_config", {}).pop(option, None)
        compared.append({name: value for name, value in settings.items() if name not in free})
    assert compared[0] == compared[1]
