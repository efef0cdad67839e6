"""The panels of the dashboard, row by row; those of the nodes under the run are in :mod:`vescale_ray.deploy.infrastructure`."""

from __future__ import annotations

from vescale_ray.deploy.panel import EACH, FEW, RATE, RUN, STACKED, STATE, STATE_MAP, STEPS, Panel, few, highest, median, newest, stat

WAITED = f'vescale_worker_exposed_communication_seconds_total{{{RUN}, op!="reshard"}}'
"""Of steps alone."""
WAITS = (
    f"sum by ({EACH}, rank) (rate({WAITED}[{RATE}])) / on ({EACH}) group_left "
    f"max by ({EACH}) (rate(vescale_step_duration_seconds_sum{{{RUN}}}[{RATE}]))"
)
HEARD = f"vescale_worker_heartbeat_timestamp_seconds{{{RUN}}}"


def shown_of(function: str, series: str) -> str:
    return f"{function}({series}[$__range] @ end())"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Overview",
        (
            stat("State", "What the run does now.", STATE, values={"mappings": STATE_MAP}),
            stat("Tokens per second", "Of the last step, all workers together.", f"vescale_tokens_per_second{{{RUN}}}"),
            stat("Step", "Completed optimizer steps; how many there will be: row Training.", f"vescale_step{{{RUN}}}", "none"),
            stat(
                "Goodput",
                "The share of the shown time that went into steps that count.",
                f"sum by ({EACH}) (increase(vescale_goodput_seconds_total{{{RUN}}}[$__range])) / (sum by ({EACH}) "
                f"(increase(vescale_goodput_seconds_total{{{RUN}}}[$__range])) + sum by ({EACH}) "
                f"(increase(vescale_badput_seconds_total{{{RUN}}}[$__range])))",
                "percentunit",
                instant=True,
            ),
            stat("Workers", "Workers that train, or last did.", f"vescale_world_size{{{RUN}}}", "none"),
            stat(
                "Checkpoint age",
                "Time since the newest checkpoint was committed: what a loss of everything would cost.",
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
                "Tokens trained on, by wall time (pauses included), and of the last step alone.",
                (
                    (f"rate(vescale_tokens_total{{{RUN}}}[{RATE}])", "{{run}} by wall time"),
                    (f"vescale_tokens_per_second{{{RUN}}}", "{{run}} last step"),
                ),
            ),
            Panel(
                "Tokens per second and worker",
                "Per second of training and worker: falls when workers become slow, not when there are fewer, unless they can't share the "
                "slots evenly (see Slots).",
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
                "Operations of the model in the last step, as a part of what all devices could have done. Only where their peak is known: "
                "from metrics.peak_flops, or a GPU's data sheet.",
                ((f"vescale_model_flops_utilization_ratio{{{RUN}}}", "{{run}}"),),
                "percentunit",
            ),
            Panel(
                "Exposed communication by collective",
                "The part of a step for which a rank's training thread stood still for others, mean of all ranks; what is hidden behind "
                "compute does not count, and on an accelerator only what the host waits for. step_end is where all wait for the slowest.",
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
                "Seconds of each second, of one rank: batches, compute, waiting for others (comm), optimizer; and copies for checkpoints.",
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
                f"Host memory of a worker's process, of the {FEW} ranks that had most: on the CPU everything, with a GPU page-locked "
                "buffers and peer copies.",
                ((highest("vescale_worker_host_rss_bytes"), "{{run}} rank {{rank}}"),),
                "bytes",
                width=12,
            ),
            Panel(
                "Resident memory, largest and smallest rank",
                "They lie apart where the layout is uneven, or one rank leaks.",
                (
                    (f"max by ({EACH}) (vescale_worker_host_rss_bytes{{{RUN}}})", "{{run}} largest"),
                    (f"min by ({EACH}) (vescale_worker_host_rss_bytes{{{RUN}}})", "{{run}} smallest"),
                ),
                "bytes",
                width=12,
            ),
            Panel(
                "Memory by kind",
                "What the run has allocated on a rank, mean of all ranks: elements of shards (parameters, gradients), optimizer states, "
                "padding of the shards, buffers of gathered parameters and of gradients (the most so far), copies for peers and "
                "checkpoints. The rest of the resident memory are activations and the process itself.",
                ((f"avg by ({EACH}, kind) (vescale_worker_memory_bytes{{{RUN}}})", "{{run}} {{kind}}"),),
                "bytes",
                custom=STACKED,
            ),
            Panel(
                "Padding",
                "The part of the shards of parameters and gradients that belongs to no tensor, of all ranks together and of the worst one.",
                (
                    (
                        f'sum by ({EACH}) (vescale_worker_memory_bytes{{{RUN}, kind="padding"}}) / '
                        f'sum by ({EACH}) (vescale_worker_memory_bytes{{{RUN}, kind=~"padding|parameters|gradients"}})',
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
                "Held by tensors now and at most, held by the allocator, and what there is. Empty without accelerators.",
                (
                    (f"max by ({EACH}) (vescale_worker_memory_allocated_bytes{{{RUN}}})", "{{run}} allocated"),
                    (f"max by ({EACH}) (vescale_worker_memory_peak_allocated_bytes{{{RUN}}})", "{{run}} most allocated"),
                    (f"max by ({EACH}) (vescale_worker_memory_reserved_bytes{{{RUN}}})", "{{run}} reserved"),
                    (f"min by ({EACH}) (vescale_worker_memory_capacity_bytes{{{RUN}}})", "{{run}} there is"),
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
            Panel("Gradient norm", "Before clipping.", ((f"vescale_grad_norm{{{RUN}}}", "{{run}}"),), "none"),
            Panel("Learning rate", "Of the last step.", ((f"vescale_learning_rate{{{RUN}}}", "{{run}}"),), "none"),
            Panel(
                "Steps that went wrong",
                "With a loss or gradient that is no finite number, left out by the optimizer for that, or with a gradient that was clipped "
                "(many at the beginning are usual). Since the run began.",
                (
                    (f"vescale_nonfinite_steps_total{{{RUN}}}", "{{run}} not finite"),
                    (f"vescale_skipped_steps_total{{{RUN}}}", "{{run}} left out"),
                    (f"vescale_clipped_steps_total{{{RUN}}}", "{{run}} clipped"),
                ),
                "none",
                custom=STEPS,
            ),
            Panel(
                "Step",
                "Completed steps, and how many there will be; a fall is a rollback.",
                ((f"vescale_step{{{RUN}}}", "{{run}}"), (f"vescale_step_target{{{RUN}}}", "{{run}} of")),
                "none",
            ),
            Panel(
                "Time since the last step",
                "How old the last completed step is; grows while nothing is trained.",
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
                "That train, that are wanted, and the bounds between which the run may go.",
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
                "Warm workers beside those that train; places that Ray's autoscaler is shown as wanted; workers whose node is about to go; "
                "ranks that have no copy of their shards on another node, so that the loss of theirs costs the steps since the checkpoint.",
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
                "Completed changes of the workers, by direction and reason.",
                ((f"vescale_rescales_total{{{RUN}}} > 0", "{{run}} {{direction}}, {{reason}}"),),
                "none",
                custom=STEPS,
            ),
            Panel(
                "Pause of a rescale",
                "Time without training, mean and 95th percentile over the shown time.",
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
                "Seconds since the run began, by phase: detect, fence, plan, form (process group), build (model), sync (shards).",
                ((f"vescale_rescale_phase_seconds_total{{{RUN}}}", "{{run}} {{phase}}"),),
                "s",
                custom=STACKED,
            ),
            Panel(
                "Failures",
                "Workers that were lost, recoveries by cause, and steps that had to be done again.",
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
                "Seconds of each second, by what they went into; together 1.",
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
                "Seconds lost since the run began, by cause; of a run that has ended, all of them.",
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
                "Mean time of each stage: training waits for the copy (snapshot), workers write (upload), the controller commits; or "
                "of reading one. And how long training waited for the newest one's copy.",
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
                "Time since the newest one, and the interval that checkpoint.every: auto has chosen.",
                (
                    (f"time() - vescale_checkpoint_last_success_timestamp_seconds{{{RUN}}}", "{{run}} age"),
                    (f"vescale_checkpoint_interval_seconds{{{RUN}}}", "{{run}} interval"),
                ),
                "s",
            ),
            Panel(
                "Written and read",
                "Bytes of committed checkpoints, and bytes that workers have read of checkpoints.",
                ((f"vescale_checkpoint_bytes_total{{{RUN}}}", "{{run}} {{op}}"),),
                "bytes",
            ),
            Panel(
                "Newest checkpoint's step",
                "Beside the run's own step: the distance is what a loss of everything would cost.",
                ((f"vescale_checkpoint_last_step{{{RUN}}}", "{{run}} checkpoint"), (f"vescale_step{{{RUN}}}", "{{run}} run")),
                "none",
                width=12,
                custom=STEPS,
            ),
            Panel(
                "Failed checkpoints, and those under way",
                "Training goes on after a failure; the ones before are whole.",
                (
                    (f"vescale_checkpoint_failures_total{{{RUN}}}", "{{run}} {{op}} failed"),
                    (f"vescale_checkpoint_pending{{{RUN}}}", "{{run}} under way"),
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
                f"How many times as long as the usual rank a rank takes for a slot, of the {FEW} that were slowest; 1 is usual.",
                (
                    (highest("vescale_worker_slowness_ratio"), "{{run}} rank {{rank}}"),
                    (f"vescale_stragglers{{{RUN}}}", "{{run}} workers that are slow for long"),
                ),
                "none",
            ),
            Panel(
                "Own time for a slot",
                f"Of the last step, without waiting for others: of the {FEW} ranks that were slowest, and the median of all.",
                (
                    (highest("vescale_worker_slot_seconds"), "{{run}} rank {{rank}}"),
                    (median(f"vescale_worker_slot_seconds{{{RUN}}}"), "{{run}} median"),
                ),
                "s",
            ),
            Panel(
                "Slots",
                "Slots of the global batch that a rank does: most and fewest of all ranks.",
                (
                    (f"max by ({EACH}) (vescale_worker_slots{{{RUN}}})", "{{run}} most"),
                    (f"min by ({EACH}) (vescale_worker_slots{{{RUN}}})", "{{run}} fewest"),
                ),
                "none",
                custom=STEPS,
            ),
            Panel(
                "Waiting by rank",
                "The part of its steps for which a rank stood still for others: the one that waits least is whom the others wait for. Of "
                f"the {FEW} ranks that waited least for as long as they were there, and the median of all.",
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
                    (median(WAITS), "{{run}} median"),
                ),
                "percentunit",
            ),
            Panel(
                "Step time by rank",
                f"Wall time of a rank's last step, of the {FEW} that took longest, and the median of all; and the most seconds that moves "
                "of shards have taken a rank since the run began.",
                (
                    (highest("vescale_worker_step_duration_seconds"), "{{run}} rank {{rank}}"),
                    (median(f"vescale_worker_step_duration_seconds{{{RUN}}}"), "{{run}} median"),
                    (
                        f'max by ({EACH}) (vescale_worker_exposed_communication_seconds_total{{{RUN}, op="reshard"}})',
                        "{{run}} moves, most",
                    ),
                ),
                "s",
            ),
            Panel(
                "Age of the last answer",
                "Since the controller has heard a rank, which it does several times a second: of the "
                f"{FEW} that were heard anew in the fewest scrapes, and of all the longest.",
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
                "Which worker holds each rank, and on which node; of a run that has ended, all that did in the shown time.",
                ((newest("vescale_worker_info"), ""),),
                "none",
                "table",
                12,
                7,
                instant=True,
            ),
            Panel(
                "Retries of allocations",
                f"Times that the allocator of a rank's accelerator had to give memory back and try again, of the {FEW} ranks with most: it "
                "is nearly full.",
                ((highest("vescale_worker_alloc_retries_total"), "{{run}} rank {{rank}}"),),
                "none",
                width=6,
                custom=STEPS,
            ),
            Panel("Versions", "What each run runs on.", ((newest("vescale_build_info"), ""),), "none", "table", 6, 7, instant=True),
        ),
    ),
)
