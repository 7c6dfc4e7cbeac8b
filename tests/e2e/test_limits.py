"""Endpoints that hang, refuse, limit, cost or go away; what a run may spend; what may not stand in its files."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.against import LOCAL, called, results_of, run_against, said, script
from tests.e2e.program import Program, journal, merged, started_with, statistics, wait_until, write_dataset
from tests.endpoint import EndpointProcess, tool_call

MILLION = 1_000_000


def prompts(count: int) -> list[str]:
    return [f"row {number}" for number in range(count)]


def statuses(rows: dict[str, dict[str, Any]]) -> set[str]:
    return {row["status"] for row in rows.values()}


# --- requests that hang


@contextmanager
def pinging() -> Iterator[str]:
    """A server that keeps every connection alive with comments and never answers; gives its address."""
    server = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def ping(connection: socket.socket) -> None:
        with connection:
            connection.recv(1 << 20)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            while not over.wait(0.2):
                try:
                    connection.sendall(b"8\r\n: ping\n\n\r\n")
                except OSError:
                    return

    def accept() -> None:
        while not over.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=ping, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
    finally:
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)


def assert_timed_out(row: dict[str, Any], tries: int) -> None:
    assert (row["status"], row["reason"], row["requests"]) == ("failed", "request_timeout", tries)
    assert row["retryable"]
    assert row["duration_seconds"] < 50


def test_a_silent_and_a_dripping_endpoint_end_in_time(tmp_path: Path) -> None:
    rules = [
        *script("silent", then={"stall": True}),
        *script("drips", then={"drip": 1.0}),
        *script("once", {"stall": True}),
    ]
    with EndpointProcess(rules, calls=0) as endpoint:
        ran = run_against(
            endpoint.url, tmp_path, ["silent", "drips", "once"], "--request_timeout=1", "--request_retries=2"
        )
    assert ran.code == 1, ran.err
    assert_timed_out(ran.rows["silent"], 2)
    assert_timed_out(ran.rows["drips"], 2)
    assert (ran.rows["once"]["status"], ran.rows["once"]["requests"]) == ("completed", 2)


def test_an_endpoint_that_only_pings_ends_in_time(tmp_path: Path) -> None:
    with pinging() as url:
        ran = run_against(url, tmp_path, ["ping"], "--request_timeout=1", "--request_retries=1")
    assert ran.code == 1, ran.err
    assert_timed_out(ran.rows["ping"], 1)


def test_a_rows_time_ends_a_hanging_request(tmp_path: Path) -> None:
    rules = [*script("stuck", called(tool_call("terminal", {"command": "echo kept"})), then={"stall": True})]
    with EndpointProcess(rules) as endpoint:
        row = {"id": "stuck", "prompt": "stuck", "timeout_seconds": 4}
        ran = run_against(endpoint.url, tmp_path, [row, "fine"])
    assert ran.code == 0, ran.err
    assert (ran.rows["stuck"]["status"], ran.rows["fine"]["status"]) == ("timeout", "completed")
    assert results_of(ran.rows["stuck"])[0]["output"] == "kept\n"
    assert ran.rows["stuck"]["duration_seconds"] < 50


# --- rate limits


@pytest.mark.parametrize("header", ["retry-after", "retry-after-ms"])
def test_the_endpoints_wait_is_obeyed(header: str, tmp_path: Path) -> None:
    wait = {"retry-after": "1", "retry-after-ms": "1000"}[header]
    rules = [{"status": 429, "headers": {header: wait}, "times": 2}]
    with EndpointProcess(rules, calls=0) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["one"], "--request_retries=1")
        times = endpoint.stats()["times"]
    assert ran.code == 0, ran.err
    assert (ran.rows["one"]["requests"], ran.rows["one"]["api_calls"]) == (3, 1)
    assert [later - before >= 1 for before, later in pairwise(times)] == [True, True]
    assert times[-1] - times[0] < 40


def test_many_rows_against_five_requests_a_second(tmp_path: Path) -> None:
    with EndpointProcess([{"per_second": 5, "status": 429}], calls=0) as endpoint:
        ran = run_against(endpoint.url, tmp_path, prompts(11), "--request_retries=1", "--num_workers=2")
        stats = endpoint.stats()
    assert ran.code == 0, ran.err
    assert statuses(ran.rows) == {"completed"}
    assert stats["statuses"]["200"] == 11
    assert stats["statuses"].get("429", 0) < 40


def test_waiting_for_a_limit_is_no_time_of_the_rows(tmp_path: Path) -> None:
    rules = [{"status": 429, "headers": {"Retry-After": "5"}, "times": 1}]
    with EndpointProcess(rules, calls=0) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["one"], "--timeout=4")
    assert ran.code == 0, ran.err


def test_a_limit_too_long_to_wait_for_stops_the_run(tmp_path: Path) -> None:
    rules = [{"status": 429, "headers": {"Retry-After": "100"}}]
    with EndpointProcess(rules, calls=0) as endpoint:
        ran = run_against(endpoint.url, tmp_path, prompts(40), "--rate_limit_wait=20")
        requests = endpoint.stats()["requests"]
    assert ran.code == 3, ran.err
    assert requests <= 16
    assert statuses(ran.rows) == {"stopped"}


# --- refusals of key or model


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ({"status": 429, "error": {"code": "insufficient_quota", "message": "pay first"}}, "quota"),
        ({"status": 402}, "quota"),
        ({"status": 403}, "auth"),
        (
            {"status": 400, "error": {"message": "max_tokens is too large: 99999. This model supports at most 8192"}},
            "model",
        ),
    ],
)
def test_a_refused_key_or_model_stops_the_run(refusal: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with EndpointProcess([refusal]) as endpoint:
        ran = run_against(endpoint.url, tmp_path, prompts(60), "--concurrency=8")
        requests = endpoint.stats()["requests"]
    assert ran.code == 3, ran.err
    assert requests <= 8
    assert {(row["status"], row["reason"]) for row in ran.rows.values()} == {("stopped", reason)}
    assert ran.out.splitlines()[-1].endswith("--resume")


def test_a_refused_key_leaves_all_rows_to_be_run(tmp_path: Path) -> None:
    with EndpointProcess([{"status": 401}], calls=0) as endpoint:
        first = run_against(endpoint.url, tmp_path, prompts(400), "--concurrency=8", "--num_workers=2")
        refused = endpoint.stats()["requests"]
        endpoint.set_rules([])
        endpoint.reset()
        second = run_against(endpoint.url, tmp_path, prompts(400), "--concurrency=8", "--num_workers=2", "--resume")
        stats = endpoint.stats()
    assert (first.code, second.code) == (3, 0), second.err
    assert refused <= 8
    assert set(stats["prompts"].values()) == {1}
    assert len(stats["prompts"]) == len(merged(second.directory)) == 400
    assert statistics(second.directory)["by_status"] == {"completed": 400}
    assert {row["attempt"] for row in journal(second.directory)} == {1}


def test_a_key_that_worked_is_tried_once_more(tmp_path: Path) -> None:
    names = [f"row {number:02}" for number in range(40)]
    with EndpointProcess([{"prompt": "row (0[4-9]|[123].)", "status": 401}], calls=0) as endpoint:
        sooner = started_with(tmp_path, "import agent.models.gate as gate\ngate.CONFIRM_AFTER = 2.0\n")
        ran = run_against(endpoint.url, tmp_path, names, "--concurrency=4", PYTHONPATH=sooner)
        stats = endpoint.stats()
    assert ran.code == 3, ran.err
    assert stats["statuses"]["401"] <= 4 + 1
    assert stats["times"][-1] - stats["times"][-2] >= 1.9
    assert Counter(row["status"] for row in ran.rows.values())["completed"] == 4


def test_twenty_refused_rows_stop_the_run(tmp_path: Path) -> None:
    with EndpointProcess([{"status": 400, "error": {"message": "something odd"}}]) as endpoint:
        ran = run_against(endpoint.url, tmp_path, prompts(100), "--concurrency=4")
        requests = endpoint.stats()["requests"]
    assert ran.code == 3, ran.err
    assert requests <= 24
    assert [row["status"] for row in ran.rows.values()].count("failed") >= 20


def test_answered_rows_between_refused_ones_let_the_run_go_on(tmp_path: Path) -> None:
    rules = [{"prompt": "[12]$", "status": 400, "error": {"message": "something odd"}}, said("no thought, discarded")]
    names = [f"row {number}-{number % 3}" for number in range(36)]
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, names, "--concurrency=4", "--keep_no_reasoning=false")
    assert ran.code == 1, ran.err
    assert statistics(ran.directory)["by_status"] == {"discarded": 12, "failed": 24}


# --- budget


def test_the_budget_of_a_run(tmp_path: Path) -> None:
    rule = {"message": {"content": "done"}, "usage": {"prompt_tokens": MILLION, "completion_tokens": 0}}
    flags = ("--price_in=1", "--price_out=1", "--num_workers=4", "--concurrency=4", "--batch_size=2")
    with EndpointProcess([rule]) as endpoint:
        first = run_against(endpoint.url, tmp_path, prompts(20), *flags, "--max_cost=5")
        requests = endpoint.stats()["requests"]
        second = run_against(endpoint.url, tmp_path, prompts(20), *flags, "--max_cost=50", "--resume")
        stats = endpoint.stats()
    assert first.code == 3, first.err
    assert 5 <= requests <= 9
    assert second.code == 0, second.err
    assert len(merged(second.directory)) == 20
    assert stats["requests"] == 20 + list(stats["prompts"].values()).count(2)
    assert json.loads((second.directory / "metrics.json").read_bytes())["cost_usd"] == stats["requests"]


def test_what_is_not_reported_counts_in_the_budget_of_a_resume_too(tmp_path: Path) -> None:
    flags = ("--price_in=1000", "--price_out=1000", "--concurrency=1", "--max_cost=5")
    with EndpointProcess([{"message": {"content": "done"}, "usage": None}]) as endpoint:
        first = run_against(endpoint.url, tmp_path, prompts(40), *flags)
        requests = endpoint.stats()["requests"]
        second = run_against(endpoint.url, tmp_path, prompts(40), *flags, "--resume")
        assert endpoint.stats()["requests"] == requests
    assert (first.code, second.code) == (3, 3), first.err
    assert 0 < requests < 40
    told = json.loads((second.directory / "metrics.json").read_bytes())
    assert (told["cost_usd"], told["usage"]["total_tokens"], told["unreported"]["replies"]) == (0.0, 0, requests)
    assert told["unreported"]["cost_usd"] >= 5
    assert f"{requests} replies without usage" in second.out
    assert all(row["cost_usd"] == 0.0 for row in second.rows.values())


def test_an_unknown_price_and_a_budget_are_refused(tmp_path: Path) -> None:
    with EndpointProcess() as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["one"], "--max_cost=5")
        requests = endpoint.stats()["requests"]
    assert ran.code == 2
    assert "price" in ran.err
    assert requests == 0


def test_replies_that_cannot_be_used_are_paid_for(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 90_000, "completion_tokens": 10_000, "total_tokens": 100_000}
    rule = called(tool_call("terminal", "{oops"), usage=usage)
    with EndpointProcess([rule]) as endpoint:
        ran = run_against(endpoint.url, tmp_path, prompts(10), "--concurrency=1", "--max_total_tokens=500000")
        requests = endpoint.stats()["requests"]
    assert ran.code == 3, ran.err
    assert requests == 5
    assert {row["status"] for row in ran.rows.values()} == {"partial", "stopped"}
    assert sum(row["usage"]["total_tokens"] for row in ran.rows.values()) == 500_000


def test_malformed_replies_are_paid_for(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 100_000, "completion_tokens": 0, "total_tokens": 100_000}
    with EndpointProcess([{"body": {"choices": [], "usage": usage}}]) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["one"], "--max_total_tokens=200000", "--request_retries=5")
        requests = endpoint.stats()["requests"]
    assert ran.code == 3, ran.err
    assert requests == 2
    assert ran.rows["one"]["status"] == "stopped"
    assert ran.rows["one"]["usage"]["total_tokens"] == 200_000


# --- many at once, and always the same


def test_the_concurrency_that_was_asked_for_is_reached_and_not_passed(tmp_path: Path) -> None:
    with EndpointProcess([{"together": 64}]) as endpoint:
        ran = run_against(endpoint.url, tmp_path, prompts(140), "--concurrency=64", "--num_workers=2")
        stats = endpoint.stats()
    assert ran.code == 0, ran.err
    assert stats["peak"] == 64
    assert stats["requests"] == len(merged(ran.directory)) == 140


def test_deterministic_runs_are_equal_byte_for_byte(tmp_path: Path) -> None:
    with EndpointProcess(calls=2) as endpoint:
        texts = []
        for number in range(2):
            home = tmp_path / str(number)
            home.mkdir()
            ran = run_against(
                endpoint.url,
                home,
                prompts(12),
                "--deterministic",
                "--container_backend=bubblewrap",
                "--distribution=default",
                "--allow_missing_toolsets",
                "--batch_size=3",
            )
            assert ran.code == 0, ran.err
            texts.append([_timeless(row) for row in merged(ran.directory)])
        bodies = endpoint.stats()["bodies"]
    assert texts[0] == texts[1]
    assert {body["temperature"] for body in bodies} == {0}
    assert {body["seed"] for body in bodies} == {0}


def _timeless(row: dict[str, Any]) -> str:
    """The row as text, in its own order of keys, without what a clock decides."""
    return json.dumps({**row, "duration_seconds": 0, "metadata": {**row["metadata"], "timestamp": "", "batch_num": 0}})


# --- secrets


def test_no_secret_stands_in_the_files_of_a_run(tmp_path: Path) -> None:
    key, secret, user = "sk-live-0123456789abcdef", "testsecret-123", "somebody:paid-password-77"
    rules = [
        *script(
            "env",
            called(
                tool_call("terminal", {"command": "env; cat /proc/self/environ; tr '\\0' '\\n' < /proc/$PPID/environ"})
            ),
            said("shown"),
        ),
        *script("tells", said(f"your key is {key} and {secret}")),
        *script("echoes", then={"status": 500, "error": {"message": f"bad key {key} for {user}"}}),
        *script(
            "asks",
            called(tool_call("terminal", {"command": f'echo {secret}; echo \'{{"k": "{key}"}}\' > f; cat f'})),
            said("ok"),
        ),
    ]
    rows: list[Any] = [
        "env",
        "tells",
        "echoes",
        "asks",
        {"id": "given", "prompt": f"use {secret}", "metadata": {"k": secret}},
    ]
    with EndpointProcess(rules) as endpoint:
        url = endpoint.url.replace("http://", f"http://{user}@")
        ran = run_against(
            url,
            tmp_path,
            rows,
            "--request_retries=1",
            "--api_key=" + key,
            "--verbose",
            "--output_format=sharegpt,json,turns",
            API_KEY=secret,
            DB_URL="postgres://root:hunter2-hunter2@db/x",
            SHORT_TOKEN="on",
        )
    assert set(ran.rows) == {"env", "tells", "echoes", "asks", "given"}
    everything = ran.bytes()
    for hidden in (key, secret, user, "paid-password-77", "hunter2-hunter2"):
        assert hidden.encode() not in everything, hidden
    assert ran.rows["tells"]["final_response"] == "your key is [REDACTED:BATCH_RUNNER_API_KEY] and [REDACTED:API_KEY]"
    assert "[REDACTED:" in ran.rows["echoes"]["error"]
    assert statistics(ran.directory)["redactions"] >= 5


@pytest.mark.parametrize("flags", [(), ("--json_summary",)])
def test_a_refusal_that_quotes_the_key_is_not_passed_on(flags: tuple[str, ...], tmp_path: Path) -> None:
    key = "sk-live-0123456789abcdef"
    with EndpointProcess([{"status": 401, "error": {"message": f"Incorrect API key provided: {key}"}}]) as endpoint:
        ran = run_against(endpoint.url, tmp_path, prompts(4), "--provider=openai", *flags, OPENAI_API_KEY=key)
        assert endpoint.stats()["keys"] == {key: endpoint.stats()["requests"]}
    assert ran.code == 3, ran.err
    assert key.encode() not in ran.bytes()
    assert "Incorrect API key provided: [REDACTED:OPENAI_API_KEY]" in ran.out + ran.err


# --- an endpoint that goes away


def test_nobody_there_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    ran = run_against(f"http://127.0.0.1:{port}/v1", tmp_path, prompts(50))
    assert ran.code == 3, ran.err
    assert statuses(ran.rows) == {"stopped"}
    assert {row["reason"] for row in ran.rows.values()} == {"unreachable"}
    assert max(row["duration_seconds"] for row in ran.rows.values()) < 30
    assert "connection" in ran.err + ran.out


class Mortal:
    """An endpoint that can be killed and come back at its address. In its first life it answers twelve rows."""

    def __init__(self) -> None:
        self._life = ExitStack()
        self.url = self._born(0, [{"prompt": "row (1[2-9]|[2-9].)", "hold": True}])

    def die(self) -> None:
        self._life.close()

    def come_back(self) -> None:
        self._born(int(self.url.rpartition(":")[2].removesuffix("/v1")), [])

    def _born(self, port: int, rules: list[dict[str, Any]]) -> str:
        return self._life.enter_context(EndpointProcess(rules, calls=0, port=port)).url


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    endpoint = Mortal()
    yield endpoint
    endpoint.die()


def started(mortal: Mortal, home: Path, count: int, *flags: str) -> Program:
    dataset = write_dataset(home / "r.jsonl", [{"id": each, "prompt": each} for each in prompts(count)])
    return Program(
        "--model=m", f"--base_url={mortal.url}", f"--dataset_file={dataset}", f"--output_dir={home}", "--run_name=r",
        "--keep_no_reasoning", "--num_workers=2", "--concurrency=4", *LOCAL, *flags, home=home,
    )  # fmt: skip


def test_an_endpoint_that_comes_back_costs_no_row(mortal: Mortal, tmp_path: Path) -> None:
    with started(mortal, tmp_path, 80) as program:
        wait_until(lambda: len(journal(tmp_path / "r")) >= 8)
        mortal.die()
        time.sleep(1.5)
        mortal.come_back()
        code, _, err = program.end()
    assert code == 0, err
    assert {row["status"] for row in journal(tmp_path / "r")} == {"completed"}
    assert len(merged(tmp_path / "r")) == 80


def test_an_endpoint_that_stays_away_stops_the_run(mortal: Mortal, tmp_path: Path) -> None:
    with started(mortal, tmp_path, 80, "--endpoint_wait=2", "--request_retries=3") as program:
        wait_until(lambda: len(journal(tmp_path / "r")) >= 8)
        mortal.die()
        began = time.monotonic()
        code, _, err = program.end()
    assert code == 3, err
    assert time.monotonic() - began > 1.5
    rows = journal(tmp_path / "r")
    assert {row["status"] for row in rows} == {"completed", "stopped"}
    mortal.come_back()
    with started(mortal, tmp_path, 80, "--resume") as program:
        code, _, err = program.end()
    assert code == 0, err
    assert len(merged(tmp_path / "r")) == 80
    assert (tmp_path / "r" / "failures.jsonl").read_bytes() == b""
