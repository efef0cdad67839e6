"""The dashboard's panels, row by row. :mod:`vescale_ray.deploy.infrastructure` has those about the nodes."""

from __future__ import annotations

from vescale_ray.deploy.panel import EACH, FEW, RATE, RUN, STACKED, STATE, STATE_MAP, STEPS, Panel, few, highest, median, newest, stat

WAITED = f'vescale_worker_exposed_communication_seconds_total{{{RUN}, op!="reshard"}}'
"""Waiting time of steps alone, without reshards."""
WAITS = (
    f"sum by ({EACH}, rank) (rate({WAITED}[{RATE}])) / on ({EACH}) group_left "
    f"max by ({EACH}) (rate(vescale_step_duration_seconds_sum{{{RUN}}}[{RATE}]))"
)
MEDIAN_WAIT = (
    f'sum by ({EACH}) (rate(vescale_worker_exposed_communication_seconds_quantile{{{RUN}, op!="reshard", quantile="0.5"}}[{RATE}]))'
    f" / on ({EACH}) max by ({EACH}) (rate(vescale_step_duration_seconds_sum{{{RUN}}}[{RATE}])) or quantile by ({EACH}) (0.5, {WAITS})"
)
"""Of a run that does not show all ranks: from the medians of all ranks."""
HEARD = f"vescale_worker_heartbeat_timestamp_seconds{{{RUN}}}"


def shown_of(function: str, series: str) -> str:
    return f"{function}({series}[$__range] @ end())"


def usual_memory(kinds: str = ".+") -> str:
    """The memory of the usual rank by kind: the mean of all ranks. A run that does not show all ranks has their median instead."""
    name, those = "vescale_worker_memory_bytes", f'{RUN}, kind=~"{kinds}"'
    shown, spread = f"{name}{{{those}}}", f'{name}_quantile{{{those}, quantile="0.5"}}'
    return f"max by ({EACH}, kind) ({spread}) or avg by ({EACH}, kind) ({shown})"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Overview",
        (
            stat("State", "Current state of the run.", STATE, values={"mappings": STATE_MAP}),
            stat("Tokens per second", "All workers together, in the last step.", f"vescale_tokens_per_second{{{RUN}}}"),
            stat("Step", "Completed optimizer steps. The row Training shows the target.", f"vescale_step{{{RUN}}}", "none"),
            stat(
                "Goodput",
                "Share of the shown time spent on steps that count.",
                f"sum by ({EACH}) (increase(vescale_goodput_seconds_total{{{RUN}}}[$__range])) / (sum by ({EACH}) "
                f"(increase(vescale_goodput_seconds_total{{{RUN}}}[$__range])) + sum by ({EACH}) "
                f"(increase(vescale_badput_seconds_total{{{RUN}}}[$__range])))",
                "percentunit",
                instant=True,
            ),
            stat("Workers", "Workers that train, or that trained last.", f"vescale_world_size{{{RUN}}}", "none"),
            stat(
                "Checkpoint age",
                "Time since the newest checkpoint was committed: the work lost if all workers fail.",
                f"time() - vescale_checkpoint_last_success_timestamp_seconds{{{RUN}}}",
                "s",
            ),
        ),
    ),
    (
        "Throughput",
        (
            Panel(
                "Tokens per second",
                "Trained tokens per second of wall time (pauses included), and in the last step alone.",
                (
                    (f"rate(vescale_tokens_total{{{RUN}}}[{RATE}])", "{{run}} by wall time"),
                    (f"vescale_tokens_per_second{{{RUN}}}", "{{run}} last step"),
                ),
            ),
            Panel(
                "Tokens per second and worker",
                "Tokens per second of training per worker. It falls if workers become slow, but not if there are fewer, unless the slots "
                "are uneven (see Slots).",
                (
                    (
                        f"rate(vescale_tokens_total{{{RUN}}}[{RATE}]) / rate(vescale_step_duration_seconds_sum{{{RUN}}}[{RATE}]) "
                        f"/ vescale_world_size{{{RUN}}}",
                        "{{run}}",
                    ),
                ),
            ),
            Panel(
                "Step time",
                "Wall time of one optimizer step: mean, median and 99th percentile (interpolated in the histogram's buckets).",
                (
                    (
                        f"rate(vescale_step_duration_seconds_sum{{{RUN}}}[{RATE}]) / "
                        f"rate(vescale_step_duration_seconds_count{{{RUN}}}[{RATE}])",
                        "{{run}} mean",
                    ),
                    (
                        f"histogram_quantile(0.5, sum by ({EACH}, le) (rate(vescale_step_duration_seconds_bucket{{{RUN}}}[{RATE}])))",
                        "{{run}} p50",
                    ),
                    (
                        f"histogram_quantile(0.99, sum by ({EACH}, le) (rate(vescale_step_duration_seconds_bucket{{{RUN}}}[{RATE}])))",
                        "{{run}} p99",
                    ),
                ),
                "s",
            ),
            Panel(
                "Model FLOPs utilisation",
                "Operations of the model in the last step, as a share of the devices' peak. Shown only if the peak is known from "
                "metrics.peak_flops or a GPU's data sheet.",
                ((f"vescale_model_flops_utilization_ratio{{{RUN}}}", "{{run}}"),),
                "percentunit",
            ),
            Panel(
                "Exposed communication by collective",
                "Share of a step in which a rank's training thread waited for other ranks, mean of all ranks. Communication hidden behind "
                "compute does not count; on an accelerator only the host's waits do. At step_end all ranks wait for the slowest.",
                (
                    (
                        f"avg by ({EACH}, op) (rate({WAITED}[{RATE}])) / on ({EACH}) group_left "
                        f"max by ({EACH}) (rate(vescale_step_duration_seconds_sum{{{RUN}}}[{RATE}]))",
                        "{{run}} {{op}}",
                    ),
                ),
                "percentunit",
                custom=STACKED,
            ),
            Panel(
                "Where a step's time goes",
                "Share of one rank's time by activity: batches, compute, waits for others (comm), optimizer, copies for checkpoints.",
                ((f"rate(vescale_phase_seconds_total{{{RUN}}}[{RATE}])", "{{run}} {{phase}}"),),
                "percentunit",
                custom=STACKED,
            ),
        ),
    ),
    (
        "Memory",
        (
            Panel(
                "Resident memory by rank",
                f"Host memory of the worker process, for the {FEW} largest ranks. On the CPU it holds everything, with a GPU only "
                "page-locked buffers and peer copies.",
                ((highest("vescale_worker_host_rss_bytes"), "{{run}} rank {{rank}}"),),
                "bytes",
                width=12,
            ),
            Panel(
                "Resident memory, largest and smallest rank",
                "They differ if the layout is uneven or one rank leaks memory.",
                (
                    (f"max by ({EACH}) (vescale_worker_host_rss_bytes{{{RUN}}})", "{{run}} largest"),
                    (f"min by ({EACH}) (vescale_worker_host_rss_bytes{{{RUN}}})", "{{run}} smallest"),
                ),
                "bytes",
                width=12,
            ),
            Panel(
                "Memory by kind",
                "Memory that the run allocated on a rank, mean of all ranks (median if there are more than 256): shards (parameters, "
                "gradients), optimizer states, padding of the shards, buffers of gathered parameters and gradients (peak so far), copies "
                "for peers and checkpoints. Activations and the process itself make up the rest of the resident memory.",
                ((usual_memory(), "{{run}} {{kind}}"),),
                "bytes",
                custom=STACKED,
            ),
            Panel(
                "Padding",
                "Share of the parameter and gradient shards that belongs to no tensor, on the usual and on the worst rank.",
                (
                    (
                        f"sum by ({EACH}) ({usual_memory('padding')}) / "
                        f"sum by ({EACH}) ({usual_memory('padding|parameters|gradients')})",
                        "{{run}} all ranks",
                    ),
                    (
                        f'max by ({EACH}) (sum by ({EACH}, rank) (vescale_worker_memory_bytes{{{RUN}, kind="padding"}}) / '
                        f'sum by ({EACH}, rank) (vescale_worker_memory_bytes{{{RUN}, kind=~"padding|parameters|gradients"}}))',
                        "{{run}} worst rank",
                    ),
                ),
                "percentunit",
            ),
            Panel(
                "Accelerator memory, largest rank",
                "Memory held by tensors (now and peak), memory held by the allocator, and capacity. Empty without accelerators.",
                (
                    (f"max by ({EACH}) (vescale_worker_memory_allocated_bytes{{{RUN}}})", "{{run}} allocated"),
                    (f"max by ({EACH}) (vescale_worker_memory_peak_allocated_bytes{{{RUN}}})", "{{run}} peak allocated"),
                    (f"max by ({EACH}) (vescale_worker_memory_reserved_bytes{{{RUN}}})", "{{run}} reserved"),
                    (f"min by ({EACH}) (vescale_worker_memory_capacity_bytes{{{RUN}}})", "{{run}} capacity"),
                ),
                "bytes",
            ),
        ),
    ),
    (
        "Training",
        (
            Panel(
                "Loss",
                "Training loss of the last step, in bits per byte of text.",
                ((f"vescale_loss_bpb{{{RUN}}}", "{{run}}"),),
                "none",
            ),
            Panel("Gradient norm", "Norm of the whole gradient before clipping.", ((f"vescale_grad_norm{{{RUN}}}", "{{run}}"),), "none"),
            Panel("Learning rate", "Learning rate of the last step.", ((f"vescale_learning_rate{{{RUN}}}", "{{run}}"),), "none"),
            Panel(
                "Steps that went wrong",
                "Steps since the run began with a non-finite loss or gradient, steps that the optimizer skipped for it, and steps with a "
                "clipped gradient (many are normal at the beginning).",
                (
                    (f"vescale_nonfinite_steps_total{{{RUN}}}", "{{run}} not finite"),
                    (f"vescale_skipped_steps_total{{{RUN}}}", "{{run}} skipped"),
                    (f"vescale_clipped_steps_total{{{RUN}}}", "{{run}} clipped"),
                ),
                "none",
                custom=STEPS,
            ),
            Panel(
                "Step",
                "Completed steps and their target. A fall is a rollback.",
                ((f"vescale_step{{{RUN}}}", "{{run}}"), (f"vescale_step_target{{{RUN}}}", "{{run}} of")),
                "none",
            ),
            Panel(
                "Time since the last step",
                "Age of the last completed step. It grows while nothing trains.",
                ((f"time() - vescale_last_step_timestamp_seconds{{{RUN}}}", "{{run}}"),),
                "s",
            ),
        ),
    ),
    (
        "Elasticity",
        (
            Panel(
                "State",
                "The run's states over time.",
                ((STATE, "{{run}}"),),
                "none",
                "state-timeline",
                24,
                4,
                values={"mappings": STATE_MAP},
            ),
            Panel(
                "Workers",
                "Workers that train, workers that are wanted, and the run's bounds.",
                (
                    (f"vescale_world_size{{{RUN}}}", "{{run}} train"),
                    (f"vescale_world_size_target{{{RUN}}}", "{{run}} wanted"),
                    (f"vescale_world_size_min{{{RUN}}}", "{{run}} fewest"),
                    (f"vescale_world_size_max{{{RUN}}}", "{{run}} most"),
                ),
                "none",
                custom=STEPS,
            ),
            Panel(
                "Spares, wishes, drains and ranks without a copy",
                "Warm workers that do not train; places requested from Ray's autoscaler; workers whose node is about to go; ranks without "
                "a copy of their shards on another node. If such a node is lost, the steps since the checkpoint are lost too.",
                (
                    (f"vescale_spares{{{RUN}}}", "{{run}} spares"),
                    (f"vescale_spares_target{{{RUN}}}", "{{run}} spares wanted"),
                    (f"vescale_places_wanted{{{RUN}}}", "{{run}} places wanted"),
                    (f"vescale_draining_workers{{{RUN}}}", "{{run}} drain"),
                    (f"vescale_unprotected_ranks{{{RUN}}}", "{{run}} without a copy elsewhere"),
                ),
                "none",
                custom=STEPS,
            ),
            Panel(
                "Rescales",
                "Completed changes of the worker group, by direction and reason.",
                ((f"vescale_rescales_total{{{RUN}}} > 0", "{{run}} {{direction}}, {{reason}}"),),
                "none",
                custom=STEPS,
            ),
            Panel(
                "Pause of a rescale",
                "Time without training per rescale, mean and 95th percentile over the shown time.",
                (
                    (
                        f"increase(vescale_rescale_duration_seconds_sum{{{RUN}}}[$__range]) / "
                        f"increase(vescale_rescale_duration_seconds_count{{{RUN}}}[$__range])",
                        "{{run}} mean",
                    ),
                    (
                        f"histogram_quantile(0.95, sum by ({EACH}, le) "
                        f"(increase(vescale_rescale_duration_seconds_bucket{{{RUN}}}[$__range])))",
                        "{{run}} p95",
                    ),
                ),
                "s",
            ),
            Panel(
                "Where rescales spend their time",
                "Seconds spent since the run began, by phase: detect, fence, plan, form (process group), build (model), sync (shards).",
                ((f"vescale_rescale_phase_seconds_total{{{RUN}}}", "{{run}} {{phase}}"),),
                "s",
                custom=STACKED,
            ),
            Panel(
                "Failures",
                "Lost workers, recoveries by cause, and repeated steps.",
                (
                    (f"vescale_worker_failures_total{{{RUN}}} > 0", "{{run}} workers {{reason}}"),
                    (f"vescale_failures_total{{{RUN}}} > 0", "{{run}} recoveries: {{cause}}"),
                    (f"vescale_replayed_steps_total{{{RUN}}}", "{{run}} steps replayed"),
                    (f"vescale_failures_in_a_row{{{RUN}}}", "{{run}} in a row: {{kind}}"),
                ),
                "none",
                custom=STEPS,
            ),
        ),
    ),
    (
        "Goodput",
        (
            Panel(
                "Where the time goes",
                "Share of time by use; the sum is 1.",
                (
                    (f"rate(vescale_goodput_seconds_total{{{RUN}}}[{RATE}])", "{{run}} steps that count"),
                    (f"rate(vescale_badput_seconds_total{{{RUN}}}[{RATE}])", "{{run}} {{cause}}"),
                ),
                "percentunit",
                width=16,
                custom=STACKED,
            ),
            Panel(
                "Time lost",
                "Seconds lost since the run began, by cause; for an ended run, the total.",
                ((f"max by ({EACH}, cause) ({newest('vescale_badput_seconds_total')}) > 0", "{{run}} {{cause}}"),),
                "s",
                "bargauge",
                options={"orientation": "horizontal", "displayMode": "basic"},
                instant=True,
            ),
        ),
    ),
    (
        "Checkpoints",
        (
            Panel(
                "Duration and stall",
                "Mean time of each stage: training waits for the copy (snapshot), workers write (upload), the controller commits. Also "
                "the time to read a checkpoint, and the wait of training for the newest copy.",
                (
                    (
                        f"increase(vescale_checkpoint_duration_seconds_sum{{{RUN}}}[$__range]) / "
                        f"increase(vescale_checkpoint_duration_seconds_count{{{RUN}}}[$__range])",
                        "{{run}} {{op}} {{stage}}",
                    ),
                    (f"vescale_checkpoint_stall_seconds{{{RUN}}}", "{{run}} stall"),
                ),
                "s",
            ),
            Panel(
                "Age and interval",
                "Time since the newest checkpoint, and the interval chosen by checkpoint.every: auto.",
                (
                    (f"time() - vescale_checkpoint_last_success_timestamp_seconds{{{RUN}}}", "{{run}} age"),
                    (f"vescale_checkpoint_interval_seconds{{{RUN}}}", "{{run}} interval"),
                ),
                "s",
            ),
            Panel(
                "Written and read",
                "Bytes of committed checkpoints, and bytes that workers read from checkpoints.",
                ((f"vescale_checkpoint_bytes_total{{{RUN}}}", "{{run}} {{op}}"),),
                "bytes",
            ),
            Panel(
                "Newest checkpoint's step",
                "Step of the newest checkpoint and of the run. The difference is lost if all workers fail.",
                ((f"vescale_checkpoint_last_step{{{RUN}}}", "{{run}} checkpoint"), (f"vescale_step{{{RUN}}}", "{{run}} run")),
                "none",
                width=12,
                custom=STEPS,
            ),
            Panel(
                "Failed and pending checkpoints",
                "Training goes on after a failed checkpoint, and earlier checkpoints stay intact.",
                (
                    (f"vescale_checkpoint_failures_total{{{RUN}}}", "{{run}} {{op}} failed"),
                    (f"vescale_checkpoint_pending{{{RUN}}}", "{{run}} pending"),
                ),
                "none",
                width=12,
                custom=STEPS,
            ),
        ),
    ),
    (
        "Workers",
        (
            Panel(
                "Slowness",
                f"A rank's time for a slot relative to the median rank's, for the {FEW} slowest ranks; 1 is normal.",
                (
                    (highest("vescale_worker_slowness_ratio"), "{{run}} rank {{rank}}"),
                    (f"vescale_stragglers{{{RUN}}}", "{{run}} stragglers"),
                ),
                "none",
            ),
            Panel(
                "Own time for a slot",
                f"A rank's time for a slot in the last step, without waits for others: the {FEW} slowest ranks, and the median of all.",
                (
                    (highest("vescale_worker_slot_seconds"), "{{run}} rank {{rank}}"),
                    (median("vescale_worker_slot_seconds"), "{{run}} median"),
                ),
                "s",
            ),
            Panel(
                "Slots",
                "Most and fewest slots of the global batch on one rank.",
                (
                    (f"max by ({EACH}) (vescale_worker_slots{{{RUN}}})", "{{run}} most"),
                    (f"min by ({EACH}) (vescale_worker_slots{{{RUN}}})", "{{run}} fewest"),
                ),
                "none",
                custom=STEPS,
            ),
            Panel(
                "Waiting by rank",
                "Share of its steps in which a rank waited for others. The others wait for the rank that waits least. Shows the "
                f"{FEW} ranks that waited least, and the median of all.",
                (
                    (
                        few(
                            WAITS,
                            f"sum by ({EACH}, rank) ({shown_of('increase', WAITED)}) / "
                            f"sum by ({EACH}, rank) ({shown_of('count_over_time', WAITED)})",
                            "bottomk",
                        ),
                        "{{run}} rank {{rank}}",
                    ),
                    (MEDIAN_WAIT, "{{run}} median"),
                ),
                "percentunit",
            ),
            Panel(
                "Step time by rank",
                f"Wall time of the last step, for the {FEW} slowest ranks and the median of all. Also the most seconds that one rank "
                "has spent on moves of shards since the run began.",
                (
                    (highest("vescale_worker_step_duration_seconds"), "{{run}} rank {{rank}}"),
                    (median("vescale_worker_step_duration_seconds"), "{{run}} median"),
                    (
                        f'max by ({EACH}) (vescale_worker_exposed_communication_seconds_total{{{RUN}, op="reshard"}})',
                        "{{run}} moves, most",
                    ),
                ),
                "s",
            ),
            Panel(
                "Age of the last answer",
                "Time since a rank last answered the controller, which polls several times a second: the "
                f"{FEW} ranks with answers in the fewest scrapes, and the longest of all.",
                (
                    (
                        few(f"time() - {HEARD}", f"({shown_of('changes', HEARD)} + 1) / {shown_of('count_over_time', HEARD)}", "bottomk"),
                        "{{run}} rank {{rank}}",
                    ),
                    (f"max by ({EACH}) (time() - {HEARD})", "{{run}} longest"),
                ),
                "s",
            ),
            Panel(
                "Ranks",
                "Worker and node of each rank; for an ended run, all within the shown time.",
                ((newest("vescale_worker_info"), ""),),
                "none",
                "table",
                12,
                7,
                instant=True,
            ),
            Panel(
                "Retries of allocations",
                f"Times that a rank's accelerator allocator freed its cache and tried again, for the {FEW} highest ranks. Retries mean "
                "that memory is nearly full.",
                ((highest("vescale_worker_alloc_retries_total"), "{{run}} rank {{rank}}"),),
                "none",
                width=6,
                custom=STEPS,
            ),
            Panel("Versions", "Software versions of each run.", ((newest("vescale_build_info"), ""),), "none", "table", 6, 7, instant=True),
        ),
    ),
)
