"""What runs on a worker: process groups, the training loop of one generation, the copies kept in memory, the move of shards.

Everything here but ``worker.py`` (the Ray actor) is free of Ray: a worker process is one thread that goes through
generations, and between two generations it keeps its process, its imports, its corpus and its :class:`Snapshots`.

The life of a worker, as ``worker.py`` and the tests drive it::

    groups.prepare()                                             # once, after the imports: gc.freeze()
    snapshots = Snapshots(every=config.elastic.snapshot_every)   # once per process; survives generations

    # -- a generation: the controller gave (generation, attempt, rank, world, source)
    # GroupFailed here: nothing stays initialised; report, wait for the next attempt
    groups.form(host, port, f"{run}/{generation}/{attempt}", rank, world, "gloo", timeout_s)
    try:
        with groups.collectives("..."):                          # collective errors come out as GroupFailed(str), frames cleared
            trainer = Trainer(config, rank, world, generation, device, corpus)
            trainer.initialize()                                 # source: fresh
            restore_from_checkpoint(trainer, checkpoint)         # source: checkpoint (vescale_ray.checkpoint.open(root, commit))
            report = reshard.execute(snapshots.shards(resume.generation, resume.step), trainer)   # source: memory; a joiner has [] to give
            snapshots.begin(trainer, resume.generation)          # collective: agrees on layouts, takes the first copy
            while trainer.completed < config.train.steps:
                # StepRecord; .flags is the OR over ranks: all stop at the same boundary. settle: the last copy's exchange
                record = trainer.step(flags, snapshots.settle)
                snapshots.after_step(trainer)                    # every `every` steps: a copy, whose exchange goes on beside the next step
                writer.submit(snapshots.stage(trainer), ..)      # a checkpoint is due: from the copy of this step, beside the training
                if record.flags & STOP: break
        snapshots.park(trainer)                                  # planned stop: the live shards count as held (no copy)
    except GroupFailed as failure: ...                           # str(failure) is all there is to keep
    finally:
        trainer.close(); del trainer; snapshots.let_go()
        groups.dissolve()                                        # sockets close at once; the other survivors learn by that
    snapshots.verify()                                           # after a failure: copies that are damaged are forgotten
    held = snapshots.held()                                      # list[Holding]: report it

    # -- the controller: resume = choose_resume({worker: held, ..}, prefer=members of the new generation) -> Resume | None (checkpoint)
    #    resume.suppliers - members = leavers that must still give: then all of them open a transfer group (new ranks first, leavers after):
    #    transfer = groups.open_transfer(host, port, prefix, transfer_rank, transfer_world, timeout_s)
    #    members: execute(shards, trainer, transfer); leavers: execute(shards, None, transfer); then groups.Closing(transfer, lines)
    # -- a checkpoint: vote = write_checkpoint_shard(export_shards(trainer), root, attempt); the controller commits the votes.

| module | what |
|---|---|
| ``groups`` | ``prepare form dissolve collectives describe is_collective_error GroupFailed open_transfer Closing`` |
| ``trainer`` | ``Trainer`` |
| ``messages`` | ``StepRecord``; names of flag bits ``STOP RESCALE CHECKPOINT BUSY`` (any int below 2**62 is ORed) |
| ``shards`` | ``Shards Piece export_shards``: a rank's part of the whole state, as views |
| ``snapshot`` | ``Snapshots buddies`` |
| ``holdings`` | ``Holding Resume choose_resume`` |
| ``saving`` | ``Writer``: checkpoints that are written beside the training |
| ``reshard`` | ``plan execute ReshardReport restore_from_checkpoint write_checkpoint_shard`` |

May import everything in ``vescale_ray`` but ``controller``; only ``worker.py`` may import Ray.
"""
