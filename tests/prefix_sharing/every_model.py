"""Every causal and image-text class of transformers, small: which run packed, decoded, planned. Writes docs/models.md:

    python -m tests.prefix_sharing.every_model [MODEL_TYPE ...]

With names it prints their rows instead. `test_every_model.py` compares the page with what it finds again.
"""

import functools
import logging
import re
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.tools.planning.models import settings
from trl_fsdp_qlora.engines.decode.completions import CompletionOptions, complete
from trl_fsdp_qlora.engines.decode.decoding import why_stock
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_16_bit, load_quantized_base
from trl_fsdp_qlora.fsdp2_qlora.packed_linear import pack_model
from trl_fsdp_qlora.prefix_sharing.dropout import without_dropout
from trl_fsdp_qlora.tools.planning.plan import make_plan

from . import helpers

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Latent attention has as many keys as queries; some classes work their head size out.
VARIANTS = ({}, {"num_key_value_heads": 4}, {"head_dim": None}, {"num_key_value_heads": 4, "head_dim": None})
# Settings that a class needs although its default lacks them, or has them under names of its own.
OWN_SIZES = {
    name: fields
    for fields, names in (
        ({"head_dim": 8}, "hunyuan_v1_dense hunyuan_v1_moe ministral hunyuan_vl"),
        ({"rope_parameters": helpers.MROPE}, "glm46v glm4v_moe glm_ocr qwen2_vl"),
        ({"layer_types": helpers.LINEAR}, "bailing_hybrid qwen4_exp qwen3_5_moe minicpm_ocr minicpmv4_6 minicpmv4_7"),
        ({"layer_types": ["conv", "full_attention"]}, "lfm2_moe lfm3_vl"),
        ({"attention_types": [[["global", "local"], 1]]}, "gpt_neo"),
        ({"num_kv_shared_layers": 0}, "gemma3n_text"),
        (helpers.GEMMA4, "gemma4_text gemma4_unified gemma4_unified_text gemma4_unified_assistant"),
        ({"num_experts_per_tok": 2}, "deepseek_v2"),
        ({"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}, "dots1"),
        ({"num_experts_per_tok": 1}, "zaya"),
        ({"sliding_window": 6}, "step3p7"),
        ({"unpadded_vocab_size": helpers.VOCABULARY}, "inkling2 inkling2_text inkling2_loop inkling2_loop_text"),
    )
    for name in names.split()
}
LARGEST = 30_000_000


MAPPINGS = (
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
)
# By name: the first type of model that has the class, and what builds it.
CLASSES = {name: (kind, auto) for auto, names in MAPPINGS for kind, name in reversed(names.items())}


@functools.cache
def models_of_the_helpers() -> dict:
    """Small models that other tests build, by class: those whose sizes have names of their own."""
    makes = [
        *helpers.SUPPORTED.values(),
        *(make for make, _ in helpers.RECURRENT.values()),
        *helpers.FROM_NO_STATE.values(),
        *helpers.MULTIMODAL.values(),
    ]
    with torch.device("meta"):
        return {type(make()).__name__: make for make in reversed(makes)}


def small_model(name: str, variant: dict):
    """The class with its defaults but for its size."""
    if name in models_of_the_helpers():
        return helpers.build(models_of_the_helpers()[name]).train()
    kind, auto = CLASSES[name]
    config = CONFIG_MAPPING[kind]()
    if "Conditional" not in name and auto is AutoModelForCausalLM:
        config = config.get_text_config(decoder=True)
    sizes = {field: value for field, value in {**helpers.SMALL, **variant}.items() if value is not None}
    config = helpers.small_config(config, sizes, OWN_SIZES.get(kind))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in auto.from_config(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters: its size has other names")
    return helpers.build(lambda: auto.from_config(config).float()).train()


def computed(name: str):
    """A small model that stock TRL trains; or the reason why not."""
    reasons = set()
    ids, mask = helpers.awkward_batch()
    for variant in VARIANTS:
        try:
            model = helpers.with_stock_head(small_model(name, variant))
            with torch.no_grad():  # the first forward of some classes decides how the others go (big_bird)
                helpers.stock_log_probs(model, ids, mask)
            logps_N = helpers.stock_log_probs(model, ids, mask)[0][mask[:, -helpers.COMPLETION :].bool()]
            logps_N.sum().backward()
        except Exception as error:
            reasons.add(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        our_gradients = helpers.gradients(model)
        if all(x.isfinite().all() for x in (logps_N, *our_gradients)) and any(x.any() for x in our_gradients):
            return model
        reasons.add("no finite number, or no gradient")
    return "; ".join(reasons)


def packed(model) -> str:
    """Whether a packed pass equals stock's, which is asserted; or why it runs padded."""
    sharing = helpers.prepared(model)
    if not helpers.one_pass(model, sharing).figures.tokens:
        return "no: " + sharing.describe().removeprefix("prefix sharing: ")
    with without_dropout(model):  # some routers draw
        helpers.assert_equals_stock(model, sharing)
    return "yes"


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
        expected, _ = complete(model, prompts, config, CompletionOptions(compact=False))
    except Exception:
        return "no, nor does `generate`"
    actual, work = complete(model, prompts, config)
    assert work is not None and actual == expected
    return "yes"


def planned(folder) -> str:
    """`plan` counts it."""
    assert make_plan(settings(folder, use_peft=False, max_completion_length=8, prompt_tokens=8)).peak > 0
    return "yes"


def in_4_bit(folder) -> str:
    """Whether the bytes that FSDP2 shards compute what bitsandbytes does, which is asserted; or what stays in 16
    bit.
    """
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
    """The result of `run`, or the error that a user would get."""
    try:
        return run(*arguments)
    except AssertionError:
        raise
    except Exception as error:
        return f"no: {type(error).__name__}"


def row(name: str) -> list[str] | str:
    """The cells of a class on the page; or why stock TRL does not train it."""
    model = computed(name)
    if isinstance(model, str):
        return model
    cells = [packed(model).strip()]
    with tempfile.TemporaryDirectory() as folder:
        plain = type(model)._from_config(model.config, attn_implementation=None).float()
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
        cells += [attempted(decoded, plain), attempted(planned, folder), attempted(in_4_bit, folder)]
    return cells


def page(rows: dict[str, list[str] | str]) -> str:
    """The text of docs/models.md, from the row of each class."""
    trained = {name: cells for name, cells in rows.items() if not isinstance(cells, str)}
    whole = [name for name, cells in trained.items() if cells == ["yes"] * 4]
    count = sum(cells[0] == "yes" for cells in trained.values())
    # The text above the tables is kept, except for the figures.
    head = PAGE.read_text().partition("## All four")[0].rpartition("**")[0].rpartition("**")[0]
    share = (
        f"{count} of {len(trained)} classes that stock TRL trains in this form are packed** "
        f"({count / len(trained):.0%})."
    )
    alike: dict[tuple, list[str]] = {}
    for name, cells in trained.items():
        if name not in whole:
            alike.setdefault(tuple(cell.replace("|", "/").strip() for cell in cells), []).append(name)
    lines = [
        f"{head}**{share}\n\n## All four\n",
        listed(whole),
        "## Not all\n\n| class | packed | decoded | planned | 4 bit |\n|---|---|---|---|---|",
        *(f"| {' | '.join([', '.join(names), *cells])} |" for cells, names in alike.items()),
        "\n## Not looked at\n",
        "Stock TRL does not train these in this form (an input other than text, no hidden states for its fused head), "
        "a library is missing here, or they could not be",
        "made small.\n",
        listed([name for name, cells in rows.items() if isinstance(cells, str)]),
    ]
    return "\n".join(lines)


def listed(names: list[str]) -> str:
    """A paragraph for each ending, which its names are given without."""
    parts = {"ForCausalLM": [], "ForConditionalGeneration": [], "": []}
    for name in names:
        ending = next(each for each in parts if name.endswith(each))
        parts[ending].append(name.removesuffix(ending))
    texts = [f"`…{ending}`: {', '.join(stems)}" for ending, stems in parts.items() if stems]
    return "\n\n".join(textwrap.fill(text, 150, break_long_words=False) for text in texts) + "\n"


def cells_on_the_page() -> dict[str, list[str] | str]:
    """The cells of each class in docs/models.md."""
    parts = PAGE.read_text().split("## ")
    whole, missing = (
        [f"{stem.strip()}{ending}" for ending, stems in entries for stem in stems.split(",")]
        for entries in (re.findall(r"^`…(\w*)`: ([^`]+)", parts[i], re.M) for i in (1, 3))
    )
    table = [line.split("|")[1:-1] for line in parts[2].splitlines() if line.startswith("| ")][1:]
    return (
        {name: ["yes"] * 4 for name in whole}
        | {name.strip(): [cell.strip() for cell in cells] for names, *cells in table for name in names.split(",")}
        | dict.fromkeys(missing, "")
    )


def main(model_types: list[str]) -> None:
    # The libraries' advice on models of no weight.
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    rows = {}
    for name, (kind, _) in sorted(CLASSES.items()):
        if not model_types or kind in model_types:
            rows[name] = row(name)
            print(name, kind, rows[name], sep=" | ", flush=True)
    if not model_types:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
