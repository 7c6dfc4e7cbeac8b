"""Fixtures that every contract test may ask for; and tests again that a change of the machine's network disturbed."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from _pytest.runner import runtestprotocol

from tests.contract.daytona_server import close_shared as close_daytona
from tests.contract.environments import backend_name, sandbox
from tests.contract.modal_server import close_service as close_modal
from tests.contract.ssh_server import close_shared

__all__ = ["backend_name", "sandbox"]

_CHANGES = 0x1 | 0x10 | 0x40 | 0x100 | 0x400  # RTMGRP_LINK, and addresses and routes of IPv4 and IPv6 (rtnetlink(7))
_TRIES = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/contract --live`."""
    parser.addoption("--live", action="store_true", help="hosted sandboxes of the real services whose keys are set")


def pytest_configure(config: pytest.Config) -> None:
    """The mark, and what `--live` says to all that is started from here."""
    if config.getoption("--live", default=False):
        os.environ["BATCH_RUNNER_TEST_LIVE"] = "1"
    config.addinivalue_line("markers", "still_network: run again if it failed while the machine's network changed")


def pytest_sessionfinish() -> None:
    """What tests of this process shared ends with them."""
    close_shared()
    close_daytona()
    close_modal()


@contextmanager
def _network_watched() -> Iterator[socket.socket]:
    """A socket that can be read once a network device or address has come or gone."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as watch:
        watch.bind((0, _CHANGES))
        watch.setblocking(False)
        yield watch


def _has_changed(watch: socket.socket) -> bool:
    try:
        return bool(watch.recv(65_536))
    except BlockingIOError:
        return False
    except OSError:  # more has changed than it holds
        return True


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test marked `still_network` that failed while the machine's network changed says nothing: Chromium breaks off
    all that is loading when a container of another test comes or goes. It is run again."""
    if item.get_closest_marker("still_network") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for tries in reversed(range(_TRIES)):
        with _network_watched() as watch:
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            if not tries or not any(report.failed for report in reports) or not _has_changed(watch):
                break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
