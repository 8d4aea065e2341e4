# What all job scripts share; sourced by them. One node runs ddpm-lab itself, several run node.sh on each.
#
# Set in the environment, for example with sbatch --export=ALL,DDPM_LAB_RDZV=c10d:
#   DDPM_LAB_PYTHON          the Python that has the lab (default: .venv/bin/python beside slurm/)
#   DDPM_LAB_REQUEUE=1       put the job back into the queue after it has saved before its time limit: ddpm-lab train goes on
#   DDPM_LAB_RDZV            how nodes find each other: static (default) or c10d
#   DDPM_LAB_ADDRESS         address of the first node (default: what SLURM knows, and no loopback)
#   DDPM_LAB_RANKS_PER_NODE  ranks of each node of several (default: its GPUs, or 1)
# DDPM_LAB_SLURM and DDPM_LAB_TASKS are set by ddpm-lab slurm submit: this folder, and the folder of what was submitted.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export DDPM_LAB_PYTHON=${DDPM_LAB_PYTHON:-$(dirname "$here")/.venv/bin/python}
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
nodes=${SLURM_JOB_NUM_NODES:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}

# Arguments come from a file where every task of an array has its own: each ends with a zero byte, so that any text is safe.
arguments=("$@")
state=/dev/null
if [[ -n ${DDPM_LAB_TASKS:-} ]]; then
  task=$DDPM_LAB_TASKS/task-${SLURM_ARRAY_TASK_ID:-0}
  mapfile -d '' -t arguments <"$task/arguments"
  state=$task/state
fi
if ((${#arguments[@]} == 0)); then
  echo "ddpm-lab: give a command after the script, such as: sbatch slurm/one_gpu.sh run amp" >&2
  exit 2
fi

echo "Job ID: $job"
echo "Nodes: $nodes"
echo "GPUs per node: $gpus"
echo "started $(date -Is) $job" >>"$state"
trap 'code=$?; echo "ended $(date -Is) $code" >>"$state"' EXIT

# A node shows its GPUs to every job where SLURM does not hide them; what was not asked for is not used.
if ((gpus == 0)); then export CUDA_VISIBLE_DEVICES=; fi

# The address of the first node, where this script runs. Its name may stand for loopback there, which no other node can
# reach: then the first address that it has.
first_address() {
  local names name found
  mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  name=$(scontrol show node "${names[0]}" | sed -nE 's/^.*NodeAddr=([^ ]+).*$/\1/p')
  found=$(getent ahostsv4 "${name:-${names[0]}}" | awk 'NR == 1 { print $1 }') || true
  case $found in '' | 127.*) found=$(hostname -I | awk '{ print $1 }') ;; esac
  echo "${found:-127.0.0.1}"
}

# The first port from $1 on that nobody holds on this node, where torchrun of the first node will serve the others.
free_port() {
  "$DDPM_LAB_PYTHON" -c '
import contextlib, socket, sys
first = int(sys.argv[1])
for port in range(first, first + 100):
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        print(port)
        sys.exit()
sys.exit(f"ddpm-lab: the ports {first} to {first + 99} of {socket.gethostname()} are all held: see who does (ss -ltnp)")
' "$1"
}

if ((nodes > 1)); then
  # Below the ports that Linux gives out by itself; two jobs that share a node have different numbers.
  port=$(free_port $((15000 + SLURM_JOB_ID % 15000)))
  address=${DDPM_LAB_ADDRESS:-$(first_address)}
  echo "rendezvous: ${DDPM_LAB_RDZV:-static} at $address:$port"
  # A step does not take over the cores of a task by itself.
  command=(srun --nodes="$nodes" --ntasks="$nodes" ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}
    --kill-on-bad-exit=0 bash "$here/node.sh" "$address" "$port" "${arguments[@]}")
else
  command=("$DDPM_LAB_PYTHON" -m ddpm_lab "${arguments[@]}")
fi

# The lab saves what it has at the first SIGTERM. srun would kill its tasks at once: they are told by way of SLURM, and
# torchrun gives them 30 seconds.
stopping=
child=
forward() {
  stopping=1
  if [[ -z $child ]]; then exit 143; fi
  echo "ddpm-lab job: SIGTERM, as before the time limit: the lab is told to save and stop" >&2
  echo "signalled $(date -Is)" >>"$state"
  if ((nodes > 1)); then
    scancel --signal=TERM "$job" || true # not SLURM_JOB_ID, which for one task of an array names them all
  else
    kill -TERM "$child" 2>/dev/null || true
  fi
}
trap forward TERM
"${command[@]}" &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done # a signal ends a wait, and not the lab
code=0
wait "$child" || code=$?
# A job that is being cancelled is told by SIGTERM too, and is not to come back: it is no longer RUNNING then.
running() { [[ $(scontrol show job -o "$job") == *JobState=RUNNING* ]]; }
if [[ -n $stopping && ${DDPM_LAB_REQUEUE:-0} == 1 && ${arguments[0]} == train ]] && ((code)) && running; then
  requeued="requeued $(date -Is)"
  echo "$requeued" >>"$state" # before: this script may not live to see the answer
  scontrol requeue "$job" || sed -i "/^$requeued\$/d" "$state"
fi
exit "$code"
