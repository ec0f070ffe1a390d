"""A synthetic set of captioned pictures: coloured shapes, in the encodings and sizes that a crawl meets.

Everything about picture `i` follows from (seed, i): `sample` describes it, `render` paints it, `encode` returns its
bytes, and `metadata_table` lists it as LAION would. The pixels come from hashes and correctly rounded arithmetic only,
so they are the same on every machine; the bytes of JPEG and WebP depend on Pillow's version.

`sample` and `metadata_table` need neither Pillow nor torch.
"""

import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from PIL import Image

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 40),
    "green": (40, 160, 65),
    "blue": (40, 80, 215),
    "yellow": (245, 220, 45),
    "purple": (135, 45, 165),
    "orange": (245, 135, 25),
    "white": (245, 245, 245),
    "black": (18, 18, 18),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
CAPTIONS = (
    "a {color} {shape} on a {background} background",
    "a {color} {shape} in front of a {background} background",
    "a picture of a {color} {shape} on a {background} background",
)
_RARE_CAPTIONS = 0.15
"""Share of captions that do not use the first template."""
_COLUMNS = pa.schema(
    [
        *(("URL", pa.string()), ("TEXT", pa.string()), ("WIDTH", pa.int32()), ("HEIGHT", pa.int32())),
        *(("similarity", pa.float64()), ("hash", pa.int64())),
        *((name, pa.float32()) for name in ("punsafe", "pwatermark", "aesthetic")),
    ]
)
"""LAION's columns."""

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Mode = Literal["RGB", "RGBA", "P", "L", "CMYK"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """The file format of a picture."""

    format: Literal["JPEG", "PNG", "WEBP"]
    mode: Mode = "RGB"
    quality: int = 90
    subsampling: Literal["4:4:4", "4:2:2", "4:2:0"] = "4:2:0"
    progressive: bool = False
    lossless: bool = False
    orientation: int = 1
    """EXIF orientation. The stored pixels are transposed so that it shows the picture upright."""

    @property
    def content_type(self) -> str:
        return f"image/{self.format.lower()}"

    @property
    def extension(self) -> str:
        return {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[self.format]


@dataclass(frozen=True, slots=True)
class Shape:
    """A picture of the set. Lengths are fractions of the shorter side, measured from the centre."""

    index: int
    seed: int
    color: str
    shape: str
    background: str
    caption: str
    width: int
    height: int
    x: float
    y: float
    radius: float
    tilt: float
    """Tangent of half the shape's angle of rotation."""
    noise: float
    """Amplitude of the texture at full size, in levels of 255."""
    encoding: Encoding

    @property
    def path(self) -> str:
        """Path below the server's base URL."""
        return f"images/{self.index:09d}.{self.encoding.extension}"


def sample(i: int, seed: int = 0) -> Shape:
    """Return the description of picture `i`."""
    draw = Draws(seed, i)
    color = draw.choice(tuple(COLORS))
    background = draw.choice(tuple(name for name in COLORS if name != color))
    shape = draw.choice(SHAPES)
    rare = draw.choice(CAPTIONS[1:])
    caption = (
        (rare if draw.unit() < _RARE_CAPTIONS else CAPTIONS[0])
        .format(color=color, shape=shape, background=background)
        .replace("a orange", "an orange")
    )
    shorter = 200 + draw.below(201)
    longer = round(shorter * (1 + 0.67 * draw.unit() ** 2))
    width, height = (longer, shorter) if draw.unit() < 0.55 else (shorter, longer)
    return Shape(
        index=i,
        seed=seed,
        color=color,
        shape=shape,
        background=background,
        caption=caption,
        width=width,
        height=height,
        x=draw.between(-0.05, 0.05),
        y=draw.between(-0.05, 0.05),
        radius=draw.between(0.25, 0.34),
        tilt=draw.between(-0.09, 0.09),
        noise=draw.between(4, 14),
        encoding=_encoding(draw, grey={color, background} == {"white", "black"}),
    )


def render(shape: Shape, size: int | tuple[int, int] | None = None) -> "Image.Image":
    """Paint the picture upright: at its own size, at (width, height), or as a square of `size`.

    The square equals a resize of the shorter side and a centre crop.
    """
    from PIL import Image

    return Image.fromarray(render_array(shape, size))


def render_array(shape: Shape, size: int | tuple[int, int] | None = None) -> Bytes:
    """Return the pixels of `render`, height × width × 3, without Pillow."""
    if size is None:
        size = (shape.width, shape.height)
    width, height = (size, size) if isinstance(size, int) else size
    draw = Draws(shape.seed, shape.index, "paint")
    shorter = min(width, height)
    across = (np.arange(width, dtype=np.float32) + np.float32(0.5 - width / 2)) / np.float32(shorter)
    down = (np.arange(height, dtype=np.float32) + np.float32(0.5 - height / 2)) / np.float32(shorter)

    shade = np.float32(draw.between(-14, 14)) * across[None, :] + np.float32(draw.between(-14, 14)) * down[:, None]
    # Resizing averages the texture out, so a small picture has less of it.
    shade += _texture(draw, height, width, shape.noise * shorter / min(shape.width, shape.height))
    ground = _tinted(draw, COLORS[shape.background])
    paint = _tinted(draw, COLORS[shape.color])
    cover = _coverage(shape, across, down, shorter)

    image = np.empty((height, width, 3), np.uint8)
    for channel in range(3):
        plane = cover * np.float32(paint[channel] - ground[channel]) + shade
        plane += np.float32(ground[channel] + 0.5)
        image[..., channel] = np.clip(plane, 0, 255, out=plane)
    return image


def encode(shape: Shape) -> tuple[bytes, str, str]:
    """Return the encoded picture: (bytes, content type, file extension)."""
    encoding = shape.encoding
    image = _transposed(_in_mode(render(shape), encoding.mode), encoding.orientation)
    out = io.BytesIO()
    if encoding.format == "JPEG":
        options: dict[str, Any] = {"quality": encoding.quality, "progressive": encoding.progressive}
        if encoding.mode != "L":
            options["subsampling"] = encoding.subsampling
        if encoding.orientation != 1:
            exif = image.getexif()
            exif[0x0112] = encoding.orientation
            options["exif"] = exif
        image.save(out, "JPEG", **options)
    elif encoding.format == "PNG":
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(
            out, "WEBP", quality=encoding.quality, lossless=encoding.lossless, method=0 if encoding.lossless else 2
        )
    return out.getvalue(), encoding.content_type, encoding.extension


def metadata_table(
    n: int, base_url: str | Sequence[str], seed: int = 0, start: int = 0, failing: bool = False
) -> pa.Table:
    """Return the metadata of `n` pictures from `start`, in LAION's columns.

    The pictures use several base URLs in turn. With `failing`, some URLs ask the server for a failure.
    """
    bases = [base.rstrip("/") for base in ([base_url] if isinstance(base_url, str) else base_url)]
    rows = []
    for shape in (sample(i, seed) for i in range(start, start + n)):
        url = f"{bases[shape.index % len(bases)]}/{shape.path}{failure_of(shape.index) if failing else ''}"
        rows.append({"URL": url, "TEXT": shape.caption, "WIDTH": shape.width, "HEIGHT": shape.height, **_scores(shape)})
    return pa.Table.from_pylist(rows, _COLUMNS)


def write_metadata(
    folder: str | Path, n: int, base_url: str | Sequence[str], files: int = 1, seed: int = 0, failing: bool = False
) -> list[Path]:
    """Write the metadata as `files` Parquet files of nearly equal length; return their paths in order."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, (start, stop) in enumerate(itertools.pairwise(n * k // files for k in range(files + 1))):
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(metadata_table(stop - start, base_url, seed, start, failing), path)
        paths.append(path)
    return paths


FAILURES = {
    "?do=404": 4.0,
    "?do=410": 1.0,
    "?do=403": 1.0,
    "?do=500&times=1": 2.0,
    "?do=503&times=2": 0.2,
    "?do=429&after=1&times=1": 0.2,
    "?do=redirect": 2.0,
    "?do=html": 1.0,
    "?do=zero": 1.0,
    "?do=cut-image": 1.0,
    "?do=truncate": 1.0,
    "?do=robots": 0.5,
}
"""Queries by which URLs ask `tests.misbehaving` to fail as old links do, and the percentage of pictures with each."""


def failure_of(index: int) -> str:
    """Return the query of a picture's URL, which depends only on its index; empty if the picture comes at once."""
    position = Draws(0, index, "failure").between(0, 100)
    ends = itertools.accumulate(FAILURES.values())
    return next((query for query, end in zip(FAILURES, ends, strict=True) if position < end), "")


def dominant_shape_color(image: "Image.Image | Bytes", background: str | None = None) -> str:
    """Return the name of the shape's colour in the middle of any picture, painted or generated.

    It is the most frequent colour there besides `background`, or the background if nearly all pixels have its colour.
    """
    pixels = np.asarray(image if isinstance(image, np.ndarray) else image.convert("RGB"))
    height, width = pixels.shape[:2]
    reach = max(1, min(height, width) // 5)
    middle = pixels[height // 2 - reach : height // 2 + reach, width // 2 - reach : width // 2 + reach, :3]
    names = list(COLORS)
    votes = np.bincount(_nearest_colors(middle).ravel(), minlength=len(names))
    if background is not None:
        ground = names.index(background)
        if votes.sum() - votes[ground] < 0.1 * votes.sum():
            return background
        votes[ground] = 0
    return names[int(votes.argmax())]


def is_ring(image: "Image.Image", background: str) -> bool:
    """Return whether a picture shows a shape with background in its middle."""
    foreground = _nearest_colors(np.asarray(image.convert("RGB"))) != list(COLORS).index(background)
    side = len(foreground)
    middle = foreground[2 * side // 5 : 3 * side // 5, 2 * side // 5 : 3 * side // 5]
    return bool(foreground.mean() > 0.05 and middle.mean() < 0.5)


def _nearest_colors(pixels: Bytes) -> npt.NDArray[np.intp]:
    """Return the position in COLORS of the colour nearest to each pixel."""
    palette = np.array(list(COLORS.values()), np.float32)
    distance = ((pixels[:, :, None].astype(np.float32) - palette) ** 2).sum(axis=3)
    nearest: npt.NDArray[np.intp] = distance.argmin(axis=2)
    return nearest


def _scores(shape: Shape) -> dict[str, float]:
    draw = Draws(shape.seed, shape.index, "scores")
    return {
        "similarity": draw.between(0.24, 0.42),
        "hash": draw.below(1 << 63),
        "punsafe": draw.unit() ** 8,
        "pwatermark": draw.unit() ** 3,
        "aesthetic": draw.between(4.0, 7.5),
    }


class Draws:
    """Random numbers that depend only on a key, the same in every version of Python and NumPy."""

    def __init__(self, seed: int, index: int, what: str = "sample") -> None:
        self._key = f"sdp.demo.shapes/{what}/{seed}/{index}"
        self._numbers = self._stream()

    def _stream(self) -> Iterator[int]:
        for block in itertools.count():
            digest = hashlib.blake2b(f"{self._key}/{block}".encode()).digest()
            yield from (int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))

    def unit(self) -> float:
        """Return a number in [0, 1)."""
        return (next(self._numbers) >> 11) / (1 << 53)

    def between(self, low: float, high: float) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * self.unit()

    def below(self, stop: int) -> int:
        """Return an integer in [0, stop)."""
        return (next(self._numbers) * stop) >> 64

    def choice(self, options: tuple[str, ...]) -> str:
        """Return one of the options."""
        return options[self.below(len(options))]

    def noise(self, count: int) -> Bytes:
        """Return random bytes. NumPy guarantees the raw output of a bit generator."""
        raw = np.random.PCG64(next(self._numbers)).random_raw(-(-count // 8))
        return raw.astype("<u8", copy=False).view(np.uint8)[:count]


def _encoding(draw: Draws, *, grey: bool) -> Encoding:
    """Return an encoding, mostly JPEG as on the web. Grey only if the caption names no hue."""
    kind, quality, chroma, other = draw.unit(), 70 + draw.below(27), draw.unit(), draw.unit()
    if grey and other < 0.5:
        return Encoding("JPEG", "L", quality) if kind < 0.7 else Encoding("PNG", "L")
    if kind < 0.74:
        return Encoding(
            "JPEG",
            mode="CMYK" if other < 0.01 else "RGB",
            quality=quality,
            subsampling="4:2:0" if chroma < 0.65 else "4:2:2" if chroma < 0.8 else "4:4:4",
            progressive=draw.unit() < 0.25,
            orientation=2 + draw.below(7) if 0.01 <= other < 0.09 else 1,
        )
    if kind < 0.82:
        return Encoding("PNG")
    if kind < 0.86:
        return Encoding("PNG", "RGBA")
    if kind < 0.90:
        return Encoding("PNG", "P")
    return Encoding("WEBP", quality=quality, lossless=other < 0.15)


def _tinted(draw: Draws, color: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(min(255, max(0, level + draw.below(17) - 8)) for level in color)


def _texture(draw: Draws, height: int, width: int, amplitude: float) -> Floats:
    """Return grey grain, tiled, since a new number for each pixel would take longer than the rest of the painting."""
    side = 256
    grain = draw.noise(2 * side * side).reshape(2, side, side).astype(np.float32)
    # The sum of two bytes is roughly bell-shaped; its standard deviation is 104.5.
    tile = (grain[0] + grain[1] - np.float32(255)) * np.float32(amplitude / 104.5)
    return np.tile(tile, (-(-height // side), -(-width // side)))[:height, :width]


def _coverage(shape: Shape, across: Floats, down: Floats, shorter: int) -> Floats:
    """Return each pixel's coverage by the shape, from 0 to 1, with a soft edge one pixel wide."""
    # The rotation from the half-angle's tangent avoids sine, whose last digit differs between machines.
    scale = 1 + shape.tilt**2
    cos, sin = np.float32((1 - shape.tilt**2) / scale), np.float32(2 * shape.tilt / scale)
    x0, y0 = (across - np.float32(shape.x))[None, :], (down - np.float32(shape.y))[:, None]
    x, y = cos * x0 + sin * y0, cos * y0 - sin * x0
    outside = _outside(shape.shape, x, y, np.float32(shape.radius)) * np.float32(shorter)
    cover: Floats = np.clip(np.float32(0.5) - outside, 0, 1)
    return cover


_PENTAGON = (
    (0.0, -1.0),
    (0.9510565, -0.3090170),
    (0.5877853, 0.8090170),
    (-0.5877853, 0.8090170),
    (-0.9510565, -0.3090170),
)
"""Normals of a pentagon's five sides. Lines at 0.42 radii make tips that reach 1.36 radii."""


def _outside(shape: str, x: Floats, y: Floats, radius: np.float32) -> Floats:
    """Return the signed distances to a shape's outline, negative inside."""
    across, down = np.abs(x), np.abs(y)
    match shape:
        case "circle":
            return np.sqrt(x * x + y * y) - radius
        case "ring":  # in no sample: `scripts.demo.subject` teaches it
            return np.abs(np.sqrt(x * x + y * y) - radius * np.float32(0.9)) - radius * np.float32(0.3)
        case "square":
            return np.maximum(across, down) - radius * np.float32(0.87)
        case "triangle":  # centred a little low to keep its tip in the picture
            y = y - radius * np.float32(0.2)
            slope = across * np.float32(0.8660254) - y * np.float32(0.5)
            return np.maximum(slope, y) - radius * np.float32(0.6)
        case "star":  # a pentagram: the points inside at least four of its five lines
            most = second = np.full_like(x, -np.inf)  # the largest distances so far
            for nx, ny in _PENTAGON:
                line = x * np.float32(nx) + y * np.float32(ny)
                second, most = np.maximum(second, np.minimum(most, line)), np.maximum(most, line)
            return second - radius * np.float32(0.42)
        case _:  # a cross
            long, short = radius * np.float32(1.1), radius * np.float32(0.4)
            along = np.maximum(across - long, down - short)
            return np.minimum(along, np.maximum(across - short, down - long))


def _in_mode(image: "Image.Image", mode: Mode) -> "Image.Image":
    from PIL import Image

    if mode == "P":
        return image.quantize(96, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(_rounded_corners(image.width, image.height)))
        return image
    return image if mode == "RGB" else image.convert(mode)


def _rounded_corners(width: int, height: int) -> Bytes:
    """Return an alpha channel with transparent corners, far from the shape, so that any background fits the caption."""
    across = np.maximum(np.abs(np.arange(width) + 0.5 - width / 2) - (width - height // 3) / 2, 0)
    down = np.maximum(np.abs(np.arange(height) + 0.5 - height / 2) - (height - height // 3) / 2, 0)
    outside = np.sqrt(across[None, :] ** 2 + down[:, None] ** 2) - height / 6
    alpha: Bytes = np.clip((0.5 - outside) * 255, 0, 255).astype(np.uint8)
    return alpha


_INVERSES = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_90", "TRANSVERSE", "ROTATE_270")
"""Pillow's names of the inverses of EXIF orientations 2 to 8."""


def _transposed(image: "Image.Image", orientation: int) -> "Image.Image":
    """Apply the inverse of an EXIF orientation."""
    from PIL.Image import Transpose

    return image if orientation == 1 else image.transpose(Transpose[_INVERSES[orientation - 2]])
