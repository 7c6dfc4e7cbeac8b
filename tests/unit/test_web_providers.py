"""Which search service is used, and what it lacks."""

from typing import Any

import pytest

from tools.services import SEARCH_KEY, ToolSettings
from tools.text import decoded_json
from tools.web.providers import Hit, chosen, complaint_of, hits_of, is_failure, request_for, table


def test_the_order_is_that_of_the_table() -> None:
    assert list(table()) == ["searxng", "brave", "tavily", "exa", "serper", "firecrawl", "ddgs"]
    for name, row in table().items():
        assert row.library or row.query, name
        assert row.library or row.address.startswith("https://") or name == "searxng"


@pytest.mark.parametrize(
    ("settings", "environ", "name", "key_variable"),
    [
        ({}, {}, "ddgs", ""),
        ({}, {"EXA_API_KEY": "k", "SERPER_API_KEY": "k"}, "exa", "EXA_API_KEY"),
        ({}, {"EXA_API_KEY": " ", "SERPER_API_KEY": "k"}, "serper", "SERPER_API_KEY"),
        ({}, {"BRAVE_SEARCH_API_KEY": "k"}, "brave", "BRAVE_SEARCH_API_KEY"),
        ({"search_url": "http://here"}, {"BRAVE_API_KEY": "k"}, "searxng", ""),
        ({"search_url": "http://here"}, {SEARCH_KEY: "k"}, "searxng", SEARCH_KEY),
        ({"search_provider": "tavily"}, {"TAVILY_API_KEY": "k", SEARCH_KEY: "s"}, "tavily", SEARCH_KEY),
        ({"search_provider": "firecrawl", "search_url": "http://here"}, {}, "firecrawl", ""),
        ({"search_provider": "ddgs"}, {SEARCH_KEY: "k"}, "ddgs", ""),
    ],
)
def test_what_is_chosen(settings: dict[str, str], environ: dict[str, str], name: str, key_variable: str) -> None:
    service = chosen(ToolSettings(**settings), environ)  # type: ignore[arg-type]
    assert (service.name, service.key_variable, service.lacks) == (name, key_variable, "")


@pytest.mark.parametrize(
    ("settings", "environ", "lacks"),
    [
        (
            {"search_provider": "brave"},
            {},
            "a key: set BRAVE_API_KEY or BRAVE_SEARCH_API_KEY, or give --search_api_key",
        ),
        ({"search_provider": "brave", "search_url": "http://here"}, {}, "a key: set BRAVE_API_KEY"),
        ({"search_provider": "firecrawl"}, {}, "a key: set FIRECRAWL_API_KEY"),
        ({"search_provider": "searxng"}, {}, "the address of a server: give --search_url"),
        ({}, {SEARCH_KEY: "k"}, "the name of the service: give --search_provider"),
    ],
)
def test_what_is_lacking(settings: dict[str, str], environ: dict[str, str], lacks: str) -> None:
    assert chosen(ToolSettings(**settings), environ).lacks.startswith(lacks)  # type: ignore[arg-type]


def test_an_address_of_ones_own_may_name_the_path_or_not() -> None:
    for own in ("http://here/base", "http://here/base/", "http://here/base/search", "http://here/base/search/"):
        service = chosen(ToolSettings(search_url=own), {})
        request = request_for(service, "a b", 5, 2, "")
        assert (request.method, request.url) == ("GET", "http://here/base/search")
        assert request.query == {"format": "json", "q": "a b", "pageno": 3}
        assert request.headers == {"Accept": "application/json"}


def test_results_of_odd_shapes() -> None:
    rows = table()
    one = {"title": "  a \n b ", "url": " https://e.com/ ", "description": "x" * 5000}
    answers: list[Any] = [{"data": {"web": [one]}}, {"data": [one]}]
    for answer in answers:
        assert hits_of(rows["firecrawl"], answer) == [Hit("a b", "https://e.com/", "x" * 1000 + "…")]
    assert hits_of(rows["brave"], {"web": {"results": [{"url": "https://e.com/", "title": None}]}}) == [
        Hit("", "https://e.com/", "")
    ]
    answers = [None, [], {}, {"web": None}, {"web": {"results": {}}}, {"web": {"results": [None, "x", {"url": 5}]}}]
    for answer in answers:
        assert hits_of(rows["brave"], answer) == []
    assert hits_of(rows["exa"], {"results": [{"url": "http://e", "highlights": [], "text": "t"}]})[0].description == "t"


@pytest.mark.parametrize(
    ("answer", "failed", "words"),
    [
        ({"error": {"code": "X", "detail": "Bad."}}, True, "Bad."),
        ({"error": "Bad."}, True, "Bad."),
        ({"detail": {"error": "Bad."}}, False, "Bad."),
        ({"message": "Bad."}, False, "Bad."),
        ({"success": False}, True, ""),
        ({"success": True, "error": None}, False, ""),
        (None, True, ""),
        ([], True, ""),
    ],
)
def test_what_services_complain_of(answer: object, failed: bool, words: str) -> None:
    assert (is_failure(answer), complaint_of(answer)) == (failed, words)


@pytest.mark.parametrize(
    ("number", "read"),
    [
        ("NaN", None),
        ("Infinity", None),
        ("-Infinity", None),
        ("1e999", None),
        ("-1e999", None),
        ("9" * 5000, None),
        ("1e308", 1e308),
        ("9" * 30, int("9" * 30)),
    ],
)
def test_a_number_that_is_none_is_dropped_and_the_rest_stays(number: str, read: float | None) -> None:
    text = f'{{"score": {number}, "results": [{{"score": {number}, "n": 7, "odd": NaN, "x": "\\ud800"}}]}}'
    for data in (text, text.encode()):
        assert decoded_json(data) == {"score": read, "results": [{"score": read, "n": 7, "odd": None, "x": "\ufffd"}]}
