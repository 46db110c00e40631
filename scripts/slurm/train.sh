#!/usr/bin/env bash
# Trains on the nodes of a Slurm job: a torchrun a node, a process a GPU. From the repository's folder:
#   sbatch --nodes 8 --gpus-per-node 8 --time 24:00:00 scripts/slurm/train.sh --recipe pretrain_xl --data_path data.csv
# Arguments go to train.py. Repository and --outputs lie on a disk that all nodes share.
#
# Five minutes before the time limit the run saves and is queued again; a job that Slurm preempts saves too, and Slurm
# queues it again. It goes on with --load latest in its own --outputs (outputs/slurm-JOB unless given).
# A job whose run has steps left (--max_hours, a preemption) ends with exit code 75.
# What every rank prints: $LOGS/slurm-JOB/; if one fails, the end of its errors is in the job's own log too.
#   VENV   environment to activate (.venv)     NPROC   processes a node (its GPUs)     LOGS   where logs go (logs)
#SBATCH --job-name=opendit
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?this script is for sbatch; on one machine: bash train_img.sh}"
[ -f train.py ] || { echo "error: sbatch scripts/slurm/train.sh from the repository's folder, not $PWD" >&2; exit 2; }
venv=${VENV:-.venv}
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ] && [ -f "$venv/bin/activate" ]; then . "$venv/bin/activate"; fi

attempt=${SLURM_RESTART_COUNT:-0}
export LOG_DIR="${LOGS:-logs}/slurm-$SLURM_JOB_ID/attempt-$attempt"
export OPENDIT_RUN_FOLDER_FILE="$LOG_DIR/run_folder" # train.py writes its run's folder there
mkdir -p "$LOG_DIR"
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD PORT=$((20000 + SLURM_JOB_ID % 20000)) NPROC="${NPROC:-${SLURM_GPUS_ON_NODE:-gpu}}"
echo "job $SLURM_JOB_ID, attempt $attempt: $SLURM_JOB_NUM_NODES nodes, rendezvous at $HEAD:$PORT, logs in $LOG_DIR"

# The signals are for the training processes, which save on them: an agent that took them would kill its processes
# after 30 seconds. What is ignored stays so in torchrun and its children until train.py takes it.
node='trap "" TERM USR1
exec torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$NPROC" --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD:$PORT" --rdzv-conf "is_host=$([ "$SLURM_NODEID" = 0 ] && echo 1 || echo 0)" \
  --signals-to-handle SIGINT --log-dir "$LOG_DIR/node-$SLURM_NODEID" --tee 3 --local-ranks-filter 0 train.py "$@"'

# USR1 reaches this shell alone (B: above), and goes on to all processes of the step; TERM, of a preemption, reaches
# those too, and a second one would end them at once.
stopped=
trap 'stopped=1; echo "the time limit is near: saving"; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'echo "preempted or cancelled: saving"' TERM
# Since Slurm 22.05 srun does not take --cpus-per-task over from its job: all ranks of a node would share one CPU.
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun --kill-on-bad-exit=1 bash -c "$node" train --outputs "outputs/slurm-$SLURM_JOB_ID" --load latest "$@" &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done # a trap ends a wait

if [ "$code" -ne 0 ]; then
  echo "error: training failed with exit code $code; the ends of what its ranks wrote to stderr:" >&2
  find "$LOG_DIR" -name stderr.log -size +0 | sort | while read -r file; do
    echo "==> $file" >&2
    tail -n 20 "$file" >&2
  done
elif [ -s "$OPENDIT_RUN_FOLDER_FILE" ] && ! grep -q '"done": true' "$(cat "$OPENDIT_RUN_FOLDER_FILE")/ended.json"; then
  code=75
  if [ -n "$stopped" ]; then
    echo "saved; queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
