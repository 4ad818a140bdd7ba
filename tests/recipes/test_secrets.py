"""Secrets planted wherever a user can put one, and everything that a run leaves or prints searched for them."""

import re
import shlex
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import accelerate_launch
from tests.tiny import save_recipe_files

from .test_recipe_runs import SETTINGS

TOKEN = "hf_PLANTEDonTheCommandLine0123456789"
TOKEN_AGAIN = "plantedInTheYamlWithoutAnyPrefix"
URL = "plantedPassw0rd"
ENVIRONMENT = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_PLANTEDinTheEnvironment0123456789",
    "AWS_SECRET_ACCESS_KEY": "planted/In+The/Environment",
    "TRACKIO_TOKEN": "plantedForTrackio",
}
PLANTED = [TOKEN, TOKEN_AGAIN, URL, *ENVIRONMENT.values()]


def contents(folder: Path):
    """(name, bytes) of every file below `folder`, and of every member of what is a zip archive (`torch.save`)."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        yield str(path), path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield from ((f"{path}!{name}", archive.read(name)) for name in archive.namelist())


@pytest.mark.processes
@pytest.mark.slow
def test_nothing_that_a_run_leaves_or_prints_holds_a_secret(tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    save_recipe_files(tmp_path)
    (tmp_path / "again.yaml").write_text(f"hub_token: {TOKEN_AGAIN}\n")
    out = tmp_path / "home" / "alice" / "out"
    settings = re.sub(r"--(max_steps|save_steps|accuracy_steps) \S+", "", " ".join(SETTINGS))
    arguments = [*settings.split(), "--save_steps", "1", "--accuracy_steps", "0"]
    # A sentence as run name, so that the line has to be quoted.
    arguments += ["--model_name_or_path", str(tmp_path / "base"), "--output_dir", str(out)]
    arguments += ["--vllm_server_base_url", f"http://bob:{URL}@judge:8000/v1", "--per_device_train_batch_size", "8"]
    arguments += ["--run_name", "it's a run"]

    start = partial(accelerate_launch, "cpu", "recipes/grpo.py", *arguments, cwd=tmp_path)
    first = start("--max_steps", "2", "--hub_token", TOKEN, from_shell=True)  # whose line is on the card
    assert first.returncode == 0, first.stdout + first.stderr
    card = (out / "README.md").read_text()
    again = ["--config", "again.yaml", "--max_steps", "3", "--resume_from_checkpoint", "auto"]
    second = start(*again)
    assert second.returncode == 0, second.stdout + second.stderr

    files = dict(contents(out))
    for name in ("training_args.bin", "checkpoint-1/training_args.bin", "checkpoint-3/trainer_state.json"):
        assert str(out / name) in files
    left = [(name, secret) for name, content in files.items() for secret in PLANTED if secret.encode() in content]
    assert left == []
    printed = first.stdout + first.stderr + second.stdout + second.stderr
    assert [secret for secret in PLANTED if secret in printed] == []
    published = [card, (out / "README.md").read_text(), (out / "metrics.json").read_text()]
    assert not any(str(tmp_path.parent) in text for text in published)
    # What is withheld is only the secrets: the checkpoint still has the run's other settings.
    saved = torch.load(out / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert saved.hub_token is None and saved.max_steps == 3 and saved.learning_rate == 1e-2

    line = re.search(r"```bash\n(accelerate .*?)\n```", card, re.DOTALL)[1]
    assert '--hub_token "$HUB_TOKEN"' in line
    words = shlex.split(line)
    assert words[words.index("--run_name") + 1] == "it's a run"
    assert words[words.index("--output_dir") + 1] == "home/alice/out"  # as seen from the working directory
    assert words[words.index("--learning_rate") + 1] == "1e-2"
