"""The Slurm scripts, started as Slurm starts them: every node is a process of this machine, and so is the scheduler.

`srun` and `scontrol` are the two commands in SRUN and SCONTROL below, first on the PATH. They start a task for each
node, pass signals on to all of its processes, and note what is queued again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train_parallel import write_recipe

from headstart.cli import build_parser

ROOT = Path(__file__).parents[1]
SLURM = ROOT / "scripts" / "slurm"
BATCH = sorted(SLURM.glob("*.sbatch"))
TRAINING = ["one-node.sbatch", "several-nodes.sbatch"]

SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
tasks=()
pass_on() { for task in "${tasks[@]}"; do kill -TERM -- "-$task"; done; }
trap pass_on TERM
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 setsid "$@" &
    tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do
    status=0
    wait "$task" || status=$?
    while kill -0 "$task" 2>/dev/null; do status=0; wait "$task" || status=$?; done
    if [ "$status" -gt "$highest" ]; then highest=$status; fi
done
exit "$highest"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then
    for node in $(seq 1 "$SLURM_NNODES"); do echo "127.0.0.$node"; done
else
    echo "$@" >> "$NOTES/scontrol"
fi
"""


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


class Job:
    """A job of two nodes, its commands in a folder of its own and what they note beside them."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        self.command("srun", SRUN)
        self.command("scontrol", SCONTROL)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "VENV": str(folder / "no-environment"),
            "NOTES": str(folder),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "2",
        }
        for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "LAUNCH"):
            self.environment.pop(name, None)

    def command(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def submit(self, script: str, *words: str, **variables: str) -> subprocess.Popen[str]:
        # as Slurm does: from a copy, in a folder of the scheduler's
        copy = Path(shutil.copy(SLURM / script, self.folder))
        environment = {**self.environment, **variables}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(["bash", copy, *words], cwd=self.folder, env=environment, text=True, **streams)

    def run(self, script: str, *words: str, **variables: str) -> tuple[int, str]:
        """Status and output of a job that ends by itself."""
        job = self.submit(script, *words, **variables)
        output, _ = job.communicate(timeout=900)
        return job.returncode, output

    def requeued(self) -> list[str]:
        notes = self.folder / "scontrol"
        return notes.read_text().splitlines() if notes.exists() else []


# -- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(SLURM.iterdir()), ids=lambda path: path.name)
def test_scripts_are_sound_and_name_files_that_are_there(path):
    subprocess.run(["bash", "-n", path], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, "-x", path], cwd=ROOT, check=True)
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 120
    for name in re.findall(r"\b(?:recipes|scripts|train|docs)/[\w./-]*\w", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"--recipe (\S+\.yaml)", text):
        assert (ROOT / "recipes" / name).exists(), name


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_every_batch_script_is_told_in_time_and_can_be_queued_again(path):
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), flags=re.MULTILINE)
    options = dict(lines)
    assert len(options) == len(lines) == path.read_text().count("#SBATCH")
    assert {"job-name", "nodes", "gpus-per-node", "cpus-per-task", "mem", "time", "output", "requeue"} <= set(options)
    assert options["ntasks-per-node"] == "1" and options["open-mode"] == "append", "a job queued again goes on with it"
    assert re.fullmatch(r"B:TERM@\d+", options["signal"]), "only the batch script is told"
    # what comes after the first command is read by no scheduler
    text = path.read_text()
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")


# -- what a node is told -----------------------------------------------------------------------------------------------

NOTING = """#!/usr/bin/env bash
echo "$*" > "$NOTES/node-$SLURM_NODEID"
env > "$NOTES/environment-$SLURM_NODEID"
"""


def test_nodes_agree_on_the_first_and_each_has_its_number(job):
    job.command("accelerate", NOTING)
    variables = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64", "INTERFACE": "ib0"}
    words = ["train/eagle.py", "--recipe", "llama8b-eagle3.yaml", "--set", "data.train=[{source: a b.jsonl}]"]
    status, output = job.run("several-nodes.sbatch", *words, **variables)
    assert status == 0 and "nodes: 127.0.0.1 127.0.0.2; first: 127.0.0.1:24711" in output, output
    for node in range(2):
        assert (job.folder / f"node-{node}").read_text().split() == (
            "launch --config_file recipes/accelerate/two-nodes.yaml --quiet --num_machines 2 --num_processes 16 "
            f"--machine_rank {node} --main_process_ip 127.0.0.1 --main_process_port 24711 "
            f"--deepspeed_multinode_launcher standard {' '.join(words)}"
        ).split()
        told = (job.folder / f"environment-{node}").read_text().splitlines()
        for line in ("OMP_NUM_THREADS=8", "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", "SRUN_CPUS_PER_TASK=64"):
            assert line in told
        assert "NCCL_SOCKET_IFNAME=ib0" in told and "GLOO_SOCKET_IFNAME=ib0" in told and "NCCL_DEBUG=WARN" in told
    assert job.requeued() == []


def test_one_node_needs_no_rendezvous_and_a_second_start_goes_on(job):
    job.command("accelerate", NOTING)
    more = {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "4", "LAUNCH": "recipes/accelerate/zero3.yaml"}
    for count, flag in (("0", False), ("1", True)):
        status, output = job.run("one-node.sbatch", "train/medusa.py", SLURM_RESTART_COUNT=count, **more)
        told = (job.folder / "node-0").read_text().split()
        assert status == 0 and told[told.index("--num_processes") + 1] == "4" and "zero3.yaml" in told[2], output
        assert ("--resume" in told) == flag and "--deepspeed_multinode_launcher" not in told
    assert not (job.folder / "node-1").exists()


# -- a scheduler that stops a job --------------------------------------------------------------------------------------

UNTIL_STOPPED = """#!/usr/bin/env bash
trap 'sleep 0.3; echo "node $SLURM_NODEID saved"; exit {status}' TERM
touch "$NOTES/started-$SLURM_NODEID"
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(("status", "again"), [(143, True), (1, True), (0, False)])
def test_a_job_that_is_stopped_saves_on_every_node_and_is_queued_again(job, status, again):
    """Whatever status the launcher makes of it; not where training had come to its end by then."""
    job.command("accelerate", UNTIL_STOPPED.format(status=status))
    running = job.submit("several-nodes.sbatch", "train/medusa.py")
    deadline = time.monotonic() + 60
    while not all((job.folder / f"started-{node}").exists() for node in range(2)):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert "node 0 saved" in output and "node 1 saved" in output, "the script waits for both"
    assert running.returncode == status
    assert job.requeued() == (["requeue 4711"] if again else [])


@pytest.mark.parametrize(("status", "again"), [(1, False), (2, False), (143, True)])
def test_a_job_that_fails_by_itself_is_not_queued_again(job, status, again):
    """143: the processes were stopped and this script was not told."""
    job.command("accelerate", f"#!/usr/bin/env bash\nexit {status}\n")
    assert job.run("one-node.sbatch", "train/medusa.py", SLURM_NNODES="1")[0] == status
    assert job.requeued() == (["requeue 4711"] if again else [])


# -- distilling in shares ----------------------------------------------------------------------------------------------


def test_every_prompt_is_in_one_share(job):
    prompts, answers = job.folder / "prompts.jsonl", job.folder / "answers"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {number}"}) + "\n" for number in range(11)))
    job.command("headstart", '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$NOTES/words-$SLURM_ARRAY_TASK_ID"\n')
    array = {"SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_NNODES": "1"}
    words = [str(prompts), str(answers), "--recipe", "llama8b.yaml"]
    shares = []
    for task in range(4):
        status, output = job.run("distill.sbatch", *words, SLURM_ARRAY_TASK_ID=str(task), **array)
        assert status == 0, output
        told = build_parser().parse_args((job.folder / f"words-{task}").read_text().splitlines())
        assert told.recipe == "llama8b.yaml" and told.output == str(answers / f"0000{task}-of-00004.jsonl")
        (source,) = re.findall(r'data.train=\[\{source: "(.*)"\}\]', told.set[0])
        shares.append(Path(source))
    lines = [line for share in shares for line in share.read_text().splitlines()]
    assert sorted(lines) == sorted(prompts.read_text().splitlines()) and len({share.name for share in shares}) == 4
    assert not list(answers.iterdir()), "the folder of answers holds answers alone"
    some = {"SLURM_ARRAY_TASK_MAX": "2", "SLURM_ARRAY_TASK_COUNT": "1", "SLURM_NNODES": "1"}
    before = shares[2].stat().st_mtime_ns
    assert job.run("distill.sbatch", *words, SLURM_ARRAY_TASK_ID="2", SHARES="4", **some)[0] == 0
    assert shares[2].stat().st_mtime_ns == before
    status, output = job.run("distill.sbatch", *words, SLURM_ARRAY_TASK_ID="2", **some)
    assert status == 2 and "begun with another number of shares" in output


# -- for real ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_train_together(job, tmp_path):
    """Two launchers with a process each meet by what the job tells them, and train the recipe as world size 2."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ["train/medusa.py", "--recipe", str(write_recipe(tmp_path)), "--output", str(tmp_path / "runs")]
    few = "name=two train.accumulation=2 train.batch_size=1 train.max_steps=3 train.eval_every=null".split()
    status, output = job.run(
        "several-nodes.sbatch",
        *(*words, *(word for setting in few for word in ("--set", setting))),
        LAUNCH="recipes/accelerate/two-cpu.yaml",
        ACCELERATE_USE_CPU="true",
        PROCESSES_PER_NODE="1",
        VENV=sys.prefix,
        MAIN_PORT=port,
        INTERFACE="lo",
    )
    assert status == 0, output
    assert output.count("world size 2, mode DDP, device cpu") == 2, "every node says so"
    rows = [set(line.split(", ")) for line in sorted(set(re.findall(r"rank \d begins with rows: (.*)", output)))]
    assert len(rows) == 2 and rows[0] and rows[1] and not rows[0] & rows[1]
    assert (tmp_path / "runs/two/head/head.safetensors").is_file() and job.requeued() == []
