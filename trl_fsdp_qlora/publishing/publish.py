"""Publish an adapter: check it, upload it in one commit, download it again, and prove that it loads."""

import filecmp
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    XetDownloadError,
)
from huggingface_hub.utils import validate_repo_id

from ..run.one_line import OneLineParser
from ..run.redaction import redact
from .base import holds_the_same
from .folder import CARD, CONFIG, PublishError, Staged, stage
from .logits import LogitsError, prove

USER_ERROR = 2


class PublishIncomplete(PublishError):
    """The Hub did not get everything, or it could not be checked; the same command again goes on."""


@dataclass
class Published:
    """What was published.

    Args:
        url: of the repository.
        commit: that was downloaded and checked, as the Hub described it.
        files: names.
        size: bytes of all files.
        proof: a line about the logits.
        seconds: of the download and the proof.
    """

    url: str
    commit: CommitInfo
    files: list[str]
    size: int
    proof: str
    seconds: float


def publish_adapter(
    folder: str | Path,
    repo: str,
    base: str | None = None,
    base_folder: str | Path | None = None,
    private: bool | None = None,
    api: HfApi | None = None,
    staged_as: Callable[[Staged], None] | None = None,
    message: str | None = None,
    revision: str | None = None,
    proves: bool = True,
) -> Published:
    """Publish the adapter in `folder` as `repo`.

    Everything that can be told to be wrong is looked at before anything is sent. What is sent becomes visible by one
    commit, or not at all; files that the repository holds already are not sent twice.

    Args:
        folder: with adapter, config and card, as a trainer of this package leaves it.
        repo: `owner/name` on the Hub; made where it does not exist.
        base: Hub id of the base model, where the adapter was trained on a folder.
        base_folder: to load the base from for the proof, in place of the Hub.
        private: make a new repository private or public; by default as its owner's settings are.
        api: client; by default one with the token of `hf auth login` or `HF_TOKEN`.
        staged_as: is shown what is to be published, before anything is sent.
        message: of the commit.
        revision: branch to commit to, by default `main`.
        proves: compare logits in a fresh process with the recorded ones, too, and not the bytes alone; where `base` cannot be
            told to be what the adapter was trained on, once before anything is sent.

    Raises:
        PublishError: see [`stage`]; no token, no rights, a repository of another base, a base that no reader finds, or an
            adapter that does not give the recorded logits on it.
        PublishIncomplete: the connection or the Hub failed on the way.
    """
    api = api or HfApi()
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as back:
        staged = stage(folder, scratch, repo, base)
        if staged_as is not None:
            staged_as(staged)
        if not (api.token or get_token()):
            raise PublishError("there is no token to publish with: run `hf auth login`, or set HF_TOKEN")
        with _hub_errors(repo):
            _check_repository(api, repo, staged.base)
            loaded = _Base(staged.base, staged.base, "")
            if proves:
                loaded = _base_of_the_proof(api, folder, staged.base, base_folder)
                if staged.recorded and loaded.is_doubtful:
                    _prove(staged.folder, loaded, f"nothing was sent to {repo}: ")
            url = str(api.create_repo(repo, private=private, exist_ok=True))
            commit = _upload(api, repo, staged, message or "Adapter, card and recorded logits", revision)
        started = time.perf_counter()
        with _hub_errors(repo, "it is uploaded, but could not be downloaded and checked: "):
            api.snapshot_download(repo, revision=commit.oid, local_dir=back)
        _check_download(staged, Path(back), repo)
        proof = "only the bytes of what was downloaded are compared"
        if not staged.recorded:
            proof = f"no logits were recorded when it was saved: {proof}"
        elif proves:
            proof = _prove(Path(back), loaded, f"{repo} is uploaded, but not what was trained: ")
        size = sum((staged.folder / name).stat().st_size for name in staged.files)
        return Published(url, commit, staged.files, size, proof, time.perf_counter() - started)


class _Base(NamedTuple):
    """What the proof loads as the base: `place` for `name`, and what that leaves open."""

    name: str
    place: str
    left_open: str
    is_doubtful: bool = False


def _base_of_the_proof(api: HfApi, folder: str | Path, base: str, base_folder: str | Path | None) -> _Base:
    """What a reader of the card loads, or a folder with the same weights; the folder that the caller names in any case.

    Raises:
        PublishError: the base is not on the Hub.
    """
    trained_on = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    local = Path(base_folder or trained_on)
    same = holds_the_same(api, base, local.resolve() if local.is_dir() else None)
    if base_folder or same:
        left_open = "" if same else f" (that {base} holds the weights of the folder was not shown)"
        return _Base(base, str(local.resolve()), left_open)
    return _Base(base, base, "", is_doubtful=base != trained_on)


def _prove(adapter: Path, base: _Base, lead: str) -> str:
    try:
        return prove(adapter, base.place) + base.left_open
    except LogitsError as error:
        doubt = f"; is {base.name} what it was trained on?" if base.is_doubtful else ""
        raise PublishError(f"{lead}{error}{doubt}") from error


def _check_repository(api: HfApi, repo: str, base: str) -> None:
    """Refuse a repository that holds something else: another base's adapter, or no adapter at all."""
    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        return  # or it is hidden from this token, which making it will show
    names = {file.rfilename for file in info.siblings or []}
    theirs = info.card_data.base_model if info.card_data is not None else None
    if theirs not in (None, base, [base]):
        raise PublishError(f"{repo} is there and belongs to the base {theirs}, not {base}; name another repository")
    if CONFIG not in names and names & {"config.json", "model.safetensors", "model.safetensors.index.json"}:
        raise PublishError(f"{repo} is there and holds a model, not an adapter; name another repository")


def _upload(api: HfApi, repo: str, staged: Staged, message: str, revision: str | None) -> CommitInfo:
    operations = [CommitOperationAdd(name, staged.folder / name) for name in staged.files]
    return api.create_commit(repo, operations, commit_message=message, revision=revision)


def _check_download(staged: Staged, back: Path, repo: str) -> None:
    _, differ, missing = filecmp.cmpfiles(staged.folder, back, staged.files, shallow=False)
    if differ or missing:
        what = ", ".join([*differ, *missing])
        raise PublishIncomplete(f"{repo} does not give back what was sent ({what}); the same command again goes on")


@contextmanager
def _hub_errors(repo: str, lead: str = "") -> Iterator[None]:
    """What the Hub or the connection refuses, as one line with what to do."""
    again = "nothing is lost, the same command again goes on"
    try:
        yield
    except PublishError:
        raise
    except HFValidationError as error:
        raise PublishError(f"--repo {repo}: {_first_line(error)}; name it owner/name") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401 and not lead:
            raise PublishError("the Hub does not take this token (401): log in again with `hf auth login`") from error
        if status == 403 and not lead:
            raise PublishError(
                f"this token has no right to write to {repo} (403): take one with write access, or a name of your own"
            ) from error
        raise PublishIncomplete(
            f"{repo} is incomplete: {lead}the Hub said {status}: {_first_line(error)}; {again}"
        ) from error
    # ValueError, KeyError: an answer that broke off, or of a proxy. RuntimeError: the client's around what ended a file's transfer,
    # and Xet's own.
    except (HTTPError, OSError, ValueError, KeyError, RuntimeError, EntryNotFoundError, XetDownloadError) as error:
        inner = error.__cause__ if isinstance(error, RuntimeError) else None
        cause = f" ({type(inner).__name__}: {_first_line(inner)})" if inner else ""
        raise PublishIncomplete(
            f"{repo} is incomplete: {lead}{type(error).__name__}: {_first_line(error)}{cause}; {again}"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = redact(str(error)).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no reason given"


def _check_names(repo: str, base_folder: str | None) -> None:
    with _hub_errors(repo):
        validate_repo_id(repo)
    if base_folder is not None and not (Path(base_folder) / "config.json").is_file():
        raise PublishError(f"--base-folder {base_folder} holds no config.json, so no model")


def reader_sees(folder: str | Path) -> str:
    """What the Hub shows of a card beside its text: base, licence, data, results."""
    data = ModelCard.load(Path(folder) / CARD).data
    lines = [
        f"  adapter of {data.base_model}, licence {data.license}, data {', '.join(data.datasets or ['not stated'])}"
    ]
    for result in data.eval_results or []:
        lines.append(f"  {result.metric_name or result.metric_type} on {result.dataset_name}: {result.metric_value}")
    if not data.eval_results:
        lines.append("  no results in its evaluation metadata")
    return "\n".join(lines)


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

    def show(staged: Staged) -> None:
        print(f"to be published as {given.repo}: {', '.join(staged.files)}")
        if staged.left_out:
            print(f"left out: {', '.join(staged.left_out)}")
        print(f"a reader of the card sees:\n{reader_sees(staged.folder)}", flush=True)

    try:
        _check_names(given.repo, given.base_folder)
        if given.check:
            with tempfile.TemporaryDirectory() as scratch:
                show(stage(given.adapter, scratch, given.repo, given.base))
            return 0
        where = (given.repo, given.base, given.base_folder, given.private)
        done = publish_adapter(given.adapter, *where, staged_as=show)
    except PublishError as error:
        print(f"error: {redact(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        return USER_ERROR
    print(f"published: {done.url} at {done.commit.oid[:8]}, {len(done.files)} files, {done.size / 2**20:.1f} MiB")
    print(f"downloaded and checked in {done.seconds:.0f} s; {done.proof}")
    return 0
