"""Experts in 4 bits, compared with the same model with its experts dequantized."""

import json
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import ParamWrapper
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("bitsandbytes")
from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import difference, mesh_environment, scenarios_of
from tests.fsdp2_qlora.test_grouped_product import NEEDS_INTERPRETER
from tests.tiny import these_first
from tests.tiny import trainer as tiny_trainer
from tests.trainers.grpo.test_token_budget import assert_close, loss_and_gradients
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat import triton_kernels
from trl_fsdp_qlora.compat.triton_kernels import interpreted
from trl_fsdp_qlora.engines.vllm.dequantized_base import dequantized_base
from trl_fsdp_qlora.fsdp2_qlora import experts, grouped_product
from trl_fsdp_qlora.fsdp2_qlora.experts import PackedExperts, dense_experts, packed_experts
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit, experts_in_16_bit, keep_plain_kernel
from trl_fsdp_qlora.tools.small_base import character_tokenizer

# Every family takes of these what it has a name for.
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
    "head_dim": 16, "max_position_embeddings": 128, "intermediate_size": 64, "moe_intermediate_size": 48,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
GATED_DELTA = {"layer_types": ["linear_attention", "full_attention"]}
NARROW = {"intermediate_size": 48}  # of the experts, if they have no size of their own
CONFIGS = {
    "qwen3_moe": {},
    "olmoe": NARROW,
    "mixtral": NARROW,
    "granitemoe": NARROW,
    "gpt_oss": NARROW | {"layer_types": ["full_attention"] * 2},
    "glm4_moe": {"first_k_dense_replace": 1},
    "minimax_m2": NARROW,
    "qwen3_next": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA,
    "deepseek_v3": {
        "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "nemotron_h": {  # its experts have no gate
        "num_hidden_layers": 3, "layers_block_type": ["moe", "mamba", "attention"], "mamba_num_heads": 4,
        "n_groups": 2, "moe_shared_expert_intermediate_size": 32, "mamba_head_dim": 16, "ssm_state_size": 16,
        "chunk_size": 16,
    },
    # Sizes that no block of 64 weights divides: bitsandbytes fills the last one up.
    "small": {"model_type": "qwen3_moe", "hidden_size": 40, "moe_intermediate_size": 12},
    "odd": {"model_type": "qwen3_moe", "hidden_size": 80, "moe_intermediate_size": 20},
}  # fmt: skip


def save(folder, family="qwen3_moe", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"model_type": family, **SIZES, **CONFIGS[family], **changes})
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=these_first(CONFIGS, "qwen3_moe", "gpt_oss", "nemotron_h", "small"))
def checkpoint(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp(request.param), request.param, torch.bfloat16)


@pytest.fixture(params=["one by one", "in groups", "in groups, Triton"])
def group_calls(request):
    """The mock that counts the calls for groups of experts; `None` if experts are computed one by one, as on a CPU.

    On a GPU a product may dequantize some experts at once, but not all; on most cards by a kernel, here in Triton's
    interpreter.
    """
    if request.param == "one by one":
        yield None
        return
    with ExitStack() as patches:
        if "Triton" in request.param:
            if not interpreted(grouped_product._product_kernel):
                pytest.skip("needs Triton and TRITON_INTERPRET=1: make test-kernels")
            patches.enter_context(patch.object(experts, "grouped_mm_is_a_loop", return_value=True))
            patches.enter_context(patch.object(grouped_product, "runs", return_value=True))
        patches.enter_context(patch.object(experts, "multiplies_groups", return_value=True))
        patches.enter_context(patch.object(experts, "SCRATCH_BYTES", 2 * 96 * 64 * 4))  # two of six experts
        run = patch.object(PackedExperts, "_in_groups", autospec=True, side_effect=PackedExperts._in_groups)
        yield patches.enter_context(run)
    assert not triton_kernels._refused


def loaded(folder, dtype=torch.float32, **options):
    with experts_in_4bit():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=tiny.quantization(**options)
        )


def dequantized(model, folder, dtype=torch.float32, **options):
    """The same 4-bit model, its experts as numbers: transformers' own module and forward."""
    quantized = tiny.quantization(**options, llm_int8_skip_modules=["lm_head", "shared_expert_gate"])
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantized)
    dense = dense_experts(stock)
    packed = packed_experts(model)
    assert dense.keys() == packed.keys() and packed
    with torch.no_grad():
        for name, module in dense.items():
            for projection in packed[name].layouts:
                getattr(module, projection).copy_(packed[name].dense(projection))
    return stock.requires_grad_(False)


def of_embeddings(model, ids):
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), embedded.grad


@pytest.mark.parametrize("nested", these_first([True, False], True))
def test_loss_and_gradient_are_those_of_the_dequantized_model(checkpoint, nested, group_calls):
    """And the packed experts are the checkpoint's, rounded to nf4: normal weights are some 9% off.

    Rows of 48 weights: what bitsandbytes' own product on AVX-512 gets wrong.
    """
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = loaded(checkpoint, double=nested)
    for name, module in packed_experts(model).items():
        for projection in module.layouts:
            weight = getattr(whole.get_submodule(name), projection).detach()
            off = torch.linalg.vector_norm(module.dense(projection) - weight) / torch.linalg.vector_norm(weight)
            assert 0.05 < off < 0.12
    packed = {name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    assert packed and not any(name.endswith((".gate", ".router", "shared_expert_gate")) for name in packed)
    stock = dequantized(model, checkpoint, double=nested)
    for shape in ((3, 20), (1, 2)):  # of one token bitsandbytes has a kernel of its own
        ids = torch.randint(0, 97, shape)
        loss, gradient = of_embeddings(model, ids)
        wanted_loss, wanted = of_embeddings(stock, ids)
        torch.testing.assert_close(loss, wanted_loss, atol=1e-5, rtol=0)
        assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    if group_calls is not None:  # 40 x 12 weights are no whole blocks: the loop on a GPU, too
        assert bool(group_calls.call_count) == (model.config.hidden_size != 40)


@pytest.mark.parametrize("checkpoint", ["qwen3_moe", "gpt_oss"], indirect=True)
# Not in Triton's interpreter, which truncates; a card rounds.
@pytest.mark.parametrize("group_calls", ["one by one", "in groups"], indirect=True)
def test_bf16_is_as_near_to_float32_as_transformers_experts(checkpoint, group_calls):
    """Both round in another order: judged by float32 of the same dequantized weights."""
    ours = loaded(checkpoint, torch.bfloat16, compute=torch.bfloat16)
    stock = dequantized(ours, checkpoint, torch.bfloat16, compute=torch.bfloat16)
    exact = dequantized(loaded(checkpoint), checkpoint)
    ids = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(0))
    (_, gradient), (_, stocks), (_, wanted) = (of_embeddings(model, ids) for model in (ours, stock, exact))
    off, stock_off = (torch.linalg.vector_norm(g.float() - wanted) for g in (gradient, stocks))
    assert off <= 1.5 * stock_off


def test_an_expert_without_tokens_is_not_read(tmp_path):
    model = loaded(save(tmp_path))
    keep_plain_kernel(model)
    views = PackedExperts._views
    with patch.object(PackedExperts, "_views", autospec=True, side_effect=views) as read, torch.no_grad():
        model(torch.tensor([[5]]))
    used = {(id(module), expert) for module, _, expert in (call.args for call in read.call_args_list)}
    assert len(used) == len(packed_experts(model)) * 2  # a token goes to two experts of each layer


class Operations(TorchDispatchMode):
    """Names of the operations that are dispatched while this is entered."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_grouped_calls_are_as_many_for_many_experts_as_for_few(tmp_path):
    counted = []
    for number in (6, 24):
        model = loaded(save(tmp_path / str(number), num_experts=number, num_local_experts=number))
        module = next(iter(packed_experts(model).values()))
        hidden = torch.randn(40, 64)
        chosen = torch.rand(40, number).topk(2)
        for one_by_one in (True, False):
            with patch.object(experts, "multiplies_groups", return_value=not one_by_one), Operations() as seen:
                module(hidden, chosen.indices, chosen.values)
            counted.append(len(seen.names))
            # `bincount` waits for the device and `tolist` of what it counted copies; `aten::_local_scalar_dense` is
            # `item`.
            assert one_by_one == bool({"aten::bincount", "aten::_local_scalar_dense"} & set(seen.names))
    loop_6, groups_6, loop_24, groups_24 = counted
    assert groups_6 == groups_24
    assert loop_24 > 2 * loop_6 > 4 * groups_6


@NEEDS_INTERPRETER
def test_a_step_of_decoding_writes_no_dense_experts(tmp_path):
    model = loaded(save(tmp_path, moe_intermediate_size=64))
    hidden = torch.randn(3, 64)
    chosen = torch.rand(3, 6).topk(2)
    module = next(iter(packed_experts(model).values()))
    wanted = module(hidden, chosen.indices, chosen.values)
    with (
        patch.object(experts, "multiplies_groups", return_value=True),
        patch.object(grouped_product, "runs", return_value=True),
        patch.object(experts, "dequantize_rows") as dense,
    ):
        for few in (3, 1):
            got = module(hidden[:few], chosen.indices[:few], chosen.values[:few])
            torch.testing.assert_close(got, wanted[:few])
    dense.assert_not_called()
    assert not triton_kernels._refused


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [((7, 5), None, "this device has 7.5"), ((9, 4), "6.4", "ROCm"), ((8, 0), None, None), ((8, 9), None, None)],
)
def test_a_gpu_without_grouped_products_gets_a_line(capability, hip, reason, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(triton_kernels, "_logged", set())
    experts.multiplies_groups.cache_clear()
    try:
        multiplies = [experts.multiplies_groups(torch.device("cuda", i)) for i in range(3)]  # one line for all of them
    finally:
        experts.multiplies_groups.cache_clear()
    assert multiplies == [reason is None] * 3
    assert [reason in line for line in caplog.messages] == [True] * (reason is not None)


def test_dequantized_checkpoint(checkpoint, tmp_path):
    """In the checkpoint's own layout, read by plain transformers with nothing missing."""
    model = loaded(checkpoint)
    keep_plain_kernel(model)
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
    adapted = get_peft_model(model, tiny.lora(target_modules=["o_proj"]))
    folder = dequantized_base(adapted, tiny.make_tokenizer(), tmp_path, torch.float32, progress=False)
    dense, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        torch.testing.assert_close(dense(ids).logits, expected, rtol=1e-5, atol=1e-5)
    with safe_open(checkpoint / "model.safetensors", "pt") as original:
        names = set(original.keys())
    assert names == set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


@pytest.mark.parametrize(
    ("checkpoint", "checkpointing"),
    these_first(
        [*((family, None) for family in CONFIGS), ("qwen3_moe", "reentrant"), ("qwen3_moe", "other")],
        ("gpt_oss", None),
        ("nemotron_h", None),
        ("qwen3_moe", "reentrant"),
    ),
    indirect=["checkpoint"],
)
def test_lora_on_experts(checkpoint, tmp_path, checkpointing, group_calls):
    model = loaded(checkpoint)
    stock = dequantized(model, checkpoint)
    adapted = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]
    config = tiny.lora(target_modules=["o_proj"], target_parameters=adapted, init_lora_weights=False)
    torch.manual_seed(1)
    ours = get_peft_model(model, config)
    ours.save_pretrained(tmp_path)
    theirs = PeftModel.from_pretrained(stock, tmp_path, is_trainable=True)
    if checkpointing:
        ours.train().gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    ids = torch.randint(0, 97, (3, 20))
    values = []
    for m in (ours, theirs):
        loss, _ = of_embeddings(m, ids)
        gradients = {n.replace(".default", ""): p.grad for n, p in m.named_parameters() if p.requires_grad}
        values.append((loss.item(), gradients))
    assert any("experts" in name for name in values[0][1])
    assert_close(*values, 2e-5)


def test_lora_on_packed_experts_leaves_the_class_of_peft_as_it_is(tmp_path):
    """A mixture in 16 bits in the same process, with the same adapter, is computed by PEFT alone."""
    before = dict(vars(ParamWrapper))
    folder = save(tmp_path)
    adapted = tiny.lora(target_modules=["o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    ids = torch.randint(0, 97, (3, 20))
    packed = get_peft_model(loaded(folder), adapted)
    packed(ids)
    dense = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapted)
    dense(ids)
    assert dict(vars(ParamWrapper)) == before
    replaced_methods = {
        name: [set(vars(module)) & set(before) for module in model.modules() if isinstance(module, ParamWrapper)]
        for name, model in (("packed", packed), ("dense", dense))
    }
    assert replaced_methods == {"packed": [{"_activate_lora"}] * 4, "dense": [set()] * 4}


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_packed_rows_with_packed_experts(tmp_path, beta, group_calls):
    """A GRPO loss with its router loss: packed rows route fewer tokens, and each expert computes those that it
    gets.
    """
    tokenizer = character_tokenizer()
    save(tmp_path / "model", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    adapted = ["experts.gate_up_proj", "experts.down_proj"]
    trainer = tiny_trainer(
        EfficientGRPOTrainer,
        EfficientGRPOConfig,
        tmp_path / "run",
        model=str(tmp_path / "model"),
        peft_config=tiny.lora(target_modules=["q_proj"], target_parameters=adapted, init_lora_weights=False),
        model_init_kwargs={"dtype": "float32", "quantization_config": tiny.quantization()},
        beta=beta,
        num_iterations=2,
        # A share of zero-variance groups would leave rows out of the router loss's count in stock as well as here.
        skip_zero_advantage=False,
    )
    assert len(packed_experts(trainer.model)) == 2
    tiny.as_reference(trainer.model)
    batch = trainer._prepare_inputs([trainer.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    trainer.current_gradient_accumulation_steps = 1
    stock = loss_and_gradients(trainer, batch, stock=True)
    assert any(gradient.any() for name, gradient in stock[1].items() if "experts" in name)
    assert_close(loss_and_gradients(trainer, batch), stock, 2e-5)
    assert trainer._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] < 1


def test_dense_experts_of_a_4_bit_checkpoint_are_packed(tmp_path):
    save(tmp_path / "plain")
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, quantization_config=tiny.quantization()
    )
    stock.save_pretrained(tmp_path / "stored")
    with experts_in_4bit():
        stored = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype=torch.float32)
    assert len(packed_experts(stored)) == 2 and not dense_experts(stored)
    at_once = packed_experts(loaded(tmp_path / "plain"))
    for name, module in packed_experts(stored).items():
        assert all(torch.equal(getattr(module, p), getattr(at_once[name], p)) for p in module.layouts)
    # What a user loads with plain transformers is counted.
    weights = sum(p.numel() for name, p in stock.named_parameters() if ".experts." in name)
    line = experts_in_16_bit(stock)
    assert line.startswith(f"{2 * weights / 2**30:.2f} GiB of experts stay in 16 bit") and "experts_in_4bit()" in line
    assert experts_in_16_bit(stored) is None


SFT = "sft:max_steps=2,save_steps=1,experts=1"
NO_MESH = "ACCELERATE_USE_FSDP=false,ACCELERATE_USE_PARALLELISM_CONFIG=false"
TWO = {"sft": SFT, "by_name": "by_name:experts=1", "resumed": SFT + ",resume={root}/two/sft/checkpoint-1"}
TWO["offloaded"] = SFT + ",FSDP_OFFLOAD_PARAMS=true"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.processes
def test_ranks_with_parts_of_experts_train_as_whole_ones(tmp_path):
    model = save(tmp_path / "model", vocab_size=64, pad_token_id=0, eos_token_id=1)
    tiny.make_tokenizer().save_pretrained(model)
    (one,) = scenarios_of(model, tmp_path / "one", {"by_name": TWO["by_name"]}, processes=1)
    ddp, _ = scenarios_of(model, tmp_path / "ddp", {"sft": SFT})
    two, rank_1 = scenarios_of(model, tmp_path / "two", TWO, environment=fsdp_environment())
    for result in (two, rank_1):
        for scenario in ("sft", "by_name"):
            base = result[scenario]["base"]
            assert result[scenario]["dtensors"] and base["ratio"] <= 0.52
            assert base["quantized_full"] > 2 * 6 * (96 * 64 + 64 * 48) / 2  # experts are most of the 4-bit bytes
    assert rank_1["by_name"]["meta"] and not two["by_name"]["meta"]
    assert (one["by_name"]["first_logits"] - two["by_name"]["first_logits"]).abs().max() <= 1e-5
    adapter = two["sft"]["adapter"]
    # A and B of two projections in two layers.
    assert len([name for name in adapter if "experts" in name]) == 2 * 2 * 2
    # DDP has the same halves of a batch on each rank; one process has another router loss, a mean over the whole
    # batch.
    assert ddp["sft"]["loss"] == two["sft"]["loss"]
    for same in (ddp["sft"], two["offloaded"], two["resumed"]):
        assert difference(adapter, same["adapter"]) == 0
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reloaded = PeftModel.from_pretrained(whole, tmp_path / "two" / "sft" / "checkpoint-2")
    plain = {name.replace(".default", ""): value for name, value in adapter.items()}
    assert difference(get_peft_model_state_dict(reloaded), plain) == 0


@pytest.mark.exhaustive
@pytest.mark.processes
def test_four_ranks_of_which_one_holds_no_expert(tmp_path):
    """They sum gradients in another order, and of six experts they hold 2, 2, 2 and none."""
    model = save(tmp_path / "model", vocab_size=64, pad_token_id=0, eos_token_id=1)
    tiny.make_tokenizer().save_pretrained(model)
    of_four = {"uneven": SFT, "ddp": f"{SFT},{NO_MESH}"}
    four, *_ = scenarios_of(model, tmp_path / "four", of_four, processes=4, environment=mesh_environment(1, 4))
    uneven = four["uneven"]
    ddp = four["ddp"]
    assert uneven["dtensors"] and 0.3 < uneven["base"]["ratio"] <= 0.35 and not ddp["dtensors"]
    assert difference(uneven["adapter"], ddp["adapter"]) <= 1e-6
