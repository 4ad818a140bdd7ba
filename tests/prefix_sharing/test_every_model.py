"""Every causal language model of transformers, shrunk from its default config: equal to stock, or padded with a reason.

Where stock itself cannot compute such a model on a padded batch, there is nothing to compare with.
"""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_fsdp_qlora.prefix_sharing import PrefixSharing
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

from .helpers import COMPLETION, awkward_batch, stock_log_probs, with_stock_head

# A name of a config's field -> its value in a small model; what a config does not have stays out of it.
SMALL = {
    "vocab_size": 67,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "ffn_dim": 48,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "expert_ffn_hidden_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "is_decoder": True,
}
FAST = (
    "llama",
    "gpt2",
    "gpt_bigcode",
    "opt",
    "bert",
    "gpt_neox",
    "phi",
    "granite",
    "glm",
    "cohere",
    "starcoder2",
    "bloom",
)
# Latent attention has as many keys as queries; some classes work their head size out.
VARIANTS = ({}, {"num_key_value_heads": 4}, {"head_dim": None}, {"num_key_value_heads": 4, "head_dim": None})
LARGEST = 30_000_000
# Of whose linear attention transformers has a reference in Python alone: 25 s a pass, whatever the sizes above.
TOO_SLOW = {"kimi_linear"}


# What is not built in one of these variants, or not computed by stock on a padded batch; a class that is not here and fails is an
# error. Gemma 4, Mamba-2, Nemotron-H and Zamba 2 have sizes of their own in helpers.py.
NOT_COMPUTED = {
    "blt",
    "codegen",
    "cohere_compass_text",
    "dbrx",
    "deepseek_v2",
    "dots1",
    "dots3_note",
    "dots3_note_text",
    "electra",
    "emu3",
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_assistant",
    "gemma4_text",
    "git",
    "gpt_neo",
    "gptj",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "lfm2_moe",
    "llama4",
    "llama4_text",
    "mamba2",
    "ministral",
    "mllama",
    "musicgen",
    "musicgen_melody",
    "nemotron",
    "nemotron_h",
    "phi4_multimodal",
    "prophetnet",
    "reformer",
    "rembert",
    "xlnet",
    "xlstm",
    "xmod",
    "zamba",
    "zamba2",
    "zaya",
}


def small_model(model_type, variant):
    """The model with its class's defaults but for its size."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    sizes = {name: value for name, value in {**SMALL, **variant}.items() if value is not None}
    config = type(config)(**{name: value for name, value in sizes.items() if getattr(config, name, None) is not None})
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters: its size has other names")
    return AutoModelForCausalLM.from_config(config)


def computable_model(model_type, ids, mask):
    """A small model that stock computes; skips where none of the variants is one and it is known."""
    reasons = []
    for variant in VARIANTS:
        try:
            model = with_stock_head(small_model(model_type, variant).train())
            with torch.no_grad():  # the first forward of some classes decides how the others go (big_bird)
                logps_BC, _ = stock_log_probs(model, ids, mask)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error)[:120]}")
            continue
        if torch.isfinite(logps_BC).all():
            return model
        reasons.append("no finite number")
    if model_type not in NOT_COMPUTED:
        pytest.fail(f"{model_type} is not computed any more, not by stock either: {reasons[0]}")
    pytest.skip(reasons[0])


def scored_pass(model, run):
    """Log-probabilities and gradients."""
    model.zero_grad()
    logps_BC = run()
    logps_BC.sum().backward()
    return logps_BC.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal_or_padded(model_type):
    ids, mask = awkward_batch()
    model = computable_model(model_type, ids, mask)

    def stock(ids, mask):
        torch.manual_seed(1)
        return stock_log_probs(model, ids, mask)[0]

    expected, gradients = scored_pass(model, lambda: stock(ids, mask))
    sharing = PrefixSharing(temperature=0.9)
    sharing.prepare("policy", model)
    dropout = sharing._states["policy"].dropout

    def ours():
        request = PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION)
        return sharing.log_probs(
            request, lambda request: (stock(request.input_ids, request.attention_mask), None, None)
        ).values[0]

    found, our_gradients = scored_pass(model, ours)
    print(f"{model_type}: {sharing.describe()}")
    if sharing.active() and dropout is not None:
        return  # other masks, and said
    real = mask[:, -COMPLETION:].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-3, rtol=1e-4)
    largest = max(g.norm() for g in gradients if g is not None)
    for ours_, stock_ in zip(our_gradients, gradients, strict=True):
        if stock_ is not None and stock_.any():
            assert ours_ is not None
            assert (ours_ - stock_).norm() <= 1e-2 * stock_.norm() + 1e-3 * largest


@pytest.mark.parametrize("model_type", FAST)
def test_common_models(model_type):
    assert_equal_or_padded(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAST) - TOO_SLOW))
def test_all_models(model_type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal_or_padded(model_type)
