"""The cluster and the credentials to use: KUBECONFIG and --context, or the pod's own service account."""

import contextlib
import logging
import logging.handlers
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes.config
import yaml
from kubernetes.config.kube_config import KubeConfigMerger

from sdp.errors import UserError, one_line

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_FILE = "~/.kube/config"


@dataclass(frozen=True, slots=True)
class Access:
    """A cluster and the credentials for it."""

    configuration: Any
    """The official client's configuration, with certificates, tokens and their renewal."""
    namespace: str
    """The context's or the pod's namespace; `default` if neither names one."""
    context: str
    """The context's name; empty for a pod's service account."""


def access(context: str | None = None, environ: Mapping[str, str] = os.environ) -> Access:
    """Return the cluster of a context in KUBECONFIG or ~/.kube/config; without either file, that of this pod."""
    variable = environ.get("KUBECONFIG", "")
    files = [Path(part).expanduser() for part in (variable or DEFAULT_FILE).split(os.pathsep) if part]
    if any(file.is_file() for file in files):
        return _from_files(os.pathsep.join(map(str, files)), context)
    if variable:
        raise UserError(f"KUBECONFIG: expected an existing file, got {variable}; export KUBECONFIG=FILE")
    if (SERVICE_ACCOUNT / "token").is_file():
        return _from_pod()
    raise UserError(f"KUBECONFIG: not set, and {DEFAULT_FILE} does not exist; export KUBECONFIG=FILE, as for kubectl")


def _from_files(files: str, context: str | None) -> Access:
    config = kubernetes.config
    settings = kubernetes.client.Configuration()
    try:
        merged = KubeConfigMerger(files).config
        contexts = {node.value["name"]: node.value["context"] or {} for node in merged.value["contexts"]}
        name = context or merged.value.get("current-context") or ""
        if context is not None and context not in contexts:
            have = ", ".join(sorted(contexts)) or "none"
            raise UserError(f"--context: no context {context!r} in {files}; it has {have}")
        with _logged_errors() as errors:
            config.load_kube_config(files, context=context, client_configuration=settings, persist_config=False)
    except config.ConfigException as error:
        raise UserError(f"KUBECONFIG: {files}: {_reason(error)}; fix it, or choose a --context") from error
    except (yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"KUBECONFIG: {files}: expected a kubeconfig, got something else; check the file") from error
    if errors:
        cause = one_line(errors[-1].getMessage(), 400)
        raise UserError(f"KUBECONFIG: {files}: the login of context {name!r} failed ({cause}); log in again")
    return Access(settings, contexts[name].get("namespace") or "default", name)


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[logging.LogRecord]]:
    """Collect the client's log, the only place where it reports a failed login command."""
    handler = logging.handlers.MemoryHandler(100, logging.CRITICAL + 1, flushOnClose=False)
    logging.getLogger().addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logging.getLogger().removeHandler(handler)


def _from_pod() -> Access:
    settings = kubernetes.client.Configuration()
    try:
        kubernetes.config.load_incluster_config(client_configuration=settings)
    except kubernetes.config.ConfigException as error:
        raise UserError(f"service account: {_reason(error)}; set KUBECONFIG, or mount the account's token") from error
    namespace = SERVICE_ACCOUNT / "namespace"
    return Access(settings, namespace.read_text().strip() if namespace.is_file() else "default", "")


def _reason(error: Exception) -> str:
    return one_line(error, 400).rstrip(".") or type(error).__name__
