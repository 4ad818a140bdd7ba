"""One copy of a 4-bit base: vLLM multiplies by the trainer's packed bytes."""

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model

from tests.engines.vllm.runs import figures, on_quantized
from tests.experimental.one_base.test_shared_base import (
    DIFFERENCE,
    Merges,
    drawn_logps,
    model_of,
    policy_logps,
    storages,
)
from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora.engines.vllm.adapter_sync import RolloutError

pytestmark = pytest.mark.vllm


def start(folder, **options):
    from vllm import LLM

    return LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=128, enable_lora=True, max_lora_rank=8,
        max_loras=1, block_size=32, max_num_seqs=4, num_gpu_blocks_override=64, **options,
    )  # fmt: skip


def engine_of(policy, folder):
    """An engine that shares the base of `policy`, and what it shares."""
    from trl_fsdp_qlora.engines.vllm.dequantized_base import write_config
    from trl_fsdp_qlora.experimental.one_base.shared_base import sharing

    config = write_config(folder, policy, tiny.make_tokenizer(), torch.float32)
    with sharing(policy) as (shared, options):
        return start(config, **options), shared


KINDS = {
    "double": {}, "single": {"double": False}, "float storage": {"storage": "float32"}, "our bytes": {"packs": True},
    "biases": {"family": "qwen2"}, "fp4": {"kind": "fp4"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_multiplies_by_the_trainers_bytes(kind, tmp_path):
    """Its log-probabilities are the trainer's, and nothing but norms and biases is copied."""
    from trl_fsdp_qlora.fsdp2_qlora.packed_linear import pack_model

    options = dict(KINDS[kind])
    packs = options.pop("packs", False)
    family = options.pop("family", "qwen3")
    checkpoint = tiny.make_checkpoint(tmp_path / "model", hidden=128, intermediate=256, family=family)
    base = tiny.load(checkpoint, **options)
    for name, parameter in base.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_()
    policy = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).eval()
    if packs:
        pack_model(policy)
    before = storages(policy.get_base_model())
    llm, shared = engine_of(policy, tmp_path)
    names = {name.partition(".layers.0.")[2] for name in shared.parameters}
    assert {"self_attn.q_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"} <= names
    assert all("norm" in name or "bias" in name for name in shared.not_shared)
    after = storages(policy.get_base_model())
    assert sum(after.values()) == sum(before.values())
    packed = {layer.weight.untyped_storage().data_ptr() for layer in shared.packed.values()}
    assert packed <= before.keys() and packed <= after.keys()  # the same bytes as before, at the same addresses
    of_both = sum(storages(model_of(llm), policy.get_base_model()).values())
    assert of_both - sum(after.values()) < 0.05 * sum(after.values())  # norms
    prompt = list(range(5, 15))
    drawn, sampled = drawn_logps(llm, prompt)
    torch.testing.assert_close(sampled, policy_logps(policy, prompt, drawn), rtol=0, atol=1e-4)


def test_what_is_not_a_linear_layer_of_vllms_is_dequantized(tmp_path):
    """Rows in 16 bits between rows in 4 bits, and a head in 4 bits: the engine has a dense copy of these alone."""
    checkpoint = tiny.make_checkpoint(tmp_path / "model", hidden=128, intermediate=256)
    policy = get_peft_model(tiny.load(checkpoint, llm_int8_skip_modules=["k_proj"]), LoraConfig(r=4)).eval()
    llm, shared = engine_of(policy, tmp_path)
    dense = {name for name in shared.not_shared if "norm" not in name}
    in_layers = {f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qv"}
    assert dense == {"lm_head.weight", *in_layers}
    assert (
        "in another way" in shared.not_shared["lm_head.weight"] and "q_proj.weight: vLLM stacks" in shared.describe()
    )
    prompt = list(range(5, 15))
    drawn, sampled = drawn_logps(llm, prompt)
    torch.testing.assert_close(sampled, policy_logps(policy, prompt, drawn), rtol=0, atol=1e-4)


def test_a_vllm_that_loads_in_another_way_is_refused(tmp_path, monkeypatch):
    from trl_fsdp_qlora.experimental.one_base.shared_base import SharedBase

    place_packed = SharedBase.place_packed

    def breaks_in_the_middle(shared, *args):
        if any("layers.0" in name for name in shared.parameters):
            raise KeyError("weight_loader")
        return place_packed(shared, *args)

    monkeypatch.setattr(SharedBase, "place_packed", breaks_in_the_middle)
    checkpoint = tiny.make_checkpoint(tmp_path / "model", hidden=128, intermediate=256)
    policy = get_peft_model(tiny.load(checkpoint), LoraConfig(r=4, target_modules="all-linear")).eval()
    with pytest.raises(RolloutError, match=r"vllm_share_base: true cannot be: .*KeyError.*leave vllm_share_base out"):
        engine_of(policy, tmp_path)


def test_ten_steps_are_those_of_a_dequantized_copy(quantized_base, tmp_path, monkeypatch):
    """Up to the order in which a product adds: a fused layer's rows in one product, or in three."""
    monkeypatch.setenv("TRL_FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    runs = {}
    for share in ("on", "off"):
        trainer = on_quantized(quantized_base[0], tmp_path / share, vllm_share_base=share, max_steps=10)
        copies = list((tmp_path / "cache").rglob("*.safetensors"))
        assert bool(copies) == (share == "off")
        trainer.train()
        assert max(figures(trainer, DIFFERENCE)) < 1e-5
        runs[share] = (figures(trainer, "loss"), figures(trainer, "reward"))
    assert len(runs["on"][0]) == 10
    assert runs["on"][1] == runs["off"][1]
    torch.testing.assert_close(torch.tensor(runs["on"][0]), torch.tensor(runs["off"][0]), rtol=0, atol=1e-5)


def test_a_compiled_layer_calls_one_operator_for_each_part(tmp_path):
    """vLLM compiles models on GPUs (on CPUs not with LoRA): no graph break, and nothing of the product is traced."""
    from trl_fsdp_qlora.experimental.one_base.packed_product import PackedProduct

    base = tiny.load(tiny.make_checkpoint(tmp_path / "model"))
    attention = base.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    method = PackedProduct(layers)
    calls = []

    def record(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x = torch.randn(3, 64)
    bias = torch.randn(128)
    compiled = torch.compile(lambda x: method.apply(None, x, bias), backend=record, fullgraph=True)
    with torch.inference_mode():
        dense = torch.cat([dequantize_4bit(layer.weight.data, layer.weight.quant_state) for layer in layers])
        torch.testing.assert_close(compiled(x), torch.nn.functional.linear(x, dense, bias))
    assert [name for name in calls if "bitsandbytes" in name] == ["bitsandbytes.gemm_4bit"] * 3


def test_a_merge_into_the_base_ends_the_run(quantized_base, tmp_path):
    """PEFT puts another 4-bit weight in the place of the one that vLLM multiplies by."""
    trainer = on_quantized(quantized_base[0], tmp_path, vllm_share_base="on", max_steps=4)
    trainer.add_callback(Merges())
    with pytest.raises(RolloutError, match=r"layers\.0\.\w+\.\w+_proj\.weight"):
        trainer.train()
    assert trainer.state.global_step == 2
