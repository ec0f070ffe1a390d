"""The network between trainers: an error in plain words if NCCL lacks the network that it must use.

The chart sets NCCL_NET for groups with EFA devices, so that NCCL fails rather than fall back to slow TCP. NCCL's own
error is for its developers, and comes from every trainer; here it becomes one line, and the job does not try again.
"""

import os
import re
from collections.abc import Mapping

from sdp.errors import UserError

NCCL_NET = "NCCL_NET"
_NOT_THERE = re.compile(r"Failed to initialize any NET plugin|network .{0,80} not found")
"""NCCL's messages, since 2.28 and before."""


def network_error(error: BaseException, environ: Mapping[str, str] = os.environ) -> UserError | None:
    """Return a UserError if NCCL failed because the required network is missing."""
    wanted = environ.get(NCCL_NET)
    if not wanted or not _NOT_THERE.search(str(error)):
        return None
    return UserError(
        f"{NCCL_NET}: NCCL cannot use the network {wanted!r} here; build the image with its plugin (images/ray, "
        "EFA_INSTALLER) and give the pods its devices (groups.NAME.efaDevices), or unset it to use any network"
    )
