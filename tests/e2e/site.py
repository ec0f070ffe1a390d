"""The services that the jobs need, in the same namespace: an S3 server, and a web server with pictures."""

import base64
import contextlib
import io
import secrets
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


RESTRICTED: Object = {
    "runAsNonRoot": True,
    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 1000),
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONFINED: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


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
    access, secret = f"AK{secrets.token_hex(8)}", secrets.token_hex(20)
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "storage"},
            "stringData": {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret},
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "binaryData": {"code.zip": _code()}},
        _service("storage", 7070),
        _pod(
            "storage",
            {
                "image": settings.s3_image,
                "args": ["--port", ":7070", "posix", "/data"],
                "env": [
                    _secret("ROOT_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
                    _secret("ROOT_SECRET_KEY", "AWS_SECRET_ACCESS_KEY"),
                ],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
            [{"name": "data", "emptyDir": {}}],
        ),
        _service(TOOLS, 8000),
        _pod(
            TOOLS,
            {
                "image": settings.image,
                "command": ["python", "-c", SERVE],
                "env": [
                    {"name": "PYTHONPATH", "value": "/site/code.zip"},
                    {"name": "AWS_ENDPOINT_URL", "value": "http://storage:7070"},
                    {"name": "AWS_REGION", "value": "us-east-1"},
                    {"name": "AWS_DEFAULT_REGION", "value": "us-east-1"},
                    *({"name": name, "value": str(value)} for name, value in settings.values.get("env", {}).items()),
                ],
                "envFrom": [{"secretRef": {"name": "storage"}}],
                "volumeMounts": [{"name": "code", "mountPath": "/site"}, *settings.values.get("volumeMounts", [])],
                "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 2},
            },
            [{"name": "code", "configMap": {"name": "code"}}, *volumes(settings)],
        ),
    ]


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


def _secret(name: str, key: str) -> Object:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": "storage", "key": key}}}


def _service(name: str, port: int) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": port}]},
    }


def _pod(name: str, container: Object, mounted: list[Any]) -> Object:
    requests = {"requests": {"cpu": "50m", "memory": "128Mi"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "affinity": PLAIN,
            "terminationGracePeriodSeconds": 2,
            "enableServiceLinks": False,  # VERSITYGW's own settings begin with names that service links take
            "securityContext": RESTRICTED,
            "containers": [{"name": name, "resources": requests, "securityContext": CONFINED, **container}],
            "volumes": mounted,
        },
    }
