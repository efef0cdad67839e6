"""The dashboard's folded row of the nodes under a run: what Ray tells of each of them, and dcgm-exporter of their GPUs.

Ray's agents export ``ray_node_*`` whether or not there is a dashboard of Ray's; a run tells by its label ``ray_session`` on which Ray it
is. NVIDIA's dcgm-exporter knows nothing of runs: its panels are of all GPUs that the data source knows. Its names are those of its
documentation; nobody here has GPUs to try them with. ``ray_node_gram_used`` is left out: it says bytes and is megabytes.
"""

from __future__ import annotations

from vescale_ray.deploy.panel import RUN, Panel

OF_RUN = f'and on (SessionName) label_join(vescale_run_info{{{RUN}}}, "SessionName", "", "ray_session")'
"""Of Ray's series, those of the cluster that the chosen runs are on."""
RAY = "Needs Ray's own metrics in the data source, as deploy/prometheus.yml scrapes them."
DCGM = "All GPUs that the data source knows. Empty without NVIDIA's dcgm-exporter."


def ray(expr: str) -> str:
    return f"{expr} {OF_RUN}"


INFRASTRUCTURE: tuple[str, tuple[Panel, ...]] = (
    "Infrastructure: Ray's nodes and GPUs",
    (
        Panel(
            "Processors of the nodes",
            f"How busy all cores of each node are, whoever uses them. {RAY}",
            ((ray("ray_node_cpu_utilization / 100"), "{{ip}}"),),
            "percentunit",
        ),
        Panel(
            "Memory of the nodes",
            f"What is in use, as a part of what the node (or its container) has; Ray ends workers from 0.95 on. {RAY}",
            ((ray("ray_node_mem_used / ray_node_mem_total"), "{{ip}}"),),
            "percentunit",
        ),
        Panel(
            "Network of the nodes",
            f"Over all interfaces of each node: collectives, copies for peers, checkpoints. {RAY}",
            ((ray("ray_node_network_receive_speed"), "{{ip}} in"), (ray("ray_node_network_send_speed"), "{{ip}} out")),
            "binBps",
        ),
        Panel(
            "Disks of the nodes, read and written",
            f"Over all disks of each node. {RAY}",
            ((ray("ray_node_disk_io_read_speed"), "{{ip}} read"), (ray("ray_node_disk_io_write_speed"), "{{ip}} written")),
            "binBps",
        ),
        Panel(
            "Disks of the nodes, in use",
            f"Of the disk that / is on; Ray's logs and spilled objects fill the one that its folder is on. {RAY}",
            ((ray("ray_node_disk_utilization_percentage / 100"), "{{ip}}"),),
            "percentunit",
        ),
        Panel(
            "Nodes",
            f"That Ray's cluster has; a pre-emption takes one away. {RAY}",
            ((f"sum by (SessionName) ({ray('ray_cluster_active_nodes')})", "{{SessionName}}"),),
            "none",
            custom={"lineInterpolation": "stepAfter"},
        ),
        Panel(
            "GPUs, as Ray sees them",
            f"How busy each GPU of the cluster is: the part of the time in which something ran on it. Empty without GPUs. {RAY}",
            ((ray("ray_node_gpus_utilization / 100"), "{{ip}} GPU {{GpuIndex}}"),),
            "percentunit",
        ),
        Panel(
            "GPUs: use and memory, by host",
            f"Mean utilisation of a host's GPUs, and the fullest one's memory as a part of what it has. {DCGM}",
            (
                ("avg by (Hostname) (DCGM_FI_DEV_GPU_UTIL) / 100", "{{Hostname}} busy"),
                ("max by (Hostname) (DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE))", "{{Hostname}} memory"),
            ),
            "percentunit",
        ),
        Panel(
            "GPUs: power, by host",
            f"Watts of all GPUs of a host together. {DCGM}",
            (("sum by (Hostname) (DCGM_FI_DEV_POWER_USAGE)", "{{Hostname}}"),),
            "watt",
        ),
        Panel(
            "GPUs: hottest, by host",
            f"A hot GPU lowers its clock, and is a slow worker. {DCGM}",
            (("max by (Hostname) (DCGM_FI_DEV_GPU_TEMP)", "{{Hostname}}"),),
            "celsius",
        ),
        Panel(
            "GPUs: slowest clock, by host",
            f"Of the multiprocessors: the slowest GPU of a host is whom the others wait for. {DCGM}",
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
