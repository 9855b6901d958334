"""Rows in, token ids and loss mask out: one `TokenizedRow` a row, everything that is left out counted by reason.

    tokenizer = load_tokenizer("build/SmolLM2-135M-Instruct")
    result = tokenize_rows(load_rows("chats.jsonl"), tokenizer, max_length=2048)
    result.rows, result.skipped, result.remarks

extract.py calls it before the engine starts. Large sets are spread over processes; the order never changes.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from common.conversations import Row, hash_of
from common.errors import OWN_CODE, UserError
from common.loss_mask import supervise as supervise_chat

SUPERVISE = ("all", "last", "each")
OVER_LENGTH = ("truncate", "skip")
WORKERS_FROM_ROWS = 2000  # below this, starting processes costs more than it saves
CHUNK_ROWS = 64

NO_ASSISTANT = "no assistant turn"
NOTHING_SUPERVISED = "nothing supervised"
NO_TOKENS = "no tokens"
CUT_AWAY = "nothing supervised within the maximum length"
TOO_LONG = "longer than the maximum length"
ONLY_PROMPTS = "prompts without answers (use --regenerate)"
TRUNCATED = "rows truncated to the maximum length"


@dataclass(frozen=True)
class TokenizedRow:
    """input_ids: int32 [L].  loss_mask: uint8 [L], 1 where the token is supervised.  The rest as in `Row`."""

    index: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    row_hash: str
    source: str
    category: str | None
    place: str


@dataclass
class Tokenized:
    """rows: in the order of the source.  skipped: rows left out, by reason.  remarks: what else was changed, counted.
    skipped_rows: (index, reason) of each row left out."""

    rows: list[TokenizedRow] = field(default_factory=list)
    skipped: Counter = field(default_factory=Counter)
    remarks: Counter = field(default_factory=Counter)
    skipped_rows: list[tuple[int, str]] = field(default_factory=list)


def load_tokenizer(model: str, trust_remote_code: bool = False, revision: str | None = None,
                   chat_template: str | Path | None = None):
    """The tokenizer of `model` (folder or hub id); `chat_template` names a Jinja file that replaces its own.

    Code that `model` brings along runs only with trust_remote_code. A tokenizer that consists of such code is refused
    without, and is that code with it: for model types it knows, transformers would without a word make another
    tokenizer out of the same files.
    """
    from transformers import AutoTokenizer
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        code = own_code(model, revision)
        if code and not trust_remote_code:
            raise UserError(f"{model}: its tokenizer cannot be loaded: {OWN_CODE}")
        kind = get_class_from_dynamic_module(code, model, revision=revision) if code else AutoTokenizer
        tokenizer = kind.from_pretrained(model, trust_remote_code=trust_remote_code, revision=revision)
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if not trust_remote_code and "custom code" in str(error):
            reason = OWN_CODE
        raise UserError(f"{model}: its tokenizer cannot be loaded: {reason}") from error
    # Rows that are too long are counted or refused by name; transformers would speak of indexing errors.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or f"not UTF-8: {error}"
            raise UserError(f"{chat_template}: the chat template cannot be read ({reason})") from None
    return tokenizer


def own_code(model: str, revision: str | None) -> str | None:
    """The class, as "module.Class", of a tokenizer that exists only as Python code in the folder of `model`."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.utils import cached_file

    named = get_tokenizer_config(model, revision=revision).get("auto_map") or {}
    slow, fast = [*(named if isinstance(named, list) else named.get("AutoTokenizer") or [None]), None][:2]
    missing_is_none = {f"_raise_exceptions_for_{what}": False
                       for what in ("missing_entries", "gated_repo", "connection_errors")}  # fmt: skip
    if (slow or fast) and cached_file(model, "tokenizer.json", revision=revision, **missing_is_none) is None:
        return fast or slow
    return None


def tokenizer_fingerprint(tokenizer) -> dict[str, str]:
    """{"tokenizer": hash, "chat_template": hash} (xxh3-128, hex) for dataset.json: equal means the same token ids."""
    if tokenizer.is_fast:
        core = json.loads(tokenizer.backend_tokenizer.to_str())
        core["truncation"] = core["padding"] = None  # settings of the last call, not of the tokenizer
    else:
        core = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return {"tokenizer": hash_of([core, special]), "chat_template": hash_of(tokenizer.chat_template)}


def tokenize_rows(rows: Iterable[Row], tokenizer, *, supervise: str = "all", max_length: int | None = None,
                  over_length: str = "truncate", context_length: int | None = None, vocab_size: int | None = None,
                  template_kwargs: dict | None = None, workers: int = 1,
                  worker_tokenizer: dict | None = None) -> Tokenized:
    """Tokenizes all rows, in order.

    supervise: "all" assistant turns, the "last" one, or "each": one sample per assistant turn, holding the conversation
    up to it, numbered anew (for templates that rewrite earlier turns).
    max_length: tokens; a longer row is cut at its end ("truncate") or left out ("skip"), by `over_length`.
    context_length: tokens that the model can take; a longer row is an error unless max_length deals with it.
    vocab_size: ids must lie below it.  template_kwargs: extra variables for the chat template.
    workers: processes, used from 2,000 rows on; they load their own tokenizer: worker_tokenizer holds the arguments of
    `load_tokenizer`.
    Raises UserError for the first bad row, and when no row is left.
    """
    for flag, value, all_ in (("supervise", supervise, SUPERVISE), ("over-length", over_length, OVER_LENGTH)):
        if value not in all_:
            raise UserError(f"--{flag} {value}: expected one of {', '.join(all_)}")
    if max_length is not None and max_length < 1:
        raise UserError(f"the maximum length must be at least 1 token, found {max_length}")
    if max_length is not None and context_length is not None and max_length > context_length:
        raise UserError(f"the maximum length, {max_length} tokens, exceeds the {context_length} that the model takes")
    rows = list(one_row_per_turn(rows) if supervise == "each" else rows)
    one = functools.partial(
        tokenize_row, supervise="last" if supervise == "each" else supervise, max_length=max_length,
        over_length=over_length, context_length=context_length, vocab_size=vocab_size, template_kwargs=template_kwargs,
    )  # fmt: skip
    chunks = [rows[i : i + CHUNK_ROWS] for i in range(0, len(rows), CHUNK_ROWS)]
    result = Tokenized()

    def take(chunk, outcomes):
        for row, (tokenized, reason, remarks) in zip(chunk, outcomes, strict=True):
            result.remarks.update(remarks)
            if tokenized is None:
                result.skipped[reason] += 1
                result.skipped_rows.append((row.index, reason))
            else:
                result.rows.append(tokenized)

    if workers > 1 and worker_tokenizer is not None and len(rows) >= WORKERS_FROM_ROWS:
        context = multiprocessing.get_context("spawn")  # fork would copy held locks of tokenizer and progress threads
        with context.Pool(min(workers, len(chunks)), _start_worker, (worker_tokenizer, one)) as pool:
            for chunk, outcomes in zip(chunks, pool.imap(_work, chunks), strict=True):
                take(chunk, outcomes)
    else:
        for chunk in chunks:
            take(chunk, [one(row, tokenizer) for row in chunk])
    if not result.rows:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in result.skipped.items()) or "there are no rows"
        raise UserError(f"no row is left to work on: {reasons}")
    return result


def tokenize_row(row: Row, tokenizer, *, supervise: str = "all", max_length: int | None = None,
                 over_length: str = "truncate", context_length: int | None = None, vocab_size: int | None = None,
                 template_kwargs: dict | None = None) -> tuple[TokenizedRow | None, str | None, dict[str, int]]:
    """(row, None, remarks), or (None, the reason why it is skipped, remarks). Arguments as in `tokenize_rows`.

    Messages after the last assistant turn are left away: no supervised token can depend on them.
    """
    remarks: dict[str, int] = {}
    if row.input_ids is not None:
        ids, mask = list(row.input_ids), list(row.loss_mask)
        if supervise == "last":
            mask = _last_run(mask)
    elif row.turns is not None:
        return None, ONLY_PROMPTS, remarks
    else:
        messages = _through_last_assistant(row.messages)
        if not messages:
            return None, NO_ASSISTANT, remarks
        ids, mask, left_out = supervise_chat(tokenizer, messages, row.place, supervise, row.tools, template_kwargs)
        remarks.update(left_out)
    if not ids:
        return None, NO_TOKENS, remarks
    if vocab_size is not None and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(t for t, id in enumerate(ids) if not 0 <= id < vocab_size)
        raise UserError(f"{row.place}: token id {ids[bad]} at position {bad} is outside the model's vocabulary of "
                        f"{vocab_size}; the row was made with another tokenizer, or the tokenizer is of another model")
    if not any(mask):
        return None, NOTHING_SUPERVISED, remarks
    if max_length is not None and len(ids) > max_length:
        if over_length == "skip":
            return None, TOO_LONG, remarks
        ids, mask = ids[:max_length], mask[:max_length]
        if not any(mask):
            return None, CUT_AWAY, remarks
        remarks[TRUNCATED] = 1
    if context_length is not None and len(ids) > context_length:
        raise UserError(f"{row.place}: {len(ids)} tokens, but the model takes {context_length}; set --max-length to "
                        f"{context_length} or less (longer rows are then cut or skipped, and counted)")
    return TokenizedRow(row.index, np.asarray(ids, np.int32), np.asarray(mask, np.uint8), row.row_hash, row.source,
                        row.category, row.place), None, remarks  # fmt: skip


def one_row_per_turn(rows: Iterable[Row]) -> Iterable[Row]:
    """Each chat as one row per assistant turn that has something before it, holding the messages up to it.

    Rows are numbered anew, in order; row_hash stays that of the whole conversation, so that a held-out split by
    conversation keeps its turns together. Other kinds of rows pass unchanged but for the number.
    """
    index = 0
    for row in rows:
        ends = [i + 1 for i, message in enumerate(row.messages or []) if message["role"] == "assistant" and i > 0]
        for end in ends:
            yield replace(row, index=index, messages=row.messages[:end], place=f"{row.place} (message {end - 1})")
            index += 1
        if not ends:
            yield replace(row, index=index)
            index += 1


def _through_last_assistant(messages: list[dict]) -> list[dict]:
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: ends[-1]] if ends else []


def _last_run(mask: list[int]) -> list[int]:
    """Only the last unbroken run of ones."""
    end = len(mask) - next((i for i, value in enumerate(reversed(mask)) if value), len(mask))
    start = end
    while start > 0 and mask[start - 1]:
        start -= 1
    return [0] * start + mask[start:end] + [0] * (len(mask) - end)


_worker: tuple = ()


def _start_worker(tokenizer_arguments: dict, one: Callable) -> None:
    global _worker
    _worker = (load_tokenizer(**tokenizer_arguments), one)


def _work(chunk: list[Row]) -> list:
    tokenizer, one = _worker
    return [one(row, tokenizer) for row in chunk]
