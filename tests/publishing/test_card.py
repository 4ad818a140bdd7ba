import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from tests.distributed.launch import run_code
from tests.tiny import character_tokenizer, config, lora, prompts, save_tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.checkpoints import checkpoints
from trl_fsdp_qlora.publishing import card
from trl_fsdp_qlora.publishing.card import CardInfo, card_of, changed_arguments
from trl_fsdp_qlora.publishing.logits import LOGITS
from trl_fsdp_qlora.run.plain import plain


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model("base")
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, "adapter", model="base", peft_config=lora(), seed=7)
    made.card_info.dataset = "someone/sums"
    made.card_info.quickstart_prompt = prompts(1)[0]["prompt"]
    made.card_info.results = {"held-out accuracy": "50.0% (n=10, ...)"}
    made.train()
    made.save_model()
    made.create_model_card("sums-adapter")
    return made


def test_metadata_and_recipe(trained):
    written = ModelCard.load("adapter/README.md")
    data = {"library_name": "peft", "base_model": "base", "datasets": ["someone/sums"], "license": "other"}
    assert data.items() <= vars(written.data).items() and written.data.eval_results is None
    assert {"trl", "grpo", "lora", "trl-fsdp-qlora", "base_model:adapter:base"} <= set(written.data.tags)
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", written.text, re.DOTALL)[1])
    assert recipe["learning_rate"] == 1e-2 and recipe["lora"]["r"] == 4
    assert "n=10" in written.text and "seed: 7" in written.text and f"torch {torch.__version__}," in written.text
    assert "licence not stated" in written.text and "Anything: neither the data it was trained on" in written.text


def test_the_logits_recorded_with_the_adapter_are_its_own(trained):
    kept = json.loads(Path("adapter", LOGITS).read_text())
    model = trained.model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([kept["input_ids"]])).logits[0][:, kept["entries"]]
        with model.disable_adapter():
            of_base = model(input_ids=torch.tensor([kept["input_ids"]])).logits[0][:, kept["entries"]]
    torch.testing.assert_close(torch.tensor(kept["logits"]), logits)
    torch.testing.assert_close(torch.tensor(kept["logits_of_the_base"]), of_base)
    assert not torch.allclose(logits, of_base, atol=1e-3)


def test_the_hub_reads_the_accuracy_of_these_weights_with_its_interval(trained):
    info = trained.card_info
    info.accuracy = {"n": 300, "pass_at_1": 0.19, "interval": (0.1498, 0.2381)}
    info.accuracy_step, info.picture, info.data_license = trained.state.global_step, "training.png", "mit"
    trained.create_model_card("sums-adapter")
    written = ModelCard.load("adapter/README.md")
    (result,) = written.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("accuracy", 19.0, "someone/sums")
    assert result.metric_name == "greedy pass@1 (n=300, 95% interval 15.0-23.8)"
    assert result.dataset_name == "sums, held-out problems" and "model-index" in written.content
    for text in ("](training.png)", "`someone/sums`, licence mit", "on 300 held-out problems", "optimizer steps: 3\n"):
        assert text in written.text
    trained.state.global_step, trained.args.token_selection = 2, "s_grpo"
    other = card_of(trained)
    assert other.data.eval_results is None and "optimizer steps: 2 of 3\n" in other.text
    assert "These weights: what was measured is of the steps that the table names." in other.text
    assert "trained with S-GRPO ([arXiv" in other.text


def card_with(tmp_path, base="o/base", model_id="me/adapter", peft_config=None, **info) -> ModelCard:
    """Of an untrained trainer on a model that goes by the name `base`."""
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", peft_config=peft_config)
    made.accelerator.unwrap_model(made.model).config._name_or_path = base
    made.args.push_to_hub, made.hub_model_id = model_id is not None, model_id
    made.card_info = CardInfo(**info)
    return card_of(made)


@pytest.mark.parametrize(
    ("dataset", "listed"),
    [("someone/sums", ["someone/sums"]), ("data/sums.jsonl", None), ("/home/bob/data.json", None)],
)
def test_only_what_a_reader_finds_on_the_hub_is_listed_as_its_data(tmp_path, dataset, listed):
    card = card_with(tmp_path, dataset=dataset)
    assert card.data.datasets == listed
    assert f"data: `{Path(dataset).name if dataset.startswith('/') else dataset}`, licence not stated" in card.text


@pytest.mark.processes
def test_the_quick_start_runs_as_printed_and_plain_peft_gives_the_trainers_logits(trained):
    """In a fresh process that knows nothing of this package, so that what is compared is plain PEFT's reading."""
    row_ids = torch.randint(5, 15, (2, 9))
    with torch.no_grad():
        torch.save({"ids": row_ids, "logits": trained.model.eval()(input_ids=row_ids).logits}, "expected.pt")
    logits = (
        "import sys, torch\n"
        "expected = torch.load('expected.pt')\n"
        "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('base'), 'adapter').eval()\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(model(input_ids=expected['ids']).logits, expected['logits'])\n"
        "assert 'trl_fsdp_qlora' not in sys.modules\n"
    )
    command = [sys.executable, "-c", quick_start_of("adapter/README.md") + logits]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    ids = character_tokenizer().apply_chat_template(
        prompts(1)[0]["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = trained.model.generate(**ids, max_new_tokens=64, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert run.stdout.strip("\n") == character_tokenizer().decode(expected, skip_special_tokens=True)


def quick_start_of(path):
    return re.search(r"```python\n(.*?)```", ModelCard.load(path).text, re.DOTALL)[1]


@pytest.mark.processes
def test_a_quick_start_with_folders_says_what_to_fill_in_and_runs_anywhere_then(tmp_path, monkeypatch):
    base, out, elsewhere = tmp_path / "models" / "base", tmp_path / "runs" / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    made = trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, out, model=save_tiny_model(base), peft_config=lora(), max_steps=1
    )
    made.train()
    made.save_model()
    made.create_model_card()
    code = quick_start_of(out / "README.md")
    assert "base = 'base'  # fill in: the folder of the base model\n" in code
    assert "adapter = 'out'  # fill in: the folder that this card is in\n" in code
    filled = code.replace("'base'  #", f"{str(base)!r}  #").replace("'out'  #", f"{str(out)!r}  #")
    run = run_code(filled, cwd=Path("/"))
    assert run.returncode == 0, run.stderr


def test_a_quick_start_of_what_is_on_the_hub_has_nothing_to_fill_in(tmp_path):
    text = str(card_with(tmp_path, peft_config=lora()))
    assert "base = 'o/base'\nadapter = 'me/adapter'\n" in text and "fill in" not in text
    whole = str(card_with(tmp_path))
    assert "model = AutoModelForCausalLM.from_pretrained(adapter)\n" in whole and "PeftModel" not in whole


def test_pefts_empty_card_is_in_no_checkpoint_and_in_no_folder_that_is_saved(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    made = trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", model=base, peft_config=lora(), max_steps=2,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    made.train()
    made.save_model()
    made.save_model(str(tmp_path / "copy"))
    cards = sorted(tmp_path.rglob("README.md"))
    names = ["checkpoint-1", "checkpoint-2", "copy", "out"]
    assert sorted(path.parent.name for path in cards) == names
    for path in cards:
        text = path.read_text()
        assert "More Information Needed" not in text and "## Quick start" in text
        assert str(tmp_path) not in text
    for number in (1, 2):
        assert checkpoints.why_incomplete(tmp_path / "out" / f"checkpoint-{number}") is None


def test_a_card_that_a_user_wrote_is_kept_when_an_adapter_is_saved_over_it(tmp_path):
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", peft_config=lora())
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "README.md").write_text("mine")
    made.save_model()
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


def test_what_says_nothing_is_left_out(tmp_path):
    args = config(EfficientGRPOConfig, tmp_path, generation_kwargs={"top_k": 5})
    # What `config` sets and a reader can repeat: not the folder, the bar, nor fields that a config fills in by itself.
    names = "num_generations max_completion_length max_steps learning_rate lr_scheduler_type optim max_grad_norm bf16 use_cpu "
    names += "gradient_checkpointing dataloader_pin_memory save_strategy logging_steps generation_kwargs"
    set_here = {name: plain(getattr(args, name)) for name in names.split()}
    changed = changed_arguments(args)
    assert {name: changed.get(name) for name in set_here} == set_here
    left_out = {"output_dir", "disable_tqdm"}  # which differ from their defaults too
    assert all(getattr(args, name) != EfficientGRPOConfig.__dataclass_fields__[name].default for name in left_out)
    assert left_out.isdisjoint(changed)
    assert all(value not in ([], {}, "") for value in changed.values())
    assert str(tmp_path) not in str(changed)


def test_a_licence_that_cannot_be_looked_up_is_said_once(monkeypatch, caplog):
    def fail(self, *_, **__):
        raise TimeoutError

    monkeypatch.setattr(card.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(card.HfApi, "model_info", fail)
    monkeypatch.setattr("trl_fsdp_qlora.run.nonfatal._warned", set())  # what other tests in this process were told
    card.base_model_license.cache_clear()
    assert card.base_model_license("someone/model") is card.base_model_license("someone/model") is None
    assert caplog.text.count("looking up the licence of the base (say which it is: --license") == 1


def test_no_secret_enters_a_card(tmp_path):
    command = ["accelerate", "launch", "a script.py", "--hub_token", "a plain token"]
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", hub_token="a plain token")
    made.card_info = CardInfo(dataset="https://bob:passw0rd@host/data", command=command)
    text = str(card_of(made))
    assert "a plain token" not in text and "passw0rd" not in text
    assert "accelerate launch 'a script.py' --hub_token \"$HUB_TOKEN\"\n" in text
