"""Answer each line of input with the nodes of a Ray cluster as JSON: `python -m tests.hosts.nodes ADDRESS`."""

import json
import sys

from ray._private.internal_api import get_state_from_address


def main(address: str) -> None:
    """Answer until the input ends."""
    state = get_state_from_address(address)  # type: ignore[no-untyped-call]
    for _ in sys.stdin:
        nodes = [
            {"id": node["NodeID"], "address": node["NodeManagerAddress"], "alive": node["Alive"]}
            for node in state.node_table()
        ]
        print(json.dumps(nodes), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
