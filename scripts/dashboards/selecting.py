"""The selectors that expressions share, by the dashboards' variables, and a few shapes of expressions.

Series of a job have the labels `run`, `ray_cluster` and `namespace`; those of a Ray node or of a process on it
`ray_cluster`, `namespace`, `ray_group` and `node`. A name of a cluster or of a run means something within its namespace
alone, so whatever groups or joins by one does so by all three. A GPU has `node` alone: whose it is, sdp:gpu:owner says.
"""

APART = "namespace, ray_cluster"
"""What tells clusters apart: in every `by` and `on` of what is a cluster's or a run's."""
CLUSTER = 'namespace=~"$namespace", ray_cluster=~"$cluster"'
RUN = f'{CLUSTER}, run=~"$run"'
PLACE = f'{CLUSTER}, ray_group=~"$group", node=~"$node"'
RANK = f'{RUN}, ray_group=~"$group", node=~"$node"'
NODE = 'node=~"$node"'
OWNER = f"sdp:gpu:owner{{{RANK}}}"
OWNED = f"and on (node, uuid) {OWNER}"
"""Behind a vector of GPUs: those of the chosen clusters, groups and runs. All also takes those that nobody has."""

WINDOW = "$__rate_interval"


def rate(name: str, matchers: str, *more: str) -> str:
    """Per second, as fine as the scraping allows."""
    return f"rate({select(name, matchers, *more)}[{WINDOW}])"


def increase_of_gauge(name: str, matchers: str) -> str:
    """Per second, of a figure that only grows but is told as a gauge."""
    return f"deriv({select(name, matchers)}[{WINDOW}])"


def select(name: str, matchers: str, *more: str) -> str:
    return f"{name}{{{', '.join([matchers, *more])}}}"


def gpu(name: str, *more: str) -> str:
    """A series of each chosen GPU."""
    return f"({select(name, NODE, *more)} {OWNED})"


def slices(name: str) -> str:
    """A series of each chosen GPU, or of each chosen slice of one."""
    return f"({select(name, NODE)} and on (node, uuid, mig_uuid) {OWNER})"


def per_run(expr: str) -> str:
    """One series of each run, of what its processes or its successive workers tell."""
    return f"max by ({APART}, run) ({expr})"


def some(expr: str) -> str:
    """To divide by: what is nothing is left out, so that a single figure shows a dash in place of NaN."""
    return f"({expr} > 0)"
