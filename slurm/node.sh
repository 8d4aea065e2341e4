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
exec "$DDPM_LAB_PYTHON" -m torch.distributed.run "${options[@]}" -m ddpm_lab rank "$@"
