"""Images once per group against TRL's once per completion: forward and backward of the policy's pass, a small Qwen3-VL
on a CPU.

    python benchmarks/images_speedup.py --threads 2

For 256 and 1,024 image tokens in a prompt, with 64 tokens of completion and groups of 8, with the vision tower frozen
(LoRA on the language model, as vision runs mostly are) and trained. Both passes compute the same log-probabilities of
the same batch and send the same gradient back; runs alternate and medians are compared. TRL projects every position
through the LM head on a CPU, image tokens included, but on CUDA it projects completions only: the vocabulary is small
so that this weighs little. Saved bytes are those of the distinct storages that autograd keeps for backward, parameters
excluded.
"""

import argparse
import json
import statistics
import time

import torch
import transformers
from synthetic import RESULTS, SavedBytes, cpu_name
from trl.trainer.utils import add_fused_lm_head

from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.sharing import install_sharing

IMAGE, VOCABULARY, TEXT, COMPLETION, GROUP, PATCH = 3, 512, 16, 64, 8, 16
# Height and width of the image in patches, by its tokens: four patches are a token.
GRIDS = {256: (32, 32), 1024: (64, 64)}


def small_model(frozen: bool):
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "out_hidden_size": 256,
        "patch_size": PATCH,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1],
    }
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    model = transformers.Qwen3VLForConditionalGeneration(config)
    if frozen:
        for parameter in model.base_model.visual.parameters():
            parameter.requires_grad_(False)
    return model


def make_batch(tokens: int):
    draw = torch.Generator().manual_seed(0)
    height, width = GRIDS[tokens]
    pixels = torch.randn(height * width, 3 * 2 * PATCH * PATCH, generator=draw)
    prompt = torch.cat([torch.randint(8, VOCABULARY, (TEXT,), generator=draw), torch.full((tokens,), IMAGE)])
    prompt = torch.cat([prompt, torch.randint(8, VOCABULARY, (TEXT,), generator=draw)])
    completions = torch.randint(8, VOCABULARY, (GROUP, COMPLETION), generator=draw)
    ids = torch.cat([prompt.expand(GROUP, -1), completions], dim=1)
    vision = {
        "pixel_values": pixels.repeat(GROUP, 1),
        "image_grid_thw": torch.tensor([[1, height, width]] * GROUP),
        "num_images": [1] * GROUP,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    return ids, torch.ones_like(ids), vision


def measure(tokens: int, frozen: bool, runs: int) -> dict:
    ids, mask, vision = make_batch(tokens)
    models = {"stock": small_model(frozen), "ours": small_model(frozen)}
    for model in models.values():
        add_fused_lm_head(model, 1.0, outputs=("log_probs", "entropy"))
    sharing = install_sharing(models["ours"], compares=False)
    labels = ids.clone()
    labels[:, :-COMPLETION] = -100
    num_images = vision.pop("num_images")
    batch = Batch(ids, mask, labels, vision, num_images)
    passes = {
        "stock": lambda: models["stock"](**batch.arguments(), fused_lm_head=True).log_probs,
        "ours": lambda: models["ours"](**batch.arguments(), num_images=num_images, fused_lm_head=True).log_probs,
    }

    def step(name: str, saved=None) -> float:
        models[name].zero_grad(set_to_none=True)
        start = time.perf_counter()
        if saved is None:
            logps = passes[name]()
        else:
            with saved:
                logps = passes[name]()
        logps.sum().backward()
        return time.perf_counter() - start

    sharing.compare_with_stock(models["ours"], batch)
    for name in models:
        step(name)
    if not sharing.figures.tokens:
        raise RuntimeError(f"nothing was packed, so this is no measurement of it: {sharing.describe()}")
    seconds = {name: [] for name in models}
    for _ in range(runs):
        for name in models:
            seconds[name].append(step(name))
    saved_bytes = {name: SavedBytes(models[name]) for name in models}
    for name in models:
        step(name, saved_bytes[name])
    pairs = list(zip(models["stock"].parameters(), models["ours"].parameters(), strict=True))
    largest = max(a.grad.abs().max() for a, _ in pairs if a.grad is not None)
    off = max(((a.grad - b.grad).abs().max() / largest).item() for a, b in pairs if a.grad is not None)
    ratio = ids.numel() / sharing.figures.tokens
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "image_tokens": tokens,
        "tower": "frozen" if frozen else "trained",
        "token_ratio": round(ratio, 2),
        "times_faster": round(medians["stock"] / medians["ours"], 2),
        "times_fewer_saved_bytes": round(saved_bytes["stock"].total / saved_bytes["ours"].total, 2),
        "largest_gradient_difference": off,
        "seconds": {
            name: [round(min(v), 3), round(medians[name], 3), round(max(v), 3)] for name, v in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="*", default=sorted(GRIDS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for tokens in args.tokens:
        for frozen in (True, False):
            rows.append(measure(tokens, frozen, args.runs))
            print(json.dumps(rows[-1]), flush=True)
    content = {"setting": {"cpu": cpu_name(), "threads": args.threads, "torch": torch.__version__}, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "images_speedup.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
