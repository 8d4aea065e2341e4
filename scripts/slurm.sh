#!/bin/bash
# A command of ddpm-lab as a SLURM job. Options of sbatch come before the script, the command after it:
#   sbatch --gpus-per-node=1 scripts/slurm.sh run amp --preset full
#   sbatch --nodes=2 --gpus-per-node=4 --cpus-per-task=16 scripts/slurm.sh run multi_gpu --preset full
#   sbatch --array=0-1 scripts/slurm.sh run amp -- --seed 0 -- --seed 1
# Job N runs in the folder that it was submitted from: its log is slurm-N.out, its results are in slurm-N/. After the
# command, each `--` begins the options of one task of an array. Settings, in the environment:
#   DDPM_LAB_PYTHON     the Python that has the lab (default: .venv/bin/python)
#   DDPM_LAB_REQUEUE=1  put a job that stopped before its time limit back into the queue, where it goes on
#SBATCH --job-name=ddpm-lab
#SBATCH --time=01:00:00
#SBATCH --cpus-per-task=4
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:TERM@60
set -euo pipefail

python=${DDPM_LAB_PYTHON:-.venv/bin/python}
nodes=${SLURM_JOB_NUM_NODES:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-4}                # a step does not take it over
if ((gpus == 0)); then export CUDA_VISIBLE_DEVICES=; fi            # a node may show GPUs that were not asked for
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}} # SLURM_JOB_ID of one task names the whole array
job=${job:-$SLURM_JOB_ID}

words=() part=-1
for word; do
  if [[ $word == -- ]]; then
    part=$((part + 1))
  elif ((part < 0 || part == ${SLURM_ARRAY_TASK_ID:-0})); then
    words+=("$word")
  fi
done
if ((part >= 0 && (part < ${SLURM_ARRAY_TASK_MAX:-0} || (part > 0 && ${SLURM_ARRAY_TASK_ID:--1} < 0)))); then
  echo "slurm.sh: $((part + 1)) parts begin with --, for the tasks of --array=0-$part" >&2
  exit 2
fi
words=("${words[0]:?give a command, as in: sbatch scripts/slurm.sh run amp}" --output-dir="slurm-$SLURM_JOB_ID" "${words[@]:1}")

if ((nodes > 1)); then
  address=$(hostname -I | cut -d ' ' -f 1)
  port=$("$python" -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')
  words=(torch.distributed.run --nnodes="$nodes" --nproc-per-node=$((gpus > 0 ? gpus : 1)) --rdzv-id="$SLURM_JOB_ID"
    --rdzv-endpoint="${address:-127.0.0.1}:$port" -m ddpm_lab rank "${words[@]}")
else
  words=(ddpm_lab "${words[@]}")
fi

stopping=0
stop() {
  stopping=1
  scancel --signal=TERM "$job" || true # the lab saves and stops; this script is not signalled
}
trap stop TERM
# PET_NAME is what torchrun reads for --name.
node='PET_NODE_RANK=$SLURM_NODEID PET_LOCAL_ADDR=$(hostname -I | cut -d " " -f 1) exec "$@"'
srun --kill-on-bad-exit=0 bash -c "$node" - "$python" -m "${words[@]}" &
code=0
while kill -0 $! 2>/dev/null; do wait $! || true; done # a signal ends a wait, and not the lab
wait $! || code=$?
# A cancelled job gets SIGTERM too, and is not RUNNING then.
if ((stopping && code)) && [[ ${DDPM_LAB_REQUEUE:-0} == 1 && $(scontrol show job -o "$job") == *JobState=RUNNING* ]]; then
  scontrol requeue "$job"
fi
exit "$code"
