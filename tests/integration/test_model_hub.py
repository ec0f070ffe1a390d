"""The model hub as a source, against a hub of our own on 127.0.0.1 that speaks its protocol."""

import json
import os
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from sdp.families.sd import PINNED
from sdp.model.layout import present
from sdp.model.sources import resolve
from tests.programs import ended
from tests.storage_server import Answer, Request, serving

REPO = "somebody/tiny-diffusion"
REVISION = "0123456789abcdef0123456789abcdef01234567"
SOURCE = f"{REPO}@{REVISION}"
EXTRA = ("README.md", "unet/diffusion_pytorch_model.bin", "vae/diffusion_pytorch_model.fp16.safetensors")


@dataclass
class Hub:
    """The contents of the fake hub, and the requests that it received."""

    files: dict[str, bytes]
    endpoint: str = ""
    fail: int | None = None
    """Answer everything with this status."""
    asked: list[str] = field(default_factory=list)
    pushed: dict[str, bytes] = field(default_factory=dict)
    private: bool | None = None
    """True if the repository that was made is private."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    folder = resolve("builtin:tiny").path
    files = {name: (folder / name).read_bytes() for name in present(folder)}
    state = Hub(files | dict.fromkeys(EXTRA, b"not wanted"))

    with serving(lambda request: answer(state, request)) as server:
        state.endpoint = server.address
        yield state


def answer(hub: Hub, request: Request) -> Answer:
    path = unquote(urlsplit(request.path).path)
    hub.asked.append(path)
    if hub.fail:
        return Answer(hub.fail, b"{}")
    if request.method == "POST":
        return Answer(200, json.dumps(uploaded(hub, path, request.body)).encode())
    if path.startswith(f"/{REPO}/resolve/{REVISION}/"):
        data = hub.files.get(path.removeprefix(f"/{REPO}/resolve/{REVISION}/"))
        if data is None:
            return Answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return Answer(200, data, {"X-Repo-Commit": REVISION, "ETag": f'"{sha1(data).hexdigest()}"'})
    if path == f"/api/models/{REPO}/revision/{REVISION}":
        info = {"id": REPO, "sha": REVISION, "siblings": [{"rfilename": name} for name in hub.files]}
        return Answer(200, json.dumps(info).encode())
    if path.rstrip("/") == f"/api/models/{REPO}/tree/{REVISION}":
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
            for name, data in hub.files.items()
        ]
        return Answer(200, json.dumps(tree).encode())
    lacks = "RevisionNotFound" if path.startswith(f"/api/models/{REPO}") else "RepoNotFound"
    return Answer(404, b"{}", {"X-Error-Code": lacks})


def uploaded(hub: Hub, path: str, body: bytes) -> dict[str, object]:
    """Answer what an upload asks: make the repository, check the card, which files are large, commit."""
    lines = [json.loads(line) for line in body.splitlines()]
    if path == "/api/repos/create":
        hub.private = lines[0].get("visibility") == "private" or lines[0].get("private")
        return {"url": f"{hub.endpoint}/me/mine"}
    if path == "/api/validate-yaml":
        return {"errors": [], "warnings": []}
    if path == "/api/models/me/mine/preupload/main":
        regular = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{**regular, "path": file["path"]} for file in lines[0]["files"]]}
    assert path == "/api/models/me/mine/commit/main"
    sent = [line["value"] for line in lines if line["key"] == "file"]
    hub.pushed = {file["path"]: b64decode(file["content"]) for file in sent}
    return {"commitUrl": f"{hub.endpoint}/me/mine/commit/{REVISION}", "commitOid": REVISION}


@dataclass
class Outcome:
    code: int
    out: str
    line: str


Ask = Callable[..., Outcome]


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Ask:
    """Run one call in a process of its own, as the hub's library reads its settings when it is imported."""

    def run(call: str, **env: str) -> Outcome:
        code = (
            "import sys\nfrom sdp.errors import SdpError\n"
            "from pathlib import Path\nfrom sdp.model.hub import push\n"
            "from sdp.model.sources import check, known, prediction_type, resolve\n"
            f"try:\n    print({call})\nexcept SdpError as error:\n    sys.exit(f'{{error.exit_code}} {{error}}')\n"
        )
        done = ended(
            [sys.executable, "-c", code],
            env=os.environ
            | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
            | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
            | env,
        )
        lines = done.stderr.strip().splitlines()
        return Outcome(done.returncode, done.stdout.strip(), lines[-1] if lines else "")

    return run


def test_a_pinned_repository_is_checked_without_downloading_it(hub: Hub, ask: Ask) -> None:
    done = ask(f"check('{SOURCE}')")
    assert done.code == 0, done.line
    index = f"/{REPO}/resolve/{REVISION}/model_index.json"
    assert hub.asked == [f"/api/models/{REPO}/revision/{REVISION}", index, index]  # its head comes first
    done = ask(f"prediction_type('{SOURCE}')")
    assert (done.code, done.out) == (0, "epsilon"), done.line
    fetched = {path.split(f"{REVISION}/", 1)[1] for path in hub.asked if "/resolve/" in path}
    assert fetched == {"model_index.json", "scheduler/scheduler_config.json"}
    hub.asked.clear()
    done = ask(f"check('{SOURCE}') and known('{SOURCE}') or prediction_type('{SOURCE}')")
    assert done.code == 0, done.line
    assert sum("/api/" in path for path in hub.asked) == 1, "a revision's files are listed once a process"


def test_a_huge_configuration_on_the_hub_is_not_read(hub: Hub, ask: Ask) -> None:
    hub.files["scheduler/scheduler_config.json"] = b"[" * (17 << 20)
    done = ask(f"prediction_type('{SOURCE}')")
    assert done.line == (
        f"2 model source {SOURCE}: scheduler/scheduler_config.json is too large (17,825,792 bytes); restore it"
    )


def test_a_pinned_repository_is_downloaded_once_and_has_the_models_digest(hub: Hub, ask: Ask) -> None:
    done = ask(f"resolve('{SOURCE}').digest")
    assert done.code == 0, done.line
    assert done.out == resolve("builtin:tiny").digest
    fetched = {path.split(f"{REVISION}/", 1)[1] for path in hub.asked if "/resolve/" in path}
    assert fetched.isdisjoint(EXTRA)
    hub.asked.clear()
    assert ask(f"check('{SOURCE}') and resolve('{SOURCE}').digest").out == done.out
    assert hub.asked == []  # a revision never changes, so no request is needed


def test_offline_only_cached_models_are_used(hub: Hub, ask: Ask) -> None:
    for call in ("check", "resolve"):
        refused = ask(f"{call}('{SOURCE}')", HF_HUB_OFFLINE="1")
        assert refused.line.startswith("2 model source")
        assert "unset HF_HUB_OFFLINE" in refused.line
    assert ask(f"resolve('{SOURCE}').digest").code == 0
    hub.asked.clear()
    assert ask(f"check('{SOURCE}'), resolve('{SOURCE}').digest", HF_HUB_OFFLINE="1").code == 0
    assert hub.asked == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (f"check('stabilityai/stable-diffusion-2-base@{REVISION}')", f"removed in November 2025; {PINNED} is a copy"),
        (f"check('{REPO}@{REVISION[::-1]}')", "no such revision"),
    ],
)
def test_a_wrong_source_on_the_hub_is_refused_in_one_line(ask: Ask, call: str, expected: str) -> None:
    done = ask(call)
    assert done.line.startswith("2 model source"), done.line
    assert expected in done.line


def test_a_hub_in_trouble_is_worth_another_try(hub: Hub, ask: Ask) -> None:
    hub.fail = 503
    for done in (ask(f"resolve('{SOURCE}')"), ask(f"check('{SOURCE}')", HF_ENDPOINT="http://127.0.0.1:9")):
        assert done.line.startswith("1 model source"), done.line
        assert "the hub did not answer" in done.line
        assert "try again later" in done.line


def test_an_export_is_uploaded_into_a_repository_that_is_private_if_it_is_new(
    hub: Hub, ask: Ask, tmp_path: Path
) -> None:
    files = {"README.md": b"---\ntags: [sdp]\n---\n", "unet/config.json": b"{}"}
    for name, data in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(data)
    call, token = f"push(Path('{tmp_path}/mine'), 'me/mine')", {"HF_TOKEN": "hf_token"}
    done = ask(call, **token)
    assert (done.code, done.out) == (0, f"{hub.endpoint}/me/mine"), done.line
    assert (hub.pushed, hub.private) == (files, True)
    assert ask(f"push(Path('{tmp_path}/mine/README.md'), 'me/mine')", **token).code == 0
    assert list(hub.pushed) == ["README.md"]
    hub.fail = 403
    done = ask(call, **token)
    assert done.line.startswith("2 export: --push: hf://me/mine: the hub refused (HfHubHTTPError: "), done.line
    assert done.line.endswith(f"then `hf upload me/mine {tmp_path}/mine`")
    unreachable = ask(call, **token, HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.line.startswith("1 export: --push: hf://me/mine: the hub did not answer"), unreachable.line
