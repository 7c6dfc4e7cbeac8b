"""What tells one program over runs from another: the batch runner's kind of run, of which others change a part."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from agent.outcome import RolloutPolicy
from batch.dataset import Dataset, open_dataset
from batch.index import JournalIndex
from batch.settings import RunSettings
from batch.store import RunDirectory
from tools.environments.base import Owner


class Ended(Struct, frozen=True, kw_only=True):
    """An invocation whose derived files are written. `model` is the run's; `whole`: it was not stopped early; `say`
    tells the user a line."""

    settings: RunSettings
    directory: RunDirectory
    index: JournalIndex
    owner: Owner
    backend: str
    model: str
    whole: bool
    say: Callable[[str], None]


class RunKind:
    """The batch runner's. `script` and `command` are what its program is called by."""

    script = "batch_runner.py"
    command = "batch-runner"
    settings: type[RunSettings] = RunSettings

    def open_dataset(self, settings: RunSettings, spool_to: Path | None) -> Dataset:
        """The rows. See `batch.dataset.open_dataset`."""
        return open_dataset(settings.dataset_file, spool_to=spool_to)

    def policy(self, settings: RunSettings, policy: RolloutPolicy) -> RolloutPolicy:
        """The policy that comes of the settings, changed."""
        return policy

    async def prepare(self, settings: RunSettings, dataset: Dataset, backend: str) -> None:
        """What has to be there before a row starts. Raises UsageProblem."""

    def files(self, settings: RunSettings) -> Sequence[Path]:
        """Files outside the run directory that it writes whole."""
        return ()

    def finish(self, ended: Ended) -> Mapping[str, str]:
        """Further files made of a run's rows, by the names that the summary gives them. RunStopped if the disk
        refuses."""
        return {}


BATCH_RUNNER = RunKind()
