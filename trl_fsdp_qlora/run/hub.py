"""Whether the Hub answers, asked once: without a network its clients try each name again and again, for half a minute."""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from huggingface_hub import constants, get_session

PATIENCE = 5.0  # seconds for an answer; finding no name server can take longer than any time-out of a connection
_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def may_be_of_the_hub(name: str | None) -> bool:
    """Whether `name` is spelled as an id on the Hub and nothing here is called so."""
    return bool(name) and _ID.fullmatch(name) is not None and not Path(name).exists()


def unreachable() -> str | None:
    """Why the Hub does not answer within [`PATIENCE`]; `None` where it does, whatever it says."""
    said = [f"no answer in {PATIENCE:g} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            said[0] = ""
        except Exception as error:  # of the HTTP library, the proxy's or the certificate's: all are no answer
            said[0] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return said[0] or None


@contextmanager
def asked_once(names: Iterable[str | None]) -> Iterator[str | None]:
    """Look only at what is on this machine inside, where one of `names` may be of the Hub and that does not answer.

    Yields:
        Why it does not; `None` where it does, where nothing is asked of it, or where it is switched off (`HF_HUB_OFFLINE`).
    """
    ask = not constants.HF_HUB_OFFLINE and any(map(may_be_of_the_hub, names))
    reason = unreachable() if ask else None
    if reason is None:
        yield None
        return
    holders = (constants, datasets.config)
    kept = [holder.HF_HUB_OFFLINE for holder in holders]
    try:
        for holder in holders:
            holder.HF_HUB_OFFLINE = True
        yield reason
    finally:
        for holder, value in zip(holders, kept, strict=True):
            holder.HF_HUB_OFFLINE = value
