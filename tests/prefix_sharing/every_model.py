"""Every causal and image-text class of transformers, small: what this package does with it. Writes docs/models.md:

    python -m tests.prefix_sharing.every_model [MODEL_TYPE ...]

With names it prints their rows instead. `test_every_model.py` compares the page with what it finds again.
"""

import functools
import logging
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.planning.models import settings
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_16_bit, load_quantized_base
from trl_fsdp_qlora.fsdp2_qlora.packed_linear import pack_model
from trl_fsdp_qlora.planning.plan import make_plan
from trl_fsdp_qlora.prefix_sharing import PrefixSharing
from trl_fsdp_qlora.rollout.completions import complete
from trl_fsdp_qlora.rollout.decoding import why_stock
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

from .helpers import (
    COMPLETION,
    MULTIMODAL,
    RECURRENT,
    SUPPORTED,
    awkward_batch,
    build,
    gradients,
    stock_log_probs,
    with_stock_head,
)

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# A name of a config's field -> its value in a small model; what a config does not have stays out of it.
SMALL = {
    name: value
    for value, names in (
        (67, "vocab_size vocab_size_per_layer_input"),
        (2, "num_hidden_layers num_key_value_heads decoder_layers encoder_layers num_experts_per_tok bos_token_id"),
        (32, "hidden_size d_model word_embed_proj_dim embedding_size out_hidden_size embed_dim"),
        (
            4,
            "num_attention_heads rotary_dim decoder_attention_heads encoder_attention_heads num_experts num_local_experts "
            "n_routed_experts index_topk keep_window_size mamba_n_heads mamba_num_heads num_heads",
        ),
        (
            8,
            "head_dim kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state mamba_chunk_size "
            "chunk_size ssm_state_size patch_size",
        ),
        (48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim"),
        (64, "max_position_embeddings mamba_d_ssm"),
        (1, "n_group topk_group first_k_dense_replace eos_token_id depth"),
        (24, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
        (16, "mamba_d_head mamba_head_dim image_size num_position_embeddings"),
        (0, "pad_token_id"),
        (True, "is_decoder"),
    )
    for name in names.split()
}
# Latent attention has as many keys as queries; some classes work their head size out.
VARIANTS = ({}, {"num_key_value_heads": 4}, {"head_dim": None}, {"num_key_value_heads": 4, "head_dim": None})
# What a class has to be told although its default says nothing, or says it under names of its own.
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    }
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_GEMMA = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 8}
OWN_SIZES = {
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": _GEMMA,
    "glm46v": _MROPE,
    "glm4v_moe": _MROPE,
    "glm_ocr": _MROPE,
    "qwen2_vl": _MROPE,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_vl": {"head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "step3p7": {"sliding_window": 6},
    "bailing_hybrid": _LINEAR,
    "qwen4_exp": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "minicpm_ocr": _LINEAR,
    "minicpmv4_6": _LINEAR,
    "minicpmv4_7": _LINEAR,
    "lfm3_vl": {"layer_types": ["conv", "full_attention"]},
}
LARGEST = 30_000_000


class Class(NamedTuple):
    """A class of transformers."""

    name: str
    model_type: str
    auto: type


@functools.cache
def classes() -> dict[str, Class]:
    """All of them by name."""
    found = {}
    for auto, names in (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        for model_type, name in names.items():
            found.setdefault(name, Class(name, model_type, auto))
    return found


@functools.cache
def models_of_the_helpers() -> dict:
    """Small models that other tests build, by class: those whose sizes have names of their own."""
    makes = [*SUPPORTED.values(), *(make for make, _ in RECURRENT.values()), *MULTIMODAL.values()]
    with torch.device("meta"):
        return {type(make()).__name__: make for make in reversed(makes)}


def small_config(config, sizes: dict, own: dict):
    """The config with small sizes and no dropout, in its parts too."""
    fields = {}
    for name in {*vars(config), *config.attribute_map, *config.sub_configs}:
        try:
            value = getattr(config, name, None)
        except Exception:  # it differs from layer to layer
            continue
        if name in own:
            fields[name] = own[name]
        elif name in config.sub_configs:
            is_text = value is config.get_text_config(decoder=True)
            fields |= {} if value is None else {name: small_config(value, sizes, own if is_text else {}).to_dict()}
        elif name in sizes and value is not None:
            fields[name] = sizes[name]
        elif isinstance(value, float) and "drop" in name:
            fields[name] = 0.0
    return type(config)(**fields)


def small_model(of: Class, variant: dict):
    """The class with its defaults but for its size."""
    if of.name in models_of_the_helpers():
        return build(models_of_the_helpers()[of.name]).train()
    config = CONFIG_MAPPING[of.model_type]()
    if "Conditional" not in of.name and of.auto is AutoModelForCausalLM:
        config = config.get_text_config(decoder=True)
    sizes = {name: value for name, value in {**SMALL, **variant}.items() if value is not None}
    config = small_config(config, sizes, OWN_SIZES.get(of.model_type, {}))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in of.auto.from_config(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters: its size has other names")
    return build(lambda: of.auto.from_config(config).float()).train()


def scored(model, run, weight_BC):
    """Log-probabilities and gradients of a pass."""
    values_BC = run()
    (values_BC * weight_BC).sum().backward()
    return values_BC.detach(), gradients(model)


def computed(of: Class, ids, mask, weight_BC):
    """A small model that stock TRL trains, its log-probabilities and gradients; or the reason why not."""
    reasons = set()
    for variant in VARIANTS:
        try:
            model = with_stock_head(small_model(of, variant))
            with torch.no_grad():  # the first forward of some classes decides how the others go (big_bird)
                stock_log_probs(model, ids, mask)
            logps_BC, expected = scored(model, lambda: stock_log_probs(model, ids, mask)[0], weight_BC)  # noqa: B023
        except Exception as error:
            reasons.add(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        if all(x.isfinite().all() for x in (logps_BC[weight_BC != 0], *expected)) and any(x.any() for x in expected):
            return model, logps_BC, expected
        reasons.add("no finite number, or no gradient")
    return "; ".join(reasons)


def packed(model, ids, mask, weight_BC, logps_BC, expected) -> str:
    """Whether a packed pass equals stock's, which is asserted; or why it runs padded."""
    sharing = PrefixSharing(temperature=0.9)
    sharing.prepare("policy", model)
    figures = {}

    def ours():
        result = sharing.log_probs(
            PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION),
            lambda request: (stock_log_probs(model, request.input_ids, request.attention_mask)[0], None, None),
        )
        figures.update(result.figures)
        return result.values[0]

    logps, found = scored(model, ours, weight_BC)
    torch.testing.assert_close(logps * (weight_BC != 0), logps_BC * (weight_BC != 0), atol=2e-5, rtol=1e-5)
    largest = max(x.abs().max() for x in expected)
    worst = max((a - b).abs().max() for a, b in zip(found, expected, strict=True))
    assert worst <= 2e-5 * largest, f"gradients differ by {worst / largest:.1e} of the largest"
    if not figures:
        return "no: " + sharing.describe().removeprefix("prefix sharing: ")
    return "dense" if "layers_dense" in figures else "yes"


def decoded(model) -> str:
    """Whether our loop gives the tokens of `generate`, which is asserted; or why `generate` runs."""
    prompts = [[20, 21, 22, 23, 24, 25]] * 3 + [[30, 31, 32]] * 2
    config = GenerationConfig(
        max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=[3, 5, 7, 11, 13], disable_compile=True
    )
    reason = why_stock(model.eval(), config)
    if reason is not None:
        return f"no: {reason}"
    try:
        expected, _ = complete(model, prompts, config, compact=False)
    except Exception:
        return "no, nor does `generate`"
    found, work = complete(model, prompts, config)
    assert work is not None and found == expected
    return "yes"


def planned(config, folder) -> str:
    """Whether `plan` counts it; or the reason why not."""
    config.save_pretrained(folder)
    plan = make_plan(settings(folder, use_peft=False, max_completion_length=8, prompt_tokens=8))
    assert plan.peak > 0
    return "yes"


def in_4_bit(folder) -> str:
    """Whether the bytes that FSDP2 shards compute what bitsandbytes does, which is asserted; or what stays in 16 bit."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = load_quantized_base(str(folder), config, dtype=torch.float32).train()  # no repacking for inference
    ids = torch.arange(3, 15)[None]

    def logits():
        torch.manual_seed(0)  # mixtures draw
        with torch.no_grad():
            return model(input_ids=ids).logits

    try:
        expected = logits()
    except Exception:
        return "no, nor does bitsandbytes"
    if not pack_model(model):
        return "no linear layers"
    assert torch.equal(logits(), expected)
    return "but for experts" if experts_in_16_bit(model) else "yes"


def attempted(run, *arguments) -> str:
    """What `run` says, or the error that a user would get."""
    try:
        return run(*arguments)
    except AssertionError:
        raise
    except Exception as error:
        return f"no: {type(error).__name__}"


def row(name: str) -> list[str] | str:
    """The cells of a class on the page; or why stock TRL does not train it."""
    of, (ids, mask) = classes()[name], awkward_batch()
    weight_BC = torch.randn(len(ids), COMPLETION, generator=torch.Generator().manual_seed(1)) * mask[:, -COMPLETION:]
    found = computed(of, ids, mask, weight_BC)
    if isinstance(found, str):
        return found
    model = found[0]
    cells = [packed(model, ids, mask, weight_BC, *found[1:]).strip()]
    with tempfile.TemporaryDirectory() as folder:
        plain = type(model)._from_config(model.config, attn_implementation=None).float()
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
        cells += [attempted(decoded, plain), attempted(planned, plain.config, folder), attempted(in_4_bit, folder)]
    return cells


def quiet() -> None:
    """The libraries' advice on models of no weight."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


HEAD = """# Models

Written by `python -m tests.prefix_sharing.every_model`; do not edit it by hand. `tests/prefix_sharing/test_every_model.py` builds each
class again, small and with random weights, and compares.

What is looked at, in float32 on a CPU, with transformers {version}:

- **packed**: a batch of text runs as packed rows ([each prompt once](prefix_sharing.md)), equal to stock TRL's padded pass:
  log-probabilities within 2e-5, no gradient further off than 2e-5 of the largest. Dropout is off; attention dropout, where a
  config has it (GPT-2, BERT), makes such a run padded. *Dense*: under one mask of all pairs, where that costs no more than stock.
- **decoded**: [our loop](rollouts.md) gives the tokens of `generate`, greedily.
- **planned**: [`plan`](plan.md) counts its bytes (full training).
- **4 bit**: loaded in nf4, the bytes that [FSDP2 shards](fsdp2_qlora.md) compute what bitsandbytes does, to the last bit. *But for experts*: these
  stay in 16 bit.

**{packed} of {count} classes that stock TRL trains in this form are packed** ({share:.0%}).
"""


def page(rows: dict[str, list[str] | str]) -> str:
    """The text of docs/models.md, from the row of each class."""
    trained = {name: cells for name, cells in rows.items() if not isinstance(cells, str)}
    whole = [name for name, cells in trained.items() if cells == ["yes"] * 4]
    others = {name: cells for name, cells in trained.items() if name not in whole}
    count = sum(cells[0] in ("yes", "dense") for cells in trained.values())
    head = HEAD.format(version="5.23", packed=count, count=len(trained), share=count / len(trained))
    lines = [
        head,
        "## All four\n",
        wrapped(whole),
        "## Not all\n",
        "| class | packed | decoded | planned | 4 bit |",
        "|---|---|---|---|---|",
        *(
            f"| {' | '.join([name, *(cell.replace('|', '/').strip() for cell in cells)])} |"
            for name, cells in others.items()
        ),
        "\n## Not looked at\n",
        "Stock TRL does not train these in this form (an input besides text, no hidden states for its fused head), a library is missing",
        "here, or they could not be made small:\n",
        wrapped([name for name, cells in rows.items() if isinstance(cells, str)]),
    ]
    return "\n".join(lines)


def wrapped(names: list[str]) -> str:
    return textwrap.fill(", ".join(names), 130, break_long_words=False) + "\n"


def cells_on_the_page() -> dict[str, list[str] | str]:
    """What docs/models.md says of each class."""
    parts = PAGE.read_text().split("## ")
    names = [part.split("\n", 1)[1].rsplit(":", 1)[-1].replace("\n", " ").split(",") for part in (parts[1], parts[3])]
    whole, missing = ([name.strip() for name in part] for part in names)
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in parts[2].splitlines() if line.startswith("| ")
    ]
    return (
        {name: ["yes"] * 4 for name in whole}
        | {name: cells for name, *cells in table[1:]}
        | dict.fromkeys(missing, "")
    )


def main(model_types: list[str]) -> None:
    quiet()
    rows = {}
    for name, of in sorted(classes().items()):
        if not model_types or of.model_type in model_types:
            rows[name] = row(name)
            print(name, of.model_type, rows[name], sep=" | ", flush=True)
    if not model_types:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
