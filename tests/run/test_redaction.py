import shlex

from trl_fsdp_qlora.run.redaction import command_line, is_secret_name, portable, without_secrets

SECRET = "hub_token token --hub_token --hub-token HF_TOKEN password db_password api_key WANDB_API_KEY client_secret private_key"
PLAIN = "token_selection max_new_tokens eos_token pad_token tokenizer key sort_key hub_model_id secretary author"


def test_a_config_is_written_without_tokens_and_logins():
    assert [name for name in SECRET.split() if not is_secret_name(name)] == []
    assert [name for name in PLAIN.split() if is_secret_name(name)] == []
    fields = {"hub_token": "x", "eos_token": "</s>", "url": "http://bob:pw@judge:8000/v1", "steps": 3}
    assert without_secrets(fields) == fields | {"hub_token": None, "url": "http://judge:8000/v1"}


def test_a_command_and_its_paths_are_as_seen_from_here_without_secrets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert portable(["/home/bob/a", {"b": "~/base"}, 3]) == ["a", {"b": "base"}, 3]
    assert portable("owner/name") == "owner/name" and portable("https://bob:pw@host/x") == "https://host/x"
    words = ["accelerate", "launch", "--api-key=key", "--hub_token", "tok", "a script.py", "--hub_token", "tok"]
    words += ["--output_dir", str(tmp_path / "runs" / "o"), "--dataset=/home/bob/d.json", "--flag", "it's"]
    kept = ["accelerate", "launch", "a script.py", "--output_dir", "runs/o", "--dataset=d.json", "--flag", "it's"]
    assert shlex.split(command_line(words)) == kept
