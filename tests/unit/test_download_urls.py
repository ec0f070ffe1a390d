"""URLs, addresses, captions and opt-outs: what crawled tables hold, put in order or refused."""

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp.config.download import BlocklistsConfig
from sdp.datasets.columns import LARGEST_CELL
from sdp.download import blocklists
from sdp.download.plan import normalised
from sdp.download.robots import opt_out
from sdp.download.slot import refuses
from sdp.errors import UserError
from sdp.urls import BadUrl, key64, parents, parse, redirected


def test_a_bare_percent_and_a_backslash_are_escaped() -> None:
    assert parse("http://example.org/100%.jpg").text == "http://example.org/100%25.jpg"
    assert parse("http://example.org/a\\b").text == "http://example.org/a%5Cb"


# By hand, after the host parser of WHATWG's URL standard and its examples. Ours leaves out a name's final dot, and
# makes an address that IPv6 maps from IPv4 the IPv4 one.
HOSTS = {
    "EXAMPLE.COM": "example.com", "example%2Ecom": "example.com", "example.com%2e": "example.com",
    "faß.example": "xn--fa-hia.example", "fass.example": "fass.example", "ΒΌΛΟΣ.example": "xn--nxasmq6b.example",
    "xn--fa-hia.example": "xn--fa-hia.example", "ＥＸ％41mple。com": None, "ＥＸample。com": "example.com",
    "exam\u00adple.com": "example.com", "☕.example": "xn--53h.example", "b%C3%BCcher.example": "xn--bcher-kva.example",
    "xn--bücher.example": None, "a\u200cb.example": None, "\u0301a.example": None, "אa.example": None,
    "example^example": None, "a%2fb.example": None, "%00.example": None, "%ff.example": None, "a%2541.example": None,
    "example..com": None, "example.com..": None,
    "0": "0.0.0.0", "%30": "0.0.0.0", "0x": "0.0.0.0", "0xffffffff": "255.255.255.255", "4294967296": None,
    "127.0.0.1": "127.0.0.1", "127.0.0.1.": "127.0.0.1", "127.1": "127.0.0.1", "127.0.1": "127.0.0.1",
    "2130706433": "127.0.0.1", "0x7f000001": "127.0.0.1", "0X7F.1": "127.0.0.1", "017700000001": "127.0.0.1",
    "0177.0.0.01": "127.0.0.1", "0x7f.0.0x0.1": "127.0.0.1", "１２７.0。0.1": "127.0.0.1", "%31%327.1": "127.0.0.1",
    "1.2.65535": "1.2.255.255", "1.2.65536": None, "1.2.3.256": None, "1.256.1": None, "1.2.3.4.5": None, "09": None,
    "0x7g": "0x7g", "example.255": None, "example.0x1": None, "1.example": "1.example", "1..2": None, "1e3": "1e3",
    "[0:0::1]": "[::1]", "[2001:DB8:0:0:1:0:0:1]": "[2001:db8::1:0:0:1]", "[::ffff:127.0.0.1]": "127.0.0.1",
    "[0:0:0:0:0:FFFF:7F00:1]": "127.0.0.1", "[::127.0.0.1]": "[::7f00:1]", "[1::2::3]": None, "[%3A%3A1]": None,
}  # fmt: skip


@pytest.mark.parametrize(("spelling", "host"), HOSTS.items())
def test_a_host_has_one_form_however_it_is_spelt(spelling: str, host: str | None) -> None:
    if host is None:
        with pytest.raises(BadUrl):
            parse(f"http://{spelling}:8080/x")
    else:
        url = parse(f"http://{spelling}:8080/x")
        assert (url.host, url.text) == (host, f"http://{host}:8080/x")
        assert redirected(parse("http://example.org/"), f"//{spelling}/x").host == host


def test_a_listed_domain_is_refused_in_every_spelling(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("0x7f.1\nexample.com\nfaß.example")
    lists = blocklists.load(BlocklistsConfig(domains=(str(tmp_path / "list"),)))
    listed = {"127.0.0.1", "example.com", "xn--fa-hia.example"}
    spellings = [spelling for spelling, host in HOSTS.items() if host in listed]
    assert len(spellings) > 15
    for spelling in spellings:
        assert lists.has_host(parse(f"https://{spelling}/").host), spelling
        assert lists.has_host(redirected(parse("http://1.example/"), f"//{spelling}").host), spelling
    assert not lists.has_host(parse("http://fass.example/").host)


@pytest.mark.parametrize(
    "line",
    ["http://ads.com/", "ads.com\ttracker", "10.0.0.0/8", "ads.com/path", "ads.com:80", "0.0.0.0 ads.com", "a@b"],
)
def test_a_line_that_is_not_only_a_domain_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "list").write_text(f"[::1]\n*.example.com\n{line}")
    with pytest.raises(UserError, match=r"list:3: expected a domain, got .*; correct the line"):
        blocklists.load(BlocklistsConfig(domains=(str(tmp_path / "list"),)))


@pytest.mark.parametrize("line", ["https://a.example/b\treason", "https://a.example/b reason"])
def test_a_listed_url_with_more_on_its_line_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "list").write_text(line)
    with pytest.raises(UserError, match=r"list:1: expected a URL, got .*; correct the line"):
        blocklists.load(BlocklistsConfig(urls=(str(tmp_path / "list"),)))


def test_remarks_in_a_list_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# all of them\n https://a.example/b#c # asked for\nhttps://a.example/d\t#e\n #\n")
    lists = blocklists.load(BlocklistsConfig(urls=(str(tmp_path / "list"),)))
    listed = [lists.has_url(key64(parse(f"https://a.example/{name}").text)) for name in ("b", "d", "e")]
    assert listed == [True, True, False]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (None, "no URL"),
        ("", "no URL"),
        (b"http://example.org", "not text"),
        (17, "not text"),
        ("example.org/x.jpg", "no scheme"),
        ("//example.org/x.jpg", "no scheme"),
        ("ftp://example.org/x", "scheme 'ftp'"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("data:image/png;base64,AAAA", "scheme 'data'"),
        ("http:///x", "no host"),
        ("http://user:secret@example.org/", "user name"),
        ("http://exa mple.org/", "not a domain name"),
        ("http://-/", "not a domain name"),
        ("http://example.org:0/", "port 0"),
        ("http://example.org:99999/", "ort"),
        ("http://[::1/", "nvalid"),
        ("http://[fe80::1%25eth0]/", "zone"),
        ("http://" + "a" * 300 + ".org/", "not a domain name"),
        ("http://" + "a" * 290 + ".org/", "not a domain name"),
        ("http://example.org/" + "a" * 9000, "characters"),
    ],
)
def test_rows_that_cannot_be_fetched_are_refused_with_the_reason(bad: object, why: str) -> None:
    with pytest.raises(BadUrl, match=why):
        parse(bad)


@given(st.text() | st.text().map("http://{}".format) | st.text().map("http://example.org/{}".format))
def test_any_text_is_a_normal_form_or_refused(text: str) -> None:
    try:
        url = parse(text)
    except BadUrl:
        return
    assert url.text.isascii()
    assert url.text.isprintable()
    assert " " not in url.text
    assert parse(url.text) == url


def test_a_redirect_may_be_long_and_is_held_to_the_same_rules() -> None:
    here = parse("http://example.org/a/b.jpg?c=1")
    assert redirected(here, "/d?" + "a=http://x.org&" * 40).text == "http://example.org/d?" + "a=http://x.org&" * 40
    for bad in ("ftp://x/", "file:///etc/passwd", "http://user@x/", "gopher://x", "/" * 9000, "//" + "a" * 301):
        with pytest.raises(BadUrl, match="redirect to"):
            redirected(here, bad)


def test_the_key_of_a_url_is_the_first_eight_bytes_of_blake2b() -> None:
    # From `printf http://example.org/ | b2sum -l 64`, read as a little-endian number.
    assert key64("http://example.org/") == int.from_bytes(bytes.fromhex("40996f077a4e5125"), "little")


def test_a_host_belongs_to_its_domains() -> None:
    assert parents("a.b.org") == ["a.b.org", "b.org", "org"]


PRIVATE = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.0.9", "169.254.169.254", "172.16.0.1", "192.168.1.1",
    "192.0.0.8", "192.0.2.1", "192.88.99.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1",
    "3fff::1", "3fff:fff:ffff::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1",
    "168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::a83f:8110", "64:ff9b:1::808:808", "64:ff9b:1:808:8:800::",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1",
          "3fff:1000::1"]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_of_the_internet_is_refused(address: str) -> None:
    assert refuses(address, [])


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_is_not(address: str) -> None:
    assert not refuses(address, [])


def test_an_allowed_network_is_allowed_in_all_its_spellings_and_no_other_is() -> None:
    networks = [ipaddress.ip_network(network) for network in ("127.0.0.0/8", "fd00::/8")]
    assert not refuses("127.0.0.1", networks)
    assert not refuses("::ffff:127.0.0.1", networks)
    assert not refuses("fd12::1", networks)
    assert refuses("10.0.0.1", networks)
    assert refuses("::1", networks)
    assert refuses("not an address", networks)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_alike_however_ipv6_wraps_it(address: ipaddress.IPv4Address) -> None:
    wrapped = [f"::ffff:{address}", f"64:ff9b::{int(address) >> 16:x}:{int(address) & 0xFFFF:x}"]
    assert {refuses(form, []) for form in wrapped} == {refuses(str(address), [])}


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a  cat\n on a mat ", "a cat on a mat"),
        ("", None),
        ("   \t\n", None),
        (None, None),
        (3.5, None),
        (b"caf\xc3\xa9", "café"),
        (b"caf\xe9", "caf\ufffd"),
        (b"\xff\xfe\xff", None),
        ("cafe\u0301", "café"),
        ("a\x00b", "a b"),
        ("a \x1b[1mred\x9b cat", "a [1mred cat"),
        ("two\x0b\x7flines\u2028of\u202etext", "two lines of text"),
        ("\ufeffcat", "cat"),
        ("lone \ud83d surrogate", "lone \ufffd surrogate"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\u200b", None),
        ("\U0001f468\u200d\U0001f469", "\U0001f468\u200d\U0001f469"),
        ("猫がマットの上に", "猫がマットの上に"),
    ],
)
def test_a_caption_is_one_line_of_valid_text_or_missing(caption: object, expected: str | None) -> None:
    assert normalised(caption) == expected


def test_a_character_keeps_thirty_marks() -> None:
    assert normalised("cafe\u0301" + "\u0323" * 40) == "caf\u1eb9" + "\u0323" * 28 + "\u0301"


def test_a_long_caption_is_cut_between_characters() -> None:
    assert normalised("é" + "a" * LARGEST_CELL) == "é" + "a" * (LARGEST_CELL - 1)
    assert normalised(b"\xffa" + "é".encode() * LARGEST_CELL) == "\ufffda" + "é" * (LARGEST_CELL // 2 - 1)
    assert normalised(b"a\xff" + b"a" * (LARGEST_CELL - 3) + "é".encode()) == "a\ufffd" + "a" * (LARGEST_CELL - 3)
    assert normalised(b"a\xff") == "a\ufffd"


@given(st.text(alphabet=st.characters()) | st.binary())
def test_any_caption_comes_out_as_valid_utf8_and_stays_as_it_is_then(caption: object) -> None:
    text = normalised(caption)
    if text is not None:
        assert text.encode("utf-8").decode("utf-8") == text
        assert text == text.strip()
        assert normalised(text) == text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("noai", "noai"),
        ("noindex, nofollow", "noindex"),
        ("nofollow, NoImageAI", "noimageai"),
        ("noimageindex", "noimageindex"),
        ("noml", "noml"),
        ("none", "none"),
        ("all", None),
        ("", None),
        ("nofollow, noarchive", None),
        ("otherbot: noai", None),
        ("sdp: noai", "noai"),
        ("SDP: noindex, nofollow", "noindex"),
        ("otherbot: noai, nofollow", None),
        ("otherbot: nofollow, sdp: noai", "noai"),
        ("*: noai", "noai"),
        ("unavailable_after: 25 Jun 2010 15:00:00 PST, noai", "noai"),
        ("max-snippet: 50, noindex", "noindex"),
    ],
)
def test_an_opt_out_is_heard_where_it_is_meant_for_us(value: str, expected: str | None) -> None:
    assert opt_out(value, "sdp") == expected
