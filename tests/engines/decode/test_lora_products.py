"""LoRA's joined products while a rollout draws, compared with PEFT's own forwards and with a model without LoRA."""

import copy
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, MixtralConfig, Qwen3Config

from trl_fsdp_qlora.engines.decode import decoding
from trl_fsdp_qlora.engines.decode.completions import complete
from trl_fsdp_qlora.engines.decode.lora_products import joined_products

from .test_decoding import SIZES, greedy, sampled

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7, 8], [12, 13]]
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# Operations that launch nothing: views are left out by themselves.
_NO_KERNEL = {"empty", "empty_like", "new_empty", "detach", "_unsafe_view"}
LAYERS = 2
# Blocks of a 4-bit weight are whole.
SHAPE = {**SIZES, "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


class Operations(TorchDispatchMode):
    """Counts the operations that would launch a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if not function.is_view and name not in _NO_KERNEL:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def model_of(family: str = "llama", dtype=torch.float32, folder=None, **config):
    """A model with LoRA on every linear layer, whose factors are those of TRL's trainers: of the base's dtype."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIGS[family](**SHAPE)).to(dtype)
    if folder is not None:
        base.save_pretrained(folder)
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantization)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False, **config}
    model = get_peft_model(base, LoraConfig(**settings), autocast_adapter_dtype=False)
    if folder is not None:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
    return model.eval()


@torch.no_grad()
def decode(model, tokens: int = 2) -> torch.Tensor:
    """Logits of the last of `tokens` tokens, each decoded by a forward of its own."""
    ids = torch.tensor(PROMPTS[:1] * 3)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    for _ in range(tokens):
        logits = model(input_ids=ids[:, :1], past_key_values=cache).logits
    return logits


def operations_of_a_token(model) -> Counter:
    ids = torch.tensor(PROMPTS[:1] * 3)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        model(input_ids=ids[:, :1], past_key_values=cache)
        with Operations() as operations:
            model(input_ids=ids[:, :1], past_key_values=cache)
    return operations.counts


ROUNDING = {"rtol": 0, "atol": 4e-5}  # float32: sums in another order; a wrong adapter moves logits by tenths


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_pefts_and_the_layers_are_pefts_again(family):
    model = model_of(family)
    expected = decode(model)
    with joined_products(model):
        torch.testing.assert_close(decode(model), expected, **ROUNDING)
        with model.disable_adapter():
            assert (decode(model) - expected).abs().max() > 1e-2  # the adapter counts
    assert not any(getattr(layer, "lora_variant", None) for layer in model.modules())
    assert torch.equal(decode(model), expected)


@pytest.mark.parametrize("factors", [torch.bfloat16, torch.float32], ids=str)
def test_logits_in_16_bits_are_as_near_to_those_in_64_as_pefts(factors):
    """TRL's trainers keep the factors in the base's dtype, PEFT by itself keeps them in float32."""
    model = model_of("qwen3", torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(factors)
    exact = decode(copy.deepcopy(model).double())
    by_peft = (decode(model) - exact).abs().mean()
    with joined_products(model):
        assert (decode(model) - exact).abs().mean() < 1.1 * by_peft


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_token_with_lora_takes_few_operations_more(family, bits, tmp_path):
    """Three for q, k and v on one input and one product each added in place: 4, 2, 3 and 2 of a layer's 7."""
    model = model_of(family, torch.bfloat16, tmp_path / "base" if bits == 4 else None)
    with model.disable_adapter():
        plain = operations_of_a_token(model)
    with joined_products(model):
        joined = operations_of_a_token(model)
    assert joined.total() - plain.total() == 11 * LAYERS
    assert joined.total() <= 1.3 * plain.total()
    clones = 7 if bits == 4 else 0  # of the outputs of PEFT's 4-bit layers
    assert operations_of_a_token(model).total() - plain.total() == (28 + clones) * LAYERS


@pytest.mark.parametrize("settings", [greedy(max_new_tokens=6), sampled(max_new_tokens=6)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bits", [32, 4])
def test_completions_equal_those_by_pefts_forwards(settings, bits, tmp_path, monkeypatch):
    model = model_of(folder=tmp_path / "base" if bits == 4 else None)
    drawn = []
    for products in (joined_products, no_products):
        monkeypatch.setattr(decoding, "joined_products", products)
        torch.manual_seed(3)
        drawn.append(complete(model, PROMPTS, settings)[0])
    assert drawn[0] == drawn[1] and len(set(map(tuple, drawn[0]))) > 1


class no_products:
    def __init__(self, model):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def test_the_next_rollouts_adapter_and_factors_are_used():
    """Factors are copied for a block; what changes between two blocks counts in the second."""
    model = model_of()
    with joined_products(model):
        before = decode(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    with joined_products(model):
        after = decode(model)
    torch.testing.assert_close(after, decode(model), **ROUNDING)
    assert (after - before).abs().max() > 1e-3


def dora(model):
    return model_of(use_dora=True)


def in_training_with_dropout(model):
    return model_of(lora_dropout=0.5).train()


def with_two_adapters(model):
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


def with_a_hook(model):
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.lora_A["default"].register_forward_hook(lambda module, args, output: output * 2)
    return model


@pytest.mark.parametrize("change", [dora, in_training_with_dropout, with_two_adapters, with_a_hook])
def test_layers_that_do_more_than_add_one_adapter_stay_pefts(change):
    model = change(model_of())
    torch.manual_seed(0)
    expected = decode(model)
    torch.manual_seed(0)
    with joined_products(model):
        assert torch.equal(decode(model), expected)


def test_experts_stay_pefts_and_attention_is_joined():
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(MixtralConfig(**SHAPE, num_local_experts=2))
    targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": ["experts.gate_up_proj"]}
    model = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, **targets)).eval()
    expected = decode(model)
    with joined_products(model):
        torch.testing.assert_close(decode(model), expected, **ROUNDING)
