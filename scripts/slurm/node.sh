#!/usr/bin/env bash
# What every node of a job runs, started by `srun`: `accelerate launch`, which starts a process for each of its GPUs.
# LAUNCH, MAIN_IP and MAIN_PORT come from the batch script; this node's number, SLURM_NODEID, from srun.
set -euo pipefail

per_node="${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(((SLURM_CPUS_PER_TASK + per_node - 1) / per_node))}"

words=(--config_file "$LAUNCH" --quiet)
words+=(--num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * per_node))" --machine_rank "$SLURM_NODEID")
words+=(--main_process_ip "$MAIN_IP" --main_process_port "$MAIN_PORT")
if [ "$SLURM_NNODES" -gt 1 ]; then
    words+=(--deepspeed_multinode_launcher standard) # srun has started one everywhere; DeepSpeed's own needs pdsh
fi
exec accelerate launch "${words[@]}" "$@"
