"""What `sdp download` is told: from a metadata table with URLs to a checked image dataset."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from sdp.config.base import (
    REQUIRED,
    HeaderText,
    JobConfig,
    Labels,
    Name,
    OutputConfig,
    Positive,
    Says,
    Section,
    SourceConfig,
    Uri,
    key,
)
from sdp.errors import Problem

OWN_COLUMNS = (
    *("row", "key", "url", "caption", "image", "width", "height"),
    *("original_width", "original_height", "sha256"),
)
"""The columns of an images dataset, whose names no carried column may have."""

EVERYWHERE = ("0.0.0.0/0", "::/0")


def _network(value: str) -> str:
    try:
        ip_network(value)
    except ValueError as error:
        context = {"expected": "a network such as 10.1.0.0/16", "got": repr(value), "hint": str(error)}
        raise PydanticCustomError("expected", "expected {expected}, got {got}", context) from None
    return value


Network = Annotated[str, AfterValidator(_network), Says("a network such as 10.1.0.0/16")]


class DownloadSource(SourceConfig):
    uri: Uri = key(
        REQUIRED,
        "Parquet with URLs and captions: a file, a folder or a glob, local or at s3://, gs://, https:// or hf://.",
        shapes_output=True,
        example="s3://bucket/laion-metadata",
    )
    url_column: Name = key("url", "The column that holds each image's URL.", shapes_output=True)
    caption_column: Name = key("caption", "The column that holds each image's caption.", shapes_output=True)
    columns: tuple[Name, ...] = key((), "Further columns to carry along into the images dataset.", shapes_output=True)

    def contradictions(self) -> Iterable[Problem]:
        taken = sorted({name for name in self.columns if name in OWN_COLUMNS})
        if taken:
            yield Problem(
                "columns",
                "names that an images dataset does not use itself",
                ", ".join(taken),
                "leave them out or rename them in the source",
            )


class DownloadOutput(OutputConfig):
    rows_per_file: Positive = key(
        10_000,
        "Source rows that one part file accounts for; aim at 128 to 256 MB a file, so take about 1,000 where images "
        "are kept as they came.",
        shapes_output=True,
        le=1_000_000,
    )


class FetchConfig(Section):
    """How images are fetched."""

    timeout_s: float = key(
        60.0,
        "Deadline of one image in seconds, over all its attempts and redirects; waiting for its host's turn and "
        "pauses between attempts are not counted.",
        gt=0,
        le=86_400,
    )
    connect_timeout_s: float = key(
        5.0, "Deadline of making a connection in seconds, within timeout_s.", gt=0, le=86_400
    )
    first_byte_timeout_s: float = key(
        10.0, "Seconds that a server may be silent, before its answer begins or in the middle of it.", gt=0, le=86_400
    )
    retries: int = key(2, "How often an image is tried again after a failure that may pass.", ge=0, le=100)
    longest_wait_s: float = key(
        60.0,
        "The longest Retry-After that is waited for; a host that wants more is left alone as long, an hour at most, "
        "and its rows fail.",
        ge=0,
        le=86_400,
    )
    connections: Positive = key(256, "Requests that one download worker keeps open at once.", le=10_000)
    buffer_mb: Positive = key(
        256, "Megabytes of fetched images that one worker holds before they are decoded.", le=1_000_000
    )
    max_bytes: Positive = key(
        50_000_000, "An image of more bytes than this is a failed row.", shapes_output=True, le=1_000_000_000
    )
    max_redirects: int = key(5, "Redirects that are followed for one image.", ge=0, le=100)
    user_agent: HeaderText = key("sdp (image dataset download)", "The User-Agent that servers are told.")
    respect_opt_out: bool = key(
        True,
        "Leave out images whose server says noai, noimageai, noindex, noimageindex or noml in X-Robots-Tag.",
        shapes_output=True,
    )
    opt_out_agent: HeaderText = key(
        "sdp", "The name by which an X-Robots-Tag for one agent means us.", shapes_output=True
    )
    robots: Literal["ignore", "honour"] = key(
        "ignore",
        "Whether images that a site's robots.txt disallows for fetch.opt_out_agent are left out.",
        shapes_output=True,
    )
    allow_private: bool = key(
        False, "Allow URLs that lead to private, loopback or link-local addresses. For tests and intranets."
    )
    allow_networks: tuple[Network, ...] = key(
        (), "Networks to allow although they are private, where allow_private would be too much."
    )
    use_proxy: bool = key(False, "Go through the proxies that the environment names; they decide over addresses, then.")
    verify_tls: bool = key(True, "Refuse a server whose TLS certificate is not valid.")
    ca_file: Name | None = key(None, "A file of certificates to trust, in place of the public ones.")

    @property
    def allowed_networks(self) -> tuple[str, ...]:
        """The networks that may be connected to though they are not public."""
        return EVERYWHERE if self.allow_private else self.allow_networks


class HostsConfig(Section):
    """What one host is asked to bear, by all workers together. Politer than needed is a matter of patience."""

    at_once: Positive = key(16, "Requests to one host at the same time.", le=10_000)
    per_second: float | None = key(
        50.0, "Requests to one host that begin within a second; null is no limit.", ge=0.001, le=1_000_000
    )
    give_up_after: Positive = key(
        20,
        "After so many connections in a row that failed, a host is left alone for five minutes and its rows fail.",
        le=1_000_000,
    )
    count: bool = key(
        True, "Count the hosts of the source before starting, and say when a single one will hold up the job."
    )


class ImageConfig(Section):
    """How images are checked and stored."""

    size: Positive | None = key(
        None,
        "Resize to this many pixels on the shorter side; null keeps the bytes as they came.",
        shapes_output=True,
        le=16_383,
    )
    crop: Literal["none", "center"] = key(
        "none", "Cut the resized image to its centre square, or keep its shape.", shapes_output=True
    )
    enlarge: bool = key(False, "Resize images that are smaller than that, too.", shapes_output=True)
    format: Literal["jpeg", "webp"] = key("jpeg", "The encoding of a resized image.", shapes_output=True)
    quality: int = key(95, "The quality that a resized image is encoded with.", shapes_output=True, ge=1, le=100)
    max_pixels: Positive = key(
        100_000_000,
        "An image of more pixels than this is a failed row, undecoded.",
        shapes_output=True,
        le=1_000_000_000,
    )
    tiff: bool = key(
        False,
        "Read TIFF images, too: rare on the web, and a decoder with many holes so far.",
        shapes_output=True,
    )
    least_side: Positive = key(
        8,
        "An image with a side of fewer pixels than this is a failed row: a dot that counts visitors.",
        shapes_output=True,
    )

    def contradictions(self) -> Iterable[Problem]:
        if self.size is None and self.crop != "none":
            yield Problem(
                "crop", "none while image.size is null", repr(self.crop), "set image.size: only resized images are cut"
            )


class FiltersConfig(Section):
    """Which rows are left out by what the source says of them. A filter that is null is off, and needs no column."""

    min_side: Positive | None = key(
        None, "The fewest pixels of the shorter side, by the source and again by the image itself.", shapes_output=True
    )
    max_aspect: float | None = key(
        None,
        "The longer side at most so many times the shorter, by the source and again by the image itself.",
        shapes_output=True,
        ge=1,
    )
    min_similarity: float | None = key(None, "The least similarity of image and caption.", shapes_output=True)
    max_punsafe: float | None = key(None, "The highest probability of being unsafe.", shapes_output=True)
    max_pwatermark: float | None = key(None, "The highest probability of a watermark.", shapes_output=True)
    min_aesthetic: float | None = key(None, "The lowest aesthetic score.", shapes_output=True)
    keep_unknown: bool = key(
        False, "Keep rows of which the source does not say what a filter on scores wants to know.", shapes_output=True
    )
    width_column: Name | None = key(None, "The column of the image's width, if there is one.", shapes_output=True)
    height_column: Name | None = key(None, "The column of the image's height, if there is one.", shapes_output=True)
    similarity_column: Name = key("similarity", "The column of the similarity.", shapes_output=True)
    punsafe_column: Name = key("punsafe", "The column of the probability of being unsafe.", shapes_output=True)
    pwatermark_column: Name = key("pwatermark", "The column of the probability of a watermark.", shapes_output=True)
    aesthetic_column: Name = key("aesthetic", "The column of the aesthetic score.", shapes_output=True)

    def contradictions(self) -> Iterable[Problem]:
        if (self.width_column is None) != (self.height_column is None):
            missing = "width_column" if self.width_column is None else "height_column"
            yield Problem(missing, "a column, as for the other side", "null", "name both or neither")


class BlocklistsConfig(Section):
    """Lists of what is not to be fetched or kept: text files, one entry a line, # begins a comment.

    They may change from run to run, and hold for what is still to be done; `sdp audit --takedown` is for the rest."""

    urls: tuple[Uri, ...] = key((), "Files of URLs that are not fetched.")
    domains: tuple[Uri, ...] = key((), "Files of domains that are not asked, nor anything below them.")
    sha256: tuple[Uri, ...] = key((), "Files of SHA-256 hashes of images that are not kept.")


class DedupConfig(Section):
    """What is left out because a lower row has it already."""

    urls: bool = key(True, "Fetch each URL once in the whole source.", shapes_output=True)
    content: bool = key(
        True, "When all images are there, look for those whose content a lower row has; later stages leave them out."
    )


class WorkersConfig(Section):
    """How the work is laid on the cluster."""

    cpus: Positive = key(
        4, "CPUs of one worker, each busy with decoding; a smaller node gets a smaller worker.", le=1024
    )
    units_at_once: Positive = key(
        2,
        "Part files that one worker has begun at the same time, so that the last images of one hold up nothing; it "
        "holds that many in memory.",
        le=16,
    )
    decoder_memory_mb: Positive = key(
        4096, "Megabytes that decoding one image may take; one that wants more is a failed row.", le=1_000_000
    )
    node_labels: Labels = key(
        {},
        "Ray node labels that workers are placed by, such as {ray.io/node-group: cpu}, or in(cpu,spot) for either; {} "
        "takes any node that has CPUs.",
    )


class DownloadConfig(JobConfig):
    """Fetch the images of a metadata table, check them and write them as a dataset."""

    source: DownloadSource = key(REQUIRED, "The table of URLs and captions.")
    output: DownloadOutput = key(REQUIRED, "The images dataset to write.")
    concurrency: Positive | None = key(
        None, "Download workers over the whole cluster; null starts as many as its CPUs can feed.", le=10_000
    )
    workers: WorkersConfig = key(WorkersConfig, "How the work is laid on the cluster.")
    fetch: FetchConfig = key(FetchConfig, "How images are fetched.")
    hosts: HostsConfig = key(HostsConfig, "What one host is asked to bear.")
    image: ImageConfig = key(ImageConfig, "How images are checked and stored.")
    filters: FiltersConfig = key(FiltersConfig, "Which rows are left out by what the source says of them.")
    blocklists: BlocklistsConfig = key(BlocklistsConfig, "Lists of what is not to be fetched or kept.")
    dedup: DedupConfig = key(DedupConfig, "What is left out because a lower row has it already.")
