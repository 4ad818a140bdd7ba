"""Write the dense weights that a 4-bit base computes with, for a vLLM server to hold while an adapter is trained on
them.

    trl-fsdp-qlora dequantize --model_name_or_path Qwen/Qwen2.5-32B-Instruct --use_bnb_nested_quant true \
        --output models/qwen2.5-32b-nf4-dense

Give it the quantization of the recipe (`--bnb_4bit_quant_type`, `--use_bnb_nested_quant`, `--dtype`). It loads the
4-bit model in host memory and writes bfloat16 (`--dense_dtype`), two bytes a weight. Prints the folder.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    from dataclasses import dataclass, field

    import torch
    from transformers import AutoConfig, AutoTokenizer
    from trl import ModelConfig, get_quantization_config

    from trl_fsdp_qlora.compat.transformers import model_class
    from trl_fsdp_qlora.engines.vllm.dequantized_base import dequantized_base
    from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit
    from trl_fsdp_qlora.tools.recipe.arguments import parse_recipe
    from trl_fsdp_qlora.tools.recipe.script import run_main, say
    from trl_fsdp_qlora.utils.resources import cache_folder


@dataclass
class DequantizeArguments:
    """See [`trl_fsdp_qlora.engines.vllm.dequantized_base.dequantized_base`]."""

    output: str | None = field(
        default=None, metadata={"help": "folder to make; by default one in the cache, named after its content"}
    )
    dense_dtype: str = field(default="bfloat16", metadata={"choices": ["bfloat16", "float16", "float32"]})


def main() -> None:
    args, model = parse_recipe((DequantizeArguments, ModelConfig))
    model.load_in_4bit = True
    with experts_in_4bit():
        config = AutoConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
        base = model_class(config).from_pretrained(
            model.model_name_or_path,
            revision=model.model_revision,
            dtype=model.dtype,
            quantization_config=get_quantization_config(model),
            device_map={"": "cpu"},
        )
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    cache = cache_folder() / "dequantized"
    say(str(dequantized_base(base, tokenizer, cache, getattr(torch, args.dense_dtype), output=args.output)))


if __name__ == "__main__":
    run_main(main)
