"""Batches that processes of their own load: the same as those of threads, whatever dies; nothing is left behind."""

import itertools
import os
import resource
import signal
import subprocess
import threading
import time
from contextlib import nullcontext

import psutil
import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from common.batches import Budget
from common.errors import UserError
from common.feed import Feed, Mover
from common.feed_process import ReaderProcesses
from common.shards import ShardReader
from tests.test_batches import STEPS, damage, make_schedule, write_some_bad
from tests.test_state_dtypes import write
from tests.test_train_drafter import losses
from tests.training_fixtures import (
    POINTS,
    command,
    environment,
    make_sample,
    train,
    train_here,
)

RUN = ["--tokens-per-step", "512", "--learning-rate", "5e-3", "--eval-fraction", "0.15", "--eval-every", "30",
       "--save-every", "2", "--max-steps", "60"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """target/, and states/ of 40 samples: 7 holds a NaN, 9 an Inf, 11 is damaged."""
    folder = tmp_path_factory.mktemp("feed")
    write_some_bad(folder)
    damage(ShardReader(folder / "states").records[11].path)
    return folder


def everything(feed: Feed, steps: int) -> list:
    """All that the training loop sees of so many steps."""
    seen = []
    for step in itertools.islice(feed, steps):
        for loaded in step.loaded:
            tensors = {name: tensor.clone() for name, tensor in loaded.batch.tensors().items()}
            seen.append((step.epoch, step.step, loaded.batch.numbers(), loaded.indices, loaded.set_aside, tensors))
            feed.release(loaded)
    return seen


def require_same(reader, schedule, steps: int, start=(0, 0), rank=0, ranks=1, **options) -> list:
    """What threads of this process load and what two processes load must be the same, to the bit."""
    feed = Feed(reader, schedule, STEPS, start, rank, ranks, **options)
    expected = everything(feed, steps)
    feed.close()
    with ReaderProcesses(2, 3) as readers:
        found = everything(Feed(reader, schedule, STEPS, start, rank, ranks, readers=readers, **options), steps)
    assert len(found) == len(expected) == steps * schedule.batches_per_step // ranks
    for mine, theirs in zip(expected, found, strict=True):
        assert mine[:-1] == theirs[:-1] and mine[-1].keys() == theirs[-1].keys()
        for name, tensor in mine[-1].items():
            other = theirs[-1][name]
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name
    return found


def readers_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "common.feed_process" in child.cmdline()]


def must_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    alive = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"still there: {alive}"


# ---- the same batches ------------------------------------------------------------------------------------------------


def test_two_epochs_and_a_half_in_two_processes_are_those_of_threads(folder):
    reader = ShardReader(folder / "states")
    schedule = make_schedule(reader)
    seen = require_same(reader, schedule, schedule.steps(0) + schedule.steps(1) + schedule.steps(2) // 2)
    for epoch in (0, 1):  # a bad sample is reported each time that it is read
        named = [problem["index"] for each, _, _, _, problems, _ in seen if each == epoch for problem in problems]
        assert sorted(named) == [7, 9, 11]
    assert seen[-1][0] == 2


@pytest.mark.parametrize("number", [0, 2])
def test_a_sample_is_checked_once_whichever_process_reads_it_again(tmp_path, number):
    write_some_bad(tmp_path)
    reader = ShardReader(tmp_path / "states")
    schedule, named = make_schedule(reader), []
    with ReaderProcesses(2, 2) if number else nullcontext() as readers:
        feed = Feed(reader, schedule, STEPS, buffers=0, readers=readers)
        for step in itertools.islice(feed, schedule.steps(0) + schedule.steps(1)):
            named += [(step.epoch, problem["index"]) for each in step.loaded for problem in each.set_aside]
            if step.step == schedule.steps(0) - 1 and step.epoch == 0:
                for record in reader.records:  # nothing of the next epoch has been read
                    damage(record.path)
            for each in step.loaded:
                feed.release(each)
        feed.close()
    assert sorted(named) == [(0, 7), (0, 9), (1, 7), (1, 9)]


@pytest.mark.parametrize("start, rank, ranks, batches_per_step", [((0, 2), 0, 1, 1), ((1, 1), 1, 2, 4)])
def test_resumed_and_of_one_rank_of_several_they_are_the_same(folder, start, rank, ranks, batches_per_step):
    reader = ShardReader(folder / "states")
    schedule = make_schedule(reader, batches_per_step)
    require_same(reader, schedule, schedule.steps(0), start, rank, ranks, buffers=1)


def test_eight_bits_and_last_states_kept_where_supervised_are_the_same(tmp_path):
    samples = [make_sample(20 + 9 * i, i) for i in range(8)]
    reader = ShardReader(write(tmp_path / "states", samples, "fp8", last_state="supervised"))
    seen = require_same(reader, make_schedule(reader, max_tokens=200), 4)
    assert seen[0][-1]["aux_states"].dtype == torch.uint8 and "aux_scales" in seen[0][-1]


def test_a_directory_of_another_engine_is_the_same(tmp_path):
    """Its loss masks lie in an Arrow dataset, which travels with the reader."""
    out = tmp_path / "theirs"
    samples = [make_sample(20 + 3 * i, i) for i in range(8)]
    rows = [{"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)} for ids, mask, _ in samples]
    Dataset.from_list(rows).save_to_disk(out)
    (out / "hidden_states").mkdir()
    for index, (ids, _, states) in enumerate(samples):
        path = out / "hidden_states" / f"hs_{index}.safetensors"
        save_file({"hidden_states": torch.stack(states, 1), "token_ids": ids}, path)
    reader = ShardReader(out, POINTS)
    require_same(reader, make_schedule(reader), 4)


# ---- buffers ---------------------------------------------------------------------------------------------------------


class Copy:
    """The event of a copy that is over when the test says so."""

    def __init__(self):
        self.over = threading.Event()

    def synchronize(self) -> None:
        self.over.wait()


def test_a_buffer_is_overwritten_after_its_copy_is_over_and_not_before(folder):
    reader = ShardReader(folder / "states")
    with ReaderProcesses(2, 2) as readers:
        feed = Feed(reader, make_schedule(reader, 1), STEPS, buffers=1, readers=readers)

        def changes(loaded, seconds: float) -> bool:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                if not torch.equal(loaded.batch.embed_ids, before):
                    return True
                time.sleep(0.01)
            return False

        (first,), (second,) = next(feed).loaded, next(feed).loaded
        before = first.batch.embed_ids.clone()
        feed.release(first)
        assert changes(first, 10), "nobody copies it: it is overwritten at once, or this test would see nothing"

        before, copy = second.batch.embed_ids.clone(), Copy()
        feed.release(second, copy)
        (third,) = next(feed).loaded
        assert third.batch.embed_ids.data_ptr() == first.batch.embed_ids.data_ptr()
        assert not changes(second, 1)
        copy.over.set()
        assert changes(second, 10)
        (fourth,) = next(feed).loaded
        assert fourth.batch.embed_ids.data_ptr() == second.batch.embed_ids.data_ptr()


@pytest.mark.parametrize("buffers", [10**10, 10**18])
def test_memory_that_cannot_be_had_is_one_line(folder, buffers):
    reader = ShardReader(folder / "states")
    said = "cannot (map|have) the batches of .* GB .*; lower --read-ahead"
    with ReaderProcesses(1, 1) as readers, pytest.raises(UserError, match=said):
        Feed(reader, make_schedule(reader), STEPS, buffers=buffers, readers=readers)


def test_processes_that_cannot_be_started_are_one_line_and_leave_none(folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/proc/self/fd")))
    sixth_free = next(limit for limit in itertools.count() if limit - len([each for each in used if each < limit]) == 6)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (sixth_free, hard))
        with pytest.raises(UserError, match="cannot start 9 reader processes .*; lower --reader-processes"):
            ReaderProcesses(9, 9)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    must_end(readers_of(psutil.Process()))


def test_batches_do_not_wait_behind_a_plan(folder):
    reader = ShardReader(folder / "states")
    with ReaderProcesses(1, 1) as readers:
        feed = Feed(reader, make_schedule(reader), STEPS, readers=readers)
        readers.submit(time.sleep, 60)
        started = time.monotonic()
        assert len(everything(feed, 8)) and time.monotonic() - started < 30


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_what_is_raised_there_is_raised_here(folder):
    reader = ShardReader(folder / "states")
    schedule = make_schedule(reader)
    schedule.total_steps(2)  # planned; what follows does not fit
    schedule.budget = Budget(16, 16, 16)
    feed, said = Feed(reader, schedule, STEPS), []
    with pytest.raises(UserError) as here:
        next(feed)
    feed.close()
    with ReaderProcesses(2, 2) as readers:
        with pytest.raises(UserError) as there:
            next(Feed(reader, schedule, STEPS, readers=readers))
        assert str(there.value) == str(here.value)
        with pytest.raises(ValueError, match="invalid literal"):
            readers.submit(int, "eleven").result()
        os.kill(readers_of(psutil.Process())[0].pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"reader process \d \(pid \d+\) was killed by SIGKILL; .*--read-ahead"):
            for _ in range(2):
                said.append(readers.submit(int, "11").result())
    assert said in ([], [11]), "the other process is not concerned"


def test_an_error_of_the_device_is_raised_and_nobody_waits(folder):
    class Broken:
        def synchronize(self):
            raise RuntimeError("the device is gone")

    reader = ShardReader(folder / "states")
    with ReaderProcesses(1, 1) as readers:
        feed = Feed(reader, make_schedule(reader, 1), STEPS, buffers=0, readers=readers)
        feed.release(next(feed).loaded[0], Broken())
        with pytest.raises(RuntimeError, match="the device is gone"):
            next(feed)


def test_closing_does_not_wait_for_a_process_that_stands_still(folder):
    reader = ShardReader(folder / "states")
    with ReaderProcesses(2, 2) as readers:
        feed = Feed(reader, make_schedule(reader, 1), STEPS, buffers=1, readers=readers)
        loaded = next(feed).loaded + next(feed).loaded
        processes = readers_of(psutil.Process())
        for process in processes:
            process.suspend()
        for each in loaded:
            feed.release(each)
        started = time.monotonic()
    assert time.monotonic() - started < 3
    assert len(processes) == 2
    must_end(processes)


def test_a_run_that_ends_by_an_error_leaves_no_process(folder, tmp_path):
    with pytest.raises(UserError, match="--max-set-aside"):
        train_here(None, "--data", folder / "states", "--output", tmp_path / "run", *RUN, "--max-set-aside", 1,
                   "--reader-processes", 2)  # fmt: skip
    assert not readers_of(psutil.Process())


@pytest.fixture(scope="module")
def undisturbed(folder):
    train_here(None, "--data", folder / "states", "--output", folder / "undisturbed", *RUN, "--reader-processes", 0)
    return losses(folder / "undisturbed")


def disturbed(arguments: list, what) -> tuple[int, str, str]:
    """Run train_drafter.py in a group of its own; at its third step call what(its process, its reader processes).

    Returns its exit status, what it printed, and its errors.
    """
    process = subprocess.Popen(command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)  # fmt: skip
    steps, said = 0, ""
    for line in process.stdout:
        said += line
        steps += line.startswith("step ")
        if steps == 3:
            readers = readers_of(psutil.Process(process.pid))
            assert len(readers) == 2
            what(process, readers)
            break
    more, errors = process.communicate(timeout=120)
    must_end(readers)
    return process.returncode, said + more, errors


def test_whatever_is_killed_the_same_command_ends_with_the_same_losses(folder, undisturbed):
    run = folder / "disturbed"
    arguments = ["--data", folder / "states", "--output", run, *RUN, "--reader-processes", 2]

    status, said, errors = disturbed(arguments, lambda process, _: os.killpg(process.pid, signal.SIGINT))
    assert status == 130 and "the same command continues from there" in said and not errors

    status, said, errors = disturbed(arguments, lambda _, readers: readers[1].kill())
    assert status == 2 and "continuing from" in said
    assert errors.startswith("error: reader process 1 (pid ") and errors.count("\n") == 1
    assert "was killed by SIGKILL; if memory ran out" in errors and "goes on, from the last checkpoint" in errors

    status, said, errors = disturbed(arguments, lambda process, _: process.kill())
    assert status == -signal.SIGKILL and not errors

    done = train(*arguments)
    assert "continuing from" in done.stdout and losses(run) == undisturbed


@pytest.mark.gpu
def test_batches_reach_the_gpu_from_page_locked_memory(folder):
    reader = ShardReader(folder / "states")
    schedule, device = make_schedule(reader), torch.device("cuda", torch.cuda.current_device())
    feed = Feed(reader, schedule, STEPS)
    expected = everything(feed, 6)
    feed.close()
    with ReaderProcesses(2, 3) as readers:
        feed = Feed(reader, schedule, STEPS, pinned=True, readers=readers)
        mover, found = Mover(feed, device), []
        for step in itertools.islice(feed, 6):
            for loaded in step.loaded:
                assert all(tensor.is_pinned() for tensor in loaded.batch.tensors().values())
                found.append({name: tensor.cpu() for name, tensor in mover(loaded).tensors().items()})
                mover.computed(loaded)
    for (*_, tensors), other in zip(expected, found, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())
