"""Our speculators export in the package speculators itself, in an environment of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import foreign_cases as cases
import pytest
import torch
from head_cases import collate, row
from safetensors.torch import save_file
from test_formats_writing import head_of

from headstart.heads.formats import write_foreign
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Features

ROOT = Path(__file__).parents[1]
STEPS = 3
# torch, transformers and the like are those of the environment that runs the tests; these are what it lacks
PACKAGES = ("speculators==0.9.0", "hs-connectors==0.9.0")
WHAT_THEY_IMPORT = ("openai", "loguru", "pydantic-settings", "aiohttp", "typer")

LOAD = """
import json, sys
import torch
from safetensors.torch import load_file
from speculators import Eagle3SpeculatorConfig, SpeculatorModel

folder, text, out = sys.argv[1:]
config = Eagle3SpeculatorConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"  # the other one takes lengths of 128 alone
model = SpeculatorModel.from_pretrained(folder, config=config).eval()
held, state = load_file(folder + "/model.safetensors"), model.state_dict()
same = {n: n in state and state[n].dtype == t.dtype and torch.equal(state[n], t) for n, t in held.items()}
logits = []
model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach().clone()))
given = load_file(text)
with torch.no_grad():
    model(given["states"], given["ids"], given["documents"], ttt_steps=3)
torch.save(logits, out)
print(json.dumps({"same": same, "only_there": sorted(state.keys() - held.keys())}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An environment with speculators beside the packages of this one."""
    folder = tmp_path_factory.mktemp("speculators") / "env"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "zz_ours.pth").write_text("\n".join({str(Path(torch.__file__).parents[1]), sysconfig.get_path("purelib")}))
    pip = [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-q",
        "install",
        "-c",
        str(ROOT / "constraints.txt"),
    ]
    for words in (["--no-deps", *PACKAGES], list(WHAT_THEY_IMPORT)):
        done = subprocess.run([*pip, *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(words)} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    version = subprocess.run(
        [str(python), "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    )
    assert version.stdout.strip() == torch.__version__, "no second torch was installed"
    return python


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    "settings",
    [
        {"ids": cases.DRAFT_IDS, "norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {"ids": None, "num_layers": 2, "norm_before_fc": True, "output": "own"},
    ],
    ids=["reduced", "full"],
)
def test_speculators_loads_the_export_and_drafts_the_same(python, settings, tmp_path):
    """Every tensor bit for bit, none missing; draft logits of three steps in a row, in fp32."""
    target = cases.target()
    cases.tiny.save(tmp_path / "target", "llama", num_hidden_layers=8)
    head = head_of("eagle3", target, dtype=torch.float32, **settings)
    assert isinstance(head, UnrolledHead)
    folder = write_foreign(head, target, tmp_path / "out", "speculators", target_name=str(tmp_path / "target"))

    batch = collate([row(9, range(9))], [[0]])
    taps = {layer: torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(layer)) for layer in head.wants}
    states = torch.cat([taps[layer] for layer in head.wants], -1)
    given = {
        "states": states[:, :-1].contiguous(),
        "ids": batch.input_ids[:, 1:].contiguous(),
        "documents": torch.zeros(1, 8, dtype=torch.long),
    }
    save_file(given, tmp_path / "text.safetensors")
    arguments = [str(python), "-c", LOAD, str(folder), str(tmp_path / "text.safetensors"), str(tmp_path / "logits.pt")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["same"] and all(found["same"].values()), found["same"]
    assert found["only_there"] == ["verifier_lm_head.weight", "verifier_norm.weight"]

    with torch.no_grad():
        unrolled = head.unroll(Features(taps[head.wants[0]], taps), batch, target.embedding, STEPS)
        rows = None if head.output_weight is not None else target.output.select(head.draft_ids)
        ours = [head.logits(step.output, rows) for step in unrolled]
    theirs = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert len(theirs) == STEPS
    for step in range(STEPS):
        known = 8 - step  # further right a step reads tokens beyond the text
        torch.testing.assert_close(theirs[step][:, :known], ours[step][:, :known], rtol=1e-4, atol=1e-4)


def test_the_layout_is_that_of_the_release_that_is_tested():
    from headstart.heads.formats.speculators import VERSION

    assert PACKAGES[0] == f"speculators=={VERSION}" and importlib.metadata.version("torch")
