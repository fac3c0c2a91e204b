"""The `headstart` command: quick, torch-free until a verb needs it, one sentence for a user's mistake."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import headstart
from headstart import cli
from headstart.errors import HeadstartError, TrainingError
from headstart.recipe import PACKAGED

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy")
PROBE = f"""
import sys
from headstart.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
sys.exit(status)
"""


def probe(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter; the last line of its output names the heavy modules it imported."""
    return subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=False)


def launch_line(*words: str) -> tuple[dict[str, str], list[str]]:
    return cli.launch_command(cli.build_parser().parse_args(["train", *words]))


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        ([], 2),
        (["eval", "--help"], 0),
        (["eval"], 2),
        (["train", "--recipe", "lama70b.yaml"], 2),
        (["plan", "--recipe", "lama70b.yaml"], 2),
        (["plan", "--recipe", "llama70b.yaml", "--gpus", "0"], 2),
        (["train", "--recipe", "llama70b.yaml", "--set", "logging.trackers=[wandbb]"], 2),
        (["train", "--recipe", "quickstart.yaml", "--set", "train.learnig_rate=1"], 2),
        (["data", "distill", "--recipe", "llama70b.yaml", "--output", "x", "--set", "logging.trackers=[wandbb]"], 2),
        (["data", "prepare", "--recipe", "quickstart.yaml", "--limit", "0"], 2),
    ],
)
def test_help_and_mistakes_answer_without_importing_anything_heavy(words, status):
    done = probe(*words)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []", "a package on the way to the recipe imports too much"
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == (status != 0)


def test_help_answers_in_under_half_a_second():
    def cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    spent = []
    for _ in range(3):
        before = cpu_seconds()
        subprocess.run([sys.executable, "-m", "headstart.cli", "--help"], capture_output=True, check=True)
        spent.append(cpu_seconds() - before)
    assert min(spent) < 0.5


def test_a_wrong_recipe_is_all_its_faults_and_nothing_else_on_stderr(tmp_path):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("name: wrong\ntraining: {learnig_rate: 1.0e-4}\n")
    done = probe("train", "--recipe", str(recipe))
    assert done.returncode == 2 and done.stdout == "heavy: []\n"
    assert "training.learnig_rate: unknown key in `train`; did you mean `train.lr`?" in done.stderr
    assert "target: this key is missing" in done.stderr


def test_the_installed_command_is_this_one():
    command = Path(sys.executable).with_name("headstart")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"headstart {headstart.__version__}\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (HeadstartError("found a, expected b; type c"), 1, "found a, expected b; type c\n"),
        (TrainingError("NaN in step 3"), 1, "NaN in step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a"),
            1,
            "runs/a cannot be written or read (no space left on device); make room or mend its permissions, or name "
            "another place, with --output where files are written\n",
        ),
    ],
)
def test_errors_of_ours_are_one_message_and_a_status(monkeypatch, capsys, error, status, said):
    def fail(*_):
        raise error

    monkeypatch.setattr("headstart.recipe.load_recipe", fail)
    assert cli.main(["train", "--recipe", "quickstart.yaml"]) == status
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EIO, "Input/output error", "runs/a")])
def test_errors_that_are_not_the_users_keep_their_traceback(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("headstart.recipe.load_recipe", fail)
    with pytest.raises(type(error)):
        cli.main(["train", "--recipe", "quickstart.yaml"])


def test_train_checks_the_recipe_then_prints_and_becomes_the_launch_line(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call))
    words = ["train", "--recipe", "llama70b.yaml", "--smoke", "--set", "data.chat.system=Be brief."]
    cli.main([*words, "--accelerate", "two-cpu.yaml"])
    launch_file, recipe = PACKAGED / "accelerate" / "two-cpu.yaml", PACKAGED / "llama70b.yaml"
    line = (
        f"launch --quiet --config_file {launch_file} -m headstart.train.medusa --recipe {recipe} "
        "--set 'data.chat.system=Be brief.' --smoke"
    )
    assert capsys.readouterr().out == f"ACCELERATE_USE_CPU=true accelerate {line}\n"
    ((program, command, environment),) = became
    assert program == command[0] == sys.executable
    assert command[1:4] == ["-m", "headstart.launch", "launch"]
    assert command[-3:] == ["--set", "data.chat.system=Be brief.", "--smoke"]
    assert environment["ACCELERATE_USE_CPU"] == "true" and environment["PATH"] == os.environ["PATH"]


def test_launch_lines_for_one_process_and_for_gpus():
    variables, words = launch_line("--recipe", "quickstart.yaml", "--cpu", "--resume")
    assert variables == {} and words[3:6] == ["--cpu", "--num_processes", "1"] and words[-1] == "--resume"
    _, words = launch_line("--recipe", "quickstart.yaml", "--name", "second", "--output", "elsewhere")
    assert words[-4:] == ["--name", "second", "--output", "elsewhere"]
    assert launch_line("--recipe", "quickstart.yaml")[1][3:5] == ["-m", "headstart.train.medusa"]
    for name in ("one-gpu.yaml", "eight-gpu.yaml"):
        variables, words = launch_line("--recipe", "llama8b.yaml", "--accelerate", name)
        assert variables == {} and words[4].endswith(name)
    with pytest.raises(HeadstartError, match="found the text 'a b', expected letters, digits"):
        launch_line("--recipe", "quickstart.yaml", "--name", "a b")
    with pytest.raises(HeadstartError, match="two-cpus.*did you mean two-cpu"):
        launch_line("--recipe", "quickstart.yaml", "--accelerate", "two-cpus.yaml")


@pytest.mark.parametrize("content", [b"distributed_type: [NO\n", b"\xff\xfe"])
def test_a_launch_file_that_is_no_yaml_is_one_sentence(tmp_path, content):
    (tmp_path / "launch.yaml").write_bytes(content)
    with pytest.raises(HeadstartError, match=r"launch.yaml is not YAML; write one with `accelerate config`"):
        launch_line("--recipe", "quickstart.yaml", "--accelerate", str(tmp_path / "launch.yaml"))


def test_every_verb_has_a_summary_and_its_words_reach_its_module():
    parse = cli.build_parser().parse_args
    arguments = parse(["eval", "--head", "runs/a", "--drafters", "none,ngram", "--set", "eval.num_prompts=3"])
    assert arguments.head == "runs/a" and arguments.set == ["eval.num_prompts=3"] and arguments.device is None
    arguments = parse(["generate", "--head", "runs/a", "Hello", "--max-new-tokens", "5"])
    assert arguments.prompt == "Hello" and arguments.max_new_tokens == 5 and arguments.temperature == 0.0
    text = cli.build_parser().format_help()
    for verb in ("fetch-demo", "train", "data", "tune", "eval", "generate"):
        assert verb in text


def test_the_package_exports_lazily():
    assert headstart.load_recipe("quickstart.yaml").name == "quickstart"
    assert {"load_target", "load_head", "Engine", "load_recipe"} <= set(dir(headstart))
    with pytest.raises(AttributeError, match="no attribute 'load_models'"):
        headstart.load_models  # noqa: B018
    code = "import sys, headstart; headstart.load_recipe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_export_exists():
    for name in headstart.__all__:
        assert getattr(headstart, name) is not None
