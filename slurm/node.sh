#!/bin/bash
# One node's part of a job over several: node.sh ADDRESS PORT COMMAND..., started by srun, one task a node.
set -euo pipefail
address=$1 port=$2
shift 2
gpus=${SLURM_GPUS_ON_NODE:-0}
ranks=${DDPM_LAB_RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}

# The address that this node has towards the first one; no packet is sent to find it.
local_address=$("$DDPM_LAB_PYTHON" -c '
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect((sys.argv[1], int(sys.argv[2])))
    print(s.getsockname()[0])' "$address" "$port")

options=(--nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" --local-addr="$local_address" --rdzv-id="$SLURM_JOB_ID")
case ${DDPM_LAB_RDZV:-static} in
  static)
    options+=(--rdzv-backend=static --rdzv-endpoint="$address:$port" --node-rank="$SLURM_NODEID")
    ;;
  c10d)
    # Said outright, since a node whose name stands for loopback does not know its own address.
    is_host=$((SLURM_NODEID == 0 ? 1 : 0))
    options+=(--rdzv-backend=c10d --rdzv-endpoint="$address:$port" --rdzv-conf="is_host=$is_host")
    ;;
  *)
    echo "ddpm-lab: DDPM_LAB_RDZV is '$DDPM_LAB_RDZV': give static or c10d" >&2
    exit 2
    ;;
esac
# torchrun, which ends in a traceback where the port has been taken since it was found free, and leaves the other nodes
# waiting for minutes. This process stays the one that SLURM signals.
exec "$DDPM_LAB_PYTHON" -c '
import contextlib, os, socket, subprocess, sys
from torch.distributed.run import main

address, port, *words = sys.argv[1:]
try:
    main(words)
except Exception as error:
    reason = error
    while reason is not None and "EADDRINUSE" not in str(reason):
        reason = reason.__cause__
    if reason is None:
        raise
    print(
        f"ddpm-lab: port {port} of {socket.gethostname()} ({address}), where the nodes of this job were to meet, is held by "
        "another process: submit the job again, which takes the next free port",
        file=sys.stderr,
        flush=True,
    )
    with contextlib.suppress(OSError, KeyError):
        subprocess.run(["scancel", "{SLURM_JOB_ID}.{SLURM_STEP_ID}".format(**os.environ)], check=False)
    sys.exit(1)
' "$address" "$port" "${options[@]}" -m ddpm_lab rank "$@"
