"""Tiny models of every family, one awkward batch, and the padded reference (stock TRL)."""

from itertools import product

import torch
import transformers as tf
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl.trainer.utils import add_fused_lm_head

from trl_fsdp_qlora.grpo.config import EfficientGRPOConfig
from trl_fsdp_qlora.prefix_sharing import PrefixSharing
from trl_fsdp_qlora.prefix_sharing.attention import no_mask
from trl_fsdp_qlora.prefix_sharing.scope import checkpointed, computing
from trl_fsdp_qlora.recipe.answers import completion_text
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

VOCABULARY = 67
PROMPT, COMPLETION = 14, 9
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]

_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _shape(**changes):
    """`_SHAPE` with some of its values changed, or left out where `None`."""
    return {name: value for name, value in (_SHAPE | changes).items() if value is not None}


def _causal(name, config="Config", **changes):
    """Makes a causal language model of a family, of `_SHAPE` but for these changes."""
    return lambda: getattr(tf, f"{name}ForCausalLM")(getattr(tf, name + config)(**_shape(**changes)))


# Windows shorter than the prompt, so that a window by row distance, or none, is wrong.
SUPPORTED = {
    "llama": _causal("Llama"),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3"),
    "qwen3_sliding": _causal("Qwen3", use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "gemma2": _causal("Gemma2", sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=9.0),
    "gemma3": _causal("Gemma3", "TextConfig", sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "mistral_sliding": _causal("Mistral", sliding_window=6),
    "qwen3_moe": _causal("Qwen3Moe", **_MOE),
    "gpt_oss": _causal("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "phi3": _causal("Phi3", head_dim=None),
    "olmo2": _causal("Olmo2"),
    "smollm3": _causal("SmolLM3"),
    # Their layers drop the keywords of the model call.
    "stablelm": _causal("StableLm"),
    "nemotron": _causal("Nemotron"),
}
_LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_SHARED_EXPERT = {"shared_expert_intermediate_size": 24}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
_NO_ATTENTION = {"num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None}
_GRANITE_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}
_NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 8, "n_groups": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "num_hidden_layers": None,
    "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba"],
}  # fmt: skip
_KIMI = {
    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4,
    "moe_intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": None,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "n_mamba_heads": 8, "chunk_size": 8,
    "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": None,
}  # fmt: skip
_HYBRID = ["recurrent", "cascade"]
# Layers that carry a state from token to token; what each layer of a packed row is computed by.
RECURRENT = {
    "qwen3_5": (_causal("Qwen3_5", "TextConfig", **_LINEAR), _HYBRID),
    "qwen3_5_moe": (_causal("Qwen3_5Moe", "TextConfig", **_LINEAR, **_MOE, **_SHARED_EXPERT), _HYBRID),
    "qwen3_next": (_causal("Qwen3Next", **_MOE, **_LINEAR, **_SHARED_EXPERT), _HYBRID),
    "lfm2": (_causal("Lfm2", layer_types=["conv", "full_attention"]), _HYBRID),
    "lfm3": (
        _causal(
            "Lfm3", num_hidden_layers=3, sliding_window=6, layer_types=["conv", "sliding_attention", "full_attention"]
        ),
        ["recurrent", "two_part", "cascade"],
    ),
    "granitemoehybrid": (
        _causal("GraniteMoeHybrid", **_MAMBA, layer_types=["mamba", "attention"], **_GRANITE_MOE),
        _HYBRID,
    ),
    "falcon_h1": (_causal("FalconH1", **_MAMBA, mamba_d_ssm=64), _HYBRID * 2),
    "bamba": (_causal("Bamba", **_MAMBA, attn_layer_indices=[1]), _HYBRID),
    "mamba2": (
        _causal("Mamba2", **_NO_ATTENTION, num_heads=8, state_size=8, n_groups=2, chunk_size=8),
        ["recurrent"] * 2,
    ),
    # Mamba-1, whose kernel goes on from no state.
    "mamba": (_causal("Mamba", **_NO_ATTENTION, state_size=8), ["recurrent"] * 2),
    "jamba": (
        _causal("Jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_d_state=8),
        _HYBRID,
    ),
    "olmo_hybrid": (_causal("OlmoHybrid", **_LINEAR), _HYBRID),
    "nemotron_h": (_causal("NemotronH", **_NEMOTRON), ["recurrent", "cascade", "recurrent"]),
    "kimi_linear": (_causal("KimiLinear", **_KIMI), ["recurrent", "two_part"]),
    "zamba2": (_causal("Zamba2", **_ZAMBA), ["recurrent", "cascade", "recurrent"] * 2),
}
_PATCHES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_SIGLIP = {**_PATCHES, "image_size": 16, "patch_size": 8}
_QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_GEMMA_LAYERS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4_TEXT = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_GEMMA4_VISION = {"num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 16}


def sees(name, text, vision, **more):
    """Makes a class of a family that could take images, of `_SHAPE` and these parts of its config."""
    shape = _shape(**{key: value for key, value in text.items() if value is None})
    text = shape | {key: value for key, value in text.items() if value is not None}
    return lambda: getattr(tf, f"{name}ForConditionalGeneration")(
        getattr(tf, f"{name}Config")(text_config=dict(text), vision_config=dict(vision), **more)
    )


# Classes that could take images, for text.
MULTIMODAL = {
    "gemma3": sees("Gemma3", _GEMMA_LAYERS, _SIGLIP, mm_tokens_per_image=4),
    "gemma4": sees("Gemma4", _GEMMA_LAYERS | _GEMMA4_TEXT, _PATCHES | _GEMMA4_VISION, audio_config=None),
    "qwen2_5_vl": sees("Qwen2_5_VL", {"head_dim": None, "rope_parameters": _MROPE}, _QWEN_VISION),
    "qwen3_vl": sees("Qwen3VL", {"rope_parameters": _MROPE}, _QWEN_VISION),
    "qwen3_5": sees("Qwen3_5", _LINEAR, _QWEN_VISION),
    "mistral3": sees(
        "Mistral3", {"model_type": "mistral"}, _SIGLIP | {"model_type": "pixtral", "head_dim": 8, "image_size": 32}
    ),
    "glm4v": sees(
        "Glm4v", {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}}, _QWEN_VISION | {"image_size": 16}
    ),
    "internvl": sees("InternVL", {"model_type": "qwen2"}, _PATCHES | {"image_size": [16, 16], "patch_size": [8, 8]}),
    "smolvlm": sees("SmolVLM", {"model_type": "llama"}, _SIGLIP, scale_factor=2),
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_PDROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "dropout": 0.0}
# Positions of the model's own counting.
COUNTING = {
    "opt": _causal("OPT", head_dim=None, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "xlm_roberta": _causal("XLMRoberta", **_NO_DROPOUT, pad_token_id=1, is_decoder=True),
    "bart": lambda: tf.BartForCausalLM(tf.BartConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **_BART)),
}
# Attention of their own, which takes a mask of all pairs.
MASKED = {
    "falcon": _causal("Falcon", head_dim=None),
    "gptj": lambda: tf.GPTJForCausalLM(
        tf.GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, **_NO_PDROP)
    ),
    "git": _causal("Git", **_NO_DROPOUT, vision_config=_SIGLIP, num_key_value_heads=None, head_dim=None),
}
UNSUPPORTED = {
    "falcon": _causal("Falcon", head_dim=None, alibi=True),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)),
    # Its cache is a class of its own.
    "minimax": _causal("MiniMax", num_local_experts=4, layer_types=["linear_attention", "full_attention"]),
}


def build(make, seed: int = 0):
    """The model with weights large enough that attending to the wrong token shows."""
    torch.manual_seed(seed)
    model = make()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def make_batch(prompt_lengths, completion_lengths, prompt=PROMPT, completion=COMPLETION, seed=0):
    """Padded `(input_ids, attention_mask)`; neighbours with prompts of equal length share the prompt."""
    draw = torch.Generator().manual_seed(seed)
    rows = len(prompt_lengths)
    # Padding holds random tokens too: nothing may depend on them.
    ids = torch.randint(3, VOCABULARY, (rows, prompt + completion), generator=draw)
    mask = torch.zeros(rows, prompt + completion, dtype=torch.long)
    for row in range(rows):
        if row and prompt_lengths[row] == prompt_lengths[row - 1]:
            ids[row, prompt - prompt_lengths[row] : prompt] = ids[row - 1, prompt - prompt_lengths[row] : prompt]
        mask[row, prompt - prompt_lengths[row] : prompt + completion_lengths[row]] = 1
    return ids, mask


# Two groups that share, a prompt that occurs once, a prompt of one token; completions of length 1, full, masked out.
PROMPT_LENGTHS = [14, 14, 14, 14, 9, 9, 9, 5, 1, 1]
COMPLETION_LENGTHS = [9, 1, 4, 0, 6, 6, 6, 9, 2, 3]


def awkward_batch():
    return make_batch(PROMPT_LENGTHS, COMPLETION_LENGTHS)


def stock_log_probs(model, ids, mask, completion=COMPLETION):
    """TRL's own padded pass."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-completion] = -100
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -completion:], outputs.entropy[:, -completion:]


def packed_forward(model, layout):
    """What a model that was prepared for it gives for a packed row."""
    with computing(layout, checkpointed(model)):
        return model(
            input_ids=layout.input_ids,
            attention_mask=no_mask(layout.input_ids.device),
            position_ids=layout.position_ids,
            score_index_N=layout.score_index_N,
            score_targets_N=layout.score_targets_N,
        )


def packed_log_probs(model, layout):
    """Log-probabilities and entropies of one packed forward."""
    outputs = packed_forward(model, layout)
    return layout.scatter(outputs.log_probs), layout.scatter(outputs.entropy)


def with_stock_head(model, temperature=0.9):
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    return model


def prepared(model, choice="auto", compared=False, role="policy", **options):
    """`model` with stock's head, given the package's layers; without the comparison of the first pass where `compared`."""
    sharing = PrefixSharing(choice, temperature=0.9, **options)
    with_stock_head(model.get_base_model() if hasattr(model, "peft_config") else model)
    sharing.prepare(role, model)
    if compared:
        sharing._models[role].checked.update(product((False, True), repeat=3))
    return sharing


def one_pass(model, sharing, batch=None, **asked):
    """A pass over a batch, and how often it asked for the padded one."""
    ids, mask = batch or awkward_batch()
    calls = []

    def padded(request):
        calls.append(request)
        return *stock_log_probs(model, request.input_ids, request.attention_mask), None

    request = PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION, **asked)
    return sharing.log_probs(request, padded), len(calls)


def assert_equals_stock(model, sharing=None, batch=None, scored_BC=None, **asked) -> dict[str, float]:
    """Log-probabilities, entropies and gradients of a packed pass are those of the padded one; its figures."""
    ids, mask = batch or awkward_batch()
    sharing = sharing or prepared(model, compared=True)
    real = mask[:, -COMPLETION:].bool() if scored_BC is None else mask[:, -COMPLETION:].bool() & scored_BC
    weight = torch.randn(len(ids), COMPLETION, 2, generator=torch.Generator().manual_seed(5)) * real[:, :, None]
    stock = torch.stack(stock_log_probs(model, ids, mask), -1)
    (stock * weight).sum().backward()
    reference = gradients(model)
    (values, figures), _ = one_pass(model, sharing, batch, scored_BC=scored_BC, compute_entropy=True, **asked)
    assert sharing.active() and figures, sharing.describe()
    ours = torch.stack(values[:2], -1)
    # Rounding of float32 in sums of this length.
    torch.testing.assert_close(ours, torch.where(real[:, :, None], stock, 0.0), atol=2e-5, rtol=1e-5)
    (ours * weight).sum().backward()
    assert_equal_gradients(gradients(model), reference, tolerance=2e-5)
    return figures


def gradients(model) -> list[torch.Tensor]:
    """Gradients of all parameters, which are reset."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    return found


def assert_equal_gradients(ours, reference, tolerance=1e-4):
    """Within `tolerance` of the largest gradient of all, the bound the project promises."""
    largest = max(g.abs().max() for g in reference)
    assert largest > 0
    worst = max((a - b).abs().max() for a, b in zip(ours, reference, strict=True))
    assert worst <= tolerance * largest, f"gradients differ by {worst / largest:.2e} of the largest"


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(40 + i): i for i in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def llava_processor(tokens):
    """Of a LLaVA that reads pictures of 16 x 16 pixels as four tokens `<image>`, which `tokens` knows."""
    reader = tf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    chat = (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1, "chat_template": chat}
    return tf.LlavaProcessor(reader, tokens, patch_size=8, **options)


def processor():
    """What TRL takes for a sign that a run is one of images."""
    return tf.LlavaProcessor(tf.CLIPImageProcessorPil(), tokenizer(), patch_size=8)


def mean_token(completions, **kwargs):
    """A reward that differs between completions."""
    texts = [completion_text(completion) for completion in completions]
    return [sum(map(ord, text)) % 7 / 7 if text else 0.0 for text in texts]


def make_trainer(cls, model, tmp_path, peft_config=None, processing_class=None, train_dataset=None, **config):
    """A GRPO trainer in fp32 without gradient checkpointing unless told otherwise; groups of 4 in batches of 8."""
    defaults = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": COMPLETION, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [],
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3,
        "compact_generation": False,  # draws as stock does
    }  # fmt: skip
    trainer = cls(
        model=model,
        reward_funcs=mean_token,
        args=EfficientGRPOConfig(**(defaults | config)),
        train_dataset=train_dataset or Dataset.from_dict({"prompt": ["A+B=", "CDEF*G=", "H=", "IJ-K="] * 8}),
        eval_dataset=Dataset.from_dict({"prompt": ["B+A=", "GG=", "DEF*G=", "JI-K="]}),
        processing_class=tokenizer() if processing_class is None else processing_class,
        peft_config=peft_config,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def losses_of(trainers, inputs):
    """(loss, gradients) of each trainer on `inputs`."""
    results = []
    for trainer in trainers:
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        results.append((loss.item(), gradients(trainer.model)))
    return results


def loss_inputs(ids, mask, completion=COMPLETION, seed=3):
    """What `_compute_loss` takes, for a padded batch."""
    draw = torch.Generator().manual_seed(seed)
    width = ids.shape[1] - completion
    completion_mask = mask[:, width:]
    return {
        "prompt_ids": ids[:, :width],
        "prompt_mask": mask[:, :width],
        "completion_ids": ids[:, width:],
        "completion_mask": completion_mask,
        "advantages": torch.randn(len(ids), generator=draw),
        "num_items_in_batch": completion_mask.sum(),
    }
