"""The Ray controller: places workers, forms generations, watches, recovers, rescales, commits checkpoints, serves metrics.

Processes, and who owns whom (nothing is detached, so Ray takes everything along when the driver's job ends)::

    driver   the CLI's process: checks, Ray, signals, cleanup        `driver.driver.run`
      |-- supervisor   actor without logic: creates and kills workers, one placement group each; holds the TCPStore
      |     `-- workers    a controller's death does not touch them; they keep their processes across rescales
      `-- controller   named actor, restarted when it dies: decides; HTTP server; writes the run's folder

| part | what |
|---|---|
| ``controller`` | the actor: its thread, its HTTP server, calls from the driver |
| ``control_loop`` | the controller's thread: one generation after another |
| ``states``, ``transitions`` | states of the control loop, and what leads from one to the next |
| ``policy``, ``protocol`` | what to do next, as pure functions of values; run states, transitions, values |
| ``commands`` | what is wanted: commands and scheduled actions |
| ``bounded_io`` | calls to a disk that may not answer, with a time limit |
| ``driver`` | ``driver.driver.run(config) -> RunResult``; checks before Ray starts; a local cluster and its watchdog; ``doctor`` |
| ``worker_group`` | the workers as the controller sees them: polls, orders, deaths; the supervisor actor |
| ``state`` | what a restarted controller needs; events, and the statistics reduced from them; the immutable snapshot |
| ``scaling`` | who is hired and let go while a generation runs; free places; autoscaling; nodes that drain |
| ``failures`` | hangs, broken networks, slow workers, late exits; the failure budget; evidence for whoever has to find out why |
| ``checkpointing`` | when a checkpoint is due, its votes and its commit; the state that a generation resumes from |
| ``http`` | the HTTP server; the snapshot as Prometheus' text; the final scrape |

Uses ``vescale_ray.workers``' interface and ``vescale_ray.checkpoint``. Ray is imported by the modules that touch processes alone:
``driver.driver``, ``driver.local_ray``, ``worker_group.supervisor``, ``worker_group.worker_group``, ``controller``.
"""
