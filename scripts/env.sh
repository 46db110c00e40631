# Sourced by the shell scripts: set up OpenDiT if needed, activate its environment, and count the GPUs.
#   GPUS               number of GPUs
#   NPROC              number of processes to start, by default one per GPU, or 2 on a CPU
#   alone COMMAND...   run a single process, which may use all cores on a CPU
#   SETUP              argument for install.sh, set before sourcing. A sourced file sees the caller's arguments, which
#                      are the user's flags.
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
