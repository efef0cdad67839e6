"""Code that runs on a worker: process groups, the training loop of one generation, in-memory copies, and the reshard.

Only ``worker.py``, the Ray actor, uses Ray. A worker is one process that goes through many generations; a generation is one fixed set of
ranks. Between two generations the process keeps its imports, its data set and its :class:`Snapshots`.

``membership.py`` and the tests drive a worker like this::

    process_groups.prepare()                                             # once, after the imports: gc.freeze()
    snapshots = Snapshots(every=config.elastic.snapshot_every)   # once per process; survives generations

    # -- a generation: the controller gave (generation, attempt, rank, world, source)
    # GroupFailed here: no group stays initialised; report, and wait for the next attempt
    process_groups.form(host, port, f"{run}/{generation}/{attempt}", rank, world, "gloo", timeout_s)
    try:
        with process_groups.collectives("..."):                          # turns collective errors into GroupFailed(str), frames cleared
            trainer = Trainer(config, rank, world, generation, device, dataset)
            trainer.initialize()                                 # source: fresh
            restore_from_checkpoint(trainer, checkpoint)         # source: checkpoint (vescale_ray.checkpoint.open(root, commit))
            report = reshard.execute(snapshots.shards(resume.generation, resume.step), trainer)   # source: memory; a joiner has [] to give
            snapshots.begin(trainer, resume.generation)          # collective: agrees on layouts, takes the first copy
            while trainer.completed < config.train.steps:
                # StepRecord; .flags is the OR over ranks, so all stop at the same boundary. settle ends the last copy's exchange
                record = trainer.step(flags, snapshots.settle)
                snapshots.after_step(trainer)                    # copies every `every` steps; the exchange overlaps the next step
                writer.submit(snapshots.stage(trainer), ..)      # if a checkpoint is due: writes this step's copy in a thread
                if record.flags & STOP: break
        snapshots.park(trainer)                                  # planned stop: the live shards count as held (no copy)
    except GroupFailed as failure: ...                           # keep only str(failure)
    finally:
        trainer.close(); del trainer; snapshots.abandon()
        process_groups.dissolve()                                        # closes the sockets, which ends the others' collectives
    snapshots.verify()                                           # after a failure: drops damaged copies
    held = snapshots.held()                                      # list[HeldState]: report it

    # -- the controller: resume = choose_resume({worker: held, ..}, prefer=members of the new generation) -> Resume | None (checkpoint)
    #    resume.suppliers - members = leavers that hold needed shards: with them all open a transfer group (new ranks first, then leavers):
    #    transfer = process_groups.open_transfer(host, port, prefix, transfer_rank, transfer_world, timeout_s)
    #    members: execute(shards, trainer, transfer); leavers: execute(shards, None, transfer); then process_groups.Closing(transfer, lines)
    # -- a checkpoint: vote = write_checkpoint_shard(export_shards(trainer), root, attempt); the controller commits the votes.

| module | contents |
|---|---|
| ``worker``, ``worker_state`` | the actor, and the state that its control threads and its training thread share |
| ``membership``, ``resharding.shard_move`` | a member's part in one generation; the move of shards, and a leaver's part |
| ``network.process_groups`` | ``prepare form dissolve collectives describe is_collective_error GroupFailed open_transfer Closing`` |
| ``trainer``, ``building.model_building`` | ``Trainer``; ``build_model Blank NextModel build_sharded`` |
| ``building.initial_values`` | ``fill``: weights of ``model.hf``, or random values that are equal at every world size; ``buffer_values`` |
| ``building.model_factory`` | ``model_on_meta``: the shapes of ``model.factory``; ``initial_tensors``: its initial values |
| ``building.host_memory`` | ``free_memory``: memory that the machine, or the limit of its container, leaves |
| ``steps.step_exchange`` | ``exchange``: the last collective before the optimizer's step |
| ``building.unit_forward``, ``.compile_ahead`` | recomputed and compiled units; ``compile_units`` compiles them before the first order |
| ``messages`` | ``StepRecord``; names of flag bits ``STOP RESCALE CHECKPOINT BUSY`` (any int below 2**62 is ORed) |
| ``resharding.shards`` | ``Shards Piece export_shards``: one rank's part of the training state, as views |
| ``resharding.memory_snapshots`` | ``Snapshots``; with ``copy_exchange``, ``memory_copy`` and ``buddies`` |
| ``resharding.held_state`` | ``HeldState Resume choose_resume`` |
| ``resharding.reshard`` | ``execute ReshardReport restore_from_checkpoint``; ``plan`` is in ``reshard_plan`` |
| ``building.job_plan`` | ``choose_for_job``: the planner's count of the memory that the workers of a job file take |
| ``saving`` | ``Writer``: writes checkpoints during training; ``write_checkpoint_shard`` |

This package may import everything in ``vescale_ray`` but ``controller``; only ``worker.py`` may import Ray.
"""
