"""Recipes with pictures train a tiny LLaVA: the processors of Qwen need torchvision, which is not installed here."""

import json
import re

import pytest
import transformers as tf
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from safetensors.torch import load_file
from trl import ModelConfig

from tests.core.prefix_sharing.helpers import build, llava_processor, sees
from tests.tiny import save_tiny_model
from tests.tools.report.test_page import data_of
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.data.answers import DatasetError
from trl_fsdp_qlora.tools.data.datasets import hold_out, read_problems, to_prompts
from trl_fsdp_qlora.tools.planning.first import longest_prompt
from trl_fsdp_qlora.tools.publishing.merge import merge_adapter
from trl_fsdp_qlora.tools.small_base.text import character_tokenizer

from .conftest import RECIPES


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a tiny LLaVA in `base`."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    make_config = sees(
        "Llava",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
    )
    build(make_config).save_pretrained(tmp_path / "base")
    llava_processor(tokenizer).save_pretrained(tmp_path / "base")
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
    assert step["prefix_sharing/policy/tokens_fraction"] < 0.7
    assert record["after"]["n"] == 4
    groups = data_of(folder / "out" / "report.html")["completions"]["groups"]
    assert all(images[0].startswith("data:image/jpeg;base64,") for *_, images in groups)
    called("evaluate", "--adapter out --output again.json --use_cpu true")
    assert json.loads((folder / "again.json").read_text())["correct"] == record["after"]["correct"]
    card = (folder / "out/README.md").read_text()
    assert "image-text-to-text" in card
    assert "processor: `LlavaProcessor`" in card
    PILImage.new("RGB", (20, 20), "red").save("picture.png")
    quick_start = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    variables = {}
    exec(quick_start, variables)
    assert variables["inputs"]["pixel_values"].shape == (1, 3, 16, 16)
    assert variables["output"].shape[1] > 4
    merged = merge_adapter(folder / "out", folder / "merged", base="base")
    assert isinstance(tf.AutoProcessor.from_pretrained(merged), tf.LlavaProcessor)
    weights = load_file(folder / "out" / "adapter_model.safetensors")
    assert weights
    assert not any("vision" in name for name in weights)


def test_compare_and_the_plan_count_its_pictures(folder, capsys):
    """Both trainers get the same pictures. An image is four tokens, and this chat template adds none."""
    words = "--config small-base/grpo_vision/shapes --model_name_or_path base --per_device_train_batch_size 8"
    assert main(["compare", *words.split(), "--steps", "1"]) == 0
    assert "equal (float32)" in capsys.readouterr().out
    dataset = to_prompts(read_problems("coloured_shapes", "train")[:3])
    tokenizer = tf.AutoProcessor.from_pretrained("base").tokenizer
    lengths = [len(tokenizer(messages[0]["content"])["input_ids"]) for messages in dataset["prompt"]]
    assert longest_prompt(tokenizer, dataset, ModelConfig(model_name_or_path="base")) == max(lengths) + 4


def test_pictures_are_part_of_a_question():
    problems = read_problems("coloured_shapes", "train")
    training, held_out = hold_out(problems, 100)
    assert len(held_out) >= 100
    assert len({problem["question"] for problem in problems}) < len(problems) / 10
    training_keys, held_out_keys = (
        {(problem["question"], problem["images"][0]["bytes"]) for problem in part} for part in (training, held_out)
    )
    assert not training_keys & held_out_keys


def test_a_broken_or_missing_picture_is_named_by_its_row(tmp_path):
    PILImage.new("RGB", (8, 8), "red").save(tmp_path / "good.png")
    good = (tmp_path / "good.png").read_bytes()
    rows = [{"problem": "1?", "answer": 1, "image": "good.png"}, {"problem": "2?", "answer": 2, "image": "none.png"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    features = Features({"problem": Value("string"), "answer": Value("int64"), "image": Image()})
    for name, second in (("whole", good), ("broken", good[:40])):
        rows[0]["image"] = {"bytes": good, "path": None}
        rows[1]["image"] = {"bytes": second, "path": None}
        Dataset.from_list(rows, features).to_parquet(tmp_path / f"{name}.parquet")
    problems = read_problems(str(tmp_path / "whole.parquet"))
    assert [len(problem["images"]) for problem in problems] == [1, 1]
    for name in ("data.jsonl", "broken.parquet"):
        with pytest.raises(DatasetError, match=r"row 1: .*image"):
            read_problems(str(tmp_path / name))


def test_a_model_that_takes_no_images(folder, called, capsys):
    save_tiny_model(folder / "text")
    path = RECIPES / "small-base/grpo_vision/config_shapes.yaml"
    with pytest.raises(SystemExit) as ended:
        called("grpo", f"--config {path} {QUICK} --model_name_or_path text")
    assert ended.value.code == 2
    assert "model_name_or_path='text' takes no images" in capsys.readouterr().err
