#!/bin/bash
# Many nodes with all their GPUs, one torchrun on each: sbatch slurm/many_nodes.sh run multi_gpu --preset full
# What follows the script is a command of ddpm-lab. Submit from the folder that holds slurm/ and outputs/; a copy of both
# will do. Without GPUs: sbatch --gres=none slurm/many_nodes.sh ...

# Edit these for your site; a line counts with one # in front. --exclusive keeps neighbours
# from the node, who would disturb a measurement.
##SBATCH --partition=NAME
##SBATCH --account=NAME
##SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --nodes=2
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=16

# Leave these: one task a node, a log that a requeued job goes on with, a minute to save before the time is over, and a
# lost node ends what needs it and not the job.
#SBATCH --job-name=ddpm-lab
#SBATCH --ntasks-per-node=1
#SBATCH --output=outputs/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:TERM@60
set -euo pipefail
source "${DDPM_LAB_SLURM:-$SLURM_SUBMIT_DIR/slurm}/job.sh"
