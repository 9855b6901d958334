"""The target answers prompts itself, in the engine that captures afterwards: the driving side of --regenerate.

    rows = await answer(engine, rows, tokenizer, folder, sampling, ...)

Each finished conversation is one line in `folder/answers-{replica}.jsonl`, synced to disk at most once a second and at
the end; an interrupted run goes on with the conversations that are missing there. common/regeneration.py knows what a
prompt and an answer look like.
"""

import asyncio
import contextlib
import errno
import json
import os
import time
from collections import Counter
from pathlib import Path

from common.conversations import Row
from common.engine import MOST_DECODING, gone_silent
from common.errors import UserError
from common.regeneration import HOLE, fill, next_prompt, regenerated_row, script_of
from common.shard_writing import cannot_write

SILENCE_SECONDS = 7200.0  # until the first of them is answered may take half an hour on a CPU
SYNC_SECONDS = 1.0  # lines that come within this time share one fsync: it holds everything else up


async def answer(
    engine, rows: list[Row], tokenizer, path: Path, *, temperature: float, max_new_tokens: int, context_length: int,
    template_kwargs: dict | None, on_done, given_up: "GivenUp", should_stop=lambda: False,
) -> Counter:  # fmt: skip
    """Answer every turn of `rows`, in order within a row, and append the finished rows to `path`.

    should_stop() ends it after the turns in flight, given_up at once. on_done(tokens generated) is called for each
    conversation. Returns what is worth telling, counted. Raises UserError for a row that cannot be answered (the
    template refuses it, or its prompt fills the context), and what `given_up` was given.
    """
    remarks: Counter = Counter()
    synced = last_sign = time.monotonic()
    room = asyncio.Semaphore(MOST_DECODING)
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:

        async def one(row: Row):
            nonlocal synced, last_sign
            async with room:
                if should_stop():
                    return
                script, generated = script_of(row), 0
                while not should_stop():
                    prompt = next_prompt(script, row, tokenizer, template_kwargs, context_length)
                    if prompt is None:
                        break
                    limit = min(max_new_tokens, context_length - len(prompt) - 1)
                    reply = await engine.async_generate(
                        input_ids=prompt, sampling_params={"temperature": temperature, "max_new_tokens": max(limit, 1)}
                    )
                    last_sign = time.monotonic()
                    finish = reply["meta_info"]["finish_reason"]
                    if finish["type"] == "abort":
                        raise UserError(f"{row.place}: the engine refused the prompt: {finish.get('message')}")
                    generated += len(reply["output_ids"])
                    remarks["answers cut off at --max-new-tokens or the context"] += finish["type"] == "length"
                    text = tokenizer.decode(reply["output_ids"], skip_special_tokens=False)
                    faithful = fill(script, row, tokenizer, text, template_kwargs)
                    remarks["answers that the template does not show as they were generated"] += not faithful
                if HOLE in script:
                    return  # interrupted between two turns
                saved = {**regenerated_row(row, script), "asked": row.row_hash}
                line = json.dumps(saved, ensure_ascii=False) + "\n"
                data = line.encode(errors="backslashreplace")
                try:
                    if file.write(data) < len(data):
                        raise OSError(errno.ENOSPC, "a line was cut in half")  # which a resume cuts away
                    if time.monotonic() - synced > SYNC_SECONDS:
                        os.fsync(file.fileno())
                        synced = time.monotonic()
                except OSError as error:
                    raise cannot_write(path, error) from None
                on_done(generated)

        tasks = [asyncio.create_task(one(row)) for row in rows]
        death = asyncio.create_task(given_up.wait())
        try:
            waiting = set(tasks)
            while waiting:
                done, waiting = await asyncio.wait(
                    {*waiting, death}, return_when=asyncio.FIRST_COMPLETED, timeout=SILENCE_SECONDS / 10
                )
                if time.monotonic() - last_sign > SILENCE_SECONDS:
                    raise gone_silent(engine, SILENCE_SECONDS)
                if death in done:
                    raise given_up.error
                for task in done:
                    task.result()
                waiting.discard(death)
        finally:
            for task in [*tasks, death]:
                task.cancel()
            with contextlib.suppress(OSError):  # what was not synced by then is answered again
                os.fsync(file.fileno())
    return +remarks


class GivenUp:
    """A reason to stop waiting for the engine at once: it died, or the person does not want to wait."""

    def __init__(self):
        self.error: BaseException | None = None
        self.event = asyncio.Event()

    def give_up(self, error: BaseException) -> None:
        self.error = self.error or error
        self.event.set()

    async def wait(self) -> None:
        await self.event.wait()


def answered(folder: Path, rows: list[Row]) -> dict[int, dict]:
    """Row number -> answered row, of every whole line in `folder/answers-*.jsonl`; a line cut in half is cut away,
    and a damaged one does not count.

    UserError when a row of the data is not the one that was answered under its number.
    """
    asked = {row.index: row.row_hash for row in rows}
    found: dict[int, dict] = {}
    for path in sorted(folder.glob("answers-*.jsonl")):
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # damaged: answered again
            if asked.get(row["index"]) != row.pop("asked"):
                raise UserError(
                    f"{path}: row {row['index']} of the data is not the one that was answered: the data changed; "
                    f"resume with the old data (rows may be added at the end), or use another --output"
                )
            found[row["index"]] = row
    return found
