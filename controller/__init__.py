"""The Ray controller: places workers, forms generations, watches, recovers, rescales, commits checkpoints, serves metrics.

Processes and their owners (no actor is detached, so Ray ends all of them with the driver's job)::

    driver   the CLI's process: checks, Ray, signals, cleanup        `driver.driver.run`
      |-- supervisor   actor without logic: creates and kills workers, one placement group each; holds the TCPStore
      |     `-- workers    a controller's death does not touch them; they keep their processes across rescales
      `-- controller   named actor, restarted when it dies: decides; HTTP server; writes the run's folder

| part | what |
|---|---|
| ``controller`` | the actor: its thread, its HTTP server, calls from the driver |
| ``control_loop`` | the controller's thread: one generation after another |
| ``states``, ``transitions`` | states of the control loop; the transitions, from a state and observations to a state and actions |
| ``observations``, ``actions``, ``executor`` | what transitions see and want; the parts of the controller, which carry it out |
| ``policy``, ``protocol`` | arithmetic of decisions as pure functions; run states, transitions, values |
| ``commands`` | commands and scheduled actions, and the target state that follows from them |
| ``bounded_io`` | calls to a disk that may not answer, with a time limit |
| ``driver`` | ``driver.driver.run(config) -> RunResult``; checks before Ray starts; a local cluster and its watchdog; ``doctor`` |
| ``worker_group`` | the workers as the controller sees them: polls, orders, deaths; the supervisor actor |
| ``state`` | durable state for a restarted controller; events, and the statistics reduced from them; the immutable snapshot |
| ``scaling`` | hiring and dismissing workers while a generation runs; free places; autoscaling; nodes that drain |
| ``failures`` | hangs, broken networks, slow workers, late exits; the failure budget; evidence of the cause of a failure |
| ``checkpointing`` | times, votes and commits of checkpoints; the state that a generation resumes from |
| ``http`` | the HTTP server; the snapshot as Prometheus' text; the final scrape |

Uses ``vescale_ray.workers``' interface and ``vescale_ray.checkpoint``. Only the modules that touch processes import Ray:
``driver.driver``, ``driver.local_ray``, ``worker_group.supervisor``, ``worker_group.worker_group``, ``controller``.
"""
