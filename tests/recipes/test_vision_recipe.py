"""Recipes with pictures train a tiny LLaVA; torchvision, which Qwen's processors need, is not installed here."""

import json
import re

import pytest
import transformers as tf
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from safetensors.torch import load_file
from trl import ModelConfig

from tests.prefix_sharing.helpers import build, llava_processor, sees
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.data.answers import DatasetError
from trl_fsdp_qlora.data.datasets import hold_out, read_problems, to_prompts
from trl_fsdp_qlora.planning.plan_vs_actual import longest_prompt
from trl_fsdp_qlora.publishing.merge import merge_adapter
from trl_fsdp_qlora.small_base.text import character_tokenizer

from .conftest import RECIPES


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the user is, with `base`, a tiny LLaVA."""
    tokens = character_tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<image>"]})
    ids = {"pad_token_id": tokens.pad_token_id, "eos_token_id": tokens.eos_token_id, "bos_token_id": None}
    image = {"image_token_index": tokens.convert_tokens_to_ids("<image>"), "vision_feature_layer": -1}
    make = sees("Llava", **ids, **image, vocab_size=len(tokens), max_position_embeddings=512)
    build(make).save_pretrained(tmp_path / "base")
    llava_processor(tokens).save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    return tmp_path


QUICK = """--model_name_or_path base --output_dir out --use_cpu true --bf16 false --dtype float32 --max_steps 1
    --max_completion_length 3 --gradient_accumulation_steps 1 --eval_problems 4 --accuracy_steps 0 --accuracy_samples 2
    --save_strategy no --report_to none --disable_tqdm true"""


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/grpo_vision/*.yaml")), ids=lambda path: path.parents[1].name)
def test_it_trains_a_tiny_model_that_sees(path, folder, called):
    called("grpo", f"--config {path} {QUICK}")
    record = json.loads((folder / "out" / "metrics.json").read_text())
    (step,) = [row for row in record["history"] if "loss" in row]
    assert step["prefix_sharing/policy/tokens_fraction"] < 0.7 and record["after"]["n"] == 4
    called("evaluate", "--adapter out --output again.json --use_cpu true")
    assert json.loads((folder / "again.json").read_text())["correct"] == record["after"]["correct"]
    card = (folder / "out/README.md").read_text()
    assert "image-text-to-text" in card and "processor: `LlavaProcessor`" in card
    PILImage.new("RGB", (20, 20), "red").save("picture.png")
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], said := {})  # the quick start, as printed
    assert said["inputs"]["pixel_values"].shape == (1, 3, 16, 16) and said["output"].shape[1] > 4
    merged = merge_adapter(folder / "out", folder / "merged", base="base")
    assert isinstance(tf.AutoProcessor.from_pretrained(merged), tf.LlavaProcessor)
    weights = load_file(folder / "out" / "adapter_model.safetensors")
    assert weights and not any("vision" in name for name in weights)


def test_compare_and_the_plan_count_its_pictures(folder, capsys):
    """Both trainers get the same pictures; an image is four tokens, and this chat template adds nothing."""
    words = "--config small-base/grpo_vision/shapes --model_name_or_path base --per_device_train_batch_size 8"
    assert main(["compare", *words.split(), "--steps", "1"]) == 0
    assert "equal (float32)" in capsys.readouterr().out
    few = to_prompts(read_problems("coloured_shapes", "train")[:3])
    tokens = tf.AutoProcessor.from_pretrained("base").tokenizer
    longest = max(len(tokens(row[0]["content"])["input_ids"]) for row in few["prompt"])
    assert longest_prompt(tokens, few, ModelConfig(model_name_or_path="base")) == longest + 4


def test_pictures_are_part_of_a_question():
    problems = read_problems("coloured_shapes", "train")
    parts = hold_out(problems, 100)
    assert len(parts[1]) >= 100 and len({p["question"] for p in problems}) < len(problems) / 10
    train, held_out = ({(p["question"], p["images"][0]["bytes"]) for p in part} for part in parts)
    assert not train & held_out


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
        with pytest.raises(DatasetError, match=r"row 1: .*image"):
            read_problems(str(tmp_path / name))


def test_a_model_that_takes_no_images(folder, called, capsys):
    save_tiny_model(folder / "text")
    path = RECIPES / "Qwen3-VL-4B-Instruct/grpo_vision/config_shapes.yaml"
    with pytest.raises(SystemExit):
        called("grpo", f"--config {path} {QUICK} --model_name_or_path text")
    assert "takes no images" in capsys.readouterr().err
