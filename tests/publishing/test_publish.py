"""`publish` with the real `huggingface_hub` client against a small Hub over HTTP; nothing of the client is replaced."""

import json
import shutil

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.utils import _http
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.publishing.hub_server import TOKEN, hub
from tests.tiny import lora, save_tiny_model
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.publishing import publish
from trl_fsdp_qlora.publishing.logits import LOGITS, prove, record_logits
from trl_fsdp_qlora.publishing.publish import PublishError, publish_adapter, run_publish

BASE, REPO = "owner/tiny-base", "me/sums"
CARD = """---
base_model: base
datasets:
- someone/sums
license: mit
tags:
- lora
- base_model:adapter:base
---

# sums

An adapter for `base`.

```python
base = 'base'  # fill in: the folder of the base model
adapter = 'adapter'  # fill in: the folder that this card is in
```

```bash
trl-fsdp-qlora grpo --model_name_or_path base --output_dir base-adapter
```

```yaml
model_name_or_path: base
```
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder as a trainer leaves it: adapter, card and logits, and much that is nobody else's business."""
    root = tmp_path_factory.mktemp("publish")
    torch.manual_seed(0)
    save_tiny_model(root / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(root / "base"), lora())
    folder = root / "adapter"
    model.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    record_logits(model.train(), folder)
    assert model.training
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "optimizer.pt").write_bytes(b"0" * 100)
    (folder / "training_args.bin").write_bytes(b"pickle")
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "adapter")


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def server(trained, monkeypatch):
    # Settings of the client: no Xet, no waiting before it tries again.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    with hub() as state:
        state.commit(BASE, files_of(trained.parent / "base"))
        yield state


def api(server, token=TOKEN) -> HfApi:
    return HfApi(server.url, token=token)


def as_a_reader(server, monkeypatch, tmp_path):
    """A process that is started finds this Hub, and nothing that was downloaded before."""
    settings = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    for name, value in {**settings, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.processes
def test_what_is_published_loads_with_plain_peft_and_gives_the_recorded_logits(
    trained, server, monkeypatch, tmp_path, capsys
):
    as_a_reader(server, monkeypatch, tmp_path)
    monkeypatch.setattr(publish, "HfApi", lambda: api(server))
    assert run_publish([str(trained), "--repo", REPO, "--base", BASE]) == 0
    out = capsys.readouterr().out
    sent = server.files(REPO)
    assert set(sent) == {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", LOGITS}
    assert "left out: checkpoint-3, training_args.bin\n" in out
    assert "gives the logits recorded when it was saved: largest difference" in out
    assert f"adapter of {BASE}, licence mit, data someone/sums" in out
    assert str(trained.parent) not in b"".join(sent.values()).decode(errors="replace")
    card = ModelCard(sent["README.md"].decode())
    assert (card.data.base_model, card.data.tags) == (BASE, ["lora", f"base_model:adapter:{BASE}"])
    assert f"base = '{BASE}'\nadapter = '{REPO}'\n" in card.text
    assert f"grpo --model_name_or_path {BASE} --output_dir base-adapter\n" in card.text
    assert f"\nmodel_name_or_path: {BASE}\n" in card.text
    assert json.loads(sent["adapter_config.json"])["base_model_name_or_path"] == BASE
    # And the folder itself is as it was.
    assert (trained / "README.md").read_text() == CARD
    # A base of the same shape that it was not trained on.
    save_tiny_model(tmp_path / "other", seed=1)
    server.commit("owner/other", files_of(tmp_path / "other"))
    said = refused("nothing was sent to me/new: plain PEFT's logits differ", trained, server, "me/new", "owner/other")
    assert said.endswith("is owner/other what it was trained on?") and "me/new" not in server.repos


@pytest.mark.processes
def test_other_weights_are_not_what_was_trained(folder):
    name = folder / "adapter_model.safetensors"
    weights = load_file(name)
    first = next(iter(weights))
    weights[first] = weights[first] * 1.5
    save_file(weights, name)
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    with pytest.raises(UserError, match="differ from the recorded ones by up to"):
        prove(folder, base)


@pytest.mark.parametrize(
    ("stage", "how"),
    [("POST /api/repos/create", 403), ("PUT /lfs/", "middle"), ("/commit/", "answer"), ("/resolve/", 403)],
)
def test_whatever_fails_is_one_line_and_a_repeat_completes_it(folder, server, stage, how):
    (folder / LOGITS).unlink()  # which takes a process each time
    server.breaks = lambda line: how if stage in line else None
    with pytest.raises(PublishError, match="the same command again goes on") as caught:
        publish_adapter(folder, REPO, BASE, api=api(server))
    assert "\n" not in str(caught.value) and REPO in str(caught.value)
    wanted = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    here = set(server.files(REPO)) if REPO in server.repos else set()
    assert (
        here == wanted if stage == "/resolve/" else here in (set(), {".gitattributes"}, wanted)
    )  # never a part of it
    server.breaks = lambda line: None
    publish_adapter(folder, REPO, BASE, api=api(server))
    assert set(server.files(REPO)) == wanted


def refused(message: str, folder, server, repo=REPO, base=BASE, token=TOKEN) -> str:
    before = {name: server.files(name) for name in server.repos}
    with pytest.raises(PublishError, match=message) as caught:
        publish_adapter(folder, repo, base, api=api(server, token))
    assert {name: server.files(name) for name in server.repos} == before  # nothing half-published
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


NAN = {"x": torch.tensor([float("nan")])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json: name the folder"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"broken"), "cannot be read"),
        (lambda f: edit(f / "README.md", "base_model: base\n", "base_model: o/wrong\n"), "says base_model: o/wrong"),
        (lambda f: save_file(NAN, f / "adapter_model.safetensors"), "holds values that are not finite, in x"),
    ],
)
def test_a_folder_that_is_not_fit_is_refused_before_the_hub_is_asked(folder, server, change, message):
    change(folder)
    refused(message, folder, server)
    assert server.requests == []


def test_a_base_that_only_this_machine_has_needs_a_name(folder, server, capsys):
    refused(
        "names the folder 'base' as the base, which no reader has; .* --base owner/name", folder, server, base=None
    )
    refused("--repo me/too/many: .*name it owner/name", folder, server, repo="me/too/many")
    assert run_publish([str(folder), "--repo", REPO]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run_publish([str(folder), "--repo", REPO, "--base", BASE, "--check"]) == 0
    assert server.requests == []


def test_without_recorded_logits_it_says_what_was_compared(folder, server):
    (folder / LOGITS).unlink()
    assert "no logits were recorded" in publish_adapter(folder, REPO, BASE, api=api(server))[1]
