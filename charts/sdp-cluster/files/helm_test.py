"""Does the head answer with its token and not without, with this version of Ray, and has it so many nodes?

Run by `helm test` with the head's URL, Ray's version and a number of nodes, in a pod without rights in Kubernetes.
"""

import json
import os
import sys
import urllib.error
import urllib.request

url, version, nodes = sys.argv[1:]


def ask(path, token):
    request = urllib.request.Request(f"{url}{path}", headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)


def answers_anybody():
    try:
        ask("/api/jobs/", "")
    except urllib.error.HTTPError as error:
        return error.code not in (401, 403)
    return True


try:
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if token and answers_anybody():
        sys.exit(f"{url}: the head answers without the token; check auth.mode and restart the head")
    found = ask("/api/version", token)["ray_version"]
    if found != version:
        sys.exit(f"rayVersion: expected the image's version, {found}, got {version}; set the value")
    ask("/api/jobs/", token)
    summary = ask("/nodes?view=summary", token)["data"]["summary"]
    alive = sum(node["raylet"].get("state") == "ALIVE" for node in summary)
    if alive < int(nodes):
        sys.exit(f"nodes: expected {nodes} or more, got {alive}; `sdp status` shows what the others wait for")
except (OSError, ValueError, KeyError, TypeError) as error:
    sys.exit(f"{url}: {error or type(error).__name__}; check that it runs and may be reached")
print(f"Ray {version} has {alive} nodes")
