"""Faults and their expected consequences; ``benchmarks/bench_faults.py`` causes and judges them.

- starter.py: a process that has imported the programs' modules, and forks to run them
- processes.py: start, watch and kill programs under test, and check that no process is left
- lab.py: a fault's environment, the undisturbed runs for comparison, and the verdict
- other files: the faults
"""

GROUPS = {
    "endings": "Processes that die, stop or raise",
    "signals": "Signals",
    "disks": "Disks that are full or read-only",
    "checkpoints": "Damaged and forged checkpoints",
    "shards": "Checkpoints of shards",
    "sharing": "Two programs in one folder",
    "links": "Symbolic links in folders of strangers",
    "media": "Pictures, clips and tables from strangers",
    "sets": "YAML, tars, indexes and addresses from strangers",
    "encoders": "Encoders, pickles and latents from strangers",
    "flags": "Flags",
}
