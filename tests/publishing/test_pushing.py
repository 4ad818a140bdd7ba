"""The trainer's own `push_to_hub`, with the real client against a small Hub over HTTP."""

import json

import pytest
import transformers.trainer
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.utils import _http
from safetensors.torch import load_file

from tests.publishing.hub_server import TOKEN, hub
from tests.tiny import lora, save_tiny_model, tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.publishing import publish
from trl_fsdp_qlora.publishing.logits import LOGITS
from trl_fsdp_qlora.publishing.publish import PublishError

REPO, BASE = "me/sums", "owner/tiny-base"
SENT = {"README.md", "adapter_config.json", "adapter_model.safetensors", LOGITS}


@pytest.fixture
def server(monkeypatch):
    # Settings of the client: no Xet, no waiting before it tries again; transformers makes the repository with one of its own.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    monkeypatch.setenv(
        "HF_HUB_OFFLINE", "1"
    )  # PEFT asks the real Hub for the base otherwise; the client has read it long ago
    with hub() as state:
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: HfApi(state.url, token=TOKEN))
        monkeypatch.setattr(publish, "HfApi", lambda token: HfApi(state.url, token=token))
        yield state


def trained(out, model=None, peft_config=None, **changes):
    if model is None:
        model = tiny_model()
        model.name_or_path = model.config._name_or_path = BASE
    settings = {"push_to_hub": True, "hub_model_id": REPO, "hub_token": TOKEN, "max_steps": 1, **changes}
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, out, model, peft_config, **settings)
    made.card_info.license = "mit"  # or it is looked up
    made.train()
    return made


def test_an_adapter_goes_in_one_commit_and_comes_back(server, tmp_path):
    made = trained(tmp_path / "out", peft_config=lora())
    server.requests.clear()
    made.save_model()  # pushes, as the config says
    assert set(server.files(REPO)) == {".gitattributes", *SENT}
    assert (tmp_path / "out" / "training_args.bin").is_file()  # and it was not sent, nor the tokenizer
    assert len([line for line in server.requests if "/commit/" in line]) == 1
    downloads = {line.rpartition("/")[2] for line in server.requests if line.startswith("GET") and "/resolve/" in line}
    assert downloads >= SENT
    assert (
        server.files(REPO)["adapter_model.safetensors"]
        == (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    )
    card = ModelCard(server.files(REPO)["README.md"].decode())
    assert card.data.base_model == BASE and f"adapter = '{REPO}'" in card.text
    commit = made.push_to_hub("Its data named", dataset_name="someone/sums")
    assert commit.oid == server.heads[REPO] and commit.commit_message == "Its data named"
    assert "someone/sums" in server.files(REPO)["README.md"].decode()
    kept = json.loads(server.files(REPO)[LOGITS])
    assert kept["logits"] != kept["logits_of_the_base"]


def test_what_readers_cannot_use_is_refused_and_the_adapter_stays(server, tmp_path):
    made = trained(tmp_path / "out", save_tiny_model(tmp_path / "base"), lora())
    with pytest.raises(
        PublishError, match=r"names the folder 'base' as the base.* is saved: trl-fsdp-qlora publish \S+out "
    ):
        made.push_to_hub()
    assert set(server.files(REPO)) == {".gitattributes"}
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")


def test_a_config_that_says_nothing_of_a_hub_is_pushed_under_the_name_of_its_folder(server, tmp_path):
    made = trained(tmp_path / "out", peft_config=lora(), push_to_hub=False, hub_model_id=None)
    assert server.repos == {}
    assert made.push_to_hub(private=True).oid == server.heads["me/out"]
    assert set(server.files("me/out")) == {".gitattributes", *SENT}


def test_a_hub_in_trouble_is_one_line_with_the_command_for_later(server, tmp_path):
    made = trained(tmp_path / "out", peft_config=lora())
    server.breaks = lambda number, line: 500 if "/commit/" in line else None
    with pytest.raises(PublishError, match=rf"500 .* is saved: trl-fsdp-qlora publish \S+ --repo {REPO}"):
        made.push_to_hub()
    assert set(server.files(REPO)) == {".gitattributes"}


def test_a_whole_model_goes_the_way_of_trl(server, tmp_path):
    made = trained(tmp_path / "out")
    made.push_to_hub()
    assert {"model.safetensors", "tokenizer.json", "training_args.bin"} <= set(server.files(REPO))
