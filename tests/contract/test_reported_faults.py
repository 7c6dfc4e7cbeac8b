"""Faults that people reported of other runners' sandboxes, where no other test has them."""

import time

import pytest

from tests.contract.environments import ISOLATING, open_sandbox, printed
from tools.environments.base import Limits

ASKING = (
    "python3 -c 'input()'",
    "sudo -k true",
    "GIT_SSH_COMMAND=ssh git clone ssh://git@127.0.0.1:9/x",
    "git -c credential.helper= clone http://127.0.0.1:9/x",
    "ssh -p 9 127.0.0.1",
    "git log --help; man sh",
    "sh -i",
    "read -r answer",
)


@pytest.mark.parametrize("name", ["local", "bubblewrap"])
async def test_commands_that_ask_get_no_answer_and_end(name: str) -> None:
    async with open_sandbox(name) as sandbox:
        for command in ASKING:
            began = time.monotonic()
            assert not (await sandbox.run(command, timeout=15)).timed_out, command
            assert time.monotonic() - began < 10, command
        assert await printed(sandbox, "echo ok") == "ok\n"


@pytest.mark.parametrize("name", ISOLATING)
async def test_what_time_limits_end_takes_no_place_in_the_process_table(name: str) -> None:
    async with open_sandbox(name, limits=Limits(memory_mb=512, pids=64)) as sandbox:
        tree = "for i in 1 2 3 4 5; do sh -c 'sleep 600 & sleep 600' & done; sleep 600"
        for _ in range(8):
            assert (await sandbox.run(tree, timeout=0.2)).timed_out
        assert await printed(sandbox, "for i in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait; echo ok") == "ok\n"
