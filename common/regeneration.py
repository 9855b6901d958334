"""The target answers the prompts itself, so that the corpus is what it would say: the bookkeeping of --regenerate.

    script = script_of(row)                        # the user's, system's and tools' side, a hole for each answer
    while (prompt_ids := next_prompt(script, row, tokenizer)) is not None:
        faithful = fill(script, row, tokenizer, the_engine_answers(prompt_ids))
    line = json.dumps(regenerated_row(row, script))

extract.py drives the engine with it, many rows at a time, and saves the lines next to the shards.
"""

from __future__ import annotations

import functools

from common.conversations import Row
from common.errors import UserError
from common.loss_mask import render, special_ids

HOLE = None
THINK_END = "</think>"


def script_of(row: Row) -> list[dict | None]:
    """The messages of `row` with HOLE where the target is to answer.

    Prompt rows (`turns`): a hole after every turn. Chats: a hole for every assistant turn, and one at the end when the
    last word is the user's or a tool's. Assistant turns that call tools stay as they are: the tool's result in the next
    message answers that very call. Raises UserError for a tokenised row, and for a row without anything to answer.
    """
    if row.input_ids is not None:
        raise UserError(f"{row.place}: a tokenised row cannot be regenerated; give 'messages' or 'turns'")
    if row.turns is not None:
        return [item for turn in row.turns for item in ({"role": "user", "content": turn}, HOLE)]
    script: list[dict | None] = []
    for message in row.messages:
        if message["role"] != "assistant" or message.get("tool_calls"):
            script.append(message)
        elif script and script[-1] is not HOLE:  # an opening assistant message has no prompt; two in a row are one
            script.append(HOLE)
    if script and script[-1] is not HOLE and script[-1]["role"] in ("user", "tool"):
        script.append(HOLE)
    if HOLE not in script:
        raise UserError(f"{row.place}: nothing to regenerate: no message comes before an answer")
    return script


def next_prompt(script: list[dict | None], row: Row, tokenizer, template_kwargs: dict | None = None,
                context_length: int | None = None) -> list[int] | None:
    """Token ids of the prompt for the first hole of `script`; None when all are filled.

    Raises UserError when the template refuses the conversation or the prompt leaves no room in the model's context.
    """
    if HOLE not in script:
        return None
    before = script[: script.index(HOLE)]
    ids = render(tokenizer, before, row.place, generation_prompt=True, tokenize=True, tools=row.tools,
                 template_kwargs=template_kwargs)  # fmt: skip
    if context_length is not None and len(ids) >= context_length:
        raise UserError(f"{row.place}: the prompt for message {len(before)} has {len(ids)} tokens, but the model takes "
                        f"{context_length} with its answer; shorten or remove the row")
    return ids


def fill(script: list[dict | None], row: Row, tokenizer, answer: str, template_kwargs: dict | None = None) -> bool:
    """Puts `answer` into the first hole of `script`; True when the template shows it exactly as it was generated.

    answer: the generated text, special tokens kept (decode with skip_special_tokens=False), with or without its
    end-of-turn token, which the template writes itself. Templates of reasoning models want the reasoning in a field of
    its own; it goes there when that, and not the plain text, makes the template repeat prompt and answer to the letter.
    """
    hole = script.index(HOLE)
    before = script[:hole]
    show = functools.partial(render, tokenizer, place=row.place, tools=row.tools, template_kwargs=template_kwargs)
    generated = show(before, generation_prompt=True) + answer
    candidates = [message for text in _without_last_special(tokenizer, answer) for message in _as_messages(text)]
    for message in candidates:
        if show([*before, message]).startswith(generated):
            script[hole] = message
            return True
    script[hole] = candidates[0]
    return False


def _without_last_special(tokenizer, answer: str) -> list[str]:
    """`answer` without the special token at its end, if it has one there, and `answer` as it is."""
    for token in tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))):
        if answer.endswith(token):
            return [answer.removesuffix(token), answer]
    return [answer]


def _as_messages(text: str) -> list[dict]:
    """The ways to write one answer as a message: plain, reasoning apart, reasoning apart and bare of newlines."""
    messages = [{"role": "assistant", "content": text}]
    if THINK_END in text:
        reasoning, _, content = text.partition(THINK_END)
        reasoning = reasoning.removeprefix("<think>")
        for think, rest in ((reasoning, content), (reasoning.strip("\n"), content.lstrip("\n"))):
            messages.append({"role": "assistant", "reasoning_content": think, "content": rest})
    return messages


def regenerated_row(row: Row, script: list[dict | None]) -> dict:
    """The answered row as it is saved: `load_rows` reads it back."""
    saved = {"index": row.index, "messages": list(script), "source": row.source}
    if row.category is not None:
        saved["category"] = row.category
    if row.tools:
        saved["tools"] = row.tools
    return saved
