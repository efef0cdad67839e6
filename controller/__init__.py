"""The Ray controller: places workers, forms generations, watches, recovers, rescales, commits checkpoints, serves metrics.

Processes, and who owns whom (nothing is detached, so Ray takes everything along when the driver's job ends)::

    driver   the CLI's process: checks, Ray, signals, cleanup        `driver.run`
      |-- nursery      actor without logic: creates and kills workers, one placement group each; holds the TCPStore
      |     `-- workers    a controller's death does not touch them; they keep their processes across rescales
      `-- controller   named actor, restarted when it dies: decides; HTTP server; writes the run's folder

| module | what |
|---|---|
| ``driver`` | ``run(config) -> RunResult``: the only thing that the CLI needs |
| ``preflight`` | everything that can be found wrong before Ray starts |
| ``local_ray`` | a cluster of one's own, or a given one; ``watchdog``: ends the former when the driver is killed |
| ``nursery``, ``controller`` | the two actors |
| ``control_loop``, ``states`` | the controller's thread: the only loop, and its states; ``parts``: what its transitions share |
| ``run_begin``, ``generation``, ``recovery``, ``run_end`` | the transitions of the loop; ``launch``: the orders that form a generation |
| ``failure_detector`` | workers that are lost, hang, are cut off or leave too late |
| ``steering`` | who is hired and let go while a generation runs, and when it is asked to stop |
| ``desk`` | what is wanted: commands and scheduled actions |
| ``crew`` | the workers as the controller sees them: polls, orders, deaths |
| ``durable_state`` | what a restarted controller needs besides the events; ``StateStore`` writes it |
| ``run_stats`` | statistics of the run, reduced from its events: of ``step_stats``, ``rescales``, ``checkpoint_stats``, ``goodput`` |
| ``run_log``, ``generation_log`` | record events: stamp, apply, write; what the members of a generation report becomes events |
| ``run_lifecycle`` | what is recorded as a run or a life of its controller begins and ends |
| ``journal``, ``scribe`` | write the lines and files where the disk may not answer |
| ``worker_stats`` | statistics by rank, as the workers report them with each step |
| ``saves``, ``keeper`` | checkpoints under way; which state to go on from, and keeping what parked workers hold |
| ``room``, ``autoscaling`` | free places over time; what the run does with them: spares, more workers, wishes for Ray's autoscaler |
| ``connectivity``, ``hang`` | policies: nodes that do not reach each other; workers that hang |
| ``exit_deadlines``, ``straggler`` | policies: when a worker in an ended generation is ended; which slow worker is replaced |
| ``nodes`` | which nodes drain, and what is free on the others |
| ``budget``, ``evidence`` | what a run may go through, by cause; what one that is given up leaves for whoever has to find out why |
| ``policy`` | what to do next: pure functions of values |
| ``protocol`` | states, transitions, values |
| ``publisher``, ``snapshot`` | make the immutable snapshot of a run, which is all that other threads read; and run.json |
| ``exposition``, ``metrics`` | the snapshot as Prometheus' text; the HTTP server |

Uses ``vescale_ray.workers``' interface and ``vescale_ray.checkpoint``. Ray is imported by the modules that touch processes alone:
``driver``, ``local_ray``, ``nursery``, ``crew``, ``controller``.
"""
