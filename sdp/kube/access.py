"""Which cluster is meant, and as whom: KUBECONFIG and --context, or the pod's own service account."""

import contextlib
import os
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sdp.errors import UserError
from sdp.kube.wire import Endpoint

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
USUAL_FILE = "~/.kube/config"


@dataclass(frozen=True, slots=True)
class Access:
    """A cluster to speak to."""

    endpoint: Endpoint
    namespace: str
    """The context's own, or the pod's; `default` where neither says."""
    context: str
    """Its name, for people and for commands to be repeated; empty for a pod's own service account."""


def access(context: str | None = None, environ: Mapping[str, str] = os.environ) -> Access:
    """The cluster that KUBECONFIG (or ~/.kube/config) and a context name; in a pod without either, its own."""
    named = environ.get("KUBECONFIG", "")
    files = [Path(part).expanduser() for part in (named or USUAL_FILE).split(os.pathsep) if part]
    if not any(file.is_file() for file in files):
        if named:
            raise UserError(f"KUBECONFIG: expected a file that is there, got {named}; export KUBECONFIG=FILE")
        if (SERVICE_ACCOUNT / "token").is_file():
            return _of_pod()
        raise UserError(f"KUBECONFIG: not set, and there is no {USUAL_FILE}; export KUBECONFIG=FILE, as for kubectl")
    return _of_file(os.pathsep.join(map(str, files)), context)


def _of_file(files: str, context: str | None) -> Access:
    import kubernetes.config
    import yaml
    from kubernetes.client import Configuration

    config: Any = kubernetes.config  # it comes without types

    settings: Any = Configuration()
    try:
        contexts, current = config.list_kube_config_contexts(files)
    except config.ConfigException as error:
        if context is None:
            raise UserError(f"KUBECONFIG: {files}: {_first_line(error)}; mend it, or choose a --context") from error
        contexts, current = _contexts_without_current(files), None
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise UserError(f"KUBECONFIG: {files}: expected a kubeconfig, got something else; check the file") from error
    names = sorted(each["name"] for each in contexts)
    if context is not None and context not in names:
        there = ", ".join(names) or "none"
        raise UserError(f"--context: there is no context {context!r} in {files}; there are {there}")
    chosen = next((each for each in contexts if each["name"] == context), current)
    try:
        config.load_kube_config(files, context=context, client_configuration=settings, persist_config=False)
    except config.ConfigException as error:
        raise UserError(f"KUBECONFIG: {files}: {_first_line(error)}; mend it, or choose another --context") from error
    assert chosen is not None, "without a current context load_kube_config would have refused"
    return Access(endpoint_of(settings), chosen["context"].get("namespace") or "default", chosen["name"])


def _contexts_without_current(files: str) -> list[Any]:
    import kubernetes.config.kube_config

    reading: Any = kubernetes.config.kube_config  # it comes without types
    merged = reading.KubeConfigMerger(files).config
    return [each.value for each in merged["contexts"]] if merged is not None and "contexts" in merged else []


def _of_pod() -> Access:
    import kubernetes.config
    from kubernetes.client import Configuration

    config: Any = kubernetes.config  # it comes without types

    settings: Any = Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException as error:
        raise UserError(
            f"service account: {_first_line(error)}; set KUBECONFIG, or mount the account's token"
        ) from error
    namespace = SERVICE_ACCOUNT / "namespace"
    return Access(endpoint_of(settings), namespace.read_text().strip() if namespace.is_file() else "default", "")


def endpoint_of(settings: Any) -> Endpoint:
    """What the official client has made of a kubeconfig (certificates, tokens and how to renew them)."""
    parts = urlsplit(settings.host)
    host, secure = parts.hostname or "localhost", parts.scheme == "https"

    def credentials() -> dict[str, str]:
        found = settings.auth_settings().values()
        return {each["key"]: each["value"] for each in found if each["in"] == "header" and each["value"]}

    proxy = None
    if settings.proxy and not urllib.request.proxy_bypass(host):
        via = urlsplit(settings.proxy)
        proxy = (via.hostname or "localhost", via.port or (443 if via.scheme == "https" else 80))
    return Endpoint(
        host=host,
        port=parts.port or (443 if secure else 80),
        base=parts.path.rstrip("/"),
        tls=_tls(settings) if secure else None,
        server_name=getattr(settings, "tls_server_name", None) or None,
        proxy=proxy,
        proxy_headers=getattr(settings, "proxy_headers", None),
        credentials=credentials,
    )


def _tls(settings: Any) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(
            cafile=settings.ssl_ca_cert or None, cadata=getattr(settings, "ca_cert_data", None) or None
        )
        # Many clusters' own authorities lack what Python 3.13 asks of them by default, and kubectl does not.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not settings.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file or None)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"KUBECONFIG: its certificates cannot be used ({error}); kubectl must work with it first"
        ) from error
    return context


def _first_line(error: Exception) -> str:
    with contextlib.suppress(IndexError):
        return str(error).splitlines()[0].rstrip(".")
    return type(error).__name__
