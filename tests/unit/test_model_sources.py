"""Model sources: the accepted and refused forms, and the digest that identifies a model."""

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sdp.errors import ModelError, Unavailable
from sdp.families.sd import SD, SD1, SD2
from sdp.model import cache, layout, sources
from sdp.model.layout import PARTS
from sdp.model.sources import check, parse, resolve
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.storage.local import LocalStorage
from tests.kit import line_of

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(sources.local_folder(parse("builtin:tiny")), tmp_path / "model"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "sdp" / "models"


def refusal(call: Callable[[], object]) -> str:
    """The one line of a ModelError."""
    line = line_of(call, ModelError)
    assert line.startswith("model source ")
    return line


@pytest.mark.parametrize(
    ("text", "kind", "uri", "revision"),
    [
        ("builtin:tiny", "builtin", "builtin:tiny", None),
        (f"owner/name@{REVISION}", "hub", "owner/name", REVISION),
        ("./owner/name", "local", "./owner/name", None),
        ("/models/sd2", "local", "/models/sd2", None),
        ("~/models/sd2", "local", "~/models/sd2", None),
        ("file:///models/sd2", "local", "file:///models/sd2", None),
        ("models/sd/2", "local", "models/sd/2", None),
        ("s3://bucket/sd2/", "bucket", "s3://bucket/sd2", None),
        ("gs://bucket/sd2", "bucket", "gs://bucket/sd2", None),
    ],
)
def test_the_kind_of_a_source_follows_from_its_form(text: str, kind: str, uri: str, revision: str | None) -> None:
    source = parse(text)
    assert (source.kind, source.uri, source.revision) == (kind, uri, revision)


@pytest.mark.parametrize("end", ["", "@", "@main", "@0123abc", f"@{REVISION.upper()}", f"@{REVISION}0"])
def test_a_hub_repository_without_a_fixed_revision_is_refused(end: str) -> None:
    assert "no such folder" in (line := refusal(lambda: parse(f"owner/name{end}")))
    assert "write owner/name@COMMIT with the 40 hexadecimal digits" in line


@pytest.mark.parametrize(
    "text", ["", " ", "builtin:tiny ", "http://host/model", "hf://o/n", "builtins:tiny", "builtin:huge", "/no/folder"]
)
def test_other_forms_are_refused_with_the_forms_there_are(text: str) -> None:
    assert "builtin:tiny" in refusal(lambda: check(text))


def test_an_existing_folder_comes_before_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent.parent)
    name = f"{model.parent.name}/{model.name}"
    assert parse(name).kind == "local"
    assert parse(f"{name}@{REVISION}").kind == "hub"


@pytest.mark.parametrize(
    "name",
    [
        "vae/diffusion_pytorch_model.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "text_encoder/config.json",
        "tokenizer/vocab.json",
        "scheduler/scheduler_config.json",
    ],
)
def test_a_missing_file_is_named_even_if_a_pickled_one_is_there(model: Path, name: str) -> None:
    (model / name).rename((model / name).with_suffix(".bin"))
    assert f"{name} is missing" in (line := refusal(lambda: check(str(model), pretrained=True)))
    assert "reading a .bin may run code" in line
    check(str(model), [part for part in PARTS if SD.folder(part) != name.partition("/")[0]])


def test_a_network_that_begins_anew_needs_only_its_configuration(model: Path) -> None:
    (model / "unet/diffusion_pytorch_model.safetensors").unlink()
    check(str(model))
    (model / "unet/config.json").unlink()
    assert "unet/config.json is missing" in refusal(lambda: check(str(model)))


def test_weights_in_several_files_are_taken(model: Path) -> None:
    unet = model / "unet"
    (unet / "diffusion_pytorch_model.safetensors").rename(unet / "diffusion_pytorch_model-00001-of-00001.safetensors")
    (unet / "diffusion_pytorch_model.safetensors.index.json").write_text("{}")
    check(str(model))
    assert "unet/diffusion_pytorch_model-00001-of-00001.safetensors" in layout.present(model)


@pytest.mark.parametrize(
    ("part", "key", "value", "says"),
    [
        ("text_encoder", "hidden_size", 32, "expected 64, as the unet needs, got 32"),
        ("text_encoder", "hidden_size", None, "expected 64, as the unet needs, got None"),
        ("vae", "latent_channels", "4", "expected 4, as the unet needs, got '4'"),
        ("vae", "latent_channels", 16, "expected 4, as the unet needs, got 16"),
        ("vae", "_class_name", "VQModel", "expected 'AutoencoderKL'"),
        ("unet", "_class_name", "FluxTransformer2DModel", "expected 'UNet2DConditionModel'"),
        ("text_encoder", "model_type", "t5", "expected 'clip_text_model'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(model: Path, part: str, key: str, value: object, says: str) -> None:
    path = model / part / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert says in refusal(lambda: check(str(model)))


@pytest.mark.parametrize("text", ["not json", "[1]", "[" * 100_000])
def test_a_damaged_configuration_is_named(model: Path, text: str) -> None:
    (model / "vae/config.json").write_text(text)
    assert "vae/config.json is not" in refusal(lambda: check(str(model)))


def test_the_digest_is_the_one_of_sha256sum(model: Path) -> None:
    names = layout.present(model)
    sums = "".join(f"{hashlib.sha256((model / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    assert resolve(str(model)).digest == hashlib.sha256(sums.encode()).hexdigest()


def test_a_pinned_model_that_has_changed_is_refused(model: Path) -> None:
    pinned = resolve(str(model)).digest
    assert resolve(replace(parse(str(model)), sha256=pinned)).digest == pinned
    (model / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"other weights")
    line = refusal(lambda: resolve(replace(parse(str(model)), sha256=pinned)))
    assert pinned in line
    assert "has changed" in line


def test_the_digest_of_a_large_model_is_remembered_until_a_file_changes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "REMEMBER_FROM", 1)
    hashed = []
    real = layout.digest
    monkeypatch.setattr(layout, "digest", lambda path, names: hashed.append(path) or real(path, names))
    first = resolve(str(model)).digest
    assert resolve(str(model)).digest == first
    assert len(hashed) == 1
    (model / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"other weights")
    assert resolve(str(model)).digest != first
    assert len(hashed) == 2
    for record in (cache.folder() / "known").iterdir():
        record.write_text("")  # as after a loss of power
    assert len(resolve(str(model)).digest) == 64


# A local folder replaces the bucket here; tests/integration has an S3 server.


@pytest.fixture
def bucket(model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a bucket that is the folder `model`."""
    real = open_storage

    def opened(uri: str, options: StorageOptions | None = None) -> Storage:
        return real(str(model) if uri.startswith("s3://") else uri, options)

    monkeypatch.setattr("sdp.model.sources.open_storage", opened)
    monkeypatch.setattr("sdp.model.cache.open_storage", opened)
    return "s3://bucket/model"


def test_a_bucket_is_downloaded_once_for_several_threads_in_pieces(
    bucket: str, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    real = LocalStorage.read_range

    def counted(self: LocalStorage, path: str, start: int, length: int) -> bytes:
        if start == 0:
            reads.append(path)
        return real(self, path, start, length)

    monkeypatch.setattr(LocalStorage, "read_range", counted)
    monkeypatch.setattr(cache, "CHUNK", 100_000)
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: resolve(bucket), range(8)))
    assert len({each.path for each in models}) == 1
    assert sorted(reads) == layout.present(models[0].path)
    assert [path.name for path in home.iterdir() if path.name.startswith(".partial")] == []
    assert models[0].digest == resolve(str(model)).digest


def gone() -> bytes:
    raise Unavailable("the server is gone")


@pytest.mark.parametrize(("answer", "message"), [(gone, "gone"), (bytes, "ended early, at 0 of")])
def test_a_download_that_breaks_off_leaves_no_model_and_the_next_one_succeeds(
    bucket: str, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[], bytes], message: str
) -> None:
    real = LocalStorage.read_range
    reads: list[str] = []

    def breaking(self: LocalStorage, path: str, start: int, length: int) -> bytes:
        reads.append(path)
        return answer() if len(reads) == 4 else real(self, path, start, length)

    monkeypatch.setattr(LocalStorage, "read_range", breaking)
    with pytest.raises(Unavailable, match=message):
        resolve(bucket)
    assert [path.name for path in home.iterdir() if not path.name.startswith((".", "known"))] == []
    assert resolve(bucket).digest == resolve(str(model)).digest


def test_a_model_that_changes_during_its_download_is_not_kept(
    bucket: str, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStorage.read_range

    def changing(self: LocalStorage, path: str, start: int, length: int) -> bytes:
        data = real(self, path, start, length)
        (model / "vae/config.json").write_bytes(b"somebody else's, and longer")
        return data

    monkeypatch.setattr(LocalStorage, "read_range", changing)
    with pytest.raises(Unavailable, match=r"ended early|changed while it was downloaded"):
        resolve(bucket)
    assert [path.name for path in home.iterdir() if not path.name.startswith((".", "known"))] == []


def test_a_deep_index_is_that_of_no_family_and_a_huge_one_is_not_read(model: Path) -> None:
    (model / "model_index.json").write_text("[" * 100_000)
    check(str(model))
    local = resolve(str(model))
    assert (local.family, local.encoder_digest) == (SD, local.digest)
    for name in ("vae/config.json", "model_index.json"):
        with (model / name).open("wb") as file:
            file.truncate(10**9)  # of holes
        assert f"{name} is too large (1,000,000,000 bytes)" in refusal(lambda: check(str(model)))


def test_a_bucket_without_a_model_is_refused(bucket: str, model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()
    assert "no model" in refusal(lambda: resolve(bucket))
    assert "is missing" in refusal(lambda: check(bucket))
    assert "is missing" in refusal(lambda: resolve(str(model)))


def test_a_cache_that_cannot_be_written_is_one_line(bucket: str, home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("a file where the folder should be")
    with pytest.raises(Exception, match="XDG_CACHE_HOME") as caught:
        resolve(bucket)
    assert "\n" not in str(caught.value)


def test_the_family_of_a_source_follows_from_its_unet(model: Path) -> None:
    assert sources.known("builtin:tiny") is None
    for known in (SD1, SD2):
        (model / "unet/config.json").write_text(json.dumps(dict(known.unet)))
        assert sources.known(str(model)) is known
        (model / "unet/config.json").write_text(json.dumps({**known.unet, "layers_per_block": 3}))
        assert sources.known(str(model)) is None
    (model / "unet/config.json").write_text("[1]")
    with pytest.raises(ModelError):
        sources.known(str(model))


def test_the_store_of_a_source_is_opened_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def count(uri: str, options: StorageOptions | None = None) -> Storage:
        opened.append(uri)
        return open_storage(uri, options)

    monkeypatch.setattr("sdp.model.sources.open_storage", count)
    check(str(model))
    sources.family(str(model))
    assert opened == [str(model)] * 2, "once for each"
