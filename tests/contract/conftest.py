"""Fixtures that every contract test may ask for."""

from tests.contract.environments import backend_name, sandbox

__all__ = ["backend_name", "sandbox"]
