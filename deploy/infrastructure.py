"""The dashboard's collapsed row about the nodes under a run: Ray's metrics of each node, and dcgm-exporter's of the GPUs.

Ray's agents export ``ray_node_*`` even without Ray's dashboard. A run's label ``ray_session`` names its Ray cluster. NVIDIA's dcgm-exporter
knows nothing of runs, so its panels show all GPUs in the data source. Its metric names come from its documentation and are untested for
lack of GPUs. ``ray_node_gram_used`` is left out, since its description says bytes but its values are megabytes.
"""

from __future__ import annotations

from vescale_ray.deploy.panel import RUN, Panel

OF_RUN = f'and on (SessionName) label_join(vescale_run_info{{{RUN}}}, "SessionName", "", "ray_session")'
"""PromQL suffix that restricts Ray's series to the clusters of the selected runs."""
RAY = "Needs Ray's own metrics in the data source, as deploy/prometheus.yml scrapes them."
DCGM = "All GPUs that the data source knows. Empty without NVIDIA's dcgm-exporter."


def ray(expr: str) -> str:
    return f"{expr} {OF_RUN}"


INFRASTRUCTURE: tuple[str, tuple[Panel, ...]] = (
    "Infrastructure: Ray's nodes and GPUs",
    (
        Panel(
            "Processors of the nodes",
            f"Utilisation of all cores of each node, by all processes. {RAY}",
            ((ray("ray_node_cpu_utilization / 100"), "{{ip}}"),),
            "percentunit",
        ),
        Panel(
            "Memory of the nodes",
            f"Used memory as a share of the node's (or its container's). Above 0.95 Ray ends workers. {RAY}",
            ((ray("ray_node_mem_used / ray_node_mem_total"), "{{ip}}"),),
            "percentunit",
        ),
        Panel(
            "Network of the nodes",
            f"Traffic over all interfaces of each node: collectives, peer copies, checkpoints. {RAY}",
            ((ray("ray_node_network_receive_speed"), "{{ip}} in"), (ray("ray_node_network_send_speed"), "{{ip}} out")),
            "binBps",
        ),
        Panel(
            "Disks of the nodes, read and written",
            f"Traffic of all disks of each node. {RAY}",
            ((ray("ray_node_disk_io_read_speed"), "{{ip}} read"), (ray("ray_node_disk_io_write_speed"), "{{ip}} written")),
            "binBps",
        ),
        Panel(
            "Disks of the nodes, in use",
            f"Used share of the root disk. Ray's logs and spilled objects fill the disk of Ray's folder. {RAY}",
            ((ray("ray_node_disk_utilization_percentage / 100"), "{{ip}}"),),
            "percentunit",
        ),
        Panel(
            "Nodes",
            f"Active nodes of Ray's cluster. A pre-emption removes one. {RAY}",
            ((f"sum by (SessionName) ({ray('ray_cluster_active_nodes')})", "{{SessionName}}"),),
            "none",
            custom={"lineInterpolation": "stepAfter"},
        ),
        Panel(
            "GPUs, as Ray sees them",
            f"Share of time in which each GPU of the cluster ran a kernel. Empty without GPUs. {RAY}",
            ((ray("ray_node_gpus_utilization / 100"), "{{ip}} GPU {{GpuIndex}}"),),
            "percentunit",
        ),
        Panel(
            "GPUs: use and memory, by host",
            f"Mean utilisation of a host's GPUs, and the used share of memory on its fullest GPU. {DCGM}",
            (
                ("avg by (Hostname) (DCGM_FI_DEV_GPU_UTIL) / 100", "{{Hostname}} busy"),
                ("max by (Hostname) (DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE))", "{{Hostname}} memory"),
            ),
            "percentunit",
        ),
        Panel(
            "GPUs: power, by host",
            f"Total power of a host's GPUs. {DCGM}",
            (("sum by (Hostname) (DCGM_FI_DEV_POWER_USAGE)", "{{Hostname}}"),),
            "watt",
        ),
        Panel(
            "GPUs: hottest, by host",
            f"Temperature of a host's hottest GPU. A hot GPU lowers its clock, which makes its worker slow. {DCGM}",
            (("max by (Hostname) (DCGM_FI_DEV_GPU_TEMP)", "{{Hostname}}"),),
            "celsius",
        ),
        Panel(
            "GPUs: slowest clock, by host",
            f"Multiprocessor clock of a host's slowest GPU, for which the others wait. {DCGM}",
            (("min by (Hostname) (DCGM_FI_DEV_SM_CLOCK) * 1e6", "{{Hostname}}"),),
            "hertz",
        ),
        Panel(
            "GPUs: last XID error",
            f"The driver's code of the last error of each GPU that had one. The runbook of VescaleGpuXidError lists the codes. {DCGM}",
            (("max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS) > 0", "{{Hostname}} GPU {{gpu}}"),),
            "none",
        ),
    ),
)
