"""Tiny models of every family, one awkward batch, and the padded reference (stock TRL)."""

import torch
import transformers as tf
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl.trainer.utils import add_fused_lm_head

from trl_fsdp_qlora.grpo.config import EfficientGRPOConfig
from trl_fsdp_qlora.prefix_sharing.attention import no_mask
from trl_fsdp_qlora.prefix_sharing.scope import checkpointed, computing
from trl_fsdp_qlora.recipe.answers import completion_text

VOCABULARY = 67
PROMPT, COMPLETION = 14, 9
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Windows shorter than the prompt, so that a window by row distance, or none, is wrong.
SUPPORTED = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SHAPE)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SHAPE)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_SHAPE)),
    "qwen3_sliding": lambda: tf.Qwen3ForCausalLM(
        tf.Qwen3Config(**_SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**_SHAPE, sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=9.0)
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**_SHAPE, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    ),
    "mistral_sliding": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_SHAPE, sliding_window=6)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**_SHAPE, **_MOE)),
    "gpt_oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{k: v for k, v in _SHAPE.items() if k != "head_dim"})),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_SHAPE)),
    "smollm3": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**_SHAPE)),
    # Their layers drop the keywords of the model call.
    "stablelm": lambda: tf.StableLmForCausalLM(tf.StableLmConfig(**_SHAPE)),
    "nemotron": lambda: tf.NemotronForCausalLM(tf.NemotronConfig(**_SHAPE)),
}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 24}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}


def _shape(**changes):
    """`_SHAPE` with some of its values changed, or left out where `None`."""
    return {name: value for name, value in (_SHAPE | changes).items() if value is not None}


# Layers that carry a state from token to token; what each layer of a packed row is computed by.
RECURRENT = {
    "qwen3_5": (lambda: tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**_SHAPE, **_LINEAR)), ["recurrent", "cascade"]),
    "qwen3_5_moe": (
        lambda: tf.Qwen3_5MoeForCausalLM(tf.Qwen3_5MoeTextConfig(**_SHAPE, **_LINEAR, **_MOE, **_SHARED_EXPERT)),
        ["recurrent", "cascade"],
    ),
    "qwen3_next": (
        lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**_SHAPE, **_MOE, **_LINEAR, **_SHARED_EXPERT)),
        ["recurrent", "cascade"],
    ),
    "lfm2": (
        lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention"])),
        ["recurrent", "cascade"],
    ),
    "lfm3": (
        lambda: tf.Lfm3ForCausalLM(
            tf.Lfm3Config(**_shape(num_hidden_layers=3), sliding_window=6, layer_types=LFM3_LAYERS)
        ),
        ["recurrent", "two_part", "cascade"],
    ),
    "granitemoehybrid": (
        lambda: tf.GraniteMoeHybridForCausalLM(
            tf.GraniteMoeHybridConfig(
                **_SHAPE,
                **_MAMBA,
                layer_types=["mamba", "attention"],
                num_local_experts=4,
                num_experts_per_tok=2,
                shared_intermediate_size=48,
            )
        ),
        ["recurrent", "cascade"],
    ),
    "falcon_h1": (
        lambda: tf.FalconH1ForCausalLM(tf.FalconH1Config(**_SHAPE, **_MAMBA, mamba_d_ssm=64)),
        ["recurrent", "cascade"] * 2,
    ),
    "bamba": (
        lambda: tf.BambaForCausalLM(tf.BambaConfig(**_SHAPE, **_MAMBA, attn_layer_indices=[1])),
        ["recurrent", "cascade"],
    ),
    "mamba2": (
        lambda: tf.Mamba2ForCausalLM(
            tf.Mamba2Config(
                **_shape(num_attention_heads=None, num_key_value_heads=None, intermediate_size=None),
                num_heads=8,
                state_size=8,
                n_groups=2,
                chunk_size=8,
            )
        ),
        ["recurrent"] * 2,
    ),
    # Mamba-1, whose kernel goes on from no state.
    "mamba": (
        lambda: tf.MambaForCausalLM(
            tf.MambaConfig(
                **_shape(num_attention_heads=None, num_key_value_heads=None, intermediate_size=None), state_size=8
            )
        ),
        ["recurrent"] * 2,
    ),
    "jamba": (
        lambda: tf.JambaForCausalLM(
            tf.JambaConfig(**_SHAPE, attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_d_state=8)
        ),
        ["recurrent", "cascade"],
    ),
    "olmo_hybrid": (
        lambda: tf.OlmoHybridForCausalLM(tf.OlmoHybridConfig(**_SHAPE, **_LINEAR)),
        ["recurrent", "cascade"],
    ),
    "nemotron_h": (
        lambda: tf.NemotronHForCausalLM(
            tf.NemotronHConfig(
                **_shape(num_hidden_layers=None),
                layers_block_type=["mamba", "attention", "mlp", "moe", "mamba"],
                mamba_num_heads=8,
                mamba_head_dim=8,
                ssm_state_size=8,
                chunk_size=8,
                n_groups=2,
                n_routed_experts=4,
                moe_intermediate_size=24,
                moe_shared_expert_intermediate_size=24,
            )
        ),
        ["recurrent", "cascade", "recurrent"],
    ),
    "kimi_linear": (
        lambda: tf.KimiLinearForCausalLM(
            tf.KimiLinearConfig(
                **_shape(num_key_value_heads=4, head_dim=None),
                moe_intermediate_size=24,
                num_local_experts=4,
                num_experts_per_tok=2,
                kv_lora_rank=8,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
                linear_head_dim=8,
                linear_num_heads=4,
                layer_types=["linear_attention", "full_attention"],
            )
        ),
        ["recurrent", "two_part"],
    ),
    "zamba2": (
        lambda: tf.Zamba2ForCausalLM(
            tf.Zamba2Config(
                **_shape(num_hidden_layers=4, num_key_value_heads=4, head_dim=None),
                layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
                mamba_d_state=8,
                n_mamba_heads=8,
                chunk_size=8,
            )
        ),
        ["recurrent", "cascade", "recurrent", "recurrent", "cascade", "recurrent"],
    ),
}
LFM3_LAYERS = ["conv", "sliding_attention", "full_attention"]
_PATCHES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_SIGLIP = {**_PATCHES, "image_size": 16, "patch_size": 8}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_GEMMA_LAYERS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
# Classes that could take images, for text.
MULTIMODAL = {
    "gemma3": lambda: tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(text_config=_SHAPE | _GEMMA_LAYERS, vision_config=_SIGLIP, mm_tokens_per_image=4)
    ),
    "gemma4": lambda: tf.Gemma4ForConditionalGeneration(
        tf.Gemma4Config(
            text_config=_SHAPE
            | _GEMMA_LAYERS
            | {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
            vision_config=_PATCHES | {"num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 16},
            audio_config=None,
        )
    ),
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(
            text_config=_shape(head_dim=None) | {"rope_parameters": _MROPE}, vision_config=_QWEN_VISION
        )
    ),
    "qwen3_vl": lambda: tf.Qwen3VLForConditionalGeneration(
        tf.Qwen3VLConfig(text_config=_SHAPE | {"rope_parameters": _MROPE}, vision_config=_QWEN_VISION)
    ),
    "qwen3_5": lambda: tf.Qwen3_5ForConditionalGeneration(
        tf.Qwen3_5Config(text_config=_SHAPE | _LINEAR, vision_config=_QWEN_VISION)
    ),
    "mistral3": lambda: tf.Mistral3ForConditionalGeneration(
        tf.Mistral3Config(
            text_config=_SHAPE | {"model_type": "mistral"},
            vision_config=_SIGLIP | {"model_type": "pixtral", "head_dim": 8, "image_size": 32},
        )
    ),
    "glm4v": lambda: tf.Glm4vForConditionalGeneration(
        tf.Glm4vConfig(
            text_config=_SHAPE | {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
            vision_config=_QWEN_VISION | {"image_size": 16},
        )
    ),
    "internvl": lambda: tf.InternVLForConditionalGeneration(
        tf.InternVLConfig(
            text_config=_SHAPE | {"model_type": "qwen2"},
            vision_config=_PATCHES | {"image_size": [16, 16], "patch_size": [8, 8]},
        )
    ),
    "smolvlm": lambda: tf.SmolVLMForConditionalGeneration(
        tf.SmolVLMConfig(text_config=_SHAPE | {"model_type": "llama"}, vision_config=_SIGLIP, scale_factor=2)
    ),
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_PDROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LEARNED = {"max_position_embeddings": 64, "ffn_dim": 48, "word_embed_proj_dim": 32}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
}
# Positions of the model's own counting.
COUNTING = {
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**_shape(head_dim=None) | _LEARNED | {"dropout": 0.0})),
    "xlm_roberta": lambda: tf.XLMRobertaForCausalLM(
        tf.XLMRobertaConfig(**_SHAPE | _NO_DROPOUT | {"pad_token_id": 1}, is_decoder=True)
    ),
    "bart": lambda: tf.BartForCausalLM(tf.BartConfig(**_BART, max_position_embeddings=64, dropout=0.0)),
}
# Attention of their own, which takes a mask of all pairs.
MASKED = {
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**_shape(head_dim=None))),
    "gptj": lambda: tf.GPTJForCausalLM(
        tf.GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, **_NO_PDROP)
    ),
}
UNSUPPORTED = {
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**_shape(head_dim=None), alibi=True)),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)),
    # Its cache is a class of its own.
    "minimax": lambda: tf.MiniMaxForCausalLM(
        tf.MiniMaxConfig(**_SHAPE, num_local_experts=4, layer_types=["linear_attention", "full_attention"])
    ),
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


def packed_forward(model, layout, backend="auto"):
    """What a model that was prepared for it gives for a packed row."""
    layout.backend = backend
    with computing(layout, checkpointed(model)):
        return model(
            input_ids=layout.input_ids,
            attention_mask=no_mask(layout.input_ids.device),
            position_ids=layout.position_ids,
            score_index_N=layout.score_index_N,
            score_targets_N=layout.score_targets_N,
        )


def packed_log_probs(model, layout, backend="auto"):
    """Log-probabilities and entropies of one packed forward."""
    outputs = packed_forward(model, layout, backend)
    return layout.scatter(outputs.log_probs), layout.scatter(outputs.entropy)


def with_stock_head(model, temperature=0.9):
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    return model


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
    return tf.LlavaProcessor(
        reader,
        tokens,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=chat,
        num_additional_image_tokens=1,
    )


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
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": COMPLETION,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "compact_generation": False,  # draws as stock does
    }
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
