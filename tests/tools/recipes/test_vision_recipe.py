"""A recipe with pictures trains a tiny LLaVA: the processors of Qwen need torchvision, which is not installed here."""

import json
import re

import pytest
import transformers as tf
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from safetensors.torch import load_file
from trl import GRPOConfig, ModelConfig

from tests.tiny import save_tiny_model, save_tiny_vision_model
from tests.tools.report.test_page import data_of
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.data.answers import DatasetError
from trl_fsdp_qlora.tools.data.datasets import hold_out, read_problems, to_prompts
from trl_fsdp_qlora.tools.publishing.merge import merge_adapter
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.checks import Recipe, user_code
from trl_fsdp_qlora.tools.recipe.rendering import longest_prompt

from .conftest import RECIPES

FEATURES = Features({"problem": Value("string"), "answer": Value("int64"), "image": Image()})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: a tiny LLaVA in `base`, and data with 40 pictures and two questions."""
    save_tiny_vision_model(tmp_path / "base")
    pictures = [PILImage.new("RGB", (16, 16), (6 * i, 80, 120)) for i in range(40)]
    rows = [{"problem": f"{i % 2}+12=", "answer": i, "image": picture} for i, picture in enumerate(pictures)]
    Dataset.from_list(rows, FEATURES).to_parquet(tmp_path / "pictures.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


RECIPE = f"""--config {RECIPES}/small-base/grpo/config_quickstart.yaml --model_name_or_path base
    --dataset pictures.parquet --held_out 10"""
QUICK = f"""{RECIPE} --output_dir out --use_cpu true --bf16 false --dtype float32 --max_steps 1
    --max_completion_length 3 --gradient_accumulation_steps 1 --eval_problems 4 --accuracy_steps 0 --accuracy_samples 2
    --save_strategy no --report_to none --disable_tqdm true"""


def test_it_trains_a_tiny_model_that_sees(folder, called):
    called("grpo", QUICK)
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
    assert any("vision" in name for name in weights)  # "all-linear" is that of stock PEFT if rows hold pictures


def test_compare_and_the_plan_count_its_pictures(folder):
    """Both trainers get the same pictures. An image is four tokens, and this chat template adds none."""
    assert main(["compare", *RECIPE.split(), "--per_device_train_batch_size", "8", "--steps", "1"]) == 0
    dataset = to_prompts(read_problems("pictures.parquet")[:3])
    tokenizer = tf.AutoProcessor.from_pretrained("base").tokenizer
    lengths = [len(tokenizer(messages[0]["content"])["input_ids"]) for messages in dataset["prompt"]]
    arguments = ScriptArguments("pictures.parquet"), GRPOConfig("out", use_cpu=True, bf16=False), ModelConfig("base")
    recipe = Recipe(*arguments, user_code(arguments[0]), tokenizer)
    assert longest_prompt(recipe, dataset) == max(lengths) + 4


def test_pictures_are_part_of_a_question(folder):
    problems = read_problems("pictures.parquet")
    training, held_out = hold_out([*problems, *problems], 10)
    assert len(held_out) == 20 and len(training) == 60
    assert len({problem["question"] for problem in problems}) == 2
    training_keys, held_out_keys = (
        {(problem["question"], problem["images"][0]["bytes"]) for problem in part} for part in (training, held_out)
    )
    assert not training_keys & held_out_keys


def test_a_broken_or_missing_picture_is_named_by_its_row(tmp_path):
    PILImage.new("RGB", (8, 8), "red").save(tmp_path / "good.png")
    good = (tmp_path / "good.png").read_bytes()
    rows = [{"problem": "1?", "answer": 1, "image": "good.png"}, {"problem": "2?", "answer": 2, "image": "none.png"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, second in (("whole", good), ("broken", good[:40])):
        rows[0]["image"] = {"bytes": good, "path": None}
        rows[1]["image"] = {"bytes": second, "path": None}
        Dataset.from_list(rows, FEATURES).to_parquet(tmp_path / f"{name}.parquet")
    problems = read_problems(str(tmp_path / "whole.parquet"))
    assert [len(problem["images"]) for problem in problems] == [1, 1]
    for name in ("data.jsonl", "broken.parquet"):
        with pytest.raises(DatasetError, match=r"row 2: .*image"):
            read_problems(str(tmp_path / name))


def test_a_model_that_takes_no_images(folder, called, capsys):
    save_tiny_model(folder / "text")
    with pytest.raises(SystemExit) as ended:
        called("grpo", f"{QUICK} --model_name_or_path text")
    assert ended.value.code == 2
    assert "model_name_or_path='text' takes no images" in capsys.readouterr().err
