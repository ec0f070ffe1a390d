"""The cluster and the credentials to use: KUBECONFIG and --context, or the pod's own service account."""

import os
from collections.abc import Mapping
from pathlib import Path

import kubernetes.config
import yaml
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

from sdp.errors import UserError, one_line
from sdp.kube.api import Api

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_FILE = "~/.kube/config"


def connect(context: str | None = None, namespace: str | None = None, environ: Mapping[str, str] = os.environ) -> Api:
    """Return a client of the cluster in KUBECONFIG or ~/.kube/config; in a pod without either, of the pod's cluster."""
    settings = kubernetes.client.Configuration()
    variable = environ.get("KUBECONFIG") or DEFAULT_FILE
    files = [Path(part).expanduser() for part in variable.split(os.pathsep) if part]
    path = os.pathsep.join(map(str, files))
    try:
        if not any(file.is_file() for file in files):
            if variable == DEFAULT_FILE and (SERVICE_ACCOUNT / "token").is_file():
                kubernetes.config.load_incluster_config(settings)
                return Api(settings, namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip())
            raise UserError(
                f"KUBECONFIG: expected an existing file, got {path}; export KUBECONFIG=FILE, as for kubectl"
            )
        loader = KubeConfigLoader(KubeConfigMerger(path).config, active_context=context)
        loader.load_and_set(settings)
        active = loader.current_context
        return Api(settings, namespace or active["context"].get("namespace") or "default", active["name"])
    except kubernetes.config.ConfigException as error:
        cause = one_line(error, 400).rstrip(".")
        raise UserError(f"KUBECONFIG: {path}: {cause}; fix it, or choose another --context") from error
    except (yaml.YAMLError, AttributeError, TypeError, KeyError, OSError) as error:
        raise UserError(
            f"KUBECONFIG: {path}: expected a kubeconfig with its certificates, got something else; check the file"
        ) from error
