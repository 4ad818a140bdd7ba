import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_fsdp_qlora.run import redaction
from trl_fsdp_qlora.run.redaction import REDACTED, clean, command_line, is_secret_name, portable_text, redact


@pytest.mark.parametrize(
    "name",
    [
        "hub_token",
        "token",
        "--hub_token",
        "--hub-token",
        "HF_TOKEN",
        "password",
        "db_password",
        "api_key",
        "WANDB_API_KEY",
        "apiKey",
        "apikey",
        "client_secret",
        "aws_secret_access_key",
        "AWS_ACCESS_KEY_ID",
        "authorization",
        "Authorization",
        "x-api-key",
        "private_key",
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name) or name == "AWS_ACCESS_KEY_ID"  # that one is found by its look: AKIA…


@pytest.mark.parametrize(
    "name",
    [
        "token_selection",
        "token_selection_max_tokens",
        "max_new_tokens",
        "max_tokens",
        "eos_token",
        "pad_token",
        "eos_token_id",
        "num_tokens",
        "tokens",
        "tokenizer",
        "key",
        "sort_key",
        "keys",
        "label_names",
        "hub_model_id",
        "per_token",
        "secretary",
        "author",
        "token_selection_rate",
    ],
)
def test_names_that_only_sound_alike(name):
    assert not is_secret_name(name)


SECRETS = {
    "hf": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "openai": "sk-proj-abc123DEF456ghi789JKL012",
    "github": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_fine": "github_pat_11ABCDEFG0abcdefghijkl_mnop",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "google": "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "slack": "xoxb-123456789012-abcdefghij",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow-IBAAK\n-----END RSA PRIVATE KEY-----",
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
@pytest.mark.parametrize("around", ["{}", "see {}.", '{{"a": "{}"}}', "--x={}", "https://h/?a={}&b=1"])
def test_what_looks_like_a_secret_goes(secret, around):
    text = redact(around.format(secret))
    assert not any(part in text for part in secret.split("\n"))
    assert text == around.format(REDACTED)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("http://alice:s3cr3t@judge:8000/v1", f"http://{REDACTED}@judge:8000/v1"),
        ("s3://alice:p@ss@bucket/x", f"s3://{REDACTED}@bucket/x"),
        ("https://h/x?token=abcd1234&n=3", f"https://h/x?token={REDACTED}&n=3"),
        ("Authorization: Bearer abc.def123456", f"Authorization: Bearer {REDACTED}"),
        ("{'api_key': 'abcdefgh'}", f"{{'api_key': '{REDACTED}'}}"),
        ("password = hunter22", f"password = {REDACTED}"),
        ("--openai_key=0123456789abcdef0123", f"--openai_key={REDACTED}"),
    ],
)
def test_what_stands_where_secrets_stand_goes(text, left):
    assert redact(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "token_selection: s_grpo",
        "loss per token: 0.5",
        "eos_token: <|im_end|>",
        "max_new_tokens=256",
        "see https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct and a@b.org",
        "hf_transfer, sk-learn, task-specific-model-2025, hf_hub_download",
        "the key: a long sentence",
        "user@host:path, 3/4 of them, and/or",
    ],
)
def test_ordinary_text_stays(text):
    assert redact(text) == text
    assert portable_text(text) == text


def test_what_the_environment_holds_goes_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_API_KEY", "correct horse battery")
    assert redact("run of correct horse battery") == f"run of {REDACTED}"


def test_clean_goes_by_field_and_into_containers():
    value = {"hub_token": "short", "n": 3, "urls": ["http://u:p@h/"], "deep": ({"password": "x"},), "none_token": None}
    assert clean(value) == {
        "hub_token": REDACTED,
        "n": 3,
        "urls": [f"http://{REDACTED}@h/"],
        "deep": ({"password": REDACTED},),
        "none_token": None,
    }


def test_a_command_line_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    template = 'Solve: {question}\nIt\'s `$5` & "more"'
    words = ["accelerate", "launch", str(tmp_path / "recipes" / "grpo.py"), "--prompt_template", template]
    words += ["--hub_token", "short", "--lr=1e-3", "--api_key=abc", "--base_url", "http://u:p@h:1/v1"]
    words += ["--output_dir", "/home/alice/runs/sums", "--cache=/home/alice/.cache/x"]
    words += ["--model_init_kwargs", '{"cache_dir": "/home/alice/cache"}']
    line = command_line(words)
    assert '--hub_token "$HUB_TOKEN"' in line and '--api_key="$API_KEY"' in line
    assert not any(secret in line for secret in ("short", "abc", "u:p", "alice", str(tmp_path)))
    split = shlex.split(line)
    assert split[:5] == ["accelerate", "launch", "recipes/grpo.py", "--prompt_template", template]
    assert split[7] == "--lr=1e-3"
    assert split[-1] == '{"cache_dir": "cache"}'
    assert split[split.index("--output_dir") + 1] == "sums"


# Thirty thousand characters take milliseconds; what is not linear takes minutes. Two seconds leave room for a busy machine.
@settings(deadline=2000, max_examples=60)
@given(
    st.lists(st.sampled_from(["a", "-", "/", ":", "@", "=", " ", "://", "hf_", "eyJ", ".", "-----BEGIN ", "token"])),
    st.integers(1, 3000),
)
def test_redaction_takes_linear_time(parts, times):
    text = "".join(parts) * times
    redact(text[:30_000])
    portable_text(text[:30_000])


def test_command_line_of_ordinary_words_is_shlex_join():
    words = ["accelerate", "launch", "recipes/grpo.py", "--config", "a b.yaml", "--token_selection", "s_grpo"]
    assert redaction.command_line(words) == shlex.join(words)
