"""Tiny models of every family, a batch with the edge cases, and the padded reference (stock TRL)."""

from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from trl.trainer.utils import add_fused_lm_head

from trl_fsdp_qlora.prefix_sharing import forest
from trl_fsdp_qlora.prefix_sharing.batch import Instructions, Sequences, decode, encode
from trl_fsdp_qlora.prefix_sharing.row import PackedRow, PassRecord, lay_out
from trl_fsdp_qlora.prefix_sharing.row_mask import options_of
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing, SharingOptions, causal_language_model, install_sharing
from trl_fsdp_qlora.prefix_sharing.status import PassType, Status

VOCABULARY = 67
PROMPT = 14
COMPLETION = 9
# A name of a config's field -> its value in a small model; what a config does not have stays out of it.
SMALL = {"is_decoder": True, "pad_token_id": 0} | {
    name: value
    for value, names in {
        VOCABULARY: "vocab_size vocab_size_per_layer_input",
        32: "hidden_size d_model word_embed_proj_dim embedding_size out_hidden_size embed_dim",
        48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim",
        64: "max_position_embeddings mamba_d_ssm",
        24: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
        16: "mamba_d_head mamba_head_dim image_size num_position_embeddings",
        8: "head_dim kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state "
        "mamba_chunk_size chunk_size ssm_state_size patch_size linear_key_head_dim linear_value_head_dim "
        "linear_head_dim",
        4: "num_attention_heads rotary_dim decoder_attention_heads encoder_attention_heads num_experts "
        "num_local_experts n_routed_experts index_topk keep_window_size mamba_n_heads mamba_num_heads num_heads "
        "linear_num_value_heads linear_num_heads",
        2: "num_hidden_layers num_key_value_heads decoder_layers encoder_layers num_experts_per_tok bos_token_id "
        "linear_num_key_heads n_groups",
        1: "n_group topk_group first_k_dense_replace eos_token_id depth",
    }.items()
    for name in names.split()
}


def small_config(config, sizes=SMALL, of_model=None, tower=None):
    """The config with small sizes and no dropout.

    `of_model` and `tower` are fields of its decoder and of its vision tower.
    """
    of_model = of_model or {}
    is_decoder = config.get_text_config(decoder=True) is config
    fields = {name: value for name, value in of_model.items() if is_decoder or hasattr(config, name)}
    for name in {*vars(config), *config.attribute_map, *config.sub_configs} - fields.keys():
        try:
            value = getattr(config, name, None)
        except Exception:  # it differs from layer to layer
            continue
        if name in config.sub_configs and value is not None:
            of_text = {key: x for key, x in of_model.items() if key not in fields or hasattr(value, key)}
            is_text = value is config.get_text_config(decoder=True)
            fields[name] = small_config(value, sizes, of_text if is_text else tower).to_dict()
        elif name in sizes and value is not None:
            fields[name] = sizes[name]
        elif isinstance(value, float) and "drop" in name:
            fields[name] = 0.0
    return type(config)(**fields)


def small(name, kind="ForCausalLM", config="Config", tower=None, **of_model):
    """Makes a class of transformers as it is by default but for its size and these changes."""
    return lambda: getattr(tf, name + kind)(small_config(getattr(tf, name + config)(), SMALL, of_model, tower))


# Windows shorter than the prompt, so that a window by row distance, or none, is wrong.
_GEMMA = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
SUPPORTED = {
    "llama": small("Llama"),
    "qwen3": small("Qwen3"),
    "qwen3_sliding": small("Qwen3", use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "gemma2": small("Gemma2", sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=9.0),
    "gemma3": small("Gemma3", config="TextConfig", **_GEMMA),
    "mistral_sliding": small("Mistral", sliding_window=6),
    "qwen3_moe": small("Qwen3Moe"),
    "gpt_oss": small("GptOss", sliding_window=6),
    "phi3": small("Phi3"),
    "nemotron": small("Nemotron", head_dim=8, num_key_value_heads=2),
}
LINEAR = ["linear_attention", "full_attention"]
_HYBRID = ["recurrent", "cascade"]
_NEMOTRON = ["mamba", "attention", "mlp", "moe", "mamba"]
_ZAMBA = {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "num_key_value_heads": 4}
_LFM3 = {"num_hidden_layers": 3, "sliding_window": 6, "layer_types": ["conv", "sliding_attention", "full_attention"]}
# Layers that carry a state from token to token; what each layer of a packed row is computed by.
RECURRENT = {
    "qwen3_5": (small("Qwen3_5", config="TextConfig", layer_types=LINEAR), _HYBRID),
    "qwen3_5_moe": (small("Qwen3_5Moe", config="TextConfig", layer_types=LINEAR), _HYBRID),
    "qwen3_next": (small("Qwen3Next", layer_types=LINEAR), _HYBRID),
    "lfm2": (small("Lfm2", layer_types=["conv", "full_attention"]), _HYBRID),
    "lfm3": (small("Lfm3", **_LFM3), ["recurrent", "two_part", "cascade"]),
    "granitemoehybrid": (small("GraniteMoeHybrid", layer_types=["mamba", "attention"]), _HYBRID),
    "falcon_h1": (small("FalconH1"), _HYBRID * 2),
    "bamba": (small("Bamba", attn_layer_indices=[1]), _HYBRID),
    "mamba2": (small("Mamba2", num_heads=8), ["recurrent"] * 2),
    "olmo_hybrid": (small("OlmoHybrid", layer_types=LINEAR), _HYBRID),
    "nemotron_h": (small("NemotronH", layers_block_type=_NEMOTRON), ["recurrent", "cascade", "recurrent"]),
    "kimi_linear": (small("KimiLinear", layer_types=LINEAR, num_key_value_heads=4), ["recurrent", "two_part"]),
    "zamba2": (small("Zamba2", **_ZAMBA), ["recurrent", "cascade", "recurrent"] * 2),
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 1.0}
QWEN_TOWER = {"patch_size": 4, "deepstack_visual_indexes": [0]}
GEMMA4 = _GEMMA | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 8, "head_dim": 8}
_GEMMA4_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 16,
}  # fmt: skip


def sees(name, **of_model):
    """Makes a class that could take images."""
    return small(name, "ForConditionalGeneration", **of_model)


# Classes that could take images, for text.
MULTIMODAL = {
    "gemma3": sees("Gemma3", **_GEMMA, mm_tokens_per_image=4),
    "gemma4": sees("Gemma4", **GEMMA4, audio_config=None, vision_config=_GEMMA4_TOWER),
    "qwen2_5_vl": sees("Qwen2_5_VL", rope_parameters=MROPE, tower=QWEN_TOWER),
    "qwen3_vl": sees("Qwen3VL", rope_parameters=MROPE, tower=QWEN_TOWER),
    "qwen3_5": sees("Qwen3_5", layer_types=LINEAR, tower=QWEN_TOWER),
    "mistral3": sees("Mistral3", tower={"image_size": 32}),
    "glm4v": sees("Glm4v", rope_parameters=MROPE, tower=QWEN_TOWER),
    "internvl": sees("InternVL", tower={"image_size": [16, 16], "patch_size": [8, 8]}),
    "smolvlm": sees("SmolVLM", scale_factor=2),
}
# Positions of the model's own counting.
COUNTING = {"opt": small("OPT"), "xlm_roberta": small("XLMRoberta", pad_token_id=1)}
# Attention of their own, which takes a mask of all pairs.
# Mamba-1, whose scan begins at zero.
FROM_NO_STATE = {"mamba": small("Mamba"), "jamba": small("Jamba", attn_layer_period=2, attn_layer_offset=1)}
UNSUPPORTED = {
    "falcon with ALiBi": small("Falcon", alibi=True),
    # Their attention is code of their own.
    "falcon": small("Falcon"),
    "bloom": small("Bloom"),
    "bart": small("Bart"),
    # Its cache is a class of its own.
    "minimax": small("MiniMax", layer_types=LINEAR),
    **FROM_NO_STATE,
}


# Of all families but those that could take images.
MAKE = SUPPORTED | COUNTING | {name: make for name, (make, _) in RECURRENT.items()}
FAMILIES = MAKE | {f"{name} (images)": make for name, make in MULTIMODAL.items()}


def build(make, seed: int = 0):
    """The model, of this name or made so, with weights large enough that attending to the wrong token shows."""
    torch.manual_seed(seed)
    model = (MAKE | FROM_NO_STATE).get(make, make)()
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


def completion_labels(ids, mask, completion=COMPLETION):
    """Every real token of a completion is one."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-completion] = -100
    return labels


@contextmanager
def every_level_made():
    """Inside, a forest has every level that saves anything."""
    with mock.patch.multiple(forest, MIN_SAVED_BY_LEVEL=1, MIN_SAVED_FRACTION=0.0):
        yield


def read_batch(ids, mask, labels) -> Sequences:
    """A batch of text on the host."""
    return decode(encode(ids, mask, labels).cpu().numpy())


def pack(ids, mask, labels, is_whole=False, **grown) -> PackedRow:
    """The packed row of a batch, laid out without a model; with `is_whole` every token is in it."""
    sequences = read_batch(ids, mask, labels)
    lengths_B = sequences.lengths_B if is_whole else sequences.needed_B
    return lay_out(ids, labels, sequences, forest.build_forest(sequences.tokens_BL, lengths_B, **grown))


def stock_log_probs(model, ids, mask, completion=COMPLETION):
    """TRL's own padded pass."""
    labels = completion_labels(ids, mask, completion)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -completion:], outputs.entropy[:, -completion:]


def with_stock_head(model, temperature=0.9):
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    return model


def prepared(model, choice="auto", compared=False, **options) -> PromptSharing:
    """Prompt sharing of `model`, which gets stock's head; without the comparison of the first pass if `compared`."""
    base = causal_language_model(model)
    if not hasattr(base, "prompt_sharing"):
        with_stock_head(base)
    sharing = install_sharing(model, SharingOptions(attention=choice, **options))
    if compared:
        sharing.status.note_equal(PassType(True, True))
    return sharing


@contextmanager
def closed(sharing):
    """Inside, passes run as in stock TRL."""
    before = sharing.status
    sharing.status = Status.as_stock("closed for now")
    try:
        yield
    finally:
        sharing.status = before


class Pass(NamedTuple):
    """The results of a pass: `(B, C)` each, what prompt sharing counted, and how many padded forwards ran."""

    logps_BC: torch.Tensor
    entropies_BC: torch.Tensor
    figures: PassRecord
    padded_forwards: int


def one_pass(model, sharing, batch=None, scored_BC=None, completion=COMPLETION, **arguments) -> Pass:
    """A pass over a batch as a trainer makes it."""
    ids, mask = batch or awkward_batch()
    labels = completion_labels(ids, mask, completion)
    of_images = {"num_images": arguments.pop("num_images", None)}
    tokens_per_pass = {name: arguments.pop(name) for name in ("tokens_per_pass",) if name in arguments}
    if scored_BC is not None:
        labels[:, -completion:].masked_fill_(~scored_BC, -100)
    with counting_padded_forwards(sharing.base) as padded:
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, **arguments}
        output = model(**inputs, sharing=Instructions(**of_images, **tokens_per_pass), fused_lm_head=True)
    values = (x[:, -completion:] for x in (output.log_probs, output.entropy))
    return Pass(*values, sharing.figures, len(padded))


@contextmanager
def counting_padded_forwards(base):
    """A list that gets an entry for each padded forward of a model's backbone."""
    calls = []
    backbone = type(base.base_model)
    call = backbone.__call__

    def counting(self, *args, **arguments):
        mask = arguments["attention_mask"]
        # A packed row has a mask of its own kind.
        if options_of(mask) or (type(mask) is torch.Tensor and mask.ndim == 2):
            calls.append(tuple(arguments["input_ids"].shape))
        return call(self, *args, **arguments)

    # Not a hook: that would be a change of the model, which is then compared again.
    with mock.patch.object(backbone, "__call__", counting):
        yield calls


@contextmanager
def counting_levels():
    """A list that gets the tokens of each level of every row that is computed."""
    levels = []
    add = PassRecord.add

    def counting(self, packed_row):
        forest = packed_row.forest
        computed = slice(0, forest.computed)
        levels.append(np.bincount(forest.levels[computed], forest.lengths[computed]).astype(int).tolist())
        add(self, packed_row)

    with mock.patch.object(PassRecord, "add", counting):
        yield levels


def assert_equals_stock(model, sharing=None, batch=None, scored_BC=None, **arguments) -> PassRecord:
    """Log-probabilities, entropies and gradients of a packed pass are those of the padded one; what it counted."""
    ids, mask = batch or awkward_batch()
    sharing = sharing or prepared(model, compared=True)
    real = mask[:, -COMPLETION:].bool() if scored_BC is None else mask[:, -COMPLETION:].bool() & scored_BC
    weight = torch.randn(len(ids), COMPLETION, 2, generator=torch.Generator().manual_seed(5)) * real[:, :, None]
    with closed(sharing):
        stock = torch.stack(stock_log_probs(model, ids, mask), -1)
    (stock * weight).sum().backward()
    reference = gradients(model)
    ours = one_pass(model, sharing, batch, scored_BC, **arguments)
    assert sharing.status.packs and ours.figures.tokens, sharing.describe()
    values = torch.stack([ours.logps_BC, ours.entropies_BC], -1)
    # Rounding of float32 in sums of this length.
    torch.testing.assert_close(values, torch.where(real[:, :, None], stock, 0.0), atol=2e-5, rtol=1e-5)
    (values * weight).sum().backward()
    assert_equal_gradients(gradients(model), reference, tolerance=2e-5)
    return ours.figures


def gradients(model) -> list[torch.Tensor]:
    """Gradients of all parameters, which are reset."""
    tensors = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad
    ]
    model.zero_grad(set_to_none=True)
    return tensors


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
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text "
        "}}{% endif %}{% endfor %}{% endfor %}"
    )
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1, "chat_template": chat}
    return tf.LlavaProcessor(reader, tokens, patch_size=8, **options)
