"""Where a model comes from, and having it on this machine.

    builtin:tiny                      the tiny model that sdp carries
    owner/name@0123…cdef              a repository of the model hub, at one revision
    /folder, ./folder, file://…       a local folder
    s3://bucket/folder, gs://…        a folder in a bucket, downloaded once a machine

`check` finds out, on the driver and without torch, whether a source can be had: before anything costly is taken.
`resolve` gives the folder and its digest. A source pinned by `sha256` is refused when its content has changed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sdp.errors import ModelError
from sdp.model import layout
from sdp.model.family import MIRROR, SD1, SD2, Family
from sdp.model.layout import PARTS, Exists

if TYPE_CHECKING:
    from sdp.storage import StorageOptions

BUILTIN = "builtin:"
FORMS = "builtin:tiny, owner/name@REVISION on the model hub, a local folder (./model), or an s3:// or gs:// folder"

OTHER_SOURCES = (
    f"Stable Diffusion 2's own repositories left the hub in November 2025; a mirror is {MIRROR}, to be pinned by "
    "revision"
)

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>.*))?")
_REVISION = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A source as a configuration names it. Made by `parse`, which refuses what cannot be one."""

    kind: Literal["builtin", "hub", "local", "bucket"]
    uri: str
    """Without the revision."""
    revision: str | None = None
    """Of a hub source: the commit, 40 hexadecimal digits."""
    sha256: str | None = None
    """The digest that the content must have; see `sdp.model.layout.digest`."""

    def __str__(self) -> str:
        return f"{self.uri}@{self.revision}" if self.revision else self.uri


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine."""

    path: Path
    digest: str
    source: ModelSource


def parse(text: str, *, revision: str | None = None, sha256: str | None = None) -> ModelSource:
    """The source that a configuration names."""
    source = _located(text, revision)
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise ModelError(f"model source {text}: sha256: expected 64 hexadecimal digits, got {sha256!r}")
    if source.kind != "hub" and revision is not None:
        raise ModelError(f"model source {text}: only a hub source has a revision; pin this one by its sha256")
    return replace(source, sha256=sha256)


def check(
    source: ModelSource | str,
    parts: Sequence[str] = PARTS,
    *,
    storage: "StorageOptions | None" = None,
) -> ModelSource:
    """Raise ModelError unless the source is there and has these parts, of fitting shapes.

    Cheap: names and configurations are looked at, weights are not read and nothing is downloaded but a few
    kilobytes. Needs no torch.
    """
    source = parse(source) if isinstance(source, str) else source
    if source.kind == "hub":
        from sdp.model import hub

        _refuse_lacking(source, hub.exists(source), parts)
    elif source.kind == "bucket":
        from sdp.storage import open_storage

        folder = open_storage(source.uri, storage)
        _refuse_lacking(source, folder.exists, parts)
        _refuse_contradiction(source, layout.contradiction(folder.read, parts))
    else:
        _check_folder(source, local_folder(source), parts)
    return source


def resolve(
    source: ModelSource | str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    storage: "StorageOptions | None" = None,
) -> LocalModel:
    """The source as a folder of this machine: downloaded if it has to be, at most once however many ask.

    The digest is of the content; with a pinned `sha256` any other content is refused.
    """
    if isinstance(source, str):
        source = parse(source, revision=revision, sha256=sha256)
    from sdp.model import cache

    if source.kind == "hub":
        from sdp.model import hub

        path = hub.download(source)
    elif source.kind == "bucket":
        path = cache.download(source, storage)
    else:
        path = local_folder(source)
    names = present(path)
    if not names:
        _refuse_lacking(source, lambda _: False, PARTS)
    digest = cache.digest(path, names)
    if source.sha256 is not None and digest != source.sha256:
        raise ModelError(
            f"model source {source}: its content has changed: expected sha256 {source.sha256}, got {digest}; "
            "restore the model, or pin the new digest if the change is wanted"
        )
    return LocalModel(path, digest, source)


def prediction_type(source: ModelSource | str, *, storage: "StorageOptions | None" = None) -> Literal["epsilon", "v"]:
    """Return what a source's U-Net has learned to predict, by its scheduler_config.json; reads nothing else."""
    name = "scheduler/scheduler_config.json"
    prediction = _settings(source, name, storage).get("prediction_type", "epsilon")
    if prediction == "epsilon":
        return "epsilon"
    if prediction == "v_prediction":
        return "v"
    raise ModelError(
        f"model source {source}: {name}: prediction_type: expected epsilon or v_prediction, got {prediction!r}; take "
        "another model"
    )


def family(source: ModelSource | str, *, storage: "StorageOptions | None" = None) -> Family | None:
    """Return the published model that a source's U-Net has the size of; None for another size."""
    unet = _settings(source, "unet/config.json", storage)
    keys = ("block_out_channels", "layers_per_block", "cross_attention_dim")
    return next((known for known in (SD2, SD1) if all(unet.get(key) == known.unet[key] for key in keys)), None)


def _settings(source: ModelSource | str, name: str, storage: "StorageOptions | None") -> dict[str, Any]:
    """Read one JSON file of a source."""
    source = check(source, (name.partition("/")[0],), storage=storage)
    if source.kind == "hub":
        from sdp.model import hub

        data = hub.read(source, name)
    elif source.kind == "bucket":
        from sdp.storage import open_storage

        data = open_storage(source.uri, storage).read(name)
    else:
        data = (local_folder(source) / name).read_bytes()
    try:
        settings: dict[str, Any] = {**json.loads(data)}
    except (ValueError, TypeError) as error:
        raise ModelError(f"model source {source}: {name} is not a JSON object; fetch it again") from error
    return settings


def present(folder: Path) -> list[str]:
    """The files of a folder that belong to a model, in the order of the digest."""
    inside = [f"{part}/{file.name}" for part in PARTS for file in _files(folder / part)]
    return layout.belonging([*(file.name for file in _files(folder)), *inside])


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []


def _located(text: str, revision: str | None) -> ModelSource:
    if not text.strip() or text != text.strip():
        raise ModelError(f"model source {text!r}: expected {FORMS}")
    if text.startswith(BUILTIN):
        return ModelSource("builtin", text)
    if text.startswith(("s3://", "gs://")):
        return ModelSource("bucket", text.rstrip("/"))
    match = _HUB_ID.fullmatch(text)
    pinned = match is not None and match["revision"] is not None
    # A folder that is there is meant, as everywhere else in this world; a revision says that it is not.
    if match and (pinned or revision is not None or not Path(text).is_dir()):
        return _on_hub(text, match["repo"], match["revision"] if pinned else revision)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(?!//)|(?!file:)[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ModelError(f"model source {text}: unknown form; expected {FORMS}")
    return ModelSource("local", text)


def _on_hub(text: str, repo: str, revision: str | None) -> ModelSource:
    if revision is None:
        raise ModelError(
            f"model source {text}: there is no such folder, and a hub repository's revision must be pinned; check the "
            f"path, or write {repo}@COMMIT with the 40 digits of a commit from its history"
        )
    if not _REVISION.fullmatch(revision):
        raise ModelError(
            f"model source {text}: revision: expected the 40 hexadecimal digits of a commit, got {revision!r}; "
            "a branch or tag may move"
        )
    return ModelSource("hub", repo, revision)


def local_folder(source: ModelSource) -> Path:
    """Of a source that lies on this machine already."""
    if source.kind == "builtin":
        name = source.uri.removeprefix(BUILTIN)
        if name != "tiny":
            raise ModelError(f"model source {source}: there is one builtin model, builtin:tiny")
        return Path(str(files("sdp.model") / "tiny"))
    from sdp.storage.uri import parse as parse_uri

    path = Path(parse_uri(source.uri).path)
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "there is no such folder"
        raise ModelError(
            f"model source {source}: {what}; give a folder in diffusers layout that every node can see, "
            f"or another source ({OTHER_SOURCES})"
        )
    return path


def _check_folder(source: ModelSource, folder: Path, parts: Sequence[str]) -> None:
    _refuse_lacking(source, lambda name: (folder / name).is_file(), parts)
    _refuse_contradiction(source, layout.contradiction(lambda name: (folder / name).read_bytes(), parts))
    for file in (file for part in parts for file in _files(folder / part) if file.suffix == ".safetensors"):
        if damaged := layout.damage(file):
            raise ModelError(f"model source {source}: {file.parent.name}/{file.name} {damaged}; fetch it again")


def _refuse_lacking(source: ModelSource, exists: Exists, parts: Sequence[str]) -> None:
    missing = layout.lacking(exists, parts)
    if missing is None:
        return
    pickled = missing.replace("/model.", "/pytorch_model.").replace(".safetensors", ".bin")
    if pickled != missing and exists(pickled):
        what_to_do = f"convert {pickled} to safetensors: reading a .bin may run code"
    else:
        what_to_do = f"complete it, or take another source ({OTHER_SOURCES})"
    raise ModelError(
        f"model source {source}: {missing} is missing; needed are {', '.join(parts)} in diffusers layout: {what_to_do}"
    )


def _refuse_contradiction(source: ModelSource, contradiction: str | None) -> None:
    if contradiction:
        raise ModelError(
            f"model source {source}: {contradiction}; its parts must be of one Stable Diffusion 1 or 2 model"
        )
