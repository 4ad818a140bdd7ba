"""A merged model answers like the adapter on its base, whatever the adapter changes, and has the adapter's tokenizer.

The reference is the model in memory that the adapter was saved from.

Covers `tools/publishing/adapted_base.py`.
"""

import warnings

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import character_tokenizer, tiny_model
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.publishing.adapted_base import check_loads, load_model
from trl_fsdp_qlora.tools.publishing.merge import merge_adapter

IDS = torch.arange(2, 14)[None]


@pytest.fixture
def base(tmp_path):
    """A function that saves a base, whose head is its embedding or not, and returns the folder."""

    def save(tied=True):
        model = tiny_model()
        if not tied:
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
        model.save_pretrained(tmp_path / "base")
        character_tokenizer().save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return save


def trained(base, folder, further=0, tokenizer=None, **settings):
    """Save an adapter with random weights, of a model with `further` tokens, in `folder`; returns its logits."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about tied weights
        if further:
            model.resize_token_embeddings(model.config.vocab_size + further)
        config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings})
        model = get_peft_model(model, config).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return logits_of(model)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


# What the adapter changes, and whether embedding and head of a base that ties them are still equal after it.
CHANGES = {
    "linear": ({}, True),
    "embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, False),
    "head": ({"target_modules": ["lm_head", "q_proj"]}, False),
    "both": ({"target_modules": ["embed_tokens", "lm_head"]}, False),
    "dora": ({"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}, False),
    "whole embedding": ({"modules_to_save": ["embed_tokens"]}, False),
    "whole head": ({"modules_to_save": ["lm_head"]}, False),
    "both, kept equal": ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "some tokens": ({"trainable_token_indices": [1, 5]}, True),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_merged_models_logits_are_pefts_for_tied_weights(change, tied, base, tmp_path):
    settings, stays_tied = CHANGES[change]
    expected = trained(base(tied), tmp_path / "adapter", **settings)
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(merged)
    # A merged weight is rounded once more, to half a step of float32, in each of some twenty products.
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    assert (logits_of(load_model(str(tmp_path / "base"))) - expected).abs().max() > 0.01
    assert model.config.tie_word_embeddings == (tied and stays_tied)


def test_a_merged_model_has_the_adapters_tokenizer_and_template(base, tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_special_tokens({"eos_token": "<|done|>"})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    folder = base()
    further = len(tokenizer) - tiny_model().config.vocab_size
    assert further == 2
    for name, resized in (("resized", further), ("tokenizer alone", 0)):  # without weights of the new tokens
        trained(folder, tmp_path / name, resized, tokenizer)
        merged = merge_adapter(tmp_path / name, tmp_path / f"merged {name}", dtype=torch.float32)
        written = AutoTokenizer.from_pretrained(merged)
        assert written.chat_template == tokenizer.chat_template
        assert written("<think>")["input_ids"] == tokenizer("<think>")["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(merged)
        assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
        assert model.config.eos_token_id == tokenizer.eos_token_id
        ends = model.generation_config.eos_token_id
        assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
    trained(folder, tmp_path / "without")
    merged = merge_adapter(tmp_path / "without", tmp_path / "merged", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(merged).chat_template == character_tokenizer().chat_template


def test_weights_keep_the_type_of_the_base(base, tmp_path):
    trained(base(), tmp_path / "adapter")
    assert (
        load_model(str(merge_adapter(tmp_path / "adapter", tmp_path / "merged")), dtype="auto").dtype == torch.float32
    )
    half = merge_adapter(tmp_path / "adapter", tmp_path / "half", dtype=torch.bfloat16)
    assert load_model(str(half), dtype="auto").dtype == torch.bfloat16


def test_an_adapter_that_does_not_fit_its_base_is_refused(base, tmp_path):
    folder = base()
    trained(folder, tmp_path / "adapter")
    check_loads(tmp_path / "adapter", str(folder))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    first = next(iter(weights))
    save_file({name: weight for name, weight in weights.items() if name != first}, file)
    with pytest.raises(UserError, match=f"lacks weights.*{first.split('.lora_')[0].split('.')[-1]}"):
        check_loads(tmp_path / "adapter", str(folder))
    save_file({**weights, first: weights[first][:, :3].contiguous()}, file)
    with pytest.raises(UserError, match="its layers have other sizes"):
        check_loads(tmp_path / "adapter", str(folder))
    save_file({**weights, first: weights[first] * float("nan")}, file)
    for load in (
        lambda: check_loads(tmp_path / "adapter", str(folder)),
        lambda: load_model(str(folder), tmp_path / "adapter"),
    ):
        with pytest.raises(UserError, match=f"not finite .*{first}"):
            load()


@pytest.mark.parametrize("kind", ["prefix", "alora"])
def test_an_adapter_that_adds_nothing_to_weights_is_refused(kind, base, tmp_path):
    folder = base()
    configs = {
        "prefix": PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        "alora": LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"),
    }
    get_peft_model(load_model(str(folder)), configs[kind]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        UserError, match=f"{tmp_path / 'adapter'} (is an adapter of PEFT's kind|cannot be merged: aLoRA)"
    ):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
