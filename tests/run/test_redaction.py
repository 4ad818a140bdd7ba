import shlex
from pathlib import Path

from trl_fsdp_qlora.run.redaction import command_line, is_secret_name, portable, without_secrets

SECRET = "hub_token token --hub_token --hub-token HF_TOKEN password db_password api_key WANDB_API_KEY client_secret private_key"
PLAIN = "token_selection max_new_tokens eos_token pad_token tokenizer key sort_key hub_model_id secretary author"


def test_names_of_secrets():
    assert [name for name in SECRET.split() if not is_secret_name(name)] == []
    assert [name for name in PLAIN.split() if is_secret_name(name)] == []


def test_a_config_is_written_without_tokens_and_logins():
    fields = {"hub_token": "x", "eos_token": "</s>", "url": "http://bob:pw@judge:8000/v1", "steps": 3}
    assert without_secrets(fields) == fields | {"hub_token": None, "url": "http://judge:8000/v1"}


def test_paths_are_as_seen_from_here_or_their_last_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert portable(str(tmp_path / "runs" / "a")) == str(Path("runs") / "a")
    assert portable("/home/bob/data.json") == "data.json" and portable("~/base") == "base"
    assert portable(["/home/bob/a", {"b": "/home/bob/c"}, 3]) == ["a", {"b": "c"}, 3]
    assert portable("owner/name") == "owner/name" and portable("https://bob:pw@host/x") == "https://host/x"


def test_a_command_has_variables_for_secrets_and_runs_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["accelerate", "launch", "a script.py", "--hub_token", "tok", "--api-key=key"]
    words += ["--output_dir", str(tmp_path / "o")]
    words += ["--dataset=/home/bob/d.json", "--flag", "it's"]
    line = command_line(words)
    assert "tok " not in line and "=key" not in line and "/home" not in line
    assert shlex.split(line) == [
        "accelerate", "launch", "a script.py", "--hub_token", "$HUB_TOKEN", "--api-key=$API_KEY", "--output_dir", "o",
        "--dataset=d.json", "--flag", "it's",
    ]  # fmt: skip
