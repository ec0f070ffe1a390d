"""Preparation of a run: the size of parts, the division of work, and unusable sources."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.datasets.outcomes import WRITTEN, Outcome, account_table
from sdp.datasets.parts import serialise
from sdp.datasets.units import Unit, Work
from sdp.encode.recipe import TEXT
from sdp.encode.table import LAYOUT, schema
from sdp.errors import DatasetError, ModelError
from sdp.model import sources
from sdp.process.prepare import Prepared, prepare
from tests.process_kit import config_of, make_images, picture, write_plain


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "plain"
    write_plain(folder, 4, files=1)
    return folder


def prepared(source: Path, *settings: str) -> Prepared:
    return prepare(config_of(source, source.parent / "out", "builtin:tiny", *settings))


def part_of(job: Prepared) -> int:
    """The bytes of a whole unit's part, its values being noise."""
    columns, rows = schema(job.spec.shape), job.head.unit_rows
    draw = np.random.default_rng(0)
    arrays = []
    for field in columns:
        if pa.types.is_fixed_size_binary(field.type):
            data = pa.py_buffer(draw.bytes(rows * field.type.byte_width))
            arrays.append(pa.FixedSizeBinaryArray.from_buffers(field.type, rows, [None, data]))
        elif field.name == "key":
            arrays.append(pa.array([f"{row:012d}" for row in range(rows)]))
        else:
            arrays.append(pa.array(np.arange(rows), field.type))
    account = account_table([Outcome(row, WRITTEN) for row in range(rows)])
    made = pa.Table.from_arrays(arrays, schema=columns)
    return len(serialise("latents", Work(Unit(0, 0, rows)), made, account, layout=LAYOUT))


# --- how large parts become ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [[], ["resolutions=[64,128]"], ["encode.latents=moments"], ["encode.text=text_embedding"], ["resolutions=[256]"]],
)
def test_a_part_comes_out_near_the_target(plain: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.process.prepare.PART_BYTES", 4_000_000)
    job = prepared(plain, *settings)
    assert 0.9 * 4_000_000 < part_of(job) < 1.1 * 4_000_000


def test_only_images_that_sdp_download_has_decoded_are_decoded_without_a_sandbox(tmp_path: Path, plain: Path) -> None:
    make_images(tmp_path, rows=20, unit_rows=20)
    assert not prepared(tmp_path / "images").spec.foreign
    assert prepared(plain).spec.foreign


def test_units_are_whole_units_of_the_images_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_images(tmp_path, rows=40, unit_rows=20)
    monkeypatch.setattr("sdp.process.prepare.PART_BYTES", 100_000)
    by_itself = prepared(tmp_path / "images").head.unit_rows
    assert by_itself % 20 == 0
    assert 100 < by_itself < 160
    monkeypatch.setattr("sdp.process.prepare.PART_BYTES", 5000)
    assert prepared(tmp_path / "images").head.unit_rows < 20


# --- how work is cut up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        (["resolutions=[256]"], 1024),
        (["resolutions=[512]"], 256),
        (["resolutions=[256,512]"], 128),
        (["resolutions=[64]"], 256),
        (["resolutions=[2048]"], 16),
        (["resolutions=[4096]"], 4),
    ],
)
def test_a_piece_is_about_200_mb_of_pixels(plain: Path, settings: list[str], rows: int) -> None:
    assert prepared(plain, *settings).piece_rows == rows


@pytest.mark.parametrize(
    ("setting", "sizes"), [("null", {256: 64, 512: 16}), ("8", {256: 8, 512: 8}), ("[32, 4]", {256: 32, 512: 4})]
)
def test_batch_sizes_are_by_resolution_and_never_the_resolution_itself(
    plain: Path, setting: str, sizes: dict[int, int]
) -> None:
    actual = prepared(plain, "resolutions=[256,512]", f"encode.batch_size={setting}").spec.settings.batch_sizes
    assert {side: count for side, count in actual.items() if side != TEXT} == sizes


def test_the_images_to_encode_are_those_that_upstream_wrote(tmp_path: Path, plain: Path) -> None:
    make_images(tmp_path, rows=40, unit_rows=20)  # every tenth has failed
    assert prepared(tmp_path / "images").images_of(40) == 36
    assert prepared(plain).images_of(20) == 20


# --- sources that cannot be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "values", "line"),
    [
        ("image", pa.array(["http://host/a.jpg"]), "source.image_column: expected a column of bytes, but image in "),
        ("image", pa.array([[1, 2]], pa.list_(pa.uint8())), "source.image_column: expected a column of bytes"),
        ("image", pa.array([{"path": "a"}]), "source.image_column: expected a column of bytes"),
        ("caption", pa.array([["a", "b"]]), "source.caption_column: expected a column of text, but caption in "),
        ("caption", pa.array([7]), "source.caption_column: expected a column of text"),
    ],
)
def test_a_column_of_another_type_is_refused(tmp_path: Path, column: str, values: pa.Array, line: str) -> None:
    columns = {"image": pa.array([picture(0)], pa.binary()), "caption": pa.array(["c"]), column: values}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DatasetError) as refused:
        prepared(tmp_path / "a.parquet")
    assert str(refused.value).startswith(line)
    assert f" is of {str(values.type)[:4]}" in str(refused.value)


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), STRUCT])
@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_columns_of_bytes_and_text_of_any_kind_are_taken(tmp_path: Path, kind: pa.DataType, text: pa.DataType) -> None:
    image = {"bytes": picture(0), "path": "a"} if kind == STRUCT else picture(0)
    captions = pa.array(["c"]).cast(text) if text != pa.binary() else pa.array([b"c"])
    pq.write_table(pa.table({"image": pa.array([image], kind), "caption": captions}), tmp_path / "a.parquet")
    assert prepared(tmp_path / "a.parquet").pictures.files


# --- models whose configuration is not quite ours -------------------------------------------------------------------


def changed_model(folder: Path, part: str, **changes: object) -> Path:
    """The tiny model with other keys in a part's config.json; None takes a key away."""
    shutil.copytree(sources.resolve("builtin:tiny").path, folder)
    file = folder / part / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def test_a_vae_older_than_the_key_for_its_scaling_is_scaled_as_stable_diffusion_is(tmp_path: Path, plain: Path) -> None:
    model = changed_model(tmp_path / "model", "vae", scaling_factor=None)
    assert prepare(config_of(plain, tmp_path / "out", model)).spec.shape.space.scale == 0.18215


NO_NUMBER = r"vae/config.json: scaling_factor: expected a number above 0, got"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("scaling_factor", 1.0, r"^model\.source: .*scaling_factor 1\.0"),
        *(("scaling_factor", value, NO_NUMBER) for value in (0, -1, "much", True, [1])),
        ("shift_factor", "x", r"vae/config.json: cannot be loaded \(could not convert.*compare it with the"),
    ],
)
def test_a_vae_whose_scaling_cannot_be_used_is_refused(
    tmp_path: Path, plain: Path, key: str, value: object, line: str
) -> None:
    model = changed_model(tmp_path / "model", "vae", **{key: value})
    with pytest.raises(ModelError, match=line):
        prepare(config_of(plain, tmp_path / "out", model))


def test_packed_latents_of_a_vae_that_is_cut_short_are_refused(tmp_path: Path, plain: Path) -> None:
    model = shutil.copytree(sources.resolve("builtin:tiny-klein").path, tmp_path / "model")
    with (model / "vae/diffusion_pytorch_model.safetensors").open("r+b") as weights:
        weights.truncate(3000)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be loaded \(.*header.*compare it with the"):
        prepare(config_of(plain, tmp_path / "out", model))


def test_a_text_encoder_older_than_the_key_for_its_width_has_clips_own(tmp_path: Path, plain: Path) -> None:
    model = changed_model(tmp_path / "model", "text_encoder", hidden_size=None)
    job = prepare(config_of(plain, tmp_path / "out", model, "encode.text=text_embedding"))
    assert job.spec.shape.text.width == 512


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    image, caption = pa.array([picture(0)]), pa.array(["c"])
    table = pa.Table.from_arrays([image, image, caption], ["image", "image", "caption"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"source.image_column: .*a.parquet has 2 columns image; write it again"):
        prepared(tmp_path / "a.parquet")


@pytest.mark.parametrize("source", ["images/parts", "images/parts/*.parquet", "copy"])
def test_a_dataset_without_its_head_is_not_a_plain_source(tmp_path: Path, source: str) -> None:
    """Its takedowns would not be heeded, and its rows would get other addresses."""
    make_images(tmp_path, rows=20, unit_rows=20)
    shutil.copytree(tmp_path / "images" / "parts", tmp_path / "copy" / "parts")
    with pytest.raises(DatasetError, match=r"000000000.parquet is a part of a dataset of sdp; name the"):
        prepare(config_of(tmp_path / source, tmp_path / "out", "builtin:tiny"))
