"""Static bytes against modules that were really built, and 4-bit bytes against a model that was really quantized.

Covers `tools/planning/gathered.py`, `tools/planning/stored.py`.
"""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.tools.planning.models import config, folder, in_4_bits, settings
from trl_fsdp_qlora.tools.planning import model
from trl_fsdp_qlora.tools.planning.fake_run import FakeRun
from trl_fsdp_qlora.tools.planning.gathered import Gathered, gathered_by, gathered_bytes
from trl_fsdp_qlora.tools.planning.hardware import Hardware
from trl_fsdp_qlora.tools.planning.launches import Launch
from trl_fsdp_qlora.tools.planning.plan import ACTIVATIONS, CACHE, GATHERED, ROOM, TOKEN_STEP, make_plan
from trl_fsdp_qlora.tools.planning.table import format_plan
from trl_fsdp_qlora.tools.recipe.checks import lora_config, read_config

CARD = Hardware("a card", 24 * 2**30, 1)


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def planned(run) -> dict[str, int]:
    return model.static_bytes(model.build(run, read_config(run.model.model_name_or_path)), run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_adapter_gradients_and_optimizer_are_those_of_the_built_model(tmp_path, dtype):
    run = settings(folder(tmp_path), dtype=dtype)
    built = AutoModelForCausalLM.from_config(config(), dtype=getattr(torch, dtype))
    base = nbytes([*built.parameters(), *built.buffers()])
    built = get_peft_model(built, lora_config(run.model))
    trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    states = nbytes(x for state in optimizer.state.values() for x in state.values() if x.ndim)
    parts = [planned(run)[part] for part in (model.BASE, model.TRAINED, model.GRADIENTS, model.OPTIMIZER)]
    assert parts == [base, nbytes(trained), nbytes(parameter.grad for parameter in trained), states]


@pytest.mark.parametrize(
    ("name", "optimizer_class"),
    [
        ("paged_adamw_32bit", "AdamW32bit"),
        ("paged_adamw_8bit", "AdamW8bit"),
        ("lion_32bit", "Lion32bit"),
        ("lion_8bit", "Lion8bit"),
        ("rmsprop_bnb_32bit", "RMSprop32bit"),
        ("ademamix_8bit", "AdEMAMix8bit"),
    ],
)
def test_states_of_bitsandbytes_optimizers_are_those_that_it_allocates(tmp_path, name, optimizer_class):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    run = settings(folder(tmp_path), load_in_4bit=True, optim=name)
    built = model.build(run, read_config(run.model.model_name_or_path))
    shapes = [parameter.shape for parameter in built.parameters() if parameter.requires_grad]
    trained = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = getattr(bitsandbytes.optim, optimizer_class)(trained, lr=1e-3, min_8bit_size=0)
    group = optimizer.param_groups[0]
    for index, parameter in enumerate(trained):
        optimizer.init_state(group, parameter, 0, index)
    states = nbytes(
        state[each] for state in optimizer.state.values() for each in ("state1", "state2") if each in state
    )
    whole = planned(run)
    assert whole[model.TRAINED] == nbytes(trained)
    assert whole[model.OPTIMIZER] == states


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_counts_once_and_full_training_has_a_reference(tmp_path, tied):
    run = settings(folder(tmp_path, tie_word_embeddings=tied), use_peft=False, beta=0.1)
    built = AutoModelForCausalLM.from_config(config(tie_word_embeddings=tied))
    whole = planned(run)
    assert whole[model.TRAINED] == nbytes(built.parameters())
    assert whole[model.REFERENCE] == nbytes([*built.parameters(), *built.buffers()])
    assert planned(settings(tmp_path, use_peft=False))[model.REFERENCE] == 0


@pytest.mark.parametrize("nested", [True, False])
def test_4_bit_bytes_are_those_of_a_quantized_model(tmp_path, nested):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    built = in_4_bits(tmp_path, nested)
    layers = [module for module in built.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    states = [layer.weight.quant_state for layer in layers]
    packed = {id(layer.weight) for layer in layers}
    maxima = [state.absmax for state in states]
    if nested:
        maxima += [state.state2.absmax for state in states] + [state.offset for state in states]
    whole = planned(settings(tmp_path, load_in_4bit=True, use_bnb_nested_quant=nested, dtype="float32"))
    assert whole[model.BASE_4BIT] == nbytes(layer.weight for layer in layers)
    assert whole[model.STATE] == nbytes(maxima)
    others = [parameter for parameter in built.parameters() if id(parameter) not in packed]
    assert whole[model.BASE] == nbytes([*others, *built.buffers()])


@pytest.mark.parametrize("nested", [True, False])
def test_a_checkpoint_that_bitsandbytes_wrote_is_planned_like_load_in_4bit(tmp_path, nested):
    pytest.importorskip("bitsandbytes")
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path / "dense")
    in_4_bits(tmp_path / "dense", nested).save_pretrained(tmp_path / "stored")
    wanted = planned(settings(tmp_path / "dense", load_in_4bit=True, use_bnb_nested_quant=nested, dtype="float32"))
    assert planned(settings(tmp_path / "stored", dtype="float32")) == wanted
    assert wanted[model.BASE_4BIT]


def test_layers_that_a_checkpoint_leaves_dense_are_counted_dense(tmp_path):
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    part = {**quantization, "llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp", "q_proj"]}
    folder(tmp_path / "whole", quantization_config=quantization)
    folder(tmp_path / "part", quantization_config=part)
    whole, left = (planned(settings(tmp_path / name, dtype="float32"))[model.BASE_4BIT] for name in ("whole", "part"))
    assert 2 * (whole - left) == 3 * 128 * 384 + 5 * 128 * 128  # of the first layer's MLP, and of every layer's q_proj


def linear_shapes() -> list[tuple[int, int]]:
    """(out, in) of the linear layers of the test's model, without its head."""
    built = AutoModelForCausalLM.from_config(config())
    head = built.get_output_embeddings()
    return [tuple(m.weight.shape) for m in built.modules() if isinstance(m, torch.nn.Linear) and m is not head]


def gptq_tensors(out: int, columns: int, bits: int, group: int) -> int:
    """Bytes of the tensors of a GPTQ layer: qweight, qzeros, scales and g_idx, by their shapes and dtypes."""
    groups = columns // group
    return 4 * (columns * bits // 32) * out + 4 * groups * (out * bits // 32) + 2 * groups * out + 4 * columns


PACKED = {"num_bits": 4, "group_size": 128}
STORED = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, lambda o, i: gptq_tensors(o, i, 4, 128)),
    "gptq in 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 32}, lambda o, i: gptq_tensors(o, i, 8, 32)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
        lambda o, i: gptq_tensors(o, i, 4, 64) - 4 * i,  # AWQ has no g_idx
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda o, i: o * i + 4 * -(-o // 128) * -(-i // 128),
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": PACKED}}},
        lambda o, i: o * i // 2 + 2 * o * (i // 128),
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_a_base_in_another_format_takes_what_its_tensors_take(tmp_path, name):
    quantization, tensors = STORED[name]
    folder(tmp_path / "dense")
    folder(tmp_path / "stored", quantization_config=quantization)
    dense = planned(settings(tmp_path / "dense", dtype="float32"))
    stored = planned(settings(tmp_path / "stored", dtype="float32"))
    weights = (model.BASE_4BIT, model.BASE_8BIT, model.STATE, model.BASE)
    saved = sum(dense[part] - stored[part] for part in weights)
    assert saved == sum(4 * o * i - tensors(o, i) for o, i in linear_shapes())
    assert stored[model.TRAINED] == dense[model.TRAINED]


def test_a_format_that_is_not_known_counts_dense_and_is_named(tmp_path):
    plan = make_plan(settings(folder(tmp_path, quantization_config={"quant_method": "aqlm"})), CARD)
    assert "a base in aqlm counts dense" in format_plan(plan)
    assert plan.phases["optimizer"][model.BASE] > 4 * sum(o * i for o, i in linear_shapes())


def test_units_that_stay_gathered_count_whole_until_the_backward(tmp_path):
    run = settings(folder(tmp_path), Launch("fsdp2", 2))
    built = model.build(run, read_config(run.model.model_name_or_path))
    layer = nbytes(built.base_model.model.model.layers[0].parameters())
    whole = nbytes(built.parameters())
    root = whole - 5 * layer

    def gathered(run, **fields) -> int:
        return gathered_bytes(FakeRun(replace(run, launch=replace(run.launch, **fields)), config(), True))[0]

    assert gathered(run, reshards=False) == gathered(run, kind="fsdp1", reshards=False) == whole + layer
    assert gathered(run, units="model") == whole
    assert gathered(run, units=("LlamaDecoderLayer",)) == root + 3 * layer
    mlp = nbytes(built.base_model.model.model.layers[0].mlp.parameters())
    assert gathered(run, units=("LlamaDecoderLayer", "LlamaMLP")) == root + layer + 2 * max(mlp, layer - mlp)
    assert gathered(run, units=("LlamaMLP",)) == whole - 5 * mlp + 3 * mlp
    in_4_bits = settings(tmp_path, Launch("fsdp2", 2), load_in_4bit=True, fsdp_keep_gathered=True)
    kept = replace(in_4_bits, launch=replace(in_4_bits.launch, reshards=False))
    dropped = replace(in_4_bits, values=in_4_bits.values | {"fsdp_keep_gathered": False})
    assert gathered(in_4_bits) == gathered(kept) > gathered(dropped)


def test_what_is_spread_over_the_ranks(tmp_path):
    folder(tmp_path)
    one = planned(settings(tmp_path))
    of_stages = {"zero3": one.keys(), "zero2": {model.GRADIENTS, model.OPTIMIZER}, "zero1": {model.OPTIMIZER}}
    for kind, spread in {"fsdp1": one.keys(), "fsdp2": one.keys(), **of_stages, "ddp": set()}.items():
        spread = spread - {model.BUCKETS}
        whole = planned(settings(tmp_path, Launch(kind, 1)))
        held = planned(settings(tmp_path, Launch(kind, 4)))
        assert {name for name in held if whole[name] and held[name] < whole[name]} == {n for n in spread if whole[n]}
        assert all(held[name] == -(-whole[name] // 4) for name in spread)
    assert planned(settings(tmp_path, Launch("ddp", 2)))[model.BUCKETS] == one[model.TRAINED]
    two_copies = planned(settings(tmp_path, Launch("fsdp2", 4, replicas=2)))
    assert two_copies[model.BASE] == -(-one[model.BASE] // 2)
    assert one[model.BUCKETS] == 0


def test_a_gathered_layer_is_received_beside_where_it_is_used(tmp_path):
    """What was measured of two ranks: the shards stay, and gloo receives a layer in two buffers."""
    run = settings(folder(tmp_path), Launch("fsdp2", 2, use_cpu=True))
    built = model.build(run, read_config(run.model.model_name_or_path))
    layers = [module for module in built.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    layer = nbytes(layers[0].parameters())
    whole = nbytes(built.parameters())
    root = whole - len(layers) * layer
    assert gathered_bytes(FakeRun(run, config(), False)) == (root + 4 * layer, whole)
    assert gathered_bytes(FakeRun(run, config(), True)) == (root + 3 * layer, whole)
    assert gathered_by(FakeRun(settings(tmp_path), config(), True), 2**40) == Gathered(0, 0)
    for gather, there in (("once", whole), ("per_layer", root + 3 * layer)):
        values = run.values | {"fsdp_gather": gather, "beta": 0.1}
        phases = make_plan(replace(run, values=values), Hardware("a card", 2**40, 2)).phases
        assert phases["generate"][GATHERED] == phases["score"][GATHERED] == there
        assert phases["forward_backward"][GATHERED] == root + 3 * layer and GATHERED not in phases["optimizer"]


def test_auto_gathers_the_whole_model_if_the_trainer_would(tmp_path):
    """The plan subtracted the shards, which stay in memory: LoRA on an 8B model on two cards of 24 GB did not fit."""
    run = settings(folder(tmp_path), Launch("fsdp2", 2))
    built = model.build(run, read_config(run.model.model_name_or_path))
    whole = nbytes(built.parameters())
    parts = make_plan(replace(run, values=run.values | {"fsdp_gather": "per_layer"}), Hardware("a card", 2**40, 2))
    parts = parts.phases["generate"]
    stays = sum(parts.values()) - sum(parts.get(name, 0) for name in (ACTIVATIONS, CACHE, TOKEN_STEP, GATHERED, ROOM))
    for times, gathers in ((1.9, False), (2.1, True)):  # `generation.choose` takes half of what is free
        card = Hardware("a card", int(stays + times * whole), 2)
        gathered = make_plan(run, card).phases["generate"][GATHERED]
        assert gathered == (whole if gathers else parts[GATHERED])


@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_experts_in_4_bits_are_those_that_this_package_loads_and_adapters_on_them_are_planned(tmp_path, nested):
    pytest.importorskip("bitsandbytes")
    from trl_fsdp_qlora.fsdp2_qlora.experts import packed_experts
    from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit

    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape)).save_pretrained(tmp_path)
    fields = {"load_in_4bit": True, "use_bnb_nested_quant": nested, "dtype": "float32", "lora_dropout": 0.0}
    few, all_linear = (settings(tmp_path, lora_target_modules=[each], **fields) for each in ("q_proj", "all-linear"))
    whole = planned(few)
    with experts_in_4bit():
        built = in_4_bits(tmp_path, nested)
    layers = packed_experts(built).values()
    experts = sum(each.total_bytes * layer.num_experts for layer in layers for each in layer.layouts.values())
    linear = nbytes(p for p in built.parameters() if type(p).__name__ == "Params4bit")
    # An expert's row has its own shared maximum and offset in addition to the blocks'.
    expected = experts + linear * (1 + 2 / 64 * (1 if nested else 4))
    assert whole[model.BASE_4BIT] + whole[model.STATE] == pytest.approx(expected, rel=0.02)
    # As PEFT makes them of the same model in 16 bit; their pass needs more bytes than one without.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = get_peft_model(plain, LoraConfig(r=8, target_modules="all-linear")).get_nb_trainable_parameters()[0]
    plans = [make_plan(run, CARD) for run in (few, all_linear)]
    assert plans[1].parameters[1] == wanted and plans[0].fits
    activations = [plan.phases["forward_backward"][ACTIVATIONS] for plan in plans]
    assert activations[1] > activations[0]
