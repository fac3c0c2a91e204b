# shellcheck shell=bash
# Sourced by the batch scripts of this folder: where the programs are, what a cluster must be told, and the way of a job
# that its scheduler stops. Everything that is set here can be set before `sbatch`, which passes it on.

# Programs: of the environment in the checkout, or of another one (VENV=/path/to/env), else whatever is on PATH.
VENV="${VENV:-$PWD/.venv}"
if [ -d "$VENV/bin" ]; then
    export PATH="$VENV/bin:$PATH"
fi

# Compute nodes often reach no hub, and then every look-up waits for a time limit: fetch models and data sets on a login
# node first (`hf download NAME`), into a cache on storage that all nodes share.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export HF_DATASETS_OFFLINE="${HF_DATASETS_OFFLINE:-$HF_HUB_OFFLINE}"
export TOKENIZERS_PARALLELISM=false
export PYTHONUNBUFFERED=1

# NCCL and gloo take the first network that they find; where that is the slow one, or leads nowhere, name the right one:
# INTERFACE=ib0. NCCL_IB_HCA, NCCL_SOCKET_IFNAME and the like are passed on as they are.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
if [ -n "${INTERFACE:-}" ]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$INTERFACE}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"
fi

# since Slurm 22.05 a step no longer takes this from the job, and all processes of a node would share one core
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

stopping=""
step=""

pass_on() {
    stopping=yes
    echo "$(date '+%F %T') the scheduler stops this job: saving"
    if [ -n "$step" ]; then
        kill -TERM "$step" 2>/dev/null || true
    fi
}

# run_and_requeue COMMAND...: runs it in the background, so that a signal is seen at once; passes SIGTERM on, waits
# until the command has saved and left, and queues this job again, unless the command was through. Ends with its status.
run_and_requeue() {
    local status=0
    trap pass_on TERM
    "$@" &
    step=$!
    wait "$step" || status=$?
    while kill -0 "$step" 2>/dev/null; do # the signal ended `wait`, not the command
        status=0
        wait "$step" || status=$?
    done
    trap - TERM
    # 143: stopped by a signal that this shell was not told of, as when a job of higher priority takes the nodes
    if [ "$status" -ne 0 ] && { [ -n "$stopping" ] || [ "$status" -eq 143 ]; }; then
        echo "stopped with status $status; job $SLURM_JOB_ID is queued again and goes on with --resume"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$status"
}

# train_on_all_nodes SCRIPT WORDS...: one launcher on every node of the job, and what they have to agree on.
train_on_all_nodes() {
    local hosts
    hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
    export MAIN_IP="${MAIN_IP:-${hosts%%$'\n'*}}"
    export MAIN_PORT="${MAIN_PORT:-$((20000 + SLURM_JOB_ID % 20000))}" # jobs that share a node do not share a port
    # a run that was queued again finds its own folder; a first one must not go on with somebody else's
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
        set -- "$@" --resume
    fi
    echo "job $SLURM_JOB_ID, start $((1 + ${SLURM_RESTART_COUNT:-0}))"
    echo "nodes: ${hosts//$'\n'/ }; first: $MAIN_IP:$MAIN_PORT"
    run_and_requeue srun --label --ntasks-per-node=1 --kill-on-bad-exit=1 bash scripts/slurm/node.sh "$@"
}
