"""A recipe from its file to its figures: what it names reaches everything that it does."""

from pathlib import Path

from tests.promises.commands import TINY, run
from tests.tiny import save_recipe_files
from trl_fsdp_qlora.tools.small_base import character_tokenizer

# Qwen3's template opens a block of thoughts unless it is told not to; this one refuses to, so that it shows.
THINKS = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}"
    "{{ raise_exception('rendered with thinking') }}{% endif %}"
)


def test_chat_template_options_reach_training_accuracy_and_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = THINKS
    tokenizer.save_pretrained("base")
    options = ["--chat_template_kwargs", '{"enable_thinking": false}']
    status, text = run("grpo", *TINY, *options)
    assert status == 0 and "rendered with thinking" not in text, text
    assert "before: greedy pass@1" in text
    assert "**{'enable_thinking': False}" in Path("run", "README.md").read_text()
    # The run's folder has the options, too.
    measure = ["evaluate", "--model_name_or_path", "run", "--use_cpu", "true"]
    assert run(*measure)[0] == 0
    status, text = run(*measure, "--chat_template_kwargs", '{"enable_thinking": true}')
    assert status and "rendered with thinking" in text
