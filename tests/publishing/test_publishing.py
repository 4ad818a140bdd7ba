"""One adapter on its way out: its card, merged into its base, and published with the real `huggingface_hub` client."""

import functools
import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.utils import _http
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig

from tests.fsdp2_qlora import tiny as qlora
from tests.publishing.hub_server import TOKEN, hub
from tests.tiny import character_tokenizer, lora, prompts, save_tiny_model, trainer
from trl_fsdp_qlora import AStarPOConfig, EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.checkpoints import checkpoints
from trl_fsdp_qlora.compat.replaced import replaced
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.publishing import card, publish
from trl_fsdp_qlora.publishing.logits import LOGITS, prove, record_logits
from trl_fsdp_qlora.publishing.merge import load_model, merge_adapter
from trl_fsdp_qlora.recipe.arguments import ScriptArguments

BASE, REPO = "owner/tiny-base", "me/sums"
SENT = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", LOGITS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer and where it worked: `base`, `other` of the same shape, and `out` with two checkpoints and a card."""
    root = tmp_path_factory.mktemp("published")
    base = save_tiny_model(root / "base")
    out = root / "out"
    save_tiny_model(root / "other", seed=1)
    torch.manual_seed(0)
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "seed": 7}
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, out, base, lora(), **saving)
    grpo.card_info = card.CardInfo(
        dataset="someone/sums",
        license="mit",
        quickstart_prompt=prompts(1)[0]["prompt"],
        results={"held-out accuracy": "50% (n=10)"},
        command=["trl-fsdp-qlora", "grpo", "--model_name_or_path", base, "--output_dir", "base-adapter"],
        settings=(ModelConfig(model_name_or_path=base),),
    )
    grpo.train()
    (out / "README.md").write_text("mine")
    grpo.save_model()
    grpo.save_model(str(root / "copy"))
    assert (out / "README.md").read_text() == "mine"
    grpo.create_model_card("sums-adapter")
    return grpo, root


def block_of(text: str, language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1]


def test_every_card_has_metadata_and_recipe_and_the_accuracy_of_these_weights_alone(trained):
    grpo, root = trained
    cards = sorted(root.rglob("README.md"))
    assert [path.parent.name for path in cards] == ["copy", "out", "checkpoint-1", "checkpoint-2"]
    for path in cards:  # none is PEFT's empty one
        text = path.read_text()
        assert "More Information Needed" not in text and "## Quick start" in text and str(root) not in text
    assert checkpoints.why_incomplete(root / "out" / "checkpoint-1") is None
    written = ModelCard.load(root / "out" / "README.md")
    data = {"library_name": "peft", "base_model": "base", "datasets": ["someone/sums"], "license": "mit"}
    assert data.items() <= vars(written.data).items() and written.data.eval_results is None
    assert {"trl", "grpo", "lora", "trl-fsdp-qlora", "base_model:adapter:base"} <= set(written.data.tags)
    recipe = yaml.safe_load(block_of(written.text, "yaml"))
    assert recipe["learning_rate"] == 1e-2 and recipe["model_name_or_path"] == "base"
    # What says nothing about the result, or follows from other fields, is left out.
    assert {"output_dir", "disable_tqdm", "generation_batch_size", "steps_per_generation"}.isdisjoint(recipe)
    for text in ("n=10", "seed: 7", f"torch {torch.__version__},", "not stated", "Anything: these", "steps: 2\n"):
        assert text in written.text
    info = replace(grpo.card_info, data_license="mit", picture="training.png", accuracy_step=2)
    info.accuracy = {"n": 300, "pass_at_1": 0.19, "interval": (0.1498, 0.2381)}
    with replaced(grpo, card_info=info):
        measured = card.card_of(grpo)
    (result,) = measured.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("accuracy", 19.0, "someone/sums")
    assert result.metric_name == "greedy pass@1 (n=300, 95% interval 15.0-23.8)"
    assert result.dataset_name == "sums, held-out problems" and "model-index" in measured.content
    for text in ("](training.png)", "`someone/sums`, licence mit", "on 300 held-out problems"):
        assert text in measured.text
    info = replace(info, accuracy_step=1, settings=())
    with replaced(grpo, card_info=info), replaced(grpo.args, token_selection="s_grpo"):
        other = card.card_of(grpo)
    assert other.data.eval_results is None and "trained with S-GRPO ([arXiv" in other.text
    assert yaml.safe_load(block_of(other.text, "yaml"))["lora"]["r"] == 4


@pytest.mark.processes
def test_the_quick_start_runs_as_printed_and_plain_peft_gives_the_trainers_logits(trained):
    """In a fresh process that knows nothing of this package, so that what is compared is plain PEFT's reading."""
    grpo, root = trained
    row_ids = torch.randint(5, 15, (2, 9))
    with torch.no_grad():
        torch.save({"ids": row_ids, "logits": grpo.model.eval()(input_ids=row_ids).logits}, root / "expected.pt")
    code = block_of((root / "out" / "README.md").read_text(), "python")
    assert code.count("  # fill in: the folder ") == 2
    code += """
import sys, torch
expected = torch.load('expected.pt')
with torch.no_grad():
    torch.testing.assert_close(model.eval()(input_ids=expected['ids']).logits, expected['logits'])
assert 'trl_fsdp_qlora' not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)
    assert run.returncode == 0, run.stderr
    tokenizer = character_tokenizer()
    text = tokenizer.apply_chat_template(prompts(1)[0]["prompt"], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    expected = grpo.model.generate(**ids, max_new_tokens=64, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert run.stdout.strip("\n") == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("dataset", "listed", "named"),
    [
        ("someone/sums", ["someone/sums"], "someone/sums"),
        ("data/sums.jsonl", None, "data/sums.jsonl"),
        ("/home/bob/data.json", None, "data.json"),
        ("https://bob:passw0rd@host/data", None, "https://host/data"),
    ],
)
def test_what_is_on_the_hub_is_listed_and_no_secret_enters_a_card(tmp_path, dataset, listed, named):
    """Of a whole model that goes by a name, as does its base."""
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", hub_token="a secret")
    grpo.model.config._name_or_path, grpo.args.push_to_hub, grpo.hub_model_id = "o/base", True, "me/adapter"
    command = ["accelerate", "launch", "a script.py", "--hub_token", "a secret"]
    grpo.card_info = card.CardInfo(dataset=dataset, command=command)
    whole = card.card_of(grpo)
    assert whole.data.datasets == listed and f"data: `{named}`, licence not stated" in whole.text
    assert "accelerate launch 'a script.py'\n" in whole.text
    assert "a secret" not in str(whole) and "passw0rd" not in str(whole) and "/home/bob" not in str(whole)
    assert "model = AutoModelForCausalLM.from_pretrained(adapter)\n" in whole.text and "PeftModel" not in whole.text
    assert "base = 'o/base'\nadapter = 'me/adapter'\n" in whole.text and "fill in" not in whole.text


DEFAULTS = {"use_cpu": True, "bf16": False}  # given, since TRL's own is bf16


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "learning_rate": 3e-5},
        {"generation_batch_size": 32},
        {"steps_per_generation": 4},
        {"token_selection": "prefix_cut", "token_selection_rate": 0.9},
    ],
)
def test_a_card_lists_what_was_given_and_nothing_that_follows_from_it(arguments, tmp_path):
    configs = [EfficientGRPOConfig(str(tmp_path), **DEFAULTS, **arguments)]
    configs += [] if "token_selection" in arguments else [AStarPOConfig(str(tmp_path), **DEFAULTS, **arguments)]
    for args in configs:
        assert card.changed_arguments(args) == DEFAULTS | arguments
        again = type(args)(str(tmp_path), **card.changed_arguments(args))
        assert again.to_dict() == args.to_dict()
    args.learning_rate = 0.5  # after its checks
    args.token_selection_rate = 0.25
    assert card.changed_arguments(args).items() >= {"learning_rate": 0.5, "token_selection_rate": 0.25}.items()
    settings = (ScriptArguments("addition"), ModelConfig("base"))
    listed = {name: value for each in settings for name, value in card.changed_arguments(each).items()}
    assert listed == {"dataset": "addition", "model_name_or_path": "base"}


def test_a_licence_is_the_bases_and_one_that_cannot_be_looked_up_is_said_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert card.base_model_license(str(tmp_path)) == "apache-2.0"
    monkeypatch.setattr(card.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(card, "HfApi", lambda: 1 / 0)
    monkeypatch.setattr("trl_fsdp_qlora.run.nonfatal._warned", set())  # what other tests in this process were told
    assert card.base_model_license("someone/model") is card.base_model_license("someone/model") is None
    assert caplog.text.count("looking up the licence of the base (say which it is: --license") == 1


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 15).repeat(2, 1)).logits.float()


def test_the_merged_model_has_pefts_logits_and_a_folder_that_is_there_stays(trained, tmp_path, monkeypatch, capsys):
    adapter = str(trained[1] / "out")
    base = str(trained[1] / "base")
    out = tmp_path / "merged"
    script = Path(__file__).parents[2] / "recipes" / "merge.py"
    monkeypatch.setattr(sys, "argv", ["merge.py", "--adapter", adapter, "--output", str(out), "--dtype", "float32"])
    runpy.run_path(str(script), run_name="__main__")
    assert str(out) in capsys.readouterr().out
    plain = logits_of(load_model(base))
    unmerged = logits_of(load_model(base, adapter))
    merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert merged.dtype == torch.float32 and not hasattr(merged, "peft_config")
    # A merged weight is rounded once more, to half a step of float32 (6e-8 of it), in each of some twenty products.
    assert (logits_of(merged) - unmerged).abs().max() <= 4e-6 and (plain - unmerged).abs().max() > 0.1
    rounded = AutoModelForCausalLM.from_pretrained(merge_adapter(adapter, tmp_path / "m"), dtype="auto").state_dict()
    for (
        name,
        exact,
    ) in merged.state_dict().items():  # the base, the adapter's share and the sum are rounded, each to 2^-8
        assert rounded[name].dtype == torch.bfloat16
        torch.testing.assert_close(rounded[name].float(), exact, rtol=2**-7, atol=2**-8 * exact.abs().max().item())
    assert AutoTokenizer.from_pretrained(out)("1+2=")["input_ids"]
    assert ModelCard.load(out / "README.md").data.base_model == "base"
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2 and f"error: {out} exists" in capsys.readouterr().err


def test_nothing_is_merged_into_a_quantized_base_and_an_interrupted_merge_leaves_no_folder(
    trained, tmp_path, monkeypatch
):
    config = AutoConfig.from_pretrained(trained[1] / "base")
    quantized = tmp_path / "quantized"
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(quantized)
    with pytest.raises(UserError, match="quantized"):
        merge_adapter(trained[1] / "out", tmp_path / "merged", base=str(quantized))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(trained[1] / "out", tmp_path / "merged")
    assert list(tmp_path.iterdir()) == [quantized]


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained[1] / "out", tmp_path / "adapter")


@pytest.fixture
def server(monkeypatch):
    # Settings of the client: no Xet, no waiting before it tries again.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    with hub() as state:
        monkeypatch.setattr(publish, "HfApi", functools.partial(HfApi, state.url, token=TOKEN))
        yield state


@pytest.fixture
def run(trained, folder, capsys):
    """Publish `folder`, proven on a base that lies beside; what is printed."""

    def run(*words, base=BASE, on="base", repo=REPO) -> str:
        named = ["--base", base] if base else []
        proof = ["--base-folder", str(trained[1] / on)]
        assert publish.run_publish([str(folder), "--repo", repo, *named, *proof, *words]) == 0
        return capsys.readouterr().out

    return run


def test_what_is_published_gives_the_recorded_logits_and_names_what_readers_have(trained, folder, server, run):
    before = (folder / "README.md").read_text()
    assert run("--check") and server.requests == []
    out = run()
    sent = server.files(REPO)
    assert set(sent) == SENT and re.search(r"left out: .*checkpoint-2, .*training_args.bin\n", out)
    assert "gives the logits recorded when it was saved: largest difference" in out
    assert f"adapter of {BASE}, licence mit, data someone/sums" in out
    assert str(trained[1]) not in b"".join(sent.values()).decode(errors="replace")
    published = ModelCard(sent["README.md"].decode())
    assert published.data.base_model == BASE and f"base_model:adapter:{BASE}" in published.data.tags
    for line in (
        f"base = '{BASE}'\nadapter = '{REPO}'",
        f"--model_name_or_path {BASE} --output_dir base-adapter",
        f"model_name_or_path: {BASE}",
        f"adapter for `{BASE}`",
    ):
        assert line in published.text
    assert json.loads(sent["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert sent["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    assert (folder / "README.md").read_text() == before  # and the folder itself is as it was


def test_the_proof_loads_a_4_bit_base_as_it_was_loaded(tmp_path):
    pytest.importorskip("bitsandbytes")
    base = qlora.load(qlora.make_checkpoint(tmp_path / "base"), dtype=torch.bfloat16, compute="bfloat16")
    model = get_peft_model(base, qlora.lora(init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    record_logits(model, tmp_path / "adapter")
    assert "(bfloat16), adapter against base" in prove(tmp_path / "adapter", str(tmp_path / "base"))


@pytest.mark.parametrize("on", ["base", "other"])
def test_other_weights_than_the_recorded_ones_are_not_sent(folder, server, run, on):
    """Of the adapter, or of a base of the same shape that it was not trained on."""
    if on == "base":
        weights = load_file(folder / "adapter_model.safetensors")
        first = next(iter(weights))
        save_file(weights | {first: weights[first] * 1.5}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="me/sums"):
        run(on=on)
    assert server.requests == []


@pytest.mark.parametrize(
    ("stage", "failure"),
    [("POST /api/repos/create", 403), ("PUT /lfs/", "before"), ("/commit/", "after"), ("/resolve/", 403)],
)
def test_whatever_fails_is_one_line_and_a_repeat_completes_it(folder, server, run, stage, failure):
    (folder / LOGITS).unlink()
    server.breaks = lambda line: failure if stage in line else None
    with pytest.raises(UserError, match=f"^{REPO}: "):
        run()
    here = set(server.files(REPO)) if REPO in server.repos else set()
    assert here in (set(), {".gitattributes"}, SENT - {LOGITS})  # never a part of it
    server.breaks = lambda line: None
    assert "no logits were recorded" in run() and set(server.files(REPO)) == SENT - {LOGITS}
    commit = server.commit
    server.commit = lambda repo, files: commit(repo, {name: data[:-1] for name, data in files.items()})
    with pytest.raises(UserError, match=REPO):
        run()


def rewrite_card(folder, old, new):
    (folder / "README.md").write_text((folder / "README.md").read_text().replace(old, new))


NAN = {"x": torch.tensor([float("nan")])}


@pytest.mark.parametrize(
    ("change", "damage", "message"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), {}, "No such file or directory"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"broken"), {}, "cannot be published"),
        (lambda f: rewrite_card(f, "base_model: base\n", "base_model: [\n"), {}, "cannot be published as .*Error"),
        (lambda f: rewrite_card(f, "base_model: base\n", "base_model: o/wrong\n"), {}, "says base_model: o/wrong"),
        (lambda f: save_file(NAN, f / "adapter_model.safetensors"), {}, "holds values that are not finite, in x"),
        (lambda f: None, {"base": None}, "names the folder 'base' as the base, which no reader has"),
        (lambda f: None, {"repo": "me/too/many"}, "cannot be published as me/too/many: HFValidationError"),
    ],
)
def test_a_folder_that_is_not_fit_is_refused_before_the_hub_is_asked(folder, server, run, change, damage, message):
    change(folder)
    with pytest.raises(UserError, match=message):
        run(**damage)
    assert server.requests == []
