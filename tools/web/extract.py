"""What was downloaded, as text: HTML as Markdown, PDF and plain text, in whatever charset. Runs in a process of its own
(`tools.web.child`), since a page can be made to take memory and time without end; heavy packages come late."""

import codecs
import io
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from urllib.parse import urljoin

from msgspec import Struct

MAX_TEXT = 2_000_000  # characters
MAX_HTML = 5_000_000  # characters
SAMPLE = 20_000  # bytes by which a charset is told
MIN_PAIRS = 4  # double-byte characters by which a charset is told
MIN_LETTERS = 40  # bytes of another script; a few look like anything
MIN_UTF8 = 0.9  # of the bytes above 127 that make up characters of UTF-8: the rest are mistakes
MIN_ARTICLE = 200  # characters
MAX_ARTICLE = 1_500_000  # characters of HTML in which the article is looked for: more takes too long
ARTICLE_SECONDS = 6.0
PDF_SECONDS = 12.0

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CHARSETS = {  # what browsers read under these names
    **dict.fromkeys(("latin-1", "latin1", "iso-8859-1", "iso8859-1", "ascii", "us-ascii"), "cp1252"),
    **dict.fromkeys(("gb2312", "gb-2312", "gbk", "x-gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "x-sjis"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987", "ksc5601"), "cp949"),
    **dict.fromkeys(("iso-8859-9", "latin5"), "cp1254"),
    "tis-620": "cp874",
    "iso-8859-11": "cp874",
    "utf8": "utf-8",
    "unicode": "utf-16",
}
_NO_CHARSETS = (
    *("idna", "punycode", "utf-7", "undefined", "mbcs", "oem"),
    *("unicode_escape", "unicode-escape", "raw_unicode_escape", "raw-unicode-escape"),
)
_WIDE = ("utf-16", "utf-32")
_SCRIPTS = (
    *("cp1251", "koi8_r", "koi8_u", "iso8859_5", "cp866", "cp1253", "cp1255", "cp1256", "cp874"),
    *("big5", "gb18030", "cp949", "cp932", "euc_jp"),
)
_META = re.compile(rb"<meta[^>]{0,300}?charset\s*=\s*[\"']?\s*([a-z0-9_:.-]+)", re.IGNORECASE)
_XML = re.compile(rb"^\s*<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([a-z0-9_:.-]+)", re.IGNORECASE)
_PAIRS = re.compile(rb"(?:[\xa1-\xfe][\xa1-\xfe])+")
_IN_PAIRS = re.compile(rb"(?:[\x00-\x7f]|[\xa1-\xfe][\xa1-\xfe])*+[\xa1-\xfe]?")  # the last may be cut
_TEXTUAL = re.compile(
    r"text/.*|.*\+(?:json|xml|yaml)|application/(?:x-)?(?:json|ndjson|jsonl|json-lines|xml|yaml|toml|javascript|"
    r"ecmascript|typescript|sh|shellscript|tex|latex|sql|graphql|rtf|httpd-php|python|perl|ruby|www-form-urlencoded)"
)
_UNTOLD = ("", "application/octet-stream", "binary/octet-stream", "application/unknown", "application/x-unknown")


class Job(Struct, frozen=True, kw_only=True):
    """What `tools.web.fetch` fetched."""

    url: str
    media_type: str
    charset: str
    body: bytes
    cut: str


class Text(Struct, frozen=True, kw_only=True):
    """A page's text, at most MAX_TEXT characters and a note on what is missing; or `error`, why there is none."""

    title: str = ""
    content: str = ""
    error: str = ""


class Overtime(BaseException):
    """The time for a part of the work is up. Not an Exception, so that the work cannot take it for one of its own."""


def refused(media_type: str) -> str:
    """Why nothing of this type is read, "" if it may be text."""
    if media_type in (*_UNTOLD, "application/pdf", "application/x-pdf") or _TEXTUAL.fullmatch(media_type):
        return ""
    hint = "; vision_analyze looks at pictures" if media_type.startswith("image/") else ""
    return f"It is {media_type[:100]}, which is no text{hint}"


def read_text(job: Job) -> Text:
    """The text of a page."""
    kind = kind_of(job)
    if kind == "pdf":
        return _read_pdf(job)
    if kind == "":
        return Text(error="It is binary data, which is no text")
    text = decoded(job.body, job.charset, html=kind == "html")
    title, content, cut = _read_html(text, job) if kind == "html" else ("", text.strip(), job.cut)
    if not content.strip():
        if cut and kind == "html":
            return Text(title=title, error=f"There is no text in what could be read of it: {cut}")
        more = "; a page that programs fill may have some in a browser" if kind == "html" else ""
        return Text(title=title, error=f"There is no text in it{more}")
    return finished(title, content, cut)


def kind_of(job: Job) -> str:
    """html | text | pdf, "" for what is none of them: the type that was told, unless the bytes say otherwise."""
    head = job.body[:1024].lstrip()
    if head.startswith(b"%PDF-"):
        return "pdf"
    if "html" in job.media_type:
        return "html"
    if "pdf" in job.media_type:
        return ""
    if job.media_type in (*_UNTOLD, "text/plain") and re.match(rb"(?i)<!doctype html|<html[\s>]", head):
        return "html"
    wide = any(job.body.startswith(bom) for bom, _ in _BOMS) or "16" in job.charset or "32" in job.charset
    return "" if b"\0" in job.body[:4096] and not wide else "text"


def finished(title: str, content: str, cut: str) -> Text:
    """Bounded, and of characters that UTF-8 has."""
    if len(content) > MAX_TEXT:
        content, cut = content[:MAX_TEXT], f"it has more than {MAX_TEXT:,} characters"
    note = f"\n\n[The rest is missing: {cut}]" if cut else ""
    return Text(title=_clean(title)[:500], content=_clean(content) + note)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd").replace("\r\n", "\n")


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises Overtime in the body after so many seconds; in the main thread. A timer that was set goes on later."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise Overtime

    usual = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


# --- charsets


def decoded(body: bytes, charset: str, *, html: bool) -> str:
    """The bytes as text: by their byte order mark, the charset of the header, that of the document, UTF-8, or what they
    look like; the first that fits every byte, else UTF-8 if it fits nearly all, else the first that there is, with
    U+FFFD for what does not fit, and for letters of another script that are too few to tell which."""
    for bom, name in _BOMS:
        if body.startswith(bom):
            return body[len(bom) :].decode(name, "replace")
    head = body[:4096]
    told = [
        found[1].decode("ascii") for pattern in ((_META, _XML) if html else (_XML,)) if (found := pattern.search(head))
    ]
    readable = [name for name in map(charset_named, told) if not name.startswith(_WIDE)]  # its name was just read
    names = [name for name in (charset_named(charset), *readable) if name]
    for name in (*(name for name in names if b"\0" in body or not name.startswith(_WIDE)), "utf-8"):
        try:
            return body.decode(name)
        except UnicodeError:
            continue
    if cut_short := _all_but_the_last_character(body):
        return cut_short
    if _is_nearly_utf8(body):
        return body.decode("utf-8", "replace")
    return body.decode(names[0] if names and names[0] != "utf-8" else _guessed(body), "replace")


def _all_but_the_last_character(body: bytes) -> str:
    """UTF-8 that was cut within a character; "" if it is none."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(body)
    except UnicodeError:
        return ""


def _is_nearly_utf8(body: bytes) -> bool:
    ascii_only = body.translate(None, bytes(range(128, 256)))
    fitting = len(body.decode("utf-8", "ignore").encode()) - len(ascii_only)
    return fitting >= MIN_UTF8 * (len(body) - len(ascii_only))


def charset_named(label: str) -> str:
    """Python's name for a charset's label, "" if there is none that is safe to use."""
    name = label.strip().lower()
    name = _CHARSETS.get(name, name)
    if name in _NO_CHARSETS:
        return ""
    try:
        found = codecs.lookup(name).name
        b"a".decode(found, "ignore")
    except (LookupError, ValueError):  # unknown, a NUL in it, or a codec that is no charset
        return ""
    return "" if found in _NO_CHARSETS else found


def _guessed(body: bytes) -> str:
    sample = _sample(body)
    if eastern := _eastern(sample):
        return eastern
    far = re.findall(rb"[\x80-\xff]+", re.sub(rb"<[^>]*>", b" ", sample))
    if 2 * sum(len(run) for run in far if len(run) > 2) <= sum(map(len, far)):
        return "cp1252"  # single accents between Latin letters: as browsers take them
    return _script(sample) if sum(map(len, far)) >= MIN_LETTERS else "ascii"


def _sample(body: bytes) -> bytes:
    """The beginning, up to a byte that is no part of a character of several."""
    if len(body) <= SAMPLE:
        return body
    end = max(body.rfind(byte, 0, SAMPLE) for byte in (b" ", b"<", b"\n"))
    return body[: end if end > 0 else SAMPLE]


def _script(sample: bytes) -> str:
    """The charset of a text in letters that are not Latin, "ascii" if there is none."""
    from charset_normalizer import from_bytes  # noqa: PLC0415 - rarely needed

    best = from_bytes(re.sub(rb"<[^>]*>", b" ", sample), cp_isolation=list(_SCRIPTS)).best()
    return best.encoding if best else "ascii"


def _eastern(sample: bytes) -> str:
    """The double-byte charset that a text is surely in, however short it is; "" if there is none. Kana tell Japanese;
    Korean syllables have leading bytes up to C8, the usual Chinese characters up to D7. Letters of Russian and Greek
    come in pairs too, but all of them above BF."""
    pairs = [pair for run in _PAIRS.findall(sample) for pair in zip(run[::2], run[1::2], strict=True)]
    if len(pairs) >= MIN_PAIRS and _IN_PAIRS.fullmatch(sample):
        kana = sum(lead in (0xA4, 0xA5) for lead, _ in pairs)
        signs = [lead for lead, _ in pairs if lead >= 0xB0]
        low = sum(byte < 0xC0 for pair in pairs for byte in pair)
        if kana * 3 >= len(pairs):
            return "euc_jp"
        if sum(lead <= 0xD7 for lead in signs) * 5 < len(signs) * 4 or low * 10 < len(pairs):
            return ""
        return "cp949" if all(lead <= 0xC8 for lead in signs) else "gb18030"
    with suppress(UnicodeError):
        text = codecs.getincrementaldecoder("cp932")().decode(sample)
        kana = sum("\u3041" <= letter <= "\u30fe" for letter in text)
        if kana >= MIN_PAIRS and kana * 4 >= sum(letter > "\x7f" for letter in text):
            return "cp932"
    return ""


# --- HTML


def _read_html(text: str, job: Job) -> tuple[str, str, str]:
    """Title, Markdown, and why it is not whole: the article if there is one that makes up a good part of the page, else
    all that is to be seen."""
    cut = job.cut
    if len(text) > MAX_HTML:
        text, cut = text[:MAX_HTML], f"only the first {MAX_HTML:,} characters of its HTML were read"
    tree, lost = _parsed(text, job.url)
    if tree is None:
        return "", "", cut
    cut = lost or cut
    title = " ".join((tree.findtext(".//title") or "").split())
    whole, shown = page_markdown(tree)
    article = _article(text, job.url) if shown >= MIN_ARTICLE and len(text) <= MAX_ARTICLE else ""
    return title, article if len(article) >= max(MIN_ARTICLE, shown // 5) else whole, cut


def _parsed(text: str, url: str) -> tuple[Any, str]:
    """The document's root element, its links made absolute, None if there is none; and why it is not whole."""
    from lxml import etree, html  # type: ignore[import-untyped]  # noqa: PLC0415

    data = text.replace("\0", "\ufffd").encode("utf-8", "replace")
    parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    try:
        tree = html.document_fromstring(data, parser=parser)
    except (etree.LxmlError, ValueError):  # empty, or nothing but what is dropped
        return None, ""
    _make_absolute(tree, url)
    too_deep = any(each.type == etree.ErrorTypes.ERR_RESOURCE_LIMIT for each in parser.error_log)
    return tree, "its elements are nested too deep to be read further" if too_deep else ""


def _make_absolute(tree: Any, url: str) -> None:
    """All links, as browsers do it: by the address of the page, or by what its first `base` says."""
    base = next((element.get("href") for element in tree.iter("base") if "href" in element.attrib), "")
    url = absolute(url, base) or url
    for element in tree.iter("a"):
        with suppress(ValueError):  # characters that no attribute takes
            if target := absolute(url, element.get("href", "")):
                element.set("href", target)


def _article(text: str, url: str) -> str:
    import trafilatura  # noqa: PLC0415

    tree, _ = _parsed(text, url)
    try:
        with at_most(ARTICLE_SECONDS):
            found = trafilatura.extract(
                tree,
                url=url,
                output_format="markdown",
                favor_recall=True,
                include_comments=False,
                include_formatting=True,
                include_links=True,
                include_tables=True,
            )
    except (Overtime, RecursionError, MemoryError):
        return ""
    return str(found or "")


_SKIPPED = {"script", "style", "template", "noscript", "svg", "math", "iframe", "object", "head", "datalist"}
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "center", "dd", "details", "dialog", "div", "dl", "dt", "fieldset"),
    *("figcaption", "figure", "footer", "form", "header", "hr", "legend", "li", "main", "nav", "ol", "p", "pre"),
    *("section", "summary", "table", "tbody", "thead", "tfoot", "tr", "ul", "option", "body"),
    *("h1", "h2", "h3", "h4", "h5", "h6"),
}
_ITEMS = {"li", "tr", "option", "dt", "dd"}  # on lines of their own, without a blank one between them
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)


def page_markdown(tree: Any) -> tuple[str, int]:
    """All that is to be seen of a page as Markdown; and how many characters of it are
    text. It goes over the elements once, without recursion."""
    from lxml import etree  # noqa: PLC0415

    page = _Page()
    walker = etree.iterwalk(tree, events=("start", "end"))
    skipped: Any = None
    for event, element in walker:
        if event == "start" and _is_hidden(element):
            walker.skip_subtree()
            skipped = element
        elif event == "start":
            page.start(element)
        elif element is skipped:
            skipped = None
            page.text(element.tail)
        else:
            page.end(element)
            page.text(element.tail)
    return page.markdown(), page.shown


def _is_hidden(element: Any) -> bool:
    return element.tag in _SKIPPED or "hidden" in element.attrib or bool(_HIDDEN.search(element.get("style", "")))


class _Page:
    """Collects pieces of Markdown."""

    def __init__(self) -> None:
        self.shown = 0
        self._pieces: list[str] = []
        self._links: list[int] = []
        self._verbatim = 0

    def start(self, element: Any) -> None:
        tag = element.tag
        if tag in _BLOCKS:
            self._pieces.append("\n" if tag in _ITEMS else "\n\n")
        if tag == "pre":
            self._verbatim += 1
            self._pieces.append("```\n")
        elif tag == "li":
            self._pieces.append("- ")
        elif tag in ("td", "th"):
            self._pieces.append(" | ")
        elif tag == "br":
            self._pieces.append("\n")
        elif tag == "a":
            self._links.append(len(self._pieces))
        elif len(tag) == 2 and tag[0] == "h" and tag in _BLOCKS and tag != "hr":
            self._pieces.append("#" * int(tag[1]) + " ")
        elif tag == "img" and element.get("alt", "").strip():
            self.text(f"[picture: {element.get('alt').strip()}]")
        self.text(element.text)

    def end(self, element: Any) -> None:
        tag = element.tag
        if tag == "a" and self._links:
            self._link(self._links.pop(), element.get("href", ""))
        elif tag == "pre":
            self._verbatim -= 1
            self._pieces.append("\n```")
        if tag in _BLOCKS and tag not in _ITEMS:
            self._pieces.append("\n\n")

    def text(self, text: str | None) -> None:
        if not text:
            return
        plain = text if self._verbatim else re.sub(r"\s+", " ", text)
        self._pieces.append(plain)
        self.shown += len(plain.strip())

    def _link(self, start: int, href: str) -> None:
        words = " ".join("".join(self._pieces[start:]).split())
        if words and href.startswith(("http://", "https://")):
            self._pieces[start:] = [f"[{words}]({href})"]

    def markdown(self) -> str:
        text = re.sub(r"[ \t]*\n[ \t]*\n\s*", "\n\n", _trimmed("".join(self._pieces)))
        return text.strip()


def _trimmed(text: str) -> str:
    """Without blanks at the ends of lines, and at their beginnings outside of code."""
    lines, code = [], False
    for line in text.split("\n"):
        if line.strip() == "```":
            code = not code
        lines.append(line.rstrip() if code else line.strip(" "))
    return "\n".join(lines)


def absolute(base: str, href: str) -> str:
    """A link's target, "" for what is none (a script, a place in the page)."""
    if not href or href.startswith("#"):
        return ""
    try:
        target = urljoin(base, href.strip())
    except ValueError:
        return ""
    return target.replace(" ", "%20").replace(")", "%29") if target.startswith(("http://", "https://")) else ""


# --- PDF


def _read_pdf(job: Job) -> Text:
    from pypdf import PdfReader  # noqa: PLC0415
    from pypdf.errors import DependencyError, PyPdfError  # noqa: PLC0415

    if job.cut:
        return Text(error=f"The PDF cannot be read: {job.cut}")
    pages: list[str] = []
    title = ""
    try:
        with at_most(PDF_SECONDS):
            reader = PdfReader(io.BytesIO(job.body))
            if reader.is_encrypted and not reader.decrypt(""):
                return Text(error="The PDF is locked with a password")
            title = str((reader.metadata and reader.metadata.title) or "")
            cut = _read_pages(reader.pages, pages)
    except Overtime:
        cut = f"only {len(pages)} pages could be read in time"
    except (PyPdfError, DependencyError, RecursionError) as error:
        return Text(error=f"The PDF cannot be read: {error}"[:300])
    if not "".join(pages).strip():
        return Text(title=title, error="There is no text in the PDF; its pages may be pictures")
    return finished(title, "\n\n".join(pages).strip(), cut)


def _read_pages(pages: Sequence[Any], into: list[str]) -> str:
    length = 0
    for page in pages:
        into.append(page.extract_text())
        length += len(into[-1])
        if length > MAX_TEXT:
            return f"it has {len(pages)} pages, of which {len(into)} were read"
    return ""
