"""Publish an adapter: check that it loads, upload it in one commit, and download it again."""

import filecmp
import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import validate_repo_id

from ...errors import UserError
from ...trainers.reporting.card import code
from ..run.one_line import OneLineParser
from .adapted_base import TOKENIZER, check_loads

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
CARD = "README.md"
# What a reader's tokenizer or processor is made of, by the names that transformers' classes give their files.
PROCESSING = (
    TOKENIZER, "tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
# All that is sent: no optimizer states, no pickles, no logs.
FILES = (CONFIG, WEIGHTS, CARD, *PROCESSING)


def _rename_on_card(card: ModelCard, old_base: str, base: str, repo: str) -> None:
    """Put `base` in place of `old_base` in metadata, text and recipe, and fill in the quick start's two names."""
    card.data.base_model = base
    tags = card.data.tags or []
    card.data.tags = [tag.replace(f":{old_base}", f":{base}") for tag in tags]
    text = card.text.replace(code(old_base), code(base))
    as_yaml = yaml.safe_dump(old_base, allow_unicode=True)
    in_yaml, *_ = as_yaml.splitlines()
    in_shell = shlex.quote(old_base)
    for spelling in (old_base, in_shell, in_yaml):
        literal = re.escape(spelling)
        setting = rf"(?m)(model_name_or_path:? ){literal}(?=\s)"
        text = re.sub(setting, rf"\g<1>{base}", text)
    names = {"base": base, "adapter": repo}
    for variable, name in names.items():
        to_fill_in = rf"(?m)^{variable} = .*  # fill in: .*$"
        text = re.sub(to_fill_in, f"{variable} = {name!r}", text)
    card.text = text


def stage(folder: Path, scratch: Path, repo: str, base: str | None = None) -> str:
    """Check `folder` and copy its published files into `scratch`; returns the base's name as readers find it.

    The copied config has that name. Plain PEFT loads the adapter on the base that it was trained on.

    Raises:
        UserError: there is no adapter or no card, the adapter does not load, the card is of another base, values are
            not finite, or the base is one that no reader has.
    """
    config_file = folder / CONFIG
    card_file = folder / CARD
    try:
        validate_repo_id(repo)
        config = json.loads(config_file.read_text(encoding="utf-8"))
        trained_on = str(config["base_model_name_or_path"])
        card = ModelCard.load(card_file)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{folder} cannot be published as {repo}: {_one_line(error)}") from error
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}")
    base = base or trained_on
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+|[\w-]+", base) is not None
    if Path(base).exists() or not is_name:
        folder_name = Path(base).name
        raise UserError(
            f"{config_file} names the folder {folder_name!r} as the base, which no reader has; name the "
            "model on the Hub: --base owner/name"
        )
    base_on_card = card.data.base_model
    if base_on_card not in {base, trained_on, Path(trained_on).name}:
        raise UserError(f"{card_file} has base_model: {base_on_card}, but the adapter was trained on {trained_on}")
    is_here = Path(trained_on).exists()
    check_loads(folder, trained_on if is_here else base)
    config["base_model_name_or_path"] = base
    _rename_on_card(card, base_on_card, base, repo)
    if not (folder / TOKENIZER).is_file():  # the quick start finds none next to the adapter
        of_adapter = r"(?m)^(processor = \w+\.from_pretrained)\(adapter\)$"
        card.text = re.sub(of_adapter, r"\1(base)", card.text)
    for name in FILES:
        source = folder / name
        if source.is_file():
            shutil.copyfile(source, scratch / name)
    new_config = json.dumps(config, indent=2, sort_keys=True)
    (scratch / CARD).write_text(str(card), encoding="utf-8")
    (scratch / CONFIG).write_text(new_config, encoding="utf-8")
    return base


def send(scratch: Path, repo: str, private: bool | None = None) -> str:
    """Publish the files that [`stage`] has left in `scratch` by one commit, or not at all.

    The files are then downloaded and compared. Returns a line on that.

    Raises:
        UserError: the Hub or the connection refuses something.
    """
    api = HfApi()
    files = [path.name for path in scratch.iterdir()]
    message = "Adapter and card"
    with tempfile.TemporaryDirectory() as back:
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo, folder_path=scratch, commit_message=message)
            api.snapshot_download(repo, revision=commit.oid, local_dir=back)
        except Exception as error:  # the Hub, the connection and a disk raise errors without a common class
            raise UserError(f"{repo}: {_one_line(error)}; type the same command again") from error
        _, differ, missing = filecmp.cmpfiles(scratch, back, files, shallow=False)
    not_equal = ", ".join([*differ, *missing])
    if not_equal:
        raise UserError(f"{repo} does not give back what was sent ({not_equal})")
    revision = commit.oid[:8]
    return f"published: {commit.repo_url} at {revision}; downloaded and compared"


def _one_line(error: BaseException) -> str:
    class_name = type(error).__name__
    words = str(error).split()
    text = " ".join(words)
    return f"{class_name}: {text.rstrip('.')}"


def described(card: ModelCard) -> list[str]:
    """Lines with what the card has for a reader: the base, licences, data and results."""
    metadata = card.data
    licence = metadata.license or "not stated; license: in the recipe or on the card names one"
    line = re.search(r"(?m)^- data: (.*)$", card.text)
    data = "not stated" if line is None else line[1]
    measured = []
    for result in metadata.eval_results or ():
        measured.append(f"{result.metric_name}: {result.metric_value}")
    results = ", ".join(measured) or "none were measured"
    return [
        f"base: {metadata.base_model}",
        f"licence: {licence}",
        f"data: {data}",
        f"results: {results}",
    ]


def run_publish(arguments: list[str]) -> int:
    """`trl-fsdp-qlora publish ADAPTER_DIR --repo OWNER/NAME`; prints the result and returns the exit status, 0.

    Raises:
        UserError: nothing, or nothing that could be checked, was published.
    """
    parser = OneLineParser("trl-fsdp-qlora publish", description=__doc__)
    parser.add_argument("adapter", type=Path, help="folder of the adapter")
    parser.add_argument("--repo", required=True, help="owner/name on the Hub; created if it does not exist")
    parser.add_argument("--base", help="Hub id of the base model, if the adapter was trained on a folder")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--check", action="store_true", help="only check the folder; nothing is sent")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        base = stage(options.adapter, scratch, options.repo, options.base)
        sent = {path.name for path in scratch.iterdir()}
        left_out = {path.name for path in options.adapter.iterdir()} - sent
        names = ", ".join(sorted(sent))
        print(f"to be published as {options.repo}, an adapter of {base}: {names}")
        other_names = ", ".join(sorted(left_out)) or "nothing"
        print(f"left out: {other_names}")
        card = ModelCard.load(scratch / CARD)
        for line in described(card):
            print(line, flush=True)
        if options.check:
            print("checked: it loads, and nothing was sent")
        else:
            print(send(scratch, options.repo, options.private))
    return 0
