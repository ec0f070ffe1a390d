"""The services that the jobs need, in the same namespace: an S3 server, and a web server with pictures."""

import base64
import contextlib
import io
import secrets
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sdp.dreambooth.template import fill
from tests.e2e.kube import Kube, Object
from tests.e2e.settings import Settings

IMAGES = 400
TOOLS = "pictures"
"""The pod of the web server, which is also where the tests' own programs run."""
SERVE = f"""
import signal
from tests.misbehaving.server import ImageServer
with ImageServer(images={IMAGES}, hosts=["0.0.0.0"], port=8000):
    signal.pause()
"""
PREPARE = f"""
import io, os, boto3
import pyarrow.parquet as pq
from scripts.demo.shapes import metadata_table
s3 = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
if not any(bucket["Name"] == "sdp" for bucket in s3.list_buckets()["Buckets"]):
    s3.create_bucket(Bucket="sdp")
file = io.BytesIO()
pq.write_table(metadata_table({IMAGES}, "http://pictures:8000", failing=True), file)
s3.put_object(Bucket="sdp", Key="metadata/part-0.parquet", Body=file.getvalue())
"""
LIST = """
import os, sys, boto3
s3 = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
for page in s3.get_paginator("list_objects_v2").paginate(Bucket="sdp", Prefix=sys.argv[1]):
    for item in page.get("Contents", ()):
        print(item["Key"])
"""
PLAIN: Object = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "DoesNotExist"}]}]
        }
    }
}

ENV = {
    "PYTHONPATH": "/site/code.zip",
    "AWS_ENDPOINT_URL": "http://storage:7070",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def volumes(settings: Settings) -> list[Object]:
    """Return the settings' volumes, with claims for folders of nodes: the *restricted* standard allows no other way."""
    return [
        {"name": volume["name"], "persistentVolumeClaim": {"claimName": volume["name"]}}
        if "hostPath" in volume
        else volume
        for volume in settings.values.get("volumes", [])
    ]


@contextlib.contextmanager
def mounts(kube: Kube, settings: Settings) -> Iterator[None]:
    """Make what those claims are bound to."""
    objects: list[Object] = []
    for volume in settings.values.get("volumes", []):
        if "hostPath" in volume:
            name, access = f"{kube.namespace}-{volume['name']}", ["ReadOnlyMany"]
            claim = {"namespace": kube.namespace, "name": volume["name"]}
            spec = {"storageClassName": "", "accessModes": access}
            made = {"capacity": {"storage": "1Gi"}, "hostPath": volume["hostPath"], "claimRef": claim}
            wanted = {"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
            objects += [
                {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {**spec, **made}},
                {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": claim, "spec": {**spec, **wanted}},
            ]
    if objects:
        kube.apply(objects)
    try:
        yield
    finally:
        for made in objects:
            if made["kind"] == "PersistentVolume":
                kube.run("delete", "persistentvolume", made["metadata"]["name"], "--wait=false")


def begin(kube: Kube, settings: Settings) -> None:
    """Start both servers, make the bucket and put the list of pictures into it."""
    kube.apply(_objects(settings))
    kube.run("wait", "--for=condition=Ready", "pod/storage", f"pod/{TOOLS}", "--timeout=300s", timeout_s=310)

    def prepared() -> bool:
        kube.python(TOOLS, PREPARE)
        return True

    kube.until(prepared, 120, "the S3 server takes a bucket and a file")


@contextlib.contextmanager
def reached(kube: Kube) -> Iterator[dict[str, str]]:
    """Forward the S3 server's port to this machine; yield the environment for using it."""
    keys = {name: base64.b64decode(value).decode() for name, value in kube.get("secret", "storage")["data"].items()}
    words = ["kubectl", "-n", kube.namespace, "port-forward", "pod/storage", ":7070"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None
            port = forward.stdout.readline().split("->")[0].rpartition(":")[2].strip()
            yield {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1", **keys}
        finally:
            forward.terminate()


def keys(kube: Kube, prefix: str) -> list[str]:
    """The keys in the bucket that begin so."""
    return kube.python(TOOLS, LIST, prefix).split()


def _objects(settings: Settings) -> list[Object]:
    values = {
        "access": f"AK{secrets.token_hex(8)}",
        "secret": secrets.token_hex(20),
        "code": _code(),
        "plain": PLAIN,
        "s3_image": settings.s3_image,
        "image": settings.image,
        "serve": SERVE,
        "env": [{"name": name, "value": str(value)} for name, value in (ENV | settings.values.get("env", {})).items()],
        "mounts": [{"name": "code", "mountPath": "/site"}, *settings.values.get("volumeMounts", [])],
        "volumes": [{"name": "code", "configMap": {"name": "code"}}, *volumes(settings)],
    }
    objects: list[Object] = fill(Path(__file__).with_suffix(".yaml"), values)
    return objects


def _code() -> str:
    """Return the repository's tests and scripts, which the image lacks, as a zip for PYTHONPATH."""
    root, file = Path(__file__).resolve().parents[2], io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as code:
        for folder in ("scripts/demo", "tests/misbehaving"):
            for path in (root / folder).glob("*.py"):
                code.write(path, path.relative_to(root))
        code.write(root / "tests/__init__.py", "tests/__init__.py")
        code.mkdir("scripts")  # a namespace package in a zip needs it
    return base64.b64encode(file.getvalue()).decode()
