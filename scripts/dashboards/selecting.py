"""Selectors that use the dashboards' variables, and common forms of expressions.

A job's series have the labels `run`, `ray_cluster` and `namespace`. Those of a Ray node, or of a process on it, have
`ray_cluster`, `namespace`, `ray_group` and `node`. The name of a cluster or run is unique only within its namespace, so
expressions that group or join by one use all three labels. A GPU has only `node`; sdp:gpu:owner says who owns it.
"""

APART = "namespace, ray_cluster"
"""The labels that identify a cluster; every `by` and `on` of a cluster's or run's series has them."""
CLUSTER = 'namespace=~"$namespace", ray_cluster=~"$cluster"'
RUN = f'{CLUSTER}, run=~"$run"'
PLACE = f'{CLUSTER}, ray_group=~"$group", node=~"$node"'
RANK = f'{RUN}, ray_group=~"$group", node=~"$node"'
NODE = 'node=~"$node"'
OWNER = f"sdp:gpu:owner{{{RANK}}}"
OWNED = f"and on (node, uuid) {OWNER}"
"""Follows a vector of GPUs and keeps those of the chosen clusters, groups and runs; All keeps unowned ones too."""

WINDOW = "$__rate_interval"


def rate(name: str, matchers: str, *more: str) -> str:
    """Return a counter's rate per second, over the shortest window that the scrape interval allows."""
    return f"rate({select(name, matchers, *more)}[{WINDOW}])"


def increase_of_gauge(name: str, matchers: str) -> str:
    """Return the rate per second of a gauge that only grows."""
    return f"deriv({select(name, matchers)}[{WINDOW}])"


def select(name: str, matchers: str, *more: str) -> str:
    return f"{name}{{{', '.join([matchers, *more])}}}"


def gpu(name: str, *more: str) -> str:
    """Return one series for each chosen GPU."""
    return f"({select(name, NODE, *more)} {OWNED})"


def per_run(expr: str) -> str:
    """Return one series for each run, from those of its processes and of workers that replaced others."""
    return f"max by ({APART}, run) ({expr})"


def nonzero(expr: str) -> str:
    """Return a divisor without its zeros, so that a panel shows a dash instead of NaN."""
    return f"({expr} > 0)"
