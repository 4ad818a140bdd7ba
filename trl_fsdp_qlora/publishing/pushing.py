"""A trainer's `push_to_hub`: what [`publish_adapter`] does, without the proof in a process of its own."""

from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo, HfApi

from .publish import PublishError, publish_adapter


def checks_push(trainer: Any, blocking: bool) -> bool:
    """Whether [`push`] does it: an adapter, and nobody asked to have it sent in the background."""
    return blocking and is_peft_model(trainer.accelerator.unwrap_model(trainer.model))


def push(
    trainer: Any,
    message: str | None = None,
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    **card: Any,
) -> CommitInfo | None:
    """Save the adapter and its card, check the folder, send it in one commit, download it again and compare.

    Every rank calls it, as [`transformers.Trainer.push_to_hub`]; one of them publishes. Of a folder as a trainer leaves it,
    only what `publish` sends is sent: no pickles, no optimizer states, no tokenizer.

    Args:
        trainer: saves all its weights on every rank's call, writes its card, knows its repository.
        message: of the commit.
        blocking: has to be true, see [`checks_push`].
        token: by default `args.hub_token`, then the one that the machine is logged in with.
        revision: branch to commit to, by default `args.hub_revision`, then `main`.
        private: make a new repository private or public; by default `args.hub_private_repo`.
        card: arguments of `trainer.create_model_card`.

    Returns:
        The commit, on the rank that published.

    Raises:
        PublishError: see [`publish_adapter`]; says that the adapter is in the output folder, and the command for later.
    """
    args = trainer.args
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    api = HfApi(token=args.hub_token if token is None else token)
    private = args.hub_private_repo if private is None else private
    if trainer.hub_model_id is None:  # without `push_to_hub` in the config
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        trainer.hub_model_id = api.create_repo(name, private=private, exist_ok=True).repo_id
        trainer.push_in_progress = None
    trainer.create_model_card(**{"model_name": trainer.hub_model_id.split("/")[-1], **card})
    if trainer.push_in_progress is not None and not trainer.push_in_progress.is_done():
        trainer.push_in_progress.wait_until_done()  # a checkpoint on its way
    try:
        done = publish_adapter(
            args.output_dir,
            trainer.hub_model_id,
            private=private,
            api=api,
            message=message,
            revision=args.hub_revision if revision is None else revision,
            proves=False,
        )
    except PublishError as error:
        folder = Path(args.output_dir)
        raise type(error)(
            f"{error}. The adapter itself is saved: trl-fsdp-qlora publish {folder} --repo {trainer.hub_model_id}"
        ) from error
    return done.commit
