"""extract.py as a person runs it: real processes, really killed; replicas, tensor parallelism, answers by the target.

The target is an 8-layer Llama with random weights (tests/conftest.py). Each test says how many engines it starts.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from common.placement import free_port
from common.shards import ShardReader, read_log

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parent.parent
ROWS = 400


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """400 tokenised rows of 10 to 60 tokens; row 7 has nothing supervised."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(ROWS):
            length = int(rng.integers(10, 60))
            mask = [0] * length if index == 7 else [0] * 4 + [1] * (length - 4)
            row = {"input_ids": rng.integers(100, 49000, length).tolist(), "loss_mask": mask}
            file.write(json.dumps(row) + "\n")
    return path


def target_flags(folder) -> list:
    return ["--model", folder, "--dtype", "float32"]  # on a CPU faster than half precision, and free of near-ties


class Run:
    """One start of extract.py, with its output in a file."""

    def __init__(self, log: Path, *arguments, launcher=(sys.executable,)):
        self.log = log
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [*launcher, str(ROOT / "extract.py"), *map(str, arguments)], stdout=file, stderr=file, cwd=ROOT,
                env=environment, start_new_session=True,
            )  # fmt: skip

    def wait_until(self, condition, seconds=240):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def finish(self, seconds=400) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self):
        for process in [*self.family(), psutil.Process(self.process.pid)]:
            process.kill()

    def text(self) -> str:
        return self.log.read_text()[-4000:]


def committed(out: Path) -> dict[int, dict]:
    entries = [entry for log in out.glob("rows_*/manifest.jsonl") for entry in read_log(log).entries]
    assert len(entries) == len({entry["index"] for entry in entries}), "a row was committed twice"
    return {entry["index"]: entry for entry in entries}


def gone(family) -> bool:
    return not psutil.wait_procs(family, timeout=30)[1]


def scheduler_of(family, rank: int | None = None) -> psutil.Process:
    title = "sglang::scheduler" + (f"_TP{rank}" if rank is not None else "")
    return next(process for process in family if " ".join(process.cmdline()).startswith(title))


def writer_of(family) -> psutil.Process:
    return next(process for process in family if "common.tap_writer" in process.cmdline())


def facts(entries: dict[int, dict]) -> dict[int, tuple]:
    """What must not depend on how often a run was killed."""
    keys = ("status", "tokens", "supervised", "bytes", "row_hash", "source")
    return {index: tuple(entry[key] for key in keys) for index, entry in entries.items()}


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(small_target, rows, tmp_path):
    """Kills of the main process, the scheduler and a writer, Ctrl-C, and damage between two runs. Seven engines."""
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    arguments = [*target_flags(small_target), "--data", rows, "--chunk-tokens", 64, "--ring-gb", 0.05]
    run = Run(tmp_path / "calm.log", *arguments, "--output", calm)
    assert run.finish() == 0, run.text()
    undisturbed = committed(calm)
    assert set(undisturbed) == set(range(ROWS)) - {7}

    again = [*arguments, "--output", wild]
    run = Run(tmp_path / "wild.log", *again)
    run.wait_until(lambda: len(committed(wild)) >= 20)
    family = run.family()
    run.process.send_signal(signal.SIGKILL)
    assert gone(family), "children outlived a killed main process"

    for victim in (scheduler_of, writer_of):
        before = len(committed(wild))
        run = Run(tmp_path / "wild.log", *again)
        run.wait_until(lambda before=before: len(committed(wild)) >= before + 60)
        family = run.family()
        victim(family).kill()
        assert run.finish(60) not in (0, None)
        assert "a process of the engine died" in run.text() and "The same command goes on" in run.text()
        assert gone(family)

    before = len(committed(wild))
    run = Run(tmp_path / "wild.log", *again)
    run.wait_until(lambda: len(committed(wild)) >= before + 40)
    family = run.family()
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal sends it: to every process of the group
    assert run.finish(60) == 130, run.text()
    assert "samples are safe" in run.text() and gone(family)

    log = wild / "rows_0-2000" / "manifest.jsonl"
    names = [wild / "rows_0-2000" / f"data_{index}.pt" for index in sorted(committed(wild))[:4]]
    names[0].write_bytes(names[0].read_bytes()[:-100])  # truncated
    flipped = bytearray(names[1].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    names[1].write_bytes(flipped)
    names[2].unlink()
    with log.open("ab") as file:
        file.write(b'{"index": 3')  # a line cut in half
    (wild / "rows_0-2000" / ".data_9.pt.gone-1-1.tmp").write_bytes(b"unfinished")
    look = [sys.executable, str(ROOT / "extract.py"), "--verify", str(wild)]
    found = subprocess.run([*look, "--json"], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 1
    report = json.loads(found.stdout)
    assert [name.split("/")[1].split(":")[0] for name in report["damaged"]] == [name.name for name in names[:3]]
    assert report["half_lines"] and report["stale_temporaries"]
    subprocess.run([*look, "--repair"], capture_output=True, cwd=ROOT)

    run = Run(tmp_path / "wild.log", *again)
    assert run.finish() == 0, run.text()
    assert facts(committed(wild)) == facts(undisturbed)
    assert subprocess.run(look, capture_output=True, cwd=ROOT).returncode == 0
    for one, other in zip(ShardReader(calm).records, ShardReader(wild).records, strict=True):
        for want, state in zip(ShardReader(calm).load(one).states, ShardReader(wild).load(other).states, strict=True):
            assert (want.float() - state.float()).norm() <= 1e-2 * want.float().norm()
    status = [sys.executable, str(ROOT / "extract.py"), "--status", str(wild), "--json"]
    report = json.loads(subprocess.run(status, capture_output=True, text=True, cwd=ROOT).stdout)
    assert (report["committed"], report["skipped"], report["missing"]) == (ROWS - 1, 1, 0)
    assert report["skips_by_reason"] == {"nothing supervised": 1}


def test_the_log_speaks_from_the_first_second_on(small_target, rows, tmp_path):
    """Redirected output is flushed at once and never silent for long; SGLang's own goes elsewhere. One engine.

    Its states are in eight bits, the last of them at supervised rows only.
    """
    run = Run(tmp_path / "log", *target_flags(small_target), "--data", rows, "--limit", 5, "--output", tmp_path / "out",
              "--state-dtype", "fp8", "--last-state", "supervised")  # fmt: skip
    started = time.monotonic()
    run.wait_until(lambda: "[extract]" in run.text())
    waited_for_first_line = time.monotonic() - started
    sizes = []
    while run.process.poll() is None:
        sizes.append((time.monotonic(), len(run.text())))
        time.sleep(0.2)
    assert run.process.returncode == 0, run.text()
    changes = [sizes[0][0]] + [b[0] for a, b in zip(sizes, sizes[1:], strict=False) if b[1] != a[1]]
    assert max(b - a for a, b in zip(changes, changes[1:], strict=False)) < 15.0
    assert waited_for_first_line < 60  # imports on a busy machine; the first line itself is immediate
    assert "Prefill batch" not in run.text()
    assert "Prefill batch" in (tmp_path / "out" / "logs" / "engine-0-0.log").read_text()
    beat = json.loads((tmp_path / "out" / "heartbeat.json").read_text())
    assert beat["state"] == "closed" and beat["done"] == 5

    reader = ShardReader(tmp_path / "out")
    assert (reader.info["dtype"], reader.info["last_state_rows"]) == ("fp8", "supervised")
    for record in reader.records:
        sample = reader.load(record, verify=True)
        assert sample.last_rows.tolist() == list(range(3, record.tokens - 1))  # four tokens of prompt
        per_row = record.tokens * (3 * (64 + 4) + 16) + len(sample.last_rows) * 128
        assert per_row < record.bytes < per_row + 8192
        assert reader.stored_dtypes(record) == ["fp8", "fp8", "fp8", "bfloat16"]


def test_two_replicas_share_the_rows(small_target, rows, tmp_path):
    """torchrun with two processes on the CPU. Two engines at once."""
    out = tmp_path / "out"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = (*target_flags(small_target), "--data", rows, "--limit", 64, "--output", out, "--ring-gb", 0.2)
    run = Run(tmp_path / "log", *arguments, launcher=launcher)
    assert run.finish() == 0, run.text()
    assert set(committed(out)) == set(range(64)) - {7}
    info = json.loads((out / "dataset.json").read_text())
    assert info["rows_per_block"] == 8 and len(info["run"]["self_checks"]) == 2
    checked = [check["own_token"]["checked"] for check in info["run"]["self_checks"]]
    assert sum(checked) == 63 and min(checked) >= 16
    lengths = json.loads((out / "sample_lengths.json").read_text())
    assert lengths == {str(index): entry["tokens"] for index, entry in sorted(committed(out).items())}
    assert "64/63" not in run.text() and "63/63" in run.text()


def test_one_replica_that_is_interrupted_stops_all_without_a_false_word(small_target, rows, tmp_path):
    """The signal reaches one process of two. Two engines at once."""
    out = tmp_path / "out"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = (*target_flags(small_target), "--data", rows, "--output", out, "--ring-gb", 0.2, "--chunk-tokens", 64)
    run = Run(tmp_path / "log", *arguments, launcher=launcher)
    run.wait_until(lambda: len(committed(out)) >= 20)
    workers = [process for process in run.family() if "extract.py" in " ".join(process.cmdline())]
    next(worker for worker in workers if worker.environ().get("RANK") == "1").send_signal(signal.SIGINT)
    assert run.finish() != 0
    done = len(committed(out))
    assert done < ROWS - 1 and f"stopped: {done} of {ROWS - 1} samples are safe" in run.text(), run.text()
    assert "files were removed" not in run.text()


def test_one_engine_over_two_nodes(small_target, rows, tmp_path):
    """Two launches of torchrun stand for two nodes, each with one of two tensor-parallel ranks; the same states as of
    an engine on one. Two engines."""
    arguments = [*target_flags(small_target), "--data", rows, "--limit", 40, "--ring-gb", 0.2, "--tp", 2]
    port = free_port(19)
    nodes = []
    for node in (0, 1):
        launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
                    "--nproc-per-node", "1", "--master-addr", "localhost", "--master-port", str(port))  # fmt: skip
        nodes.append(Run(tmp_path / f"log-{node}", *arguments, "--output", tmp_path / "two", launcher=launcher))
    for run in nodes:
        assert run.finish() == 0, nodes[0].text() + run.text()
    logs = sorted(path.name for path in (tmp_path / "two" / "logs").iterdir())
    assert logs == ["engine-0-0.log", "engine-0-1.log"]
    run = Run(tmp_path / "log", *arguments, "--output", tmp_path / "one")
    assert run.finish() == 0, run.text()
    assert set(committed(tmp_path / "two")) == set(range(40)) - {7}
    assert facts(committed(tmp_path / "two")) == facts(committed(tmp_path / "one"))
    one, two = ShardReader(tmp_path / "one"), ShardReader(tmp_path / "two")
    assert {proof["rank"] for proof in two.info["run"]["self_checks"][0]["first_batch"]} == {0, 1}
    for record, other in zip(one.records, two.records, strict=True):
        for want, state in zip(one.load(record).states, two.load(other, verify=True).states, strict=True):
            assert (want.float() - state.float()).norm() <= 1e-2 * want.float().norm()


def test_a_killed_rank_leaves_a_directory_that_resumes(small_target, rows, tmp_path):
    """Tensor parallelism over two ranks; one is killed; another degree of parallelism finishes. Two engines."""
    out = tmp_path / "out"
    arguments = [*target_flags(small_target), "--data", rows, "--limit", 200, "--output", out]
    arguments += ["--chunk-tokens", 64, "--ring-gb", 0.05]
    run = Run(tmp_path / "log", *arguments, "--tp", 2)
    run.wait_until(lambda: len(committed(out)) >= 20)
    family = run.family()
    scheduler_of(family, rank=1).kill()
    assert run.finish(90) not in (0, None)
    assert "samples are safe" in run.text() and gone(family)
    before = committed(out)
    run = Run(tmp_path / "log", *arguments)
    assert run.finish() == 0, run.text()
    after = committed(out)
    assert set(after) == set(range(200)) - {7}
    assert all(after[index] == entry for index, entry in before.items())


def test_a_disk_that_fills_up_stops_the_run_cleanly(small_target, rows, tmp_path, tmpfs):
    """A tmpfs of a few megabytes, made larger for the second run. Two engines."""
    disk = tmpfs("size=4m")
    out = disk / "out"
    arguments = [*target_flags(small_target), "--data", rows, "--output", out]
    arguments += ["--chunk-tokens", 64, "--ring-gb", 0.05]
    run = Run(tmp_path / "log", *arguments)
    assert run.finish() == 2 and "--force" in run.text(), run.text()
    assert not (out / "logs").exists(), "an engine was started for a disk that cannot hold the states"
    run = Run(tmp_path / "log", *arguments, "--force")
    assert run.finish() == 2, run.text()
    assert "the disk is full" in run.text() and "The same command goes on" in run.text()
    assert 0 < len(committed(out)) < ROWS - 1
    assert not list(out.rglob("*.tmp")), "a partial shard was left behind"
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    run = Run(tmp_path / "log", *arguments)
    assert run.finish() == 0, run.text()
    assert set(committed(out)) == set(range(ROWS)) - {7}


def test_interrupted_while_all_answers_are_in_flight_it_captures_nothing(small_target, tmp_path):
    """SIGTERM: the answers in flight, all there are, are finished; capturing is left to the next run. One engine."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"turns": [f"{n}: Name a colour."]}) + "\n" for n in range(40)))
    arguments = [*target_flags(small_target), "--data", prompts, "--output", out, "--regenerate", "--ring-gb", 0.2]
    run = Run(tmp_path / "log", *arguments, "--max-new-tokens", 60)
    run.wait_until(lambda: (out / "answers" / "answers-0.jsonl").exists())
    run.process.terminate()
    assert run.finish() == 130, run.text()
    assert "conversations in flight are finished first" in run.text()
    assert "stopped while answering (40 of 40 conversations are answered): 0 of 40 samples are safe" in run.text()
    assert not committed(out)


def test_the_target_answers_first(small_target, tmp_path):
    """--regenerate, its engine and then itself killed while it answers, then resumed; greedy answers are those of
    transformers; other data is refused. Three engines."""
    prompts = tmp_path / "prompts.jsonl"
    questions = ["Name a colour.", "What is two plus two?", "Say something about rivers.", "Why?"]
    turns = [[f"{number}: {question}", "And then?"] for number in range(8) for question in questions]
    prompts.write_text("".join(json.dumps({"turns": turn}) + "\n" for turn in turns))
    out = tmp_path / "out"
    arguments = [*target_flags(small_target), "--data", prompts, "--output", out, "--regenerate", "--ring-gb", 0.2]
    arguments += ["--max-new-tokens", 12]
    run = Run(tmp_path / "log", *arguments)
    run.wait_until(lambda: "answering" in run.text())
    family = run.family()
    scheduler_of(family).kill()
    assert run.finish(180) == 2 and "a process of the engine died" in run.text() and gone(family)
    run = Run(tmp_path / "log", *arguments)
    answers = out / "answers" / "answers-0.jsonl"
    run.wait_until(lambda: answers.exists() and answers.read_bytes().count(b"\n") >= 1)
    run.process.kill()
    kept = [json.loads(line) for line in answers.read_bytes().splitlines() if line.endswith(b"}")]
    assert all(row.pop("asked") for row in kept)
    time.sleep(1.0)
    run = Run(tmp_path / "log", *arguments)
    assert run.finish() == 0, run.text()
    prompts.write_text(prompts.read_text().replace("0: Why?", "0: Why not?"))
    other = Run(tmp_path / "other.log", *arguments)
    assert other.finish() == 2 and "row 3 of the data is not the one that was answered" in other.text()
    chats = [json.loads(line) for line in (out / "chats.jsonl").read_text().splitlines()]
    assert [chat["index"] for chat in chats] == list(range(len(turns)))
    assert all(chats[row["index"]] == row for row in kept)
    assert all([m["role"] for m in chat["messages"]] == ["user", "assistant"] * 2 for chat in chats)
    assert set(committed(out)) == set(range(len(turns)))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_target)
    model = AutoModelForCausalLM.from_pretrained(small_target, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(chats[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt")
    prompt = prompt["input_ids"] if not torch.is_tensor(prompt) else prompt
    answer = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    expected = tokenizer.decode(answer, skip_special_tokens=False).removesuffix("<|im_end|>")
    assert chats[0]["messages"][1]["content"] == expected


def test_what_two_replicas_answer_is_told_together(small_target, tmp_path):
    """Every answer is cut off at two tokens. Two engines at once."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"turns": [f"{number}: Why?"]}) + "\n" for number in range(24)))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = Run(tmp_path / "log", *target_flags(small_target), "--data", prompts, "--output", out, "--regenerate",
              "--ring-gb", 0.2, "--max-new-tokens", 2, launcher=launcher)  # fmt: skip
    assert run.finish() == 0, run.text()
    assert "24 answers cut off at --max-new-tokens or the context" in run.text()
    assert set(committed(out)) == set(range(24))


def test_a_replica_that_dies_while_it_answers_names_its_log(small_target, tmp_path):
    """Two engines at once."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"turns": [f"{n}: Why?"] * 40}) + "\n" for n in range(400)))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = Run(tmp_path / "log", *target_flags(small_target), "--data", prompts, "--output", out, "--regenerate",
              "--ring-gb", 0.2, "--max-new-tokens", 8, launcher=launcher)  # fmt: skip
    run.wait_until(lambda: (out / "answers" / "answers-1.jsonl").exists())
    family = run.family()
    worker = next(one for one in family if "extract.py" in " ".join(one.cmdline()) and one.environ()["RANK"] == "1")
    scheduler_of(worker.children(recursive=True)).kill()
    assert run.finish(120) != 0 and gone(family)
    assert f"a process of the engine died (log: {out / 'logs' / 'engine-1-0.log'})" in run.text(), run.text()


def test_a_writer_that_dies_while_the_model_loads_ends_the_run_at_once(small_target, rows, tmp_path):
    run = Run(tmp_path / "log", *target_flags(small_target), "--data", rows, "--output", tmp_path / "out")

    def writers():
        with contextlib.suppress(psutil.Error):  # a process that was there a moment ago
            return [process for process in run.family() if "common.tap_writer" in process.cmdline()]

    run.wait_until(writers)
    family = run.family()
    writers()[0].kill()
    assert run.finish(60) == 2 and gone(family), run.text()
    assert "the engine did not start: ChildProcessError: a writer process was killed by signal 9" in run.text()
    assert "kill_process_tree" not in run.text()


def test_terminated_while_it_loads_it_ends_with_its_processes(small_target, rows, tmp_path):
    """As a job scheduler ends a run: SIGTERM, at a moment when the engine's processes still import."""
    run = Run(tmp_path / "log", *target_flags(small_target), "--data", rows, "--output", tmp_path / "out")
    run.wait_until(lambda: len(run.family()) > 2)
    family = run.family()
    run.process.terminate()
    assert run.finish(60) == 130 and gone(family), run.text()
    assert "0 of" in run.text() and "The same command goes on" in run.text()
