"""Which tokens of a chat the model itself would have produced: the loss mask of one conversation.

Supervised are an assistant turn's content, reasoning, tool calls and end-of-turn token; never the headers that the
template writes. Two ways to find them, by what the chat template offers (CONVENTIONS 4):

* `{% generation %}` marks: the template says it itself.
* growing prefixes: an assistant turn is what the conversation up to and including it has more than the prompt before
  it (the messages before it plus the generation prompt). Both must be prefixes of the whole conversation, as text and
  as tokens; where they are not, the turn as shown later is not the turn as the model produced it.

That last case is real: templates of reasoning models (Qwen3, DeepSeek-R1) drop or add `<think>` blocks in turns that
are no longer the last. Such a turn is left unsupervised and counted; `--supervise each` makes one sample a turn, every
one against the prompt that the model really saw. common/tokenizing.py calls `supervise`.
"""

from __future__ import annotations

import functools
import re
from contextlib import suppress

from common.errors import UserError

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REWRITTEN = "assistant turns not supervised: the template shows them otherwise in later turns (use supervise 'each')"
NO_PROMPT = "assistant turns not supervised: nothing comes before them"
NO_CALLS = "rows whose tool calls the chat template does not show: their turns train as if nothing had been called"


def supervise(tokenizer, messages: list[dict], place: str, which: str = "all", tools: list | None = None,
              template_kwargs: dict | None = None) -> tuple[list[int], list[int], dict[str, int]]:
    """Token ids [L], loss mask [L] of 0 and 1, and counts of what is left out, by reason: turns, or tool calls.

    messages: ends with an assistant message.  which: "all" assistant turns or the "last" only.
    place: how errors name the row.  template_kwargs: extra variables of the chat template (enable_thinking, ...).
    Raises UserError when the template refuses the conversation, and when no rule above can find the last turn.
    """
    chat = functools.partial(render, tokenizer, place=place, tools=tools, template_kwargs=template_kwargs)
    text = chat(messages)
    ids = chat(messages, tokenize=True)
    left_out: dict[str, int] = {}
    if any(message.get("tool_calls") for message in messages):
        without = [{name: each for name, each in message.items() if name != "tool_calls"} for message in messages]
        with suppress(UserError):  # a template that refuses such a turn reads the calls
            left_out |= {NO_CALLS: 1} if chat(without) == text else {}
    if has_marks(tokenizer, tools):
        mask = _mask_from_marks(tokenizer, messages, text, ids, place, tools, template_kwargs)
        if which == "last":
            prompt = chat(messages[:-1], generation_prompt=True)
            if not text.startswith(prompt):
                raise UserError(_not_a_prefix(place, len(messages) - 1))
            start = _common_length(ids, chat(messages[:-1], generation_prompt=True, tokenize=True))
            mask[:start] = [0] * start
        return ids, mask, left_out

    spans = []  # characters [start, end) of the turns to supervise
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or (which == "last" and i < len(messages) - 1):
            continue
        if i == 0:
            left_out[NO_PROMPT] = left_out.get(NO_PROMPT, 0) + 1
            continue
        prompt = chat(messages[:i], generation_prompt=True)
        through = text if i == len(messages) - 1 else chat(messages[: i + 1])
        if text.startswith(prompt) and text.startswith(through) and through.startswith(prompt):
            spans.append((len(prompt), len(through)))
        elif i == len(messages) - 1:
            raise UserError(_not_a_prefix(place, i))
        else:
            left_out[REWRITTEN] = left_out.get(REWRITTEN, 0) + 1
    return ids, _mask_of(tokenizer, text, ids, spans, place), left_out


def has_marks(tokenizer, tools=None) -> bool:
    """Whether the chat template marks what the assistant generates."""
    try:
        return bool(GENERATION_MARK.search(tokenizer.get_chat_template(tools=tools)))
    except ValueError:  # no template at all: `render` says so, naming the row
        return False


def render(tokenizer, messages: list[dict], place: str, generation_prompt: bool = False, tokenize: bool = False,
           tools: list | None = None, template_kwargs: dict | None = None):
    """The conversation through the chat template: text, or token ids with `tokenize`. UserError when it refuses."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{place}: the tokenizer has no chat template; give one (--chat-template FILE) or pre-tokenise")
    try:
        out = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=tokenize, **(template_kwargs or {})
        )
    except Exception as error:  # templates raise anything: TemplateError by raise_exception, TypeError on a missing key
        reason = " ".join((str(error).strip() or type(error).__name__).split())
        roles = [message["role"] for message in messages]
        raise UserError(f"{place}: the chat template refuses this conversation (roles {roles}): {reason}") from error
    if not tokenize:
        return out
    ids = out if isinstance(out, list) else out["input_ids"]  # a remote-code tokenizer may return either
    return list(ids[0] if ids and isinstance(ids[0], list) else ids)


def _mask_from_marks(tokenizer, messages, text, ids, place, tools, template_kwargs) -> list[int]:
    kwargs = template_kwargs or {}
    if tokenizer.is_fast:
        out = tokenizer.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **kwargs
        )
        mask = list(out["assistant_masks"])
        starts = [t for t in range(len(mask)) if mask[t] and not (t and mask[t - 1])]
        ends = [t + 1 for t in range(len(mask)) if mask[t] and not (t + 1 < len(mask) and mask[t + 1])]
        return _mask_of_tokens(tokenizer, ids, zip(starts, ends, strict=True))
    from transformers.utils.chat_template_utils import render_jinja_template  # a Python tokenizer knows no offsets

    (marked,), (spans,) = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=tokenizer.get_chat_template(tools=tools),
        return_assistant_tokens_mask=True, **{**tokenizer.special_tokens_map, **kwargs},
    )  # fmt: skip
    if marked != text:
        raise UserError(f"{place}: the tokenizer's own code changes what its template renders, so the template's "
                        "generation marks cannot be used; give a template without them (--chat-template FILE)")
    return _mask_of(tokenizer, text, ids, spans, place)


def _mask_of(tokenizer, text: str, ids: list[int], spans: list[tuple[int, int]], place: str) -> list[int]:
    cuts = sorted({cut for span in spans for cut in span})
    position = dict(zip(cuts, token_positions(tokenizer, text, ids, cuts, place), strict=True))
    return _mask_of_tokens(tokenizer, ids, [(position[start], position[end]) for start, end in spans])


def _mask_of_tokens(tokenizer, ids: list[int], spans) -> list[int]:
    mask = [0] * len(ids)
    for start, end in spans:
        end = turn_end(tokenizer, ids, start, end)
        mask[start:end] = [1] * (end - start)
    return mask


def token_positions(tokenizer, text: str, ids: list[int], cuts: list[int], place: str) -> list[int]:
    """For each character position in `cuts` (sorted): how many of `ids` (the tokens of `text`) lie before it.

    Raises UserError when the tokens before a cut change with what comes after it: then a model that answers the text
    before the cut does not see the tokens of `ids`.
    """
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    encoded = [_encode(tokenizer, piece) for piece in pieces]  # one pass over the text, if the pieces fit together
    if [token for piece in encoded for token in piece] == ids:
        lengths = [len(piece) for piece in encoded[:-1]]
        return [sum(lengths[: i + 1]) for i in range(len(lengths))]
    positions = []  # some tokenizers put a mark at the start of every text: then each prefix by itself
    for cut in cuts:
        prefix = _encode(tokenizer, text[:cut])
        if ids[: len(prefix)] != prefix:
            raise UserError(
                f"{place}: the tokens before {text[cut : cut + 20]!r} change with what follows, so the assistant's "
                "part cannot be told from its prompt; use a template with {% generation %} marks or pre-tokenise"
            )
        positions.append(len(prefix))
    return positions


def turn_end(tokenizer, ids: list[int], start: int, end: int) -> int:
    """Where the supervised part of a turn that was rendered as `ids[start:end]` ends: just after its end-of-turn token.

    What the template writes behind that token (a newline, mostly) is not the model's. A marked span that stops short
    of the end-of-sequence token takes it in.
    """
    if start < end < len(ids) and ids[end] == tokenizer.eos_token_id and ids[end - 1] != tokenizer.eos_token_id:
        return end + 1
    special = special_ids(tokenizer)
    last = end - 1
    while last >= start and ids[last] not in special:
        last -= 1
    if last >= start and not tokenizer.decode(ids[last + 1 : end]).strip():
        return last + 1
    return end


@functools.lru_cache(maxsize=8)
def special_ids(tokenizer) -> frozenset[int]:
    """Ids of the control tokens (computed once: some remote-code tokenizers take milliseconds for it)."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if getattr(token, "special", False)}


def _encode(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _common_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _not_a_prefix(place: str, turn: int) -> str:
    return (f"{place}, message {turn}: the prompt for this assistant turn is not a prefix of the conversation as the "
            "chat template renders it, so the assistant's part cannot be found; give a template with {% generation %} "
            "marks (--chat-template FILE), other template arguments (such as enable_thinking), or pre-tokenised rows")
