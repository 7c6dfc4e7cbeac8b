"""The exception tree. Four borders, told apart by type.

- `UsageProblem`: the user's. One line, exit code 2, no traceback.
- `ToolError`: the model's. Goes back to it as the tool's result.
- `RowFailed`: the row's. Ends that row alone, as data, with a class and whether trying again can help.
- `DiskFull`: the run's. Ends it early.

Anything else that is raised is a fault of our own. A leaf: imports nothing of ours.
"""


class UsageProblem(Exception):
    """A mistake in what the user asked for: what, where, how to mend it, in one line."""


class ToolError(Exception):
    """A tool call that could not be done; the text is what the model reads."""


class DiskFull(Exception):
    """What belongs to the run could not be written beside its rows, or where its sandboxes are made; the text says what
    and why. Ends the run."""


class RowFailed(Exception):
    """Ends one row. `error_class` is a value of the journal's column of that name."""

    error_class = "internal"
    retryable = False


class EnvironmentLost(RowFailed):
    """The sandbox is gone (killed, pruned, out of memory): its state cannot be had back."""

    error_class = "environment_lost"
    retryable = True


class ImageUnavailable(RowFailed):
    """The row's image does not exist or may not be pulled."""

    error_class = "image_unavailable"


class ImagePullFailed(ImageUnavailable):
    """The pull broke (time, network): another try can help."""

    retryable = True


class SetupFailed(RowFailed):
    """The row's files, `setup` command or sandbox could not be made ready."""

    error_class = "setup_failed"


class SandboxRefused(SetupFailed):
    """What was asked of the sandbox cannot be had from this backend: starting it again would not help."""


class SetupTimeout(RowFailed):
    """Making the sandbox ready took longer than the row had."""

    error_class = "setup_timeout"
    retryable = True
