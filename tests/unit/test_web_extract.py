"""Bytes to text: kinds, charsets, Markdown of whole pages, bounds."""

# ruff: noqa: RUF001 - letters of many scripts are what is meant

import signal
import time

import pytest

from tests.web_site import document, pdf
from tools.web.extract import (
    Job,
    Overtime,
    Text,
    at_most,
    charset_named,
    decoded,
    finished,
    kind_of,
    read_text,
    refused,
)


def job(body: bytes | str, media_type: str = "text/html", charset: str = "", cut: str = "") -> Job:
    data = body.encode() if isinstance(body, str) else body
    return Job(url="http://example.com/a/b?c", media_type=media_type, charset=charset, body=data, cut=cut)


def test_types_that_may_be_text() -> None:
    for media_type in (
        "text/html",
        "text/x-python",
        "application/json",
        "application/ld+json",
        "application/xhtml+xml",
    ):
        assert refused(media_type) == ""
    for media_type in ("", "application/octet-stream", "application/pdf", "application/x-yaml", "image/svg+xml"):
        assert refused(media_type) == ""
    assert refused("application/zip") == "It is application/zip, which is no text"
    assert "vision_analyze" in refused("image/png")
    for media_type in ("video/mp4", "application/vnd.ms-excel", "application/x-json-not", "application/javascript2"):
        assert refused(media_type)


def test_the_bytes_tell_the_kind_where_the_type_does_not() -> None:
    assert kind_of(job("%PDF-1.4", "text/html")) == "pdf"
    assert kind_of(job("<p>hi", "application/xhtml+xml")) == "html"
    assert kind_of(job("  <!doctype HTML>", "")) == "html"
    assert kind_of(job("<html lang=en>", "text/plain")) == "html"
    assert kind_of(job("plain", "application/octet-stream")) == "text"
    assert kind_of(job(b"\x7fELF\0\0", "application/octet-stream")) == ""
    assert kind_of(job(b"\x7fELF\0\0", "text/plain")) == ""
    assert kind_of(job("hi".encode("utf-16"), "text/plain")) == "text"
    assert kind_of(job("hi".encode("utf-16-le"), "text/plain", "utf-16le")) == "text"
    assert kind_of(job("no pdf", "application/pdf")) == ""


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("Grüße".encode(), "", "Grüße"),
        ("Grüße".encode("latin-1"), "iso-8859-1", "Grüße"),
        (b"\x93quoted\x94 \x80", "ISO-8859-1", "“quoted” €"),
        ("你好".encode("gb18030"), "GB2312", "你好"),
        ("日本".encode("cp932"), "x-sjis", "日本"),
        ("Grüße".encode("utf-16"), "utf-8", "Grüße"),
        ("Grüße, Welt".encode("utf-16-le"), "utf-16le", "Grüße, Welt"),
        (b'<meta charset="utf-16">Gr\xc3\xbc\xc3\x9fe', "", '<meta charset="utf-16">Grüße'),
        (b'<?xml version="1.0" encoding="UTF-16"?><a>b</a>', "", '<?xml version="1.0" encoding="UTF-16"?><a>b</a>'),
        (b"no wide text", "utf-16", "no wide text"),
        (b"caf\\u00e9", "unicode-escape", "caf\\u00e9"),
        ("Grüße".encode("utf-32"), "", "Grüße"),
        (b"\xef\xbb\xbfhi", "latin-1", "hi"),
        ("Grüße".encode("cp1252"), "utf-8", "Grüße"),
        (b'<meta charset="koi8-r">' + "мир".encode("koi8-r"), "", '<meta charset="koi8-r">мир'),
        (b'<?xml version="1.0" encoding="cp1251"?>' + "мир".encode("cp1251"), "", None),
        (b'<meta charset="cp1251">' + "мир".encode(), "utf-8", '<meta charset="cp1251">мир'),
        ("a€".encode()[:2], "", "a"),
        ("cut €".encode()[:-1], "utf-8", "cut "),
        (b"plain", "hex", "plain"),
        (b"plain", "unicode_escape", "plain"),
        (b"plain", "no\0charset", "plain"),
        (b"", "", ""),
    ],
)
def test_charsets(body: bytes, charset: str, text: str | None) -> None:
    read = decoded(body, charset, html=True)
    assert read == text if text is not None else read.endswith("мир")


def test_bytes_of_no_charset_are_read_all_the_same() -> None:
    text = decoded(bytes(range(256)) * 20, "utf-8", html=False)
    assert "ABC" in text
    assert charset_named("zip") == charset_named("idna") == charset_named("x" * 1000) == ""


PAGE = """<html><head><title> A
 page </title><style>x</style></head><body onload=x()><h1>Head <i>line</i></h1>intro <br>second line
<p>See <a href="../up">the   <b>upper</b> page</a>, <a href="#here">here</a>, <a href="javascript:x()">script</a>,
<a href="http://other.example/a b)">other</a>.</p><ul><li>one<li>two <ul><li>inner</ul></ul>
<table><tr><th>a<th>b<tr><td>1<td>2</table><pre>def f():
    return  1
</pre><img src=x alt="a cat"><script>never()</script><p hidden>never</p><div style="display: none">never</div>
<!-- never --><template>never</template>tail</body></html>"""


MARKDOWN = """# Head line

intro
second line

See [the upper page](http://example.com/up), here, script, [other](http://other.example/a%20b%29).

- one
- two

- inner

| a | b
| 1 | 2

```
def f():
    return  1

```

[picture: a cat] tail"""


def test_a_whole_page_as_markdown() -> None:
    text = read_text(job(PAGE))
    assert text.title == "A page"
    assert text.content == MARKDOWN


def test_an_article_is_found_within_its_page() -> None:
    body = "".join(f"<p>Sentence {number} of an article that is long enough to be one.</p>" for number in range(20))
    text = read_text(job(document("News", f"<article><h1>News</h1>{body}</article>")))
    assert text.title == "News"
    assert text.content.startswith("# News")
    assert "Imprint" not in text.content
    assert "never shown" not in text.content


@pytest.mark.parametrize("deep", [300, 2000])
def test_deep_pages_are_read(deep: int) -> None:
    body = f"<p>before</p>{'<div>' * deep}<p>deep</p>{'</div>' * deep}<p>after</p>"
    assert read_text(job(body)).content == "before\n\ndeep\n\nafter"


def test_of_pages_that_are_too_deep_what_is_not_deep_is_read() -> None:
    deep = "<div>" * 5000
    assert read_text(job(f"<title>T</title><p>before</p>{deep}deep")) == Text(
        title="T",
        content="before\n\n[The rest is missing: its elements are nested too deep to be read further]",
    )
    assert "nested too deep" in read_text(job(f"{deep}deep")).error


@pytest.mark.parametrize(
    ("base", "target"),
    [
        ("/docs/v2/", "http://example.com/docs/v2/next"),
        (" http://other.example/x ", "http://other.example/next"),
        ("javascript:x()", "http://example.com/a/next"),
        ("http://[", "http://example.com/a/next"),
        ("", "http://example.com/a/next"),
    ],
)
@pytest.mark.parametrize("sentences", [1, 30])
def test_links_are_meant_from_where_the_page_says(base: str, target: str, sentences: int) -> None:
    """In both ways to Markdown."""
    body = "".join(f"<p>Sentence {n} of an article that <a href=next>goes on</a> so.</p>" for n in range(sentences))
    page = f"<head><base href='{base}'><base href=/no/></head><nav>Menu</nav><article><h1>News</h1>{body}</article>"
    content = read_text(job(page)).content
    assert ("Menu" in content) == (sentences == 1)
    assert content.count(f"[goes on]({target})") == sentences


@pytest.mark.parametrize(
    ("charset", "text"),
    [
        ("shift_jis", "お知らせ、本日は休業です"),
        ("euc_jp", "こんにちは世界"),
        ("euc_jp", "お知らせ、本日は休業です"),
        ("gb18030", "你好、世界"),
        ("gb18030", "今天休息"),
        ("euc_kr", "안녕하세요 세계"),
        ("cp1252", "Grüße, “déjà vu”"),
    ],
)
def test_charsets_that_nobody_tells(charset: str, text: str) -> None:
    assert read_text(job(f"<p>{text}</p>".encode(charset))).content == text


RUSSIAN = "Сегодня в Москве прошёл сильный дождь, и движение на улицах было остановлено на несколько часов."
GREEK = "Σήμερα στην Αθήνα έβρεξε πολύ και η κίνηση σε πολλούς δρόμους σταμάτησε για μερικές ώρες."
UNTOLD = {
    "big5": "臺北市政府今天宣布，明年將在捷運沿線增設三十座自行車站，讓市民通勤更加方便。圖書館每週一休館。",
    "gb18030": "北京市政府今天宣布，明年将在地铁沿线增设三十座自行车站，让市民通勤更加方便。图书馆每周一闭馆。",
    "cp1251": RUSSIAN,
    "koi8-r": RUSSIAN,
    "iso8859-5": RUSSIAN,
    "cp1253": GREEK,
    "iso8859-7": GREEK,
    "cp1255": "היום ירד גשם חזק בתל אביב והתנועה ברחובות רבים נעצרה למשך מספר שעות, כך מסרה העירייה.",
    "cp1252": "À Paris, la circulation a été arrêtée là où l'eau était montée; voilà ce qu'a déclaré l'élu à la télé.",
}


@pytest.mark.parametrize("charset", UNTOLD)
@pytest.mark.parametrize("times", [1, 300])
def test_short_and_long_pages_of_which_nobody_tells_the_charset(charset: str, times: int) -> None:
    text = " ".join([UNTOLD[charset]] * times)
    page = f"<html><head><title>{text[:10]}</title></head><body><p>{text}</p></body></html>"
    read = read_text(job(page.encode(charset)))
    assert (read.title, read.content) == (text[:10].strip(), text)


@pytest.mark.parametrize(
    "text",
    [
        "The bag costs £3, the box £12 and the crate £40, the pallet £300.",
        "A room of 30 m³ needs 3 m² of window, 5 m³ of air and 2 m³ of water; 20 °C ± 2.",
        "Take ¼ cup of milk, ½ cup of oil, ¾ cup of sugar, ¼ cup of rum and ½ a lemon.",
        "Tickets are ¥100, ¥250 and ¥300; a day is ¥500 and a week ¥900.",
        "“Don’t”, she said – £5… or §7, © and ®.",
        "Der Spaß« und »Gruß« und »Nuß« der Größe",
        "La situação não é fácil, œuvre à Noël.",
    ],
)
@pytest.mark.parametrize("charset", ["", "utf-8"])
def test_single_signs_and_accents_are_the_western_ones(charset: str, text: str) -> None:
    assert read_text(job(f"<p>{text}</p>".encode("cp1252"), charset=charset)).content == text


FRENCH = "Les élèves étaient très fatigués après la journée à l’école."
NEARLY = {
    "stray": (f"<p>{FRENCH} ".encode() + b"\xff</p>", f"{FRENCH} \ufffd"),
    "stray of a script": (f"<p>{RUSSIAN} ".encode() + b"\xe9</p>", f"{RUSSIAN} \ufffd"),
    "of Latin-1": (f"<p>{FRENCH} caf".encode() + b"\xe9 noir</p>", f"{FRENCH} caf\ufffd noir"),
    "shortened": (
        f"<p>{RUSSIAN} {UNTOLD['big5']}".encode()[:-2] + b"...</p>",
        f"{RUSSIAN} {UNTOLD['big5'][:-1]}\ufffd...",
    ),
    "stray and cut": (f"<p>{RUSSIAN} ".encode() + b"\xff \xe2\x82", f"{RUSSIAN} \ufffd \ufffd"),
    "much": (f"<p>{RUSSIAN * 300}".encode() + b"\x80\xfe" * 9, RUSSIAN * 300 + "\ufffd" * 18),
}


@pytest.mark.parametrize("name", NEARLY)
@pytest.mark.parametrize("charset", ["", "utf-8", "no-such-charset"])
def test_a_page_of_utf_8_with_a_mistake_keeps_its_letters(name: str, charset: str) -> None:
    body, text = NEARLY[name]
    assert read_text(job(body, charset=charset)).content == text


def test_few_characters_of_utf_8_make_no_page_of_it() -> None:
    assert decoded("»Spaß« »Gruß«, ü".encode("cp1252"), "", html=True) == "»Spaß« »Gruß«, ü"


@pytest.mark.parametrize(
    ("charset", "text"),
    [("cp1251", "Мы были тут да"), ("koi8-r", "Мы были тут"), ("big5", "臺北市政府宣布"), ("cp1252", "ÀÉÎÕ")],
)
def test_what_is_too_short_to_tell_is_said_to_be_unknown(charset: str, text: str) -> None:
    page = f"<p>Of {text} and more</p>".encode(charset)
    content = read_text(job(page)).content
    assert content.startswith("Of \ufffd")
    assert content.endswith(" and more")
    assert not any("\x80" <= letter < "\ufffd" for letter in content)


def test_pages_without_text() -> None:
    for body in ("", " ", "<html><script>fill()</script></html>", "<!-- -->"):
        text = read_text(job(body))
        assert (text.content, "no text" in text.error) == ("", True), body
    assert "binary" in read_text(job(b"\0\1\2", "")).error


def test_plain_text_and_json_stay_as_they_are() -> None:
    assert read_text(job('{"a": [1,\r\n 2]}', "application/json")).content == '{"a": [1,\n 2]}'
    assert read_text(job("<b>not html</b>", "text/plain")).content == "<b>not html</b>"


def test_text_is_bounded_and_clean() -> None:
    text = finished("t" * 9000, "x" * 3_000_000, "")
    assert len(text.title) == 500
    assert 2_000_000 <= len(text.content) < 2_000_200
    assert text.content.endswith("[The rest is missing: it has more than 2,000,000 characters]")
    assert finished("a\ud800", "b\udfff\0", "the connection broke") == Text(
        title="a?", content="b?\ufffd\n\n[The rest is missing: the connection broke]"
    )


def test_pdfs() -> None:
    text = read_text(job(pdf("First page.", "Second (page)."), ""))
    assert (text.title, text.content) == ("A paper on tides", "First page.\n\nSecond (page).")
    assert "pictures" in read_text(job(pdf(""), "application/pdf")).error
    assert "password" in read_text(job(pdf("x", locked=True), "application/pdf")).error
    assert "cannot be read" in read_text(job(b"%PDF-1.4\n nothing", "application/pdf")).error
    assert "larger" in read_text(job(pdf("x"), "application/pdf", cut="it is larger than 10 bytes")).error


def test_a_time_limit_leaves_the_timer_that_was_set() -> None:
    usual = signal.getsignal(signal.SIGALRM)
    before = signal.getitimer(signal.ITIMER_REAL)[0]

    def work() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                sum(range(1000))
            except Exception:  # noqa: BLE001 - as the libraries do
                continue

    with pytest.raises(Overtime), at_most(0.05):
        work()
    assert signal.getsignal(signal.SIGALRM) is usual
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == bool(before)
