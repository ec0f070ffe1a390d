"""Synthetic JPEGs that are like photographs to a codec, for benchmarks without a network.

A scene has the spectrum of natural images (amplitude falling as 1/f^1.3), objects with sharp edges, the blur of a lens
and the noise of a sensor. Each photograph is a piece of one of a few large scenes, flipped, brightened and stored as on
the web: mostly 4:2:0, some progressive, qualities of 84 to 96, sizes around 950 × 790. The average is 180 KB, and 27 KB
as 256 × 256 at quality 95, like LAION's images.
"""

from functools import partial
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from scripts.bench._cases import sized

Pixels = npt.NDArray[np.uint8]

_SCENES = sized(24, 1)
_SCENE = sized((1500, 1800), (600, 720))


def make_photos(folder: Path, count: int, seed: int = 0) -> int:
    """Write 00000.jpg, 00001.jpg, …; return their total size in bytes."""
    folder.mkdir(parents=True)
    scenes = list(map(partial(_scene, seed), range(min(_SCENES, count))))
    total = 0
    for number in range(count):
        data = _photo(scenes[number % len(scenes)], np.random.default_rng([seed, 1, number]))
        (folder / f"{number:05d}.jpg").write_bytes(data)
        total += len(data)
    return total


def _photo(scene: Pixels, random: np.random.Generator) -> bytes:
    area = 950 * 790 * random.lognormal(0, 0.35)
    aspect = random.choice([4 / 3, 3 / 2, 1.0, 3 / 4, 16 / 9]) * random.uniform(0.95, 1.05)
    width = int(np.clip((area * aspect) ** 0.5, 300, _SCENE[1]))
    height = int(np.clip((area / aspect) ** 0.5, 300, _SCENE[0]))
    left, top = (int(random.integers(0, most - side + 1)) for most, side in ((_SCENE[1], width), (_SCENE[0], height)))
    piece = scene[top : top + height, left : left + width].astype(np.float32)
    if random.random() < 0.5:
        piece = piece[:, ::-1]
    piece = (piece - 128) * random.uniform(0.8, 1.15) + 128 + random.uniform(-25, 25)
    piece += (
        random.standard_normal((height // 2 + 1, width // 2 + 1, 1)).repeat(2, 0).repeat(2, 1)[:height, :width] * 2.5
    )
    options = [cv2.IMWRITE_JPEG_QUALITY, int(random.integers(84, 97))]
    options += [cv2.IMWRITE_JPEG_PROGRESSIVE, int(random.random() < 0.2)]
    _, data = cv2.imencode(".jpg", np.clip(piece, 0, 255).astype(np.uint8), options)
    return data.tobytes()


def _scene(seed: int, number: int) -> Pixels:
    random = np.random.default_rng([seed, 0, number])
    height, width = _SCENE
    luma, blue, red = (_natural(random, height, width) for _ in range(3))
    scene = np.stack([128 + 48 * luma + 14 * blue, 128 + 48 * luma, 128 + 48 * luma + 14 * red], -1)
    scene = np.clip(scene, 0, 255).astype(np.uint8)
    for _ in range(60):
        colour = tuple(int(level) for level in random.integers(20, 236, 3))
        centre = (int(random.integers(0, width)), int(random.integers(0, height)))
        axes = (int(random.integers(10, 220)), int(random.integers(10, 220)))
        overlay = scene.copy()
        cv2.ellipse(overlay, centre, axes, float(random.uniform(0, 180)), 0, 360, colour, -1, cv2.LINE_AA)
        scene = cv2.addWeighted(overlay, 0.6, scene, 0.4, 0)
    blurred: Pixels = cv2.GaussianBlur(scene, (0, 0), 0.7)
    return blurred


def _natural(random: np.random.Generator, height: int, width: int) -> npt.NDArray[np.float64]:
    """Return a plane with random phases and amplitudes that fall as 1/f^1.3, with mean 0 and deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    spectrum = (random.standard_normal(frequency.shape) + 1j * random.standard_normal(frequency.shape)) / frequency**1.3
    spectrum[0, 0] = 0
    plane = np.fft.irfft2(spectrum, (height, width))
    return plane / plane.std()
