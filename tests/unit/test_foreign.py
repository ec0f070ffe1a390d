"""Strangers' texts, images and tars, judged by the standards: tables in tests/foreign, and files that are made here.

tests/outside/test_suites.py reads whole suites of others.
"""

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from PIL import Image as Pillow

from sdp.config.yaml_text import parse_document
from sdp.download.robots import Robots
from sdp.errors import ConfigError, DatasetError, UserError
from sdp.imaging import ImageError, decode
from sdp.sources.captions import gather
from sdp.sources.tars import count_samples, read_samples
from sdp.urls import BadUrl, parse, redirected
from tests.unit.test_imaging_png import PASSES, chunk

FOLDER = Path(__file__).parents[1] / "foreign"
TABLES = {name: yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in ("robots", "urls", "json", "yaml")}


def test_no_row_of_the_tables_is_lost() -> None:
    rules = [path for row in TABLES["robots"] for path in (*row.get("allow", ()), *row.get("refuse", ()))]
    counts = [len(rules), *(sum(map(len, TABLES[name].values())) for name in ("urls", "json")), len(TABLES["yaml"])]
    assert counts == [142, 159, 78, 77]


# --- texts -----------------------------------------------------------------------------------------------------------


def robots_allow(text: str, agent: str, path: str) -> bool:
    """Return whether a robots.txt allows an agent a path."""
    robots = Robots(agent)
    robots.note("http://a", text.encode(), None, 0.0)
    return robots.refusal("http://a", f"http://a{path}") is None


@pytest.mark.parametrize("row", TABLES["robots"], ids=lambda row: row["rules"])
def test_a_robots_txt_allows_and_refuses_what_rfc_9309_says(row: dict[str, Any]) -> None:
    for verdict in ("allow", "refuse"):
        for path in row.get(verdict, ()):
            assert robots_allow(row["rules"], "sdp", path) == (verdict == "allow"), path


@pytest.mark.parametrize("kind", ["absolute", "relative"])
def test_a_url_is_what_browsers_make_of_it(kind: str) -> None:
    table = dict(TABLES["urls"][kind])
    base = parse(table.pop("base")) if kind == "relative" else None
    results = dict[str, str | None]()
    for text in table:
        results[text] = None
        with suppress(BadUrl):
            results[text] = (redirected(base, text) if base else parse(text)).text
    assert results == table


@pytest.mark.parametrize(("text", "expected"), TABLES["yaml"])
def test_a_configuration_is_the_data_of_yaml_1_2_or_refused(text: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError):
            parse_document(text, "a.yaml")
    else:
        assert parse_document(text, "a.yaml") == json.loads(expected)


def test_json_of_any_form_is_read_or_costs_a_caption(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"image")
    accepted: set[str] = set()
    for kind, text in [(kind, text) for kind, texts in TABLES["json"].items() for text in texts]:
        (tmp_path / "captions.jsonl").write_text(text.replace("\n", " "))
        with suppress(UserError):
            gather(str(tmp_path))
            accepted.add(text)
        sample = f'{{"caption": "b", "other": {text}}}'.encode()
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            add(tar, {"a.png": b"image", "a.json": sample})
        ((_, image, caption),) = read_samples(str(tmp_path / "a.tar"), "caption", 0, 1, None)
        assert (image, caption) in [(b"image", "b"), (b"image", None)]
        assert kind != "valid" or caption == "b", text
    assert accepted.difference(TABLES["json"]["either"]) == set(TABLES["json"]["valid"])


# --- tars ------------------------------------------------------------------------------------------------------------

IMAGE = b"image" * 205
NAMES = (
    "a", "a b", "ä", "日本", "a/b", "./a", "/a", "a" * 95, "a" * 96, "a" * 97, "a" * 300, "b" * 150 + "/a",
    "b/" * 60 + "a", "b/" * 200 + "a", "\udcff", "a\\b", "-a", "a=b\nc", "a\u202eb",
)  # fmt: skip


def add(tar: tarfile.TarFile, files: Mapping[str, bytes], **about: Any) -> None:
    """Append files to a tar."""
    for name, data in files.items():
        member = tarfile.TarInfo(name)
        member.size = len(data)
        for key, value in about.items():
            setattr(member, key, value)
        tar.addfile(member, io.BytesIO(data))


def named_tars() -> Iterator[tuple[int, str]]:
    """Yield formats of tars, each with the names that it has room for."""
    for form, name in product((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT), NAMES):
        with suppress(ValueError):
            tarfile.TarInfo(f"{name}.json").tobuf(form)
            yield form, name


@pytest.mark.parametrize(("form", "name"), named_tars())
def test_a_sample_of_a_tar_is_whole_in_every_format(tmp_path: Path, form: int, name: str) -> None:
    about = {"uid": 2097151, "mtime": 1.0, "uname": "ä", "mode": 0o7777, "pax_headers": {"comment": "a"}}
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            add(tar, {"link.png": b""}, type=kind, linkname="a.png")
        add(tar, {f"{name}.png": IMAGE, f"{name}.txt": b"caption", f"{name}.json": b"{}"}, **about)
        add(tar, {"z.png": b"z"})
    samples = read_samples(str(tmp_path / "a.tar"), "caption", 0, 2, None)
    assert [sample[1:] for sample in samples] == [(IMAGE, "caption"), (b"z", None)]
    whole = (tmp_path / "a.tar").read_bytes()
    for end in (600, whole.index(IMAGE) + 600, whole.index(b"caption") + 3, whole.index(b"z.png") + 3):
        (tmp_path / "b.tar").write_bytes(whole[:end])
        with pytest.raises(DatasetError, match="its end is missing"):
            count_samples(str(tmp_path / "b.tar"))


# --- images ----------------------------------------------------------------------------------------------------------

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""The samples of a pixel by a PNG's colour type."""
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
PNGS = [
    (colours, bits, interlaced, keyed)
    for colours, depths in DEPTHS.items()
    for bits in depths
    for interlaced in (0, 1)
    for keyed in (False, True)[: 1 + (colours < 4)]
]


def packed(samples: NDArray[np.int64], bits: int) -> bytes:
    """Return rows of samples as a PNG stores them, without a filter."""
    rows = samples.reshape(len(samples), -1)
    if bits == 16:
        return b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    places = (rows[..., None] >> np.arange(bits - 1, -1, -1) & 1).reshape(len(rows), -1)
    return b"".join(b"\0" + np.packbits(row.astype(np.uint8)).tobytes() for row in places)


def png(colours: int, bits: int, interlaced: int, keyed: bool) -> tuple[bytes, NDArray[np.float64]]:
    """Return a PNG of a kind, and its pixels over white; if `keyed`, those of its first pixel's value are clear."""
    most = (1 << bits) - 1
    draw = np.random.default_rng([colours, bits])
    samples = draw.integers(0, most + 1, (13, 11, CHANNELS[colours]))
    palette = draw.integers(0, 256, (most + 1, 3)).astype(np.uint8)
    first = samples[0, 0]
    key = bytes([*[255] * first[0], 0]) if colours == 3 else first.astype(">u2").tobytes()
    parts = [samples[top::down, left::across] for left, top, across, down in PASSES] if interlaced else [samples]
    header = struct.pack(">IIBBBBB", 11, 13, bits, colours, 0, 0, interlaced)
    chunks = [chunk(b"IHDR", header)]
    if colours == 3:
        chunks.append(chunk(b"PLTE", palette.tobytes()))
    if keyed:
        chunks.append(chunk(b"tRNS", key))
    pixels = zlib.compress(b"".join(packed(part, bits) for part in parts if part.size))
    data = b"\x89PNG\r\n\x1a\n" + b"".join([*chunks, chunk(b"IDAT", pixels), chunk(b"IEND", b"")])
    opaque = samples[..., -1:] / most if colours >= 4 else np.ones((13, 11, 1))
    if keyed:
        opaque = 1.0 - (samples == first).all(-1, keepdims=True)
    colour = palette[samples[..., 0]] if colours == 3 else samples[..., : 3 if colours in (2, 6) else 1] * 255 / most
    return data, np.broadcast_to(colour * opaque + 255 * (1 - opaque), (13, 11, 3))


@pytest.mark.parametrize(("colours", "bits", "interlaced", "keyed"), PNGS)
def test_a_png_of_any_kind_has_its_pixels_over_white(colours: int, bits: int, interlaced: int, keyed: bool) -> None:
    data, expected = png(colours, bits, interlaced, keyed)
    assert np.abs(decode(data).pixels - expected).max() <= (2 if colours >= 4 else 1)  # two roundings


RAMP = np.stack([*np.meshgrid(np.linspace(0, 255, 40), np.linspace(255, 0, 30)), np.full((30, 40), 90.0)], -1)
"""A picture whose colours change slowly, so that lossy formats keep them."""
KINDS: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "JPEG": [
        *(("RGB", 8, {"quality": 98, "subsampling": n, "progressive": p}) for n in range(3) for p in (False, True)),
        ("L", 8, {"quality": 98}), ("CMYK", 8, {"quality": 98}), ("CMYK", 8, {"quality": 98, "progressive": True}),
        ("RGB", 8, {"quality": 98, "restart_marker_blocks": 1}), ("RGB", 8, {"quality": 98, "keep_rgb": True}),
    ],
    "PNG": [(mode, 0, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
    "WEBP": [(mode, 0, {"lossless": True, "exact": True}) for mode in ("RGB", "RGBA")] + [("RGB", 12, {"quality": 98})],
    "GIF": [(mode, 0, {"interlace": n}) for mode in ("1", "L", "P") for n in (0, 1)],
    "BMP": [(mode, 0, {}) for mode in ("1", "L", "P", "RGB", "RGBA")],
    "TIFF": [
        *(
            (mode, 0, {"compression": f"tiff_{packing}" if packing != "raw" else packing, "big_tiff": big})
            for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
            for packing in ("raw", "lzw", "deflate", "adobe_deflate")
            for big in (False, True)
        ),
        ("1", 0, {"compression": "group4"}), ("1", 0, {"compression": "group3"}),
        ("RGB", 0, {"compression": "packbits"}), ("RGB", 8, {"compression": "jpeg", "quality": 98}), ("I;16", 1, {}),
    ],
    "AVIF": [("RGB", 12, {"quality": 98, "subsampling": n}) for n in ("4:4:4", "4:2:2", "4:2:0")],
}  # fmt: skip


def variants() -> Iterator[tuple[str, str, int, dict[str, Any], int]]:
    for kind, rows in KINDS.items():
        for mode, tolerance, options in rows:
            yield kind, mode, tolerance, options, 1
            if kind not in ("JPEG", "BMP"):  # which hold one picture a file
                yield kind, mode, tolerance, options, 2


@pytest.mark.parametrize(("kind", "mode", "tolerance", "options", "frames"), variants())
def test_an_image_of_any_kind_has_its_colours_or_is_refused_where_it_ends_early(
    kind: str, mode: str, tolerance: int, options: dict[str, Any], frames: int
) -> None:
    rgb = Pillow.fromarray(RAMP.round().astype(np.uint8))
    if mode == "I;16":
        picture, expected = Pillow.fromarray((RAMP[..., 0] * 257).astype(np.uint16)), np.repeat(RAMP[..., :1], 3, -1)
    else:
        picture = rgb.quantize(64) if mode == "P" else rgb.convert(mode)
        expected = np.asarray(picture.convert("RGB"), np.float64)
    more = {"save_all": True, "append_images": [Pillow.new(picture.mode, picture.size)]} if frames > 1 else {}
    file = io.BytesIO()
    picture.save(file, kind, **options, **more)
    data = file.getvalue()
    image = decode(data)
    assert (image.format, image.width, image.height) == (kind, 40, 30)
    assert np.abs(image.pixels - expected).max() <= tolerance
    for part in range(1, 20):
        with suppress(ImageError):
            assert np.array_equal(decode(data[: part * len(data) // 20]).pixels, image.pixels)
