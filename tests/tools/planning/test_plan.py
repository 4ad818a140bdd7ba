"""What a plan puts together, the command, and the other way round: what is found to fit was planned itself, and the
next larger does not fit."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tools.planning.models import folder, settings, words
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.cli.plan import plan as command
from trl_fsdp_qlora.tools.planning import passes
from trl_fsdp_qlora.tools.planning import plan as module
from trl_fsdp_qlora.tools.planning.engine import choices
from trl_fsdp_qlora.tools.planning.hardware import CONTEXT, GIB, Hardware, read_hardware
from trl_fsdp_qlora.tools.planning.known_models import MODELS
from trl_fsdp_qlora.tools.planning.largest_model import largest_models
from trl_fsdp_qlora.tools.planning.plan import changed, fewest_cards, largest, make_plan, plan_recipe
from trl_fsdp_qlora.tools.planning.settings import Launch, from_config, from_words, read_launch

CPU = Hardware("a host", 2**40, 1, gpu=False)
CARD = Hardware("a card", 2**40, 1)
RECIPE_70B = "recipes/Llama-3.1-70B-Instruct/grpo_qlora/config_gsm8k.yaml"


def test_a_prefill_has_its_prompts_keys_and_values_beside_it(tmp_path):
    """Long prompts, short completions: generation needs most before its first token."""
    run = settings(folder(tmp_path), prompt_tokens=256, max_completion_length=1, compact_generation=False)
    plan = make_plan(run, hardware=CPU)
    prefill = passes.measure(run, plan.config, passes.Shape(8, 256, 0, False), False)
    prompts = 8 * 256 * 5 * 2 * 2 * 32 * 4  # rows, tokens, layers, keys and values, heads, their size, bytes
    coming = sum(
        plan.phases["generate"].get(part, 0) for part in (module.ACTIVATIONS, module.CACHE, module.TOKEN_STEP)
    )
    assert coming == prefill + prompts


def test_turns_keep_as_much_as_generation_holds_and_at_most_half_of_what_is_free(tmp_path):
    run = settings(folder(tmp_path))
    plan = make_plan(run, hardware=CARD)
    of_turns = replace(run, values=run.values | {"environment": "game.py:Game"})
    kept = make_plan(of_turns, hardware=CARD, config=plan.config)
    cache = plan.phases["generate"][module.CACHE]
    assert kept.phases["generate"][module.TURNS] == kept.phases["generate"][module.CACHE] == cache > 0
    assert cache <= kept.total("generate") - plan.total("generate") <= 1.06 * cache
    coming = (module.ACTIVATIONS, module.CACHE, module.TOKEN_STEP, module.ROOM, module.GATHERED)
    weights = sum(size for part, size in plan.phases["generate"].items() if part not in coming)
    small = make_plan(of_turns, hardware=replace(CARD, memory=weights + cache), config=plan.config)
    assert 0 < small.phases["generate"][module.TURNS] <= cache // 2
    for changes in ({"compact_generation": False}, {"use_vllm": True, "vllm_mode": "server"}):
        other = replace(of_turns, values=of_turns.values | changes)
        assert module.TURNS not in make_plan(other, hardware=CARD, config=plan.config).phases["generate"]


def test_a_base_that_vllm_shares_counts_once(tmp_path):
    """The engine's own copy is what a model in the dtype of its products takes; its share has to hold it and a row."""
    changes = {"load_in_4bit": True, "use_vllm": True, "vllm_mode": "colocate", "bf16": True, "dtype": "bfloat16"}
    run = settings(folder(tmp_path), launch=Launch(), vllm_gpu_memory_utilization=0.5, **changes)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).num_parameters()
    plan = make_plan(run, hardware=CARD)
    one = changed(plan, vllm_share_base="on")
    assert (plan.engine.base, one.engine.base) == (2 * weights, 0)
    for phase in plan.phases:
        parts = plan.phases[phase]
        assert (
            parts[module.ENGINE] + parts[module.ENGINES_BASE] == one.phases[phase][module.ENGINE] == CARD.memory // 2
        )
    asleep = changed(plan, vllm_enable_sleep_mode=True)
    assert asleep.phases["optimizer"][module.ENGINES_BASE] == 2 * weights
    assert module.ENGINE not in asleep.phases["optimizer"]
    # With a share of less than its base an engine cannot start, and the line to change is sharing.
    tight = make_plan(run, hardware=replace(CARD, memory=int(2 * 1.9 * weights)), config=plan.config)
    assert not tight.engine.starts and not tight.fits and "it cannot start" in module.format_plan(tight)
    assert changed(tight, vllm_share_base="on").engine.starts
    dense = settings(folder(tmp_path), launch=Launch(), **changes | {"load_in_4bit": False})
    shared = {
        (sync, choice): make_plan(
            replace(dense, values=dense.values | {"rollout_sync": sync, "vllm_share_base": choice}), CARD, plan.config
        ).engine.is_shared
        for sync in ("auto", "adapter")
        for choice in ("auto", "on", "off")
    }
    assert {key for key, is_shared in shared.items() if is_shared} == {
        ("adapter", "auto"),
        ("auto", "on"),
        ("adapter", "on"),
    }


def test_experts_in_4_bits_are_the_engines_own_and_others_are_shared(tmp_path):
    mixture = folder(tmp_path, model_type="qwen3_moe", moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
    changes = {"use_vllm": True, "vllm_mode": "colocate", "vllm_share_base": "on", "bf16": True, "dtype": "bfloat16"}
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    experts = sum(parameter.numel() for name, parameter in base.named_parameters() if ".experts." in name)
    for in_4_bits in (False, True):
        plan = make_plan(settings(mixture, launch=Launch(), load_in_4bit=in_4_bits, **changes), hardware=CARD)
        assert plan.engine.is_shared and plan.engine.base == (2 * experts if in_4_bits else 0)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"rollout_sync": "adapter"}, (True, True)),
        ({"rollout_sync": "adapter", "vllm_engine_kwargs": '{"load_format": "dummy"}'}, (True, False)),
        ({"rollout_sync": "adapter", "dtype": "float32"}, (True, False)),
        ({"load_in_8bit": True}, (True, False)),
        ({"use_dora": True}, (False, False)),
        ({"rollout_sync": "adapter", "use_dora": True}, (False, False)),
        ({"vllm_share_base": "on", "vllm_tensor_parallel_size": 2}, (False, False)),
    ],
    ids=str,
)
def test_the_engines_base_is_planned_by_the_rules_of_the_run(tmp_path, fields, expected):
    """Whether it gets the adapter alone and shares the base; a run whose choice cannot be ends before it loads."""
    changes = {"use_vllm": True, "vllm_mode": "colocate", "bf16": True, "dtype": "bfloat16", **fields}
    run = settings(folder(tmp_path), launch=Launch(), **changes)
    assert choices(run, AutoConfig.from_pretrained(tmp_path)) == expected


def test_the_largest_model_next_to_vllm_is_larger_with_one_base(tmp_path):
    """Both fit as they were planned, and the next larger ones do not."""
    card = Hardware("16 GB", 16 * GIB)
    run = settings(folder(tmp_path), launch=Launch(), load_in_4bit=True, use_vllm=True, vllm_mode="colocate")
    sizes = {}
    largest = largest_models(make_plan(run, hardware=card), sizes)
    names = list(MODELS)
    assert names.index(largest["one base"]) > names.index(largest["a base each"])
    for base, name in largest.items():
        assert sizes[name][base] <= card.memory < sizes[names[names.index(name) + 1]][base]
    difference = sizes[largest["one base"]]["a base each"] - sizes[largest["one base"]]["one base"]
    assert difference == pytest.approx(MODELS[largest["one base"]][1] * 1e9 * 4, rel=0.01)  # float32


def test_the_first_step_counts_with_the_padded_rows_that_it_compares(tmp_path):
    """On a CPU TRL projects every position of a padded row: with a long prompt that is more than the packed row's."""
    run = settings(folder(tmp_path), prompt_tokens=256, max_completion_length=4)
    plan = make_plan(run, hardware=CPU)
    rows = run.per_device_train_batch_size
    width = 260
    shape = passes.Shape(1, 256 * run.groups + 4 * rows, 4 * rows, True)
    first_step = passes.measure(run, plan.config, shape, False, True)
    at_once = (256 * run.groups + 4 * rows) // width
    compared = passes.measure(run, plan.config, passes.Shape(at_once, width, at_once * 259, False), False, True)
    assert plan.phases["forward_backward"][module.ACTIVATIONS] == compared > first_step


@pytest.mark.slow  # six plans
def test_plans_for_other_numbers_of_ranks_measure_nothing_again(tmp_path):
    run = settings(folder(tmp_path), Launch("fsdp2", 2))
    card = replace(CARD, cards=8)
    first = make_plan(run, hardware=card)
    before = {*passes._measured}, {*passes._whole}
    four = changed(first, processes=4)
    assert ({*passes._measured}, {*passes._whole}) == before
    passes._measured.clear()
    passes._whole.clear()
    assert make_plan(replace(run, launch=Launch("fsdp2", 4)), hardware=card).phases == four.phases
    assert changed(first, max_completion_length=80).phases["forward_backward"] != first.phases["forward_backward"]
    for name in ("gradient_checkpointing", "load_in_4bit"):
        assert changed(first, **{name: True}).phases != first.phases, name


def found(bytes_of, capacity: int, most: int, start: int) -> tuple[int, int]:
    """What `_most_that_fits` finds if a count takes `bytes_of(count)`, and the number of plans that it makes."""
    tried = []

    def plan_of(count):
        tried.append(count)
        peak = bytes_of(count)
        return SimpleNamespace(peak=peak, capacity=capacity, fits=peak <= capacity)

    return module._most_that_fits(plan_of, most, start), len(tried)


@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda count: 1000 + 7 * count,
        lambda count: 1000 + max(7 * count, 20 * count - 900),  # a kink: another phase needs most
        lambda count: 1000 + 7 * count + count**2 // 50,  # a mask
        lambda count: 1000 + 64 * (-(-count // 8)),  # steps
    ],
    ids=["line", "kink", "mask", "steps"],
)
def test_the_search_finds_what_counting_up_finds_in_few_plans(bytes_of):
    for capacity in (500, 1007, 1100, 2000, 9000, 10**9):
        for most in (1, 40, 4000):
            brute_force = max([count for count in range(1, most + 1) if bytes_of(count) <= capacity], default=0)
            for start in (0, 1, 25, 5000):
                largest_count, plans = found(bytes_of, capacity, most, start)
                assert largest_count == brute_force
                assert plans <= 16
    assert (
        found(lambda count: 1000 + 7 * count, 9000, 4000, 25)[1] <= 4
    )  # its own plan, one beyond, the answer, the next


def test_a_search_runs_no_step_of_a_plan_that_does_not_fit_while_it_generates(tmp_path, monkeypatch):
    run = settings(folder(tmp_path, num_hidden_layers=2), compact_generation=False)
    plan = make_plan(run, hardware=CARD)
    least = plan.total("generate")
    with_gradients = []
    measure = passes.measure

    def measured(*args, grad=False):
        with_gradients.append(grad)
        return measure(*args, grad=grad)

    monkeypatch.setattr(passes, "measure", measured)
    for memory in (plan.peak, least, least - 1):
        hardware = replace(CARD, memory=memory)
        with_gradients.clear()
        stopped = make_plan(run, hardware, plan.config, stops_early=True)
        assert any(with_gradients) == ("forward_backward" in stopped.phases) == (memory >= least)
        assert stopped.phases["generate"] == plan.phases["generate"]
        assert stopped.fits == make_plan(run, hardware, plan.config).fits == (memory >= plan.peak)


@pytest.mark.parametrize(("positions", "longest"), [(400, 144), (271, 0), (2**20, 2**17), (None, 2**17)])
def test_no_length_is_found_beyond_the_models_positions(positions, longest, monkeypatch):
    text = SimpleNamespace(max_position_embeddings=positions)
    run = SimpleNamespace(length_field="max_completion_length", max_completion_length=400, is_paired=False)
    run.prompt_tokens = 256
    plan = SimpleNamespace(settings=run, config=SimpleNamespace(get_text_config=lambda: text))
    fits = SimpleNamespace(peak=0, capacity=1, fits=True)
    monkeypatch.setattr(module, "changed", lambda plan, **values: fits)
    assert largest(plan, "max_completion_length", 16) == longest
    run.is_paired = True
    run.length_field = "max_length"
    run.max_length = None
    paired = {400: 400, 271: 256}
    assert largest(plan, "max_length", 16) == paired.get(positions, longest)  # it contains the prompt


def test_no_more_completions_are_tried_than_a_step_can_have(tmp_path, monkeypatch):
    """With vLLM and micro-batches of a row, nothing grows with the group."""
    plan = make_plan(settings(folder(tmp_path, num_hidden_layers=2), gradient_accumulation_steps=16), hardware=CARD)
    fits = SimpleNamespace(settings=plan.settings, config=plan.config, step=plan.step, peak=0, capacity=1, fits=True)
    monkeypatch.setattr(module, "changed", lambda plan, **values: fits)
    assert largest(plan, "per_device_train_batch_size", 4) == 8192 // 16
    # Eight rows in each of sixteen micro-batches are 32 groups of four.
    assert module.most_that_fits(plan)[module.HERE]["num_generations"] == 8192 // 32


@pytest.mark.slow  # some thirty plans
@pytest.mark.exhaustive
def test_what_is_found_to_fit_fits_and_the_next_larger_does_not(tmp_path, monkeypatch):
    plan = make_plan(settings(folder(tmp_path, num_hidden_layers=2)), hardware=CARD)
    card = replace(CARD, memory=changed(plan, per_device_train_batch_size=12).peak)  # as much as 12 rows need
    plan = replace(plan, hardware=card)
    small = replace(CARD, memory=2**20)
    assert largest(plan, "per_device_train_batch_size", 4) == 12
    assert not changed(plan, per_device_train_batch_size=16).fits
    assert largest(replace(plan, hardware=small), "max_completion_length") == 0
    # Each way alone makes it fit.
    large = changed(replace(plan, hardware=CARD), max_completion_length=256, per_device_train_batch_size=32)
    halved = changed(large, per_device_train_batch_size=16, gradient_accumulation_steps=2)
    large = make_plan(large.settings, hardware=replace(CARD, memory=halved.peak))
    lines = module.changes_that_fit(large)
    assert not large.fits and "gradient_checkpointing: true" in lines and len(lines) <= 3
    assert any(line.startswith("per_device_train_batch_size: 16, gradient_accumulation_steps: 2") for line in lines)
    # The fewest cards hold it and fewer do not.
    monkeypatch.setattr(module, "_CARDS", (3, 4))
    run = settings(folder(tmp_path / "five"), Launch("fsdp2", 1), fsdp_gather="per_layer")
    sharded = make_plan(run, hardware=replace(CARD, memory=changed(make_plan(run, hardware=CARD), processes=4).peak))
    assert not sharded.fits and fewest_cards(sharded) == 4
    assert fewest_cards(replace(sharded, hardware=small)) == 0
    whole = replace(sharded, settings=replace(run, launch=Launch("ddp", 8)))
    assert fewest_cards(whole) == 0  # each has all of it, however many there are
    assert fewest_cards(replace(whole, hardware=replace(CARD, memory=2**36))) == 1


@pytest.mark.slow  # some forty plans
@pytest.mark.exhaustive
def test_the_largest_group_and_the_longest_completion_before_and_after(tmp_path):
    """A card on which a whole group of eight does not fit, next to one row of it."""
    fields = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "num_generations": 8,
        "use_peft": True,
    }
    run = settings(folder(tmp_path, num_hidden_layers=2), Launch(), prompt_tokens=200, **fields)
    plan = make_plan(run, hardware=CARD)
    whole = changed(plan, per_device_train_batch_size=4, gradient_accumulation_steps=2, tokens_per_pass=0)
    plan = make_plan(run, hardware=replace(CARD, memory=whole.peak))
    group_in_a_batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "tokens_per_pass": 0}
    assert not changed(plan, **group_in_a_batch).fits
    limits = module.most_that_fits(plan)
    groups = {name: numbers["num_generations"] for name, numbers in limits.items()}
    assert groups[module.HERE] >= 8
    assert module.with_group(plan, groups[module.HERE]).fits
    assert not module.with_group(plan, groups[module.HERE] + 1).fits
    longest = limits[module.HERE]["max_completion_length"]
    assert changed(plan, max_completion_length=longest).fits
    assert not changed(plan, max_completion_length=longest + 16).fits
    tokens = [numbers["tokens"] for numbers in limits.values()]
    assert tokens == [8 * 240, 199 + 8 * 40]


@pytest.mark.slow  # a model of 80 layers
@pytest.mark.exhaustive
def test_a_70b_from_its_config(tmp_path):
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    folder(tmp_path, **shape, num_hidden_layers=80, vocab_size=128256)
    line = ["--config", RECIPE_70B, "--model_name_or_path", str(tmp_path)]
    plan = plan_recipe(line, EfficientGRPOConfig, "fsdp2_qlora", "24GB x2")
    # What the head of the recipe computes by hand, of the whole model: 31.88 GiB in 4 bits, 1.01 GiB of their state.
    base = plan.phases["forward_backward"]
    assert base["base, 4-bit weights"] == pytest.approx(31.88 * GIB / 2, rel=0.002)
    assert base["base, quantization state"] == pytest.approx(1.01 * GIB / 2, rel=0.02)
    assert plan.parameters == (pytest.approx(70.55e9, rel=0.001), pytest.approx(104e6, rel=0.01))
    assert not plan.fits and "it does not fit" in module.format_plan(plan) and replace(plan, capacity=141 * GIB).fits


def test_the_command_reads_a_recipe_as_its_script_does(tmp_path):
    """The same run from the YAML, in which `off` is a truth value, and from the config that the script builds of
    it.
    """
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
    started = from_config(args, from_file.model)
    for name in [
        "rollout_rows",
        "rollout_batches",
        "groups",
        "mixed",
        "scores_again",
        "gradient_checkpointing",
        "optim",
        "prefix_sharing",
    ]:
        assert getattr(from_file, name) == getattr(started, name), name


def test_a_plan_within_a_launch_of_fsdp2_knows_it_before_accelerate_says_so(monkeypatch):
    """On GPUs the state says MULTI_GPU until the trainer has made its `Accelerator`, which is after the plan."""

    def config(device):
        state = SimpleNamespace(distributed_type=SimpleNamespace(value="MULTI_GPU"))
        device = SimpleNamespace(type=device)
        return SimpleNamespace(distributed_state=state, deepspeed_plugin=None, world_size=2, device=device, bf16=True)

    assert from_config(config("cuda"), None).launch.kind == "ddp"
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert from_config(config("cuda"), None).launch.kind == "fsdp2"
    assert from_config(config("cpu"), None).launch.kind == "ddp"  # which accelerate makes of it there


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow  # some ten plans
def test_the_exit_status_says_whether_it_fits_and_what_would_make_it(tiny, monkeypatch, capsys):
    line = words(tiny, per_device_train_batch_size=16, max_completion_length=64)
    needed = plan_recipe(line, EfficientGRPOConfig, hardware="24GB").peak
    monkeypatch.setattr(module, "_most_that_fits", lambda plan_of, most, start: 1)
    monkeypatch.setattr(module, "fewest_cards", lambda plan: 0)
    assert command([*line, "--hardware", "24GB", "--solve"]) == 0
    fits = capsys.readouterr().out
    assert "largest that fits: per_device_train_batch_size: 4\nlongest that fits: max_completion_length: 16\n" in fits
    assert "fewest cards that it fits: none" in fits
    assert "it fits" in fits and "together" in fits and "forward_backward" in fits
    assert "an optimizer step: 1 x 16 completions in 1 pass: 2,032 tokens, 5,120 in stock TRL\n" in fits
    assert re.search(r"stock TRL, micro-batches of 16 +4 +16 +5,120\n", fits)
    assert re.search(r"prompts once per step, micro-batches of 16 +4 +16 ", fits)
    assert command([*line, "--hardware", "24GB", "--json", "--solve"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["fits"] and as_json["peak"] == needed and as_json["step"]["passes"] == 1
    assert as_json["at_most"]["here"]["num_generations"] == 4
    assert command([*line, "--hardware", f"{(CONTEXT + 0.8 * (needed - CONTEXT)) / GIB:.4f}GB"]) == 1
    printed = capsys.readouterr().out
    assert "it does not fit" in printed and "together" in printed
    assert "makes it fit: per_device_train_batch_size: 8, gradient_accumulation_steps: 2" in printed
    assert command([*line, "--accelerate_config", "fsdp2", "--hardware", "24GB x4"]) == 0
    assert "fsdp2 on 4 × 24 GB" in capsys.readouterr().out  # the config says 8
    assert command([*line, "--hardware", "24GB x4", "--num_processes", "8"]) == 1
    printed = capsys.readouterr().out
    assert "it does not fit: there are 4 cards for 8 ranks" in printed and "it fits" not in printed
    for prompt, warns in ((112, False), (113, True)):  # beside 400 of a completion
        command([*words(tiny, max_completion_length=400), "--hardware", "24GB", "--prompt_tokens", str(prompt)])
        assert ("the 512 positions of the model; at most 399" in capsys.readouterr().out) == warns
    command([*words(tiny, max_completion_length=400), "--hardware", "24GB", "--prompt_tokens", "512"])
    assert "the 512 positions of the model; the prompts alone fill them" in capsys.readouterr().out


@pytest.mark.parametrize("in_8_bits", [True, False])
def test_a_plan_of_an_8_bit_base_names_itself_too_high(tiny, in_8_bits):
    plan = make_plan(settings(tiny, load_in_8bit=in_8_bits), hardware=CARD)
    assert ("load_in_8bit" in module.format_plan(plan)) == in_8_bits


def test_hardware_by_name_and_by_memory():
    assert read_hardware("H100 x4").cards == 4 and read_hardware("24GB x2").memory == 24 * GIB
    assert read_hardware("RTX 4090").memory == 24 * GIB and read_hardware("A100-40GB").memory == 40 * GIB
    with pytest.raises(UserError, match="b200, h200, h100"):
        read_hardware("h10")
    assert not read_hardware("cpu").gpu and read_hardware(None).gpu == torch.cuda.is_available()
