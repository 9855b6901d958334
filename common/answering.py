"""The target answers prompts itself, in the engine that captures afterwards: the driving side of --regenerate.

    rows = await answer(engine, rows, tokenizer, folder, sampling, ...)

Each finished conversation is one durable line in `folder/answers-{replica}.jsonl`; a run that was interrupted goes on
with the conversations that are missing there. common/regeneration.py knows what a prompt and an answer look like.
"""

import asyncio
import json
import os
from collections import Counter
from pathlib import Path

from common.conversations import Row
from common.errors import UserError
from common.regeneration import fill, next_prompt, regenerated_row, script_of

CONVERSATIONS_IN_FLIGHT = 256  # the engine queues what does not fit its key/value cache


async def answer(
    engine, rows: list[Row], tokenizer, path: Path, *, temperature: float, max_new_tokens: int, context_length: int,
    template_kwargs: dict | None, on_done, should_stop=lambda: False,
) -> Counter:  # fmt: skip
    """Answer every turn of `rows`, in order within a row, and append the finished rows to `path`.

    on_done(tokens generated) is called for each conversation. Returns what is worth telling, counted. Raises UserError
    for a row that cannot be answered (the template refuses it, or its prompt fills the context).
    """
    remarks: Counter = Counter()
    room = asyncio.Semaphore(CONVERSATIONS_IN_FLIGHT)
    with path.open("ab") as file:

        async def one(row: Row):
            async with room:
                if should_stop():
                    return
                script, generated = script_of(row), 0
                while (prompt := next_prompt(script, row, tokenizer, template_kwargs, context_length)) is not None:
                    limit = min(max_new_tokens, context_length - len(prompt) - 1)
                    reply = await engine.async_generate(
                        input_ids=prompt, sampling_params={"temperature": temperature, "max_new_tokens": max(limit, 1)}
                    )
                    finish = reply["meta_info"]["finish_reason"]
                    if finish["type"] == "abort":
                        raise UserError(f"{row.place}: the engine refused the prompt: {finish.get('message')}")
                    generated += len(reply["output_ids"])
                    remarks["answers cut off at --max-new-tokens or the context"] += finish["type"] == "length"
                    text = tokenizer.decode(reply["output_ids"], skip_special_tokens=False)
                    faithful = fill(script, row, tokenizer, text, template_kwargs)
                    remarks["answers that the template does not show as they were generated"] += not faithful
                line = json.dumps(regenerated_row(row, script), ensure_ascii=False) + "\n"
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
                on_done(generated)

        tasks = [asyncio.create_task(one(row)) for row in rows]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return +remarks


def answered(folder: Path) -> dict[int, dict]:
    """Row number -> answered row, of every whole line in `folder/answers-*.jsonl`; a line cut in half is cut away."""
    found: dict[int, dict] = {}
    for path in sorted(folder.glob("answers-*.jsonl")):
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.splitlines():
            row = json.loads(line)
            found[row["index"]] = row
    return found
