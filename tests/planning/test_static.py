"""Static bytes against modules that were really built, and 4-bit bytes against a model that was really quantized."""

from dataclasses import replace

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from tests.planning.models import config, folder, settings
from trl_fsdp_qlora.planning import components, skeleton, static
from trl_fsdp_qlora.planning.hardware import Hardware
from trl_fsdp_qlora.planning.plan import ACTIVATIONS, CACHE, COPY, FILE, GATHERED, LOGITS, make_plan
from trl_fsdp_qlora.planning.settings import Launch
from trl_fsdp_qlora.recipe.checks import lora_config


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def planned(run) -> dict[str, int]:
    return static.whole_bytes(skeleton.build(run, skeleton.read_config(run.model.model_name_or_path)), run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_adapter_gradients_and_optimizer_are_those_of_the_built_model(tmp_path, dtype):
    run = settings(folder(tmp_path), dtype=dtype)
    model = AutoModelForCausalLM.from_config(config(), dtype=getattr(torch, dtype))
    base = nbytes([*model.parameters(), *model.buffers()])
    model = get_peft_model(model, lora_config(run.model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    whole = planned(run)
    assert whole[static.BASE] == base
    assert whole[static.TRAINED] == nbytes(trained)
    assert whole[static.GRADIENTS] == nbytes(parameter.grad for parameter in trained)
    assert whole[static.OPTIMIZER] == nbytes(states)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_counts_once_and_full_training_has_a_reference(tmp_path, tied):
    run = settings(folder(tmp_path, tie_word_embeddings=tied), use_peft=False, beta=0.1)
    model = AutoModelForCausalLM.from_config(config(tie_word_embeddings=tied))
    whole = planned(run)
    assert whole[static.TRAINED] == nbytes(model.parameters())
    assert whole[static.REFERENCE] == nbytes([*model.parameters(), *model.buffers()])
    assert planned(settings(tmp_path, use_peft=False))[static.REFERENCE] == 0


@pytest.mark.parametrize("nested", [True, False])
def test_4_bit_bytes_are_those_of_a_quantized_model(tmp_path, nested):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization, device_map={"": "cpu"}, dtype=torch.float32
    )
    layers = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    states = [layer.weight.quant_state for layer in layers]
    packed = {id(layer.weight) for layer in layers}
    maxima = [state.absmax for state in states]
    if nested:
        maxima += [state.state2.absmax for state in states] + [state.offset for state in states]
    whole = planned(settings(tmp_path, load_in_4bit=True, use_bnb_nested_quant=nested, dtype="float32"))
    assert whole[static.BASE_4BIT] == nbytes(layer.weight for layer in layers)
    assert whole[static.STATE] == nbytes(maxima)
    others = [parameter for parameter in model.parameters() if id(parameter) not in packed]
    assert whole[static.BASE] == nbytes([*others, *model.buffers()])


def test_what_is_spread_over_the_ranks(tmp_path):
    folder(tmp_path)
    one = planned(settings(tmp_path))
    for kind, spread in (
        ("fsdp2", one.keys()),
        ("zero2", {static.GRADIENTS, static.OPTIMIZER}),
        ("ddp", set()),
    ):
        run = settings(tmp_path, Launch(kind, 4))
        whole = planned(run)
        held = static.rank_bytes(whole, run)
        assert {name for name in held if whole[name] and held[name] < whole[name]} == {n for n in spread if whole[n]}
        assert all(held[name] == -(-whole[name] // 4) for name in spread)
    assert planned(settings(tmp_path, Launch("ddp", 2)))[static.BUCKETS] == one[static.TRAINED]
    assert one[static.BUCKETS] == 0


def test_a_gathered_layer_is_received_beside_where_it_is_used(tmp_path):
    """What benchmarks/plan_error.py found of two ranks: the shards stay, and gloo receives a layer in two buffers."""
    run = settings(folder(tmp_path), Launch("fsdp2", 2, use_cpu=True))
    model = skeleton.build(run, skeleton.read_config(run.model.model_name_or_path))
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    layer = sum(parameter.nbytes for parameter in layers[0].parameters())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    root = whole - len(layers) * layer
    assert components.gathered_bytes(model, run, False) == (root + 2 * layer, whole, 2 * layer, 3 * root)
    assert components.gathered_bytes(model, run, True) == (root + 2 * layer, whole, layer, 2 * root)
    assert components.gathered_bytes(model, settings(tmp_path), True) == (0, 0, 0, 0)
    host = Hardware("a host", 2**40, 2, gpu=False)
    plan, scored = (
        make_plan(replace(run, values=run.values | {"fsdp_gather": "once", "beta": beta}), hardware=host)
        for beta in (0.0, 0.1)
    )
    # All of it is received before the pass begins.
    parts = plan.phases["generate"]
    coming = sum(parts.get(part, 0) for part in (ACTIVATIONS, CACHE, LOGITS, COPY))
    assert coming > 0 and parts[GATHERED] == whole + max(0, 2 * layer - coming)
    assert plan.phases["forward_backward"][GATHERED] >= root + 4 * layer
    assert "score" not in plan.phases and scored.phases["score"][GATHERED] >= whole


def test_what_a_checkpointed_layer_was_received_in_is_gone_on_a_host(tmp_path):
    """Before it is computed again, where a pass needs most; a card's allocator keeps it for the stream that it came by."""
    run = settings(folder(tmp_path), Launch("fsdp2", 2, use_cpu=True), gradient_checkpointing=True)
    model = skeleton.build(run, skeleton.read_config(run.model.model_name_or_path))
    for gpu in (False, True):
        gathered = components.gathered_bytes(model, run, gpu)
        parts = make_plan(run, hardware=Hardware("somewhere", 2**40, 2, gpu=gpu)).phases["forward_backward"]
        assert parts[ACTIVATIONS] > gathered.transit > 0
        assert parts[GATHERED] == gathered.training + gpu * gathered.transit


@pytest.mark.slow  # four plans
def test_a_quantized_base_leaves_the_pages_of_its_file_on_a_cpu(tmp_path):
    """As many as the file has beyond the tensors that still lie in it; none where every tensor was converted."""
    AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(tmp_path)
    read = skeleton.checkpoint_bytes(str(tmp_path))
    four = settings(tmp_path, load_in_4bit=True, dtype="float32")
    host = Hardware("a host", 2**40, 1, gpu=False)
    phases = make_plan(four, hardware=host).phases
    assert {parts[FILE] for parts in phases.values()} == {read - planned(four)[static.BASE]}
    for run, there in (
        (four, Hardware("a card", 2**40, 1)),
        (settings(tmp_path, load_in_4bit=True, dtype="bfloat16"), host),
        (settings(tmp_path, dtype="float32"), host),
    ):
        assert FILE not in make_plan(run, hardware=there).phases["optimizer"]
