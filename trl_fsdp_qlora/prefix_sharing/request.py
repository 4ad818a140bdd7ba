"""A request for a comparison, which goes through a model's root module and all wrappers to prompt sharing."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from .status import CannotPack


@dataclass(eq=False)
class Request:
    """Asks the next call of a model for a comparison, and gets what differs.

    Attributes:
        gradients: whether gradients are compared, too.
        is_of_user: whether [`verify.verify`] asks, and not the first pass of a type.
        differences: what differs; `None` if nothing was compared.
        reason: why nothing was compared.
    """

    gradients: bool
    is_of_user: bool = False
    differences: list[str] | None = None
    reason: str = "no call reached a model that shares prompts"

    @contextlib.contextmanager
    def noting_why(self) -> Iterator[None]:
        """Ends the block at [`CannotPack`], and notes it. Outside of a comparison the pass itself logs the reason."""
        try:
            yield
        except CannotPack as error:
            self.reason = str(error)


# A variable of the context, because the arguments of the root module and of its wrappers must not change.
_request: ContextVar[Request | None] = ContextVar("request", default=None)


@contextlib.contextmanager
def requested(request: Request) -> Iterator[None]:
    """Inside the block the first call of a model in this thread answers a request."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def take_request() -> Request | None:
    """Returns the request that this call has to answer. Calls inside of it get none."""
    request = _request.get()
    if request is not None:
        _request.set(None)
    return request
