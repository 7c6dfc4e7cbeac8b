"""What a worker tells of a row that ended."""

import pytest

from batch.messages import Job
from batch.worker import ended_message
from tests.unit.made import row_of_job


@pytest.mark.parametrize(
    ("error_class", "reason", "row_fault"),
    [
        ("internal", "internal", True),
        ("filtered", "filtered", True),
        ("model_error", "bad_request", True),
        ("model_error", "server_error", False),
        ("environment_lost", "environment_lost", False),
    ],
)
def test_which_ends_count_towards_stopping_the_run(error_class: str, reason: str, row_fault: bool) -> None:
    job = Job(prompt_index=0, task_id="t", row_key="id:t", row_sha="s", sample_index=0, attempt=1, line=b"{}")
    row = row_of_job(job, status="failed", error_class=error_class, reason=reason)
    assert ended_message(row, 0, 1).row_fault == row_fault
