"""`publish` with the real `huggingface_hub` client against a small Hub over HTTP; nothing of the client is replaced."""

import json
import random
import shutil

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.utils import _http
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.publishing.hub_server import READER, TOKEN, hub
from tests.tiny import lora, save_tiny_model
from trl_fsdp_qlora.publishing import publish
from trl_fsdp_qlora.publishing.folder import PublishError, stage
from trl_fsdp_qlora.publishing.logits import LOGITS, LogitsError, prove, record_logits
from trl_fsdp_qlora.publishing.publish import PublishIncomplete, publish_adapter, run_publish

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


@pytest.fixture
def without_proof(monkeypatch):
    """For tests of what comes before it: a process of its own takes seconds."""
    monkeypatch.setattr(publish, "prove", lambda folder, base: "not asked here")


def api(server, token=TOKEN) -> HfApi:
    return HfApi(server.url, token=token)


@pytest.mark.processes
def test_what_is_published_loads_with_plain_peft_and_gives_the_recorded_logits(trained, server, monkeypatch, capsys):
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


@pytest.mark.processes
def test_other_weights_are_not_what_was_trained(folder):
    name = folder / "adapter_model.safetensors"
    weights = load_file(name)
    first = next(iter(weights))
    weights[first] = weights[first] * 1.5
    save_file(weights, name)
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    with pytest.raises(LogitsError, match="differ from the recorded ones by up to"):
        prove(folder, base)


def test_the_recorded_logits_are_those_of_the_model(trained):
    kept = json.loads((trained / LOGITS).read_text())
    base = AutoModelForCausalLM.from_pretrained(trained.parent / "base").eval()
    ids = torch.tensor([kept["input_ids"]])
    with torch.no_grad():
        of_base = base(input_ids=ids).logits[0][:, kept["entries"]]
        torch.testing.assert_close(torch.tensor(kept["logits_of_the_base"]), of_base)
        adapted = PeftModel.from_pretrained(base, trained)(input_ids=ids).logits[0][:, kept["entries"]]
    torch.testing.assert_close(torch.tensor(kept["logits"]), adapted)
    assert not torch.allclose(adapted, of_base, atol=1e-3)
    assert (trained / LOGITS).stat().st_size < 20_000


def test_ten_broken_uploads_are_whole_or_said_to_be_incomplete_and_a_repeat_completes_them(
    folder, server, without_proof
):
    draw = random.Random(17)
    publish_adapter(folder, "me/whole", BASE, api=api(server))
    count, outcomes = len(server.requests), []
    wanted = set(server.files("me/whole"))
    for number in range(10):
        repo, start = f"me/broken-{number}", len(server.requests)
        at, length, how = (
            draw.randrange(count),
            draw.choice([1, 1, 30]),
            draw.choice(["before", "middle", "after", "answer", 503]),
        )
        server.breaks = lambda i, line, a=start + at, n=length, how=how: how if a <= i < a + n else None
        try:
            publish_adapter(folder, repo, BASE, api=api(server))
            outcomes.append("whole")
        except PublishIncomplete as error:
            outcomes.append("incomplete")
            assert repo in str(error) and "the same command again goes on" in str(error)
        server.breaks = lambda i, line: None
        here = set(server.files(repo)) if repo in server.repos else set()
        assert here in (set(), {".gitattributes"}, wanted)  # never a part of it
        assert outcomes[-1] == "incomplete" or here == wanted
        publish_adapter(folder, repo, BASE, api=api(server))
        assert {**server.files(repo), "README.md": b""} == {**server.files("me/whole"), "README.md": b""}
        assert f"adapter = '{repo}'".encode() in server.files(repo)["README.md"]
    assert {"whole", "incomplete"} == set(outcomes)


STAGES = {
    "create": "POST /api/repos/create",
    "preupload": "/preupload/",
    "batch": "/info/lfs/objects/batch",
    "storage": "PUT /lfs/",
    "commit": "/commit/",
    "download": "/resolve/",
}


@pytest.mark.parametrize("stage", STAGES)
def test_whatever_fails_at_a_stage_is_one_line_and_a_repeat_completes_it(stage, folder, server, without_proof):
    publish_adapter(folder, "me/whole", BASE, api=api(server))
    wanted = set(server.files("me/whole"))
    for how in (401, 403, 409, 500, 502, 503, "before", "middle", "after", "answer"):
        repo, start = f"me/{stage}-{how}", len(server.requests)
        server.blobs.clear()  # or its weights need not be sent
        server.breaks = lambda i, line, how=how: how if STAGES[stage] in line else None
        with pytest.raises(PublishError) as caught:
            publish_adapter(folder, repo, BASE, api=api(server))
        assert [line for line in server.requests[start:] if STAGES[stage] in line]
        said = str(caught.value)
        assert "\n" not in said and "said None" not in said
        rights = how in (401, 403) and stage not in ("storage", "download")  # whose addresses are signed, or only read
        assert isinstance(caught.value, PublishIncomplete) is not rights
        assert ("(401)" in said or "(403)" in said) if rights else "the same command again goes on" in said
        here = set(server.files(repo)) if repo in server.repos else set()
        assert here == wanted if stage == "download" else here in (set(), {".gitattributes"}, wanted)
        server.breaks = lambda i, line: None
        publish_adapter(folder, repo, BASE, api=api(server))
        assert set(server.files(repo)) == wanted


def test_what_a_hub_in_trouble_says(folder, server, without_proof):
    server.breaks = lambda number, line: 500
    with pytest.raises(
        PublishIncomplete, match=r"me/sums is incomplete: the Hub said 500: .*same command again goes on"
    ):
        publish_adapter(folder, REPO, BASE, api=api(server))
    server.breaks = lambda number, line: "answer" if "/resolve/" in line else None
    with pytest.raises(PublishIncomplete, match="it is uploaded, but could not be downloaded and checked: "):
        publish_adapter(folder, REPO, BASE, api=api(server))
    server.blobs.clear()
    server.breaks = lambda number, line: "middle" if "PUT /lfs/" in line else None
    with pytest.raises(PublishIncomplete, match=r"RuntimeError: Error while uploading '\S+' to the Hub \(\w+Error: "):
        publish_adapter(folder, "me/again", BASE, api=api(server))


def as_a_reader(server, monkeypatch, tmp_path):
    """A process that is started finds this Hub, and nothing that was downloaded before."""
    settings = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    for name, value in {**settings, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.processes
def test_another_base_than_it_was_trained_on_is_refused_before_anything_is_sent(folder, server, monkeypatch, tmp_path):
    as_a_reader(server, monkeypatch, tmp_path)
    save_tiny_model(tmp_path / "other", seed=1)  # of the same shape, so that it would load
    server.commit("owner/other", files_of(tmp_path / "other"))
    said = refused("nothing was sent to me/sums: plain PEFT's logits differ", folder, server, base="owner/other")
    assert said.endswith("is owner/other what it was trained on?") and REPO not in server.repos


@pytest.mark.processes
def test_where_the_folder_that_it_was_trained_on_is_gone_the_proof_loads_the_base_that_readers_get(
    folder, server, monkeypatch, tmp_path
):
    as_a_reader(server, monkeypatch, tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    gone = {**config, "base_model_name_or_path": str(tmp_path / "gone" / "base")}
    (folder / "adapter_config.json").write_text(json.dumps(gone))
    done = publish_adapter(folder, REPO, BASE, api=api(server))
    assert "gives the logits recorded when it was saved" in done.proof and "not shown" not in done.proof
    assert [line for line in server.requests if line.startswith("GET") and f"{BASE}/resolve/" in line]


def test_a_base_that_no_reader_finds_is_refused_before_anything_is_sent(folder, server, monkeypatch):
    refused("the base owner/nobodys is not on the Hub, or hidden", folder, server, base="owner/nobodys")
    # A relative folder that is gone reads like a name on the Hub.
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "runs/base"}))
    refused("the base runs/base is not on the Hub, or hidden", folder, server, base=None)
    assert REPO not in server.repos


def test_a_base_folder_that_is_not_the_hubs_is_said_to_be_unproven(folder, server, tmp_path, without_proof):
    done = publish_adapter(folder, REPO, BASE, trained_base(folder), api=api(server))
    assert done.proof == "not asked here"
    save_tiny_model(tmp_path / "other", seed=1)
    done = publish_adapter(folder, REPO, BASE, tmp_path / "other", api=api(server))
    assert done.proof.endswith("(that owner/tiny-base holds the weights of the folder was not shown)")


def trained_base(folder) -> str:
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_a_repeat_sends_nothing_twice(folder, server, without_proof):
    first = publish_adapter(folder, REPO, BASE, api=api(server))
    server.requests.clear()
    again = publish_adapter(folder, REPO, BASE, api=api(server))
    assert again.commit.oid == first.commit.oid
    assert not [line for line in server.requests if line.startswith("PUT") or "/commit/" in line]


def refused(message: str, folder, server, repo=REPO, base=BASE, token=TOKEN) -> str:
    before = {name: server.files(name) for name in server.repos}
    with pytest.raises(PublishError, match=message) as caught:
        publish_adapter(folder, repo, base, api=api(server, token))
    assert {name: server.files(name) for name in server.repos} == before  # nothing half-published
    assert "\n" not in str(caught.value) and not isinstance(caught.value, PublishIncomplete)
    return str(caught.value)


def test_rights_are_looked_at_before_anything_is_there(folder, server, monkeypatch):
    monkeypatch.setattr(publish, "get_token", lambda: None)
    refused("there is no token to publish with: run `hf auth login`", folder, server, token=None)
    assert server.requests == []
    refused(r"no right to write to me/sums \(403\)", folder, server, token=READER)
    refused(r"does not take this token \(401\)", folder, server, token="hf_testTokenOfNobody00001")
    refused("name it owner/name", folder, server, repo="me/too/many")


def test_a_repository_of_something_else_is_left_alone(folder, server):
    server.commit("me/other", {"README.md": b"---\nbase_model: owner/other\n---\n# x\n", "adapter_config.json": b"{}"})
    refused("me/other is there and belongs to the base owner/other, not owner/tiny-base", folder, server, "me/other")
    server.commit("me/model", {"config.json": b"{}", "model.safetensors": b"x"})
    refused("me/model is there and holds a model, not an adapter", folder, server, "me/model")


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json, so no adapter to publish"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"broken"), "cannot be read"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "is no adapter's config"),
        (lambda f: (f / "README.md").unlink(), "has no README.md, the card"),
        (
            lambda f: edit(f / "README.md", "base_model: base\n", "base_model: owner/wrong\n"),
            "says base_model: owner/wrong",
        ),
        (
            lambda f: edit(f / "README.md", "# sums", "key hf_AbCdEfGhIjKlMnOpQrStUvWxYz"),
            "line .* looks like a secret",
        ),
        (lambda f: edit(f / "README.md", "# sums", "see /home/bob/runs/x"), "line .* holds a path of this machine"),
        (lambda f: edit(f / "README.md", "# sums", "[More Information Needed]"), "is PEFT's empty template"),
        (lambda f: edit(f / "README.md", "license: mit", "license: [mit"), "its metadata cannot be read"),
        (
            lambda f: save_file({"x": torch.tensor([float("nan")])}, f / "adapter_model.safetensors"),
            "holds values that are not finite, in x",
        ),
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
    assert run_publish([str(folder), "--repo", REPO]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run_publish([str(folder), "--repo", REPO, "--base", BASE, "--check"]) == 0
    assert server.requests == []


def test_without_recorded_logits_it_says_what_was_compared(folder, server, tmp_path):
    (folder / LOGITS).unlink()
    done = publish_adapter(folder, REPO, BASE, api=api(server))
    assert "no logits were recorded" in done.proof
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert stage(folder, scratch, REPO, BASE).recorded is False
