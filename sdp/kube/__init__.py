"""Jobs on a Kubernetes cluster from wherever one sits: submit, status, logs, stop and doctor.

Plain functions on plain JSON in the middle (rayjob, state, quantity, placing), the API server and Ray's dashboard at
the edges (access, wire, api, dashboard). Every call to the outside has a deadline.
"""
