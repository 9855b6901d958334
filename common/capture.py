"""The committing side of a capture: prompts into the engine, records from the tap, lines into the manifest.

    async with Capture(engine, run, ...) as capture:     # begins a session of the tap in every scheduler process
        await capture.take(samples)                      # returns when all are committed, or raises

For each sample two things come back on separate ways: the engine's answer (one greedy token, through SGLang's own
request path) and the tap's record (file written, its hash, and the token that follows from the stored last state).
A sample is committed when both are there and the tokens agree. That check ties every file to the prompt it is named
after: a wrong layer, a second norm, a partial sum or a swapped row gives another token. Near-ties, where the best
logits are closer than their rounding, are counted instead.
"""

import asyncio
import secrets
import time
from collections import defaultdict, deque

import numpy as np

from common.engine import SILENCE_SECONDS, ChildSignals, EngineDied, gone_silent
from common.errors import UserError
from common.tap_link import writer_of

MOST_NEAR_TIES = 0.05  # share of samples; more of them is no rounding
COMMIT_SECONDS = 0.2  # records that arrive within this time share one fsync


class CaptureFailed(UserError):
    """The capture stopped because states are not what they should be, or could not be written."""


class Capture:
    """One capture session of one replica. Not reusable.

    engine: from common.engine.start_engine; run: a shard_run.RunDirectory; points: CapturePoints;
    settings: hidden_size, dtype and last_state (as extract.py's arguments name them), ring_bytes (a rank),
    tokens_in_flight.
    on_commit(record) is called for each durable sample, with None for one that was set aside; on_note(line) for what
    a person should read.
    """

    def __init__(self, engine, run, points, settings: dict, on_commit=lambda record: None, on_note=lambda line: None):
        self.engine, self.run, self.points, self.settings = engine, run, points, settings
        self.on_commit, self.on_note = on_commit, on_note
        self.ranks = engine.server_args.tp_size
        self.answers: dict[int, int] = {}  # index -> the engine's greedy token
        self.records: dict[int, tuple] = {}  # index -> ("written" | "set_aside", content)
        self.samples: dict[int, object] = {}  # in flight
        self.asked: set[asyncio.Task] = set()  # that the engine has not answered yet
        self.ready: deque[int] = deque()  # both sides are there
        self.proofs: list[dict] = []
        self.rank_figures: dict[int, dict] = {}
        self.ties = self.near_ties = 0
        self.committed = 0
        self.set_aside = 0
        self.stopping = False
        self.error: BaseException | None = None

    # -- start and end --

    async def __aenter__(self) -> "Capture":
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.started = self.last_sign = time.monotonic()
        self.session = f"capture-{secrets.token_hex(4)}"  # rows and messages of an earlier session are not ours
        self.links = self.engine.links
        self.begun = self.ended = 0
        self.links.on_message = lambda *message: self.loop.call_soon_threadsafe(self.message, *message)
        ChildSignals.on_dead_child = lambda: self.fail(EngineDied("a process of the engine died"))
        await self.until(lambda: self.links.connected() or self.links.lost)
        if self.links.lost:
            raise EngineDied("a process of the engine died before the first prompt")
        settings = {
            "session": self.session,
            "ranks": self.ranks,
            "out": str(self.run.out),
            "layout": self.run.layout,
            "rows_per_block": self.run.rows_per_block,
            "points": list(self.points.points),
            "names": self.points.names(),
        }
        for name in ("hidden_size", "dtype", "last_state", "ring_bytes"):
            settings[name] = self.settings[name]
        for rank in range(self.ranks):
            self.links.send("begin", rank, **settings)
        await self.until(lambda: self.begun == self.links.processes)
        self.committer = asyncio.create_task(self.commit_loop())
        return self

    async def __aexit__(self, kind, error, trace):
        """Empty the tap and commit what is complete, also after an error: those samples are as good as any."""
        self.committer.cancel()
        self.error = self.error or error
        try:
            await self.end()
            self.commit_ready()
        finally:
            self.links.on_message = lambda rank, kind, content: None

    async def end(self):
        """Let every rank write what it has; after an error only as long as that is a matter of seconds."""
        if isinstance(self.error, EngineDied | KeyboardInterrupt):
            return
        patience = time.monotonic() + (30.0 if self.error else SILENCE_SECONDS)
        while self.asked and self.ranks > 1 and self.in_touch(patience):
            # A rank whose session ends before that of another is missing in what they would compute together.
            await asyncio.wait(self.asked, timeout=0.1)
            self.asked = {task for task in self.asked if not task.done()}
        for rank in range(self.ranks):
            self.links.send("end", rank)
        while self.ended < self.begun and self.in_touch(patience):
            await asyncio.sleep(0.02)

    def in_touch(self, patience: float) -> bool:
        """Whether something may still come from the engine, until that moment."""
        gone = self.links.lost or isinstance(self.error, EngineDied | KeyboardInterrupt)
        return not gone and time.monotonic() < patience

    # -- samples --

    async def take(self, samples) -> None:
        """Capture `samples` (index, input_ids, loss_mask, row_hash, source, category), in order.

        The first goes alone: its batch proves the hooks. Returns when all are durable, or, after `stop`, when those in
        flight are. Raises CaptureFailed or EngineDied.
        """
        samples = deque(samples)
        alone = True
        tokens_in_flight = 0
        while samples and not self.stopping:
            batch = [samples.popleft()]
            tokens = len(batch[0].input_ids)
            while not alone and samples and len(batch) < 64 and tokens < self.settings["tokens_in_flight"] // 4:
                batch.append(samples.popleft())
                tokens += len(batch[-1].input_ids)
            task = asyncio.create_task(self.ask(batch))
            task.tokens = tokens
            self.asked.add(task)
            tokens_in_flight += tokens
            while self.asked and (alone or tokens_in_flight >= self.settings["tokens_in_flight"]):
                tokens_in_flight -= await self.some_done()
            if alone:
                await self.until(lambda: not self.samples)
                alone = not self.proofs
        while self.asked:
            await self.some_done()
        await self.until(lambda: not self.samples)

    async def some_done(self) -> int:
        """Wait until at least one task is done; returns the tokens that are no longer in flight."""
        waiter = asyncio.create_task(self.wait_for_error())
        done, _ = await asyncio.wait({*self.asked, waiter}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self.error:
            raise self.error
        tokens = 0
        for task in done - {waiter}:
            self.asked.discard(task)
            task.result()
            tokens += task.tokens
        return tokens

    async def ask(self, batch: list) -> None:
        """Describe samples to those who will write them, then let the engine compute them."""
        described = defaultdict(list)
        for sample in batch:
            self.samples[sample.index] = sample
            ids, mask = np.asarray(sample.input_ids, dtype=np.int64), np.asarray(sample.loss_mask, dtype=np.int64)
            writer = writer_of(sample.index, self.ranks, self.links.writers)
            described[writer].append({"index": sample.index, "input_ids": ids, "loss_mask": mask})
        for writer, samples in described.items():
            self.links.send("samples", *writer, samples=samples)
        try:
            answers = await self.engine.async_generate(
                input_ids=[np.asarray(sample.input_ids).tolist() for sample in batch],
                rid=[f"{self.session}-{sample.index}-{len(sample.input_ids)}" for sample in batch],
                sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            )
        except ValueError as error:
            raise CaptureFailed(f"rows {[sample.index for sample in batch]}: the engine refused one: {error}") from None
        for sample, answer in zip(batch, answers, strict=True):
            finish = answer["meta_info"]["finish_reason"]
            if finish and finish.get("type") == "abort":
                raise CaptureFailed(f"row {sample.index}: the engine refused it: {finish.get('message')}")
            self.last_sign = time.monotonic()
            self.answers[sample.index] = answer["output_ids"][0]
            self.check(sample.index)

    def stop(self) -> None:
        """Let samples in flight finish and take no more."""
        self.stopping = True
        self.wake()

    # -- records --

    def message(self, rank: int, kind: str, content: dict):
        """One message of a rank, in the event loop."""
        if kind == "lost":
            return self.fail(EngineDied("a process of the engine died"))
        if content.pop("session", self.session) not in (self.session, None):
            return
        self.last_sign = time.monotonic()
        if kind == "begun":
            self.begun += 1
        elif kind == "proof":
            self.proofs.append(content)
        elif kind == "failed":
            self.fail(CaptureFailed(content["reason"]) if content["known"] else RuntimeError(content["reason"]))
        elif kind == "ended":
            self.ended += 1
            if content:  # the scheduler's; a writer has no figures of its own
                self.rank_figures[rank] = content
        elif kind in ("written", "set_aside"):
            records = content.pop("records") if kind == "written" else [content]
            self.rank_figures[rank] = content
            for record in records:
                self.records[record["index"]] = (kind, record)
                self.check(record["index"])
        self.wake()

    def check(self, index: int):
        """Once both sides of a sample are there, compare the tokens and queue it for the next commit."""
        if index not in self.answers or index not in self.records:
            return
        kind, content = self.records[index]
        answer = self.answers.pop(index)
        if kind == "written":
            tokens, below, rounding = own_numbers(content["own"])
            content["own"] = {"token": int(tokens[0]), "gap": round(float(below[1]), 4), "agrees": "yes"}
            if tokens[0] != answer:
                gap = dict(zip(tokens, below, strict=True)).get(answer)
                if gap is None or gap > rounding:
                    return self.fail(CaptureFailed(own_token_message(index, content["own"], rounding, answer)))
                content["own"]["agrees"] = "tie" if gap == 0 else "near-tie"
                self.ties += int(gap == 0)  # bf16 logits are often equal to the last bit; either token is the best one
                self.near_ties += int(gap > 0)
                checked = self.committed + len(self.ready) + 1
                if self.near_ties > max(5, MOST_NEAR_TIES * checked):
                    return self.fail(CaptureFailed(near_tie_message(index, self.near_ties, checked)))
        self.ready.append(index)
        self.wake()

    def fail(self, error: BaseException):
        if self.error is None:
            self.error = error
        self.wake()

    # -- commits --

    async def commit_loop(self):
        """Group commits: all records that arrived meanwhile share the fsyncs. Nothing waits when no more can come."""
        while True:
            until = self.loop.time() + COMMIT_SECONDS
            while self.loop.time() < until and not (self.ready and len(self.ready) == len(self.samples)):
                await asyncio.sleep(COMMIT_SECONDS / 20)
            try:
                self.commit_ready()
            except Exception as error:  # whatever it is, waiting on would be for ever
                self.fail(error)

    def commit_ready(self):
        from common.shards import Record

        committed = []
        while self.ready:
            index = self.ready.popleft()
            kind, content = self.records.pop(index)
            sample = self.samples[index]
            if kind == "set_aside":
                self.run.put_aside(index, content["reason"], sample.row_hash)
                self.set_aside += 1
                self.on_note(f"row {index} set aside: {content['reason']}")
                del self.samples[index]
                self.on_commit(None)
                continue
            committed.append(
                Record(
                    index=index,
                    tokens=len(sample.input_ids),
                    supervised=int(np.asarray(sample.loss_mask).sum()),
                    bytes=content["bytes"],
                    xxh3=content["xxh3"],
                    row_hash=sample.row_hash,
                    category=sample.category,
                    source=sample.source,
                    own_token=content["own"],
                    time=time.time(),
                )
            )
        if committed:
            self.run.commit(committed)
            self.committed += len(committed)
            for record in committed:
                del self.samples[record.index]
                self.on_commit(record)
        self.wake()

    # -- waiting --

    def wake(self):
        self.changed.set()

    async def until(self, condition):
        """Wait for `condition`, looked at after each change and every half second; raises the session's error."""
        self.last_sign = time.monotonic()
        while not condition():
            if self.error:
                raise self.error
            self.look_for_silence()
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), 0.5)
            except TimeoutError:
                pass
        if self.error:
            raise self.error

    async def wait_for_error(self):
        while self.error is None:
            self.look_for_silence()
            await asyncio.sleep(0.1)

    def look_for_silence(self):
        """Nothing came back for long, although samples are in flight: ask for the stacks and give up, not wait on."""
        if time.monotonic() - self.last_sign > SILENCE_SECONDS:
            self.fail(gone_silent(self.engine, SILENCE_SECONDS))

    def stalled_seconds(self) -> float:
        return sum(figures["stalled_seconds"] for figures in self.rank_figures.values())

    def self_checks(self) -> dict:
        """The result of both checks, for dataset.json; `seconds` is what they cost the slowest rank's scheduler."""
        return {
            "first_batch": self.proofs,
            "own_token": {"checked": self.committed, "ties": self.ties, "near_ties": self.near_ties, "mismatches": 0},
            "seconds": round(max((f["check_seconds"] for f in self.rank_figures.values()), default=0.0), 4),
            "of_seconds": round(time.monotonic() - self.started, 4),
        }


def own_numbers(own: bytes) -> tuple[np.ndarray, np.ndarray, float]:
    """Best tokens, how far each logit lies below the best one, what rounding explains; as tap.own_tokens made them."""
    numbers = np.frombuffer(own)  # float64
    half = len(numbers) // 2
    return numbers[:half], numbers[half:-1], numbers[-1]


def own_token_message(index: int, own: dict, rounding: float, answer: int) -> str:
    return (
        f"sample {index}: the stored last state gives token {own['token']} (logit gap {own['gap']:.3g}, rounding "
        f"explains {rounding:.1g}), but the engine answered {answer}; likely causes: rows of two samples swapped, the "
        f"last state shifted by one layer, normed twice, or one rank's partial sum"
    )


def near_tie_message(index: int, near_ties: int, checked: int) -> str:
    return (
        f"sample {index}: {near_ties} of the first {checked} samples give another token than the engine by a small "
        f"gap: too many for rounding; likely causes: a last state shifted by one layer, or a norm applied twice"
    )
