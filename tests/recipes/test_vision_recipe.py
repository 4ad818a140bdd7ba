"""Recipes with pictures train a tiny LLaVA; torchvision, which Qwen's processors need, is not installed here."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import transformers as tf
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from safetensors.torch import load_file
from trl import ModelConfig

from tests.prefix_sharing.helpers import build, llava_processor, sees
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.planning.plan_vs_actual import longest_prompt
from trl_fsdp_qlora.publishing.merge import merge_adapter
from trl_fsdp_qlora.recipe.answers import DatasetError
from trl_fsdp_qlora.recipe.datasets import hold_out, read_problems, to_prompts
from trl_fsdp_qlora.recipe.small_base import character_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"


def save_tiny_llava(folder):
    tokens = character_tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<image>"]})
    ids = {"pad_token_id": tokens.pad_token_id, "eos_token_id": tokens.eos_token_id, "bos_token_id": None}
    image = {"image_token_index": tokens.convert_tokens_to_ids("<image>"), "vision_feature_layer": -1}
    make = sees("Llava", **ids, **image, vocab_size=len(tokens), max_position_embeddings=512)
    build(make).save_pretrained(folder)
    llava_processor(tokens).save_pretrained(folder)


def run(path, folder, monkeypatch, *more):
    changes = f"""--config {path} --model_name_or_path {folder}/base --output_dir {folder}/out --use_cpu true --bf16 false
        --dtype float32 --max_steps 1 --max_completion_length 3 --gradient_accumulation_steps 1 --eval_problems 4
        --accuracy_steps 0 --accuracy_samples 2 --save_strategy no --report_to none --disable_tqdm true"""
    monkeypatch.setattr(sys, "argv", ["grpo.py", *changes.split(), *more])
    monkeypatch.chdir(folder)
    runpy.run_path(str(RECIPES / "grpo.py"), run_name="__main__")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/grpo_vision/*.yaml")), ids=lambda path: path.parents[1].name)
def test_it_trains_a_tiny_model_that_sees(path, tmp_path, monkeypatch):
    save_tiny_llava(tmp_path / "base")
    run(path, tmp_path, monkeypatch)
    record = json.loads((tmp_path / "out" / "metrics.json").read_text())
    (step,) = [row for row in record["history"] if "loss" in row]
    assert step["prefix_sharing/policy/tokens_fraction"] < 0.7 and record["after"]["n"] == 4
    monkeypatch.setattr(
        sys, "argv", f"evaluate.py --adapter {tmp_path}/out --output {tmp_path}/again.json --use_cpu true".split()
    )
    runpy.run_path(str(RECIPES / "evaluate.py"), run_name="__main__")
    assert json.loads((tmp_path / "again.json").read_text())["correct"] == record["after"]["correct"]
    card = (tmp_path / "out/README.md").read_text()
    assert "image-text-to-text" in card and "processor: `LlavaProcessor`" in card
    PILImage.new("RGB", (20, 20), "red").save("picture.png")
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], said := {})  # the quick start, as printed
    assert said["inputs"]["pixel_values"].shape == (1, 3, 16, 16) and said["output"].shape[1] > 4
    merged = merge_adapter(tmp_path / "out", tmp_path / "merged", base=str(tmp_path / "base"))
    assert isinstance(tf.AutoProcessor.from_pretrained(merged), tf.LlavaProcessor)
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert weights and not any("vision" in name for name in weights)


def test_compare_trains_both_trainers_on_the_same_pictures_and_weights(tmp_path, monkeypatch, capsys):
    save_tiny_llava(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    words = (
        "--config small-base/grpo_vision/shapes --model_name_or_path base --per_device_train_batch_size 8 --steps 1"
    )
    assert main(["compare", *words.split()]) == 0
    assert "equal (float32)" in capsys.readouterr().out


def test_pictures_are_part_of_a_question():
    problems = read_problems("coloured_shapes", "train")
    parts = hold_out(problems, 100)
    assert len(parts[1]) >= 100 and len({p["question"] for p in problems}) < len(problems) / 10
    train, held_out = ({(p["question"], p["images"][0]["bytes"]) for p in part} for part in parts)
    assert not train & held_out


def test_the_plan_counts_an_image_s_tokens(tmp_path):
    save_tiny_llava(tmp_path)
    few = to_prompts(read_problems("coloured_shapes", "train")[:3])
    processor = tf.AutoProcessor.from_pretrained(tmp_path)
    words = max(len(processor.tokenizer(row[0]["content"])["input_ids"]) for row in few["prompt"])
    found = longest_prompt(processor.tokenizer, few, ModelConfig(model_name_or_path=str(tmp_path)))
    assert found == words + 4  # an image is four tokens, and this chat template adds nothing


def test_a_broken_or_missing_picture_is_named_by_its_row(tmp_path):
    PILImage.new("RGB", (8, 8), "red").save(tmp_path / "good.png")
    good = (tmp_path / "good.png").read_bytes()
    rows = [{"problem": "1?", "answer": 1, "image": "good.png"}, {"problem": "2?", "answer": 2, "image": "none.png"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    features = Features({"problem": Value("string"), "answer": Value("int64"), "image": Image()})
    for name, second in (("whole", good), ("broken", good[:40])):
        for row, data in zip(rows, (good, second), strict=True):
            row["image"] = {"bytes": data, "path": None}
        Dataset.from_list(rows, features).to_parquet(tmp_path / f"{name}.parquet")
    assert [len(p["images"]) for p in read_problems(str(tmp_path / "whole.parquet"))] == [1, 1]
    for name in ("data.jsonl", "broken.parquet"):
        with pytest.raises(DatasetError, match="row 1: its image cannot be read"):
            read_problems(str(tmp_path / name))


def test_a_model_that_takes_no_images(tmp_path, monkeypatch, capsys):
    save_tiny_model(tmp_path / "base")
    with pytest.raises(SystemExit):
        run(RECIPES / "Qwen3-VL-4B-Instruct/grpo_vision/config_shapes.yaml", tmp_path, monkeypatch)
    assert "takes no images" in capsys.readouterr().err
