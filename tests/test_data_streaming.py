"""Streams: every row once, for any number of rows and ranks; the same again from the seed; resumed to the batch."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import httpx2
import pytest
import tiny
import torch
import train_cases
from test_train_parallel import in_two_processes

from headstart.data.packing import TokenBatch
from headstart.data.prepare import Prepared, prepare
from headstart.data.sources import Share, read
from headstart.data.streaming import StreamedRows
from headstart.errors import DataError, RecipeError
from headstart.recipe import Recipe, Source, load_recipe, override
from headstart.scripts import features
from headstart.train.checkpoint import Progress
from headstart.train.feed import StreamFeed
from headstart.train.modes import start_processes
from headstart.train.preparation import describe

TOKENIZER = tiny.tokenizer()


def write(path: Path, first: int, count: int) -> Source:
    """Rows of 1 to 5 tokens; row n is n+1 over and over, and its prompt is a key of its own."""
    rows = [
        {"input_ids": [number + 1] * (number % 5 + 1), "labels": [number + 1] * (number % 5 + 1)}
        for number in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(source=str(path))


def recipe(sources: list[Source], *settings: str) -> Recipe:
    """All rows are trained on: what is held out comes from a file of its own."""
    held_out = write(Path(sources[0].source).parent / "held.jsonl", 240, 1)
    plain = train_cases.recipe()
    data = {"train": sources, "held_out": {"sources": [held_out]}, "max_length": 8, "streaming": True, "buffer": 4}
    return override(plain.model_copy(update={"data": plain.data.model_validate(data)}), settings)


def prepared(made: Recipe) -> Prepared:
    return prepare(made, TOKENIZER)


class Ranks:
    """Gathers over threads what gather_object does over processes; a rank that is left waiting fails after a while."""

    def __init__(self, count: int):
        self.count, self.barrier, self.boxes = count, threading.Barrier(count), [[] for _ in range(count)]

    def gather(self, rank: int):
        def join(values: list[Any]) -> list[Any]:
            self.boxes[rank] = values
            self.barrier.wait(30)
            joined = [value for box in self.boxes for value in box]
            self.barrier.wait(30)
            return joined

        return join

    def run(self, work) -> list[Any]:
        """work(rank, gather) of every rank."""
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(lambda rank: work(rank, self.gather(rank)), range(self.count)))


def one_pass(made: Recipe, world_size: int, start: Progress | None = None) -> list[list[list[TokenBatch]]]:
    """Rank -> step -> micro-batches of what is left of one pass over the stream."""
    rows = prepared(made).train
    assert isinstance(rows, StreamedRows)

    def work(rank: int, gather) -> list[list[TokenBatch]]:
        feed = StreamFeed(rows, made, rank=rank, world_size=world_size, gather=gather)
        progress, steps = copy.copy(start) if start else Progress(), []
        epoch = progress.epoch
        while True:
            step = feed.next_step(progress)
            if progress.epoch != epoch:
                return steps
            steps.append(step)

    return Ranks(world_size).run(work)


def row_numbers(batches: list[TokenBatch]) -> Iterator[int]:
    for batch in batches:
        for line in range(len(batch.input_ids)):
            for place in batch.documents(line):
                ids = batch.input_ids[line, place].tolist()
                assert len(set(ids)) == 1 and len(ids) == (ids[0] - 1) % 5 + 1, "a row came torn"
                yield ids[0] - 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_shares_of_a_source_are_all_of_it_each_row_once(tmp_path, world_size):
    """Any number of rows and ranks; files fewer than ranks, and more; in the order of the pass."""
    for count in range(51):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        sizes = [count] if count % 2 else [count // 2, 0, count - count // 2]
        for number, size in enumerate(sizes):
            write(folder / f"train-{number}.jsonl", sum(sizes[:number]), size)
        found: Counter[int] = Counter()
        for rank in range(world_size):
            try:
                share = Share(rank, world_size, "seed 0")
                rows = list(read(Source(source=str(folder)), {}, share=share))
            except DataError as error:
                assert count == rank == 0 and "holds no rows" in str(error)
                continue
            assert abs(len(rows) - count / world_size) < 1
            found.update(row.input_ids[0] - 1 for row in rows if row.input_ids)
        assert found == Counter(range(count))


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 4, 9, 30])
@pytest.mark.parametrize("packing", [True, False])
def test_a_pass_trains_on_every_row_once_with_equal_steps_on_all_ranks(tmp_path, count, world_size, packing):
    few = write(tmp_path / "few.jsonl", 0, count // 3 or 1)
    rest = [write(tmp_path / "many.jsonl", count // 3, count - count // 3)] if count > 2 else []
    made = recipe([few, *rest], f"data.packing={packing}".lower())
    by_rank = one_pass(made, world_size)
    found = Counter(number for steps in by_rank for step in steps for number in row_numbers(step))
    assert found == Counter(range(count))
    shapes = {tuple(map(len, steps)) for steps in by_rank}
    assert len(shapes) == 1 and max(shapes.pop()) <= made.train.accumulation
    assert all(len(batch.input_ids) <= made.train.batch_size for steps in by_rank for step in steps for batch in step)


def test_the_order_follows_from_seed_and_pass(tmp_path):
    for number in range(6):
        write(tmp_path / f"train-{number}.jsonl", number * 5, 5)
    (tmp_path / "in").mkdir()
    for path in tmp_path.glob("train-*"):
        path.rename(tmp_path / "in" / path.name)
    sources = [Source(source=str(tmp_path / "in"))]

    def order(made: Recipe, epoch: int = 0) -> list[int]:
        (steps,) = one_pass(made, 1, Progress(epoch=epoch))
        return [number for step in steps for number in row_numbers(step)]

    made = recipe([*sources], "data.buffer=8")
    first = order(made)
    assert first == order(made) and sorted(first) == sorted(order(made, 1)) == list(range(30))
    assert len({tuple(order(made, 1)), tuple(order(override(made, ["seed=1"]))), tuple(first)}) == 3


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_goes_on_with_the_very_batch_that_would_have_come(tmp_path, world_size):
    made = recipe([write(tmp_path / "a.jsonl", 0, 40)])
    straight = one_pass(made, world_size)

    def places(rank: int, gather) -> list[Progress]:
        feed = StreamFeed(prepared(made).train, made, rank=rank, world_size=world_size, gather=gather)  # pyright: ignore
        progress, found = Progress(), []
        for _ in straight[rank]:
            found.append(copy.copy(progress))
            feed.next_step(progress)
        return found

    stops = Ranks(world_size).run(places)
    assert all(stops[0] == other for other in stops)  # what the checkpoint of rank 0 says is true of all
    assert max(stop.window for stop in stops[0]) > 0
    for step in (0, 1, len(stops[0]) // 2, len(stops[0]) - 1):
        rest = one_pass(made, world_size, stops[0][step])
        for again, before in zip(rest, straight, strict=True):
            assert len(again) == len(before) - step
            for new, old in zip(again, before[step:], strict=True):
                assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(new, old, strict=True))


def test_rows_of_like_length_share_a_window_and_no_more_than_a_window_is_held(tmp_path):
    made = recipe([write(tmp_path / "a.jsonl", 0, 60)], "data.packing=false", "data.buffer=20", "train.batch_size=4")
    rows = prepared(made).train
    assert isinstance(rows, StreamedRows) and len(rows) == 20
    stream = rows.stream(0, 1)
    windows = [stream.window(0, number) for number in range(4)]
    assert [len(window.rows) for window in windows] == [20, 20, 20, 0] and windows[3].last
    (steps,) = one_pass(made, 1)
    padded = sum(batch.input_ids.numel() for step in steps for batch in step)
    assert padded < 1.2 * sum(batch.num_tokens for step in steps for batch in step)  # unsorted: 1.6


def test_a_fraction_is_held_out_by_prompt_and_never_trained_on(tmp_path, capsys):
    made = recipe([write(tmp_path / "a.jsonl", 0, 200)], "data.held_out={fraction: 0.2}", "data.buffer=50")
    data = prepared(made)
    held_out = {row.input_ids[0] - 1 for row in data.held_out}
    assert 3 <= len(held_out) <= 20 and len(data.held_out) + len(data.train) == 50
    assert "the first of a stream" in data.summary() and "its prompt is held out" in data.summary()
    trained = [number for steps in one_pass(made, 2) for step in steps for number in row_numbers(step)]
    assert len(trained) == len(set(trained)) and not held_out & set(trained) and 140 <= len(trained) <= 180
    assert (
        f"stream, pass 0: 200 rows read, {len(trained)} kept; skipped: its prompt is held out"
        in capsys.readouterr().err
    )


def test_training_on_a_stream_resumes_to_the_bit(tmp_path):
    made = recipe([write(tmp_path / "a.jsonl", 0, 30)], "data.buffer=12", "train.max_steps=12", "train.save_every=7")
    data = prepared(made)
    straight = train_cases.training(tmp_path / "straight", made, rows=data.train, held_out=data.held_out)
    straight.finish()
    assert straight.progress.epoch >= 1
    stopped = train_cases.training(tmp_path / "stopped", made, rows=data.train, held_out=data.held_out)
    train_cases.stop_after_save(stopped, 7)
    with pytest.raises(train_cases.Stopped):
        stopped.finish()
    resumed = train_cases.training(tmp_path / "stopped", made, rows=data.train, held_out=data.held_out, resume=True)
    assert resumed.progress.step == 7 and resumed.feed.first_rows(0)
    resumed.finish()
    before, after = (train_cases.weights(tmp_path / name / "head") for name in ("straight", "stopped"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_two_processes_share_a_stream_and_take_as_many_steps(tmp_path):
    """Over gloo: 15 rows each, of which the second pass begins with the last step."""
    made = recipe([write(tmp_path / "a.jsonl", 0, 30)], "data.buffer=6", "train.max_steps=6", "train.world_size=2")

    def work(rank: int) -> str:
        data = prepared(made)
        processes = start_processes(made, smoke=True)
        training = train_cases.training(
            tmp_path / "two", made, rows=data.train, held_out=data.held_out, processes=processes
        )
        processes.print(describe(training))
        training.finish()
        return f"step {training.progress.step}, pass {training.progress.epoch}"

    assert in_two_processes(tmp_path / "logs", work) == ["step 6, pass 1"] * 2
    log = (tmp_path / "logs" / "log-0").read_text()
    first = [re.findall(rf"rank {rank} begins with rows: (.*)", log)[0].split(", ") for rank in range(2)]
    assert first[0] and first[1] and not set(first[0]) & set(first[1])
    assert "stream, pass 0: 30 rows read, 30 kept; skipped: none" in log


def test_a_recipe_that_cannot_stream_is_refused(tmp_path):
    text = "name: r\ntarget: {name: t}\nhead: {type: medusa}\ndata: {train: [{source: a.jsonl}], streaming: true}\n"
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match="needs `train.max_steps`"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match="set `data.features` to online or hybrid"):
        load_recipe(tmp_path / "r.yaml", ["train.max_steps=5", "data.features=offline"])
    made = load_recipe(tmp_path / "r.yaml", ["train.max_steps=5"])
    assert made.data.buffer == 4096
    with pytest.raises(DataError, match="a stream's rows are not known beforehand; --set data.streaming=false"):
        features.run(made)


def test_a_stream_without_a_row_to_learn_from_ends_in_a_sentence(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2], "labels": [-100, -100]}\n')
    with pytest.raises(DataError, match="No row of .*a.jsonl can be learnt from"):
        prepared(recipe([Source(source=str(tmp_path / "a.jsonl"))]))


def test_a_rank_that_cannot_read_stops_all_of_them(tmp_path):
    made = recipe([write(tmp_path / "a.jsonl", 0, 30)])
    rows = prepared(made).train
    assert isinstance(rows, StreamedRows)

    def work(rank: int, gather) -> str:
        feed = StreamFeed(rows, made, rank=rank, world_size=3, gather=gather)
        if rank == 1:
            feed._stream.window = breaks_off
        with pytest.raises(DataError) as caught:
            for _ in range(9):
                feed.next_step(progresses[rank])
        return str(caught.value)

    def breaks_off(epoch: int, number: int) -> None:
        raise DataError("The data set broke off after 7 rows.")

    progresses = [Progress() for _ in range(3)]
    assert Ranks(3).run(work) == ["rank 1 can't go on reading: The data set broke off after 7 rows."] * 3


def hub(monkeypatch, files: int, rows_per_file: int, fault: Exception | None = None) -> list[tuple[int, int]]:
    """Makes every hub data set one of so many files of rows; returns what is downloaded of it, as (file, row)."""
    downloaded: list[tuple[int, int]] = []

    def generate(numbers: list[int]) -> Iterator[dict[str, Any]]:
        for file in numbers:
            for row in range(rows_per_file):
                if fault is not None and row == 2:
                    raise fault
                downloaded.append((file, row))
                number = file * rows_per_file + row + 1
                yield {"input_ids": [number], "labels": [number]}

    def load(*names: Any, streaming: bool, **options: Any) -> datasets.IterableDataset:
        assert streaming
        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"numbers": list(range(files))})

    monkeypatch.setattr(datasets, "load_dataset", load)
    return downloaded


@pytest.mark.parametrize(("files", "world_size"), [(4, 2), (3, 2), (1, 3), (6, 3)])
def test_hub_data_sets_are_streamed_file_by_file_where_that_comes_out_even(monkeypatch, files, world_size):
    downloaded = hub(monkeypatch, files, 5)
    found: Counter[int] = Counter()
    for rank in range(world_size):
        share = Share(rank, world_size, "seed 0")
        found.update(row.input_ids[0] - 1 for row in read(Source(source="org/set"), {}, share=share) if row.input_ids)
    assert found == Counter(range(files * 5))
    assert len(downloaded) == files * 5 * (1 if files % world_size == 0 else world_size)


@pytest.mark.parametrize("fault", [httpx2.ReadTimeout("timed out"), ConnectionError("gone"), OSError("no route")])
def test_a_hub_that_times_out_is_one_sentence(monkeypatch, fault):
    hub(monkeypatch, 1, 5, fault)
    with pytest.raises(DataError, match=r"'org/set:train' broke off after [12] rows .*; run the same"):
        list(read(Source(source="org/set"), {}, share=Share(0, 1, "")))

    def fails(*names: Any, **options: Any) -> None:
        raise fault

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(DataError, match=r"'org/set:train' can't be loaded \(.*\); check its id"):
        list(read(Source(source="org/set"), {}))
