"""An adapter's card, the merge of an adapter into its base, and publishing with the real `huggingface_hub` client.

Covers `tools/publishing/publish.py`, `trainers/reporting/card.py`, `trainers/reporting/card_info.py`.
"""

import ast
import functools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.utils import _http
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl import ModelConfig

from tests.fsdp2_qlora import tiny as qlora
from tests.tiny import character_tokenizer, lora, prompts, save_tiny_model, trainer
from tests.tools.publishing.hub_server import TOKEN, hub
from trl_fsdp_qlora import AStarPOConfig, EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.engines.decode.completions import generate
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.publishing import merge, publish
from trl_fsdp_qlora.tools.publishing.adapted_base import load_model
from trl_fsdp_qlora.tools.publishing.merge import merge_adapter
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.trainers.reporting import card
from trl_fsdp_qlora.trainers.reporting.card_info import CardInfo
from trl_fsdp_qlora.trainers.saving.checkpoints import why_not_whole

BASE = "owner/tiny-base"
REPO = "me/sums"
SENT = {
    ".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer and its folder, which holds the run's output `out`, its `base`, and a model `other` of that shape."""
    root = tmp_path_factory.mktemp("published")
    out = root / "out"
    base = save_tiny_model(root / "base")
    save_tiny_model(root / "other", seed=1)
    torch.manual_seed(0)
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "seed": 7}
    grpo_trainer = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, out, base, lora(), **saving)
    grpo_trainer.card_info = CardInfo(
        dataset="someone/sums",
        license="mit",
        quickstart_prompt=prompts(1)[0]["prompt"],
        results={"held-out accuracy": "50% (n=10)"},
        command=["trl-fsdp-qlora", "grpo", "--model_name_or_path", base, "--output_dir", "base-adapter"],
        settings=(ModelConfig(model_name_or_path=base),),
    )
    grpo_trainer.train()
    (out / "README.md").write_text("mine")  # a card that a user wrote stays
    grpo_trainer.save_model()
    grpo_trainer.save_model(str(root / "copy"))
    assert (out / "README.md").read_text() == "mine"
    grpo_trainer.create_model_card("sums-adapter")
    return grpo_trainer, root


def block_of(text: str, language: str) -> str:
    """The first code block of a Markdown text in `language`."""
    return re.search(rf"(```|~~~~){language}\n(.*?)\1", text, re.DOTALL)[2]


def test_every_card_has_metadata_and_recipe(trained):
    _, root = trained
    cards = sorted(root.rglob("README.md"))
    assert [path.parent.name for path in cards] == ["copy", "out", "checkpoint-1", "checkpoint-2"]
    for path in cards:
        text = path.read_text()
        assert "More Information Needed" not in text, "this is PEFT's empty card"
        assert "## Quick start" in text
        assert str(root) not in text
    assert why_not_whole(root / "out" / "checkpoint-1") is None
    written = ModelCard.load(root / "out" / "README.md")
    data = {"library_name": "peft", "base_model": "base", "datasets": ["someone/sums"], "license": "mit"}
    assert data.items() <= vars(written.data).items()
    assert written.data.eval_results is None
    assert {"trl", "grpo", "lora", "trl-fsdp-qlora", "base_model:adapter:base"} <= set(written.data.tags)
    recipe = yaml.safe_load(block_of(written.text, "yaml"))
    assert recipe["learning_rate"] == 1e-2
    assert recipe["model_name_or_path"] == "base"
    # The recipe leaves out what does not change the result and what follows from other fields.
    assert {"output_dir", "disable_tqdm", "generation_batch_size", "steps_per_generation"}.isdisjoint(recipe)
    for text in ("n=10", "seed: 7", f"torch {torch.__version__},", "not stated", "Anything: these", "steps: 2\n"):
        assert text in written.text


def test_a_card_has_the_accuracy_of_these_weights_alone(trained):
    grpo_trainer, _ = trained
    info = replace(grpo_trainer.card_info, data_license="mit", accuracy_step=2)
    info.accuracy = {"n": 300, "pass_at_1": 0.19, "interval": (0.1498, 0.2381)}
    with patch.multiple(grpo_trainer, card_info=info):
        measured = card.card_of(grpo_trainer)
    (result,) = measured.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("accuracy", 19.0, "someone/sums")
    assert result.metric_name == "greedy pass@1 (n=300, 95% interval 15.0-23.8)"
    assert result.dataset_name == "sums, held-out problems"
    assert "model-index" in measured.content
    for text in ("`someone/sums`, licence mit", "on 300 held-out problems"):
        assert text in measured.text
    info = replace(info, accuracy_step=1, settings=())  # the accuracy of other weights than those of step 2
    with patch.multiple(grpo_trainer, card_info=info), patch.multiple(grpo_trainer.args, token_selection="s_grpo"):
        unmeasured = card.card_of(grpo_trainer)
    assert unmeasured.data.eval_results is None
    assert "trained with S-GRPO ([arXiv" in unmeasured.text
    assert yaml.safe_load(block_of(unmeasured.text, "yaml"))["lora"]["r"] == 4


@pytest.mark.processes
def test_the_printed_quick_start_gives_the_trainers_logits(trained):
    """It runs in a fresh process that does not import this package, so that plain PEFT alone loads the adapter."""
    grpo_trainer, root = trained
    row_ids = torch.randint(5, 15, (2, 9))
    with torch.no_grad():
        torch.save(
            {"ids": row_ids, "logits": grpo_trainer.model.eval()(input_ids=row_ids).logits}, root / "expected.pt"
        )
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
    expected = grpo_trainer.model.generate(**ids, max_new_tokens=64, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert run.stdout.strip("\n") == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("dataset", "listed", "named"),
    [
        ("someone/sums", ["someone/sums"], "someone/sums"),
        ("data/sums.jsonl", None, "data/sums.jsonl"),
        ("/home/bob/data.json", None, "data.json"),
        ("https://bob:passw0rd@host/data", None, "https://***@host/data"),
    ],
)
def test_hub_datasets_are_listed_and_no_secret_enters_a_card(tmp_path, dataset, listed, named):
    """The card is that of a whole model, which has a name on the Hub, as its base has."""
    grpo_trainer = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", hub_token="a secret")
    grpo_trainer.model.config._name_or_path = "o/base"
    grpo_trainer.args.push_to_hub = True
    grpo_trainer.hub_model_id = "me/adapter"
    command = ["accelerate", "launch", "a script.py", "--hub_token", "a secret"]
    grpo_trainer.card_info = CardInfo(dataset=dataset, command=command)
    model_card = card.card_of(grpo_trainer)
    assert model_card.data.datasets == listed
    assert f"data: `{named}`, licence not stated" in model_card.text
    assert "accelerate launch 'a script.py'\n" in model_card.text
    for secret in ("a secret", "passw0rd", "/home/bob"):
        assert secret not in str(model_card)
    assert "model = AutoModelForCausalLM.from_pretrained(adapter)\n" in model_card.text
    assert "PeftModel" not in model_card.text
    assert "base = 'o/base'\nadapter = 'me/adapter'\n" in model_card.text
    assert "fill in" not in model_card.text


STRANGE = 'it\'s "the" <b>base<hr>'
PROMPT = "Answer in\n```\na box\n```\n<img src=x onerror=alert(1)>\n````\nIt's {question}"


def test_no_name_and_no_setting_leaves_its_place_on_the_card(tmp_path, monkeypatch):
    """Names have quotes and HTML, a system prompt has code fences. An independent parser reads the card."""
    parser = pytest.importorskip("markdown_it").MarkdownIt()
    monkeypatch.chdir(tmp_path)
    base = save_tiny_model(tmp_path / STRANGE)
    grpo_trainer = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, f"out of {STRANGE}", base, lora())
    script = ScriptArguments(f"{STRANGE}.jsonl", system_prompt=PROMPT)
    grpo_trainer.card_info = CardInfo(
        dataset=f"{STRANGE}.jsonl",
        data_license=STRANGE,
        recipe_file=f"{STRANGE}.yaml",
        settings=(script, ModelConfig(model_name_or_path=base)),
        command=["trl-fsdp-qlora", "grpo", "--model_name_or_path", STRANGE, "--system_prompt", PROMPT],
        quickstart_prompt=[{"role": "system", "content": PROMPT}, {"role": "user", "content": "1+1="}],
    )
    grpo_trainer.save_model()
    for renamed in (False, True):
        written = ModelCard.load(f"out of {STRANGE}/README.md")
        if renamed:
            publish._rename_on_card(written, STRANGE, BASE, REPO)
        names = (BASE, REPO) if renamed else (STRANGE, f"out of {STRANGE}")
        tokens = parser.parse(written.text)
        blocks = {token.info: token.content for token in tokens if token.type == "fence"}
        assert list(blocks) == ["python", "bash", "yaml"]
        assignments = {}
        for line in ast.parse(blocks["python"]).body:
            if isinstance(line, ast.Assign) and line.targets[0].id in ("base", "adapter", "messages"):
                assignments[line.targets[0].id] = ast.literal_eval(line.value)
        assert (assignments["base"], assignments["adapter"]) == names
        assert assignments["messages"] == grpo_trainer.card_info.quickstart_prompt
        assert shlex.split(blocks["bash"])[2:] == ["--model_name_or_path", names[0], "--system_prompt", PROMPT]
        recipe = yaml.safe_load(blocks["yaml"])
        assert (recipe["model_name_or_path"], recipe["system_prompt"]) == (names[0], PROMPT)
        parts = [part for token in tokens for part in token.children or []]
        assert not [part for part in [*tokens, *parts] if part.type.startswith("html")]
        in_line = {part.content for part in parts if part.type == "code_inline"}
        assert {names[0], f"{STRANGE}.jsonl", f"{STRANGE}.yaml"} <= in_line


CPU_ARGUMENTS = {"use_cpu": True, "bf16": False}  # TRL's default is bf16, which needs a GPU


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "learning_rate": 3e-5},
        {"steps_per_generation": 4},
        {"token_selection": "prefix_cut", "token_selection_rate": 0.9},
    ],
)
def test_a_card_lists_given_fields_and_no_derived_ones(arguments, tmp_path):
    configs = [EfficientGRPOConfig(str(tmp_path), **CPU_ARGUMENTS, **arguments)]
    if "token_selection" not in arguments:
        configs.append(AStarPOConfig(str(tmp_path), **CPU_ARGUMENTS, **arguments))
    for args in configs:
        changed = card.changed_arguments(args)
        assert changed == {**CPU_ARGUMENTS, **arguments}
        again = type(args)(str(tmp_path), **changed)
        assert again.to_dict() == args.to_dict()


def test_a_card_lists_fields_changed_after_the_configs_checks(tmp_path):
    args = EfficientGRPOConfig(str(tmp_path), **CPU_ARGUMENTS)
    args.learning_rate = 0.5
    args.token_selection_rate = 0.25
    assert card.changed_arguments(args) == {**CPU_ARGUMENTS, "learning_rate": 0.5, "token_selection_rate": 0.25}


def test_a_card_lists_the_fields_of_other_dataclasses_too():
    assert card.changed_arguments(ScriptArguments("addition")) == {"dataset": "addition"}
    assert card.changed_arguments(ModelConfig("base")) == {"model_name_or_path": "base"}


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 15).repeat(2, 1)).logits.float()


def test_a_merged_model_has_pefts_logits(trained, tmp_path, monkeypatch, capsys):
    _, root = trained
    adapter = str(root / "out")
    base = str(root / "base")
    out = tmp_path / "merged"
    script = Path(__file__).parents[3] / "recipes" / "merge.py"
    monkeypatch.setattr(sys, "argv", ["merge.py", "--adapter", adapter, "--output", str(out), "--dtype", "float32"])
    runpy.run_path(str(script), run_name="__main__")
    assert str(out) in capsys.readouterr().out
    base_logits = logits_of(load_model(base))
    unmerged_logits = logits_of(load_model(base, adapter))
    merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert merged.dtype == torch.float32
    assert not hasattr(merged, "peft_config")
    # A merged weight is rounded once more, to half a step of float32 (6e-8 of it), in each of some twenty products.
    assert (logits_of(merged) - unmerged_logits).abs().max() <= 4e-6
    assert (base_logits - unmerged_logits).abs().max() > 0.1
    in_half = merge_adapter(adapter, tmp_path / "m", dtype=torch.bfloat16)
    rounded = AutoModelForCausalLM.from_pretrained(in_half, dtype="auto").state_dict()
    # The base, the adapter's share and the sum are rounded, each to 2^-8.
    for name, exact in merged.state_dict().items():
        assert rounded[name].dtype == torch.bfloat16
        torch.testing.assert_close(rounded[name].float(), exact, rtol=2**-7, atol=2**-8 * exact.abs().max().item())
    assert AutoTokenizer.from_pretrained(out)("1+2=")["input_ids"]
    merged_card = ModelCard.load(out / "README.md")
    assert merged_card.data.base_model == "base"
    assert "The adapter `out` merged into `base` in float32" in merged_card.text
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert f"error: {out} exists" in capsys.readouterr().err


def test_nothing_is_merged_into_a_quantized_base(trained, tmp_path, monkeypatch):
    _, root = trained
    config = AutoConfig.from_pretrained(root / "base")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path / "quantized")
    load = Mock()
    monkeypatch.setattr(merge, "load_model", load)
    with pytest.raises(UserError, match=str(tmp_path / "quantized")):
        merge_adapter(root / "out", tmp_path / "merged", base=str(tmp_path / "quantized"))
    assert not load.called
    assert not (tmp_path / "merged").exists()


def test_an_interrupted_merge_leaves_no_folder(trained, tmp_path, monkeypatch):
    _, root = trained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(root / "out", tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of the adapter's folder, which a test may change."""
    _, root = trained
    return shutil.copytree(root / "out", tmp_path / "adapter")


@pytest.fixture
def server(monkeypatch):
    """A Hub that `publish` uses. The client does without Xet and does not wait before it tries again."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    with hub() as state:
        monkeypatch.setattr(publish, "HfApi", functools.partial(HfApi, state.url, token=TOKEN))
        yield state


@pytest.fixture
def run(trained, folder, capsys):
    """A function that publishes `folder` and returns what the command prints; `base` is its name for readers."""

    def run(*options, base=BASE, repo=REPO) -> str:
        arguments = [str(folder), "--repo", repo, *options]
        if base:
            arguments += ["--base", base]
        assert publish.run_publish(arguments) == 0
        return capsys.readouterr().out

    return run


def test_what_is_published_is_what_was_saved(trained, folder, server, run):
    _, root = trained
    card_before = (folder / "README.md").read_text()
    assert run("--check")
    assert server.requests == []
    printed = run()
    sent = server.files(REPO)
    assert set(sent) == SENT
    assert "checkpoint-2" in printed and "training_args.bin" in printed  # left out
    assert any("GET" in line and "adapter_model.safetensors" in line for line in server.requests)  # and compared
    assert f"an adapter of {BASE}: README.md, adapter_config.json" in printed
    assert str(root) not in b"".join(sent.values()).decode(errors="replace")
    published = ModelCard(sent["README.md"].decode())
    assert published.data.base_model == BASE
    assert f"base_model:adapter:{BASE}" in published.data.tags
    for line in (
        f"base = '{BASE}'\nadapter = '{REPO}'",
        f"--model_name_or_path {BASE} --output_dir base-adapter",
        f"model_name_or_path: {BASE}",
        f"adapter for `{BASE}`",
    ):
        assert line in published.text
    assert json.loads(sent["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert sent["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    assert (folder / "README.md").read_text() == card_before


def test_saving_and_measuring_leave_a_4_bit_runs_gradients(tmp_path):
    """On CPUs with AVX512-BF16 bitsandbytes repacks a layer that runs in evaluation mode, for good and without a
    backward.
    """
    pytest.importorskip("bitsandbytes")
    base = qlora.load(qlora.make_checkpoint(tmp_path / "base"))
    grpo_trainer = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", base, lora())
    model = grpo_trainer.model.train()
    ids = torch.randint(5, 15, (2, 9))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    before = gradients()
    grpo_trainer.save_model()
    torch.testing.assert_close(gradients(), before, rtol=0, atol=0)
    generate(model, [[5, 6, 7]], GenerationConfig(max_new_tokens=2, pad_token_id=0, eos_token_id=[1]))
    torch.testing.assert_close(gradients(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("request_part", "failure"),
    [("POST /api/repos/create", 403), ("PUT /lfs/", "before"), ("/commit/", "after"), ("/resolve/", 403)],
)
def test_any_failure_is_one_line_and_a_repeat_completes_it(folder, server, run, request_part, failure):
    server.breaks = lambda line: failure if request_part in line else None
    with pytest.raises(UserError, match=f"^{REPO}: "):
        run()
    published = set(server.files(REPO)) if REPO in server.repos else set()
    # A reader sees no repository, an empty one, or all files, never some of them.
    assert published in (set(), {".gitattributes"}, SENT)
    server.breaks = lambda line: None
    run()
    assert set(server.files(REPO)) == SENT


def test_a_hub_that_returns_other_files_is_an_error(folder, server, run):
    commit = server.commit
    server.commit = lambda repo, files: commit(repo, {name: data[:-1] for name, data in files.items()})
    with pytest.raises(UserError, match=f"^{REPO} .*adapter_model.safetensors"):
        run()


def rewrite_card(folder, old, new):
    path = folder / "README.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


NAN = {"x": torch.tensor([float("nan")])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "FileNotFoundError: .*adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"broken"), "adapter cannot be loaded: "),
        (lambda folder: rewrite_card(folder, "base_model: base\n", "base_model: [\n"), "ParserError"),
        (lambda folder: rewrite_card(folder, "base_model: base\n", "base_model: o/wrong\n"), "o/wrong"),
        (lambda folder: save_file(NAN, folder / "adapter_model.safetensors"), "not finite .*, in x$"),
    ],
)
def test_an_unfit_folder_is_refused_before_the_hub_is_asked(folder, server, run, change, message):
    change(folder)
    with pytest.raises(UserError, match=message):
        run()
    assert server.requests == []


@pytest.mark.parametrize(
    ("names", "message"),
    [({"base": None}, "'base' .*--base owner/name"), ({"repo": "me/too/many"}, "me/too/many: HFValidationError")],
)
def test_names_that_no_reader_can_use_are_refused(server, run, names, message):
    with pytest.raises(UserError, match=message):
        run(**names)
    assert server.requests == []
