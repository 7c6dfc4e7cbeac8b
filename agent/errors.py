"""Errors of the model's side. See `tools.errors` for the tree they belong to."""

from typing import Literal

from agent.types import NO_SPEND, Spend
from tools.errors import RowFailed

StopReason = Literal[
    "budget",  # spent, or too small for another row or summary
    "quota",  # the endpoint's: used up, or a rate limit that does not end
    "auth",  # no key is good
    "model",  # nobody there knows it
    "unreachable",
    "row_faults",  # so many rows or summaries on end could not be had that the next would not be had either
    "disk",
    "interrupt",
    "usage",  # what only a worker could find, once something was paid for
    "input",  # the compressor's was changed while it was read
    "output",  # the compressor's appeared while it worked
    "fault",  # of ours
]
Stopping = Literal[StopReason, ""]
"""Why the run stops, "" while it goes on."""


class ModelError(RowFailed):
    """A call of the model that cannot be had. `error_class` is one of model_error, auth, quota, context_exceeded,
    filtered; `reason` a short name of what happened; `spend` what its tries cost."""

    def __init__(
        self,
        message: str,
        *,
        error_class: str = "model_error",
        reason: str = "model_error",
        retryable: bool = True,
        spend: Spend = NO_SPEND,
    ) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.reason = reason
        self.retryable = retryable
        self.spend = spend


class RunStopped(Exception):
    """The whole run ends early: rows in flight are `stopped` and stay to be run."""

    def __init__(self, reason: StopReason, message: str, spend: Spend = NO_SPEND) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.spend = spend
