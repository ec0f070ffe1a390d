"""Lists of URLs, domains and content hashes to leave out of the dataset."""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from sdp.config.download import BlocklistsConfig
from sdp.errors import UserError
from sdp.storage import StorageOptions, open_source
from sdp.urls import BadUrl, key64, parents, parse

SortedKeys = npt.NDArray[np.uint64]

_LONGEST_LINE = 16_384
_LARGEST_FILE = 4 << 30
_DOMAIN = re.compile(r"\[[^]\s]+\]|[^\s/:?#@\\]*")
_REMARK = re.compile(r"(^|\s)#.*")
_NONE = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class Blocklists:
    """All lists together, with 8 bytes a URL or hash, so that many millions fit into each worker."""

    urls: SortedKeys = field(default_factory=lambda: _NONE)
    domains: frozenset[str] = frozenset()
    hashes: SortedKeys = field(default_factory=lambda: _NONE)

    def has_url(self, key: int) -> bool:
        return _has(self.urls, key)

    def has_host(self, host: str) -> bool:
        """Return whether the host, or a domain above it, is listed."""
        return bool(self.domains) and any(domain in self.domains for domain in parents(host))

    def has_content(self, sha256: str) -> bool:
        return len(self.hashes) > 0 and _has(self.hashes, int(sha256[:16], 16))


def load(config: BlocklistsConfig, options: StorageOptions | None = None) -> Blocklists:
    """Read all lists; an invalid entry is an error that names its line."""
    return Blocklists(
        urls=_keys(_url_key(entry, where) for where, entry in _entries(config.urls, options)),
        domains=frozenset(_domain(entry, where) for where, entry in _entries(config.domains, options)),
        hashes=_keys(_hash_key(entry, where) for where, entry in _entries(config.sha256, options)),
    )


def of_takedowns(urls: Iterable[str], hashes: Iterable[str]) -> Blocklists:
    """Return the lists of these URLs in normal form, and of these SHA-256 hashes in hexadecimal."""
    return Blocklists(urls=_keys(map(key64, urls)), hashes=_keys(int(digits[:16], 16) for digits in hashes))


def _entries(uris: Iterable[str], options: StorageOptions | None) -> Iterator[tuple[str, str]]:
    """Yield each entry of some lists, after the file and line that it is on."""
    for uri in uris:
        with open_source(uri, options) as source:
            if source.size() > _LARGEST_FILE:
                raise UserError(f"{uri}: a list of {source.size()} bytes, more than {_LARGEST_FILE}; split it")
            lines = io.BufferedReader(source, 1 << 20)
            for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE + 1), b""), 1):
                if len(line) > _LONGEST_LINE:
                    cause = f"a line of more than {_LONGEST_LINE} bytes"
                    raise UserError(f"{uri}:{number}: {cause}; name a text file, one entry a line")
                if text := _REMARK.sub("", line.decode("utf-8", "replace").strip("\ufeff")).strip():
                    yield f"{uri}:{number}", text


def _url_key(entry: str, where: str) -> int:
    try:
        if len(entry.split()) > 1:  # a tab would be left out, and a remark after the URL become part of it
            raise BadUrl("it has a blank; a URL's own is written %20")
        return key64(parse(entry).text)
    except BadUrl as error:
        raise _refusal(entry, where, "a URL", f" ({error})") from None


def _domain(entry: str, where: str) -> str:
    host = entry.lstrip(".*").removesuffix("/")
    try:
        if not _DOMAIN.fullmatch(host):
            raise BadUrl("it is more than that")
        return parse(f"http://{host}/").host
    except BadUrl as error:
        raise _refusal(entry, where, "a domain", f" ({error})") from None


def _hash_key(entry: str, where: str) -> int:
    digits = entry.lower().split()[0]
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise _refusal(entry, where, "a SHA-256 of 64 hexadecimal digits")
    return int(digits[:16], 16)


def _refusal(entry: str, where: str, expected: str, cause: str = "") -> UserError:
    return UserError(f"{where}: expected {expected}, got {entry[:80]!r}{cause}; correct the line")


def _keys(keys: Iterable[int]) -> SortedKeys:
    return np.unique(np.fromiter(keys, np.uint64))


def _has(keys: SortedKeys, key: int) -> bool:
    at = int(np.searchsorted(keys, np.uint64(key)))
    return at < len(keys) and int(keys[at]) == key
