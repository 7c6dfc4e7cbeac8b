"""Fixtures that every contract test may ask for."""

from tests.contract.environments import backend_name, sandbox
from tests.contract.ssh_server import close_shared

__all__ = ["backend_name", "sandbox"]


def pytest_sessionfinish() -> None:
    """What tests of this process shared ends with them."""
    close_shared()
