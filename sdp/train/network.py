"""The network between trainers: a job that was told to take one does not go over another, slower one.

The chart sets NCCL_NET where a group has EFA devices, and NCCL ends rather than go over TCP when that network is not
there. It says so in words for its developers, in each trainer; here they become one line, and no reason to try again.
"""

import os
import re
from collections.abc import Mapping

from sdp.errors import UserError

NCCL_NET = "NCCL_NET"
_NOT_THERE = re.compile(r"Failed to initialize any NET plugin|network .{0,80} not found")
"""What NCCL says, since 2.28 and before."""


def network_error(error: BaseException, environ: Mapping[str, str] = os.environ) -> UserError | None:
    """The error that a failure of NCCL means, if it is that the network it has to take is not there."""
    wanted = environ.get(NCCL_NET)
    if not wanted or not _NOT_THERE.search(str(error)):
        return None
    return UserError(
        f"{NCCL_NET}: NCCL cannot use the network {wanted!r} here, and shall use no other; build the image with its "
        "plugin (images/ray, EFA_INSTALLER) and give the pods its devices (groups.NAME.efaDevices), or unset it"
    )
