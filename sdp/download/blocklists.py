"""Lists of URLs, domains and content hashes to leave out of the dataset."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sdp.config.download import BlocklistsConfig
from sdp.errors import UserError
from sdp.storage import StorageOptions, open_source
from sdp.urls import BadUrl, key64, parents, parse

Keys = npt.NDArray[np.uint64]

_LONGEST_LINE = 16_384
_LARGEST_FILE = 4 << 30
_NONE = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class Blocklists:
    """All lists together, with 8 bytes a URL or hash, so that many millions fit into each worker."""

    urls: Keys = field(default_factory=lambda: _NONE)
    domains: frozenset[str] = frozenset()
    hashes: Keys = field(default_factory=lambda: _NONE)

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
        urls=_keys(_url_key(entry, where) for uri in config.urls for where, entry in _entries(uri, options)),
        domains=frozenset(_domain(entry, where) for uri in config.domains for where, entry in _entries(uri, options)),
        hashes=_keys(_hash_key(entry, where) for uri in config.sha256 for where, entry in _entries(uri, options)),
    )


def hash_keys(hashes: Iterable[str]) -> Keys:
    """Return the keys of SHA-256 hashes in hexadecimal."""
    return _keys(int(digits[:16], 16) for digits in hashes)


def url_keys(urls: Iterable[str]) -> Keys:
    """Return the keys of URLs in normal form."""
    return _keys(map(key64, urls))


def _entries(uri: str, options: StorageOptions | None) -> Iterator[tuple[str, str]]:
    """Yield each entry of a list, with the file and line that it is on."""
    with open_source(uri, options) as source:
        if source.size() > _LARGEST_FILE:
            raise UserError(f"{uri}: a list of {source.size()} bytes, more than {_LARGEST_FILE}; split it")
        rest, before = b"", 0
        while block := source.read(1 << 20):
            *lines, rest = (rest + bytes(block)).split(b"\n")
            for number, line in enumerate(lines, before + 1):
                yield from _entry(uri, number, line)
            before += len(lines)
            if len(rest) > _LONGEST_LINE:
                raise UserError(
                    f"{uri}:{before + 1}: a line of more than {_LONGEST_LINE} bytes; name a text file, one entry a line"
                )
        yield from _entry(uri, before + 1, rest)


def _entry(uri: str, number: int, line: bytes) -> Iterator[tuple[str, str]]:
    text = line.decode("utf-8", "replace").strip("\ufeff").strip()
    if text and not text.startswith("#"):
        yield f"{uri}:{number}", text


def _url_key(entry: str, where: str) -> int:
    try:
        return key64(parse(entry).text)
    except BadUrl as error:
        raise UserError(f"{where}: expected a URL, got {entry[:80]!r} ({error}); correct the line") from None


def _domain(entry: str, where: str) -> str:
    try:
        return parse(f"http://{entry.lstrip('.*')}/").host
    except BadUrl as error:
        raise UserError(f"{where}: expected a domain, got {entry[:80]!r} ({error}); correct the line") from None


def _hash_key(entry: str, where: str) -> int:
    digits = entry.lower().split()[0]
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise UserError(f"{where}: expected a SHA-256 of 64 hexadecimal digits, got {entry[:80]!r}; correct the line")
    return int(digits[:16], 16)


def _keys(keys: Iterable[int]) -> Keys:
    return np.unique(np.fromiter(keys, np.uint64))


def _has(keys: Keys, key: int) -> bool:
    at = int(np.searchsorted(keys, np.uint64(key)))
    return at < len(keys) and int(keys[at]) == key
