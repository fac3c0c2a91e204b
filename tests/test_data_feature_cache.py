"""The feature cache: what it depends on is named where it differs; what happens on the disk ends well or is said."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Any

import pytest
import tiny
import torch
import train_cases as cases
from parallel import fork

from headstart.data import feature_cache, feature_shards
from headstart.data.feature_cache import FeatureCache, FeatureWriter
from headstart.data.feature_codec import bytes_per_token, dequantise, quantise
from headstart.data.feature_key import cache_key, row_hash
from headstart.data.features import compute, hashes, jobs, sequence_features, share_of
from headstart.data.packing import RowStore, collate
from headstart.data.progress import Progress
from headstart.errors import DataError
from headstart.recipe import Recipe, override

LAYERS = (1, 3)


def fill(
    folder: Path, rows: RowStore, *, storage: str | None = None, recipe: Recipe | None = None, writer: int = 0,
    world_size: int = 1, shard_bytes: int = 20_000,
) -> FeatureCache:  # fmt: skip
    """Writes what is missing of these rows, as one of `world_size` processes does; the cache as a reader finds it."""
    target, recipe = tiny.target(), recipe or cases.recipe()
    key = cache_key(target, recipe, LAYERS, storage)
    with FeatureWriter(folder, key, writer=writer, shard_bytes=shard_bytes) as cache:
        compute(cache, target, share_of(jobs(cache, [rows], recipe), writer, world_size), Progress("computing"))
    return FeatureCache(folder, key)


def contents(cache: FeatureCache) -> dict[bytes, dict[str, torch.Tensor]]:
    return {row: cache.read(row) for row in sorted(cache.hashes())}


def same(one: FeatureCache, other: FeatureCache) -> None:
    """The same rows with the same bits, each once."""
    mine, theirs = contents(one), contents(other)
    assert mine.keys() == theirs.keys() and sum(one_shard.rows for one_shard in shards(one.folder)) == len(mine)
    for row, states in mine.items():
        for name, state in states.items():
            assert torch.equal(state, theirs[row][name])


def shards(folder: Path) -> list[feature_shards.Shard]:
    return [
        shard for path in sorted(folder.glob("manifest-*")) for shard in feature_shards.read_manifest(path)["shards"]
    ]


def test_states_come_back_as_a_forward_gives_them(tmp_path):
    rows, target = cases.random_rows(9), tiny.target()
    cache = fill(tmp_path / "cache", rows)
    assert len(cache) == 9 and cache.num_tokens() == sum(rows.lengths()) and cache.storage == "float32"
    for number, row in enumerate(hashes(rows)):
        plain = sequence_features(target, collate(rows, [[number]]), LAYERS)
        states = cache.read(row)
        assert torch.equal(states["final"], plain.final[0])
        assert all(torch.equal(states[f"layer.{k}"], plain.taps[k][0]) for k in LAYERS)
    assert len(shards(tmp_path / "cache")) > 2
    cache.verify()


def test_packed_rows_have_the_states_of_documents_that_see_only_themselves(tmp_path):
    rows, recipe = cases.random_rows(9), cases.recipe("data.packing=true")
    packed = fill(tmp_path / "packed", rows, recipe=recipe)
    alone = fill(tmp_path / "alone", rows)
    for row in hashes(rows):
        for name, state in packed.read(row).items():
            torch.testing.assert_close(state, alone.read(row)[name], rtol=1e-4, atol=1e-4)


def test_a_reader_needs_a_subset_of_the_layers(tmp_path):
    fill(tmp_path / "cache", cases.random_rows(3))
    for layers in ((), (3,), (1, 3), (1, 4)):  # HF[4] is the final state, which is always there
        cache = FeatureCache(tmp_path / "cache", cache_key(tiny.target(), cases.recipe(), layers, None))
        assert set(next(iter(contents(cache).values()))) == {"final", *(f"layer.{k}" for k in layers if k != 4)}
    with pytest.raises(DataError, match=r"made otherwise: layers: it holds \[1, 3\], this run reads \[2\]"):
        FeatureCache(tmp_path / "cache", cache_key(tiny.target(), cases.recipe(), (2,), None))


CHANGES = {
    "weights": (lambda: tiny.target(seed=1), (), "target: weights embedding differs, weights middle differs"),
    "shape": (lambda: tiny.target(num_hidden_layers=6), (), "target: shape num_layers was 4, is 6"),
    "config": (
        lambda: tiny.target(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), (), "config rope_parameters",
    ),
    "target dtype": (
        lambda: tiny.target(dtype=torch.bfloat16), (), "target dtype: it has 'float32', this run has 'bfloat16'",
    ),
    "arguments": (tiny.target, ("data.chat.arguments={enable_thinking: false}",), r"data.chat.arguments: it has \{\}"),
    "system": (tiny.target, ("data.chat.system=Be brief.",), "--set 'data.chat.system=null'"),
    "supervise": (tiny.target, ("data.chat.supervise=last",), r"To use it: --set data.chat.supervise=all\."),
    "max_length": (tiny.target, ("data.max_length=16",), "it has 32, this run has 16.*--set data.max_length=32"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_ingredient_is_refused_by_name(tmp_path, change):
    fill(tmp_path / "cache", cases.random_rows(3))
    make_target, settings, words = CHANGES[change]
    for opened in (FeatureCache, FeatureWriter):
        with pytest.raises(DataError, match=words) as refusal:
            opened(tmp_path / "cache", cache_key(make_target(), override(cases.recipe(), settings), LAYERS, None))
        assert "name another folder" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_changed_tokenizer_template_or_storage_is_refused_by_name(tmp_path):
    fill(tmp_path / "cache", cases.random_rows(3))
    target = tiny.target()
    target.tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace("<assistant>", "<bot>")
    with pytest.raises(DataError, match="made otherwise: chat template: it has '"):
        FeatureCache(tmp_path / "cache", cache_key(target, cases.recipe(), LAYERS, None))
    target = tiny.target()
    target.tokenizer.add_tokens(["naïve"])
    with pytest.raises(DataError, match=r"made otherwise: tokenizer: ids of 'naïve 12345.67', length differ\. "):
        FeatureCache(tmp_path / "cache", cache_key(target, cases.recipe(), LAYERS, None))
    with pytest.raises(
        DataError, match="made otherwise: dtype: it has 'float32', this run has 'int8'. To use it: --dtype float32"
    ):
        FeatureWriter(tmp_path / "cache", cache_key(tiny.target(), cases.recipe(), LAYERS, "int8"))


def test_an_unchanged_key_is_never_refused(tmp_path):
    """The name of the target, its device, what is trained and how are no ingredients."""
    fill(tmp_path / "cache", cases.random_rows(3))
    target = tiny.target()
    target.name = "elsewhere"
    other = cases.recipe("name=other", "seed=7", "train.lr=1", "head.num_heads=1", "data.packing=true")
    assert len(FeatureCache(tmp_path / "cache", cache_key(target, other, LAYERS, None))) == 3
    assert len(fill(tmp_path / "cache", cases.random_rows(3))) == 3


def test_a_row_is_known_by_its_ids_and_its_mask():
    ids, mask = cases.random_rows(1).arrays(0)
    other_ids, other_mask = ids.copy(), mask.copy()
    other_ids[3] += 1
    other_mask[0] = ~other_mask[0]
    rows = [(ids, mask), (other_ids, mask), (ids, other_mask), (ids[:-1], mask[:-1])]
    assert len({row_hash(*row) for row in rows}) == 4
    assert row_hash(ids, mask) == row_hash(ids.astype("int64"), mask.astype("uint8"))


def test_int8_stays_within_half_a_step():
    torch.manual_seed(0)
    states = torch.randn(50, 64) * torch.logspace(-6, 4, 50)[:, None]
    states[:, 7] *= 30  # one dimension far above the rest, as in real models
    states[0] = 0
    values, scales = quantise(states)
    error = (dequantise(values, scales, torch.float32) - states).abs()
    bound = states.abs().amax(-1, keepdim=True) / 254
    assert (error <= bound * (1 + 1e-4)).all() and error.max() > 0.9 * bound.max() and not error[0].any()
    assert (values.int().abs().amax(-1)[1:] == 127).all()


def test_int8_rows_are_smaller_and_read_back_within_the_bound(tmp_path):
    rows = cases.random_rows(6)
    exact, small = fill(tmp_path / "exact", rows), fill(tmp_path / "small", rows, storage="int8")
    for row in hashes(rows):
        for name, state in exact.read(row).items():
            found = small.read(row)[name]
            assert ((found - state).abs() <= state.abs().amax(-1, keepdim=True) / 254 * 1.0001).all()
    size = sum(shard.bytes for shard in shards(tmp_path / "small"))
    assert bytes_per_token(2, 64, "int8") == 3 * 68 + 5 and bytes_per_token(2, 64, "float32") == 3 * 256 + 5
    assert size == pytest.approx(bytes_per_token(2, 64, "int8") * small.num_tokens(), rel=0.35)


def test_two_writers_fill_disjoint_parts_and_a_reader_sees_the_union(tmp_path):
    rows = cases.random_rows(20)
    straight = fill(tmp_path / "one", rows)
    target, recipe = tiny.target(), cases.recipe()
    key = cache_key(target, recipe, LAYERS, None)
    first = FeatureWriter(tmp_path / "two", key, writer=0)
    second = FeatureWriter(tmp_path / "two", key, writer=1)
    todo = jobs(first, [rows], recipe)
    assert [job.sequence for job in todo] == [job.sequence for job in jobs(second, [rows], recipe)]
    compute(second, target, share_of(todo, 1, 2), Progress("second"))
    assert len(second) == 10 and len(first) == 0
    first.refresh()
    assert len(first) == 10
    late = share_of(jobs(first, [rows], recipe), 0, 2)  # listed when the other has written already: the same share
    assert [job.sequence for job in late] == [job.sequence for job in share_of(todo, 0, 2)]
    compute(first, target, late, Progress("first"))
    first.close()
    second.close()
    same(straight, FeatureCache(tmp_path / "two", key))
    assert sorted(path.name for path in (tmp_path / "two").glob("manifest*")) == [
        "manifest-00000.json", "manifest-00001.json",
    ]  # fmt: skip
    assert not jobs(fill(tmp_path / "two", rows), [rows], recipe)


def test_one_number_has_one_writer(tmp_path):
    key = cache_key(tiny.target(), cases.recipe(), LAYERS, None)
    with FeatureWriter(tmp_path / "cache", key):
        with pytest.raises(DataError, match="Another process is writing into"):
            FeatureWriter(tmp_path / "cache", key)
        FeatureWriter(tmp_path / "cache", key, writer=1).close()
    FeatureWriter(tmp_path / "cache", key).close()


def test_rows_that_occur_twice_are_kept_once(tmp_path):
    rows = list(cases.random_rows(4))
    cache = fill(tmp_path / "cache", RowStore([*rows, *rows]))
    assert len(cache) == 4 and sum(shard.rows for shard in shards(tmp_path / "cache")) == 4


def damage(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 4
    path.write_bytes(content)


def test_a_truncated_missing_or_flipped_shard_is_named_and_can_be_written_anew(tmp_path):
    rows = cases.random_rows(20)
    straight, folder = fill(tmp_path / "straight", rows), tmp_path / "cache"
    fill(folder, rows)
    key = cache_key(tiny.target(), cases.recipe(), LAYERS, None)
    second = shards(folder)[1]
    path = folder / second.file
    whole = path.read_bytes()

    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{second.file} is damaged .it has {second.bytes - 1} bytes, .*remove"):
        FeatureCache(folder, key)
    path.write_bytes(whole)
    damage(path, 0.9)
    cache = FeatureCache(folder, key)
    with pytest.raises(DataError, match=f"{second.file} is damaged .the .* of its row \\d+ is not what was written"):
        contents(cache)
    with pytest.raises(DataError, match=f"{second.file} is damaged .its bytes are not those"):
        cache.verify()
    path.unlink()
    assert len(FeatureCache(folder, key)) == len(rows) - second.rows
    same(straight, fill(folder, rows))


def test_a_removed_shard_can_be_written_anew_by_any_number_of_processes(tmp_path):
    rows = cases.random_rows(20)
    straight, folder = fill(tmp_path / "straight", rows), tmp_path / "cache"
    for rank in range(2):
        fill(folder, rows, writer=rank, world_size=2)
    of_the_second = [shard for shard in shards(folder) if shard.file.startswith("shard-00001")]
    (folder / of_the_second[-1].file).unlink()
    mended = contents(fill(folder, rows))
    assert mended.keys() == contents(straight).keys()
    for row, states in contents(straight).items():
        assert all(torch.equal(state, mended[row][name]) for name, state in states.items())


def test_every_flipped_bit_is_noticed(tmp_path):
    rows, folder = cases.random_rows(4, longest=9), tmp_path / "cache"
    fill(folder, rows, shard_bytes=1 << 20)
    key = cache_key(tiny.target(), cases.recipe(), LAYERS, None)
    (shard,) = shards(folder)
    path = folder / shard.file
    whole = path.read_bytes()
    good = contents(FeatureCache(folder, key))
    draw, noticed = random.Random(0), 0
    for place in [3, 9, 50, *(draw.randrange(len(whole)) for _ in range(60))]:
        damage(path, (place + 0.5) / len(whole))
        try:
            found = contents(FeatureCache(folder, key))
        except DataError as error:
            assert shard.file in str(error)
            noticed += 1
        else:  # in the ids, the mask or the blanks of the header, which reading states has no use for
            assert found.keys() == good.keys()
            assert all(torch.equal(found[row][name], good[row][name]) for row in good for name in good[row])
            with pytest.raises(DataError, match="not those that were written"):
                FeatureCache(folder, key).verify()
        path.write_bytes(whole)
    assert noticed > 50


def test_a_damaged_manifest_is_named(tmp_path):
    fill(tmp_path / "cache", cases.random_rows(3))
    path, key = tmp_path / "cache/manifest-00000.json", cache_key(tiny.target(), cases.recipe(), LAYERS, None)
    text = path.read_text()
    for broken in (text[: len(text) // 2], "[]", json.dumps({"format": 1, "key": {}, "shards": [{"file": "x"}]})):
        path.write_text(broken)
        with pytest.raises(DataError, match="manifest-00000.json is damaged"):
            FeatureCache(tmp_path / "cache", key)
    path.write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(DataError, match="has format 9, this version reads 1"):
        FeatureCache(tmp_path / "cache", key)
    with pytest.raises(DataError, match="There is no feature cache in .*headstart data features"):
        FeatureCache(tmp_path / "nowhere", key)


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(tmp_path, monkeypatch):
    rows = cases.random_rows(20)
    straight = fill(tmp_path / "straight", rows)
    write, written = feature_cache.write_bytes, []

    def until_full(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) == 6:
            path.with_name(f".{path.name}.partial").write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    monkeypatch.setattr(feature_cache, "write_bytes", until_full)
    with pytest.raises(DataError, match="The disk of .*cache is full; .*Make room there, and the same command goes on"):
        fill(tmp_path / "cache", rows)
    monkeypatch.undo()
    kept = FeatureCache(tmp_path / "cache", cache_key(tiny.target(), cases.recipe(), LAYERS, None))
    assert 0 < len(kept) < 20
    same(straight, fill(tmp_path / "cache", rows))
    assert not list((tmp_path / "cache").glob("*.partial")) and not list((tmp_path / "cache").glob(".*partial"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_in_earnest(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("this container may not mount")
    try:
        with pytest.raises(DataError, match="The disk of .* is full"):
            fill(folder / "cache", cases.random_rows(60))
        kept = FeatureCache(folder / "cache", cache_key(tiny.target(), cases.recipe(), LAYERS, None))
        kept.verify()
        assert 0 < len(kept) < 60
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # its shards are still mapped


def test_states_that_are_not_finite_are_refused(tmp_path):
    key = cache_key(tiny.target(), cases.recipe(), (), None)
    ids, mask = cases.random_rows(1).arrays(0)
    with FeatureWriter(tmp_path / "cache", key) as cache, pytest.raises(DataError, match="not finite"):
        cache.add(row_hash(ids, mask), ids, mask, {"final": torch.full((len(ids), 64), torch.nan)})


class Slow:
    """A file that takes what is written in small pieces, so that a kill finds half of it."""

    def __init__(self, file: IO[bytes]):
        self.file = file

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, content: bytes) -> None:
        for start in range(0, len(content), 1 << 12):
            self.file.write(content[start : start + (1 << 12)])
            self.file.flush()
            time.sleep(0.001)


def write_in_child(folder: Path, rows: int) -> int:
    """Starts filling a cache in a process of its own; its id."""

    def work() -> None:
        plain_open: Any = Path.open
        Path.open = lambda path, mode="r", *more, **named: (  # pyright: ignore[reportAttributeAccessIssue]
            Slow(plain_open(path, mode, *more, **named)) if mode == "wb" else plain_open(path, mode, *more, **named)
        )
        fill(folder, cases.random_rows(rows))

    return fork(work)


def kill_and_resume(folder: Path, kills: int, rows: int, moments: random.Random) -> tuple[int, int]:
    """Kills that many writers at random moments, then lets one end; how many left half a file, and half the rows."""
    torn = progressed = 0
    for _ in range(kills):
        child = write_in_child(folder, rows)
        wanted = len(list(folder.glob("shard-*"))) + moments.randrange(4)  # a kill comes after so many more shards,
        in_a_write = moments.random() < 0.6  # and in the middle of the next one, or at any time
        begun = time.monotonic()
        while time.monotonic() - begun < 20 and (
            len(list(folder.glob("shard-*"))) < wanted or (in_a_write and not list(folder.glob(".*.partial")))
        ):
            time.sleep(0.0005)
        time.sleep(moments.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += bool(list(folder.glob(".*.partial")))
        if list(folder.glob("manifest-*")):
            key = cache_key(tiny.target(), cases.recipe(), LAYERS, None)
            progressed += 0 < len(FeatureCache(folder, key)) < rows
    assert os.waitpid(write_in_child(folder, rows), 0)[1] == 0
    return torn, progressed


def check_kills(tmp_path: Path, kills: int, rows: int) -> None:
    straight = fill(tmp_path / "straight", cases.random_rows(rows))
    torn, progressed = kill_and_resume(tmp_path / "killed", kills, rows, random.Random(1))
    assert torn and progressed, "no kill met a write: the test has shown nothing"
    killed = FeatureCache(tmp_path / "killed", straight.wanted)
    same(straight, killed)
    killed.verify()
    named = {shard.file for shard in shards(tmp_path / "killed")}
    assert {path.name for path in (tmp_path / "killed").glob("*shard-*")} == named
    assert not list((tmp_path / "killed").glob(".*.partial"))


def test_killed_while_writing_nothing_is_lost_doubled_or_mixed(tmp_path):
    check_kills(tmp_path, 3, 150)


@pytest.mark.slow
def test_killed_ten_times_while_writing(tmp_path):
    check_kills(tmp_path, 10, 400)
