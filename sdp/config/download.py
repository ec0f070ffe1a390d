"""The configuration of `sdp download`: from a metadata table with URLs to a checked images dataset."""

import re
from collections.abc import Iterable
from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import AfterValidator

from sdp.config.base import REQUIRED, Section, key
from sdp.config.phrases import Says
from sdp.config.shared import Filters, JobConfig, OutputConfig, SourceConfig
from sdp.config.types import HeaderText, Labels, Name, Positive, Uri
from sdp.config.uri import problem
from sdp.errors import Problem

_SIDES = ("width", "height", "original_width", "original_height")
OWN_COLUMNS = ("row", "key", "url", "caption", "image", *_SIDES, "sha256")
"""The columns of an images dataset, whose names a carried column may not have."""

SILENCE_SHARE, CONNECT_SHARE = 1 / 6, 1 / 12
"""Shares of an image's deadline: 10 and 5 s of 60, so that a retry still fits. On a slow network all three grow."""


def _network(value: str) -> str:
    try:
        ip_network(value)
    except ValueError as error:
        raise problem("a network such as 10.1.0.0/16", repr(value), str(error)) from None
    return value


Network = Annotated[str, AfterValidator(_network), Says("a network such as 10.1.0.0/16")]


class DownloadSource(SourceConfig):
    uri: Uri = key(REQUIRED, shapes_output=True, example="s3://bucket/laion-metadata")
    """Parquet with URLs and captions: a file, folder or glob, local or in a store."""
    url_column: Name = key("url", shapes_output=True)
    """The column that holds each image's URL."""
    caption_column: Name = key("caption", shapes_output=True)
    """The column that holds each image's caption."""
    columns: tuple[Name, ...] = key((), shapes_output=True)
    """Further columns to copy to the images dataset."""

    def contradictions(self) -> Iterable[Problem]:
        if taken := sorted({*self.columns} & {*OWN_COLUMNS}):
            hint = "remove them, or rename them in the source"
            yield self.problem("columns", "names other than an images dataset's own", hint, ", ".join(taken))


class DownloadOutput(OutputConfig):
    rows_per_file: Positive = key(10_000, shapes_output=True, le=1_000_000)
    """Source rows per part file; about 1,000 where images keep their original size."""


class FetchConfig(Section):
    """HTTP requests for images."""

    timeout_s: float = key(60.0, gt=0, le=86_400)
    """Seconds for an image, with all attempts but without pauses; a server may be silent for a sixth of them."""
    retries: int = key(2, ge=0, le=100)
    """Retries of an image after a temporary failure."""
    connections: Positive = key(256, le=10_000)
    """Concurrent requests of one download worker."""
    max_bytes: Positive = key(50_000_000, shapes_output=True, le=1_000_000_000)
    """An image with more bytes fails."""
    user_agent: HeaderText = key("sdp (image dataset download)")
    """The User-Agent header; by its first word X-Robots-Tag and robots.txt know this agent."""
    respect_opt_out: bool = key(True, shapes_output=True)
    """Leave out images whose server forbids AI or indexing in X-Robots-Tag."""
    robots: Literal["ignore", "honour"] = key("ignore", shapes_output=True)
    """Whether to leave out images that a site's robots.txt disallows."""
    allow_networks: tuple[Network, ...] = key(())
    """Private, loopback or link-local networks that URLs may lead to, such as 10.1.0.0/16."""
    use_proxy: bool = key(False)
    """Use the environment's proxies, which then decide which addresses are allowed."""

    @property
    def agent(self) -> str:
        """This agent's name in X-Robots-Tag and robots.txt."""
        return re.split("[/ ]", self.user_agent.strip())[0] or "sdp"

    @property
    def silence_s(self) -> float:
        """Seconds for which a server may be silent, before or within its response."""
        return self.timeout_s * SILENCE_SHARE

    @property
    def connect_s(self) -> float:
        """Deadline of a connection in seconds."""
        return self.timeout_s * CONNECT_SHARE


class HostsConfig(Section):
    """Limits on the load of one host, over all workers."""

    at_once: Positive = key(16, le=10_000)
    """Concurrent requests to one host."""
    per_second: float | None = key(50.0, ge=0.001, le=1_000_000)
    """Requests to one host per second; null means no limit."""

    @property
    def burst(self) -> float:
        """Requests that may begin together. The steady rate is lower by as much, so that no second sees more."""
        return max(1.0, (self.per_second or 0.0) / 10)

    @property
    def steady(self) -> float:
        """Requests per second once the burst is used up."""
        rate = self.per_second or 0.0
        return rate - self.burst if rate >= 2 else rate


class ImageConfig(Section):
    """Checks and storage of images."""

    size: Positive | None = key(None, shapes_output=True, le=16_383)
    """Pixels of the shorter side after resizing; null keeps the original bytes."""
    crop: Literal["none", "center"] = key("none", shapes_output=True)
    """Crop the resized image to its centre square, or keep its shape."""
    enlarge: bool = key(False, shapes_output=True)
    """Also resize images that are smaller than image.size."""
    quality: int = key(95, shapes_output=True, ge=1, le=100)
    """The JPEG quality of a resized image."""

    def contradictions(self) -> Iterable[Problem]:
        if self.size is None and self.crop != "none":
            yield self.problem("crop", "none while image.size is null", "set image.size to crop")


class FiltersConfig(Section):
    """Filters on sizes and on the source's columns."""

    min_side: Positive | None = key(None, shapes_output=True)
    """Least pixels of the shorter side."""
    max_aspect: float | None = key(None, shapes_output=True, ge=1)
    """Largest ratio of the longer side to the shorter."""
    columns: Filters = key({}, shapes_output=True)
    """Bounds on the source's columns of numbers; rows outside are not fetched, keep_unknown keeps those without one."""


class BlocklistsConfig(Section):
    """Blocklists: text files with one entry per line, where # begins a comment.

    They may change from run to run and apply to rows not done yet; `sdp audit --takedown` removes the others.
    """

    urls: tuple[Uri, ...] = key(())
    """Files of URLs not to fetch."""
    domains: tuple[Uri, ...] = key(())
    """Files of domains not to contact, nor their subdomains."""
    sha256: tuple[Uri, ...] = key(())
    """Files of SHA-256 hashes of images not to keep."""


class DedupConfig(Section):
    """Removal of duplicates: rows that repeat a lower row."""

    urls: bool = key(True, shapes_output=True)
    """Fetch each URL once in the whole source."""
    content: bool = key(True)
    """Find images with the content of a lower row; later stages leave them out."""


class DownloadWorkersConfig(Section):
    """The size and placement of download workers."""

    cpus: Positive = key(4, le=1024)
    """CPUs of one worker; a smaller node gets a smaller worker."""
    node_labels: Labels = key({})
    """Ray node labels for workers, such as {ray.io/node-group: cpu}; {} allows any node."""


class DownloadConfig(JobConfig):
    """Fetch the images of a metadata table, check them and write them as a dataset."""

    source: DownloadSource = key(REQUIRED)
    """The table of URLs and captions."""
    output: DownloadOutput = key(REQUIRED)
    """The images dataset to write."""
    concurrency: Positive | None = key(None, le=10_000)
    """Download workers in the cluster; null: as many as its CPUs can feed."""
    workers: DownloadWorkersConfig = key(DownloadWorkersConfig)
    """The size and placement of download workers."""
    fetch: FetchConfig = key(FetchConfig)
    """HTTP requests for images."""
    hosts: HostsConfig = key(HostsConfig)
    """Limits on the load of one host, over all workers."""
    image: ImageConfig = key(ImageConfig)
    """Checks and storage of images."""
    filters: FiltersConfig = key(FiltersConfig)
    """Filters on the source's columns."""
    blocklists: BlocklistsConfig = key(BlocklistsConfig)
    """URLs, domains and images to leave out."""
    dedup: DedupConfig = key(DedupConfig)
    """Removal of duplicates."""
