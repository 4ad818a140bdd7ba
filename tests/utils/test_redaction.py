"""Secrets and machine paths are left out of what a run writes; everything else stays."""

import shlex

import pytest

from trl_fsdp_qlora.utils.redaction import command_line, is_secret_name, portable, without_secrets

SECRET = (
    "hub_token token --hub_token --hub-token HF_TOKEN password db_password api_key WANDB_API_KEY client_secret "
    "private_key"
)
PLAIN = (
    "token_selection max_new_tokens eos_token pad_token tokenizer key sort_key hub_model_id secretary author "
    "monkey tokens"
)


def test_a_config_is_written_without_tokens_and_logins():
    assert [name for name in SECRET.split() if not is_secret_name(name)] == []
    assert [name for name in PLAIN.split() if is_secret_name(name)] == []
    fields = {"hub_token": "x", "eos_token": "</s>", "url": "http://bob:pw@judge:8000/v1", "steps": 3}
    assert without_secrets(fields) == fields | {"hub_token": None, "url": "http://***@judge:8000/v1"}


def test_a_command_has_the_names_of_its_files_and_no_secrets(tmp_path):
    assert portable(["/home/bob/a", {"b": "~/base"}, 3]) == ["a", {"b": "base"}, 3]
    assert portable("owner/name") == "owner/name" and portable("https://bob:pw@host/x") == "https://***@host/x"
    words = ["accelerate", "launch", "--api-key=key", "--hub_token", "tok", "a script.py", "--hub_token", "tok"]
    words += ["--output_dir", str(tmp_path / "runs" / "o"), "--dataset=/home/bob/d.json", "--flag", "it's"]
    kept = ["accelerate", "launch", "a script.py", "--output_dir", "o", "--dataset=d.json", "--flag", "it's"]
    assert shlex.split(command_line(words)) == kept


# Made up, in the form that each service gives its tokens.
TOKENS = ["hf_" + "aB3" * 11, "sk-proj-" + "aB3" * 9, "ghp_" + "aB3" * 12, "wandb_v1_" + "aB3" * 9]
ORDINARY = [
    "hf_dataset",
    "task-completion-with-steps",
    "sk-learn",
    "a" * 40,
    "Bearer of news",
    "{question} [/INST]",
    "[x",
]


def test_a_secret_in_a_dictionary_or_a_list_is_left_out():
    nested = {"headers": [{"hf_token": "x", "accept": "json"}], "api_key": "x", "eos_token": "</s>"}
    kept = {"headers": [{"hf_token": None, "accept": "json"}], "api_key": None, "eos_token": "</s>"}
    written = without_secrets({"vllm_engine_kwargs": nested, "sizes": (1, {2})})
    assert written == {"vllm_engine_kwargs": kept, "sizes": (1, {2})}
    assert nested["api_key"] == "x"  # the run's own dictionary is not touched
    assert portable([nested]) == [kept]


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_known_by_its_form_in_any_place(token):
    for text in (token, f"https://host/x?k={token}&b=1", f"key: {token}.", f"/home/bob/{token}"):
        for written in (without_secrets({"x": [text]}), portable({"x": text}), command_line(["run", "--x", text])):
            assert token not in str(written)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts_are_no_tokens(text):
    assert without_secrets({"x": text}) == {"x": text} == portable({"x": text})
