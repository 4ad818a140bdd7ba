"""Publish an adapter: check it, prove that it loads, upload it in one commit, and download it again."""

import filecmp
import json
import re
import shutil
import tempfile
from pathlib import Path

import yaml
from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import HFValidationError, HTTPError, XetDownloadError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from ..run.one_line import OneLineParser, refuse
from .logits import LOGITS, prove

CONFIG, WEIGHTS, CARD = "adapter_config.json", "adapter_model.safetensors", "README.md"
FILES = (
    CONFIG,
    WEIGHTS,
    CARD,
    "training.png",
    LOGITS,
)  # all that is ever sent: no optimizer states, no pickles, no logs
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")


class PublishError(UserError):
    """Something is wrong with the folder, the card, the token, the connection or the repository."""


def stage(folder: str | Path, scratch: str | Path, repo: str, base: str | None = None) -> str:
    """Check `folder` and copy what is to be published of it into `scratch`, with the base named as readers find it.

    Args:
        folder: with an adapter that PEFT saved, and its card.
        scratch: an empty folder.
        repo: that it is published as, for the card's quick start.
        base: Hub id of the base model, needed where the adapter was trained on a folder.

    Returns:
        The Hub id of the base.

    Raises:
        PublishError: no adapter, no card, a card of another base, values that are not finite.
    """
    folder, scratch = Path(folder), Path(scratch)
    for name in (CONFIG, WEIGHTS, CARD):
        if not (folder / name).is_file():
            raise PublishError(f"{str(folder)!r} has no {name}: name the folder that save_model() wrote")
    try:
        validate_repo_id(repo)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        trained_on = str(config["base_model_name_or_path"])
        card = ModelCard.load(folder / CARD)
        with safe_open(folder / WEIGHTS, "pt") as file:
            broken = [name for name in file.keys() if not file.get_tensor(name).isfinite().all()]  # noqa: SIM118
    except HFValidationError as error:
        raise PublishError(f"--repo {repo}: {_one_line(error)}; name it owner/name") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise PublishError(f"{folder} cannot be read: {type(error).__name__}: {_one_line(error)}") from error
    if broken:
        raise PublishError(f"{folder / WEIGHTS} holds values that are not finite, in {broken[0]}")
    base = base or trained_on
    if Path(base).exists() or not _HUB_ID.fullmatch(base):
        raise PublishError(
            f"{folder / CONFIG} names the folder {Path(base).name!r} as the base, which no reader has; say which model on the "
            "Hub it is: --base owner/name"
        )
    named = card.data.base_model
    if named not in {base, trained_on, Path(trained_on).name}:
        raise PublishError(f"{folder / CARD} says base_model: {named}, but the adapter was trained on {trained_on}")
    if named != base:
        card.data.base_model = base
        card.data.tags = [tag.replace(f":{named}", f":{base}") for tag in card.data.tags or []]
        card.text = card.text.replace(f"`{named}`", f"`{base}`")
        card.text = re.sub(rf"(?m)(model_name_or_path:? ){re.escape(named)}(?=\s)", rf"\g<1>{base}", card.text)
    for variable, place in (("base", base), ("adapter", repo)):
        card.text = re.sub(rf"(?m)^{variable} = '[^'\n]*'  # fill in: .*$", f"{variable} = {place!r}", card.text)
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, scratch / name)
    (scratch / CARD).write_text(str(card), encoding="utf-8")
    config["base_model_name_or_path"] = base
    (scratch / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    return base


def publish_adapter(
    folder: str | Path,
    repo: str,
    base: str | None = None,
    base_folder: str | Path | None = None,
    private: bool | None = None,
    api: HfApi | None = None,
) -> tuple[CommitInfo, str]:
    """Publish the adapter in `folder` as `repo`: by one commit, or not at all.

    Before anything is sent, plain PEFT has to give the logits that were recorded when it was saved; afterwards what was sent is
    downloaded and compared.

    Args:
        folder: with adapter, config and card, as a trainer of this package leaves it.
        repo: `owner/name` on the Hub; made where it does not exist.
        base: Hub id of the base model, where the adapter was trained on a folder.
        base_folder: to load the base from for the proof, in place of the Hub.
        private: make a new repository private or public; by default as its owner's settings are.
        api: client; by default one with the token of `hf auth login` or `HF_TOKEN`.

    Returns:
        The commit as the Hub described it, and a line about the logits.

    Raises:
        PublishError: see [`stage`]; the adapter does not give the recorded logits on its base; whatever the Hub or the
            connection refuses.
    """
    api = api or HfApi()
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as back:
        base = stage(folder, scratch, repo, base)
        files = sorted(path.name for path in Path(scratch).iterdir())
        proof = "no logits were recorded when it was saved"
        if LOGITS in files:
            try:
                proof = prove(scratch, str(Path(base_folder).resolve()) if base_folder else base)
            except UserError as error:
                raise PublishError(
                    f"nothing was sent to {repo}: {error}; is {base} what it was trained on?"
                ) from error
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            message = "Adapter, card and recorded logits"
            commit = api.upload_folder(repo_id=repo, folder_path=scratch, commit_message=message)
            api.snapshot_download(repo, revision=commit.oid, local_dir=back)
        except (HTTPError, OSError, ValueError, KeyError, RuntimeError, XetDownloadError) as error:
            reason = f"{type(error).__name__}: {_one_line(error)}"
            raise PublishError(f"{repo}: {reason}; nothing is lost, the same command again goes on") from error
        _, differ, missing = filecmp.cmpfiles(scratch, back, files, shallow=False)
        if differ or missing:
            raise PublishError(f"{repo} does not give back what was sent ({', '.join([*differ, *missing])})")
        return commit, proof


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")


def run_publish(arguments: list[str]) -> int:
    """`trl-fsdp-qlora publish ADAPTER_DIR --repo OWNER/NAME`; prints what was done, and an error as one line.

    Returns:
        The exit status: 0, or 2 where nothing, or nothing that could be checked, was published.
    """
    parser = OneLineParser("trl-fsdp-qlora publish", description=__doc__)
    parser.add_argument("adapter", help="folder of the adapter")
    parser.add_argument(
        "--repo", required=True, help="repository on the Hub, owner/name; made where it does not exist"
    )
    parser.add_argument("--base", help="Hub id of the base model, where the adapter was trained on a folder")
    parser.add_argument("--base-folder", help="folder to load the base from for the proof, in place of the Hub")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--check", action="store_true", help="only check the folder; nothing is sent")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            base = stage(given.adapter, scratch, given.repo, given.base)
            files, data = {path.name for path in Path(scratch).iterdir()}, ModelCard.load(Path(scratch) / CARD).data
        left_out = sorted({path.name for path in Path(given.adapter).iterdir()} - files)
        print(f"to be published as {given.repo}: {', '.join(sorted(files))}")
        print(f"left out: {', '.join(left_out) or 'nothing'}")
        licence, sets = data.license, ", ".join(data.datasets or ["not stated"])
        print(f"a reader of the card sees: adapter of {base}, licence {licence}, data {sets}", flush=True)
        for result in data.eval_results or []:
            print(f"  {result.metric_name} on {result.dataset_name}: {result.metric_value}", flush=True)
        if given.check:
            return 0
        commit, proof = publish_adapter(given.adapter, given.repo, given.base, given.base_folder, given.private)
    except UserError as error:
        return refuse(str(error))
    print(f"published: {commit.repo_url} at {commit.oid[:8]}; downloaded and compared; {proof}")
    return 0
