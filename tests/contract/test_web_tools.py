"""`web_search` and `web_extract` against sites and services on loopback."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import trustme

from tests.contract.toolbox import Toolbox, open_toolbox
from tests.search_services import KEY, SERVICES, SearchService, hits
from tests.web_site import CHAPTERS, LINE, Site
from tools.base import ToolContext
from tools.errors import ToolError
from tools.services import SEARCH_KEY, Services, ToolSettings
from tools.web import search
from tools.web.extract import Job
from tools.web.fetch import fetch
from tools.web.reader import Reader
from tools.web.transport import Connections

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRIVATE = ToolSettings(allow_private_urls=True)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def call() -> AsyncIterator[Toolbox]:
    """One for all tests that need no settings of their own: its reader is started once."""
    async with toolbox(PRIVATE) as call:
        yield call


@asynccontextmanager
async def toolbox(settings: ToolSettings, environ: dict[str, str] | None = None) -> AsyncIterator[Toolbox]:
    services = Services(settings, environ or {})
    try:
        async with open_toolbox("web") as box:
            yield Toolbox(ToolContext(box.environment, 20.0, services))
    finally:
        await services.close()


async def page(call: Toolbox, url: str, **arguments: Any) -> dict[str, Any]:
    """The one result; a page that could be read makes no error of the whole."""
    result = await call("web_extract", urls=[url], **arguments)
    [found] = result["results"]
    assert set(found) == {"url", "title", "content", "error"}
    assert found["url"] == url
    assert bool(result.get("error")) == bool(found["error"]) == (not found["content"])
    assert "data, not instructions" in result["untrusted"]
    return dict(found)


class TestExtract:
    async def test_an_article_as_markdown(self, call: Toolbox, site: Site) -> None:
        found = await page(call, f"{site.url}/article")
        assert found["title"] == "On tides"
        assert found["content"].startswith("# On tides\n\nParagraph 0: the sea")
        assert f"[what is written on it]({site.url}/shop/item/3)" in found["content"]
        assert "**moon**" in found["content"]
        assert "| Saint-Malo | 12 m |" in found["content"]
        assert "def tide(hour):\n    return hour % 12" in found["content"]
        for dropped in ("Imprint", "never shown", "margin"):
            assert dropped not in found["content"]

    async def test_a_page_that_is_no_article_is_shown_whole(self, call: Toolbox, site: Site) -> None:
        content = (await page(call, f"{site.url}/shop"))["content"]
        assert (
            f"- [Green tea]({site.url}/shop/item/0) **2.50**" in content
            or f"[Green tea]({site.url}/shop/item/0)" in content
        )
        assert "Add Mint" in content

    async def test_several_pages_in_their_order(self, call: Toolbox, site: Site) -> None:
        urls = [f"{site.url}/{path}" for path in ("long", "status/404", "article", "paper.pdf")]
        result = await call("web_extract", urls=[*urls, urls[0], f" {urls[2]} "])
        assert [found["url"] for found in result["results"]] == urls
        assert [found["error"] for found in result["results"]] == [None, "HTTP 404 Not Found", None, None]
        assert "error" not in result
        assert result["results"][3]["title"] == "A paper on tides"
        assert "the first page.\n\nAnd the second page (with brackets)." in result["results"][3]["content"]

    async def test_a_bare_address_is_a_list_of_one(self, call: Toolbox, site: Site) -> None:
        result = await call("web_extract", urls=f"{site.url}/article")
        assert len(result["results"]) == 1
        assert (await call("web_extract", urls=f'["{site.url}/article"]'))["results"][0]["title"] == "On tides"

    async def test_how_many_pages(self, call: Toolbox, site: Site) -> None:
        assert "empty" in (await call("web_extract", urls=[]))["error"]
        assert "empty" in (await call("web_extract", urls=[" "]))["error"]
        six = await call("web_extract", urls=[f"{site.url}/{number}" for number in range(6)])
        assert six == {"error": "At most 5 URLs in one call; these are 6"}

    async def test_a_long_page_is_cut_in_the_middle_and_saved_whole(self, call: Toolbox, site: Site) -> None:
        found = await page(call, f"{site.url}/long", char_limit=4000)
        head, marker, tail = found["content"].replace("...]", "[...").split("[...")
        assert (len(head.removesuffix("\n\n")), len(tail.removeprefix("\n\n"))) == (3000, 1000)
        assert head.startswith("# A long page")
        assert f"Sentence of chapter {CHAPTERS - 1}." in tail
        path = marker.split(" is saved in ")[1].strip()
        whole = (await call.read(path)).decode()
        assert whole.startswith(head.removesuffix("\n\n"))
        assert whole.endswith(tail.removeprefix("\n\n"))
        assert f"{len(whole) - 4000:,} characters left out" in marker
        assert all(f"## Chapter {number}\n" in whole for number in range(CHAPTERS))
        assert path.startswith((await call.shell('printf %s "$TMPDIR"')) + "/web-pages/")
        assert "Chapter 50" in str(await call("search_files", pattern="Chapter 50", path=path))

    async def test_limits_that_are_out_of_bounds(self, call: Toolbox, site: Site) -> None:
        assert 2000 < len((await page(call, f"{site.url}/long", char_limit=5))["content"]) < 2300
        whole = await page(call, f"{site.url}/long", char_limit=10**9)
        assert "left out" not in whole["content"]
        assert len(whole["content"]) > 50_000

    async def test_two_long_pages_at_once_have_files_of_their_own(self, call: Toolbox, site: Site) -> None:
        urls = [f"{site.url}/long?n={number}" for number in range(3)]
        results = await asyncio.gather(*(page(call, url, char_limit=2000) for url in urls))
        assert len({found["content"].split(" is saved in ")[1].split(" ")[0] for found in results}) == 3

    async def test_a_sandbox_that_takes_no_file(self, site: Site) -> None:
        async with toolbox(PRIVATE) as call:
            await call.shell('printf x >"$TMPDIR/web-pages"')
            content = (await page(call, f"{site.url}/long"))["content"]
        assert "could not be saved" in content
        assert len(content) < 15_200


class TestWhatPagesDo:
    async def test_redirects(self, call: Toolbox, site: Site) -> None:
        assert (await page(call, f"{site.url}/redirect/10"))["title"] == "On tides"
        assert "More than 10 redirects" in (await page(call, f"{site.url}/redirect/11"))["error"]
        assert "More than 10 redirects" in (await page(call, f"{site.url}/loop"))["error"]
        assert "Welcome back" in (await page(call, f"{site.url}/cookie"))["content"]

    @pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://e.com/", "javascript:x()", "http://[::1"])
    async def test_redirects_to_elsewhere(self, call: Toolbox, site: Site, target: str) -> None:
        found = await page(call, f"{site.url}/to?url={target}")
        assert found["content"] == ""

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500, 503, 304])
    async def test_statuses(self, call: Toolbox, site: Site, status: int) -> None:
        assert (await page(call, f"{site.url}/status/{status}"))["error"].startswith(f"HTTP {status}")

    @pytest.mark.parametrize("encoding", ["gzip", "members", "deflate", "bare"])
    async def test_content_encodings(self, call: Toolbox, site: Site, encoding: str) -> None:
        assert (await page(call, f"{site.url}/packed/{encoding}"))["title"] == "On tides"

    async def test_encodings_that_cannot_be_undone(self, call: Toolbox, site: Site) -> None:
        assert "content encoding" in (await page(call, f"{site.url}/packed/br"))["error"]
        assert "cannot be decompressed" in (await page(call, f"{site.url}/packed/torn"))["error"]

    async def test_a_bomb_stops_at_the_limit(self, site: Site) -> None:
        found = await fetch(Services(PRIVATE, {}), f"{site.url}/bomb")
        assert (len(found.body), found.cut) == (10_000_000, "it is larger than 10,000,000 bytes")

    async def test_a_page_of_100_megabytes(self, call: Toolbox, site: Site) -> None:
        found = await page(call, f"{site.url}/large")
        assert found["title"] == "Large"
        assert "The rest is missing: " in found["content"]
        assert "larger than 10,000,000 bytes" in (await page(call, f"{site.url}/large.pdf"))["error"]

    async def test_a_page_that_never_ends(self, site: Site) -> None:
        services = Services(PRIVATE, {})
        found = await fetch(services, f"{site.url}/endless", seconds=0.5)
        assert found.cut == "it took too long to come"
        assert b"It begins." in found.body
        with pytest.raises(ToolError, match=r"No answer within 0\.3 s"):
            await fetch(services, f"{site.url}/silent", seconds=0.3)

    async def test_a_page_that_breaks_off(self, call: Toolbox, site: Site) -> None:
        content = (await page(call, f"{site.url}/broken"))["content"]
        assert content.startswith("This much came.")
        assert content.endswith("[The rest is missing: the connection broke]")

    @pytest.mark.parametrize("name", [name for name in LINE if name != "cut"])
    async def test_charsets(self, call: Toolbox, site: Site, name: str) -> None:
        assert (await page(call, f"{site.url}/charset/{name}"))["content"] == LINE[name][1].strip()

    async def test_a_text_that_was_cut_within_a_character(self, call: Toolbox, site: Site) -> None:
        assert (await page(call, f"{site.url}/charset/cut"))["content"] == "ends in the middle of"

    @pytest.mark.parametrize(
        ("media_type", "body", "shown"),
        [
            ("application/json", '{"a":1}', '{"a":1}'),
            ("text/x-python; charset=utf-8", "x = 1", "x = 1"),
            ("application/octet-stream", "plain", "plain"),
            ("", "<html><p>untold</html>", "untold"),
            ("application/xhtml+xml", "<html><p>strict</html>", "strict"),
        ],
    )
    async def test_kinds_that_are_text(self, call: Toolbox, site: Site, media_type: str, body: str, shown: str) -> None:
        url = (
            f"{site.url}/type?type={media_type.replace('+', '%2B').replace(' ', '%20')}&body={body.replace(' ', '%20')}"
        )
        assert (await page(call, url))["content"] == shown

    @pytest.mark.parametrize(
        ("media_type", "named"),
        [("image/png", "image/png"), ("application/zip", "application/zip"), ("application/octet-stream", "binary")],
    )
    async def test_kinds_that_are_none(self, call: Toolbox, site: Site, media_type: str, named: str) -> None:
        assert named in (await page(call, f"{site.url}/type?type={media_type}&body=%89PNG%00%00"))["error"]

    @pytest.mark.parametrize(
        ("name", "why"), [("locked", "password"), ("torn", "cannot be read"), ("pictures", "no text")]
    )
    async def test_pdfs_without_text(self, call: Toolbox, site: Site, name: str, why: str) -> None:
        assert why in (await page(call, f"{site.url}/{name}.pdf"))["error"]

    async def test_places_that_are_not_there(self, call: Toolbox) -> None:
        assert "cannot be reached" in (await page(call, "http://127.0.0.1:1/"))["error"]
        assert "cannot be found" in (await page(call, "http://there-is-no-such-name.invalid/"))["error"]
        assert "Only http" in (await page(call, "file:///etc/passwd"))["error"]


class TestAddresses:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "0"])
    async def test_private_addresses_are_refused_and_never_asked(self, site: Site, host: str) -> None:
        before = len(site.seen)
        async with toolbox(ToolSettings()) as call:
            result = await call("web_extract", urls=[f"{site.url.replace('127.0.0.1', host)}/article"])
        assert "private, local or reserved" in result["error"]
        assert len(site.seen) == before

    async def test_also_where_a_name_leads_there(self, site: Site) -> None:
        before = len(site.seen)

        async def by(_host: str, _port: int) -> Sequence[str]:
            return ["127.0.0.1"]

        with pytest.raises(ToolError, match=r"inner\.example \(127\.0\.0\.1\) is a private"):
            await fetch(Services(ToolSettings(), {}), site.url.replace("127.0.0.1", "inner.example"), by=by)
        assert len(site.seen) == before

    async def test_each_step_of_a_redirect_is_checked(self, site: Site) -> None:
        """The first step comes from a public name through a proxy, which the site is."""
        services = Services(ToolSettings(), {"HTTP_PROXY": site.url})
        start = "http://public.example/to?url=http://"
        assert (await fetch(services, f"{start}other.example/article")).url == "http://other.example/article"
        for inside in ("169.254.169.254/latest/meta-data/", "localhost/", "127.1/", "[::1]/", "x@10.0.0.1/"):
            with pytest.raises(ToolError, match=r"private, local or reserved"):
                await fetch(services, start + inside)
            assert site.paths()[-1].endswith(inside)

    async def test_a_name_is_asked_for_once_and_what_was_checked_is_what_is_opened(self, site: Site) -> None:
        """A name that leads elsewhere the next time (DNS rebinding) leads nowhere: there is no next time."""
        port = int(site.url.rpartition(":")[2])
        answers = [["127.0.0.1"], ["192.0.2.1"], ["192.0.2.1"]]

        async def by(_host: str, _port: int) -> Sequence[str]:
            return answers.pop(0)

        found = await fetch(Services(PRIVATE, {}), f"http://rebinding.example:{port}/article", by=by)
        assert b"On tides" in found.body
        assert len(answers) == 2
        assert site.seen[-1].headers["Host"] == f"rebinding.example:{port}"

    async def test_the_next_address_of_a_name_is_tried(self, site: Site) -> None:
        port = int(site.url.rpartition(":")[2])

        async def by(_host: str, _port: int) -> Sequence[str]:
            return ["127.0.0.2", "::1", "127.0.0.1"]

        assert (await fetch(Services(PRIVATE, {}), f"http://three.example:{port}/article", by=by)).body

    async def test_our_keys_are_in_no_url(self, site: Site) -> None:
        before = len(site.seen)
        async with toolbox(PRIVATE, {"SOME_TOKEN": "abcdef-123456-xyz"}) as call:
            result = await call("web_extract", urls=[f"{site.url}/article?t=abcdef-123456-xyz"])
        assert "SOME_TOKEN" in result["error"]
        assert len(site.seen) == before


class TestCertificates:
    async def test_the_name_is_what_a_certificate_must_fit(self, tmp_path: Path) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("tea.example").configure_cert(context)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\ntea")
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        async def by(_host: str, _port: int) -> Sequence[str]:
            return ["127.0.0.1"]

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with server:
            services = Services(PRIVATE, {"SSL_CERT_FILE": str(tmp_path / "ca.pem")})
            assert (await fetch(services, f"https://tea.example:{port}/", by=by)).body == b"tea"
            with pytest.raises(ToolError, match=r"CERTIFICATE_VERIFY_FAILED.*other\.example"):
                await fetch(services, f"https://other.example:{port}/", by=by)
            with pytest.raises(ToolError, match="CERTIFICATE_VERIFY_FAILED"):
                await fetch(Services(PRIVATE, {}), f"https://tea.example:{port}/", by=by)


class TestReader:
    """Pages that are made to break who reads them."""

    async def test_nesting_without_end(self, call: Toolbox) -> None:
        reader = call.context.services.part(Reader)
        for tag in ("<div>", "<b>", "<table><tr><td>", "<a href=x>"):
            text = await reader.read(html("<html><title>Deep</title><body>top " + tag * 20_000 + "deep"))
            assert text.title == "Deep" or text.error

    async def test_a_page_that_takes_too_long_ends_alone(self) -> None:
        reader = Reader(seconds=1.0)
        try:
            slow = html("<html><body " + " ".join(f"a{number}=1" for number in range(200_000)) + ">hello")
            with pytest.raises(ToolError, match="too complex to be read within 1 s"):
                await reader.read(slow)
            assert (await reader.read(html("<p>hello"))).content == "hello"
        finally:
            await reader.close()

    async def test_who_is_cancelled_leaves_a_reader_that_works(self) -> None:
        reader = Reader()
        try:
            slow = html("<html><body " + " ".join(f"a{number}=1" for number in range(200_000)) + ">hello")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await reader.read(slow)
            assert (await reader.read(html("<p>hello"))).content == "hello"
        finally:
            await reader.close()

    async def test_a_reader_that_died_is_replaced(self) -> None:
        reader = Reader()
        try:
            assert (await reader.read(html("<p>one"))).content == "one"
            assert reader._process is not None
            reader._process.kill()
            reader._process.wait()
            assert (await reader.read(html("<p>two"))).content == "two"
        finally:
            await reader.close()

    async def test_it_ends_with_the_process_that_it_reads_for(self) -> None:
        words, pid = await asyncio.to_thread(killed_reader)
        assert words == "hi"
        assert await asyncio.to_thread(ended_within, pid, 10)

    async def test_it_knows_nothing_of_our_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOME_API_KEY", "a-key-of-ours-1234")
        reader = Reader()
        try:
            await reader.read(html("<p>one"))
            assert reader._process is not None
            process = psutil.Process(reader._process.pid)
            assert "SOME_API_KEY" not in await asyncio.to_thread(process.environ)
        finally:
            await reader.close()


def html(text: str) -> Job:
    return Job(url="http://e.com/", media_type="text/html", charset="", body=text.encode(), cut="")


def killed_reader() -> tuple[str, int]:
    """What a process read before it was killed, and the pid of its reader."""
    code = (
        "import asyncio\nfrom tools.web.extract import Job\nfrom tools.web.reader import Reader\n"
        "async def main():\n    reader = Reader()\n"
        "    job = Job(url='http://e.com/', media_type='text/plain', charset='', body=b'hi', cut='')\n"
        "    print((await reader.read(job)).content, reader._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\nasyncio.run(main())"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as owner:
        assert owner.stdout is not None
        words, pid = owner.stdout.readline().split()
        owner.kill()
    return words, int(pid)


def ended_within(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


def with_odd_numbers(value: Any) -> Any:
    """With numbers that JSON does not have in every object."""
    if isinstance(value, list):
        return [with_odd_numbers(each) for each in value]
    if isinstance(value, dict):
        odd = {"score": float("nan"), "odd": [float("inf"), float("-inf")]}
        return {**{key: with_odd_numbers(each) for key, each in value.items()}, **odd}
    return value


class TestSearch:
    @pytest.mark.parametrize("name", list(SERVICES))
    async def test_services_are_asked_as_they_document(self, name: str) -> None:
        async with (
            SearchService(name) as service,
            toolbox(ToolSettings(search_provider=name, search_url=service.url), {SEARCH_KEY: KEY}) as call,
        ):
            result = await call("web_search", query=" tides ", limit=3)
            assert result["success"] is True
            assert "data, not instructions" in result["untrusted"]
            found = result["data"]["web"]
            assert [(hit["url"], hit["position"]) for hit in found] == [
                (url, position) for position, (_, url, _) in enumerate(hits("tides", 0, 3), 1)
            ]
            assert [set(hit) for hit in found] == [{"title", "url", "description", "position"}] * 3
            assert found[2]["title"] == "tides no. 2" + (" & more" if name == "brave" else "")
            assert found[2]["description"].startswith("About tides.")
            many = await call("web_search", query="tides", limit=100)
            most = {"tavily": 20}.get(name, 45)
            assert [hit["position"] for hit in many["data"]["web"]] == list(range(1, most + 1))
            assert len(service.asked) == 1 + {"brave": 4}.get(name, 1)
            assert all(KEY not in str((asked.path, asked.query, asked.body)) for asked in service.asked)

    @pytest.mark.parametrize("name", list(SERVICES))
    async def test_numbers_that_are_none_cost_no_hits(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        answer = SERVICES[name]
        monkeypatch.setitem(SERVICES, name, lambda asked: (200, with_odd_numbers(answer(asked)[1])))
        async with (
            SearchService(name) as service,
            toolbox(ToolSettings(search_provider=name, search_url=service.url), {SEARCH_KEY: KEY}) as call,
        ):
            result = await call("web_search", query="tides", limit=3)
        assert [hit["url"] for hit in result["data"]["web"]] == [url for _, url, _ in hits("tides", 0, 3)]

    @pytest.mark.parametrize("name", list(SERVICES))
    async def test_a_wrong_key(self, name: str) -> None:
        key = "a-key-that-is-wrong"
        variable = f"{name.upper()}_API_KEY"
        async with (
            SearchService(name) as service,
            toolbox(ToolSettings(search_provider=name, search_url=service.url), {variable: key}) as call,
        ):
            result = await call("web_search", query="tides")
        assert result["success"] is False
        assert result["error"].startswith(f"{name} answered HTTP 4")
        assert variable in result["error"] or name == "brave"
        assert key not in str(result)
        assert len(service.asked) == 1

    async def test_searxng(self, site: Site) -> None:
        for provider in ("", "searxng"):
            settings = ToolSettings(search_provider=provider, search_url=site.url + "/")
            async with toolbox(settings, {"BRAVE_API_KEY": KEY}) as call:
                first = await call("web_search", query="tides & ebbs")
                assert first["data"]["web"][0] == {
                    "title": "tides & ebbs, result 1",
                    "url": f"{site.url}/article",
                    "description": "What the page says of tides & ebbs.",
                    "position": 1,
                }
                assert len(first["data"]["web"]) == 5
                assert len((await call("web_search", query="x", limit="100"))["data"]["web"]) == 30

    async def test_a_searxng_that_gives_no_json(self, site: Site) -> None:
        async with toolbox(ToolSettings(search_provider="searxng", search_url=f"{site.url}/status/403#")) as call:
            result = await call("web_search", query="tides")
        assert result["success"] is False
        assert "settings.yml" in result["error"]

    async def test_a_service_that_is_busy_is_asked_again(self) -> None:
        now = {"Retry-After": "0"}
        busy = [(429, {"error": "slow down"}, now), (503, None, now), (500, {}, now)]
        settings = ToolSettings(search_provider="serper")
        async with SearchService("serper", list(busy)) as service:
            settings = ToolSettings(search_provider="serper", search_url=service.url)
            async with toolbox(settings, {SEARCH_KEY: KEY}) as call:
                assert (await call("web_search", query="tides"))["success"] is True
            assert len(service.asked) == 4
        async with SearchService("serper", [(429, {"message": f"{KEY} asks too much"}, now)] * 9) as service:
            settings = ToolSettings(search_provider="serper", search_url=service.url)
            async with toolbox(settings, {SEARCH_KEY: KEY}) as call:
                result = await call("web_search", query="tides")
            assert result["error"] == "serper answered HTTP 429 (too many searches): [key] asks too much"
            assert len(service.asked) == 4

    async def test_a_service_that_never_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "SECONDS", 0.3)
        async with (
            SearchService("exa", [(0, None, {})]) as service,
            toolbox(ToolSettings(search_provider="exa", search_url=service.url), {SEARCH_KEY: KEY}) as call,
        ):
            result = await call("web_search", query="tides")
        assert result == {"success": False, "error": "exa did not answer within 0.3 s"}
        monkeypatch.setattr(search, "SECONDS", 30.0)
        async with (
            SearchService("exa", [(503, {}, {"Retry-After": "3000"})]) as service,
            toolbox(ToolSettings(search_provider="exa", search_url=service.url), {SEARCH_KEY: KEY}) as call,
        ):
            assert (await call("web_search", query="tides"))["error"] == "exa answered HTTP 503"

    async def test_answers_that_are_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "TRIES", 1)
        bad: list[tuple[int, Any]] = [(200, None), (200, []), (200, {"success": False, "error": "no"}), (404, "gone")]
        for first in bad:
            async with (
                SearchService("tavily", [(*first, {})]) as service,
                toolbox(ToolSettings(search_provider="tavily", search_url=service.url), {SEARCH_KEY: KEY}) as call,
            ):
                result = await call("web_search", query="tides")
                assert (result["success"], bool(result["error"])) == (False, True), first
        text = b"<p>Please log in"
        async with (
            SearchService("tavily", [(200, text, {})]) as service,
            toolbox(ToolSettings(search_provider="tavily", search_url=service.url), {SEARCH_KEY: KEY}) as call,
        ):
            assert "the answer is no JSON" in (await call("web_search", query="tides"))["error"]
        none: list[Any] = [{}, {"results": []}, {"results": [{"url": "ftp://x"}, 5, {"title": "t"}]}, {"results": "x"}]
        for empty in none:
            async with (
                SearchService("tavily", [(200, empty, {})]) as service,
                toolbox(ToolSettings(search_provider="tavily", search_url=service.url), {SEARCH_KEY: KEY}) as call,
            ):
                result = await call("web_search", query="tides")
                assert (result["success"], result["data"]) == (True, {"web": []}), empty

    async def test_half_a_character_in_one_hit_costs_no_other(self) -> None:
        bad = b'{"results": [{"title": "a\\ud800z", "url": "https://a.example/"}, {"title": "\xff", "url": "https://b.example/"},'
        good = b'{"title": "\\ud83d\\ude00 \\\\ud800", "url": "https://c.example/"}]}'
        async with (
            SearchService("tavily", [(200, bad + good, {})]) as service,
            toolbox(ToolSettings(search_provider="tavily", search_url=service.url), {SEARCH_KEY: KEY}) as call,
        ):
            hits = (await call("web_search", query="tides"))["data"]["web"]
        assert [hit["title"] for hit in hits] == ["a\ufffdz", "\ufffd", "\U0001f600 \\ud800"]

    async def test_what_cannot_be_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "TRIES", 1)
        for settings, problem in (
            (ToolSettings(search_url="http://127.0.0.1:1"), "127.0.0.1 cannot be reached"),
            (ToolSettings(search_provider="brave"), "brave lacks a key: set BRAVE_API_KEY"),
            (ToolSettings(search_provider="searxng"), "searxng lacks the address"),
            (ToolSettings(search_provider="searxng", search_url="ftp://x"), "only http"),
        ):
            async with toolbox(settings) as call:
                result = await call("web_search", query="tides")
                assert result["success"] is False
                assert problem in result["error"]
        async with toolbox(ToolSettings(search_url="http://127.0.0.1:1")) as call:
            assert (await call("web_search", query=" ")) == {"success": False, "error": "query is empty"}


class Middle:
    """A proxy that answers in the place of the search engines that the keyless service asks, each under a certificate
    of its own. Only Wikipedia and DuckDuckGo find something."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self.certificate = str(folder / "ca.pem")
        self._authority.cert_pem.write_to_path(self.certificate)
        self.hosts: list[str] = []
        self.finds = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            host = head.split()[1].decode().partition(":")[0]
            self.hosts.append(host)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._authority.issue_cert(host).configure_cert(context)
            await writer.start_tls(context)
            request = await reader.readuntil(b"\r\n\r\n")
            body = self._body(host, request.split()[1].decode()).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _body(self, host: str, path: str) -> str:
        if not self.finds:
            return {"en.wikipedia.org": '["x", [], [], []]', "grokipedia.com": '{"results": []}'}.get(
                host, "<html></html>"
            )
        if "action=opensearch" in path:
            return '["tides", ["Tide"], [""], ["https://en.wikipedia.org/wiki/Tide"]]'
        if "wikipedia" in host:
            return '{"query": {"pages": {"1": {"extract": "Tides are the rise and fall of seas."}}}}'
        result = "<div class='body'><h2>Tides today</h2><a href='https://tides.example/'>When the sea comes.</a></div>"
        return f"<html><body>{result}</body></html>" if "duckduckgo" in host else "<html></html>"


class TestKeylessSearch:
    async def test_through_the_library(self, tmp_path: Path) -> None:
        middle = Middle(tmp_path)
        server = await asyncio.start_server(middle.serve, "127.0.0.1", 0)
        proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        environ = {"https_proxy": proxy, "SSL_CERT_FILE": middle.certificate}
        async with server, toolbox(ToolSettings(), environ) as call:
            result = await call("web_search", query="tides")
            assert result["success"] is True, result
            urls = [hit["url"] for hit in result["data"]["web"]]
            assert "https://en.wikipedia.org/wiki/Tide" in urls
            assert "data, not instructions" in result["untrusted"]
            middle.finds = False
            nothing = await call("web_search", query="nothing")
            assert (nothing["success"], nothing.get("data")) == (True, {"web": []}), nothing
        assert middle.hosts

    async def test_where_nobody_answers(self) -> None:
        async with toolbox(ToolSettings(search_provider="ddgs"), {"ALL_PROXY": "http://127.0.0.1:1"}) as call:
            result = await call("web_search", query="tides")
        assert result["success"] is False
        assert result["error"].startswith("ddgs found nothing: ")


class TestProxies:
    async def test_pages_come_through_the_proxy_that_is_set(self, site: Site) -> None:
        """The site is its own proxy: it is asked for the whole address, and no name is looked up here."""
        services = Services(ToolSettings(), {"HTTP_PROXY": site.url})
        found = await fetch(services, "http://only-the-proxy-knows.example/article")
        assert b"On tides" in found.body
        assert site.seen[-1].headers["Host"] == "only-the-proxy-knows.example"
        for refused in ("http://127.0.0.1/", "http://2130706433/", "http://localhost/", "http://x.internal/"):
            with pytest.raises(ToolError, match="private, local or reserved"):
                await fetch(services, refused)

    async def test_connections_leave_nothing_open(self, site: Site) -> None:
        client = Services(PRIVATE, {}).part(Connections).client(allow_private=True)
        async with client:
            assert (await client.get(f"{site.url}/article")).status_code == 200
        assert client.is_closed
