"""The ends of a conversation that come from outside it."""

from agent.conversation import End
from agent.errors import RunStopped
from agent.faults import Fault
from tools.errors import RowFailed


def failed_end(failed: RowFailed) -> End:
    """Of what ends a row."""
    return End(
        status="failed",
        reason=failed.error_class,
        error=str(failed),
        error_class=failed.error_class,
        retryable=failed.retryable,
    )


def stopped_end(stop: RunStopped) -> End:
    """Of what ends the run."""
    return End(status="stopped", reason=stop.reason, error=stop.message, retryable=True)


def fault_end(fault: Fault) -> End:
    """Of a fault of ours."""
    return End(
        status="failed", reason="internal", error=f"{fault}\n{fault.trace}", error_class="internal", retryable=True
    )


def timeout_end() -> End:
    """Of the row's time."""
    return End(status="timeout", reason="timeout", error="the row's time ran out", retryable=True)
