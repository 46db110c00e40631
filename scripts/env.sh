# Sourced by the shell scripts: sets OpenDiT up if needed, activates its environment, counts GPUs.
#   GPUS   number of GPUs        NPROC   processes to start: a process a GPU, 2 on a CPU (set NPROC to change it)
#   alone COMMAND...   runs a program of one process: on a CPU it may have all cores, not a process's share of them
#   SETUP  what install.sh is to set up besides (test); set it before. Its arguments can't be this file's: a sourced
#          file has those of the script that sources it, which are the user's flags.
bash install.sh ${SETUP:-}
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
  . .venv/bin/activate
fi
GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$GPUS" -gt 0 ]; then
  NPROC=${NPROC:-$GPUS}
else
  NPROC=${NPROC:-2}
  cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
  threads=${OMP_NUM_THREADS:-$cores}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / NPROC > 0 ? cores / NPROC : 1))}
fi
alone() {
  if [ "$GPUS" -gt 0 ]; then "$@"; else OMP_NUM_THREADS=$threads "$@"; fi
}
