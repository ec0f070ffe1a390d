"""Metrics of Ray itself that rules and dashboards use, with the labels that they have: seen in a scrape of Ray 2.60.

Ray promises none of them; tests/integration/test_monitoring_proof.py asks a running Ray for each.
"""

from collections.abc import Mapping

_NODE = frozenset({"ip", "SessionName", "IsHeadNode", "RayNodeType"})
_PROCESS = frozenset({"Component", "NodeAddress", "SessionName"})
_OPERATOR = _PROCESS | {"dataset", "operator"}

KUBERNETES: Mapping[str, frozenset[str]] = {
    "kuberay_cluster_info": frozenset({"name", "uid", "owner_kind"}),
    "kuberay_job_deployment_status": frozenset({"name", "uid", "deployment_status"}),
    "kueue_pending_workloads": frozenset({"cluster_queue", "status"}),
    "kube_pod_status_phase": frozenset({"uid", "phase"}),
    "kube_pod_container_resource_requests": frozenset({"uid", "resource", "unit"}),
    "kube_pod_container_status_waiting_reason": frozenset({"uid", "reason"}),
    "kube_pod_container_status_restarts_total": frozenset({"uid"}),
}
"""Metrics of KubeRay 1.7's operator and of Kueue 0.18, by their sources, and of kube-state-metrics."""

RAY: Mapping[str, frozenset[str]] = {
    "ray_node_cpu_count": _NODE,
    "ray_node_cpu_utilization": _NODE,
    "ray_node_mem_used": _NODE,
    "ray_node_mem_total": _NODE,
    "ray_node_disk_utilization_percentage": _NODE,
    "ray_node_disk_io_read_speed": _NODE,
    "ray_node_disk_io_write_speed": _NODE,
    "ray_node_network_receive_speed": _NODE,
    "ray_node_network_send_speed": _NODE,
    "ray_component_uss_bytes": frozenset({"Component", "ip", "pid", "SessionName"}),
    "ray_object_store_memory": _PROCESS | {"Location", "ObjectState"},
    "ray_object_store_used_memory": _PROCESS,
    "ray_object_store_available_memory": _PROCESS,
    "ray_resources": _PROCESS | {"Name", "State"},
    "ray_actors": _PROCESS | {"Name", "State", "Source", "JobId"},
    "ray_data_operator_queued_blocks": _OPERATOR,
    "ray_data_output_rows": _OPERATOR,
    "ray_data_num_tasks_running": _OPERATOR,
    "ray_data_num_tasks_failed": _OPERATOR,
    "ray_data_num_alive_actors": _OPERATOR,
    "ray_data_obj_store_mem_used": _OPERATOR,
    "ray_data_task_output_backpressure_time_s": _OPERATOR,
    "ray_data_task_submission_backpressure_time": _OPERATOR,
    "ray_data_sched_loop_duration_s": _PROCESS | {"dataset"},
}
