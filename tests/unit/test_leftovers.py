"""Sandboxes that could not be removed are tried again, for a while, and named then."""

import asyncio

import pytest

from batch import leftovers, qualify
from batch.leftovers import Leftovers, unremoved
from tools.environments.local import LocalBackend


class Renting(LocalBackend):
    """A backend that fails so many times to remove a sandbox."""

    def __init__(self, **failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.tried: list[str] = []

    def unremoved(self) -> tuple[str, ...]:
        return ("a",)

    async def remove(self, name: str) -> bool:
        self.tried.append(name)
        self.failures[name] -= 1
        return self.failures[name] < 0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_PAUSES", (0.0,) * 4)


async def test_it_is_tried_several_times() -> None:
    backend = Renting(a=3, b=0)
    there = Leftovers(backend)
    there.add(["a", "b"])
    assert await there.close() == ()
    assert sorted(backend.tried) == ["a"] * 4 + ["b"]


async def test_what_is_left_is_named() -> None:
    there = Leftovers(Renting(b=1000, a=1000, c=0))
    there.add("cba")
    assert await there.close() == ("a", "b")


async def test_at_the_end_all_are_tried_once_more() -> None:
    backend = Renting(a=4)
    there = Leftovers(backend)
    there.add("a")
    await asyncio.wait(there._tries.values())
    assert len(backend.tried) == 4
    assert await there.close() == ()


async def test_who_is_in_a_hurry_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_PAUSES", (1000.0,))
    backend = Renting(a=0, b=0)
    there = Leftovers(backend)
    there.add("a")
    there.give_up()
    there.add("b")
    assert await there.close() == ("a", "b")
    assert backend.tried == []


async def test_nothing_is_waited_for_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_PAUSES", (1000.0,))
    monkeypatch.setattr(leftovers, "_SECONDS", 0.05)
    there = Leftovers(Renting(a=0))
    there.add("a")
    assert await there.close() == ("a",)


def test_most_backends_have_none() -> None:
    assert unremoved(LocalBackend()) == ()
    assert unremoved(Renting()) == ("a",)


async def test_a_backend_is_not_fit_whose_sandboxes_stay() -> None:
    findings: list[qualify.Finding] = []
    await qualify._close(qualify._Open(Renting()), findings)
    assert [(each.state, each.note) for each in findings] == [("failed", "could not be removed: a")]
