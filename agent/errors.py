"""Errors of the model's side. See `tools.errors` for the tree they belong to."""

from agent.types import NO_SPEND, Spend
from tools.errors import RowFailed


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
    """The whole run ends early: rows in flight are `stopped` and stay to be run.

    `reason` is budget, quota, auth, model, unreachable, row_faults, disk or interrupt.
    """

    def __init__(self, reason: str, message: str, spend: Spend = NO_SPEND) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.spend = spend
